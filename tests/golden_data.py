"""What the official code returns for tiny checkpoints (tests/golden), and the models that must return the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import sinks
from sinks.models import LanguageModel
from sinks.noise import Noise

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ("llada", "dream", "mmada")
PATHS = ("reference", "chunked")

# The configurations name no ids; these are those that the data were made with.
IDS: dict[str, dict[str, Any]] = {
    "llada": {"mask_token_id": 310, "eos_token_id": 300, "eot_token_id": 301},
    "dream": {"mask_token_id": 311},
    "mmada": {"mask_token_id": 310, "eos_token_id": 300},
    "autoregressive": {},
}


@cache
def notes(folder: str) -> dict[str, Any]:
    """Arguments, seeds and scalars of every case."""
    loaded: dict[str, Any] = json.loads((GOLDEN / folder / "expected.json").read_text(encoding="utf-8"))
    return loaded


@cache
def _tensors(folder: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / folder / "expected.safetensors")


def case(folder: str, name: str = "") -> dict[str, Tensor]:
    """The tensors whose names start with ``name/`` (all of them without one), by the rest of their names."""
    start = f"{name}/" if name else ""
    return {key.removeprefix(start): value for key, value in _tensors(folder).items() if key.startswith(start)}


@cache
def model(folder: str, attention: str = "chunked") -> LanguageModel:
    return sinks.load(str(GOLDEN / folder), device="cpu", attention=attention, **IDS[folder])


@contextmanager
def head_rows(lm: LanguageModel, rows: dict[int, Tensor]) -> Iterator[None]:
    """Other rows of the output matrix, for as long as it takes."""
    head = lm.model.get_output_embeddings().weight.data
    before = head.clone()
    try:
        for index, row in rows.items():
            head[index] = row
        yield
    finally:
        head.copy_(before)


class RecordedNoise(Noise):
    """The numbers that the official code drew.

    positions: (T, B, S), or, for Dream, one number per masked position of ``states``; tokens: (T, B, S, V) or None.
    """

    def __init__(self, positions: Tensor | None, tokens: Tensor | None, states: Tensor, mask_id: int | None) -> None:
        super().__init__(0, torch.arange(states.shape[1]))
        self.positions, self.tokens, self.states, self.mask_id = positions, tokens, states, mask_id

    def over_positions(self, stream: int, step: int | Tensor, positions: Tensor) -> Tensor:
        assert self.positions is not None
        drawn = self.positions[step].double()
        if self.mask_id is None:
            return drawn.gather(1, positions)
        masked = self.states[step] == self.mask_id
        return torch.ones(masked.shape, dtype=torch.float64).masked_scatter(masked, drawn[: int(masked.sum())])

    def over_tokens(self, step: int | Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        assert self.tokens is not None
        drawn = self.tokens[step].double()
        return drawn.gather(1, positions[..., None].expand(-1, -1, vocab_size))
