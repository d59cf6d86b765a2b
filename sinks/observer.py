"""What a step of a generation is to record and to block, and what came of it.

The denoising loop and the autoregressive one differ in how they choose tokens; here is what they share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from sinks.attention import Ask, Capture, Measure, Observation
from sinks.errors import NotFinite
from sinks.masking import SinkMasking, blocked_keys, check_range, eligible_keys
from sinks.models import Spec
from sinks.noise import Noise
from sinks.recording import stack

_log = logging.getLogger(__name__)

Seen = dict[int, Observation]


@dataclass(frozen=True)
class Step:
    """What one step did; tensors on the model's device.

    tokens: (B, S) int64 after the step, -1 where nothing is written yet.
    confidence: (B, S) float, NaN where nothing could be placed.
    finite: () bool, False when what the model computed held NaN or infinity.
    incoming: (L', B, H', S) float32 before blocking, NaN where no key is yet; value_norm likewise.
    blocked: (L, B, H) int64, how many keys were blocked in this step.
    patterns: (L', B, H', Q, S), or (L', B, Q, S) for the mean over heads, on the CPU. Padding is included: 0 there.
    """

    index: int
    tokens: Tensor
    confidence: Tensor
    finite: Tensor
    incoming: Tensor | None = None
    blocked: Tensor | None = None
    value_norm: Tensor | None = None
    patterns: Tensor | None = None


def on_host(step: Step) -> tuple[Step, torch.cuda.Event | None]:
    """A copy of the step in host memory, on its way: complete when the event is, or at once without one.

    On CUDA it goes to pinned memory while the next step already runs.
    """
    named = {field.name: getattr(step, field.name) for field in fields(step)}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    moved: dict[str, Any] = {name: value.to("cpu", non_blocking=True) for name, value in tensors.items()}
    copied = replace(step, **moved)
    if not step.tokens.is_cuda:
        return copied, None
    event = torch.cuda.Event()
    event.record()
    return copied, event


def checked(steps: Iterable[Step], prompt: int) -> Iterator[Step]:
    """The same steps; NotFinite at the first with numbers that are none, with the layer and head where that began.

    ``prompt`` is how many positions the prompts take, padding included: keys that every query may see.
    """
    for step in steps:
        if not bool(step.finite):
            where = f"step {step.index}"
            if step.incoming is not None:
                broken = step.incoming[..., :prompt].isnan().any(-1).any(1).nonzero().tolist()
                layer_and_head = "layer {}, head {} of those captured".format(*broken[0]) if broken else "the logits"
                where += f", {layer_and_head}"
            raise NotFinite(
                f"the model computed NaN or infinity at {where}: its weights are broken, or {step.confidence.dtype} is "
                "too narrow; try --dtype float32"
            )
        yield step


class Observer:
    """Capture and sink masking of one generation.

    Args:
        capture, masking: what was asked for (None: nothing).
        valid: (B, S) bool of the prompts, where the rows are what is reported (guidance may add further ones).
        noise: draws of the random control.

    Raises:
        InputError: a layer or head that the model does not have.
    """

    def __init__(
        self, spec: Spec, capture: Capture | None, masking: SinkMasking | None, valid: Tensor, noise: Noise
    ) -> None:
        if masking is not None and spec.attention == "full":  # every query sees every key, and is computed anew
            masking = replace(masking, visibility="raw", rows="all")
        self.spec, self.capture, self.masking, self.noise = spec, capture, masking, noise
        self.batch = len(valid)
        for chosen in (capture, masking):
            if chosen is not None:
                check_range("layer", chosen.layers, spec.layers)
                check_range("head", chosen.heads, spec.heads)
        if masking is not None:
            most = int(valid.sum(-1).min()) - 1
            if masking.top_k is not None and masking.top_k > most:
                _log.warning("top_k %d would leave no key open: at most %d are blocked", masking.top_k, most)

    @property
    def kept(self) -> Measure | None:
        """The column sums that are reported."""
        return None if self.capture is None else Measure(exclude_self=self.capture.exclude_self)

    @property
    def judged(self) -> Measure | None:
        """The column sums that decide what is blocked."""
        return self.masking.judged if self.masking is not None and self.masking.acts else None

    @property
    def measures(self) -> frozenset[Measure]:
        return frozenset(measure for measure in (self.kept, self.judged) if measure is not None)

    def blocks_at(self, index: int) -> bool:
        return self.masking is not None and self.masking.acts_at(index)

    def keeps_pattern(self, index: int) -> bool:
        return self.capture is not None and self.capture.keeps_pattern(index)

    def blocked(
        self, step: int | Tensor, judged: Tensor | None, valid: Tensor, masked: Tensor, prompt: Tensor
    ) -> Tensor | None:
        """(L, B, H, S) bool from the column sums of the last step; only for a step that blocks."""
        if self.masking is None or judged is None:
            return None
        eligible = eligible_keys(self.masking, valid, masked, prompt)
        return blocked_keys(self.masking, judged, eligible, valid, step, self.noise)

    def ask(self, blocked: Tensor | None, pattern: bool) -> Ask:
        ask = Ask(self.measures, blocked=blocked, path=self.masking.path if self.masking else "scores")
        if self.capture is None:
            return ask
        layers = None if self.capture.layers is None else frozenset(self.capture.layers)
        patterns = self.capture.patterns if pattern else "none"
        return replace(ask, patterns=patterns, pattern_layers=layers, value_norm=self.capture.value_norm)

    def report(self, step: Step, seen: Seen, blocked: Tensor | None, pattern: bool) -> Step:
        """The step with everything that was recorded in it."""
        if self.masking is not None:
            shape = (self.spec.layers, self.batch, self.spec.heads)
            none = torch.zeros(shape, dtype=torch.int64, device=step.tokens.device)
            step = replace(step, blocked=none if blocked is None else blocked[:, : self.batch].sum(-1))
        if self.capture is None or self.kept is None:
            return step
        kept = self.kept
        step = replace(step, incoming=self._select(seen, lambda layer: layer.columns[kept]))
        if self.capture.value_norm:
            step = replace(step, value_norm=self._select(seen, lambda layer: layer.value_norm))
        if pattern:
            by_head = self.capture.patterns == "full"
            step = replace(step, patterns=self._select(seen, lambda layer: layer.pattern, by_head))
        return step

    def _select(self, seen: Seen, read: Callable[[Observation], Tensor | None], by_head: bool = True) -> Tensor:
        """Layers and heads that were asked for, reported rows only."""
        assert self.capture is not None
        everything = stack(seen, read, self.capture.layers)[:, : self.batch]
        if self.capture.heads is None or not by_head:
            return everything
        return torch.stack([everything[:, :, head] for head in self.capture.heads], 2)
