"""Draws that belong to their coordinates: the right distribution, and the same whatever else is drawn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sinks import noise
from sinks.noise import Noise, uniform

INT64 = st.integers(-(2**63), 2**63 - 1)
WORD = 2**64 - 1


def splitmix(*coordinates: int) -> float:
    """The same hash in Python's integers: splitmix64's finalizer, chained over the coordinates."""
    state = 0
    for coordinate in coordinates:
        x = (state + (coordinate + 1) * 0x9E3779B97F4A7C15) & WORD
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
        state = x ^ (x >> 31)
    return ((state >> 11) + 0.5) * 2.0**-53


def draws(items: list[int], positions: int, seed: int = 0, step: int = 0, stream: int = noise.CONFIDENCE) -> Tensor:
    places = torch.arange(positions).expand(len(items), -1)
    return Noise(seed, torch.tensor(items)).over_positions(stream, step, places)


def test_the_first_output_of_the_published_generator() -> None:
    """splitmix64 from state 0 gives 16294208416658607535 first."""
    assert float(uniform(torch.tensor(0))) == ((16294208416658607535 >> 11) + 0.5) / 2**53


@given(coordinates=st.lists(INT64, min_size=1, max_size=6))
def test_every_number_is_the_hash_of_its_coordinates(coordinates: list[int]) -> None:
    drawn = uniform(*(torch.tensor(coordinate) for coordinate in coordinates))
    assert drawn.dtype == torch.float64
    assert float(drawn) == splitmix(*coordinates)
    assert 0 < float(drawn) < 1


def test_known_values_stay_what_they_are() -> None:
    """A run of today must be repeatable tomorrow."""
    drawn = draws([3], 3, seed=7, step=2)
    assert drawn.tolist() == [[splitmix(7, noise.CONFIDENCE, 3, 2, position) for position in range(3)]]
    tokens = Noise(7, torch.tensor([3])).over_tokens(2, torch.tensor([[0, 5]]), 2)
    assert tokens.tolist() == [[[splitmix(7, noise.TOKENS, 3, 2, place, v) for v in range(2)] for place in (0, 5)]]
    keys = Noise(7, torch.tensor([3])).over_keys(2, (2, 1, 3, 1), torch.tensor([[4]]))
    assert keys.shape == (2, 1, 3, 1)
    assert float(keys[1, 0, 2, 0]) == splitmix(7, noise.KEYS, 3, 2, 1, 2, 4)


def test_uniform_between_zero_and_one() -> None:
    drawn = draws(list(range(200)), 500).flatten()
    count = len(drawn)
    assert float(drawn.mean()) == pytest.approx(0.5, abs=4 * (1 / 12 / count) ** 0.5)
    assert float(drawn.var()) == pytest.approx(1 / 12, abs=4 * (1 / 180 / count) ** 0.5)
    steps = torch.arange(1, count + 1, dtype=torch.float64) / count
    distance = (drawn.sort().values - steps).abs().max()
    assert float(distance) < 1.95 / count**0.5  # Kolmogorov and Smirnov, at a level of 0.1 %
    assert len(drawn.unique()) == count


@pytest.mark.parametrize("axis", ["seed", "step", "stream", "item", "position"])
def test_neighbours_are_independent(axis: str) -> None:
    drawn, items = draws(list(range(100)), 100), list(range(100))
    other = {
        "seed": draws(items, 100, seed=1),
        "step": draws(items, 100, step=1),
        "stream": draws(items, 100, stream=noise.ORDER),
        "item": drawn.roll(1, 0),
        "position": drawn.roll(1, 1),
    }[axis]
    assert not torch.equal(drawn, other)
    correlation = torch.corrcoef(torch.stack([drawn.flatten(), other.flatten()]))[0, 1]
    assert abs(float(correlation)) < 0.04  # four standard deviations of 10,000 pairs
    assert float((drawn - other).abs().mean()) == pytest.approx(1 / 3, abs=0.01)


@given(items=st.lists(st.integers(0, 10**6), min_size=1, max_size=5), seed=st.integers(0, 2**63 - 1))
def test_a_row_does_not_know_its_batch(items: list[int], seed: int) -> None:
    together = draws(items, 6, seed=seed)
    for row, item in enumerate(items):
        assert torch.equal(together[row], draws([item], 6, seed=seed)[0])
        assert torch.equal(together[row, :4], draws([item], 4, seed=seed)[0])


def test_tokens_and_keys_do_not_know_the_rest_of_their_batch() -> None:
    both, one = Noise(1, torch.tensor([8, 9])), Noise(1, torch.tensor([9]))
    places = torch.tensor([[0, 1, 2], [0, 0, 1]])
    assert torch.equal(both.over_tokens(4, places, 11)[1:], one.over_tokens(4, places[1:], 11))
    everything = both.over_keys(4, (2, 2, 3, 3), places)
    assert torch.equal(everything[:, 1:], one.over_keys(4, (2, 1, 3, 3), places[1:]))
    assert len(everything[:, 0].unique()) == 2 * 3 * 3
