"""Equality with the official code, case by case as tests/golden names them; on every attention path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from golden_data import FAMILIES, IDS, PATHS, RecordedNoise, case, head_rows, model, notes
from torch import Tensor

import sinks
from sinks import likelihood, samplers

GENERATE = [(family, name) for family in FAMILIES for name in notes(family)["generate"]]
FORWARD = [(family, name) for family in FAMILIES for name in notes(family)["forward"]]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("family", "name"), FORWARD)
def test_forward(family: str, name: str, path: str) -> None:
    lm, expected = model(family, path), case(family, f"forward/{name}")
    ids = expected["input_ids"]
    extra = {key: expected[key] for key in ("attention_mask", "position_ids") if key in expected}
    with torch.no_grad(), sinks.record(lm, patterns=True) as rec:
        out = lm.model(ids, output_hidden_states=True, **extra)
    compared = expected.get("compare_mask", torch.ones_like(ids)).bool()
    assert (out.logits - expected["logits"])[compared].abs().max() < 1e-4
    hidden = torch.stack(out.hidden_states)
    assert (hidden - expected["hidden_states"])[:, compared].abs().max() < 1e-4
    rows = rec.patterns.transpose(2, 3)[:, compared]
    assert (rows - expected["attentions"].transpose(2, 3)[:, compared]).abs().max() < 1e-5
    real = extra.get("attention_mask", torch.ones_like(ids)).bool()
    from_real_queries = (expected["attentions"] * real[None, :, None, :, None]).sum(-2)
    assert (rec.incoming - from_real_queries).abs().max() < 1e-4


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("family", "name"), GENERATE)
def test_generate(family: str, name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, expected, note = model(family, path), case(family, f"generate/{name}"), notes(family)["generate"][name]
    prompt, states = expected["prompt"], expected["states"]
    mask = expected.get("attention_mask")
    drawn, gumbel = expected.get("uniform"), expected.get("gumbel_uniform")
    if drawn is not None or gumbel is not None:
        ragged = IDS["dream"]["mask_token_id"] if family == "dream" else None
        recorded = RecordedNoise(drawn, gumbel, states, ragged)
        monkeypatch.setattr(samplers, "Noise", lambda seed, items: recorded)
    names = notes(family).get("head_rows", {}).get(note.get("head_rows"), [])
    rows = dict(zip(names, case(family, "head_rows").get(note.get("head_rows", ""), []), strict=True))
    settings = {key: value for key, value in note["kwargs"].items() if key not in ("mask_id", "mask_token_id")}
    with head_rows(lm, rows):
        g = sinks.generate(lm, prompt, None if mask is None else mask[:, : prompt.shape[1]], **settings)
    assert torch.equal(g.trajectory, states)
    assert torch.equal(g.tokens, states[-1])


def test_logits_of_dream_are_shifted_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits that the strategy sees at step 0 are the official ones after their shift."""
    expected, note = case("dream", "generate/entropy"), notes("dream")["generate"]["entropy"]
    seen: list[tuple[Tensor, Tensor]] = []
    propose = samplers.ScheduledRemasking.propose

    def spy(self: Any, logits: Tensor, positions: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((logits, positions))
        return propose(self, logits, positions, step)

    monkeypatch.setattr(samplers.ScheduledRemasking, "propose", spy)
    settings = {key: value for key, value in note["kwargs"].items() if key != "mask_token_id"}
    sinks.generate(model("dream"), expected["prompt"], **settings)
    logits, positions = seen[0]
    official = expected["shifted_logits_step0"].gather(1, positions[..., None].expand_as(logits))
    assert (logits - official).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["no_eot", "with_eot"])
def test_a_block_that_ends_in_the_turn_end_is_the_last(name: str) -> None:
    """MMaDA's mmu_generate_fast."""
    expected, kwargs = case("mmada", "mmu_generate_fast"), dict(notes("mmada")["mmu_generate_fast"]["kwargs"])
    eot = kwargs.pop("eot_token")
    del kwargs["mask_id"]
    g = sinks.generate(model("mmada"), expected["prompt"], eot_token=eot if name == "with_eot" else None, **kwargs)
    assert torch.equal(g.tokens, expected[name])
    left = notes("mmada")["mmu_generate_fast"]["masks_left"] if name == "with_eot" else 0
    assert int((g.tokens == IDS["mmada"]["mask_token_id"]).sum()) == left


@pytest.mark.parametrize("name", notes("llada")["loglikelihood"])
def test_likelihood_of_llada(name: str) -> None:
    expected, note = case("llada", f"loglikelihood/{name}"), notes("llada")["loglikelihood"][name]
    value = sinks.loglikelihood(
        model("llada"),
        expected["prompt"],
        expected["answer"],
        **{key: note[key] for key in ("mc_num", "batch_size", "cfg_scale", "seed")},
    )
    assert value == pytest.approx(note["value"], abs=1e-3)


@pytest.mark.parametrize("name", notes("llada")["loglikelihood"])
def test_likelihood_of_llada_masks_what_the_official_code_masked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, note = case("llada", f"loglikelihood/{name}"), notes("llada")["loglikelihood"][name]
    seen: list[tuple[Tensor, Tensor]] = []
    weighted = likelihood._weighted

    def spy(lm: Any, sequence: Tensor, length: int, batch: likelihood._Batch, cfg: float) -> float:
        seen.append((batch.noisy, batch.weight))
        return weighted(lm, sequence, length, batch, cfg)

    monkeypatch.setattr(likelihood, "_weighted", spy)
    lm = model("llada")
    sinks.loglikelihood(
        lm, expected["prompt"], expected["answer"], note["mc_num"], note["batch_size"], seed=note["seed"]
    )
    assert torch.equal(torch.stack([noisy for noisy, _ in seen]), expected["noisy"])
    masked = expected["noisy"] == IDS["llada"]["mask_token_id"]
    weights = torch.stack([weight for _, weight in seen])
    torch.testing.assert_close(weights[masked], 1 / expected["p_mask"][masked])


@pytest.mark.parametrize("name", notes("dream")["loglikelihood"])
def test_likelihood_of_dream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its draws cannot be seeded, so the Monte Carlo cases are given the recorded ones."""
    expected, note = case("dream", f"loglikelihood/{name}"), notes("dream")["loglikelihood"][name]
    given = case("dream", "loglikelihood")
    if "p_mask" in expected:
        recorded: Iterator[likelihood._Batch] = iter(
            [
                likelihood._Batch(noisy, 1 / p)
                for noisy, p in zip(expected["model_input"], expected["p_mask"], strict=True)
            ]
        )
        monkeypatch.setattr(likelihood, "_probability_masked", lambda *_: next(recorded))
    options = {key: note[key] for key in ("nll_type", "log_type", "mc_num", "batch_size")}
    value = sinks.loglikelihood(model("dream"), given["prefix"], given["target"], **options)
    length = len(given["prefix"]) + len(given["target"]) if note["log_type"] == "union" else 1
    assert -value * length == pytest.approx(note["nll"], abs=1e-3)


@pytest.mark.parametrize("name", ["ar_ftb", "ar_btf"])
def test_token_by_token_likelihood_hides_what_the_official_code_hid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, seen = case("dream", "loglikelihood"), []
    weighted = likelihood._weighted

    def spy(lm: Any, sequence: Tensor, length: int, batch: likelihood._Batch, cfg: float) -> float:
        seen.append(batch.noisy)
        return weighted(lm, sequence, length, batch, cfg)

    monkeypatch.setattr(likelihood, "_weighted", spy)
    options: dict[str, Any] = {"nll_type": name, "log_type": name.removeprefix("ar_")}
    sinks.loglikelihood(model("dream"), given["prefix"], given["target"], batch_size=4, **options)
    assert torch.equal(torch.cat(seen), given[f"{name}/model_input"])


@pytest.mark.parametrize("name", notes("llada")["greedy_check"])
def test_greedy_check(name: str) -> None:
    expected = case("llada", "greedy_check")
    prompt, target = expected["prompt"].reshape(-1), expected[name]
    assert likelihood.is_greedy(model("llada"), prompt, target) is notes("llada")["greedy_check"][name]


def test_greedy_check_goes_through_the_official_states() -> None:
    expected = case("llada", "greedy_check")
    states, n = expected["states"], len(expected["target_true"])
    g = sinks.generate(model("llada"), expected["prompt"].reshape(1, -1), steps=n, gen_len=n, block_len=n)
    assert torch.equal(g.trajectory[: len(states)], states)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", notes("masking"))
def test_sink_masking(name: str, path: str) -> None:
    expected, note = case("masking", name), notes("masking")[name]
    g = sinks.generate(
        model(note["checkpoint"], path),
        expected["prompt"],
        capture=sinks.Capture(),
        masking=sinks.SinkMasking(**note["masking"]),
        **note["sampler"],
    )
    assert g.blocked is not None
    assert g.incoming is not None
    assert torch.equal(g.trajectory, expected["states"])
    assert torch.equal(g.blocked, expected["blocked"].long())
    assert (g.incoming - expected["incoming"]).abs().max() < 1e-3
    plain = sinks.generate(model(note["checkpoint"], path), expected["prompt"], **note["sampler"])
    assert int((plain.tokens != g.tokens).sum()) == note["tokens_changed_by_masking"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", notes("autoregressive"))
def test_sink_masking_from_left_to_right(name: str, path: str) -> None:
    expected, note = case("autoregressive", name), notes("autoregressive")[name]
    masking = sinks.SinkMasking(**note["masking"]) if note["masking"] else None
    g = sinks.generate(
        model("autoregressive", path),
        case("autoregressive")["prompt"],
        gen_len=note["gen_len"],
        capture=sinks.Capture(),
        masking=masking,
    )
    assert g.incoming is not None
    assert torch.equal(g.trajectory, expected["states"])
    blocked = torch.zeros_like(expected["blocked"]).long() if g.blocked is None else g.blocked
    assert torch.equal(blocked, expected["blocked"].long())
    torch.testing.assert_close(g.incoming, expected["incoming"], atol=1e-3, rtol=0, equal_nan=True)
