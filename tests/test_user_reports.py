"""What users of tools like this one ran into, each as a small input and the right value.

Report 2 (memory of a capture) is measured in test_launch.py, in a process of its own.
"""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_dream, write_llada
from safetensors import safe_open
from tiny_models import ALL, DIFFUSION, short, text, there, tiny
from torch import Tensor

import inference_model
import sinks
from sinks.attention import PATHS
from sinks.errors import InputError
from sinks.masking import SinkMasking, blocked_keys
from sinks.noise import Noise
from sinks.samplers import denoise, lay_out, resolve

SHORT = ("--gen_len", "8", "--steps", "8", "--block_len", "4")


def command(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: object) -> sinks.Run:
    """The run that a command line makes in an empty folder."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["inference_model.py", *map(str, arguments)])
    inference_model.main()
    [run] = (folder / "runs").glob("T*")
    return sinks.Run(run)


# 1. Attention cannot be had from LLaDA (ML-GSAI/LLaDA#114)


def test_attention_of_an_unmodified_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = sinks.load(str(write_llada(tmp_path / "model")), device="cpu")
    assert type(lm.model).__module__ == "transformers.models.llama.modeling_llama"
    options: dict[str, Any] = {"gen_len": 8, "steps": 8, "block_len": 4}
    g = sinks.generate(lm, "a b c", capture=sinks.Capture(patterns="full"), **options)
    patterns = torch.stack([g.patterns[step] for step in range(8)])
    assert patterns.shape == (8, 3, 1, 4, 11, 11)
    assert (patterns.sum(-1) - 1).abs().max() < 1e-5
    assert torch.equal(sinks.generate(lm, "a b c", **options).tokens, g.tokens)

    prompt = (tmp_path / "model", "--prompt", "a b c", *SHORT)
    full = command(monkeypatch, tmp_path / "full", *prompt, "--attention", "full").samples[0]
    plain = command(monkeypatch, tmp_path / "plain", *prompt).samples[0]
    assert full.tokens().tolist() == plain.tokens().tolist() == g.trajectory[:, 0].tolist()
    assert full.pattern_steps == list(range(8))
    for step, layer, head in ((0, 0, 0), (7, 2, 3), (3, 1, 2)):
        kept = full.pattern(step, layer, head).astype(np.float64)
        assert np.abs(kept - patterns[step, layer, 0, head].numpy()).max() < 5e-4  # float16
        assert np.abs(kept.sum(-1) - 1).max() < 2e-3


# 2. Saving attention exhausts memory (QwenLM/Qwen3-VL#1464)


def test_a_step_is_forgotten_when_the_next_is_there() -> None:
    lm, sampling = tiny("llada"), resolve("LLaDA", gen_len=8, block_len=4)
    steps = denoise(lm, lay_out(lm, [[5, 6, 7]], sampling), sampling, sinks.Capture(patterns="full"))
    kept: list[weakref.ref[Tensor]] = []
    for step in steps:
        assert step.incoming is not None
        assert step.patterns is not None
        kept += [weakref.ref(step.incoming), weakref.ref(step.patterns)]
        del step
        assert all(reference() is None for reference in kept[:-2])


# 3. The padding mask is silently ignored (ML-GSAI/LLaDA#89 and #90, Gen-Verse/MMaDA#23)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ALL)
def test_padding_is_no_text(kind: str, path: str) -> None:
    lm = tiny(kind, path)
    short_ids, padded = torch.tensor([[5, 6, 7]]), torch.tensor([[62, 62, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    with torch.no_grad(), sinks.record(lm) as alone:
        expected = lm.model(short_ids).logits
    with torch.no_grad(), sinks.record(lm) as rec:
        logits = lm.model(padded, attention_mask=mask, position_ids=torch.tensor([[0, 0, 0, 1, 2]])).logits
        ignored = lm.model(padded).logits
    assert (logits[:, 2:] - expected).abs().max() < 1e-4
    assert kind == "ar" or (ignored[:, 2:] - expected).abs().max() > 1e-2
    with torch.no_grad(), sinks.record(lm) as rec:
        lm.model(padded, attention_mask=mask)
    assert (rec.incoming[..., :2] == 0).all()
    assert (rec.incoming[..., 2:] - alone.incoming).abs().max() < 1e-4
    for epsilon in (0.0, 0.1, 3.0):
        assert not sinks.detect(rec.incoming, epsilon, exclude=~mask.bool()[None, :, None])[..., :2].any()
    masking = SinkMasking(epsilon=0.0)
    padded_run = sinks.generate(lm, padded, mask, capture=sinks.Capture(), masking=masking, **short(kind))
    run = sinks.generate(lm, short_ids, capture=sinks.Capture(), masking=masking, **short(kind))
    assert torch.equal(padded_run.tokens[:, 2:], run.tokens)
    assert (there(padded_run.incoming)[..., :2] == 0).all()
    assert torch.equal(there(padded_run.blocked), there(run.blocked))


# 5. One kernel returns no attention, another does (huggingface/transformers#30978, #38750, #31990)


@pytest.mark.parametrize("kind", ["llada", "dream", "ar"])
def test_every_path_returns_attention(kind: str) -> None:
    seen = {}
    for path in PATHS:
        capture = sinks.Capture(patterns="full")
        seen[path] = sinks.generate(tiny(kind, path), text(2, 5), capture=capture, **short(kind))
        assert tiny(kind, path).attention_path == path
    reference, chunked = seen["reference"], seen["chunked"]
    assert torch.equal(reference.tokens, chunked.tokens)
    incoming = there(reference.incoming), there(chunked.incoming)
    torch.testing.assert_close(*incoming, atol=1e-5, rtol=1e-5, equal_nan=True)
    for step in range(8):
        assert (reference.patterns[step] - chunked.patterns[step]).abs().max() < 1e-5


def test_a_run_says_which_path_made_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = command(monkeypatch, tmp_path / "run", write_dream(tmp_path / "model"), "--prompt", "a b c", *SHORT)
    assert json.loads((run.path / "manifest.json").read_text(encoding="utf-8"))["attention_path"] in PATHS


# 8. A row with every key blocked becomes NaN (pytorch/pytorch#103963)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("control", ["sinks", "bottom"])
def test_as_many_keys_as_there_are(kind: str, path: str, dtype: str, control: str) -> None:
    """S = 4 and top_k 4; in the second row sinks and padding together are all keys."""
    lm = tiny(kind, path, dtype)
    ids, mask = torch.tensor([[5, 6], [62, 6]]), torch.tensor([[1, 1], [0, 1]])
    block_len: dict[str, Any] = {"block_len": 2} if kind in ("llada", "mmada") else {}
    logits: list[Tensor] = []
    hook = lm.model.lm_head.register_forward_hook(lambda _, __, output: logits.append(output))
    try:
        g = sinks.generate(
            lm,
            ids,
            mask,
            gen_len=2,
            capture=sinks.Capture(),
            masking=SinkMasking(top_k=4, control=control),
            **block_len,
        )
    finally:
        hook.remove()
    assert all(output.isfinite().all() for output in logits)
    incoming = there(g.incoming) if kind in DIFFUSION else there(g.incoming)[-1, ..., :3]  # the last is no key yet
    assert incoming.isfinite().all()
    assert (there(g.blocked)[..., 0, :] <= 3).all()
    assert (there(g.blocked)[..., 1, :] <= 2).all()


# 9. top-k larger than the number of keys (idiap/fast-transformers#64)


def test_more_sinks_are_asked_for_than_keys_are_open(caplog: pytest.LogCaptureFixture) -> None:
    """S = 6 and k = 10: no more than 5, which is said."""
    ids, masking = text(1, 2), SinkMasking(top_k=10)
    g = sinks.generate(tiny("llada"), ids, masking=masking, gen_len=4, block_len=4)
    assert there(g.blocked).max() <= 5
    assert "top_k 10 would leave no key open: at most 5 are blocked" in caplog.text


def test_fewer_sinks_are_there_than_were_asked_for() -> None:
    """S = 40, two keys above epsilon and k = 10: the two, and the number is kept."""
    incoming = torch.full((1, 1, 1, 40), 32 / 38)
    incoming[..., [3, 17]] = 4.0
    valid = torch.ones(1, 40, dtype=torch.bool)
    for control, keys in (("sinks", [3, 17]), ("bottom", [0, 1])):
        masking = SinkMasking(epsilon=3.0, top_k=10, control=control)
        blocked = blocked_keys(masking, incoming, valid, valid, 1, Noise(0, torch.arange(1)))
        assert blocked[0, 0, 0].nonzero()[:, 0].tolist() == keys


def test_the_number_that_was_blocked_is_kept_for_every_step_layer_and_head() -> None:
    options: dict[str, Any] = {"capture": sinks.Capture(), "masking": SinkMasking(epsilon=0.5, top_k=10)} | short(
        "llada"
    )
    g = sinks.generate(tiny("llada"), text(1, 32), **options)
    blocked = there(g.blocked)[1:]
    assert torch.equal(blocked, sinks.detect(there(g.incoming), 0.5).sum(-1)[:-1].clamp(max=10))
    assert len(blocked.unique()) > 3


# 15. Values above 1 confuse readers (mit-han-lab/streaming-llm#86)

PLANT = np.full((8, 8), 0.1 / 7)
PLANT[:, 5] = 0.9


def test_a_planted_sink() -> None:
    """7.2 against 0.114 + 3."""
    columns = PLANT.sum(0)
    np.testing.assert_allclose(columns[[5, 0]], [7.2, 0.8 / 7])
    assert sinks.detect(columns, 3.0).nonzero()[0].tolist() == [5]
    assert sinks.detect(torch.tensor(columns), 3.0).nonzero()[:, 0].tolist() == [5]
    with pytest.raises(InputError, match="no token can receive more than 1"):
        sinks.detect(columns, 3.0, normalization="mean")
    assert not sinks.detect(np.ones(8), 1e-9).any()


def test_a_file_says_what_its_numbers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = command(monkeypatch, tmp_path / "run", write_llada(tmp_path / "model"), "--prompt", "a b c", *SHORT)
    with safe_open(run.path / "sample_000" / "incoming.safetensors", "np") as file:
        assert "sum over queries, mean 1" in file.metadata()["unit"]
        incoming = file.get_tensor("incoming").astype(np.float64)
    assert incoming.shape == (8, 3, 4, 11)
    np.testing.assert_allclose(incoming.mean(-1), 1, atol=2e-3)
