"""THE attention function: every model computes its attention here, and here it is recorded and blocked.

The function is registered with transformers under the name ``sinks``, together with a mask function of the same name.
It finds out what to record and what to block from the Probe of the module that calls it; there is no global state.
A further way to compute (a GPU kernel, say) is one more entry of ``PATHS`` with the signature of ``reference``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from sinks.errors import InputError, is_whole

NAME = "sinks"
PATTERNS = ("none", "mean", "full")
_CHUNK_BYTES = 32 * 2**20  # scores held at once by the chunked path
_OTHER_MATHEMATICS = ("softcap", "s_aux", "position_bias", "alibi")


def check_indices(name: str, chosen: Collection[int] | None) -> None:
    """InputError unless it is None or a collection of at least one index."""
    if chosen is None:
        return
    if not isinstance(chosen, Sequence | Set | range) or not chosen:
        raise InputError(f"{name}={chosen!r} must be a list of one or more indices, or None for all")
    if not all(is_whole(index) and index >= 0 for index in chosen):
        raise InputError(f"{name}={chosen!r} must hold whole numbers of 0 or more")


@dataclass(frozen=True)
class Capture:
    """What a generation keeps of its attention.

    Args:
        layers, heads: which to keep, in this order (None: all).
        steps: the denoising steps whose patterns are kept (None: all); incoming attention is kept at every step.
        patterns: "none", "mean" (over heads) or "full".
        value_norm: also keep the norm of every value vector; that of a sink is small.
        exclude_self: leave what a token gives itself out of its incoming attention.
    """

    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    steps: Collection[int] | None = None
    patterns: str = "none"
    value_norm: bool = False
    exclude_self: bool = False

    def __post_init__(self) -> None:
        if self.patterns not in PATTERNS:
            raise InputError(f"patterns={self.patterns!r} is unknown; use one of {', '.join(PATTERNS)}")
        for name in ("layers", "heads", "steps"):
            check_indices(f"Capture.{name}", getattr(self, name))

    def keeps_pattern(self, step: int) -> bool:
        return self.patterns != "none" and (self.steps is None or step in self.steps)


class Measure(NamedTuple):
    """One way to sum the columns of a pattern: before or after blocking, with or without what a token gives itself,
    over all queries of the pass or the last one alone."""

    after_blocking: bool = False
    exclude_self: bool = False
    last_query: bool = False


@dataclass(frozen=True)
class Ask:
    """What one forward pass is to record and to block.

    Args:
        measures: the column sums to take.
        patterns: "none", "mean" or "full", of the layers in ``pattern_layers`` (None: all).
        value_norm: whether to keep the norms of the values.
        blocked: (L, B, H, K) bool, keys that no query may use, or None.
        path: "scores" takes a blocked key away (minus infinity before the softmax), "values" zeroes its value.
    """

    measures: frozenset[Measure] = frozenset()
    patterns: str = "none"
    pattern_layers: frozenset[int] | None = None
    value_norm: bool = False
    blocked: Tensor | None = None
    path: str = "scores"

    def wants_pattern(self, layer: int) -> bool:
        return self.patterns != "none" and (self.pattern_layers is None or layer in self.pattern_layers)


@dataclass
class Observation:
    """What one layer showed: column sums (B, H, K) float32, pattern (B, H, Q, K) or its head mean (B, Q, K), norms."""

    columns: dict[Measure, Tensor] = field(default_factory=dict)
    pattern: Tensor | None = None
    value_norm: Tensor | None = None


@dataclass
class Probe:
    """What the attention modules of one model share: how to compute, what is asked, what was seen in each layer."""

    compute: str
    ask: Ask = field(default_factory=Ask)
    seen: dict[int, Observation] = field(default_factory=dict)

    def attach(self, model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.probe = self  # type: ignore[assignment]

    @contextmanager
    def asked(self, ask: Ask) -> Iterator[dict[int, Observation]]:
        """Observe the forward passes within; whatever was asked before is restored."""
        before = self.ask, self.seen
        self.ask, self.seen = ask, {}
        try:
            yield self.seen
        finally:
            self.ask, self.seen = before


class Visible(NamedTuple):
    """Which keys each query sees: an interval of positions, less the padding. A named tuple, so that accelerate moves
    its tensors between devices.

    keys: (B, K) bool, False = padding, or None; begin, end: (Q,) int64, query i sees the keys begin_i <= j < end_i
    (None: all); offset: position of the first query among the keys.
    """

    keys: Tensor | None
    begin: Tensor | None
    end: Tensor | None
    offset: int

    def mask(self, first: int, last: int, count: int, device: torch.device) -> Tensor | None:
        """(B or 1, 1, last - first, count) bool for the queries first…last-1; None when they see every key.

        A padding query sees nothing, so that its row of the pattern is zero.
        """
        seen = None
        positions = torch.arange(count, device=device)
        if self.end is not None:
            seen = positions < self.end[first:last, None]
        if self.begin is not None:
            late = positions >= self.begin[first:last, None]
            seen = late if seen is None else seen & late
        if self.keys is not None:
            queries = self.keys[:, self.offset + first : self.offset + last]
            real = self.keys[:, None, :] & queries[:, :, None]
            seen = real if seen is None else seen & real
        return seen if seen is None else seen.view(-1, 1, last - first, count)


def visible_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Visible:
    """The mask function beside the attention function: transformers calls it once per forward pass."""
    keys = None
    if attention_mask is not None:
        keys = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        keys = F.pad(keys, (0, kv_length - keys.shape[1]))
    queries = torch.arange(q_length, device=device) + q_offset
    if mask_function is bidirectional_mask_function:
        begin = end = None
    elif mask_function is causal_mask_function:
        begin, end = None, queries - kv_offset + 1
    else:
        positions = torch.arange(kv_length, device=device) + kv_offset
        begin, end = _intervals(mask_function, batch_size, queries, positions)
    return Visible(keys, begin, end, q_offset - kv_offset)


def _intervals(
    mask_function: Callable[..., Any], batch_size: int, queries: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Sliding windows, chunks: evaluate the rule once and read off where each query's keys begin and end."""
    rows = torch.arange(batch_size, device=queries.device)
    seen = mask_function(rows[:, None, None], 0, queries[:, None], positions)
    seen = seen.expand(batch_size, len(queries), len(positions))
    begin = seen[0].int().argmax(-1)
    end = begin + seen[0].sum(-1)
    columns = torch.arange(len(positions), device=queries.device)
    if not torch.equal(seen, ((columns >= begin[:, None]) & (columns < end[:, None])).expand_as(seen)):
        raise InputError(
            "this model's attention mask is not one interval of keys per query, which is all we can follow"
        )
    return begin, end


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers asks for it; see ``AttentionInterface``.

    Args:
        query: (B, H, Q, D) after rotary embedding; key, value: (B, H_kv, K, D), heads not repeated.
        attention_mask: what :func:`visible_keys` returned.

    Returns:
        (B, Q, H, D) in the dtype of ``value``, and None (patterns go to the Probe).
    """
    # float32 where the rotary embedding was (models.py); here a compiler can make one kernel of both.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return _observed(module, query, key, value, attention_mask, scaling, options), None


@torch.compiler.disable  # what a Probe asks for is Python's business
def _observed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | Tensor | None,
    scaling: float | None,
    options: dict[str, Any],
) -> Tensor:
    changed = [name for name in _OTHER_MATHEMATICS if options.get(name) is not None]
    if changed:
        raise InputError(f"this model's attention uses {changed[0]}, which this version does not compute")
    if isinstance(attention_mask, Tensor):
        raise InputError("give the attention mask as (batch, length) with 0 for padding; 4-D masks are not supported")
    visible = attention_mask or Visible(None, None, None, 0)
    probe: Probe = module.probe  # type: ignore[assignment]
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output, seen = PATHS[probe.compute](query, key, value, scale, visible, probe.ask, layer)
    if probe.ask.value_norm:
        seen.value_norm = value.float().norm(dim=-1).repeat_interleave(query.shape[1] // key.shape[1], 1)
    probe.seen[layer] = seen
    return output


def reference(
    query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Visible, ask: Ask, layer: int
) -> tuple[Tensor, Observation]:
    """The definition, written down: the whole pattern in float32."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query.float() @ key.transpose(-1, -2) * scale
    mask = visible.mask(0, query.shape[2], key.shape[2], query.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    tally = _Tally(ask, layer, rows_may_be_empty=mask is not None)
    weights = tally.add(scores, first=visible.offset)
    return (weights @ value).to(query.dtype).transpose(1, 2).contiguous(), tally.observation()


def chunked(
    query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Visible, ask: Ask, layer: int
) -> tuple[Tensor, Observation]:
    """The same a few queries at a time: memory O(K) per head beside the result, any device."""
    (batch, heads, queries, dim), (_, key_heads, keys, _) = query.shape, key.shape
    key, value = key.float().transpose(-1, -2) * scale, value.float()
    output = query.new_empty(batch, queries, heads, value.shape[-1])
    masked = visible.keys is not None or visible.begin is not None or visible.end is not None
    tally = _Tally(ask, layer, rows_may_be_empty=masked)
    rows = max(1, _CHUNK_BYTES // (4 * batch * heads * keys))
    for first in range(0, queries, rows):
        part = query[:, :, first : first + rows]
        last = first + part.shape[2]
        # Query heads that share a key head become further rows of one product, so that keys are never repeated.
        grouped = part.float().reshape(batch, key_heads, -1, dim)
        scores = (grouped @ key).view(batch, heads, last - first, keys)
        mask = visible.mask(first, last, keys, query.device)
        if mask is not None:
            scores = scores.masked_fill_(~mask, -torch.inf)
        weights = tally.add(scores, first=visible.offset + first)
        mixed = weights.view(batch, key_heads, -1, keys) @ value
        output[:, first:last] = mixed.view(batch, heads, last - first, -1).transpose(1, 2)
    return output, tally.observation()


PATHS = {"reference": reference, "chunked": chunked}


class _Tally:
    """Adds up what is asked of one layer while its scores go by, some rows at a time."""

    def __init__(self, ask: Ask, layer: int, rows_may_be_empty: bool) -> None:
        self.ask, self.keep_pattern = ask, ask.wants_pattern(layer)
        self.softmax = softmax if rows_may_be_empty else partial(torch.softmax, dim=-1)
        self.blocked = None if ask.blocked is None else ask.blocked[layer][:, :, None, :]
        self.columns: dict[Measure, Tensor] = {}
        self.rows: list[Tensor] = []

    def add(self, scores: Tensor, first: int) -> Tensor:
        """Take scores (B, H, q, K) of the queries at positions ``first``…; return the weights that mix the values."""
        pattern = self.softmax(scores)
        after = pattern
        if self.blocked is not None and self.ask.path == "scores":
            after = softmax(scores.masked_fill(self.blocked, -torch.inf))
        for measure in self.ask.measures:
            weights = (after if measure.after_blocking else pattern).detach()
            sums = _column_sums(weights, first if measure.exclude_self else None, measure.last_query)
            earlier = None if measure.last_query else self.columns.get(measure)
            self.columns[measure] = sums if earlier is None else earlier + sums
        if self.keep_pattern:
            rows = pattern if self.ask.patterns == "full" else pattern.mean(1)
            self.rows.append(rows.detach().to("cpu", non_blocking=True))  # into pinned memory, many times as fast
        return after if self.blocked is None or self.ask.path == "scores" else after.masked_fill(self.blocked, 0)

    def observation(self) -> Observation:
        if self.rows and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return Observation(self.columns, torch.cat(self.rows, dim=-2) if self.rows else None)


def softmax(scores: Tensor) -> Tensor:
    """Over keys; a row that sees no key becomes zeros instead of NaN (a NaN among the scores stays one)."""
    sees_none = scores.amax(-1, keepdim=True) == -torch.inf
    return scores.softmax(-1).masked_fill(sees_none, 0)


def _column_sums(weights: Tensor, first_query: int | None, last_query: bool) -> Tensor:
    """(B, H, K): sums over the queries, without each query's own key when the first query's position is given."""
    if first_query is not None:
        positions = torch.arange(weights.shape[-2], device=weights.device)[:, None] + first_query
        weights = weights.masked_fill(positions == torch.arange(weights.shape[-1], device=weights.device), 0)
    return weights[..., -1, :] if last_query else weights.sum(-2)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, visible_keys)
