"""What the loader knows of each family: facts about official checkpoints, with no loading in it.

Sizes, tensor names and options are those of the official modelling code of LLaDA (ML-GSAI/LLaDA), MMaDA
(Gen-Verse/MMaDA) and Dream (DreamLM/Dream).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from sinks.errors import InputError

AUTOREGRESSIVE = "autoregressive"


@dataclass(frozen=True)
class Family:
    """One way to publish a diffusion language model.

    Args:
        architectures, model_types: how its config.json names it.
        model_class: the stock class with the same mathematics.
        to_stock: the official configuration, as the stock class reads it.
        key_mapping: official tensor names (regular expressions) to the stock class's.
        only: options that would change the mathematics, with the values that do not.
        must_be_set: options whose official default is another value, so that a missing one is no answer.
        shift: "next" if the logits at a position predict the token after it, "none" if its own.
        rotary_float32: whether the official code rotates queries and keys in float32 whatever the model's dtype.
        turn_end: the token that ends a turn.
        chat_template: replaces the tokenizer's own, where the official scripts set one by hand.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    model_class: type[PreTrainedModel]
    to_stock: Callable[[Mapping[str, Any]], PretrainedConfig]
    key_mapping: dict[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    must_be_set: tuple[str, ...] = ()
    shift: str = "none"
    rotary_float32: bool = False
    turn_end: str | None = None
    chat_template: str | None = None

    def config(self, official: Mapping[str, Any]) -> PretrainedConfig:
        """The stock configuration, made bidirectional; InputError for an option that the stock class cannot follow."""
        for option, allowed in self.only.items():
            if option in official and official[option] not in allowed:
                values = " or ".join(repr(value) for value in allowed)
                raise InputError(
                    f"this {self.name} checkpoint has {option}={official[option]!r}, which changes its mathematics; "
                    f"only {values} can be computed here"
                )
        missing = [option for option in self.must_be_set if option not in official]
        if missing:
            raise InputError(f"the config.json of this {self.name} checkpoint lacks {', '.join(missing)}")
        config = self.to_stock(official)
        config.is_causal = False
        config.use_cache = False  # every position may change at every step
        return config


def _llama(official: Mapping[str, Any]) -> LlamaConfig:
    sizes = [official.get(name) for name in ("new_vocab_size", "embedding_size", "vocab_size")]
    return LlamaConfig(
        vocab_size=next(size for size in sizes if size),
        hidden_size=official["d_model"],
        intermediate_size=official["mlp_hidden_size"],
        num_hidden_layers=official["n_layers"],
        num_attention_heads=official["n_heads"],
        num_key_value_heads=official.get("n_kv_heads") or official["n_heads"],
        max_position_embeddings=official["max_sequence_length"],
        rms_norm_eps=official["rms_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": official["rope_theta"]},
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )


def _qwen2(official: Mapping[str, Any]) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=official["vocab_size"],
        hidden_size=official["hidden_size"],
        intermediate_size=official["intermediate_size"],
        num_hidden_layers=official["num_hidden_layers"],
        num_attention_heads=official["num_attention_heads"],
        num_key_value_heads=official["num_key_value_heads"],
        max_position_embeddings=official["max_position_embeddings"],
        rms_norm_eps=official["rms_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": official["rope_theta"]},
        tie_word_embeddings=False,
    )


_BLOCK = r"^model\.transformer\.blocks\.(\d+)\."
_LLADA_NAMES = {
    r"^model\.transformer\.wte\.": "model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",
    _BLOCK + r"attn_norm\.": r"model.layers.\1.input_layernorm.",
    _BLOCK + r"q_proj\.": r"model.layers.\1.self_attn.q_proj.",
    _BLOCK + r"k_proj\.": r"model.layers.\1.self_attn.k_proj.",
    _BLOCK + r"v_proj\.": r"model.layers.\1.self_attn.v_proj.",
    _BLOCK + r"attn_out\.": r"model.layers.\1.self_attn.o_proj.",
    _BLOCK + r"ff_norm\.": r"model.layers.\1.post_attention_layernorm.",
    _BLOCK + r"ff_proj\.": r"model.layers.\1.mlp.gate_proj.",
    _BLOCK + r"up_proj\.": r"model.layers.\1.mlp.up_proj.",
    _BLOCK + r"ff_out\.": r"model.layers.\1.mlp.down_proj.",
}

_LLADA_ONLY: Mapping[str, tuple[Any, ...]] = {
    "block_type": ("llama",),
    "activation_type": ("silu",),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "bias_for_layer_norm": (False, None),
    "rope": (True,),
    "rope_full_precision": (True,),
    "rope_scaling": (None,),
    "alibi": (False,),
    "attention_layer_norm": (False,),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
    "include_bias": (False,),
    "include_qkv_bias": (False, None),
    "clip_qkv": (None,),
    "multi_query_attention": (False, None),
    "block_group_size": (1,),
    "weight_tying": (False,),
}

_LLADA_SET = (
    *(
        "block_type",
        "activation_type",
        "layer_norm_type",
        "rope",
        "include_bias",
        "weight_tying",
        "rope_theta",
    ),
    *(
        "d_model",
        "n_layers",
        "n_heads",
        "mlp_hidden_size",
        "max_sequence_length",
        "rms_norm_eps",
        "vocab_size",
    ),
)

_DREAM_SET = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
)

# One newline after a header, where LLaDA has two, and an assistant header always: MMaDA's generate.py sets it so.
_MMADA_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>{{ '\\n' }}"
)

LLADA = Family(
    name="LLaDA",
    architectures=("LLaDAModelLM",),
    model_types=("llada",),
    model_class=LlamaForCausalLM,
    to_stock=_llama,
    key_mapping=_LLADA_NAMES,
    only=_LLADA_ONLY,
    must_be_set=_LLADA_SET,
    rotary_float32=True,
    turn_end="<|eot_id|>",
)
MMADA = Family(
    name="MMaDA",
    architectures=("MMadaModelLM",),
    model_types=("mmada",),
    model_class=LlamaForCausalLM,
    to_stock=_llama,
    key_mapping=_LLADA_NAMES,
    only=_LLADA_ONLY,
    must_be_set=_LLADA_SET,
    rotary_float32=True,
    turn_end="<|eot_id|>",
    chat_template=_MMADA_TEMPLATE,
)
DREAM = Family(
    name="Dream",
    architectures=("DreamModel",),
    model_types=("Dream",),
    model_class=Qwen2ForCausalLM,
    to_stock=_qwen2,
    only={
        "hidden_act": ("silu",),
        "rope_scaling": (None,),
        "use_sliding_window": (False,),
        "use_mrope": (False, None),
        "tie_word_embeddings": (False,),
    },
    must_be_set=_DREAM_SET,
    shift="next",
    turn_end="<|im_end|>",
)
FAMILIES = {family.name: family for family in (LLADA, MMADA, DREAM)}

_EMBEDDED = Path(__file__).parent / "tiny"

# Model names, with the family (None: read from the checkpoint) and where the official checkpoint is.
MODELS: dict[str, tuple[str | None, str]] = {
    "LLaDA": ("LLaDA", "GSAI-ML/LLaDA-8B-Instruct"),
    "LLaDA-Base": ("LLaDA", "GSAI-ML/LLaDA-8B-Base"),
    "LLaDA-1.5": ("LLaDA", "GSAI-ML/LLaDA-1.5"),
    "MMaDA": ("MMaDA", "Gen-Verse/MMaDA-8B-MixCoT"),
    "MMaDA-Base": ("MMaDA", "Gen-Verse/MMaDA-8B-Base"),
    "Dream": ("Dream", "Dream-org/Dream-v0-Instruct-7B"),
    "Dream-Base": ("Dream", "Dream-org/Dream-v0-Base-7B"),
    "DreamCoder": ("Dream", "Dream-org/Dream-Coder-v0-Instruct-7B"),
    "DiffuCoder": ("Dream", "apple/DiffuCoder-7B-Instruct"),
    "tiny": ("LLaDA", str(_EMBEDDED / "llada")),
    "tiny-dream": ("Dream", str(_EMBEDDED / "dream")),
    "tiny-ar": (AUTOREGRESSIVE, str(_EMBEDDED / "ar")),
}


def family_of(official: Mapping[str, Any]) -> Family | None:
    """The family that a config.json names, None for any other model.

    ``architectures`` decides where it is given: families with different mathematics share a ``model_type``.
    """
    names = official.get("architectures") or []
    names = [names] if isinstance(names, str) else names
    for family in FAMILIES.values():
        if any(name in family.architectures for name in names):
            return family
        if not names and official.get("model_type") in family.model_types:
            return family
    return None
