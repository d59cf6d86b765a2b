"""The same on a GPU as on a CPU: golden traces, capture, blocking, evaluation, a model spread by device_map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_dream, write_llada
from golden_data import GOLDEN, IDS, case, notes

import sinks
from sinks.attention import PATHS
from sinks.models import LanguageModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Where confidences tie exactly, the order of torch.topk decides, and CUDA has another one.
TIED = {"eos_confidence_inf", "eos_both"}
DRAWN = {"random", "cfg_random", "temperature", "origin", "origin_few_steps"}
CASES = [
    (family, name)
    for family in ("llada", "dream", "mmada")
    for name, note in notes(family)["generate"].items()
    if name not in TIED | DRAWN and "head_rows" not in note
]


def _golden(family: str, device: str, path: str = "auto") -> LanguageModel:
    ids: dict[str, Any] = dict(IDS[family])
    return sinks.load(str(GOLDEN / family), device=device, dtype="float32", attention=path, **ids)


@pytest.fixture(scope="module")
def on_gpu() -> dict[str, LanguageModel]:
    return {family: _golden(family, "cuda") for family in (*IDS,)}


@pytest.mark.parametrize(("family", "name"), CASES)
def test_golden_traces(on_gpu: dict[str, LanguageModel], family: str, name: str) -> None:
    expected = case(family, f"generate/{name}")
    kwargs = {
        k: v for k, v in notes(family)["generate"][name]["kwargs"].items() if k not in ("mask_id", "mask_token_id")
    }
    mask = expected.get("attention_mask")
    prompt = expected["prompt"]
    g = sinks.generate(on_gpu[family], prompt, None if mask is None else mask[:, : prompt.shape[1]], **kwargs)
    assert torch.equal(g.trajectory, expected["states"])


@pytest.mark.parametrize("name", notes("masking"))
def test_golden_masking(on_gpu: dict[str, LanguageModel], name: str) -> None:
    note, expected = notes("masking")[name], case("masking", name)
    masking = sinks.SinkMasking(**note["masking"])
    lm = on_gpu[note["checkpoint"]]
    g = sinks.generate(lm, expected["prompt"], capture=sinks.Capture(), masking=masking, **note["sampler"])
    assert torch.equal(g.trajectory, expected["states"])
    assert g.blocked is not None
    assert g.incoming is not None
    assert torch.equal(g.blocked.long(), expected["blocked"].long())
    torch.testing.assert_close(g.incoming, expected["incoming"], atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", notes("autoregressive"))
def test_golden_autoregressive(on_gpu: dict[str, LanguageModel], name: str) -> None:
    note, expected = notes("autoregressive")[name], case("autoregressive", name)
    masking = sinks.SinkMasking(**note["masking"]) if note["masking"] else None
    g = sinks.generate(
        on_gpu["autoregressive"],
        case("autoregressive")["prompt"],
        gen_len=note["gen_len"],
        capture=sinks.Capture(),
        masking=masking,
    )
    assert torch.equal(g.trajectory, expected["states"])
    torch.testing.assert_close(g.incoming, expected["incoming"], atol=1e-3, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("path", PATHS)
def test_incoming_attention_is_that_of_the_cpu(tmp_path: Path, path: str, dtype: str) -> None:
    folder = str(write_dream(tmp_path / "dream"))
    ids = torch.arange(40).view(2, 20) % 60
    mask = torch.ones_like(ids)
    mask[1, :5] = 0

    def incoming(device: str, dtype: str) -> torch.Tensor:
        lm = sinks.load(folder, device=device, dtype=dtype, attention=path)
        with sinks.record(lm) as rec, torch.no_grad():
            lm.model(ids.to(device), attention_mask=mask.to(device))
        return rec.incoming

    found, exact = incoming("cuda", dtype), incoming("cpu", "float32")
    if dtype == "float32":
        torch.testing.assert_close(found, exact, atol=1e-4, rtol=0)
    else:  # queries and keys are rounded at other places, but not worse
        rounding = (incoming("cpu", dtype) - exact).square().mean().sqrt()
        assert (found - exact).square().mean().sqrt() < 1.3 * rounding
    assert torch.all(found[:, 1, :, :5] == 0)
    torch.testing.assert_close(found[:, 1].sum(-1), torch.full((3, 4), 15.0), atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_capture_changes_no_token_and_runs_repeat(tmp_path: Path, dtype: str) -> None:
    lm = sinks.load(str(write_llada(tmp_path / "llada", hidden=64)), device="cuda", dtype=dtype)
    prompts = torch.arange(60).view(3, 20)
    settings: dict[str, Any] = {"gen_len": 32, "block_len": 8, "temperature": 0.7}
    plain = sinks.generate(lm, prompts, **settings)
    captured = sinks.generate(lm, prompts, capture=sinks.Capture(patterns="full"), **settings)
    again = sinks.generate(lm, prompts, capture=sinks.Capture(), **settings)
    assert torch.equal(plain.trajectory, captured.trajectory)
    assert torch.equal(plain.trajectory, again.trajectory)
    assert captured.incoming is not None
    assert again.incoming is not None
    assert torch.equal(captured.incoming, again.incoming)


def test_draws_are_those_of_the_cpu(tmp_path: Path) -> None:
    folder = str(write_llada(tmp_path / "llada"))
    settings: dict[str, Any] = {"gen_len": 16, "block_len": 8, "temperature": 1.0, "remasking": "random"}
    found = [
        sinks.generate(sinks.load(folder, device=device, dtype="float32"), torch.arange(10)[None], **settings).tokens
        for device in ("cpu", "cuda")
    ]
    assert torch.equal(found[0], found[1])


def test_device_map(tmp_path: Path) -> None:
    folder = str(write_llada(tmp_path / "llada"))
    lm = sinks.load(folder, device_map="auto", dtype="float32")
    g = sinks.generate(lm, torch.arange(10)[None], gen_len=8, block_len=4, capture=sinks.Capture())
    expected = sinks.generate(
        sinks.load(folder, device="cuda", dtype="float32"),
        torch.arange(10)[None],
        gen_len=8,
        block_len=4,
        capture=sinks.Capture(),
    )
    assert torch.equal(g.trajectory, expected.trajectory)
    torch.testing.assert_close(g.incoming, expected.incoming)
