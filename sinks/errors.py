"""The one error that a user is meant to read, and what checks before it ask."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from numbers import Integral, Real


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message is complete as it stands: what was wrong, which values are allowed, what to do.
    """


def is_whole(value: object) -> bool:
    """A whole number, of Python or NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """A number, of Python or NumPy."""
    return isinstance(value, Real)


def parse_indices(name: str, text: str | Sequence[int] | None) -> list[int] | None:
    """Layers or heads as a command line takes them: "0,3-5" (or "0;3-5") is [0, 3, 4, 5]; a list stays one."""
    if text is None or not isinstance(text, str):
        return None if text is None else list(text)
    found: list[int] = []
    for part in text.replace(";", ",").split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or not int(first) <= int(last or first) < 10**6:
            raise InputError(f"{name} {text[:40]!r} cannot be read; write numbers and ranges like 0,3-5")
        found += range(int(first), int(last or first) + 1)
    if len(set(found)) < len(found):
        raise InputError(f"{name} {text!r} names one of them twice")
    return found


def exits_cleanly(main: Callable[[], None]) -> Callable[[], None]:
    """Turn an :class:`InputError` of a command line into a short message and exit code 2."""

    @functools.wraps(main)
    def wrapper() -> None:
        try:
            main()
        except InputError as error:
            sys.stderr.write(f"error: {error}\n")
            raise SystemExit(2) from None

    return wrapper
