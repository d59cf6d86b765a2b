"""The one error that a user is meant to read, and what checks before it ask."""

from __future__ import annotations

from numbers import Integral, Real

_LONGEST = 800  # letters of a message


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message is complete as it stands: what was wrong, which values are allowed, what to do. It is one line that can
    be printed, whatever the values in it are.
    """

    def __str__(self) -> str:
        text = "".join(letter if letter.isprintable() else " " for letter in super().__str__())
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


class NotFinite(InputError):
    """The model computed NaN or infinity, in one sample or in several generated together."""


def is_whole(value: object) -> bool:
    """A whole number, of Python or NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """A number, of Python or NumPy, that a float can hold."""
    try:
        return isinstance(value, Real) and isinstance(float(value), float)
    except OverflowError:
        return False
