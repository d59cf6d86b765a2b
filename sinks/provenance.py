"""Where a result comes from: versions, commit, command line, time."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("accelerate", "numpy", "safetensors", "torch", "transformers")


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """What a manifest says of the program that made it."""
    return {
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": list(command),
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("dlms-sinks", *_PACKAGES)},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that was never installed
        return None


def git_commit() -> str | None:
    """The commit of this package's own checkout, with "-dirty" when files were changed; None outside one."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        describe = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
