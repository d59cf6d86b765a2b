"""The attention function: right values, the same on every path, padding without attention, and no trace left behind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ALL, DIFFUSION, ragged, short, text, tiny
from torch import Tensor, nn
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

import sinks
from sinks import attention
from sinks.attention import PATHS, Ask, Measure, Visible, visible_keys
from sinks.errors import InputError
from sinks.models import LanguageModel

MEASURES = [
    Measure(after, itself, last) for after in (False, True) for itself in (False, True) for last in (False, True)
]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # of an output around 1


@dataclass(frozen=True)
class Problem:
    """One call of the attention function and, apart from it, which query may see which key."""

    query: Tensor
    key: Tensor
    value: Tensor
    visible: Visible
    sees: Tensor  # (B, Q, K) bool
    blocked: Tensor | None  # (B, H, K) bool
    path: str

    def run(self, compute: str, chunk_bytes: int = 2**25) -> tuple[Tensor, attention.Observation]:
        blocked = None if self.blocked is None else self.blocked[None]
        ask = Ask(frozenset(MEASURES), "full", None, False, blocked, self.path)
        with mock.patch.object(attention, "_CHUNK_BYTES", chunk_bytes):
            return PATHS[compute](self.query, self.key, self.value, self.scale, self.visible, ask, 0)

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1]) ** -0.5

    @property
    def offset(self) -> int:
        return self.key.shape[2] - self.query.shape[2]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Batches, shared key heads, padding on either side, windows, a cache, blocked keys, three dtypes."""
    batch, key_heads, groups, dim = (draw(st.integers(1, high)) for high in (3, 3, 3, 4))
    keys = draw(st.integers(1, 13))
    rule = draw(st.sampled_from(["full", "causal", "window"]))
    queries = draw(st.sampled_from([keys, draw(st.integers(1, keys))])) if rule != "full" else keys
    dtype = draw(st.sampled_from(list(ROUNDING)))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    query = 2 * torch.randn(batch, key_heads * groups, queries, 2 * dim, generator=seed)
    key, value = (2 * torch.randn(batch, key_heads, keys, size, generator=seed) for size in (2 * dim, dim))
    valid = _padding(draw, batch, keys)
    offset, positions = keys - queries, torch.arange(keys)
    sees = torch.ones(queries, keys, dtype=torch.bool)
    mask_function = bidirectional_mask_function
    if rule != "full":
        sees = positions <= positions[offset:, None]
        mask_function = causal_mask_function
    if rule == "window":
        window = draw(st.integers(1, keys + 2))
        sees = sees & (positions > positions[offset:, None] - window)
        mask_function = sliding_window_causal_mask_function(window)
    mask = None if valid is None else valid.long()
    visible = visible_keys(batch, queries, keys, offset, 0, mask_function, mask)
    real = torch.ones(batch, keys, dtype=torch.bool) if valid is None else valid
    sees = sees & real[:, None, :] & real[:, offset:, None]
    blocked = None
    if draw(st.booleans()):
        blocked = torch.rand(batch, key_heads * groups, keys, generator=seed) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    path = draw(st.sampled_from(["scores", "values"]))
    return Problem(query.to(dtype), key.to(dtype), value.to(dtype), visible, sees, blocked, path)


def _padding(draw: st.DrawFn, batch: int, keys: int) -> Tensor | None:
    """(B, K) bool with padding on both sides of a row, perhaps nothing but padding; None: no mask was given."""
    if draw(st.booleans()):
        return None
    edges = [sorted(draw(st.tuples(st.integers(0, keys), st.integers(0, keys)))) for _ in range(batch)]
    return torch.stack([(torch.arange(keys) >= begin) & (torch.arange(keys) < end) for begin, end in edges])


def oracle(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output (B, Q, H, D), pattern before and after blocking (B, H, Q, K), in float64 and with no softmax of ours."""
    groups = problem.query.shape[1] // problem.key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (problem.key, problem.value))
    powers = (torch.einsum("bhqd,bhkd->bhqk", problem.query.double(), key) * problem.scale).exp()
    powers = powers * problem.sees[:, None]
    open_keys = torch.ones_like(powers) if problem.blocked is None else (~problem.blocked[:, :, None]).double()
    pattern = _shares(powers)
    after = _shares(powers * open_keys) if problem.path == "scores" else pattern
    weights = after if problem.path == "scores" else pattern * open_keys
    return torch.einsum("bhqk,bhkd->bqhd", weights, value), pattern, after


def _shares(powers: Tensor) -> Tensor:
    """Each row over its sum; a row of zeros stays one."""
    return powers / powers.sum(-1, keepdim=True).clamp_min(1e-300)


def column_sums(problem: Problem, measure: Measure) -> Tensor:
    _, pattern, after = oracle(problem)
    weights = after if measure.after_blocking else pattern
    if measure.exclude_self:
        own = torch.arange(weights.shape[-2])
        weights = weights.clone()
        weights[:, :, own, own + problem.offset] = 0
    return weights[:, :, -1] if measure.last_query else weights.sum(-2)


@settings(max_examples=150)
@given(problem=problems(), chunk_bytes=st.sampled_from([1, 200, 1000, 2**25]))
def test_every_path_computes_the_definition(problem: Problem, chunk_bytes: int) -> None:
    output, pattern, _ = oracle(problem)
    results = {path: problem.run(path, chunk_bytes) for path in PATHS}
    for made, seen in results.values():
        assert made.dtype == problem.query.dtype
        error = (made.double() - output).abs() / (1 + output.abs())
        assert error.max() < ROUNDING[problem.query.dtype]
        assert seen.pattern is not None
        assert (seen.pattern - pattern).abs().max() < 2e-6
        for measure in MEASURES:
            assert seen.columns[measure].dtype == torch.float32
            assert (seen.columns[measure] - column_sums(problem, measure)).abs().max() < 2e-5


@settings(max_examples=100)
@given(problem=problems(), chunk_bytes=st.sampled_from([1, 200, 2**25]))
def test_patterns_share_out_what_every_query_has(problem: Problem, chunk_bytes: int) -> None:
    _, seen = problem.run("chunked", chunk_bytes)
    assert seen.pattern is not None
    sees = problem.sees[:, None].expand_as(seen.pattern)
    assert (seen.pattern[~sees] == 0).all()
    rows = seen.pattern.sum(-1)
    torch.testing.assert_close(rows, sees.any(-1).float(), atol=1e-5, rtol=0)
    queries = sees.any(-1).sum(-1).float()
    torch.testing.assert_close(seen.columns[Measure()].sum(-1), queries, atol=1e-4, rtol=0)
    if problem.blocked is not None and problem.path == "scores":
        after = seen.columns[Measure(after_blocking=True)]
        assert (after[problem.blocked] == 0).all()


@settings(max_examples=50)
@given(problem=problems())
def test_watching_and_asking_for_less_change_no_output(problem: Problem) -> None:
    blocked = None if problem.blocked is None else problem.blocked[None]
    for path, compute in PATHS.items():
        output, _ = problem.run(path)
        unseen = Ask(blocked=blocked, path=problem.path)
        alone, seen = compute(problem.query, problem.key, problem.value, problem.scale, problem.visible, unseen, 0)
        assert torch.equal(output, alone)
        assert seen.columns == {}
        assert seen.pattern is None


def test_large_scores_stay_exact_in_half_precision() -> None:
    """Scores of 5,000 would overflow nothing in float32, but are infinite as products of float16."""
    query = torch.full((1, 1, 3, 4), 200.0, dtype=torch.float16)
    key = query * torch.tensor([1.0, 0.5, -1.0], dtype=torch.float16)[None, None, :, None]
    for compute in PATHS.values():
        ask = Ask(frozenset({Measure()}), "full")
        output, seen = compute(query, key, key, 0.5, Visible(None, None, None, 0), ask, 0)
        assert seen.columns[Measure()].tolist() == [[[3.0, 0.0, 0.0]]]
        assert torch.equal(output, query.transpose(1, 2))


def test_a_hand_computed_pattern() -> None:
    """Two queries, two keys: weights 3 to 1 and 1 to 1."""
    query = torch.tensor([[[[1.0], [0.0]]]])
    key = torch.tensor([[[[3.0], [1.0]]]]).log()
    value = torch.tensor([[[[4.0], [8.0]]]])
    for compute in PATHS.values():
        ask = Ask(frozenset({Measure(), Measure(exclude_self=True)}), "full")
        output, seen = compute(query, key, value, 1.0, Visible(None, None, None, 0), ask, 0)
        torch.testing.assert_close(output[0, :, 0, 0], torch.tensor([5.0, 6.0]))
        torch.testing.assert_close(seen.pattern, torch.tensor([[[[0.75, 0.25], [0.5, 0.5]]]]))
        torch.testing.assert_close(seen.columns[Measure()], torch.tensor([[[1.25, 0.75]]]))
        torch.testing.assert_close(seen.columns[Measure(exclude_self=True)], torch.tensor([[[0.5, 0.25]]]))


def _projections(lm: LanguageModel) -> dict[str, list[Tensor]]:
    """Fills, at every forward pass, with the values that enter and the mixture that leaves each layer's attention."""
    caught: dict[str, list[Tensor]] = {"values": [], "mixed": []}
    for layer in lm.model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda _, __, output: caught["values"].append(output))
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: caught["mixed"].append(inputs[0]))
    return caught


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [*ALL, "llada-gqa", "mistral"])
def test_the_pattern_times_the_values_is_what_the_layer_puts_out(kind: str, path: str) -> None:
    lm = tiny.__wrapped__(kind, path)  # a model of its own, for the hooks
    caught = _projections(lm)
    ids, mask = ragged([11, 7, 2])
    with torch.no_grad(), sinks.record(lm, patterns=True) as rec:
        lm.model(ids, attention_mask=mask)
    for layer, (value, mixed) in enumerate(zip(caught["values"], caught["mixed"], strict=True)):
        heads = value.view(*value.shape[:2], -1, 8).transpose(1, 2)
        heads = heads.repeat_interleave(4 // heads.shape[1], 1)
        rebuilt = (rec.patterns[layer] @ heads).transpose(1, 2).flatten(2)
        assert (rebuilt - mixed).abs().max() < 1e-5


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_gets_and_gives_nothing(kind: str, path: str, side: str) -> None:
    lengths = [9, 5, 1]
    ids, mask = ragged(lengths)
    if side == "right":
        ids, mask = ids.flip(1), mask.flip(1)
    lm = tiny(kind, path)
    with torch.no_grad(), sinks.record(lm, patterns=True) as rec:
        logits = lm.model(ids, attention_mask=mask).logits
    real = mask.bool()
    assert rec.incoming.shape == (3, 3, 4, 9)
    assert rec.patterns.shape == (3, 3, 4, 9, 9)
    assert (rec.incoming.transpose(1, 2)[:, :, ~real] == 0).all()
    assert (rec.patterns.transpose(2, 3)[:, ~real] == 0).all()
    torch.testing.assert_close(rec.patterns.sum(-1), real[None, :, None].expand(3, 3, 4, 9).float(), atol=1e-5, rtol=0)
    queries = torch.tensor(lengths).float()[None, :, None].expand(3, 3, 4)
    torch.testing.assert_close(rec.incoming.sum(-1), queries, atol=1e-4, rtol=0)
    assert logits.isfinite().all()
    for row, length in enumerate(lengths):
        with torch.no_grad(), sinks.record(lm) as alone:
            expected = lm.model(ids[row][real[row]][None]).logits[0]
        assert (logits[row][real[row]] - expected).abs().max() < 1e-4
        assert (rec.incoming[:, row][:, :, real[row]] - alone.incoming[:, 0]).abs().max() < 1e-4
        assert alone.incoming.shape[-1] == length


def test_a_mask_of_ones_is_no_mask() -> None:
    lm, ids = tiny("llada"), text(2, 6)
    with torch.no_grad():
        assert torch.equal(lm.model(ids).logits, lm.model(ids, attention_mask=torch.ones_like(ids)).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["llada", "dream", "ar"])
def test_incoming_attention_is_exact_in_every_dtype(
    kind: str, path: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64 column sums of the same queries and keys, however few digits those have."""
    lm, expected = tiny(kind, path, dtype), []
    compute = PATHS[path]

    def spy(query: Tensor, key: Tensor, *rest: Any) -> Any:
        assert query.dtype == key.dtype == lm.dtype
        scale, visible = rest[1], rest[2]
        mask = visible.mask(0, query.shape[2], key.shape[2], query.device)
        scores = query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(2, 3)
        expected.append((scores * scale).masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num().sum(-2))
        return compute(query, key, *rest)

    monkeypatch.setitem(PATHS, path, spy)
    ids, mask = ragged([40, 23])
    with torch.no_grad(), sinks.record(lm) as rec:
        lm.model(ids, attention_mask=mask)
    assert rec.incoming.dtype == torch.float32
    assert (rec.incoming - torch.stack(expected)).abs().max() < 2e-5


@pytest.mark.parametrize("path", PATHS)
def test_without_what_a_token_gives_itself(path: str) -> None:
    lm, (ids, mask) = tiny("dream", path), ragged([7, 4])
    with torch.no_grad(), sinks.record(lm, patterns=True) as rec:
        lm.model(ids, attention_mask=mask)
    with torch.no_grad(), sinks.record(lm, exclude_self=True) as others:
        lm.model(ids, attention_mask=mask)
    diagonal = rec.patterns.diagonal(dim1=-2, dim2=-1)
    assert diagonal.max() > 0.1
    torch.testing.assert_close(others.incoming, rec.incoming - diagonal, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_value_norms_are_those_that_each_query_head_reads(kind: str) -> None:
    lm = tiny.__wrapped__(kind)
    caught, ids = _projections(lm), text(2, 5)
    with torch.no_grad(), sinks.record(lm, value_norm=True) as rec:
        lm.model(ids)
    assert rec.value_norm.shape == (3, 2, 4, 5)
    for layer, value in enumerate(caught["values"]):
        by_key_head = value.view(2, 5, -1, 8).norm(dim=-1).transpose(1, 2)
        for head in range(4):
            expected = by_key_head[:, head * by_key_head.shape[1] // 4]
            torch.testing.assert_close(rec.value_norm[layer, :, head], expected)


WAYS: dict[str, list[dict[str, Any]]] = {
    "llada": [{}, {"remasking": "random"}, {"temperature": 0.8}, {"cfg_scale": 1.0}],
    "mmada": [{}, {"temperature": 0.8, "cfg_scale": 0.5}],
    "dream": [{}, {"remasking": "origin"}, {"temperature": 0.8, "alg_temp": 0.3}],
    "ar": [{}, {"temperature": 0.8}],
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("kind", "way"), [(kind, way) for kind, ways in WAYS.items() for way in ways])
def test_capture_changes_no_token(kind: str, way: dict[str, Any], path: str) -> None:
    lm, (ids, mask) = tiny(kind, path), ragged([6, 3])
    plain = sinks.generate(lm, ids, mask, **short(kind), **way)
    watched = sinks.Capture(patterns="full", value_norm=True)
    seen = sinks.generate(lm, ids, mask, capture=watched, **short(kind), **way)
    assert torch.equal(plain.trajectory, seen.trajectory)
    assert torch.equal(plain.confidence.nan_to_num(-1), seen.confidence.nan_to_num(-1))
    assert plain.incoming is None
    assert seen.incoming is not None


@pytest.mark.parametrize("kind", DIFFUSION)
def test_paths_make_the_same_tokens_and_captures(kind: str) -> None:
    ids, mask = ragged([6, 3])
    masking = sinks.SinkMasking(top_k=2)
    reference, chunked = (
        sinks.generate(tiny(kind, path), ids, mask, capture=sinks.Capture(), masking=masking, **short(kind))
        for path in ("reference", "chunked")
    )
    assert torch.equal(reference.trajectory, chunked.trajectory)
    assert reference.blocked is not None
    assert chunked.blocked is not None
    assert torch.equal(reference.blocked, chunked.blocked)
    assert reference.incoming is not None
    assert chunked.incoming is not None
    assert (reference.incoming - chunked.incoming).abs().max() < 1e-4


def test_layers_and_heads_keep_their_places() -> None:
    """With one head's values silenced, only what lies behind it changes."""
    lm = tiny.__wrapped__("llada")
    lm.model.model.layers[1].self_attn.k_proj.weight.data[2 * 8 : 3 * 8] = 0  # layer 1, head 2 sees all keys alike
    with torch.no_grad(), sinks.record(lm) as rec:
        lm.model(text(1, 6))
    uniform = (rec.incoming[:, 0] - 1).abs().amax(-1) < 1e-6
    assert uniform.nonzero().tolist() == [[1, 2]]


def test_record_restores_after_an_error() -> None:
    lm, ids = tiny("llada"), text(1, 4)
    before = lm.probe.ask, lm.probe.seen
    with pytest.raises(RuntimeError, match="mine"), sinks.record(lm, patterns=True) as rec:
        lm.model(ids)
        raise RuntimeError("mine")
    assert (lm.probe.ask, lm.probe.seen) == before
    assert rec.patterns.shape == (3, 1, 4, 4, 4)  # what was seen stays readable


def test_an_error_within_a_generation_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny("llada")
    before = lm.probe.ask

    def fail(*_: Any) -> None:
        raise RuntimeError("mine")

    monkeypatch.setitem(PATHS, "chunked", fail)
    with pytest.raises(RuntimeError, match="mine"):
        sinks.generate(lm, text(1, 3), capture=sinks.Capture(), **short("llada"))
    assert lm.probe.ask == before


def test_recordings_nest() -> None:
    lm, short_ids, long_ids = tiny("llada"), text(1, 4), text(1, 7)
    with torch.no_grad(), sinks.record(lm) as outer:
        lm.model(short_ids)
        with sinks.record(lm, patterns=True) as inner:
            lm.model(long_ids)
        assert outer.incoming.shape[-1] == 4  # the inner pass was none of its business
        lm.model(text(1, 5))
    assert outer.incoming.shape[-1] == 5
    assert inner.patterns.shape[-1] == inner.incoming.shape[-1] == 7


def test_two_models_do_not_see_each_other() -> None:
    one, two = tiny("llada"), tiny("llada", seed=1)
    with torch.no_grad(), sinks.record(one) as rec:
        one.model(text(1, 4))
        before = rec.incoming.clone()
        two.model(text(1, 6))
    assert torch.equal(rec.incoming, before)


def test_what_was_not_recorded_is_an_error() -> None:
    lm = tiny("llada")
    with sinks.record(lm) as rec:
        pass
    with pytest.raises(InputError, match="not recorded"):
        _ = rec.incoming
    with torch.no_grad(), sinks.record(lm) as rec:
        lm.model(text(1, 3))
    with pytest.raises(InputError, match="not recorded"):
        _ = rec.patterns


def test_gradients_flow_through_the_seam() -> None:
    lm, ids = tiny.__wrapped__("llada"), text(1, 5)
    with sinks.record(lm) as rec:
        lm.model(ids).logits.sum().backward()
    assert lm.model.model.layers[0].self_attn.k_proj.weight.grad.abs().max() > 0
    assert not rec.incoming.requires_grad


@pytest.mark.parametrize("window", [1, 3, 50])
def test_a_window_is_an_interval_of_keys(window: int) -> None:
    visible = visible_keys(1, 6, 6, mask_function=sliding_window_causal_mask_function(window))
    i, j = torch.arange(6)[:, None], torch.arange(6)
    mask = visible.mask(0, 6, 6, torch.device("cpu"))
    assert mask is not None
    assert torch.equal(mask[0, 0], (j <= i) & (j > i - window))


def test_other_shapes_of_masks_are_refused() -> None:
    with pytest.raises(InputError, match="one interval"):
        visible_keys(1, 4, 4, mask_function=lambda batch, head, i, j: (i - j) % 2 == 0)
    four = torch.zeros(1, 1, 2, 2)
    with pytest.raises(InputError, match="4-D masks are not supported"):
        attention.attention(nn.Module(), four, four, four, four)


def test_attention_of_other_mathematics_is_refused() -> None:
    four = torch.zeros(1, 1, 2, 2)
    with pytest.raises(InputError, match="softcap"):
        attention.attention(nn.Module(), four, four, four, None, softcap=50.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"patterns": "all"}, "none, mean, full"),
        ({"layers": 3}, "Capture.layers"),
        ({"layers": []}, "one or more"),
        ({"heads": [0.5]}, "whole numbers"),
        ({"steps": [-1]}, "0 or more"),
    ],
)
def test_a_capture_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sinks.Capture(**wrong)


def test_the_chunked_path_never_holds_a_whole_pattern() -> None:
    """Of 256 queries it takes as many at a time as fit into the chunk."""
    query, visible = torch.randn(1, 4, 256, 8), Visible(torch.ones(1, 256).bool(), None, None, 0)
    sizes: list[int] = []
    softmax = attention.softmax

    def spy(scores: Tensor) -> Tensor:
        sizes.append(scores.numel())
        return softmax(scores)

    with mock.patch.object(attention, "softmax", spy), mock.patch.object(attention, "_CHUNK_BYTES", 4 * 4 * 256 * 24):
        PATHS["chunked"](query, query, query, 1.0, visible, Ask(frozenset({Measure()})), 0)
    assert sizes == [4 * 256 * 24] * 10 + [4 * 256 * 16]


@pytest.mark.parametrize("kind", ALL)
def test_the_module_reaches_its_own_probe_only(kind: str) -> None:
    lm = tiny(kind)
    reached = {id(module.probe) for module in lm.model.modules() if hasattr(module, "layer_idx")}
    assert reached == {id(lm.probe)}
    assert replace(lm.probe.ask) == Ask()
