"""The key positions of a sample as an axis of a picture: their labels, and what each token is at a denoising step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

from sinks.style import FILLING, token_label

Array = NDArray[Any]

PROMPT, FILLED, MASKED, NEW = range(4)
STATES = {"prompt": "#949494", "filled": "#56B4E9", "still masked": "#B4509B", "filled at this step": FILLING}
"""What a token is at a step, by the numbers above, with its colour."""


@dataclass(frozen=True)
class TextAxis:
    """The key positions of one sample.

    Args:
        labels: (S) the final tokens' raw texts, "" where there is none.
        prompt_length: how many of them are the prompt's.
        block_len: length of a block of the answer; None: there are no blocks (Dream, autoregressive).
        unmasked_at: (S,) the step at which a position is filled; -1: it is of the prompt, or never.
    """

    labels: Sequence[str]
    prompt_length: int
    block_len: int | None
    unmasked_at: Array

    def __len__(self) -> int:
        return len(self.labels)

    def masked(self, step: int) -> Array:
        """bool (S,): masked in the input of that step."""
        later = (self.unmasked_at >= step) | (self.unmasked_at < 0)
        return later & (np.arange(len(self)) >= self.prompt_length)

    def states(self, masked: Array, new: Array | None = None) -> Array:
        """(S,) PROMPT, FILLED, MASKED or NEW."""
        states = np.where(np.arange(len(self)) < self.prompt_length, PROMPT, FILLED)
        states = np.where(masked, MASKED, states)
        return states if new is None else np.where(new, NEW, states)

    def borders(self, inches: float) -> list[int]:
        """Where the prompt ends and each further block begins; only the former if they would stand too close."""
        borders = list(range(self.prompt_length, len(self), self.block_len or max(len(self), 1)))
        return borders if len(borders) <= inches / 0.12 else borders[:1]

    def label(self, position: int, masked: bool = False) -> str:
        """Position and token as on an axis."""
        return f"{position}: {'[MASK]' if masked else token_label(self.labels[position])}"


def paint_states(states: Array) -> Array:
    """uint8 (..., 3)."""
    colours = np.array([to_rgb(colour) for colour in STATES.values()])
    return np.round(255 * colours[states.astype(int)]).astype(np.uint8)
