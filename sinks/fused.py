"""The path "fused": attention by cuDNN's kernels and our own where they serve, chunked elsewhere.

Importing this registers it. It works without triton and without a GPU; then everything is chunked.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sinks import kernels
from sinks.attention import PATHS, Ask, Measure, Observation, Visible, chunked


def fused(
    query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Visible, ask: Ask, layer: int
) -> tuple[Tensor, Observation]:
    """The path "fused"; arguments and results are those of :func:`sinks.attention.reference`.

    Unless a pattern is asked for, nothing waits for the GPU, so that a CUDA graph may capture it.
    """
    blocked = None if ask.blocked is None else ask.blocked[layer]
    taken = blocked if ask.path == "scores" else None
    way = way_of(query, key, value, visible, taken is not None)
    if way == "chunked":
        return chunked(query, key, value, scale, visible, ask, layer)
    mixed_key, mixed_value = key, value
    if blocked is not None and taken is None:
        mixed_key, mixed_value = _silenced(key, value, blocked)
    if way == "cudnn":
        output, lse = _cudnn(query, mixed_key, mixed_value, scale)
        lse_open = lse
    else:
        output, lse, lse_open = kernels.forward(
            query, mixed_key, mixed_value, scale, visible.keys, taken, visible.offset
        )
    seen = Observation()
    for measure in ask.measures:
        after = measure.after_blocking and taken is not None
        logs, hidden = (lse_open, taken) if after else (lse, None)
        seen.columns[measure] = _measured(query, key, logs, scale, visible, hidden, measure)
    if ask.wants_pattern(layer):
        patterns_only = replace(ask, measures=frozenset(), blocked=None)
        seen.pattern = chunked(query, key, value, scale, visible, patterns_only, layer)[1].pattern
    return output, seen


def way_of(query: Tensor, key: Tensor, value: Tensor, visible: Visible, taken: bool) -> str:
    """What computes the output: "cudnn", "triton" (:func:`sinks.kernels.forward`) or "chunked".

    One layer of LLaDA-8B's shape (32 heads of 128, bfloat16) takes these milliseconds on an H200, 2,048 positions:
    cuDNN 0.11, our forward 0.16 with blocked keys or padding, torch's FlashAttention-2 0.21, chunked 3.4.
    cuDNN leaves the log-sum-exp behind for nothing. With a mask it takes 0.18, and of a blocked key it then no longer
    knows what share it would have got. float32, heads wider than 128, causal masks and gradients, for which the column
    sums or our forward have no kernel, are chunked.

    It must not depend on what is recorded: watching changes no token. ``taken``: are keys blocked in the scores?
    """
    half = query.dtype in kernels.DTYPES and query.dtype == key.dtype == value.dtype
    dims = {query.shape[-1], key.shape[-1], value.shape[-1]}
    fits = len(dims) == 1 and max(dims) <= kernels.WIDEST_HEAD and max(dims) % 8 == 0
    full = visible.begin is None and visible.end is None
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if not (half and fits and full and kernels.run_on(query.device)) or learns:
        return "chunked"
    if visible.keys is None and not taken and _cudnn_takes(query, key, value):
        return "cudnn"
    return "triton"


def _cudnn_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    case = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, query.shape[1] != key.shape[1])
    return torch.backends.cuda.can_use_cudnn_attention(case)


def _cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, Q, H, D) and log-sum-exp (B, H, Q)."""
    compute = torch.ops.aten._scaled_dot_product_cudnn_attention
    output, lse = compute(query, key, value, None, True, 0.0, False, scale=scale)[:2]
    return output.transpose(1, 2).contiguous(), lse.view(query.shape[:3])


def _silenced(key: Tensor, value: Tensor, blocked: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of every query head, the values of its blocked keys zero."""
    groups = blocked.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return key, value.masked_fill(blocked[..., None], 0)


def _measured(
    query: Tensor, key: Tensor, lse: Tensor, scale: float, visible: Visible, blocked: Tensor | None, measure: Measure
) -> Tensor:
    offset = visible.offset
    if measure.last_query:
        query, lse, offset = query[:, :, -1:], lse[:, :, -1:], offset + query.shape[2] - 1
    return kernels.column_sums(query, key, lse, scale, visible.keys, blocked, offset, measure.exclude_self)


PATHS["fused"] = fused
