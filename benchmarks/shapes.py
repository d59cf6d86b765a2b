"""Models of official shapes with random weights, made on the device, for timings without a download.

Projections keep the spread of their input, so that attention and logits are not flat; the text is nonsense.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, Qwen2Config

from sinks.attention import NAME, Probe
from sinks.families import DREAM, LLADA, Family
from sinks.models import LanguageModel, Spec, compile_layers, gains_from_compiling

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
    if family.rotary_float32:
        model.model.rotary_emb.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
    probe = Probe("fused" if attention == "auto" else attention)
    probe.attach(model)
    if gains_from_compiling(model, probe):
        compile_layers(model)
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
