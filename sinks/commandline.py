"""What the command lines share: options are read, and errors said, in the same way everywhere."""

from __future__ import annotations

import argparse
import functools
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from sinks.errors import InputError


class Parser(argparse.ArgumentParser):
    """Shows a script's docstring as it is, takes no shortened options, and says what is wrong in one line."""

    def __init__(self, description: str | None, **options: Any) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists all options)")


def parse_indices(name: str, text: str | Sequence[int] | None) -> list[int] | None:
    """Layers or heads as a command line takes them: "0,3-5" (or "0;3-5") is [0, 3, 4, 5]; a list stays one."""
    if text is None or not isinstance(text, str):
        return None if text is None else list(text)
    found: list[int] = []
    seen = set[int]()
    for part in text.replace(";", ",").split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or not int(first) <= int(last or first) < 10**6:
            raise InputError(f"{name} {text[:40]!r} cannot be read; write numbers and ranges like 0,3-5")
        numbers = range(int(first), int(last or first) + 1)
        if not seen.isdisjoint(numbers):
            raise InputError(f"{name} {text!r} names one of them twice")
        seen.update(numbers)
        found += numbers
    return found


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around imports that need an optional part of the package: what is missing is said in one line, exit code 2."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        if name == "sinks":
            raise
        sys.stderr.write(f"error: {name} is not installed; pip install 'dlms-sinks[{extra}]'\n")
        raise SystemExit(2) from None


class Terminated(KeyboardInterrupt):
    """SIGTERM, as schedulers send it before a job's time is over; it ends a command in the way Ctrl-C does."""


def exits_cleanly(main: Callable[[], None]) -> Callable[[], None]:
    """Turn an :class:`InputError` into one line and exit code 2; Ctrl-C and SIGTERM into 130 and 143, as shells do."""

    @functools.wraps(main)
    def wrapper() -> None:
        try:
            with _hearing_sigterm():
                main()
        except InputError as error:
            sys.stderr.write(f"error: {error}\n")
            raise SystemExit(2) from None
        except KeyboardInterrupt as stop:
            raise SystemExit(143 if isinstance(stop, Terminated) else 130) from None

    return wrapper


@contextmanager
def _hearing_sigterm() -> Iterator[None]:
    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # launchers send it twice, and files are being closed
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
