"""Likelihoods: exact where the answer is known, the official draws elsewhere (see also test_golden.py)."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import DIFFUSION, MASK, text, tiny
from torch import Tensor

import sinks
from sinks import likelihood
from sinks.errors import InputError
from sinks.likelihood import NLL_TYPES, exact, is_greedy
from sinks.models import LanguageModel


def replaced(lm: LanguageModel, logits: Any) -> LanguageModel:
    """The same specification with other logits, a function of the ids (B, S)."""
    model = lambda ids, **_: SimpleNamespace(logits=logits(ids))  # noqa: E731
    fake = SimpleNamespace(model=model, spec=lm.spec, device=torch.device("cpu"), checkpoint="fake")
    return cast(LanguageModel, fake)


@pytest.mark.parametrize("kind", ["llada", "mmada"])
@settings(max_examples=30)
@given(
    prompt=st.integers(0, 4),
    target=st.integers(1, 7),
    batch=st.integers(1, 5),
    batches=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_equal_probabilities_give_an_exact_value(
    kind: str, prompt: int, target: int, batch: int, batches: int, seed: int
) -> None:
    """Where every token costs log V, n / count · count of them cost n log V, whatever was drawn."""
    uniform = replaced(tiny(kind), lambda ids: torch.zeros(*ids.shape, 64))
    ids = text(1, prompt + target)[0]
    value = sinks.loglikelihood(uniform, ids[:prompt], ids[prompt:], batch * batches, batch, seed=seed)
    assert value == pytest.approx(-target * math.log(64), rel=1e-5)


@pytest.mark.parametrize("log_type", ["ftb", "btf"])
@settings(max_examples=20)
@given(prompt=st.integers(1, 5), target=st.integers(1, 5), batch=st.integers(1, 7))
def test_token_by_token_adds_up_every_token_once(log_type: str, prompt: int, target: int, batch: int) -> None:
    uniform = replaced(tiny("dream"), lambda ids: torch.zeros(*ids.shape, 64))
    ids = text(1, prompt + target)[0]
    options: dict[str, Any] = {"nll_type": f"ar_{log_type}", "log_type": log_type}
    value = sinks.loglikelihood(uniform, ids[:prompt], ids[prompt:], batch_size=batch, **options)
    counted = target if log_type == "ftb" else prompt
    assert value == pytest.approx(-counted * math.log(64), rel=1e-5)


@pytest.mark.parametrize("log_type", ["ftb", "btf"])
def test_token_by_token_by_hand(log_type: str) -> None:
    """Token i of the target in the company of those before it; of the prompt in the company of those after it."""
    lm, ids, prompt = tiny("dream"), text(1, 9)[0], 4
    places = range(prompt, 9) if log_type == "ftb" else range(prompt)
    expected = 0.0
    for place in places:
        hidden = torch.arange(9) >= place if log_type == "ftb" else torch.arange(9) <= place
        with torch.no_grad():
            logits = lm.model(ids.masked_fill(hidden, MASK)[None]).logits[0]
        expected += float(logits[max(place - 1, 0)].log_softmax(-1)[ids[place]])
    options: dict[str, Any] = {"nll_type": f"ar_{log_type}", "log_type": log_type}
    for batch in (1, 2, 16):
        value = sinks.loglikelihood(lm, ids[:prompt], ids[prompt:], batch_size=batch, **options)
        assert value == pytest.approx(expected, abs=1e-4)


def expectation(lm: LanguageModel, prompt: Tensor, target: Tensor, cfg_scale: float) -> float:
    """What LLaDA's estimate estimates: the count uniform, the places uniform given the count."""
    n, total = len(target), 0.0
    for count in range(1, n + 1):
        subsets = list(itertools.combinations(range(n), count))
        for places in subsets:
            hidden = target.clone()
            hidden[list(places)] = MASK
            inputs = torch.cat([prompt, hidden])[None]
            with torch.no_grad():
                logits = lm.model(inputs).logits
                if cfg_scale:
                    without = lm.model(torch.cat([torch.full_like(prompt, MASK), hidden])[None]).logits
                    logits = without + (cfg_scale + 1) * (logits - without)
            costs = -logits[0, len(prompt) :].log_softmax(-1)[torch.arange(n), target]
            total += float(costs[list(places)].sum()) * n / count / len(subsets) / n
    return -total


@pytest.mark.parametrize("cfg_scale", [0.0, 0.7])
def test_the_estimate_of_llada_is_unbiased(cfg_scale: float) -> None:
    """Against the average over every subset of four tokens."""
    lm, ids = tiny("llada"), text(1, 7)[0]
    prompt, target = ids[:3], ids[3:]
    values = torch.tensor(
        [sinks.loglikelihood(lm, prompt, target, 64, 16, cfg_scale, seed) for seed in range(40)], dtype=torch.float64
    )
    error = float(values.std()) / len(values) ** 0.5
    assert float(values.mean()) == pytest.approx(expectation(lm, prompt, target, cfg_scale), abs=4 * error)
    assert error < 0.02 * abs(float(values.mean()))


@pytest.mark.parametrize("log_type", ["ftb", "btf", "union"])
def test_dream_masks_with_a_probability(log_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the first nor the last token, and only the side that is asked for; each row by 1 / p of its own."""
    seen: list[likelihood._Batch] = []

    def spy(lm: LanguageModel, ids: Tensor, length: int, batch: likelihood._Batch, cfg_scale: float) -> float:
        seen.append(batch)
        return 0.0

    monkeypatch.setattr(likelihood, "_weighted", spy)
    ids = text(1, 9)[0]
    sinks.loglikelihood(tiny("dream"), ids[:4], ids[4:], 400, 4, log_type=log_type, sampling_eps=0.1)
    noisy, weight = (torch.stack([getattr(batch, name) for batch in seen]) for name in ("noisy", "weight"))
    masked = noisy == MASK
    assert torch.equal(noisy[~masked], ids.expand_as(noisy)[~masked])
    may = torch.zeros(9, dtype=torch.bool)
    may[1:8] = True
    may &= {"ftb": torch.arange(9) >= 4, "btf": torch.arange(9) < 4, "union": torch.ones(9, dtype=torch.bool)}[log_type]
    assert torch.equal(masked.any(0).any(0), may)
    chance = 1 / weight[..., 0]
    assert ((chance >= 0.1) & (chance <= 1)).all()
    spread = chance.sort(-1).values.diff(dim=-1)
    torch.testing.assert_close(spread, torch.full_like(spread, 0.9 / 4), atol=1e-5, rtol=0)
    assert float(masked[..., may].float().mean()) == pytest.approx(float(chance.mean()), abs=0.05)


def test_union_is_a_mean_over_the_length() -> None:
    uniform = replaced(tiny("dream"), lambda ids: torch.zeros(*ids.shape, 64))
    ids = text(1, 9)[0]
    options: dict[str, Any] = {"mc_num": 4000, "batch_size": 40}
    value = sinks.loglikelihood(uniform, ids[:4], ids[4:], log_type="union", **options)
    assert value == pytest.approx(-7 * math.log(64) / 9, rel=0.05)  # seven of nine tokens may be masked
    assert sinks.loglikelihood(uniform, ids[:4], ids[4:], **options) == pytest.approx(-4 * math.log(64), rel=0.05)


@pytest.mark.parametrize("kind", DIFFUSION)
def test_seeds_decide(kind: str) -> None:
    ids = text(1, 9)[0].tolist()

    def value(seed: int) -> float:
        return sinks.loglikelihood(tiny(kind), ids[:4], ids[4:], 8, 4, seed=seed)

    state = torch.get_rng_state()
    assert value(3) == value(3) != value(4)
    assert torch.equal(torch.get_rng_state(), state)


def test_greedy_means_one_token_a_step_and_the_most_confident_first() -> None:
    """By hand: everything masked, then the surest proposal of each pass is kept."""
    lm, ids = tiny("llada"), text(1, 8)[0]
    prompt, state = ids[:4], torch.cat([ids[:4], torch.full((5,), MASK)])
    for _ in range(5):
        with torch.no_grad():
            probability, token = lm.model(state[None]).logits[0].softmax(-1).max(-1)
        best = int(probability.masked_fill(state != MASK, -1).argmax())
        state[best] = token[best]
    target = state[4:]
    assert is_greedy(lm, prompt, target)
    for place in range(5):
        other = target.clone()
        other[place] = (other[place] + 1) % 60
        assert not is_greedy(lm, prompt, other)


def test_the_likelihood_of_an_autoregressive_model_is_exact() -> None:
    lm, ids = tiny("ar"), text(1, 8)[0]
    with torch.no_grad():
        logits = lm.model(ids[None]).logits[0].log_softmax(-1)
    expected = sum(float(logits[place - 1, ids[place]]) for place in range(3, 8))
    value, greedy = exact(lm, ids[:3], ids[3:])
    assert value == pytest.approx(expected, abs=1e-4)
    assert greedy is False
    continued = sinks.generate(lm, ids[None], gen_len=4).tokens[0, 8:]
    assert exact(lm, ids, continued)[1] is True


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("ar", {}, "autoregressive models have an exact likelihood"),
        ("llada", {"mc_num": 10, "batch_size": 4}, "mc_num 10 is not a multiple of batch_size 4"),
        ("llada", {"mc_num": 0}, "mc_num 0 and batch_size 16 must be 1 or more"),
        ("llada", {"batch_size": 0}, "batch_size 0"),
        ("llada", {"cfg_scale": -1.0}, "cfg_scale is -1.0"),
        ("llada", {"cfg_scale": math.nan}, "cfg_scale is nan"),
        ("dream", {"cfg_scale": 1.0}, "0 for Dream"),
        ("dream", {"nll_type": "ar"}, "'ar' is unknown; use one of mc, ar_ftb, ar_btf"),
        ("dream", {"nll_type": "ar_ftb", "log_type": "btf"}, "'ar_ftb' goes with log_type ftb, not 'btf'"),
        ("dream", {"log_type": "all"}, "'mc' goes with log_type ftb or btf or union, not 'all'"),
    ],
)
def test_settings_that_cannot_be_used(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        sinks.loglikelihood(tiny(kind), [1, 2], [3], **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "target", "message"),
    [([1], [], "the target is empty"), ([1], [64], "between 0 and 63"), ([1] * 4090, [2] * 7, "4097 tokens")],
)
def test_texts_that_cannot_be_used(prompt: list[int], target: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sinks.loglikelihood(tiny("llada"), prompt, target)


def test_a_likelihood_needs_the_mask_token() -> None:
    with pytest.raises(InputError, match="names no mask token"):
        sinks.loglikelihood(tiny("llada", mask_token_id=None), [1], [2])


def test_every_type_has_a_value() -> None:
    for nll_type, log_types in NLL_TYPES.items():
        for log_type in log_types:
            value = sinks.loglikelihood(
                tiny("dream"), [1, 2, 3], [4, 5, 6], 64, 16, nll_type=nll_type, log_type=log_type
            )
            assert -100 < value < 0
