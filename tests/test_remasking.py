"""How many tokens a step fills, which ones, and which settings are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sinks.errors import InputError
from sinks.noise import Noise
from sinks.remasking import BlockwiseRemasking, Remasking, ScheduledRemasking, restrict
from sinks.sampling import REMASKING, resolve

EOS, EOT = 1, 2


def noise(rows: int = 1, seed: int = 0) -> Noise:
    return Noise(seed, torch.arange(rows))


def blockwise(length: int, rows: int = 1, masked: Tensor | None = None, **options: Any) -> BlockwiseRemasking:
    sampling = resolve(options.pop("family", "LLaDA"), **options)
    valid = torch.ones(rows, length, dtype=torch.bool)
    start = valid if masked is None else masked
    return BlockwiseRemasking(sampling, (EOS, EOT), valid, start, noise(rows, sampling.seed))


def scheduled(masked: Tensor | None = None, rows: int = 1, seed: int = 0, **options: Any) -> ScheduledRemasking:
    sampling = resolve("Dream", **options)
    start = torch.ones(rows, sampling.gen_len, dtype=torch.bool) if masked is None else masked
    return ScheduledRemasking(sampling, start, noise(len(start), seed))


def fill(strategy: Remasking, masked: Tensor, steps: int, confidence: Tensor) -> list[Tensor]:
    """Which positions (B, S) each step fills when a position's confidence is always the same."""
    positions, filled = torch.arange(masked.shape[1]).expand_as(masked), []
    for step in range(steps):
        eligible, extent = strategy.eligible(masked, step), strategy.extent(step)
        assert int(eligible.sum(-1).max()) <= extent.rows
        chosen = strategy.choose(confidence, eligible, positions, step, extent.taken)
        assert not (chosen & ~eligible).any()
        masked = masked & ~chosen
        filled.append(chosen)
    return filled


@settings(max_examples=100)
@given(blocks=st.integers(1, 4), block_len=st.integers(1, 9), per_block=st.integers(1, 12), prompt=st.integers(0, 3))
def test_a_block_is_shared_out_over_its_steps(blocks: int, block_len: int, per_block: int, prompt: int) -> None:
    """floor(m / s) tokens at each step, one more in the first m mod s, from left to right block by block."""
    gen_len, steps = blocks * block_len, blocks * per_block
    masked = torch.arange(prompt + gen_len)[None] >= prompt
    strategy = blockwise(prompt + gen_len, masked=masked, steps=steps, gen_len=gen_len, block_len=block_len)
    confidence = torch.rand(1, prompt + gen_len, generator=torch.Generator().manual_seed(steps))
    filled = fill(strategy, masked, steps, confidence)
    counts = [int(chosen.sum()) for chosen in filled]
    assert counts == [block_len // per_block + (i < block_len % per_block) for i in range(per_block)] * blocks
    for block in range(blocks):
        inside = slice(prompt + block * block_len, prompt + (block + 1) * block_len)
        part = filled[block * per_block : (block + 1) * per_block]
        assert torch.stack(part).any(0)[0].nonzero()[:, 0].tolist() == list(range(inside.start, inside.stop))
        order = [place for chosen in part for place in _strongest_first(chosen[0], confidence[0])]
        assert order == _strongest_first(masked[0] & _between(inside, masked), confidence[0])


def _between(places: slice, like: Tensor) -> Tensor:
    index = torch.arange(like.shape[1])
    return (index >= places.start) & (index < places.stop)


def _strongest_first(where: Tensor, confidence: Tensor) -> list[int]:
    places: list[int] = where.nonzero()[:, 0].tolist()
    return sorted(places, key=lambda place: -float(confidence[place]))


def test_masks_left_before_the_block_stay_eligible() -> None:
    """A mask token of the prompt is filled, but not counted: so one is left at the end."""
    strategy = blockwise(5, steps=4, gen_len=4, block_len=2)
    masked = torch.tensor([[True, True, True, True, True]])  # the prompt is one mask token
    filled = fill(strategy, masked, 4, torch.tensor([[0.9, 0.1, 0.2, 0.3, 0.4]]))
    assert [chosen[0].nonzero().item() for chosen in filled] == [0, 2, 4, 3]


def test_equal_confidences_do_not_know_the_padding() -> None:
    """Whatever order equals are taken in, a padded row takes them as it would alone."""
    for left in range(12):
        for gen_len, steps in ((30, 10), (60, 10), (120, 4)):
            alone = blockwise(gen_len + 3, steps=steps, gen_len=gen_len, block_len=gen_len)
            valid = torch.arange(left + gen_len + 3)[None] >= left
            padded = BlockwiseRemasking(alone.s, (EOS, EOT), valid, valid, noise())
            masked = torch.arange(gen_len + 3)[None] >= 3
            confidence = torch.ones(1, gen_len + 3)
            wide = torch.cat([torch.zeros(1, left, dtype=torch.bool), masked], 1)
            expected = fill(alone, masked, 2, confidence)
            found = fill(padded, wide, 2, torch.ones(1, left + gen_len + 3))
            assert all(torch.equal(a[:, left:], b) for a, b in zip(found, expected, strict=True))


def dream_law(masks: int, steps: int, eps: float) -> list[int]:
    """int(M (1 - s/t)) in float32, M the masks that are left; in the last step all of them."""
    times = np.asarray(torch.linspace(1, eps, steps + 1))
    counts = []
    for step in range(steps):
        share = np.float32(1) - times[step + 1] / times[step]
        counts.append(masks if step == steps - 1 else int(np.float32(masks) * share))
        masks -= counts[-1]
    return counts


@settings(max_examples=100)
@given(
    masks=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    steps=st.integers(1, 50),
    eps=st.sampled_from([1e-3, 0.2, 0.0, 0.9]),
    name=st.sampled_from(["entropy", "maskgit_plus", "topk_margin"]),
)
def test_dream_fills_what_its_schedule_says(masks: list[int], steps: int, eps: float, name: str) -> None:
    """Each row by its own number of masks."""
    masked = torch.arange(43)[None] >= 43 - torch.tensor(masks)[:, None]
    confidence = -torch.rand(masked.shape, generator=torch.Generator().manual_seed(steps))
    strategy = scheduled(masked, steps=steps, gen_len=40, eps=eps, remasking=name)
    filled = fill(strategy, masked, steps, confidence)
    for row, count in enumerate(masks):
        chosen = [step[row] for step in filled]
        assert [int(step.sum()) for step in chosen] == dream_law(count, steps, eps)
        order = [place for step in chosen for place in _strongest_first(step, confidence[row])]
        assert order == _strongest_first(masked[row], confidence[row])


def test_dream_with_as_many_steps_as_tokens() -> None:
    """The known consequence of the truncation: nothing in the first step, two in the last."""
    masked = torch.ones(1, 128, dtype=torch.bool)
    filled = fill(scheduled(steps=128, gen_len=128), masked, 128, torch.rand(1, 128))
    assert [int(step.sum()) for step in filled] == [0] + [1] * 126 + [2]


def test_origin_fills_each_position_with_its_probability() -> None:
    """With U < 1 - s/t at each of five steps every position is as likely to fall into any of them."""
    strategy = scheduled(steps=5, gen_len=2000, eps=0.0, remasking="origin")
    filled = fill(strategy, torch.ones(1, 2000, dtype=torch.bool), 5, torch.ones(1, 2000))
    counts = torch.stack(filled).sum(-1)[:, 0]
    assert int(counts.sum()) == 2000
    assert (counts - 400).abs().max() < 4 * (2000 * 0.2 * 0.8) ** 0.5


def test_alg_temp_draws_without_replacement_from_the_softmax() -> None:
    """One of three positions and then one of the other two, under confidence / alg_temp = log(4, 2, 1)."""
    rows = 4000
    options: dict[str, Any] = dict(steps=2, gen_len=3, eps=0.0, remasking="maskgit_plus", alg_temp=0.5)
    confidence = 0.5 * torch.tensor([4.0, 2.0, 1.0]).log().expand(rows, 3)
    masked, positions = torch.ones(rows, 3, dtype=torch.bool), torch.arange(3).expand(rows, 3)
    first = scheduled(rows=rows, **options).choose(confidence, masked, positions, 0, None)
    assert (first.sum(-1) == 1).all()
    torch.testing.assert_close(first.float().mean(0), torch.tensor([4 / 7, 2 / 7, 1 / 7]), atol=0.03, rtol=0)
    other = scheduled(rows=rows, seed=1, **options)
    second = other.choose(confidence, masked & ~first, positions, 0, None)[first[:, 0]]
    torch.testing.assert_close(second.float().mean(0), torch.tensor([0.0, 2 / 3, 1 / 3]), atol=0.04, rtol=0)


LOGITS = torch.tensor([[[0.0, 0.0, 3.0, 0.0], [2.0, 0.0, 0.0, 1.0], [0.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]])


def shares(*powers: float) -> list[float]:
    return [math.exp(power) / sum(math.exp(other) for other in powers) for power in powers]


def proposal(strategy: Remasking, logits: Tensor = LOGITS, step: int = 0) -> tuple[list[int], list[float]]:
    """Of the first row."""
    positions = torch.arange(logits.shape[1]).expand(logits.shape[:2])
    tokens, confidence = strategy.propose(logits, positions, step)
    return tokens[0].tolist(), confidence[0].tolist()


def test_low_confidence_is_the_probability_of_the_proposal() -> None:
    tokens, confidence = proposal(blockwise(4, gen_len=4, block_len=4))
    assert tokens == [EOT, 0, EOS, 3]
    assert confidence == pytest.approx(
        [shares(3, 0, 0, 0)[0], shares(2, 1, 0, 0)[0], shares(4, 0, 0, 0)[0], shares(1, 0, 0, 0)[0]]
    )


def test_the_confidence_of_mmada_is_computed_in_float64() -> None:
    positions = torch.arange(4)[None]
    _, llada = blockwise(4, gen_len=4, block_len=4).propose(LOGITS.bfloat16(), positions, 0)
    _, mmada = blockwise(4, family="MMaDA", gen_len=4, block_len=4).propose(LOGITS.bfloat16(), positions, 0)
    assert (llada.dtype, mmada.dtype) == (torch.bfloat16, torch.float64)
    assert float(mmada[0, 3]) == pytest.approx(shares(1, 0, 0, 0)[0], abs=1e-12)


def test_temperature_leaves_the_confidence_alone() -> None:
    """Tokens are drawn, their confidence is the plain probability."""
    tokens, confidence = proposal(blockwise(4, gen_len=4, block_len=4, temperature=5.0, seed=1))
    plain = LOGITS.softmax(-1)[0]
    assert confidence == pytest.approx([float(plain[place, token]) for place, token in enumerate(tokens)])


@pytest.mark.parametrize("family", ["LLaDA", "MMaDA", "Dream"])
def test_temperature_one_draws_from_the_softmax(family: str) -> None:
    rows = 4000
    sampling = resolve(family, gen_len=4, block_len=4, temperature=1.0)
    every = torch.ones(rows, 4, dtype=torch.bool)
    strategy: Remasking = ScheduledRemasking(sampling, every, noise(rows))
    if family != "Dream":
        strategy = BlockwiseRemasking(sampling, (EOS, EOT), every, every, noise(rows))
    tokens, _ = strategy.propose(LOGITS.expand(rows, 4, 4), torch.arange(4).expand(rows, 4), 0)
    drawn = torch.nn.functional.one_hot(tokens, 4).double().mean(0)
    assert (drawn - LOGITS[0].softmax(-1)).abs().max() < 0.035


def test_random_confidence_is_a_number_per_position() -> None:
    tokens, confidence = proposal(blockwise(4, gen_len=4, block_len=4, remasking="random"))
    assert tokens == [EOT, 0, EOS, 3]
    assert len(set(confidence)) == 4
    assert confidence != proposal(blockwise(4, gen_len=4, block_len=4, remasking="random"), step=1)[1]


def test_logits_eos_inf_never_proposes_the_end_of_text() -> None:
    tokens, confidence = proposal(blockwise(4, gen_len=4, block_len=4, logits_eos_inf=True))
    assert tokens == [EOT, 0, 0, 3]
    assert confidence[2] == pytest.approx(1 / 3)


def test_confidence_eos_eot_inf_is_upstreams() -> None:
    """At temperature 0 both end tokens lose their confidence; above it only the end of turn does (LLaDA issue 137)."""
    tokens, confidence = proposal(blockwise(4, gen_len=4, block_len=4, confidence_eos_eot_inf=True))
    assert tokens == [EOT, 0, EOS, 3]
    assert confidence == pytest.approx([0, shares(2, 1)[0], 0, shares(1, 0)[0]])
    warm = blockwise(4, gen_len=4, block_len=4, confidence_eos_eot_inf=True, temperature=1e-6)
    tokens, confidence = proposal(warm)
    assert tokens == [EOT, 0, EOS, 3]
    assert confidence[0] == 0
    assert confidence[2] == pytest.approx(shares(4, 0, 0)[0])


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_eos_eot_last_keeps_end_tokens_for_the_end(temperature: float) -> None:
    """The two surest of four positions propose an end token; they are taken when nothing else is left."""
    strategy = blockwise(4, gen_len=4, block_len=4, steps=4, eos_eot_last=True, temperature=temperature)
    tokens, confidence = strategy.propose(LOGITS, torch.arange(4)[None], 0)
    assert tokens.tolist() == [[EOT, 0, EOS, 3]]
    filled = fill(strategy, torch.ones(1, 4, dtype=torch.bool), 4, confidence)
    assert [chosen[0].nonzero().item() for chosen in filled] == [1, 3, 2, 0]


def test_an_option_about_end_tokens_needs_them() -> None:
    sampling = resolve("LLaDA", gen_len=4, block_len=4, confidence_eos_eot_inf=True)
    every = torch.ones(1, 4, dtype=torch.bool)
    strategy = BlockwiseRemasking(sampling, (EOS, None), every, every, noise())
    with pytest.raises(InputError, match="names no end token"):
        proposal(strategy)


def test_a_row_ends_with_the_block_that_ends_in_the_turn_end() -> None:
    strategy = blockwise(6, rows=2, family="MMaDA", gen_len=4, block_len=2, steps=4, eot_token=7)
    tokens = torch.tensor([[0, 0, 5, 7, 5, 5], [0, 0, 7, 5, 5, 7]])
    ended = [strategy.finished(tokens, step)[:, 0].tolist() for step in range(4)]
    assert ended == [[False, False], [True, False], [False, False], [False, True]]


def test_dreams_confidences() -> None:
    p = shares(2, 0, 0, 1)
    expected = {"maskgit_plus": p[0], "topk_margin": p[0] - p[3], "entropy": sum(x * math.log(x) for x in p)}
    for name, value in expected.items():
        strategy = scheduled(gen_len=4, remasking=name)
        tokens, confidence = proposal(strategy)
        assert tokens == [2, 0, 1, 3]
        assert confidence[1] == pytest.approx(value, abs=1e-6)


def test_top_p_and_top_k_change_the_confidence_but_not_the_token() -> None:
    """0.61, 0.22, 0.08, 0.08: the second crosses 0.7 and is kept."""
    for options, kept in (({"top_p": 0.7}, (2, 1)), ({"top_k": 1}, (2,)), ({"top_p": 0.99, "top_k": 2}, (2, 1))):
        strategy = scheduled(gen_len=4, remasking="maskgit_plus", **options)
        tokens, confidence = proposal(strategy)
        assert tokens[1] == 0
        assert confidence[1] == pytest.approx(shares(*kept)[0])


@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=9, unique=True),
    top_p=st.none() | st.floats(0.05, 1),
    top_k=st.none() | st.integers(1, 12),
)
def test_restricted_logits(logits: list[float], top_p: float | None, top_k: int | None) -> None:
    """top_p: the most probable tokens until their sum exceeds p, with the one that crosses; then the k best of them."""
    row = torch.tensor(logits)
    found = restrict(row, resolve("Dream", gen_len=1, top_p=top_p, top_k=top_k))
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    total, kept = 0.0, []
    for token in order:
        if top_p is not None and top_p < 1 and total > top_p:
            break
        if top_p is not None and abs(total - top_p) < 1e-6:
            return  # decided by the last digit
        kept.append(token)
        total += float(row.softmax(-1)[token])
    kept = kept if top_k is None else kept[:top_k]
    assert (found == row).nonzero()[:, 0].tolist() == sorted(kept)
    assert (found[found != row] == torch.finfo(torch.float32).min).all()


def test_defaults() -> None:
    llada = resolve("LLaDA")
    assert (llada.steps, llada.gen_len, llada.block_len) == (128, 128, 32)
    assert (llada.temperature, llada.cfg_scale, llada.remasking, llada.seed) == (0.0, 0.0, "low_confidence", 0)
    assert resolve("MMaDA").remasking == "low_confidence"
    dream = resolve("Dream", gen_len=50)
    assert (dream.remasking, dream.eps, dream.top_p, dream.top_k, dream.alg_temp) == ("entropy", 1e-3, None, None, None)
    assert (dream.steps, dream.block_len) == (50, 50)
    assert resolve("Dream", gen_len=50, block_len=7, steps=3).steps == 3  # no blocks, any number of steps
    assert resolve("autoregressive", gen_len=9, steps=4).steps == 9


def test_upstreams_words() -> None:
    assert resolve("LLaDA", gen_length=64, block_length=16) == resolve("LLaDA", gen_len=64, block_len=16)
    upstream = resolve("Dream", max_new_tokens=64, diffusion_steps=8, alg="origin")
    assert upstream == resolve("Dream", gen_len=64, steps=8, remasking="origin")
    with pytest.raises(InputError, match=r"twice.*gen_len, gen_length"):
        resolve("LLaDA", gen_len=64, gen_length=32)


@pytest.mark.parametrize("name", ["low_confidence", "random"])
@pytest.mark.parametrize("family", ["LLaDA", "MMaDA"])
def test_names_with_sink_masking(family: str, name: str) -> None:
    plain, masked = resolve(family, remasking=name), resolve(family, remasking=f"{name}_sink_masked")
    assert not plain.sink_masked
    assert masked.sink_masked
    assert masked.remasking == name


@pytest.mark.parametrize(
    ("family", "wrong", "message"),
    [
        ("LLaDA", {"steps": 0}, "steps is 0; it must be a whole number of 1 or more"),
        ("LLaDA", {"gen_len": -8}, "gen_len is -8"),
        ("LLaDA", {"block_len": 0}, "block_len is 0"),
        ("LLaDA", {"steps": 2.0}, "steps is 2.0"),
        ("LLaDA", {"steps": "x"}, "steps is 'x'"),
        ("LLaDA", {"gen_len": None}, "gen_len is None"),
        ("LLaDA", {"gen_len": math.nan}, "gen_len is nan"),
        ("LLaDA", {"gen_len": 100, "block_len": 32}, "gen_len 100 is not divisible by block_len 32"),
        ("MMaDA", {"gen_len": 64, "block_len": 32, "steps": 63}, "steps 63 is not divisible by the 2 blocks"),
        ("LLaDA", {"temperature": -1}, "temperature is -1; it must be a number of 0 or more"),
        ("LLaDA", {"temperature": math.nan}, "temperature is nan"),
        ("Dream", {"temperature": math.inf}, "temperature is inf"),
        ("LLaDA", {"cfg_scale": -0.5}, "cfg_scale is -0.5"),
        ("LLaDA", {"cfg_scale": "a"}, "cfg_scale is 'a'"),
        ("Dream", {"cfg_scale": 1.0}, "Dream has no classifier-free guidance"),
        ("autoregressive", {"cfg_scale": 1.0}, "autoregressive has no classifier-free guidance"),
        ("Dream", {"alg_temp": -1}, "alg_temp is -1"),
        ("Dream", {"top_p": 0}, "top_p is 0; it must lie above 0 and be at most 1"),
        ("Dream", {"top_p": math.nan}, "top_p is nan"),
        ("Dream", {"top_k": 0}, "top_k is 0"),
        ("Dream", {"eps": 1.0}, "eps is 1.0; it must be at least 0 and below 1"),
        ("Dream", {"eps": math.nan}, "eps is nan"),
        ("LLaDA", {"seed": 2**64}, "seed is"),
        (
            "LLaDA",
            {"remasking": "entropy"},
            "use one of low_confidence, random, low_confidence_sink_masked, random_sink",
        ),
        ("Dream", {"remasking": "low_confidence"}, "use one of entropy, maskgit_plus, topk_margin, origin"),
        ("Dream", {"remasking": "entropy_sink_masked"}, "'entropy_sink_masked' is unknown to Dream"),
        ("LLaDA", {"top_p": 0.9}, "'top_p' is no setting of LLaDA; known are steps, gen_len, block_len, temperature"),
        ("MMaDA", {"logits_eos_inf": True}, "'logits_eos_inf' is no setting of MMaDA"),
        ("Dream", {"eot_token": 3}, "'eot_token' is no setting of Dream"),
        ("LLaDA", {"gen_lenght": 3}, "'gen_lenght' is no setting of LLaDA"),
    ],
)
def test_settings_that_cannot_be_used(family: str, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve(family, **wrong)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_family_has_its_first_name_as_default() -> None:
    for family, names in REMASKING.items():
        assert resolve(family).remasking == names[0]
