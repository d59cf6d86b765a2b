"""The embedded models' checkpoints, written as the families publish theirs."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from sinks.files import write_json
from sinks.tiny.tokenizer import BOS, EOS, EOT, MASK, save_tokenizer

# Llama's tensor names, and LLaDA's; `ff_out` is the head as well as the second half of the feed-forward layers.
LLADA_NAMES = {
    r"model\.embed_tokens\.": "model.transformer.wte.",
    r"model\.norm\.": "model.transformer.ln_f.",
    r"lm_head\.": "model.transformer.ff_out.",
    r"model\.layers\.(\d+)\.input_layernorm\.": r"model.transformer.blocks.\1.attn_norm.",
    r"model\.layers\.(\d+)\.self_attn\.o_proj\.": r"model.transformer.blocks.\1.attn_out.",
    r"model\.layers\.(\d+)\.self_attn\.": r"model.transformer.blocks.\1.",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.": r"model.transformer.blocks.\1.ff_norm.",
    r"model\.layers\.(\d+)\.mlp\.gate_proj\.": r"model.transformer.blocks.\1.ff_proj.",
    r"model\.layers\.(\d+)\.mlp\.up_proj\.": r"model.transformer.blocks.\1.up_proj.",
    r"model\.layers\.(\d+)\.mlp\.down_proj\.": r"model.transformer.blocks.\1.ff_out.",
}


def llada_name(name: str) -> str:
    """The official LLaDA name of a tensor of LlamaForCausalLM."""
    for pattern, replacement in LLADA_NAMES.items():
        if re.match(pattern, name):
            return re.sub(pattern, replacement, name, count=1)
    raise ValueError(f"no LLaDA tensor is like {name}")


def llada_config(config: PretrainedConfig, ids: dict[str, int]) -> dict[str, Any]:
    """config.json with every key of LLaDA-8B's."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": config.hidden_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_attention_heads,
        "n_layers": config.num_hidden_layers,
        "mlp_hidden_size": config.intermediate_size,
        "mlp_ratio": 4,
        "vocab_size": config.vocab_size,
        "embedding_size": config.vocab_size,
        "max_sequence_length": config.max_position_embeddings,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rms_norm_eps": config.rms_norm_eps,
        "mask_token_id": ids[MASK],
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[EOS],
        "eot_token_id": ids[EOT],
        **LLADA_OPTIONS,
    }


LLADA_OPTIONS = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "embedding_dropout": 0.0,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "multi_query_attention": None,
    "precision": "amp_bf16",
    "residual_dropout": 0.0,
    "rope": True,
    "rope_full_precision": True,
    "scale_logits": False,
    "torch_dtype": "bfloat16",
    "use_cache": False,
    "weight_tying": False,
}


def dream_config(config: PretrainedConfig, ids: dict[str, int]) -> dict[str, Any]:
    """config.json with every key of Dream-7B's."""
    return {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "attention_dropout": 0.0,
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[EOS],
        "eot_token_id": ids[EOT],
        "mask_token_id": ids[MASK],
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_parameters["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def autoregressive_config(config: PretrainedConfig, ids: dict[str, int]) -> dict[str, Any]:
    """config.json of transformers' own class; as in chat models, the end of a turn is the end of an answer."""
    named = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    return (
        config.to_diff_dict() | named | {"bos_token_id": ids[BOS], "eos_token_id": ids[EOT], "pad_token_id": ids[EOS]}
    )


CONFIGS: dict[str, Callable[[PretrainedConfig, dict[str, int]], dict[str, Any]]] = {
    "llada": llada_config,
    "ar": autoregressive_config,
    "dream": dream_config,
}


def save_checkpoint(kind: str, model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config.json, model.safetensors (bfloat16) and the tokenizer; old files are replaced at the end."""
    tensors: dict[str, Tensor] = {
        llada_name(name) if kind == "llada" else name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        part = Path(temporary)
        write_json(part / "config.json", CONFIGS[kind](model.config, tokenizer.get_vocab()))
        (part / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
        save_tokenizer(tokenizer, part, model.config.max_position_embeddings)
        for file in sorted(part.iterdir()):
            file.replace(folder / file.name)
