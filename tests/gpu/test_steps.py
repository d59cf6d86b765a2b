"""A step as one launch, on the rows that matter, watched or not: always the same tokens. 8B-shaped layers, bfloat16."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_llada
from shapes import random_model

import sinks
from sinks import fitting, inference, replay
from sinks.models import LanguageModel
from sinks.plan import Settings, plan
from sinks.remasking import BlockwiseRemasking, Extent, ScheduledRemasking
from sinks.runs import Run
from sinks.samplers import Generation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPT, STEPS = 150, 64
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "guided": {"cfg_scale": 1.5},
    "masked": {"masking": sinks.SinkMasking(top_k=1)},
    "control": {"masking": sinks.SinkMasking(top_k=3, control="random", layers=[0, 2], heads=[1, 20])},
    "values": {"masking": sinks.SinkMasking(top_k=2, path="values", measure="blocked")},
}


@pytest.fixture(scope="module", params=["LLaDA-8B", "Dream-7B"])
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    return random_model(request.param, "auto", layers=4)


def generate(lm: LanguageModel, name: str, padded: bool = False, **options: Any) -> Generation:
    settings = CASES[name] | options
    if lm.spec.family == "Dream":
        settings = {key: value for key, value in settings.items() if key != "cfg_scale"}
    else:
        settings = {"block_len": 16} | settings
    prompt = torch.randint(0, 1000, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    prompt[:, 40] = lm.spec.mask_token_id or 0  # may be filled at any step
    mask = torch.ones_like(prompt)
    mask[1, :20] = 0 if padded else 1
    return sinks.generate(lm, prompt, mask, gen_len=STEPS, steps=STEPS, **settings)


def equal(one: Generation, other: Generation) -> bool:
    pairs = [(one.trajectory, other.trajectory), (one.confidence.nan_to_num(-1), other.confidence.nan_to_num(-1))]
    if one.incoming is not None and other.incoming is not None:
        pairs.append((one.incoming, other.incoming))
    if one.blocked is not None and other.blocked is not None:
        pairs.append((one.blocked, other.blocked))
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", CASES)
def test_a_recorded_step_is_a_plain_one(
    lm: LanguageModel, name: str, padded: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = generate(lm, name, padded, capture=sinks.Capture())
    assert not [record for record in caplog.records if record.name == replay.__name__]
    assert equal(recorded, generate(lm, name, padded, capture=sinks.Capture()))
    monkeypatch.setattr(replay, "_obstacle", lambda model: "a test says so")
    with caplog.at_level(logging.WARNING):
        assert equal(recorded, generate(lm, name, padded, capture=sinks.Capture()))
    assert caplog.text.count("without a CUDA graph: a test says so") == 1


@pytest.mark.parametrize("name", CASES)
def test_watching_changes_no_token(lm: LanguageModel, name: str) -> None:
    plain = generate(lm, name)
    for capture in (sinks.Capture(), sinks.Capture(patterns="mean", steps=[0, 5, 63]), sinks.Capture(value_norm=True)):
        assert equal(plain, generate(lm, name, capture=capture))


@pytest.mark.parametrize("name", ["greedy", "drawn", "masked"])
def test_the_rows_that_matter_are_as_good_as_all(lm: LanguageModel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = generate(lm, name)
    for strategy in (BlockwiseRemasking, ScheduledRemasking):
        extent = strategy.extent
        monkeypatch.setattr(
            strategy, "extent", lambda self, index, of=extent: Extent(PROMPT + STEPS, of(self, index).taken)
        )
    every = generate(lm, name)
    assert torch.equal(few.trajectory, every.trajectory)
    torch.testing.assert_close(few.confidence, every.confidence, rtol=2e-2, atol=1e-6, equal_nan=True)


def test_column_sums_of_a_recorded_step_add_up(lm: LanguageModel) -> None:
    g = generate(lm, "masked", padded=True, capture=sinks.Capture())
    assert g.incoming is not None
    queries = torch.tensor([PROMPT + STEPS, PROMPT + STEPS - 20.0])
    torch.testing.assert_close(g.incoming.sum(-1), queries[:, None].expand(g.incoming.shape[:-1]), rtol=1e-4, atol=0)
    assert torch.all(g.incoming[:, :, 1, :, :20] == 0)


def test_nan_is_named_with_its_step_layer_and_head(lm: LanguageModel) -> None:
    weight = lm.model.model.layers[2].self_attn.q_proj.weight
    row = weight.data[128 * 3].clone()
    weight.data[128 * 3] = torch.nan  # the first query row of head 3
    try:
        with pytest.raises(sinks.InputError, match=r"NaN or infinity at step 0, layer 2, head 3"):
            generate(lm, "greedy", capture=sinks.Capture())
    finally:
        weight.data[128 * 3] = row


def test_the_largest_batch_fits_and_a_larger_one_goes_on_in_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = str(write_llada(tmp_path / "llada", hidden=64))
    settings = Settings(checkpoint, dataset="problems", num_samples=6, gen_len=16, block_len=8, batch_size="auto")
    planned = plan(settings, "cuda")
    assert fitting.largest_batch(planned) == 6
    really = fitting._fits
    monkeypatch.setattr(fitting, "_fits", lambda of, samples: len(samples) <= 2 and really(of, samples))
    assert fitting.largest_batch(planned) == 1  # 6, 3, 1
    with inference.open_run(planned, tmp_path / "runs", None, []) as launch:
        inference.fill(planned, launch)
    assert len(Run(launch.folder).samples) == 6
