"""Checkpoints with random weights in the official formats, small enough to be written within a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz"  # "a b c" encodes to 0, 1, 2


def write_llada(
    folder: Path,
    *,
    layers: int = 3,
    heads: int = 4,
    key_heads: int | None = None,
    hidden: int = 32,
    vocab: int = 64,
    mask: int = 63,
    pad: int = 62,
    eot: int = 61,
    positions: int = 4096,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    tokenizer: bool = True,
    **config: Any,
) -> Path:
    """A LLaDA-shaped checkpoint under ``folder``; ``config`` adds or changes keys of its config.json."""
    key_heads, mlp = key_heads or heads, 2 * hidden
    settings = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": "silu",
        "alibi": False,
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": hidden,
        "embedding_size": vocab,
        "eos_token_id": pad,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "mask_token_id": mask,
        "max_sequence_length": positions,
        "mlp_hidden_size": mlp,
        "n_heads": heads,
        "n_kv_heads": key_heads,
        "n_layers": layers,
        "pad_token_id": pad,
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": 500000.0,
        "scale_logits": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": vocab,
        "weight_tying": False,
    }
    shapes = _llada_shapes(layers, hidden, hidden // heads * key_heads, mlp, vocab)
    _write(folder, settings | config, _random(shapes, seed, dtype), shards)
    if tokenizer:
        _write_tokenizer(folder, vocab, {"<eot>": eot, "<pad>": pad, "<mask>": mask}, eos_token="<pad>")
    return folder


def write_dream(
    folder: Path,
    *,
    layers: int = 3,
    heads: int = 4,
    key_heads: int = 2,
    hidden: int = 32,
    vocab: int = 64,
    mask: int = 63,
    pad: int = 62,
    positions: int = 4096,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    tokenizer: bool = True,
    **config: Any,
) -> Path:
    """A Dream-shaped checkpoint (biases on q, k, v; key heads shared) under ``folder``."""
    mlp = 2 * hidden
    settings = {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "attention_dropout": 0.0,
        "bos_token_id": pad,
        "eos_token_id": pad,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "mask_token_id": mask,
        "max_position_embeddings": positions,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": key_heads,
        "pad_token_id": pad,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab,
    }
    shapes = _dream_shapes(layers, hidden, hidden // heads * key_heads, mlp, vocab)
    _write(folder, settings | config, _random(shapes, seed, dtype), shards)
    if tokenizer:
        _write_tokenizer(folder, vocab, {"<pad>": pad, "<mask>": mask}, eos_token="<pad>", mask_token="<mask>")
    return folder


def write_llama(folder: Path, *, layers: int = 3, heads: int = 4, vocab: int = 64, seed: int = 0) -> Path:
    """A decoder-only checkpoint in the hub's own format, key heads shared; no end token, so that nothing stops."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict(_random(shapes, seed, torch.float32))
    model.save_pretrained(folder)
    _write_tokenizer(folder, vocab, {"<pad>": vocab - 1})
    return folder


def _llada_shapes(layers: int, hidden: int, narrow: int, mlp: int, vocab: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "wte": (vocab, hidden),
        "ln_f": (hidden,),
        "ff_out": (vocab, hidden),
    }
    for layer in range(layers):
        block = {
            "attn_norm": (hidden,),
            "q_proj": (hidden, hidden),
            "k_proj": (narrow, hidden),
            "v_proj": (narrow, hidden),
            "attn_out": (hidden, hidden),
            "ff_norm": (hidden,),
            "ff_proj": (mlp, hidden),
            "up_proj": (mlp, hidden),
            "ff_out": (hidden, mlp),
        }
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    return {f"model.transformer.{name}.weight": shape for name, shape in shapes.items()}


def _dream_shapes(layers: int, hidden: int, narrow: int, mlp: int, vocab: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(layers):
        block = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (hidden, hidden),
            "self_attn.q_proj.bias": (hidden,),
            "self_attn.k_proj.weight": (narrow, hidden),
            "self_attn.k_proj.bias": (narrow,),
            "self_attn.v_proj.weight": (narrow, hidden),
            "self_attn.v_proj.bias": (narrow,),
            "self_attn.o_proj.weight": (hidden, hidden),
            "mlp.gate_proj.weight": (mlp, hidden),
            "mlp.up_proj.weight": (mlp, hidden),
            "mlp.down_proj.weight": (hidden, mlp),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def _random(shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Norms around one, the rest around zero; wide enough for peaked attention and clear decisions."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        norm = len(shape) == 1 and not name.endswith("bias")
        tensors[name] = (1 + 0.1 * values if norm else 2 * values / shape[-1] ** 0.5).to(dtype)
    return tensors


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], shards: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = sorted(tensors), dict[str, str]()
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _write_tokenizer(folder: Path, vocab: int, special: dict[str, int], **roles: str) -> None:
    """One word, one token: letters first, then w26, w27, …; the special ones at their ids."""
    words = [*LETTERS, *(f"w{i}" for i in range(len(LETTERS), vocab))]
    table = {word: i for i, word in enumerate(words) if i not in special.values()} | special
    tokenizer = Tokenizer(WordLevel(table, unk_token="a"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(special))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", **roles).save_pretrained(folder)
