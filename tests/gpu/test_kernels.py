"""The kernels against float64 of the same inputs: every shape, padding, blocked keys, extreme scores, no atomics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sinks import fused as path
from sinks import kernels
from sinks.attention import PATHS, Ask, Measure, Visible, chunked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not kernels.run_on(torch.device("cuda")),
        reason="needs a CUDA device of capability 9.0 or later, and triton",
    ),
]

BF16, FP16 = torch.bfloat16, torch.float16
ROUNDING = {BF16: 8e-3, FP16: 1e-3}  # of an output around 1
MEASURES = frozenset(
    Measure(after, itself, last) for after in (False, True) for itself in (False, True) for last in (False, True)
)


@dataclass(frozen=True)
class Case:
    """One layer's queries, keys and values and what they may see; positions of the queries are the last ones."""

    query: Tensor
    key: Tensor
    value: Tensor
    keys: Tensor | None = None
    blocked: Tensor | None = None

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1]) ** -0.5

    @property
    def offset(self) -> int:
        return self.key.shape[2] - self.query.shape[2]

    @property
    def visible(self) -> Visible:
        return Visible(self.keys, None, None, self.offset)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        return kernels.forward(self.query, self.key, self.value, self.scale, self.keys, self.blocked, self.offset)

    def columns(self, lse: Tensor, blocked: Tensor | None = None, exclude_self: bool = False) -> Tensor:
        return kernels.column_sums(self.query, self.key, lse, self.scale, self.keys, blocked, self.offset, exclude_self)

    def fused(self, ask: Ask) -> Any:
        return PATHS["fused"](self.query, self.key, self.value, self.scale, self.visible, ask, 0)

    def ask(self, way: str = "scores", **options: Any) -> Ask:
        blocked = None if self.blocked is None else self.blocked[None]
        return Ask(blocked=blocked, path=way, **options)


@dataclass(frozen=True)
class Exact:
    """Patterns (B, H, Q, K) before and after blocking, log-sum-exps (B, H, Q), output (B, Q, H, D), in float64."""

    pattern: Tensor
    open_pattern: Tensor
    lse: Tensor
    lse_open: Tensor
    output: Tensor


def exact(case: Case) -> Exact:
    groups = case.query.shape[1] // case.key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (case.key, case.value))
    scores = case.query.double() @ key.transpose(-1, -2) * case.scale
    if case.keys is not None:
        sees = case.keys[:, None, None, :] & case.keys[:, None, case.offset :, None]
        scores = scores.masked_fill(~sees, -torch.inf)
    pattern, lse = _shares(scores)
    if case.blocked is not None:
        scores = scores.masked_fill(case.blocked[:, :, None], -torch.inf)
    open_pattern, lse_open = _shares(scores)
    return Exact(pattern, open_pattern, lse, lse_open, (open_pattern @ value).transpose(1, 2))


def _shares(scores: Tensor) -> tuple[Tensor, Tensor]:
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return (scores - lse[..., None]).exp(), lse


def case(
    shape: tuple[int, int, int, int, int, int],
    dtype: torch.dtype = BF16,
    padding: str | None = None,
    blocking: str | None = None,
    spread: float = 2.0,
) -> Case:
    """Shape: batch, heads, key heads, queries, keys, width of a head."""
    batch, heads, key_heads, queries, length, dim = shape
    seed = torch.Generator("cuda").manual_seed(sum(shape))
    query = spread * torch.randn(batch, heads, queries, dim, generator=seed, device="cuda")
    key, value = (torch.randn(batch, key_heads, length, dim, generator=seed, device="cuda") for _ in range(2))
    positions = torch.arange(length, device="cuda")
    missing = (torch.arange(batch, device="cuda") * length // batch)[:, None]
    keys = {
        None: None,
        "left": positions >= missing,
        "right": positions < length - missing,
        "a whole row": (positions >= 0) & (missing == 0),
    }[padding]
    blocked = None
    if blocking is not None:
        blocked = torch.zeros(batch, heads, length, dtype=torch.bool, device="cuda")
        if blocking == "first":
            blocked[..., 0] = True
        elif blocking == "all but one":
            blocked |= positions != length // 2
        elif blocking == "all":
            blocked |= True
        else:
            blocked |= torch.rand(blocked.shape, generator=seed, device="cuda") < 0.3
    return Case(query.to(dtype), key.to(dtype), value.to(dtype), keys, blocked)


SHAPES = [
    (1, 2, 2, 1, 1, 128),
    (2, 4, 2, 777, 777, 64),
    (1, 4, 4, 2048, 2048, 128),
    (1, 2, 1, 8192, 8192, 128),
    (2, 8, 2, 300, 300, 96),
    (2, 3, 3, 130, 130, 80),
    (3, 2, 1, 65, 65, 32),
    (1, 2, 2, 40, 300, 16),
    (1, 2, 2, 1, 300, 128),
]
CASES = [
    *[
        (shape, BF16, padding, blocking)
        for shape in SHAPES
        for padding in (None, "left")
        for blocking in (None, "some")
    ],
    *[(shape, FP16, "right", "first") for shape in SHAPES],
    *[((2, 4, 2, 777, 777, 128), dtype, "right", "all but one") for dtype in (BF16, FP16)],
    *[((3, 2, 2, 200, 200, 64), BF16, "a whole row", blocking) for blocking in (None, "first", "all")],
    *[((1, 32, 32, 1100, 1100, 128), BF16, padding, "some") for padding in (None, "right")],  # wide tiles
]


@pytest.mark.parametrize(("shape", "dtype", "padding", "blocking"), CASES)
def test_sums_logs_and_output(shape: Any, dtype: torch.dtype, padding: str | None, blocking: str | None) -> None:
    one = case(shape, dtype, padding, blocking)
    right = exact(one)
    output, lse, lse_open = one.forward()
    assert output.dtype == dtype
    assert (output.double() - right.output).abs().max() < ROUNDING[dtype] * (1 + right.output.abs().max())
    torch.testing.assert_close(lse.double(), right.lse, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(lse_open.double(), right.lse_open, atol=2e-6, rtol=1e-6)
    before, after = one.columns(lse), one.columns(lse_open, one.blocked)
    torch.testing.assert_close(before.double(), right.pattern.sum(-2), atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(after.double(), right.open_pattern.sum(-2), atol=1e-7, rtol=1e-5)
    real = torch.ones_like(before[:, 0], dtype=torch.bool) if one.keys is None else one.keys
    queries = real[:, one.offset :].sum(-1)[:, None].expand(before.shape[:2]).double()
    torch.testing.assert_close(before.double().sum(-1), queries, atol=0, rtol=2e-6)
    assert torch.all(before.masked_select(~real[:, None]) == 0)
    assert torch.all(output.masked_select(~real[:, one.offset :, None, None]) == 0)
    if one.blocked is not None:
        assert torch.all(after[one.blocked] == 0)


def test_nothing_to_see() -> None:
    one = case((2, 2, 2, 100, 100, 64), BF16, "a whole row", "all")
    output, lse, lse_open = one.forward()
    assert torch.all(output == 0)
    assert torch.all(lse_open == torch.inf)
    assert torch.all(lse[1] == torch.inf)
    assert torch.all(lse[0].isfinite())
    assert torch.all(one.columns(lse_open) == 0)
    assert torch.all(one.columns(lse)[1] == 0)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("lead", [10.0, 60.0, 400.0])
def test_a_blocked_key_that_holds_nearly_all(dtype: torch.dtype, lead: float) -> None:
    """Its score leads by so much that the others' weights beside it are small, tiny, or below float32's range."""
    one = case((1, 2, 2, 500, 500, 64), dtype, None, "first", spread=1.0)
    one.query[..., 0], one.key[..., 0] = 8.0, 0.0
    one.key[:, :, 0] = 0
    one.key[:, :, 0, 0] = lead
    right = exact(one)
    output, lse, lse_open = one.forward()
    assert right.pattern[..., 0].min() > 0.9
    torch.testing.assert_close(lse.double(), right.lse, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(lse_open.double(), right.lse_open, atol=2e-6, rtol=1e-6)
    after = one.columns(lse_open, one.blocked)
    torch.testing.assert_close(after.double(), right.open_pattern.sum(-2), atol=1e-7, rtol=1e-5)
    assert (output.double() - right.output).abs().max() < ROUNDING[dtype]


def _scores(kind: str) -> Case:
    one = case((1, 4, 4, 2048, 2048, 128), BF16, spread={"flat": 1.0, "sink": 1.0, "peaked": 6.0}[kind])
    if kind == "sink":
        one.query[..., 0] = 8
        one.key[:, :, 0] = 0
        one.key[:, :, 0, 0] = 20
    return one


@pytest.mark.parametrize(("kind", "bound"), [("flat", 2e-6), ("sink", 5e-6), ("peaked", 1e-4)])
def test_how_exact_column_sums_are(kind: str, bound: float) -> None:
    """Beside float64 of the same bfloat16 inputs, with the log-sum-exp of either forward."""
    one = _scores(kind)
    right = exact(one).pattern.sum(-2)
    if kind == "sink":
        assert right[..., 0].min() > 0.99 * 2048
    _, seen = one.fused(one.ask(measures=frozenset({Measure()})))
    for sums in (seen.columns[Measure()], one.columns(one.forward()[1])):
        assert ((sums.double() - right).abs() / right).max() < bound


@pytest.mark.parametrize("padding", [None, "left"])
def test_two_runs_are_equal_to_the_last_bit(padding: str | None) -> None:
    one = case((2, 8, 4, 1500, 1500, 128), BF16, padding, "some")
    first, second = one.forward(), one.forward()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(one.columns(first[1]), one.columns(first[1]))


@pytest.mark.parametrize("blocking", [None, "first"])
def test_nan_in_a_query_is_seen_in_its_head(blocking: str | None) -> None:
    one = case((1, 3, 3, 200, 200, 64), BF16, None, blocking)
    one.query[0, 1, 17, 3] = torch.nan
    output, lse, lse_open = one.forward()
    for logs in (lse, lse_open):
        assert logs.isnan().nonzero().tolist() == [[0, 1, 17]]
    assert output.isnan().any(-1).nonzero().tolist() == [[0, 17, 1]]
    _, seen = one.fused(one.ask(measures=frozenset({Measure()})))
    assert seen.columns[Measure()].isnan().any(-1).tolist() == [[False, True, False]]
    assert seen.columns[Measure()][0, 1].isnan().all()


@pytest.mark.parametrize("padding", [None, "left"])
def test_without_what_a_token_gives_itself(padding: str | None) -> None:
    one = case((2, 2, 1, 170, 300, 64), BF16, padding)
    right = exact(one)
    pattern = right.pattern.clone()
    own = torch.arange(170, device="cuda")
    pattern[:, :, own, own + one.offset] = 0
    sums = one.columns(one.forward()[1], exclude_self=True)
    torch.testing.assert_close(sums.double(), pattern.sum(-2), atol=1e-7, rtol=1e-5)


def test_any_strides() -> None:
    """Heads last in memory, as projections make them; an odd first element; one tensor for all heads."""
    one = case((2, 4, 4, 90, 90, 64), BF16)
    expected = one.forward()
    query = one.query.transpose(1, 2).contiguous().transpose(1, 2)
    room = torch.empty(one.key.numel() + 1, dtype=BF16, device="cuda")
    key = room[1:].view(one.key.shape).copy_(one.key)
    moved = replace(one, query=query, key=key)
    for a, b in zip(moved.forward(), expected, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(moved.columns(expected[1]), one.columns(expected[1]))
    shared = replace(one, key=one.key[:, :1].expand(-1, 4, -1, -1))
    alone = replace(one, key=one.key[:, :1].repeat(1, 4, 1, 1))
    assert torch.equal(shared.columns(expected[1]), alone.columns(expected[1]))


@pytest.mark.parametrize("way", ["scores", "values"])
@pytest.mark.parametrize("padding", [None, "left", "a whole row"])
@pytest.mark.parametrize("blocking", [None, "first", "some", "all"])
@pytest.mark.parametrize(("dtype", "patterns"), [(BF16, "full"), (FP16, "mean")])
def test_the_path_is_chunked_ones_equal(
    way: str, padding: str | None, blocking: str | None, dtype: torch.dtype, patterns: str
) -> None:
    for shape in [(2, 4, 2, 150, 150, 64), (1, 2, 2, 33, 140, 128)]:
        one = case(shape, dtype, padding, blocking)
        ask = one.ask(way, measures=MEASURES, patterns=patterns)
        output, seen = one.fused(ask)
        expected, known = chunked(one.query, one.key, one.value, one.scale, one.visible, ask, 0)
        assert output.shape == expected.shape
        assert output.is_contiguous()
        torch.testing.assert_close(output, expected, atol=2 * ROUNDING[dtype], rtol=2 * ROUNDING[dtype])
        assert seen.pattern is not None
        assert known.pattern is not None
        assert torch.equal(seen.pattern, known.pattern)
        assert seen.columns.keys() == known.columns.keys()
        for measure, sums in seen.columns.items():
            torch.testing.assert_close(sums, known.columns[measure], atol=1e-6, rtol=1e-5)


def test_small_weights_survive_in_half_precision() -> None:
    """The values of a key that holds all but 1e-5 are silenced: what the others give is small, and not lost."""
    one = case((1, 1, 1, 64, 300, 64), FP16, None, "first", spread=1.0)
    one.query[..., 0], one.key[..., 0] = 8.0, 0.0
    one.key[:, :, 0] = 0
    one.key[:, :, 0, 0] = 17.0
    keys = torch.ones(1, 300, dtype=torch.bool, device="cuda")  # padding, if only for form's sake, is for our forward
    one = replace(one, value=one.value.abs() * 100, keys=keys)
    silenced = one.value.masked_fill(one.blocked[..., None], 0) if one.blocked is not None else one.value
    right = exact(replace(one, value=silenced, blocked=None))
    assert right.pattern[..., 0].min() > 0.9999
    output, _ = one.fused(one.ask("values"))
    assert ((output.double() - right.output).abs() / right.output).max() < 2e-3


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("blocking", [None, "first"])
def test_watching_changes_no_output(padding: str | None, blocking: str | None) -> None:
    one = case((2, 4, 2, 400, 400, 128), BF16, padding, blocking)
    alone, seen = one.fused(one.ask())
    assert seen.columns == {}
    watched, _ = one.fused(one.ask(measures=MEASURES, patterns="full"))
    assert torch.equal(alone, watched)


def test_what_computes_the_output() -> None:
    def way(one: Case, taken: bool = False, **visible: Any) -> str:
        return path.way_of(one.query, one.key, one.value, one.visible._replace(**visible), taken)

    shape = (2, 4, 2, 64, 64, 64)
    plain = case(shape)
    assert way(plain) == "cudnn"
    assert way(plain, taken=True) == "triton"
    assert way(case(shape, padding="left")) == "triton"
    assert way(case(shape, torch.float32)) == "chunked"
    assert way(case((1, 2, 2, 64, 64, 256))) == "chunked"
    assert way(case((1, 2, 2, 64, 64, 20))) == "chunked"
    assert way(plain, end=torch.arange(64, device="cuda") + 1) == "chunked"
    assert way(replace(plain, query=plain.query.clone().requires_grad_())) == "chunked"
    with torch.no_grad():
        assert way(replace(plain, query=plain.query.clone().requires_grad_())) == "cudnn"


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("way", ["scores", "values"])
def test_a_cuda_graph_replays_it(padding: str | None, way: str) -> None:
    """Other queries and other blocked keys at the replay, the same numbers as outside of a graph."""
    one, other = (case((2, 4, 4, 300, 300, 128), BF16, padding, blocking) for blocking in ("first", "some"))
    ask = one.ask(way, measures=MEASURES)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        one.fused(ask)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, seen = one.fused(ask)
    assert one.blocked is not None
    assert other.blocked is not None
    one.query.copy_(other.query.flip(2))
    one.blocked.copy_(other.blocked)
    graph.replay()
    expected, known = one.fused(ask)
    assert torch.equal(output, expected)
    for measure, sums in known.columns.items():
        assert torch.equal(seen.columns[measure], sums)
