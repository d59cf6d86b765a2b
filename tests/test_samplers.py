"""Whole generations: rows that do not know each other, prompts that stay, and the shape of what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_dream, write_llada
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ALL, DIFFUSION, MASK, PAD, ragged, short, stock, text, there, tiny
from torch import Tensor

import sinks
from sinks.errors import InputError
from sinks.models import LanguageModel
from sinks.samplers import Generation

WAYS: dict[str, list[dict[str, Any]]] = {
    "llada": [
        {},
        {"steps": 4},
        {"steps": 16},
        {"remasking": "random"},
        {"temperature": 0.7},
        {"cfg_scale": 1.2},
        {"remasking": "random", "temperature": 1.0, "cfg_scale": 0.4},
        {"eos_eot_last": True},
        {"logits_eos_inf": True, "temperature": 0.5},
    ],
    "mmada": [{}, {"temperature": 0.7, "cfg_scale": 1.2}, {"remasking": "random", "eot_token": 17}],
    "dream": [
        {},
        {"steps": 3},
        {"remasking": "origin"},
        {"remasking": "topk_margin", "top_p": 0.8},
        {"remasking": "maskgit_plus", "temperature": 0.7, "top_k": 5},
        {"alg_temp": 0.5, "steps": 5},
    ],
    "ar": [{}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.7, "top_k": 9}],
    "mistral": [{}],
    "gemma3": [{}],
}
EVERY_WAY = [(kind, way) for kind, ways in WAYS.items() for way in ways]
LENGTHS, ITEMS = [7, 2, 4, 1], [5, 3, 11, 0]


def kept(g: Generation) -> Tensor:
    return there(g.incoming)


@pytest.mark.parametrize(("kind", "way"), EVERY_WAY)
def test_a_row_is_what_it_is_alone(kind: str, way: dict[str, Any]) -> None:
    """Unequal prompts, left-padded: tokens exactly, incoming attention to float noise, no attention for padding."""
    ids, mask = ragged(LENGTHS)
    options = {"capture": sinks.Capture(value_norm=True)} | short(kind) | way
    together = sinks.generate(tiny(kind), ids, mask, items=ITEMS, **options)
    for row, length in enumerate(LENGTHS):
        alone = sinks.generate(tiny(kind), ids[row : row + 1, -length:], items=ITEMS[row : row + 1], **options)
        left = max(LENGTHS) - length
        assert torch.equal(alone.trajectory[:, 0], together.trajectory[:, row, left:])
        assert torch.equal(alone.tokens[0], together.tokens[row, left:])
        assert (kept(together)[:, :, row, :, :left] == 0).all()
        for got, want in (
            (kept(together)[:, :, row, :, left:], kept(alone)[:, :, 0]),
            (together.confidence[:, row, left:], alone.confidence[:, 0]),
            (there(together.value_norm)[:, :, row, :, left:], there(alone.value_norm)[:, :, 0]),
        ):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["llada", "dream", "ar"])
def test_draws_belong_to_seed_and_item(kind: str) -> None:
    ids, warm = text(1, 4).repeat(3, 1), {"temperature": 1.0} | short(kind)
    g = sinks.generate(tiny(kind), ids, items=[4, 9, 4], **warm)
    assert torch.equal(g.tokens[0], g.tokens[2])
    assert not torch.equal(g.tokens[0], g.tokens[1])
    assert torch.equal(sinks.generate(tiny(kind), ids, items=[4, 9, 4], **warm).tokens, g.tokens)
    assert not torch.equal(sinks.generate(tiny(kind), ids, items=[4, 9, 4], seed=1, **warm).tokens, g.tokens)
    counted = sinks.generate(tiny(kind), ids, **warm)  # items 0, 1, 2
    assert torch.equal(counted.tokens, sinks.generate(tiny(kind), ids, items=[0, 1, 2], **warm).tokens)


@pytest.mark.parametrize("count", [1, 3])
def test_items_are_one_per_row(count: int) -> None:
    with pytest.raises(InputError, match=f"items names {count} items, but there are 2 prompts"):
        sinks.generate(tiny(), text(2, 3), items=list(range(count)), **short("llada"))


@settings(max_examples=40)
@given(
    case=st.sampled_from([pair for pair in EVERY_WAY if pair[0] in DIFFUSION]),
    masked=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=2, max_size=2),
)
def test_no_position_that_holds_text_is_ever_written(
    case: tuple[str, dict[str, Any]], masked: list[list[bool]]
) -> None:
    """Also where the prompts hold unequal numbers of mask tokens (which are filled) and padding that looks like one."""
    kind, way = case
    ids, mask = ragged([6, 4])
    ids[torch.tensor(masked) & mask.bool()] = MASK
    ids[1, 0] = MASK  # padding
    g = sinks.generate(tiny(kind), ids, mask, **short(kind) | way)
    given_text = torch.cat([(ids != MASK) | ~mask.bool(), torch.zeros(2, 8, dtype=torch.bool)], 1)
    assert (g.trajectory == g.trajectory[0])[:, given_text].all()
    placed = g.trajectory[:-1] != MASK
    assert (g.trajectory[1:] == g.trajectory[:-1])[placed].all()


@pytest.mark.parametrize("kind", DIFFUSION)
def test_mask_tokens_in_a_prompt_are_told_apart_by_row(kind: str) -> None:
    """Upstream Dream fills by the batch's mean and writes over prompts; here a row goes by its own masks."""
    ids = text(3, 6)
    ids[0, [1, 4]] = ids[1, 2] = MASK
    together = sinks.generate(tiny(kind), ids, steps=4, **short(kind))
    for row in range(3):
        alone = sinks.generate(tiny(kind), ids[row : row + 1], steps=4, **short(kind))
        assert torch.equal(alone.trajectory[:, 0], together.trajectory[:, row])


def test_a_prompt_that_begins_with_a_mask_token() -> None:
    """Dream: the first token has none before it, also where there is padding before it."""
    ids, mask = ragged([5, 3])
    ids[1, 2] = MASK
    together = sinks.generate(tiny("dream"), ids, mask, **short("dream"))
    alone = sinks.generate(tiny("dream"), ids[1:, 2:], **short("dream"))
    assert torch.equal(alone.trajectory[:, 0], together.trajectory[:, 1, 2:])


def test_equal_confidences_do_not_depend_on_padding() -> None:
    """A confident model: in float32 many probabilities are exactly 1."""
    lm = tiny.__wrapped__("llada")
    lm.model.lm_head.weight.data *= 60
    ids, mask = ragged([12, 3])
    options: dict[str, Any] = {"gen_len": 32, "block_len": 32, "steps": 8}
    together = sinks.generate(lm, ids, mask, **options)
    alone = sinks.generate(lm, ids[1:, -3:], **options)
    assert int((alone.confidence[0] == 1).sum()) > 4
    assert torch.equal(alone.trajectory[:, 0], together.trajectory[:, 1, 9:])


@pytest.mark.parametrize("kind", DIFFUSION)
def test_a_trajectory_begins_masked_and_ends_in_the_result(kind: str) -> None:
    ids = text(2, 5)
    g = sinks.generate(tiny(kind), ids, **short(kind))
    assert g.trajectory.shape == (9, 2, 13)
    assert g.trajectory.dtype == g.tokens.dtype == torch.int64
    assert torch.equal(g.trajectory[0, :, :5], ids)
    assert (g.trajectory[0, :, 5:] == MASK).all()
    assert torch.equal(g.trajectory[-1], g.tokens)
    assert not (g.tokens == MASK).any()


@pytest.mark.parametrize("kind", DIFFUSION)
def test_confidence_is_nan_exactly_where_nothing_could_be_placed(kind: str) -> None:
    """LLaDA and MMaDA place within the blocks so far, Dream anywhere."""
    g = sinks.generate(tiny(kind), text(2, 5), **short(kind))
    could = g.trajectory[:-1] == MASK
    if kind != "dream":
        ends = 5 + 4 * (torch.arange(8) // 4 + 1)
        could &= (torch.arange(13) < ends[:, None])[:, None]
    assert g.confidence.shape == (8, 2, 13)
    assert torch.equal(~g.confidence.isnan(), could)
    for step in range(8):
        for row in range(2):
            placed = g.trajectory[step + 1, row] != g.trajectory[step, row]
            rest = could[step, row] & ~placed
            if placed.any() and rest.any():
                assert g.confidence[step, row][placed].min() >= g.confidence[step, row][rest].max()


def test_low_confidence_is_a_probability_and_entropy_negative() -> None:
    llada = sinks.generate(tiny("llada"), text(1, 5), **short("llada")).confidence
    dream = sinks.generate(tiny("dream"), text(1, 5), **short("dream")).confidence
    there = llada[~llada.isnan()]
    assert ((there > 0) & (there <= 1)).all()
    assert (dream[~dream.isnan()] <= 0).all()


def test_guidance_is_computed_from_both_halves() -> None:
    """The first step by hand: u + (w + 1)(c - u) over prompt and hidden prompt."""
    lm, ids = tiny("llada"), text(1, 5)
    masked = torch.full((1, 8), MASK)
    with torch.no_grad():
        conditional = lm.model(torch.cat([ids, masked], 1)).logits
        without = lm.model(torch.full((1, 13), MASK)).logits
    logits = without + 2.5 * (conditional - without)
    probability, token = logits[0, 5:9].softmax(-1).max(-1)
    g = sinks.generate(lm, ids, cfg_scale=1.5, **short("llada"))
    torch.testing.assert_close(g.confidence[0, 0, 5:9], probability)
    best = int(probability.argmax())
    assert int(g.trajectory[1, 0, 5 + best]) == int(token[best])


def test_guidance_captures_the_conditional_rows() -> None:
    lm, (ids, mask) = tiny("llada"), ragged([5, 3])
    g = sinks.generate(lm, ids, mask, cfg_scale=1.5, capture=sinks.Capture(patterns="full"), **short("llada"))
    with torch.no_grad(), sinks.record(lm, patterns=True) as rec:
        lm.model(g.trajectory[0], attention_mask=torch.cat([mask, torch.ones(2, 8, dtype=torch.int64)], 1))
    torch.testing.assert_close(kept(g)[0], rec.incoming, atol=1e-4, rtol=0)
    torch.testing.assert_close(g.patterns[0], rec.patterns, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", DIFFUSION)
def test_what_is_captured_is_what_each_forward_pass_shows(kind: str) -> None:
    lm = tiny(kind)
    g = sinks.generate(lm, text(1, 5), capture=sinks.Capture(patterns="full", value_norm=True), **short(kind))
    assert sorted(g.patterns) == list(range(8))
    for step in range(8):
        with torch.no_grad(), sinks.record(lm, patterns=True, value_norm=True) as rec:
            lm.model(g.trajectory[step])
        assert torch.equal(kept(g)[step], rec.incoming)
        assert torch.equal(g.patterns[step], rec.patterns)
        assert torch.equal(there(g.value_norm)[step], rec.value_norm)


@pytest.mark.parametrize("kind", ALL)
def test_a_part_of_the_capture(kind: str) -> None:
    ids = text(2, 5)
    whole = sinks.generate(tiny(kind), ids, capture=sinks.Capture(patterns="full", value_norm=True), **short(kind))
    layers, heads = [2, 0], [3, 1]
    part = sinks.generate(
        tiny(kind),
        ids,
        capture=sinks.Capture(layers=layers, heads=heads, steps={0, 5}, patterns="full", value_norm=True),
        masking=sinks.SinkMasking(epsilon=1e6),
        **short(kind),
    )
    assert kept(part).shape[:4] == (8, 2, 2, 2)
    assert torch.equal(kept(part).nan_to_num(-1), kept(whole)[:, layers][:, :, :, heads].nan_to_num(-1))
    norms = there(whole.value_norm)[:, layers][:, :, :, heads]
    assert torch.equal(there(part.value_norm).nan_to_num(-1), norms.nan_to_num(-1))
    assert sorted(part.patterns) == [0, 5]
    for step, pattern in part.patterns.items():
        assert torch.equal(pattern, whole.patterns[step][layers][:, :, heads])
    assert there(part.blocked).shape == (8, 3, 2, 4)


@pytest.mark.parametrize("kind", ALL)
def test_mean_patterns_are_means_over_all_heads(kind: str) -> None:
    ids = text(2, 5)
    full = sinks.generate(tiny(kind), ids, capture=sinks.Capture(patterns="full"), **short(kind))
    mean = sinks.generate(
        tiny(kind), ids, capture=sinks.Capture(patterns="mean", layers=[1], heads=[0], steps=range(1, 3)), **short(kind)
    )
    assert sorted(mean.patterns) == [1, 2]
    for step, pattern in mean.patterns.items():
        torch.testing.assert_close(pattern, full.patterns[step][[1]].mean(2))


@pytest.mark.parametrize("kind", ALL)
def test_capture_without_what_a_token_gives_itself(kind: str) -> None:
    ids, mask = ragged([5, 3])
    both = [
        sinks.generate(tiny(kind), ids, mask, capture=sinks.Capture(exclude_self=itself), **short(kind))
        for itself in (False, True)
    ]
    taken = kept(both[0]) - kept(both[1])
    there = ~taken.isnan()
    assert (taken[there] > -1e-6).all()
    assert float(taken[there].max()) > 0.5
    assert torch.equal(both[0].trajectory, both[1].trajectory)


def test_masking_and_capture_may_measure_differently() -> None:
    """What is reported is as the capture asks, what is blocked as the masking asks."""
    masking = sinks.SinkMasking(top_k=1, exclude_self=True, measure="blocked")
    shown = [
        sinks.generate(tiny(), text(1, 5), capture=capture, masking=masking, **short("llada"))
        for capture in (None, sinks.Capture(), sinks.Capture(exclude_self=True))
    ]
    assert all(torch.equal(g.trajectory, shown[0].trajectory) for g in shown)
    assert all(torch.equal(there(g.blocked), there(shown[0].blocked)) for g in shown)
    torch.testing.assert_close(kept(shown[1]).sum(-1), torch.full((8, 3, 1, 4), 13.0), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["low_confidence", "random"])
@pytest.mark.parametrize("kind", ["llada", "mmada"])
def test_names_with_sink_masking_mask_the_strongest_sink(kind: str, name: str) -> None:
    def run(remasking: str, masking: sinks.SinkMasking | None = None) -> Generation:
        return sinks.generate(tiny(kind), text(1, 5), remasking=remasking, masking=masking, **short(kind))

    named, plain = run(f"{name}_sink_masked"), run(name)
    asked = run(name, sinks.SinkMasking(top_k=1))
    assert torch.equal(named.trajectory, asked.trajectory)
    assert not torch.equal(named.trajectory, plain.trajectory)
    own = run(f"{name}_sink_masked", sinks.SinkMasking(top_k=0))  # a masking object acts whatever the name
    assert torch.equal(own.trajectory, plain.trajectory)
    assert named.blocked is not None
    assert plain.blocked is None


@pytest.mark.parametrize(
    ("kind", "ours", "upstreams"),
    [
        ("llada", {"gen_len": 8, "block_len": 4}, {"gen_length": 8, "block_length": 4}),
        (
            "dream",
            {"gen_len": 8, "steps": 4, "remasking": "origin"},
            {"max_new_tokens": 8, "diffusion_steps": 4, "alg": "origin"},
        ),
        ("ar", {"gen_len": 8}, {"max_new_tokens": 8, "steps": 3, "block_len": 5}),
    ],
)
def test_upstreams_words(kind: str, ours: dict[str, Any], upstreams: dict[str, Any]) -> None:
    assert torch.equal(
        sinks.generate(tiny(kind), text(1, 5), **ours).trajectory,
        sinks.generate(tiny(kind), text(1, 5), **upstreams).trajectory,
    )


def test_eos_eot_last_ends_the_text_late() -> None:
    """With a head that loves the end token, upstream's default fills it in early and the option keeps it to the end."""
    lm = tiny.__wrapped__("llada", eos_token_id=PAD)
    lm.model.lm_head.weight.data[PAD] *= 3
    options: dict[str, Any] = {"gen_len": 12, "block_len": 12}
    early, late = (sinks.generate(lm, text(1, 5), eos_eot_last=last, **options) for last in (False, True))
    for g, last in ((early, False), (late, True)):
        ends = torch.stack([(g.trajectory[step + 1] == PAD) & (g.trajectory[step] == MASK) for step in range(12)])
        with torch.no_grad():
            proposed = torch.stack([lm.model(g.trajectory[step]).logits.argmax(-1) for step in range(12)])
        others = ((proposed != PAD) & (g.trajectory[:-1] == MASK)).any(-1)[:, 0]
        too_early = ends.any(-1)[:, 0] & others
        assert bool(too_early.any()) is not last
        assert ends.any()


def test_results_can_be_written_on() -> None:
    """Ordinary tensors, also for autograd."""
    g = sinks.generate(tiny(), text(1, 3), capture=sinks.Capture(patterns="full"), **short("llada"))
    for tensor in (g.tokens, g.trajectory, g.confidence, kept(g), g.patterns[0]):
        tensor[...] = 0


# From left to right


def ends_with(token: int) -> LanguageModel:
    return tiny("ar", eos_token_id=token)


def test_greedy_decoding_is_that_of_transformers() -> None:
    ids, mask = ragged([7, 4])
    own: Any = stock("ar")
    expected = own.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    g = sinks.generate(tiny("ar"), ids, mask, gen_len=8)
    assert torch.equal(g.tokens, expected)
    assert g.trajectory.shape == (9, 2, 15)
    for step in range(9):
        assert torch.equal(g.trajectory[step, :, : 7 + step], expected[:, : 7 + step])
        assert (g.trajectory[step, :, 7 + step :] == -1).all()


@pytest.mark.parametrize("kind", ["ar", "mistral", "gemma3"])
def test_attention_adds_up_row_by_row(kind: str) -> None:
    """At every step what one pass over everything shows, and NaN where there is no key; also beyond the window."""
    lm, (ids, mask) = tiny(kind), ragged([6, 3])
    g = sinks.generate(lm, ids, mask, gen_len=8, capture=sinks.Capture(patterns="full", value_norm=True))
    for step in range(8):
        keys = 6 + step
        whole = torch.cat([mask, torch.ones(2, step, dtype=torch.int64)], 1)
        with torch.no_grad(), sinks.record(lm, patterns=True, value_norm=True) as rec:
            lm.model(g.tokens[:, :keys], attention_mask=whole, position_ids=(whole.cumsum(-1) - 1).clamp_min(0))
        torch.testing.assert_close(kept(g)[step, ..., :keys], rec.incoming, atol=1e-4, rtol=0)
        assert kept(g)[step, ..., keys:].isnan().all()
        torch.testing.assert_close(
            there(g.value_norm)[step, :, 1, :, keys - step - 1], rec.value_norm[:, 1, :, keys - step - 1]
        )
        torch.testing.assert_close(g.patterns[step][..., -1, :keys], rec.patterns[..., -1, :], atol=1e-5, rtol=0)


def test_a_row_that_has_ended_is_what_it_is_alone() -> None:
    options: dict[str, Any] = {
        "gen_len": 12,
        "capture": sinks.Capture(value_norm=True),
        "masking": sinks.SinkMasking(top_k=1),
    }
    ids = text(2, 6)
    first, second = sinks.generate(tiny("ar"), ids, **options).tokens[:, 6:].tolist()
    lm = ends_with(next(token for token in first[2:] if token not in second))
    together = sinks.generate(lm, ids, **options)
    assert (together.tokens == -1).any(-1).tolist() == [True, False]
    for row in range(2):
        alone = sinks.generate(lm, ids[row : row + 1], **options)
        assert torch.equal(alone.trajectory[:, 0], together.trajectory[:, row])
        assert torch.equal(there(alone.blocked)[:, :, 0], there(together.blocked)[:, :, row])
        for got, want in (
            (kept(together)[:, :, row], kept(alone)[:, :, 0]),
            (there(together.value_norm)[:, :, row], there(alone.value_norm)[:, :, 0]),
            (together.confidence[:, row], alone.confidence[:, 0]),
        ):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0, equal_nan=True)


def test_nothing_is_written_after_the_end() -> None:
    free = sinks.generate(tiny("ar"), text(1, 6), gen_len=8).tokens[0, 6:].tolist()
    end = free[3]
    first = free.index(end)
    g = sinks.generate(ends_with(end), text(1, 6), gen_len=8, capture=sinks.Capture())
    assert g.tokens[0, 6:].tolist() == free[: first + 1] + [-1] * (7 - first)
    assert torch.equal(kept(g)[-1].nan_to_num(-1), kept(g)[first].nan_to_num(-1))
    assert g.confidence[first + 1 :].isnan().all()


def test_the_newest_key_is_never_blocked() -> None:
    g = sinks.generate(tiny("ar"), text(1, 2), gen_len=8, masking=sinks.SinkMasking(top_k=99, control="bottom"))
    most = torch.arange(8) + 1  # of 2 + step keys the newest stays, and of the others one at least
    assert (there(g.blocked).amax((1, 2, 3)) <= most).all()


# Prompts


@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_texts_and_their_ids_are_the_same_prompts(kind: str, tmp_path: Path) -> None:
    write = write_llada if kind == "llada" else write_dream
    lm = sinks.load(str(write(tmp_path / kind)), device="cpu")
    prompts = ["a b c", "d e f g h"]
    g = sinks.generate(lm, prompts, **short(kind))
    assert lm.tokenizer is not None
    rows = [lm.encode(prompt) for prompt in prompts]
    assert [len(row) for row in rows] == [3, 5]
    ids = torch.tensor([[PAD, PAD, *rows[0]], rows[1]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    assert torch.equal(sinks.generate(lm, ids, mask, **short(kind)).trajectory, g.trajectory)
    assert torch.equal(sinks.generate(lm, prompts[0], **short(kind)).tokens[0], g.tokens[0, 2:])
    assert g.text is not None
    written = [row[5:].tolist() for row in g.tokens]
    assert g.text == [lm.decode(row) for row in written]


def test_text_ends_at_the_first_end_token(tmp_path: Path) -> None:
    lm = sinks.load(str(write_llada(tmp_path / "llada")), device="cpu")
    assert lm.decode([0, 1, PAD, 2]) == "a b"
    assert lm.decode([PAD, 2]) == ""
    assert lm.decode([0, -1, -1]) == "a"


def test_ids_of_other_integer_types() -> None:
    expected = sinks.generate(tiny(), text(1, 3), **short("llada")).tokens
    assert torch.equal(sinks.generate(tiny(), text(1, 3).int(), **short("llada")).tokens, expected)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), None, "shape (batch, length)"),
        (torch.zeros(0, 3, dtype=torch.int64), None, "shape (batch, length)"),
        (torch.ones(3, dtype=torch.int64), None, "not torch.int64 (3,)"),
        (torch.ones(1, 3), None, "not torch.float32 (1, 3)"),
        (torch.tensor([[5, 64]]), None, "between 0 and 63"),
        (torch.tensor([[5, -1]]), None, "between 0 and 63"),
        (text(2, 3), torch.ones(1, 3), "shape (1, 3), the prompts (2, 3)"),
        (text(2, 3), torch.tensor([[1, 1, 1], [0, 0, 0]]), "prompt 1 is empty"),
        (text(1, 3), torch.tensor([[1, 1, 0]]), "on the left"),
        (text(1, 3), torch.tensor([[1, 0, 1]]), "on the left"),
        (text(2, 4090), None, "prompt 0 has 4090 tokens; with gen_len 8 that is more than the model's 4096 positions"),
        ([], None, "no prompts"),
        ("a", None, "has no tokenizer"),
    ],
)
def test_prompts_that_cannot_be_used(ids: Any, mask: Tensor | None, message: str) -> None:
    with pytest.raises(InputError) as caught:
        sinks.generate(tiny(), ids, mask, **short("llada"))
    assert message in str(caught.value)


def test_padding_does_not_count_as_length() -> None:
    """20 places, of which 3 hold text, fit into 16 positions with 8 more."""
    lm, ids, mask = tiny("llada", positions=16), text(1, 20), torch.zeros(1, 20, dtype=torch.int64)
    mask[0, -3:] = 1
    g = sinks.generate(lm, ids, mask, **short("llada"))
    alone = sinks.generate(lm, ids[:, -3:], **short("llada"))
    assert torch.equal(g.tokens[0, -8:], alone.tokens[0, -8:])


@pytest.mark.parametrize("kind", DIFFUSION)
def test_a_checkpoint_without_a_mask_id_loads_but_does_not_generate(kind: str) -> None:
    lm = tiny(kind, mask_token_id=None)
    assert lm.spec.mask_token_id is None
    with pytest.raises(InputError, match=r"names no mask token; pass mask_token_id to sinks\.load"):
        sinks.generate(lm, text(1, 3), **short(kind))


def test_numbers_that_are_none_are_an_error() -> None:
    """NaN of a broken model must not pass for positions that do not exist."""
    lm = tiny.__wrapped__("llada")
    lm.model.model.layers[1].self_attn.q_proj.weight.data.fill_(float("nan"))
    with pytest.raises((InputError, ArithmeticError), match=r"(?i)nan|not a number|numbers"):
        sinks.generate(lm, text(1, 3), capture=sinks.Capture(), **short("llada"))
