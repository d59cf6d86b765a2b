"""Sink masking: which keys are blocked, step by step, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ALL, DIFFUSION, MASK, ragged, short, text, there, tiny
from torch import Tensor

import sinks
from sinks.attention import PATHS, Ask, Measure, Visible
from sinks.errors import InputError
from sinks.masking import SinkMasking, blocked_keys, eligible_keys
from sinks.noise import Noise
from sinks.samplers import Generation


def column(*incoming: float) -> Tensor:
    """(1, 1, 1, S): one layer, row and head."""
    return torch.tensor(incoming)[None, None, None]


def block(masking: SinkMasking, incoming: Tensor, eligible: Tensor | None = None, step: int = 1) -> Tensor:
    """(L, B, H, S) bool, for rows without padding."""
    everything = torch.ones(incoming.shape[1], incoming.shape[3], dtype=torch.bool)
    noise = Noise(masking.seed, torch.arange(incoming.shape[1]))
    return blocked_keys(masking, incoming, everything if eligible is None else eligible, everything, step, noise)


def where(blocked: Tensor) -> list[int]:
    return blocked[0, 0, 0].nonzero()[:, 0].tolist()


def blocked_in(g: Generation) -> Tensor:
    return there(g.blocked)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("measure", "how", "counts"),
    [
        ("unblocked", "scores", [0, 1, 1, 1, 1, 1]),  # judged before blocking, a lasting sink stays blocked
        ("blocked", "scores", [0, 1, 0, 1, 0, 1]),  # judged after it, the sink is gone for one step and then back
        ("unblocked", "values", [0, 1, 1, 1, 1, 1]),
        ("blocked", "values", [0, 1, 1, 1, 1, 1]),  # a key that loses its value keeps its attention
    ],
)
def test_a_sink_that_is_always_there(path: str, measure: str, how: str, counts: list[int]) -> None:
    """Eight alike queries give key 5 nine tenths of their attention, step after step."""
    query = torch.ones(1, 1, 8, 1)
    key = torch.zeros(1, 1, 8, 1)
    key[0, 0, 5] = torch.tensor(63.0).log()  # 63 / (63 + 7) = 0.9
    masking = SinkMasking(epsilon=3, measure=measure, path=how)
    blocked, seen_counts, received = None, [], []
    for step in range(6):
        ask = Ask(frozenset({masking.judged, Measure()}), blocked=blocked, path=how)
        _, seen = PATHS[path](query, key, torch.ones(1, 1, 8, 1), 1.0, Visible(None, None, None, 0), ask, 0)
        seen_counts.append(0 if blocked is None else int(blocked.sum()))
        received.append(float(seen.columns[Measure()][0, 0, 5]))
        blocked = block(masking, seen.columns[masking.judged][None], step=step + 1)
        assert where(blocked) in ([5], [])
    assert seen_counts == counts
    assert received == pytest.approx([7.2] * 6)  # what is reported is always before blocking


@pytest.mark.parametrize("path", PATHS)
def test_a_blocked_key_gets_nothing_from_anyone(path: str) -> None:
    query, key, value = (torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    blocked = torch.zeros(1, 1, 2, 5, dtype=torch.bool)
    blocked[0, 0, 0, [1, 3]] = True
    visible, after = Visible(None, None, None, 0), Measure(after_blocking=True)
    ask = Ask(frozenset({after}), blocked=blocked)
    output, seen = PATHS[path](query, key, value, 0.5, visible, ask, 0)
    kept = [0, 2, 4]
    without, _ = PATHS[path](query[:, :1], key[:, :1, kept], value[:, :1, kept], 0.5, visible, Ask(), 0)
    torch.testing.assert_close(output[:, :, :1], without)
    assert seen.columns[after][0, 0, [1, 3]].tolist() == [0, 0]  # from the blocked token itself, too
    untouched, _ = PATHS[path](query, key, value, 0.5, visible, Ask(), 0)
    assert torch.equal(output[:, :, 1], untouched[:, :, 1])


@pytest.mark.parametrize("path", PATHS)
def test_the_values_path_takes_the_value_alone(path: str) -> None:
    query, key, value = (torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    blocked = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
    blocked[..., 2] = True
    visible = Visible(None, None, None, 0)
    output, _ = PATHS[path](query, key, value, 0.5, visible, Ask(blocked=blocked, path="values"), 0)
    zeroed, _ = PATHS[path](query, key, value.index_fill(2, torch.tensor(2), 0), 0.5, visible, Ask(), 0)
    torch.testing.assert_close(output, zeroed)


@pytest.mark.parametrize(
    ("settings", "incoming", "found"),
    [
        pytest.param({}, (4.0, 1.0, 2.0, 0.0, 3.0), [0, 4], id="all above the others' mean"),
        pytest.param({"epsilon": 1.3}, (4.0, 1.0, 2.0, 0.0, 3.0), [0, 4], id="3 against 1.75 + 1.2"),
        pytest.param({"epsilon": 2.0}, (4.0, 1.0, 2.0, 0.0, 3.0), [0], id="4 against 1.5 + 2"),
        pytest.param({"epsilon": 9.0}, (4.0, 1.0, 2.0, 0.0, 3.0), [], id="none"),
        pytest.param({"top_k": 1}, (3.0, 0.0, 4.0, 0.0), [2], id="the strongest"),
        pytest.param({"top_k": 1}, (0.0, 4.0, 4.0, 0.0), [1], id="of equals the first"),
        pytest.param({"top_k": 0}, (3.0, 0.0, 4.0, 0.0), [], id="top_k 0"),
        pytest.param({"mask_sink_ratio": 0.5}, (3.0, 0.0, 4.0, 0.0), [2], id="half"),
        pytest.param({"mask_sink_ratio": 0.51}, (3.0, 0.0, 4.0, 0.0), [0, 2], id="rounded up"),
        pytest.param({"mask_sink_ratio": 0.0}, (3.0, 0.0, 4.0, 0.0), [], id="no share"),
        pytest.param({"control": "bottom", "top_k": 1}, (3.0, 0.5, 4.0, 0.1), [3], id="the weakest"),
        pytest.param({"control": "bottom"}, (3.0, 0.5, 4.0, 0.1, 0.2, 0.3), [3, 4], id="as many as there are sinks"),
        pytest.param({"layers": [0]}, (3.0, 0.0, 4.0, 0.0), [0, 2], id="its own layer"),
    ],
)
def test_which_keys(settings: dict[str, Any], incoming: tuple[float, ...], found: list[int]) -> None:
    if settings == {"epsilon": 1.3}:
        found = [0]  # 3 does not pass 1.75 + 1.3
    assert where(block(SinkMasking(**settings), column(*incoming))) == found


@given(
    incoming=st.lists(st.floats(0, 20, width=32), min_size=1, max_size=12),
    epsilon=st.floats(0, 2),
    ratio=st.floats(0, 1),
    top_k=st.none() | st.integers(0, 15),
    control=st.sampled_from(["sinks", "random", "bottom"]),
    flags=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_budgets(
    incoming: list[float], epsilon: float, ratio: float, top_k: int | None, control: str, flags: list[bool]
) -> None:
    eligible = torch.tensor(flags[: len(incoming)])[None]
    given_masking: dict[str, Any] = {"epsilon": epsilon, "mask_sink_ratio": ratio, "top_k": top_k}
    taken = block(SinkMasking(**given_masking), column(*incoming), eligible)
    other = block(SinkMasking(**given_masking, control=control), column(*incoming), eligible)
    found = sinks.detect(column(*incoming), epsilon, ~eligible)
    assert not (taken & ~found).any()
    assert not ((taken | other) & ~eligible).any()
    budget = min(-int(-(int(found.sum()) * ratio - 1e-9) // 1), len(incoming) - 1)
    budget = max(0, budget if top_k is None else min(budget, top_k))
    assert int(taken.sum()) == budget
    if control == "random":
        assert not (taken & other).any()
        assert int(other.sum()) == min(budget, int(eligible.sum()) - budget)
    else:
        assert int(other.sum()) == budget
    weakest_taken = column(*incoming)[taken].min() if budget else torch.inf
    assert not (column(*incoming)[found & ~taken] > weakest_taken).any()


def test_one_valid_key_stays_open() -> None:
    """Padding is no valid key, so two real ones leave one to block; a single one none."""
    valid = torch.tensor([[False, False, True, True], [False, False, False, True]])
    incoming = torch.tensor([[0.0, 0.0, 0.4, 1.6], [0.0, 0.0, 0.0, 1.0]])[None, :, None]
    for control in ("sinks", "random", "bottom"):
        masking = SinkMasking(top_k=9, control=control)
        blocked = blocked_keys(masking, incoming, valid, valid, 1, Noise(0, torch.arange(2)))
        assert blocked.sum(-1).tolist() == [[[1], [0]]]
        assert not (blocked & ~valid[None, :, None]).any()


def test_eligible() -> None:
    """A padded prompt of two tokens, the first of them a mask token, and three generated positions."""
    valid = torch.tensor([[False, True, True, True, True, True]])
    prompt = torch.tensor([[True, True, True, False, False, False]])
    masked = torch.tensor([[False, True, False, False, True, True]])
    found = {
        name: eligible_keys(SinkMasking(eligible=name), valid, masked, prompt)[0].nonzero()[:, 0].tolist()
        for name in ("all", "prompt", "generated", "masked", "unmasked")
    }
    assert found == {
        "all": [1, 2, 3, 4, 5],
        "prompt": [1, 2],
        "generated": [3, 4, 5],
        "masked": [1, 4, 5],
        "unmasked": [2, 3],
    }


def test_eligible_keys_are_judged_among_themselves() -> None:
    """3 is no sink among 9 and 9, but is one among 1 and 1."""
    incoming, eligible = column(9.0, 9.0, 3.0, 1.0, 1.0), torch.tensor([[False, False, True, True, True]])
    assert where(block(SinkMasking(epsilon=1.5), incoming)) == [0, 1]
    assert where(block(SinkMasking(epsilon=1.5), incoming, eligible)) == [2]


def test_scopes_judge_means_and_block_everywhere() -> None:
    """Two layers of two heads; the last key wins the mean of layer 1 and of the model, the first that of layer 0."""
    incoming = torch.tensor([[[4.0, 0, 0], [1.0, 2, 0]], [[0.0, 0, 9], [0.0, 6, 0]]])[:, None]
    assert block(SinkMasking(top_k=1), incoming).int().tolist() == [
        [[[1, 0, 0], [0, 1, 0]]],
        [[[0, 0, 1], [0, 1, 0]]],
    ]
    layer = block(SinkMasking(top_k=1, scope="layer"), incoming)
    assert layer.int().tolist() == [[[[1, 0, 0]] * 2], [[[0, 0, 1]] * 2]]
    model = block(SinkMasking(top_k=1, scope="model"), incoming)
    assert model.int().tolist() == [[[[0, 0, 1]] * 2]] * 2
    part = block(SinkMasking(top_k=1, scope="model", layers=[1], heads=[0]), incoming)
    assert part.int().tolist() == [[[[0, 0, 0]] * 2], [[[0, 0, 1], [0, 0, 0]]]]


def test_the_random_control_belongs_to_seed_item_step_layer_and_head() -> None:
    incoming = torch.rand(2, 3, 2, 40, generator=torch.Generator().manual_seed(0))
    valid, masking = torch.ones(3, 40, dtype=torch.bool), SinkMasking(top_k=5, control="random")

    def drawn(items: list[int], step: int = 1, seed: int = 0) -> Tensor:
        rows = slice(0, len(items))
        noise = Noise(seed, torch.tensor(items))
        return blocked_keys(masking, incoming[:, rows], valid[rows], valid[rows], step, noise)

    together = drawn([4, 7, 9])
    assert torch.equal(drawn([4]), together[:, :1])
    padded, real = torch.zeros(2, 1, 2, 43), torch.arange(43)[None] >= 3
    padded[..., 3:] = incoming[:, :1]
    alone = blocked_keys(masking, padded, real, real, 1, Noise(0, torch.tensor([4])))
    assert torch.equal(alone[..., 3:], together[:, :1])
    assert not alone[..., :3].any()
    for other in (drawn([5]), drawn([4], step=2), drawn([4], seed=1)):
        assert not torch.equal(other, together[:, :1])
    same = incoming[:1, :1, :1].expand(2, 1, 2, 40)
    each = blocked_keys(masking, same, valid[:1], valid[:1], 1, Noise(0, torch.tensor([4]))).flatten(0, 2)
    assert len({tuple(row.tolist()) for row in each}) == 4


def test_random_keys_are_uniform_over_the_others() -> None:
    """Key 0 is always the sink; each of the other nine is drawn a ninth of the time."""
    incoming = column(9.0, *[0.1] * 9)
    masking = SinkMasking(top_k=1, control="random")
    counts = torch.stack([block(masking, incoming, step=step)[0, 0, 0] for step in range(1, 2001)]).sum(0)
    assert counts[0] == 0
    assert int(counts.sum()) == 2000
    assert (counts[1:] - 2000 / 9).abs().max() < 4 * (2000 * 8 / 81) ** 0.5


WAYS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 0},
    "ratio": {"mask_sink_ratio": 0.0},
    "epsilon": {"epsilon": 1e6},
    "steps": {"top_k": 2, "steps": (50, 60)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ALL)
def test_a_masking_that_blocks_nothing_changes_nothing(kind: str, way: str) -> None:
    if (kind, way) == ("ar", "steps"):
        way = "epsilon"  # a window of steps is for denoising
    ids, mask = ragged([6, 3])
    plain = sinks.generate(tiny(kind), ids, mask, capture=sinks.Capture(), **short(kind))
    masked = sinks.generate(
        tiny(kind), ids, mask, capture=sinks.Capture(), masking=SinkMasking(**WAYS[way]), **short(kind)
    )
    assert torch.equal(plain.trajectory, masked.trajectory)
    assert torch.equal(there(plain.incoming).nan_to_num(-1), there(masked.incoming).nan_to_num(-1))
    assert plain.blocked is None
    assert blocked_in(masked).shape == (8, 3, 2, 4)
    assert not blocked_in(masked).any()


@pytest.mark.parametrize("kind", ALL)
def test_masking_acts_from_the_second_step_on(kind: str) -> None:
    ids, mask = ragged([6, 3])
    g = sinks.generate(tiny(kind), ids, mask, masking=SinkMasking(top_k=2), **short(kind))
    assert not blocked_in(g)[0].any()
    assert (blocked_in(g)[1:] > 0).all()
    assert blocked_in(g).max() == 2
    plain = sinks.generate(tiny(kind), ids, mask, **short(kind))
    assert torch.equal(plain.trajectory[:2], g.trajectory[:2])
    assert not torch.equal(plain.trajectory, g.trajectory)


def test_only_where_and_when_it_was_asked_for() -> None:
    g = sinks.generate(
        tiny("llada"),
        text(2, 5),
        masking=SinkMasking(top_k=1, layers=[0, 2], heads=[3], steps=(2, 4)),
        **short("llada"),
    )
    wanted = torch.zeros(8, 3, 2, 4, dtype=torch.bool)
    wanted[2:5, 0, :, 3] = wanted[2:5, 2, :, 3] = True
    assert torch.equal(blocked_in(g) > 0, wanted)


@pytest.mark.parametrize("eligible", ["prompt", "generated", "masked", "unmasked"])
@pytest.mark.parametrize("kind", DIFFUSION)
def test_eligible_keys_of_a_generation(kind: str, eligible: str) -> None:
    """With every eligible key above the threshold of the control's budget, only such keys are ever counted."""
    g = sinks.generate(tiny(kind), text(1, 5), masking=SinkMasking(eligible=eligible), **short(kind))
    before = g.trajectory[:-1, 0] == MASK
    most = {"prompt": 5, "generated": 8}.get(eligible)
    for step in range(1, 8):
        masks = int(before[step].sum())
        limit = most if most is not None else {"masked": masks, "unmasked": 13 - masks}[eligible]
        assert blocked_in(g)[step].max() < limit  # never all of them: not all are above their own mean
    if eligible == "masked":
        single = before.sum(-1) == 1
        assert not blocked_in(g)[single].any()  # a single key has no others to be judged by


@pytest.mark.parametrize("path", PATHS)
def test_a_head_that_shares_its_keys_is_blocked_alone(path: str) -> None:
    """Dream's query heads 0 and 1 read the same key head."""
    lm = tiny.__wrapped__("dream", path)
    mixed: list[Tensor] = []
    hook = lm.model.model.layers[1].self_attn.o_proj
    hook.register_forward_pre_hook(lambda _, inputs: mixed.append(inputs[0].view(1, 9, 4, 8)))
    ids = text(1, 9)
    blocked = torch.zeros(3, 1, 4, 9, dtype=torch.bool)
    blocked[1, 0, 1, [2, 6]] = True
    seen = []
    with torch.no_grad():
        for keys in (None, blocked):
            with lm.probe.asked(Ask(frozenset({Measure()}), "full", blocked=keys)) as layers:
                lm.model(ids)
            seen.append(layers)
    others = [0, 2, 3]
    assert torch.equal(mixed[0][:, :, others], mixed[1][:, :, others])
    assert not torch.equal(mixed[0][:, :, 1], mixed[1][:, :, 1])
    for layer in (0, 1):  # patterns are those before blocking
        assert torch.equal(there(seen[0][layer].pattern), there(seen[1][layer].pattern))
    assert not torch.equal(there(seen[0][2].pattern), there(seen[1][2].pattern))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["llada", "dream", "ar"])
def test_more_keys_than_there_are_leave_numbers(
    kind: str, path: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    lm, (ids, mask) = tiny(kind, path, dtype), ragged([3, 1])
    everything = SinkMasking(top_k=1000, control="bottom")
    g = sinks.generate(lm, ids, mask, capture=sinks.Capture(), masking=everything, **short(kind))
    assert "1000" in caplog.text
    incoming = there(g.incoming)
    assert incoming[~incoming.isnan()].isfinite().all()
    assert kind == "ar" or not incoming.isnan().any()
    assert g.confidence.nan_to_num(0).isfinite().all()
    assert blocked_in(g).max() < 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", PATHS)
def test_a_row_with_every_key_blocked_gives_zeros(path: str, dtype: torch.dtype) -> None:
    """It cannot come from our own masking, but must not spread NaN if it is asked for."""
    query, key, value = (torch.randn(1, 2, 4, 8).to(dtype) for _ in range(3))
    blocked = torch.ones(1, 1, 2, 4, dtype=torch.bool)
    measures = frozenset({Measure(), Measure(after_blocking=True)})
    output, seen = PATHS[path](query, key, value, 0.3, Visible(None, None, None, 0), Ask(measures, blocked=blocked), 0)
    assert (output == 0).all()
    assert (seen.columns[Measure(after_blocking=True)] == 0).all()
    torch.testing.assert_close(seen.columns[Measure()].sum(-1), torch.full((1, 2), 4.0))


@pytest.mark.parametrize("kind", ["llada", "ar"])
def test_what_is_recorded_is_what_was_blocked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, counts = tiny(kind), []
    compute = PATHS["chunked"]

    def spy(*args: Any) -> Any:
        ask, layer = args[-2:]
        count = torch.zeros(2, 4, dtype=torch.int64) if ask.blocked is None else ask.blocked[layer].sum(-1)
        counts.append(count)
        return compute(*args)

    monkeypatch.setitem(PATHS, "chunked", spy)
    g = sinks.generate(lm, *ragged([6, 3]), masking=SinkMasking(epsilon=0.3), **short(kind))
    assert torch.equal(torch.stack(counts).view(8, 3, 2, 4), blocked_in(g))
    assert len(blocked_in(g).unique()) > 2


def test_guidance_blocks_each_half_by_its_own_sinks() -> None:
    """The rows without a prompt are judged by what they received; what is reported is the conditional rows'."""
    lm, asked = tiny.__wrapped__("llada"), []
    remember = lm.probe.asked

    def spy(ask: Ask) -> Any:
        asked.append(ask)
        return remember(ask)

    lm.probe.asked = spy  # type: ignore[method-assign]
    options: dict[str, Any] = {"cfg_scale": 1.0, "capture": sinks.Capture(), "masking": SinkMasking(epsilon=0.5)}
    g = sinks.generate(lm, text(2, 5), **options, **short("llada"))
    assert there(g.incoming).shape == (8, 3, 2, 4, 13)
    assert blocked_in(g).shape == (8, 3, 2, 4)
    for step in range(1, 8):
        blocked = there(asked[step].blocked)
        assert blocked.shape == (3, 4, 4, 13)
        assert torch.equal(blocked[:, :2], sinks.detect(there(g.incoming)[step - 1], 0.5))
        assert torch.equal(blocked[:, :2].sum(-1), blocked_in(g)[step])
        assert not torch.equal(blocked[:, :2].sum(-1), blocked[:, 2:].sum(-1))


def test_the_first_step_blocks_nothing_whatever_is_asked() -> None:
    masking = SinkMasking(steps=(0, 3))
    assert [masking.acts_at(step) for step in range(5)] == [False, True, True, True, False]
    assert not any(SinkMasking(top_k=0).acts_at(step) for step in range(5))


# Positions are filled by draws: confidences that differ in the last digits would make this a test of rounding.
BY_DRAWS = {
    "llada": {"remasking": "random"},
    "mmada": {"remasking": "random"},
    "dream": {"remasking": "origin"},
    "ar": {},
}


@settings(max_examples=40, derandomize=True)
@given(
    kind=st.sampled_from(ALL),
    top_k=st.integers(0, 2),  # with most keys blocked all masked positions see the same, and rounding chooses
    epsilon=st.sampled_from([0.0, 0.5, 2.0]),
    control=st.sampled_from(["sinks", "random", "bottom"]),
    how=st.sampled_from(["scores", "values"]),
    scope=st.sampled_from(["head", "layer", "model"]),
    measure=st.sampled_from(["unblocked", "blocked"]),
    itself=st.booleans(),
)
def test_masking_does_not_know_its_batch(
    kind: str, top_k: int | None, epsilon: float, control: str, how: str, scope: str, measure: str, itself: bool
) -> None:
    masking = SinkMasking(
        epsilon=epsilon, top_k=top_k, control=control, path=how, scope=scope, measure=measure, exclude_self=itself
    )
    lengths, items = [6, 2, 4], [5, 3, 9]
    ids, mask = ragged(lengths)
    options = {"masking": masking} | short(kind) | BY_DRAWS[kind]
    together = sinks.generate(tiny(kind), ids, mask, items=items, **options)
    for row, length in enumerate(lengths):
        alone = sinks.generate(tiny(kind), ids[row : row + 1, -length:], items=items[row : row + 1], **options)
        assert torch.equal(alone.trajectory[:, 0], together.trajectory[:, row, 6 - length :])
        assert torch.equal(blocked_in(alone)[:, :, 0], blocked_in(together)[:, :, row])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epsilon": -1.0}, "epsilon=-1.0"),
        ({"epsilon": float("nan")}, "epsilon=nan"),
        ({"epsilon": float("inf")}, "epsilon=inf"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"mask_sink_ratio": 1.1}, "between 0 and 1"),
        ({"mask_sink_ratio": float("nan")}, "between 0 and 1"),
        ({"scope": "all"}, "use one of head, layer, model"),
        ({"measure": "after"}, "use one of unblocked, blocked"),
        ({"visibility": "causal"}, "use one of raw, per_query"),
        ({"rows": "first"}, "use one of all, last"),
        ({"eligible": "text"}, "use one of all, prompt, generated, masked, unmasked"),
        ({"control": "none"}, "use one of sinks, random, bottom"),
        ({"path": "keys"}, "use one of scores, values"),
        ({"steps": (3, 1)}, "0 <= first <= last"),
        ({"steps": (2,)}, "first, last"),
        ({"layers": 3}, "layers=3"),
        ({"heads": [0.5]}, "whole numbers"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_a_masking_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SinkMasking(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"), [({"layers": [3]}, "layer 3 .* 0 to 2"), ({"heads": [4]}, "head 4 .* 0 to 3")]
)
def test_layers_and_heads_out_of_range(wrong: dict[str, Any], message: str) -> None:
    for given_object in ({"masking": SinkMasking(**wrong)}, {"capture": sinks.Capture(**wrong)}):
        with pytest.raises(InputError, match=message):
            sinks.generate(tiny("llada"), text(1, 3), **given_object, **short("llada"))


@pytest.mark.parametrize("only_causal", [{"visibility": "per_query"}, {"rows": "last"}])
def test_what_is_for_causal_models_changes_nothing_in_others(only_causal: dict[str, str]) -> None:
    ids = text(1, 12)
    plain, other = (
        sinks.generate(tiny("llada"), ids, masking=SinkMasking(top_k=2, **given), **short("llada"))  # type: ignore[arg-type]
        for given in ({}, only_causal)
    )
    assert torch.equal(plain.trajectory, other.trajectory)
    assert torch.equal(blocked_in(plain), blocked_in(other))
