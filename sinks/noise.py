"""Random draws that belong to an item, a denoising step and a position, and to nothing else.

A draw is a hash of (seed, item, step, position, …). Whatever the batch, the order, the number of processes, the device
or the number of rows that happen to be computed, the same coordinates give the same number.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Constants of the splitmix64 generator (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014),
# as signed 64-bit integers because torch has no unsigned arithmetic.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64

# One stream per use, so that two uses at the same coordinates are independent.
CONFIDENCE, TOKENS, ORDER, KEYS = range(4)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def uniform(*coordinates: Tensor) -> Tensor:
    """Float64 numbers in the open interval (0, 1), one per broadcast coordinate (int64 tensors)."""
    state = torch.zeros((), dtype=torch.int64, device=coordinates[-1].device)
    for coordinate in coordinates:
        state = _mix(state + (coordinate.to(state.device) + 1) * _GAMMA)
    return (_shift_right(state, 11).to(torch.float64) + 0.5) * 2.0**-53


def gumbel(draws: Tensor) -> Tensor:
    """Standard Gumbel noise from uniform draws: the largest of logits + noise is a draw from their softmax."""
    return -torch.log(-torch.log(draws))


class Noise:
    """The draws of one generation.

    Args:
        seed: of the whole run.
        items: (B,) int64, what each row of the batch is (for instance its index in the data set).
    """

    def __init__(self, seed: int, items: Tensor) -> None:
        self.seed = torch.tensor(seed, dtype=torch.int64, device=items.device)
        self.items = items

    def _coordinate(self, value: int | Tensor) -> Tensor:
        """A step may be a tensor, () int64, so that recorded GPU work can be replayed with another."""
        return torch.full((), value, dtype=torch.int64, device=self.items.device) if isinstance(value, int) else value

    def over_positions(self, stream: int, step: int | Tensor, positions: Tensor) -> Tensor:
        """(B, S) float64 for positions (B, S) int64."""
        rows = self.items[:, None]
        return uniform(self.seed, self._coordinate(stream), rows, self._coordinate(step), positions)

    def over_tokens(self, step: int | Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        """(B, S, V) float64: one draw per position and vocabulary entry."""
        rows, stream = self.items[:, None, None], self._coordinate(TOKENS)
        vocabulary = torch.arange(vocab_size, device=self.items.device)
        return uniform(self.seed, stream, rows, self._coordinate(step), positions[..., None], vocabulary)

    def over_keys(self, step: int | Tensor, shape: tuple[int, int, int, int], positions: Tensor) -> Tensor:
        """(L, B, H, S) float64: one draw per layer, row, head and key position (B, S)."""
        device = self.items.device
        layers = torch.arange(shape[0], device=device)[:, None, None, None]
        heads = torch.arange(shape[2], device=device)[:, None]
        rows, stream = self.items[:, None, None], self._coordinate(KEYS)
        return uniform(self.seed, stream, rows, self._coordinate(step), layers, heads, positions[:, None, :])
