"""What must not change a result, over random small models: how attention is computed, watching, the batch, names of
heads, the next run. And detection against a rule written down a second time.

Each property is tried on a few cases by default and on many when marked long; the cases are always the same ones.
"""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from oracle import (
    Case,
    Model,
    blocked_in_row,
    captures,
    cases,
    explore,
    explored,
    maskings,
    models,
    pooled,
    sinks_of,
    strongest,
)
from tiny_models import MASK, ragged, there
from torch import Tensor

import sinks
from sinks import attention
from sinks.attention import PATHS
from sinks.detection import select
from sinks.masking import blocked_keys
from sinks.models import LanguageModel
from sinks.noise import Noise
from sinks.runs import Run
from sinks.samplers import Generation

ROOT = Path(__file__).parents[1]
CLOSE = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.5}  # logits are around 2, and attention is peaked


def same(one: Generation, other: Generation) -> bool:
    """To the last bit, in everything."""
    tensors = [field.name for field in fields(Generation) if field.name not in ("patterns", "text")]
    pairs = [(getattr(one, name), getattr(other, name)) for name in tensors]
    assert one.patterns.keys() == other.patterns.keys()
    pairs += [(pattern, other.patterns[step]) for step, pattern in one.patterns.items()]
    return all(b is None if a is None else np.array_equal(a.float(), b.float(), equal_nan=True) for a, b in pairs)


def clear(g: Generation) -> bool:
    """Whether no choice among positions hangs on rounding, as it does where masked positions see the same keys."""
    ordered = g.confidence.sort(-1).values  # NaN last
    gaps = ordered.diff(dim=-1)
    return not bool((gaps < 1e-4 * ordered[..., 1:].abs() + 1e-7).any())


def near(got: Tensor | None, want: Tensor | None) -> None:
    torch.testing.assert_close(there(got), there(want), atol=2e-3, rtol=1e-3, equal_nan=True)


def forward(lm: LanguageModel, path: str, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, incoming attention and patterns of one forward pass by one way to compute attention."""
    with mock.patch.object(lm.probe, "compute", path), torch.no_grad(), sinks.record(lm, patterns=True) as seen:
        logits = lm.model(ids, attention_mask=mask).logits
    return logits.float(), seen.incoming, seen.patterns


def check_paths(model: Model, lengths: list[int], side: str, seed: int, chunk_bytes: int) -> None:
    lm, (ids, mask) = model.load(), ragged(lengths, seed)
    if side == "right":
        ids, mask = ids.flip(1), mask.flip(1)
    real = mask.bool() if side != "none" else torch.ones_like(ids).bool()
    with mock.patch.object(attention, "_CHUNK_BYTES", chunk_bytes):
        seen = {path: forward(lm, path, ids, None if side == "none" else mask) for path in PATHS}
    shape = (model.layers, len(ids), model.heads)
    for logits, incoming, patterns in seen.values():
        assert incoming.shape == (*shape, ids.shape[1])
        assert (incoming.transpose(1, 2)[:, :, ~real] == 0).all()
        assert (patterns.permute(1, 4, 0, 2, 3)[~real] == 0).all()
        torch.testing.assert_close(patterns.sum(-1), real[:, None].expand(incoming.shape).float(), atol=1e-5, rtol=0)
        torch.testing.assert_close(patterns.sum(-2), incoming, atol=1e-5, rtol=0)
        queries = real.sum(-1)[:, None].expand(shape).float()
        torch.testing.assert_close(incoming.sum(-1), queries, atol=1e-4, rtol=0)
        expected = seen["reference"]
        torch.testing.assert_close(incoming[0], expected[1][0], atol=1e-5, rtol=0)  # nothing was rounded yet
        torch.testing.assert_close(logits, expected[0], atol=CLOSE[model.dtype], rtol=CLOSE[model.dtype])
        torch.testing.assert_close(incoming, expected[1], atol=CLOSE[model.dtype], rtol=CLOSE[model.dtype])
    assert all(torch.equal(a, b) for a, b in zip(seen["chunked"], seen["fused"], strict=True))


@explored(60, 1200)
def test_every_path_gives_every_model_the_same(examples: int) -> None:
    explore(
        check_paths,
        examples,
        model=models("float32", "bfloat16", "float16"),
        lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
        side=st.sampled_from(["left", "right", "none"]),
        seed=st.integers(0, 999),
        chunk_bytes=st.sampled_from([1, 400, 2**25]),
    )


def check_capture(data: st.DataObject) -> None:
    case = data.draw(cases("float32", "bfloat16", "float16"))
    capture = data.draw(captures(case.model))
    path = data.draw(st.sampled_from(list(PATHS)))
    lm = case.model.load()
    with mock.patch.object(lm.probe, "compute", path):
        plain, watched, again = case.run(), case.run(capture=capture), case.run(capture=capture)
    assert same(replace(watched, incoming=None, value_norm=None, patterns={}), plain)
    assert same(watched, again)


@explored(60, 800)
def test_watching_changes_nothing_and_neither_does_repeating(examples: int) -> None:
    explore(check_capture, examples, data=st.data())


def check_batches(data: st.DataObject) -> None:
    case = data.draw(cases("float32", fewest=2))
    order = data.draw(st.permutations(range(len(case.lengths))))
    cut = data.draw(st.integers(0, len(order) - 1))
    together = case.run(capture=sinks.Capture())
    assume(clear(together))
    longest = max(case.lengths)
    for rows in filter(None, (order[:cut], order[cut:])):
        part = case.run(rows, capture=sinks.Capture())
        for here, row in enumerate(rows):
            one, all_of = (end - case.lengths[row] for end in (max(case.lengths[r] for r in rows), longest))
            assert torch.equal(part.trajectory[:, here, one:], together.trajectory[:, row, all_of:])
            near(part.confidence[:, here, one:], together.confidence[:, row, all_of:])
            near(there(part.incoming)[:, :, here, :, one:], there(together.incoming)[:, :, row, :, all_of:])
            if together.blocked is not None:
                assert torch.equal(there(part.blocked)[:, :, here], together.blocked[:, :, row])


@explored(60, 900)
def test_neither_the_order_nor_the_batch_of_an_item_matters(examples: int) -> None:
    """Items in any order, cut into any two batches, beside any others: the same tokens, attention and blocked keys."""
    explore(check_batches, examples, data=st.data())


def relabelled(lm: LanguageModel, model: Model, keys: list[int], within: list[int]) -> tuple[LanguageModel, list[int]]:
    """A copy whose heads go by other numbers, and which head of the old is each of the new."""
    lm = copy.deepcopy(lm)
    heads = [key * model.groups + query for key in keys for query in within]

    def rows(order: list[int]) -> Tensor:
        return torch.tensor([head * model.dim + i for head in order for i in range(model.dim)])

    for layer in lm.model.model.layers:
        for name, order in (("q_proj", heads), ("k_proj", keys), ("v_proj", keys)):
            projection = getattr(layer.self_attn, name)
            for weights in (projection.weight, projection.bias):
                if weights is not None:
                    weights.data = weights.data[rows(order)]
        out = layer.self_attn.o_proj.weight
        out.data = out.data[:, rows(heads)]
    return lm, heads


def check_heads(data: st.DataObject) -> None:
    case = data.draw(cases("float32", controls=("sinks", "bottom")))  # chance belongs to a head's number
    keys, within = (data.draw(st.permutations(range(n))) for n in (case.model.key_heads, case.model.groups))
    lm, heads = relabelled(case.model.load(), case.model, keys, within)
    capture = sinks.Capture(patterns="full", value_norm=True)
    before, after = case.run(capture=capture), case.run(lm=lm, capture=capture)
    assume(clear(before))
    assert torch.equal(after.trajectory, before.trajectory)
    near(after.incoming, there(before.incoming)[:, :, :, heads])
    near(after.value_norm, there(before.value_norm)[:, :, :, heads])
    for step, pattern in before.patterns.items():
        near(after.patterns[step], pattern[:, :, heads])
    if before.blocked is not None:
        assert torch.equal(there(after.blocked), before.blocked[:, :, :, heads])


@explored(40, 500)
def test_heads_may_go_by_other_numbers(examples: int) -> None:
    explore(check_heads, examples, data=st.data())


def check_blocked_keys(data: st.DataObject) -> None:
    layers, heads = (data.draw(st.sampled_from([1, 2, 4])) for _ in range(2))  # means stay exact
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 14))
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 9999)))
    levels = data.draw(st.sampled_from([2, 8, 100]))
    incoming = torch.randint(0, levels, (layers, batch, heads, length), generator=seed) / 4  # many are equal
    exists = data.draw(st.integers(1, length))
    incoming[..., exists:] = math.nan
    valid = torch.arange(length) >= torch.randint(0, exists, (batch, 1), generator=seed)
    eligible = valid & (torch.rand(batch, length, generator=seed) < data.draw(st.sampled_from([0.6, 1.0])))
    masking = data.draw(maskings(Model("llada", layers, heads, 1, 4), ("sinks", "random", "bottom")))
    blocked = blocked_keys(masking, incoming, eligible, valid, 1, Noise(0, torch.arange(batch)))
    judged = pooled(incoming, masking.scope)
    for layer, row, head in np.ndindex(layers, batch, heads):
        c, keys = judged[layer, row, head].tolist(), eligible[row].tolist()
        most, found = int(valid[row].sum()) - 1, set(blocked[layer, row, head].nonzero().flatten().tolist())
        expected = blocked_in_row(replace(masking, control="sinks"), c, keys, most)
        assert expected is not None
        if masking.layers is not None and layer not in masking.layers:
            assert found == set()
        elif masking.control == "random":
            others = {j for j in range(exists) if keys[j]} - expected
            assert found <= others and len(found) == min(len(expected), len(others))
        else:
            assert found == blocked_in_row(masking, c, keys, most)


@explored(200, 3000)
def test_blocked_keys_are_those_of_the_rule(examples: int) -> None:
    """Incoming attention on a grid, so that strengths tie, with padding and positions that do not exist yet."""
    explore(check_blocked_keys, examples, data=st.data())


def check_detection(data: st.DataObject) -> None:
    case = data.draw(cases("float32"))
    epsilon, count = data.draw(st.sampled_from([0.0, 0.3, 1.0, 3.0])), data.draw(st.integers(0, 5))
    g, (_, mask) = case.run(capture=sinks.Capture()), case.prompts
    incoming = there(g.incoming)
    padding = torch.cat([~mask.bool(), torch.zeros(len(mask), case.options["gen_len"]).bool()], 1)[:, None]
    found = sinks.detect(incoming, epsilon, padding)
    top = select(incoming.double().nan_to_num(), ~incoming.isnan() & ~padding, torch.tensor([count]))
    for place in np.ndindex(incoming.shape[:-1]):
        row = incoming[place].tolist()
        keys = [not math.isnan(c) and not out for c, out in zip(row, padding[place[2], 0].tolist(), strict=True)]
        pairs = zip(found[place].tolist(), sinks_of(row, keys, epsilon), strict=True)
        assert all(want is None or got is want for got, want in pairs)
        assert set(top[place].nonzero().flatten().tolist()) == strongest(row, keys, count)


@explored(40, 300)
def test_detected_sinks_are_those_of_the_rule(examples: int) -> None:
    explore(check_detection, examples, data=st.data())


@pytest.mark.long
def test_a_run_is_repeatable_and_does_not_depend_on_its_batches(tmp_path: Path) -> None:
    """Whole processes, where chance decides both the tokens and their order."""
    arguments = "tiny --num_samples 4 --gen_len 16 --block_len 8 --temperature 1 --remasking random --seed 5".split()

    def run(name: str, batch_size: int) -> Run:
        script = [sys.executable, str(ROOT / "inference_model.py"), *arguments]
        call = [*script, "--batch_size", str(batch_size), "--attention", "mean", "--runs_dir", name]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=300)
        [folder] = (tmp_path / name).iterdir()
        return Run(folder)

    first, *others = (run(f"batches-of-{size}", size) for size in (3, 1, 4))
    for other in others:
        for one, same_one in zip(first.samples, other.samples, strict=True):
            np.testing.assert_array_equal(one.tokens(), same_one.tokens())
            assert one.text == same_one.text
    assert _contents(run("again", 3)) == _contents(first)


def _contents(run: Run) -> dict[str, Any]:
    """Every file of the samples: tensors as bytes, the rest without how long it took."""
    found: dict[str, Any] = {}
    for path in sorted(run.path.rglob("*")):
        if path.suffix == ".safetensors":
            found[str(path.relative_to(run.path))] = path.read_bytes()
        elif path.name == "sample.json":
            found[str(path.relative_to(run.path))] = json.loads(path.read_text(encoding="utf-8")) | {"timings": None}
    assert len(found) > 3 * len(run.samples)
    return found


@pytest.mark.parametrize(
    ("lengths", "seed", "options"),
    [
        (
            [1, 3, 2, 4],
            529,
            {"gen_len": 4, "steps": 4, "block_len": 2, "temperature": 0.0, "remasking": "low_confidence"},
        ),
        ([1, 6, 2, 4], 30, {"gen_len": 6, "steps": 6, "block_len": 1, "temperature": 1.0, "remasking": "random"}),
    ],
)
def test_a_proposed_mask_token_does_not_tie_a_row_to_its_batch(
    lengths: list[int], seed: int, options: dict[str, Any]
) -> None:
    model = Model("llada", 1, 2, 2, 4, 2)
    case = Case(model, lengths, seed, [0, 1, 2, 3], True, options | {"seed": 0, "cfg_scale": 0.0, "masking": None})
    together = case.run()
    assert (together.tokens == MASK).any()  # a mask that was left, or proposed last
    for row, length in enumerate(lengths):
        alone = case.run([row])
        begin = max(lengths) - length
        assert torch.equal(alone.tokens[0], together.tokens[row, begin:])
        near(alone.confidence[:, 0], together.confidence[:, row, begin:])
