"""Models with random weights, written as checkpoints and loaded through ``sinks.load``; each is made once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from checkpoints import write_dream, write_llada
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import sinks
from sinks.models import LanguageModel

MASK, PAD = 63, 62  # of the LLaDA-, MMaDA- and Dream-shaped ones; three layers, four heads in all
DIFFUSION = ("llada", "mmada", "dream")
ALL = (*DIFFUSION, "ar")

_MMADA = {"architectures": ["MMadaModelLM"], "model_type": "mmada"}
_WRITERS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "llada": (write_llada, {}),
    "llada-gqa": (write_llada, {"key_heads": 2}),
    "mmada": (write_llada, _MMADA),
    "dream": (write_dream, {}),
}
_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_SHARED = _SHAPE | {"num_key_value_heads": 2}
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "ar": ("llama", _SHARED),
    "qwen3": ("qwen3", _SHARED | {"head_dim": 16}),
    "gpt_neox": ("gpt_neox", _SHAPE),
    "mistral": ("mistral", _SHARED | {"sliding_window": 5}),
    "gemma3": (
        "gemma3_text",
        _SHARED
        | {
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@cache
def tiny(kind: str = "llada", attention: str = "chunked", dtype: str = "float32", **options: Any) -> LanguageModel:
    """A loaded model; ``options`` go to the writer of its checkpoint (for ``ar`` and its like to its config)."""
    with tempfile.TemporaryDirectory() as folder:
        if kind in CAUSAL:
            stock(kind, **options).save_pretrained(folder)
        else:
            write, settings = _WRITERS[kind]
            write(Path(folder), tokenizer=False, **settings | options)
        return sinks.load(folder, device="cpu", attention=attention, dtype=dtype)


def stock(kind: str, **options: Any) -> PreTrainedModel:
    """A decoder-only model of transformers with its own eager attention."""
    torch.manual_seed(0)
    name, settings = CAUSAL[kind]
    config = AutoConfig.for_model(name, **settings | options)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    """(rows, length) ids without special tokens."""
    return torch.randint(0, 60, (rows, length), generator=torch.Generator().manual_seed(seed))


def ragged(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Left-padded ids and their attention mask."""
    ids = text(len(lengths), max(lengths), seed)
    mask = torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths)[:, None]
    return ids.masked_fill(~mask, PAD), mask.long()


def there(tensor: Tensor | None) -> Tensor:
    """A part of a generation that was asked for."""
    assert tensor is not None
    return tensor


def short(kind: str) -> dict[str, Any]:
    """Settings of a small generation: eight tokens, eight steps, two blocks where there are blocks."""
    return {"gen_len": 8} | ({"block_len": 4} if kind.startswith(("llada", "mmada")) else {})
