"""Pages in a headless Chromium, and everything that one of them complains about."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def launched() -> Iterator[Any]:
    """A browser; the test is skipped, with the reason, where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("needs chromium, chromium-browser or google-chrome on the PATH")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--headless"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, file: Path, before: str = "", **options: Any) -> Iterator[Any]:
    """A page of a file on the disk; fails when it logs a warning or an error, throws, or asks for anything else.

    Args:
        before: JavaScript that runs before the page's own.
        options: of playwright's ``new_page``; a laptop's window unless they say another.
    """
    page = browser.new_page(**{"viewport": {"width": 1280, "height": 720}} | options)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"thrown: {error}"))
    page.on("request", lambda request: complaints.append(f"request: {request.url[:99]}"))
    if before:
        page.add_init_script(before)
    page.goto(file.as_uri())
    yield page
    page.close()
    assert complaints == [f"request: {file.as_uri()[:99]}"]
