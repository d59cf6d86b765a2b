"""Two GPU kernels, so that recording and blocking attention cost little: column sums, and a forward with blocked keys.

A pattern is never written to memory. Its column sums are computed anew from queries, keys and the log-sum-exp of every
query's scores, which any flash-attention forward leaves behind: half the work of that forward, one matrix product
instead of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # torch for CPUs comes without it
    triton = None

DTYPES = (torch.bfloat16, torch.float16)
WIDEST_HEAD = 128
_LOG2_E = 1.4426950408889634
# Lengths differ from sample to sample; a kernel compiled for one serves all.
_ANY_VALUE = ("heads", "groups", "queries", "length", "offset", "tiles")


class Tiles(NamedTuple):
    """How a kernel cuts up its work; not tuned as it runs, so that runs repeat and a CUDA graph can capture them."""

    queries: int
    keys: int
    warps: int
    stages: int


# The fastest of a dozen each on an H200, at 512 to 8,192 positions.
_COLUMN_TILES = Tiles(64, 128, 4, 3)
_SHORT_COLUMN_TILES = Tiles(128, 64, 4, 3)  # where wide ones would leave multiprocessors idle
_FORWARD_TILES = Tiles(64, 64, 4, 3)
_MULTIPROCESSORS = 132


def run_on(device: torch.device) -> bool:
    """NVIDIA's Hopper or later, whose copy engine fills the tiles, and triton."""
    if triton is None or device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def column_sums(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    scale: float,
    keys: Tensor | None = None,
    blocked: Tensor | None = None,
    offset: int = 0,
    exclude_self: bool = False,
) -> Tensor:
    """What every key gets of all queries' attention: the column sums of exp(scale query key^T - lse).

    One program owns a block of keys and walks over all queries, so that nothing is added atomically and two runs are
    equal to the last bit. Products and sums are float32.

    Args:
        query: (B, H, Q, D) bfloat16 or float16; key: (B, H_kv, K, D), heads not repeated; D a multiple of 8 up to 128.
        lse: (B, H, Q) float32, natural logarithm; infinity leaves a query out.
        keys: (B, K) bool, False = padding, which gives and gets nothing.
        blocked: (B, H, K) bool, keys that get exactly 0.
        offset: position of the first query among the keys.
        exclude_self: leave out what a query gives the key at its own position.

    Returns:
        (B, H, K) float32; NaN in a query shows in all columns of its head.
    """
    (batch, heads, queries, dim), (_, key_heads, length, _) = query.shape, key.shape
    tiles = _column_tiles(batch * heads, length)
    sums = torch.empty(batch, heads, length, dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):
        _sum_columns[(triton.cdiv(length, tiles.keys), batch * heads)](
            _in_tiles(query, tiles.queries),
            _in_tiles(key, tiles.keys),
            lse.contiguous(),
            _bytes(keys),
            _bytes(blocked),
            sums,
            scale * _LOG2_E,
            heads,
            heads // key_heads,
            queries,
            length,
            offset,
            DIM=_padded(dim),
            BLOCK_Q=tiles.queries,
            BLOCK_K=tiles.keys,
            EXCLUDE_SELF=exclude_self,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return sums


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    keys: Tensor | None = None,
    blocked: Tensor | None = None,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Flash attention in which a query may be denied some keys.

    Args:
        query: (B, H, Q, D) bfloat16 or float16; key: (B, H_kv, K, D), value alike; D a multiple of 8 up to 128.
        scale: above 0.
        keys: (B, K) bool, False = padding, which sees and is seen by nothing.
        blocked: (B, H, K) bool, keys that are taken away before the softmax.
        offset: position of the first query among the keys.

    Returns:
        Output (B, Q, H, D) in the dtype of ``value``; the log-sum-exp (B, H, Q) float32 of all visible keys, and that
        of the open ones. A query that sees no key has output 0 and infinity there. Blocked keys have a maximum and a
        sum of their own, so that neither result loses digits to the other, whatever share a blocked key holds.
    """
    (batch, heads, queries, dim), (_, key_heads, length, _) = query.shape, key.shape
    tiles = _FORWARD_TILES
    output = query.new_empty(batch, queries, heads, dim)
    logs = torch.empty(2, batch, heads, queries, dtype=torch.float32, device=query.device)
    count = triton.cdiv(length, tiles.keys)
    states = torch.empty(batch, heads, count, tiles.keys, dtype=torch.int8, device=query.device)
    worst = torch.empty(batch, heads, count, dtype=torch.int32, device=query.device)
    keys, blocked = _bytes(keys), _bytes(blocked)
    with torch.cuda.device_of(query):
        _note_states[(count, batch * heads)](keys, blocked, states, worst, heads, length, count, BLOCK_K=tiles.keys)
        _attend[(triton.cdiv(queries, tiles.queries), batch * heads)](
            _in_tiles(query, tiles.queries),
            _in_tiles(key, tiles.keys),
            _in_tiles(value, tiles.keys),
            keys,
            states,
            worst,
            output,
            logs,
            scale * _LOG2_E,
            heads,
            heads // key_heads,
            queries,
            length,
            offset,
            count,
            DIM=dim,
            WIDTH=_padded(dim),
            BLOCK_Q=tiles.queries,
            BLOCK_K=tiles.keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return output, logs[0], logs[1]


def _column_tiles(heads: int, length: int) -> Tiles:
    few = heads * triton.cdiv(length, _COLUMN_TILES.keys) <= _MULTIPROCESSORS
    return _SHORT_COLUMN_TILES if few else _COLUMN_TILES


def _in_tiles(x: Tensor, rows: int) -> Any:
    """(B, H, S, D) for Hopper's copy engine: tiles of rows, zero beyond S and D. It wants strides of 16 bytes."""
    wide = [size > 1 for size in x.shape]
    strides = [stride if used else 8 for stride, used in zip(x.stride(), wide, strict=True)]
    if x.stride(-1) != 1 or x.data_ptr() % 16 or any(stride == 0 or stride % 8 for stride in strides[:-1]):
        x = x.clone(memory_format=torch.contiguous_format)
        strides = list(x.stride())
    return TensorDescriptor(x, list(x.shape), [*strides[:-1], 1], [1, 1, rows, _padded(x.shape[-1])])


def _padded(dim: int) -> int:
    """The width of a matrix product that holds a head: a power of two, 16 or more."""
    return max(16, 1 << (dim - 1).bit_length())


def _bytes(flags: Tensor | None) -> Tensor | None:
    return None if flags is None else flags.contiguous().view(torch.uint8)


def _kernel(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function, do_not_specialize=_ANY_VALUE)


@_kernel
@no_type_check
def _sum_columns(
    query,
    key,
    lse,
    keys,
    blocked,
    sums,
    scale,
    heads,
    groups,
    queries,
    length,
    offset,
    DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXCLUDE_SELF: tl.constexpr,
):
    """Columns of one block of keys; ``scale`` is in units of log 2.

    Queries lie along the rows of the product, so that a thread holds few of them and needs few log-sum-exps, and the
    sum over rows is left to the end.
    """
    first, row = tl.program_id(0) * BLOCK_K, tl.program_id(1)
    batch, head = row // heads, row % heads
    columns = first + tl.arange(0, BLOCK_K)
    own = key.load([batch, head // groups, first, 0]).reshape(BLOCK_K, DIM)
    weights = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for start in range(0, queries, BLOCK_Q):
        block = query.load([batch, head, start, 0]).reshape(BLOCK_Q, DIM)
        scores = tl.dot(block, own.T)
        rows = start + tl.arange(0, BLOCK_Q)
        logs = tl.load(lse + row * queries + rows, mask=rows < queries, other=float("inf"))
        if keys is not None:
            real = tl.load(keys + batch * length + offset + rows, mask=rows < queries, other=0)
            logs = tl.where(real != 0, logs, float("inf"))
        given = tl.exp2(scores * scale - (logs * 1.4426950408889634)[:, None])
        if EXCLUDE_SELF:
            given = tl.where((offset + rows)[:, None] == columns[None, :], 0.0, given)
        weights += given
    total = tl.sum(weights, 0)
    inside = columns < length
    if keys is not None:
        total = tl.where(tl.load(keys + batch * length + columns, mask=inside, other=0) != 0, total, 0.0)
    if blocked is not None:
        total = tl.where(tl.load(blocked + row * length + columns, mask=inside, other=1) != 0, 0.0, total)
    tl.store(sums + row * length + columns, total, mask=inside)


@_kernel
@no_type_check
def _note_states(keys, blocked, states, worst, heads, length, tiles, BLOCK_K: tl.constexpr):
    """Each key's state, 0 open, 1 padding, 2 blocked, and the highest of each tile: most tiles are open as a whole."""
    tile, row = tl.program_id(0), tl.program_id(1)
    columns = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = columns < length
    state = tl.where(inside, 0, 1)
    if keys is not None:
        real = tl.load(keys + row // heads * length + columns, mask=inside, other=0)
        state = tl.where(real != 0, state, 1)
    if blocked is not None:
        taken = tl.load(blocked + row * length + columns, mask=inside, other=0)
        state = tl.where((state == 0) & (taken != 0), 2, state)
    tl.store(states + row * tiles * BLOCK_K + columns, state.to(tl.int8))
    tl.store(worst + row * tiles + tile, tl.max(state, 0))


@_kernel
@no_type_check
def _attend(
    query,
    key,
    value,
    keys,
    states,
    worst,
    output,
    logs,
    scale,
    heads,
    groups,
    queries,
    length,
    offset,
    tiles,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Output of one block of queries; ``scale`` is in units of log 2."""
    first, row = tl.program_id(0) * BLOCK_Q, tl.program_id(1)
    batch, head = row // heads, row % heads
    block = query.load([batch, head, first, 0]).reshape(BLOCK_Q, WIDTH)
    top, total = tl.full([BLOCK_Q], float("-inf"), tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    blocked_top, blocked_total = top, total
    mixed = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    for tile in range(0, tiles):
        scores = tl.dot(block, key.load([batch, head // groups, tile * BLOCK_K, 0]).reshape(BLOCK_K, WIDTH).T)
        state = tl.load(worst + row * tiles + tile)
        if state > 0:
            each = tl.load(states + (row * tiles + tile) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
            if state == 2:
                hidden = tl.where(each == 2, scores, float("-inf"))
                blocked_top, blocked_total, _, _ = _renewed(blocked_top, blocked_total, hidden, scale)
            scores = tl.where(each == 0, scores, float("-inf"))
        top, total, weights, fade = _renewed(top, total, scores, scale)
        values = value.load([batch, head // groups, tile * BLOCK_K, 0]).reshape(BLOCK_K, WIDTH)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * fade[:, None])
    rows = first + tl.arange(0, BLOCK_Q)
    inside = rows < queries
    if keys is not None:
        real = tl.load(keys + batch * length + offset + rows, mask=inside, other=0) != 0
        total, blocked_total = tl.where(real, total, 0.0), tl.where(real, blocked_total, 0.0)
    mixed = tl.where((total == 0)[:, None], 0.0, mixed / total[:, None])
    places = ((batch * queries + rows).to(tl.int64) * heads + head)[:, None] * DIM + tl.arange(0, WIDTH)[None, :]
    wanted = inside[:, None] & (tl.arange(0, WIDTH) < DIM)[None, :]
    tl.store(output + places, mixed.to(output.dtype.element_ty), mask=wanted)
    logs += row * queries + rows
    _store_logs(logs, logs + tl.num_programs(1) * queries, inside, top, total, blocked_top, blocked_total, scale)


@_kernel
@no_type_check
def _renewed(top, total, scores, scale):
    """The running maximum and sum of every row with further scores, their weights, and the factor for earlier ones.

    The largest weight is 2^15, so that float16 holds those of a millionth of it, too.
    """
    renewed = tl.maximum(top, tl.max(scores, 1))
    reference = tl.where(renewed == float("-inf"), 0.0, renewed * scale - 15)
    weights = tl.exp2(scores * scale - reference[:, None])
    fade = tl.exp2(top * scale - 15 - reference)
    return renewed, total * fade + tl.sum(weights, 1), weights, fade


@_kernel
@no_type_check
def _store_logs(logs, open_logs, inside, top, total, blocked_top, blocked_total, scale):
    """Natural log-sum-exp of all keys and of the open ones. Who saw nothing gets infinity, so that it gives nothing."""
    open_log = top * scale - 15 + tl.log2(total)
    blocked_log = blocked_top * scale - 15 + tl.log2(blocked_total)
    higher = tl.maximum(open_log, blocked_log)
    log = higher + tl.log2(tl.exp2(open_log - higher) + tl.exp2(blocked_log - higher))
    nothing = (total == 0) & (blocked_total == 0)
    tl.store(logs, tl.where(nothing, float("inf"), log * 0.6931471805599453), mask=inside)
    tl.store(open_logs, tl.where(total == 0, float("inf"), open_log * 0.6931471805599453), mask=inside)
