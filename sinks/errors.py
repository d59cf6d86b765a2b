"""The one error that a user is meant to read, and what checks before it ask."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
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
