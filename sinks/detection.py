"""From incoming attention to sinks: pure functions of arrays, NumPy or torch alike.

Incoming attention is ``c_j = sum_i A_ij``: what key position j receives from all queries, with mean 1 over the keys.
The last axis is always the key position; every axis in front of it is judged on its own. NaN marks a position that
does not exist yet (a sequence that grows) and is no key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import array_api_compat

from sinks.errors import InputError, is_real

Array = Any  # numpy.ndarray or torch.Tensor; array_api_compat makes the two speak alike

NORMALIZATIONS = ("sum", "mean")
VISIBILITIES = ("raw", "per_query")
SCOPES = ("head", "layer", "model")
_FEW = 16  # up to so many are searched one after the other
FEWEST_QUERIES = 8  # visibility="per_query" leaves out keys that fewer queries can see


def detect(
    incoming: Array,
    epsilon: float = 3.0,
    exclude: Array | None = None,
    normalization: str = "sum",
    visibility: str = "raw",
) -> Array:
    """Which tokens are attention sinks: ``c_j > (T - c_j) / (n - 1) + epsilon``.

    T is the total over the n keys; with n = T = S the rule reads ``c_j > 1 + epsilon (S - 1) / S``. Source: arXiv
    2510.15731, Eq. 3, whose 1/S in front of the sum is left out, because epsilon = 3 could never be passed with it.

    Args:
        incoming: (..., S) float, c_j summed over queries.
        epsilon: how far above the others' mean, in units of the normalised c_j; not negative.
        exclude: bool, broadcastable to ``incoming``; True = not a key, left out of n and T.
        normalization: "sum" judges c_j itself (mean 1); "mean" divides by the number of queries (mean 1/S).
        visibility: "raw", or "per_query" for causal models: c_j over the number of queries that can see j.

    Returns:
        bool, the shape of ``incoming``.

    Raises:
        InputError: an epsilon or a name that cannot be used, or infinite values.
    """
    _check(epsilon, normalization, visibility)
    xp = array_api_compat.array_namespace(incoming)
    if bool(xp.any(xp.isinf(incoming))):
        raise InputError("incoming attention holds infinite values; it is a sum of probabilities")
    return above(*normalize(incoming, exclude, normalization, visibility), epsilon)


def normalize(
    incoming: Array, exclude: Array | None = None, normalization: str = "sum", visibility: str = "raw"
) -> tuple[Array, Array]:
    """What :func:`detect` compares: (..., S) float64, and bool where a key is. No check, so that no GPU has to wait."""
    c, keys = _keys(incoming, exclude)
    xp = array_api_compat.array_namespace(c)
    if normalization == "mean":
        everything = xp.where(xp.isnan(c), xp.zeros_like(c), c)
        c = c / _positive(xp.sum(everything, axis=-1, keepdims=True))
    return _per_query(c, keys, incoming) if visibility == "per_query" else (c, keys)


def above(strength: Array, keys: Array, epsilon: float) -> Array:
    """bool: keys whose strength passes the mean of the other keys by more than epsilon."""
    xp = array_api_compat.array_namespace(strength)
    c = xp.where(keys, strength, xp.zeros_like(strength))
    n = _count(keys)
    others = (xp.sum(c, axis=-1, keepdims=True) - c) / _positive(n - 1)
    return keys & (n > 1) & (c > others + epsilon)


def select(strength: Array, candidates: Array, budget: Array, most: int | None = None) -> Array:
    """The ``budget`` strongest candidates of every row; ties go to the lower position.

    Args:
        strength: (..., S) float, finite where there is a candidate.
        candidates: (..., S) bool.
        budget: (..., 1) integer, how many to take.
        most: no budget is larger, if that is known: a few are found many times faster than all are sorted.

    Returns:
        bool (..., S).
    """
    xp = array_api_compat.array_namespace(strength)
    left = xp.where(candidates, strength, xp.full_like(strength, -math.inf))
    if most is not None and most <= _FEW:
        return _strongest_few(left, budget, most)
    order = xp.argsort(-left, axis=-1, stable=True)
    rank = xp.argsort(order, axis=-1, stable=True)
    return candidates & (rank < budget)


def _strongest_few(left: Array, budget: Array, most: int) -> Array:
    """One after the other; minus infinity is no candidate, or no more."""
    xp = array_api_compat.array_namespace(left)
    positions = xp.arange(left.shape[-1], device=array_api_compat.device(left))
    chosen = xp.zeros_like(left, dtype=xp.bool)
    for taken in range(most):
        best = xp.argmax(left, axis=-1, keepdims=True)  # the first of equals
        here = (positions == best) & (left > -math.inf) & (taken < budget)
        chosen = chosen | here
        left = xp.where(here, xp.full_like(left, -math.inf), left)
    return chosen


def budget(sinks: Array, mask_sink_ratio: float = 1.0, top_k: int | None = None) -> Array:
    """(..., 1) integer: the strongest share of the sinks, rounded up, and then at most ``top_k`` of them."""
    xp = array_api_compat.array_namespace(sinks)
    count = _count(sinks)
    if mask_sink_ratio < 1:
        share = xp.ceil(xp.astype(count, xp.float64) * mask_sink_ratio - 1e-9)  # 0.1 * 10 is 1, not 2
        count = xp.astype(share, count.dtype)
    return count if top_k is None else xp.clip(count, max=top_k)


def pool(incoming: Array, scope: str, layer_axis: int, head_axis: int = -2) -> Array:
    """Mean over heads (scope "layer"), over layers and heads ("model"), or as it is ("head"); axes are kept, size 1."""
    if scope not in SCOPES:
        raise InputError(f"scope {scope!r} is unknown; use one of {', '.join(SCOPES)}")
    axes = {"head": (), "layer": (head_axis,), "model": (layer_axis, head_axis)}[scope]
    xp = array_api_compat.array_namespace(incoming)
    return xp.mean(incoming, axis=axes, keepdims=True) if axes else incoming


def check_epsilon(epsilon: float, name: str = "epsilon") -> None:
    """Raises: InputError when a threshold is no number of 0 or more."""
    if not is_real(epsilon) or not 0 <= epsilon < math.inf:
        raise InputError(f"{name} is {epsilon}; it must be a number of 0 or more")


def _check(epsilon: float, normalization: str, visibility: str) -> None:
    check_epsilon(epsilon)
    if normalization not in NORMALIZATIONS:
        raise InputError(f"normalization {normalization!r} is unknown; use one of {', '.join(NORMALIZATIONS)}")
    if visibility not in VISIBILITIES:
        raise InputError(f"visibility {visibility!r} is unknown; use one of {', '.join(VISIBILITIES)}")
    if normalization == "mean" and epsilon >= 1:
        raise InputError(
            f"epsilon is {epsilon}, but with normalization='mean' no token can receive more than 1: "
            "use an epsilon below 1, or normalization='sum'"
        )


def _keys(incoming: Array, exclude: Array | None) -> tuple[Array, Array]:
    """Float64 values (a mean over 16-bit values needs more digits than they have) and which of them are keys."""
    xp = array_api_compat.array_namespace(incoming)
    c = xp.astype(incoming, xp.float64)
    keys = ~xp.isnan(c)
    if exclude is not None:
        keys = keys & ~xp.astype(xp.asarray(exclude, device=array_api_compat.device(c)), xp.bool)
    return c, keys


def _count(where: Array) -> Array:
    xp = array_api_compat.array_namespace(where)
    return xp.sum(xp.astype(where, xp.int64), axis=-1, keepdims=True)


def _positive(x: Array) -> Array:
    """A divisor: 1 where there is nothing to divide by."""
    xp = array_api_compat.array_namespace(x)
    return xp.where(x > 0, x, xp.ones_like(x))


def queries_seeing(incoming: Array) -> Array:
    """(..., S) integer: with causal attention, how many of the existing positions can see key j (j and all later)."""
    xp = array_api_compat.array_namespace(incoming)
    exists = xp.astype(~xp.isnan(incoming), xp.int64)
    return xp.flip(xp.cumulative_sum(xp.flip(exists, axis=-1), axis=-1), axis=-1)


def _per_query(c: Array, keys: Array, incoming: Array) -> tuple[Array, Array]:
    xp = array_api_compat.array_namespace(c)
    queries = queries_seeing(incoming)
    keys = keys & (queries >= FEWEST_QUERIES)
    share = xp.where(keys, c / _positive(queries), xp.zeros_like(c))
    mean = xp.sum(share, axis=-1, keepdims=True) / _positive(_count(keys))
    return share / _positive(mean), keys


def _attention_sink(incoming: Array, threshold: float = 0.3, causal: bool = True) -> Array:
    """Mean attention from the queries that can see j above 0.3 (Attention-Sink, arXiv 2410.10781).

    The paper's models are causal; with ``causal=False`` every query sees every key.
    """
    c, keys = _keys(incoming, None)
    queries = queries_seeing(incoming) if causal else _count(keys)
    return keys & (c / _positive(queries) > threshold)


def _sink_aware_pruning(incoming: Array, deviations: float = 2.0) -> Array:
    """More than mean + 2 standard deviations, where a sigmoid around that line passes 1/2 (arXiv 2602.17664).

    The paper pools over layers and heads first: see :func:`pool`.
    """
    c, keys = _keys(incoming, None)
    xp = array_api_compat.array_namespace(c)
    c, n = xp.where(keys, c, xp.zeros_like(c)), _positive(_count(keys))
    mean = xp.sum(c, axis=-1, keepdims=True) / n
    spread = xp.sum(xp.where(keys, (c - mean) ** 2, xp.zeros_like(c)), axis=-1, keepdims=True) / n
    return keys & (c > mean + deviations * xp.sqrt(spread))


def _first_positions(incoming: Array, count: int = 4) -> Array:
    """The first four positions, whatever they receive (StreamingLLM, arXiv 2309.17453)."""
    xp = array_api_compat.array_namespace(incoming)
    exists = ~xp.isnan(incoming)
    return exists & (xp.cumulative_sum(xp.astype(exists, xp.int64), axis=-1) <= count)


def _strongest(incoming: Array, count: int = 1) -> Array:
    """The k largest, without a threshold (study of diffusion transformers, arXiv 2605.09313)."""
    c, keys = _keys(incoming, None)
    xp = array_api_compat.array_namespace(c)
    return select(c, keys, xp.asarray(count, device=array_api_compat.device(c)))


DEFINITIONS: dict[str, Callable[..., Array]] = {
    "moving-sinks": detect,
    "attention-sink": _attention_sink,
    "sink-aware-pruning": _sink_aware_pruning,
    "streaming-llm": _first_positions,
    "diffusion-transformers": _strongest,
}
"""Published definitions by name, each a function of incoming attention (..., S) to bool (..., S)."""


def detect_as(definition: str, incoming: Array, **options: Any) -> Array:
    """Read a capture under another published definition; see :data:`DEFINITIONS` for the names."""
    if definition not in DEFINITIONS:
        raise InputError(f"definition {definition!r} is unknown; use one of {', '.join(DEFINITIONS)}")
    return DEFINITIONS[definition](incoming, **options)
