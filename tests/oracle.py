"""Random small models and generations, and the rule of detection a second time, key by key, from its description."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import CAUSAL, MASK, ragged, tiny
from torch import Tensor

import sinks
from sinks.masking import SinkMasking
from sinks.models import LanguageModel
from sinks.samplers import Generation

KINDS = ("llada", "mmada", "dream", "ar")
REMASKING = {
    "llada": ["low_confidence", "random"],
    "mmada": ["low_confidence", "random"],
    "dream": ["entropy", "maskgit_plus", "topk_margin", "origin"],
    "ar": ["next_token"],
}
LAST_DIGITS = 1e-9  # closer to the line than this, but not on it: either answer is right


def explored(few: int, many: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.long)])


def explore(check: Callable[..., None], examples: int, **strategies: st.SearchStrategy[Any]) -> None:
    """Call ``check`` with that many cases, the same at every run."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    rules = settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=slow)
    rules(given(**strategies)(check))()


@dataclass(frozen=True)
class Model:
    """The shape of a random model; ``load`` keeps the last of them."""

    kind: str
    layers: int
    key_heads: int
    groups: int
    dim: int
    seed: int = 0
    dtype: str = "float32"

    @property
    def heads(self) -> int:
        return self.key_heads * self.groups

    def load(self) -> LanguageModel:
        return _loaded(self)


@lru_cache(maxsize=32)
def _loaded(model: Model) -> LanguageModel:
    hidden = model.heads * model.dim
    if model.kind in CAUSAL:
        options = {"num_hidden_layers": model.layers, "num_attention_heads": model.heads, "hidden_size": hidden}
        options |= {"num_key_value_heads": model.key_heads}
    else:
        options = {"layers": model.layers, "heads": model.heads, "key_heads": model.key_heads, "hidden": hidden}
        options |= {"seed": model.seed}
    lm: LanguageModel = tiny.__wrapped__(model.kind, "chunked", model.dtype, **options)  # too many to keep
    return lm


def models(*dtypes: str) -> st.SearchStrategy[Model]:
    """Heads that share keys or do not, never as many as layers."""
    sizes = {name: st.integers(1, 3) for name in ("layers", "key_heads", "groups", "seed")}
    made = st.builds(
        Model, kind=st.sampled_from(KINDS), dim=st.sampled_from([4, 6, 16]), dtype=st.sampled_from(dtypes), **sizes
    )
    return made.filter(lambda model: model.layers != model.heads)


@dataclass(frozen=True)
class Case:
    """A generation: a model, prompts side by side, what each row is, and all options."""

    model: Model
    lengths: list[int]
    seed: int
    items: list[int]
    holes: bool  # whether prompts hold mask tokens, too
    options: dict[str, Any]

    @property
    def prompts(self) -> tuple[Tensor, Tensor]:
        ids, mask = ragged(self.lengths, self.seed)
        chance = torch.rand(ids.shape, generator=torch.Generator().manual_seed(self.seed))
        return (ids.masked_fill((chance < 0.25) & mask.bool(), MASK) if self.holes else ids), mask

    def run(self, rows: list[int] | None = None, lm: LanguageModel | None = None, **more: Any) -> Generation:
        """All rows, or some of them in that order and only as padded as these need."""
        ids, mask = self.prompts
        rows = list(range(len(ids))) if rows is None else rows
        longest = max(self.lengths[row] for row in rows)
        ids, mask = ids[rows, -longest:], mask[rows, -longest:]
        items = [self.items[row] for row in rows]
        return sinks.generate(lm or self.model.load(), ids, mask, items=items, **self.options | more)


@st.composite
def cases(
    draw: st.DrawFn, *dtypes: str, controls: tuple[str, ...] = ("sinks", "random", "bottom"), fewest: int = 1
) -> Case:
    """Generations with and without masking, guidance, chance and prompts that hold mask tokens."""
    model = draw(models(*dtypes))
    rows, block, blocks = draw(st.integers(fewest, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    options: dict[str, Any] = {"gen_len": block * blocks, "seed": draw(st.integers(0, 99))}
    options["temperature"] = draw(st.sampled_from([0.0, 1.0, 0.4]))
    options["remasking"] = draw(st.sampled_from(REMASKING[model.kind]))
    if model.kind in ("llada", "mmada"):
        options |= {"block_len": block, "steps": blocks * draw(st.integers(1, block + 1))}
        options["cfg_scale"] = draw(st.sampled_from([0.0, 0.8]))
    elif model.kind == "dream":
        options |= {"steps": draw(st.integers(1, block * blocks + 1)), "alg_temp": draw(st.sampled_from([None, 0.5]))}
    options["masking"] = draw(st.none() | maskings(model, controls) | maskings(model, controls))
    return Case(
        model,
        draw(st.lists(st.integers(1, 6), min_size=rows, max_size=rows, unique=fewest > 1)),
        draw(st.integers(0, 999)),
        draw(st.lists(st.integers(0, 10**6), min_size=rows, max_size=rows, unique=True)),
        model.kind != "ar" and draw(st.booleans()),
        options,
    )


def maskings(model: Model, controls: tuple[str, ...]) -> st.SearchStrategy[SinkMasking]:
    return st.builds(
        SinkMasking,
        epsilon=st.sampled_from([0.0, 0.0, 0.5, 2.0]),
        top_k=st.sampled_from([1, 2, None]),
        mask_sink_ratio=st.sampled_from([1.0, 0.5]),
        exclude_self=st.booleans(),
        scope=st.sampled_from(["head", "layer", "model"]),
        measure=st.sampled_from(["unblocked", "blocked"]),
        layers=st.none() | st.just([model.layers - 1]),
        steps=st.sampled_from([None, None, (2, 3)]),
        control=st.sampled_from(controls),
        path=st.sampled_from(["scores", "values"]),
    )


def captures(model: Model) -> st.SearchStrategy[sinks.Capture]:
    def some(count: int) -> st.SearchStrategy[list[int] | None]:
        return st.none() | st.lists(st.integers(0, count - 1), min_size=1, unique=True)

    return st.builds(
        sinks.Capture,
        layers=some(model.layers),
        heads=some(model.heads),
        steps=some(4),
        patterns=st.sampled_from(["none", "mean", "full"]),
        value_norm=st.booleans(),
        exclude_self=st.booleans(),
    )


def sinks_of(row: list[float], keys: list[bool], epsilon: float) -> list[bool | None]:
    """Which keys receive more than the mean of the other keys plus epsilon; None where it hangs on the last digits."""
    found: list[bool | None] = []
    for j, c in enumerate(row):
        others = [row[k] for k in range(len(row)) if keys[k] and k != j]
        if not keys[j] or not others:
            found.append(False)
            continue
        margin = c - math.fsum(others) / len(others) - epsilon
        found.append(None if 0 < abs(margin) < LAST_DIGITS else margin > 0)
    return found


def strongest(row: list[float], candidates: list[bool], count: int) -> set[int]:
    """So many candidates, the largest first and of equals the first."""
    order = sorted((j for j in range(len(row)) if candidates[j]), key=lambda j: (-row[j], j))
    return set(order[:count])


def pooled(incoming: Tensor, scope: str) -> Tensor:
    """(L, B, H, S) float64: what each head is judged by."""
    axes = {"head": [], "layer": [2], "model": [0, 2]}[scope]
    values = incoming.double()
    return values.mean(axes, keepdim=True).expand(incoming.shape) if axes else values


def blocked_in_row(masking: SinkMasking, row: list[float], eligible: list[bool], most: int) -> set[int] | None:
    """The keys that ``control`` "sinks" or "bottom" takes from one row; None where that hangs on the last digits."""
    keys = [can and not math.isnan(c) for can, c in zip(eligible, row, strict=True)]
    found = sinks_of(row, keys, masking.epsilon)
    if None in found:
        return None
    count = math.ceil(sum(map(bool, found)) * masking.mask_sink_ratio)
    count = min(count, most, len(row) if masking.top_k is None else masking.top_k)
    if masking.control == "bottom":
        return strongest([-c for c in row], keys, count)
    return strongest(row, list(map(bool, found)), count)
