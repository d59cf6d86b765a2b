"""Numbers as the command line takes them, and evenly spaced steps."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks.commandline import parse_indices
from sinks.errors import InputError
from sinks.runs import evenly_spaced


@pytest.mark.parametrize(
    ("text", "numbers"), [(None, None), ("3", [3]), ("0,3-5", [0, 3, 4, 5]), (" 7 , 1 ", [7, 1]), ("2-2", [2])]
)
def test_numbers_and_ranges(text: str | None, numbers: list[int] | None) -> None:
    assert parse_indices("layers", text) == numbers


@pytest.mark.parametrize("text", ["", "a", "1,,2", "-1", "3-1", "1-2-3", "1.5", "²", "1,1", "0-3,2"])
def test_what_is_no_number_or_range(text: str) -> None:
    with pytest.raises(InputError, match="layers '"):
        parse_indices("layers", text)


@given(count=st.integers(1, 40), steps=st.integers(1, 300))
def test_evenly_spaced_steps(count: int, steps: int) -> None:
    chosen = evenly_spaced(count, steps)
    assert len(chosen) == min(count, steps)
    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))
    assert count == 1 or chosen[-1] == steps - 1
    gaps = {b - a for a, b in pairwise(chosen)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_only_step_is_the_first() -> None:
    assert evenly_spaced(1, 64) == [0]
    assert evenly_spaced(3, 64) == [0, 32, 63]
