"""Sink masking: from the incoming attention of the last denoising step to the keys that this one may not use.

The sinks found at step t - 1 get no attention at step t, in the layer and head where they were found. Everything here
is a pure function of tensors; the attention function does the blocking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sinks import detection
from sinks.attention import Measure, check_indices
from sinks.errors import InputError, is_real, is_whole
from sinks.noise import Noise

_CHOICES = {
    "scope": detection.SCOPES,
    "measure": ("unblocked", "blocked"),
    "visibility": detection.VISIBILITIES,
    "rows": ("all", "last"),
    "eligible": ("all", "prompt", "generated", "masked", "unmasked"),
    "control": ("sinks", "random", "bottom"),
    "path": ("scores", "values"),
}


@dataclass(frozen=True)
class SinkMasking:
    """Which keys lose their attention at every step but the first.

    Args:
        epsilon: threshold of :func:`sinks.detect`.
        top_k: at most so many keys per layer and head (None: no cap; 0: none).
        mask_sink_ratio: of the sinks found, the strongest share (rounded up) is taken before ``top_k``.
        exclude_self: leave a token's attention to itself out of what it receives.
        scope: judge per "head", on the mean over heads ("layer"), or over layers and heads ("model").
        measure: judge the attention before blocking ("unblocked"), so that a lasting sink stays blocked, or after it.
        visibility: "raw" or "per_query", see :func:`sinks.detect`; for causal models.
        rows: "all" queries so far or only the "last" one decide; for causal models (others have all anew each step).
        layers, heads: where to block (None: everywhere).
        steps: first and last step that block, inclusive, counted from 0 over the whole generation.
        eligible: "all" keys, or only those of the "prompt", "generated" (after it), "masked" or "unmasked".
        control: block the "sinks", or as many "random" other keys, or as many of the weakest ("bottom").
        path: "scores": the key is taken away; "values": it stays, but its value is zero.
        seed: of the random control.
    """

    epsilon: float = 0.0
    top_k: int | None = None
    mask_sink_ratio: float = 1.0
    exclude_self: bool = False
    scope: str = "head"
    measure: str = "unblocked"
    visibility: str = "raw"
    rows: str = "all"
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    steps: tuple[int, int] | None = None
    eligible: str = "all"
    control: str = "sinks"
    path: str = "scores"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(allowed)}")
        if not is_real(self.epsilon) or not 0 <= self.epsilon < float("inf"):
            raise InputError(f"epsilon={self.epsilon} of the sink masking must be a number of 0 or more")
        if self.top_k is not None and (not is_whole(self.top_k) or self.top_k < 0):
            raise InputError(f"top_k={self.top_k} must be a whole number of 0 or more, or None for no cap")
        if not is_real(self.mask_sink_ratio) or not 0 <= self.mask_sink_ratio <= 1:
            raise InputError(f"mask_sink_ratio={self.mask_sink_ratio} must lie between 0 and 1")
        for name in ("layers", "heads", "steps"):
            check_indices(f"SinkMasking.{name}", getattr(self, name))
        if self.steps is not None and (len(self.steps) != 2 or self.steps[0] > self.steps[1]):
            raise InputError(f"steps={self.steps} must be (first, last) with 0 <= first <= last")
        if not is_whole(self.seed) or not 0 <= self.seed < 2**63:
            raise InputError(f"seed={self.seed} must lie between 0 and 2^63 - 1")

    @property
    def judged(self) -> Measure:
        """The column sums that decide."""
        return Measure(self.measure == "blocked", self.exclude_self, self.rows == "last")

    @property
    def acts(self) -> bool:
        """Whether it can block anything at all."""
        return self.top_k != 0 and self.mask_sink_ratio > 0

    def acts_at(self, step: int) -> bool:
        return self.acts and step > 0 and (self.steps is None or self.steps[0] <= step <= self.steps[1])


FIELDS = tuple(field.name for field in fields(SinkMasking))


def check_range(what: str, chosen: Sequence[int] | None, count: int) -> None:
    """InputError for a layer or head out of range."""
    wrong = [index for index in chosen or () if not 0 <= index < count]
    if wrong:
        raise InputError(f"{what} {wrong[0]} is out of range: the model has {what}s 0 to {count - 1}")


def eligible_keys(masking: SinkMasking, valid: Tensor, masked: Tensor, prompt: Tensor) -> Tensor:
    """(B, S) bool: which keys may be blocked.

    Args:
        valid: (B, S) bool, False = padding. masked: (B, S) bool, holds a mask token at the step that blocks.
        prompt: (B, S) bool, belongs to the prompt.
    """
    allowed = {
        "all": valid,
        "prompt": prompt,
        "generated": ~prompt,
        "masked": masked,
        "unmasked": ~masked,
    }[masking.eligible]
    return valid & allowed


def blocked_keys(
    masking: SinkMasking, incoming: Tensor, eligible: Tensor, valid: Tensor, step: int | Tensor, noise: Noise
) -> Tensor:
    """The keys to block at ``step``.

    Args:
        incoming: (L, B, H, S) float32, the judged column sums of the step before.
        eligible, valid: (B, S) bool; at least one valid key always stays open.
        noise: draws for ``control="random"``.

    Returns:
        (L, B, H, S) bool.
    """
    layers, _, heads, _ = incoming.shape
    judged = detection.pool(incoming, masking.scope, layer_axis=0)
    keys = eligible[:, None, :].expand_as(judged)
    visibility = masking.visibility if masking.rows == "all" else "raw"  # one row sees all keys alike
    strength, keys = detection.normalize(judged, ~keys, visibility=visibility)
    sinks = detection.above(strength, keys, masking.epsilon)
    most = valid.sum(-1)[:, None, None] - 1
    count = torch.minimum(detection.budget(sinks, masking.mask_sink_ratio, masking.top_k), most)
    chosen = detection.select(strength, sinks, count, masking.top_k)
    if masking.control == "bottom":
        chosen = detection.select(-strength, keys, count, masking.top_k)
    elif masking.control == "random":
        positions = (valid.cumsum(-1) - 1).clamp_min(0)  # counted without padding, so that a row draws as if alone
        shape = (judged.shape[0], judged.shape[1], judged.shape[2], judged.shape[3])
        chosen = detection.select(noise.over_keys(step, shape, positions), keys & ~chosen, count, masking.top_k)
    return chosen & _where(masking, layers, heads, chosen.device)


def _where(masking: SinkMasking, layers: int, heads: int, device: torch.device) -> Tensor:
    """(L, 1, H, 1) bool: the layers and heads that block."""

    def chosen(indices: Sequence[int] | None, count: int) -> Tensor:
        if indices is None:
            return torch.ones(count, dtype=torch.bool, device=device)
        mask = torch.zeros(count, dtype=torch.bool, device=device)
        for index in indices:
            mask[index].fill_(True)  # a list of indices, or True as a tensor, would make the device wait for the host
        return mask

    return chosen(masking.layers, layers)[:, None, None, None] & chosen(masking.heads, heads)[None, None, :, None]
