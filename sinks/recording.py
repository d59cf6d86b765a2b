"""What the attention function saw: one tensor over the layers, and ``sinks.record`` for a single forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sinks.attention import Ask, Measure, Observation
from sinks.errors import InputError
from sinks.models import LanguageModel


def stack(
    seen: dict[int, Observation],
    read: Callable[[Observation], Tensor | None],
    layers: Sequence[int] | None = None,
) -> Tensor:
    """One tensor (L, …) of what the layers showed, on the device of the first; InputError if they were not asked."""
    parts = [read(seen[layer]) for layer in (sorted(seen) if layers is None else layers)]
    found = [part for part in parts if part is not None]
    if not found or len(found) < len(parts):
        raise InputError("this was not recorded: ask for it when recording starts, then call the model")
    return torch.stack([part.to(found[0].device) for part in found])


def columns(seen: dict[int, Observation], measure: Measure, layers: Sequence[int] | None = None) -> Tensor:
    """(L, B, H, K) float32: the column sums that every layer took."""
    return stack(seen, lambda layer: layer.columns.get(measure), layers)


@dataclass
class Recording:
    """The last forward pass inside :func:`record`; tensors on the CPU, float32."""

    seen: dict[int, Observation]
    measure: Measure

    @property
    def incoming(self) -> Tensor:
        """(L, B, H, S): column sums of the pattern over the valid queries."""
        return columns(self.seen, self.measure).cpu()

    @property
    def patterns(self) -> Tensor:
        """(L, B, H, S, S): rows sum to 1; those of padding queries are zero."""
        return stack(self.seen, lambda layer: layer.pattern).cpu()

    @property
    def value_norm(self) -> Tensor:
        """(L, B, H, S): norm of the value vector that each query head reads."""
        return stack(self.seen, lambda layer: layer.value_norm).cpu()


@contextmanager
def record(
    lm: LanguageModel, patterns: bool = False, value_norm: bool = False, exclude_self: bool = False
) -> Iterator[Recording]:
    """Record the attention of a forward pass; the model is left as it was, also after an error.

    Example:
        >>> with sinks.record(lm) as rec:
        ...     lm.model(ids)
        >>> rec.incoming.shape  # (L, B, H, S)
    """
    measure = Measure(exclude_self=exclude_self)
    ask = Ask(frozenset({measure}), "full" if patterns else "none", None, value_norm)
    with lm.probe.asked(ask) as seen:
        yield Recording(seen, measure)
