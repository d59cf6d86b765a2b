"""The one error that a user is meant to read, and what checks before it ask."""

from __future__ import annotations

from numbers import Integral, Real


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message is complete as it stands: what was wrong, which values are allowed, what to do.
    """


class NotFinite(InputError):
    """The model computed NaN or infinity, in one sample or in several generated together."""


def is_whole(value: object) -> bool:
    """A whole number, of Python or NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """A number, of Python or NumPy."""
    return isinstance(value, Real)
