"""Models of official shapes with random weights, made on the device, for timings without a download.

Projections keep the spread of their input, so that attention and logits are not flat; the text is nonsense.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, Qwen2Config

from sinks.attention import NAME, Probe
from sinks.families import DREAM, LLADA, Family
from sinks.models import LanguageModel, Spec, prepare
from sinks.samplers import Canvas, lay_out
from sinks.sampling import Sampling, resolve

BLOCK = 32  # block length, where a family has blocks

SHAPES: dict[str, tuple[Family, dict[str, Any]]] = {
    "LLaDA-8B": (
        LLADA,
        dict(
            vocab_size=126464,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        ),
    ),
    "Dream-7B": (
        DREAM,
        dict(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        ),
    ),
}


def random_model(shape: str, attention: str, layers: int | None = None, seed: int = 0) -> LanguageModel:
    """bfloat16 on the first CUDA device."""
    family, sizes = SHAPES[shape]
    sizes = sizes | ({} if layers is None else {"num_hidden_layers": layers})
    common: dict[str, Any] = dict(max_position_embeddings=16384, rms_norm_eps=1e-5, tie_word_embeddings=False)
    config = (Qwen2Config if family is DREAM else LlamaConfig)(**sizes, **common)
    config.is_causal = False
    config.use_cache = False
    config._attn_implementation = NAME
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = family.model_class(config)
    finally:
        torch.set_default_dtype(before)
    rotary = model.model.rotary_emb
    model = model.to_empty(device="cuda").eval()
    model.model.rotary_emb = type(rotary)(config).to("cuda")
    _fill(model, torch.Generator("cuda").manual_seed(seed))
    probe = Probe("fused" if attention == "auto" else attention)
    prepare(model, family, probe)
    spec = Spec(
        family.name,
        family.shift,
        "full",
        config.num_hidden_layers,
        config.num_attention_heads,
        config.vocab_size,
        config.max_position_embeddings,
        mask_token_id=config.vocab_size - 1,
        eos_token_id=config.vocab_size - 2,
        pad_token_id=config.vocab_size - 2,
    )
    return LanguageModel(model, None, spec, probe, f"random weights of {shape}'s shape", None)


@torch.no_grad()
def _fill(model: nn.Module, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
        else:
            parameter.fill_(0 if name.endswith("bias") else 1)


def parameters(lm: LanguageModel) -> int:
    """Of the layers and the output matrix: those that every step multiplies by."""
    named = dict(lm.model.named_parameters())
    return sum(parameter.numel() for name, parameter in named.items() if "embed_tokens" not in name)


def start(lm: LanguageModel, length: int, gen_len: int, temperature: float) -> tuple[Canvas, Sampling]:
    """A generation of ``gen_len`` tokens, one a step, that begins with random tokens up to ``length`` positions."""
    prompt = torch.randint(0, 1000, (length - gen_len,), generator=torch.Generator().manual_seed(0)).tolist()
    blocks = {} if lm.spec.family == "Dream" else {"block_len": min(BLOCK, gen_len)}
    sampling = resolve(lm.spec.family, gen_len=gen_len, temperature=temperature, **blocks)
    return lay_out(lm, [prompt], sampling), sampling


@contextmanager
def peak_memory() -> Iterator[Callable[[], float]]:
    """Gives a function that tells the peak since the beginning of the block, in GiB beside what was there then."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield lambda: (torch.cuda.max_memory_allocated() - before) / 2**30


def options(description: str | None) -> argparse.ArgumentParser:
    """What every benchmark of a whole model takes."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="LLaDA-8B")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--out", type=Path)
    return parser
