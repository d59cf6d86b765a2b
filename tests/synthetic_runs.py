"""Run folders with chosen numbers in them, written by the same code as real ones; no model, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sinks.runs import Array, create_run, evenly_spaced, update_states
from sinks.writer import Layout, SampleWriter

MASK, BOS, EOS = 1000, 1001, 1002
LAYERS, HEADS = 3, 4  # unequal, so that mixing them up shows


def planted(steps: int, length: int, layers: int = LAYERS, heads: int = HEADS, share: float = 0.4) -> Array:
    """(T, L, H, S): one key per layer and head holds ``share`` of the attention and moves right by its own stride.

    In layer l and head h it stands at ``(l * heads + h + t) mod S`` at step t; the rest is shared equally.
    """
    incoming = np.full((steps, layers, heads, length), (1 - share) * length / max(length - 1, 1), dtype=np.float32)
    for t, layer, head in np.ndindex(steps, layers, heads):
        incoming[t, layer, head, (layer * heads + head + t) % length] = share * length
    return incoming


def left_to_right(length: int, prompt_length: int, steps: int) -> Array:
    """(S,) the step at which each position is filled: -1 in the prompt, then in order, equally many a step."""
    unmasked_at = np.full(length, -1)
    generated = length - prompt_length
    unmasked_at[prompt_length:] = np.arange(generated) * steps // max(generated, 1)
    return unmasked_at


def write_run(
    runs_dir: Path,
    name: str = "T0101_000000-S8-L8-B4",
    model: str = "tiny",
    incoming: Sequence[Array] | None = None,
    tokens_text: Sequence[str] | None = None,
    prompt_length: int = 4,
    block_len: int = 4,
    patterns: str = "none",
    pattern_steps: int = 4,
    unmasked_at: Array | None = None,
    missing: int = 0,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Path:
    """A run folder with one sample per array in ``incoming`` (T, L, H, S), and ``missing`` more that were never made.

    ``layers`` and ``heads`` are the model's numbers of the arrays' axes, when a run kept only a part.
    """
    arrays = list(incoming) if incoming is not None else [planted(8, 12)]
    steps, layer_count, head_count, length = arrays[0].shape
    layers, heads = layers or range(layer_count), heads or range(head_count)
    manifest: dict[str, Any] = {
        "model": model,
        "sampling": {"steps": steps, "gen_len": length - prompt_length, "block_len": block_len},
        "settings": {"model": model, "attention": {"none": "incoming"}.get(patterns, patterns)},
        "masking": None,
        "spec": {
            "family": "LLaDA",
            "attention": "full",
            "layers": max(layers) + 1,
            "heads": max(heads) + 1,
            "mask_token_id": MASK,
            "eos_token_id": EOS,
            "eot_token_id": None,
            "pad_token_id": EOS,
            "end_token_ids": [EOS],
        },
        "samples": [{"index": i, "id": str(i), "state": "missing"} for i in range(len(arrays) + missing)],
    }
    run = create_run(runs_dir, name, manifest)
    for index, array in enumerate(arrays):
        length = array.shape[-1]
        layout = Layout(
            steps=steps,
            length=length,
            layers=layers,
            heads=heads,
            layer_count=max(layers) + 1,
            head_count=max(heads) + 1,
            patterns=patterns,
            pattern_steps=evenly_spaced(pattern_steps, steps) if patterns != "none" else (),
        )
        at = left_to_right(length, prompt_length, steps) if unmasked_at is None else unmasked_at
        texts = list(tokens_text or [f"w{j}" for j in range(length)])
        _write_sample(run, index, layout, array, at, texts, prompt_length)
    update_states(run)
    return run


def _write_sample(
    run: Path, index: int, layout: Layout, incoming: Array, at: Array, texts: list[str], prompt_length: int
) -> None:
    final = np.arange(layout.length, dtype=np.int32)
    masked = np.concatenate([np.zeros(prompt_length, bool), np.ones(layout.length - prompt_length, bool)])
    writer = SampleWriter(run, index, layout, np.where(masked, MASK, final).astype(np.int32))
    for t in range(layout.steps):
        tokens = np.where(masked & ((at > t) | (at < 0)), MASK, final).astype(np.int32)
        confidence = np.where(masked & (at >= t), 0.5, np.nan).astype(np.float32)
        pattern = None
        if t in layout.pattern_steps:
            of_heads = np.repeat(incoming[t][:, :, None, :] / layout.length, layout.length, axis=2)
            pattern = of_heads if layout.patterns == "full" else of_heads.mean(1)
        writer.step(t, tokens=tokens, confidence=confidence, incoming=incoming[t], pattern=pattern)
    writer.finish(
        {
            "index": index,
            "id": str(index),
            "prompt": "".join(texts[:prompt_length]),
            "reference": None,
            "text": "".join(texts[prompt_length:]),
            "prompt_length": prompt_length,
            "tokens_text": texts,
            "timings": {"seconds": 1.0, "samples_together": 1, "seconds_per_step": 1.0 / layout.steps},
        }
    )
