"""Checkpoints in, models out: loading on transformers' own classes, with our attention function and no remote code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sinks import attention as seam
from sinks import fused as fused  # is among the ways to compute attention from then on
from sinks.checkpoints import (
    FILES,
    check_sizes,
    folder_of,
    known_family,
    one_line,
    quiet,
    read_config,
    resolve,
    tokenizer_in,
)
from sinks.errors import InputError, is_whole
from sinks.families import AUTOREGRESSIVE, Family
from sinks.files import brief

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNLIMITED = 2**31 - 1  # positions of a model without a position embedding
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Spec:
    """What the rest of the package needs to know of a model; ids are the checkpoint's own (None: it names none).

    ``shift``: "next" if the logits at a position predict the token after it, else "none".
    ``attention``: "full" or "causal". ``end_token_ids``: where a text ends.
    """

    family: str
    shift: str
    attention: str
    layers: int
    heads: int
    vocab_size: int
    max_positions: int
    mask_token_id: int | None = None
    eos_token_id: int | None = None
    eot_token_id: int | None = None
    pad_token_id: int | None = None
    end_token_ids: frozenset[int] = frozenset()


@dataclass
class LanguageModel:
    """A loaded model; ``model`` is an ordinary transformers model and may be called as one."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    spec: Spec
    probe: seam.Probe
    checkpoint: str
    revision: str | None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def attention_path(self) -> str:
        """Which of the ways to compute attention makes the tokens."""
        return self.probe.compute

    def hidden(self, ids: Tensor, **masks: Tensor) -> Tensor:
        """(B, S, D): what the last layer gives; :meth:`logits` of all of it is what ``model(ids).logits`` is."""
        hidden: Tensor = self.model.base_model(ids, use_cache=False, **masks).last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, V) from (…, D)."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    def encode(self, text: str) -> list[int]:
        """A user's message as the ids of a prompt: the checkpoint's chat format if it has one, else plain text."""
        tokenizer = self._tokenizer()
        with one_line(f"the tokenizer of {self.checkpoint} cannot be used"):
            if tokenizer.chat_template is None:
                return tokenizer(text)["input_ids"]
            messages = [{"role": "user", "content": text}]
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return tokenizer(rendered, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, up to the first end token; ids below 0 are positions not written."""
        ends = self.spec.end_token_ids
        length = next((i for i, token in enumerate(ids) if token in ends or token < 0), len(ids))
        text = self._tokenizer().decode(list(ids[:length]), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise InputError(f"{self.checkpoint} has no tokenizer: give prompts as token ids")
        return self.tokenizer


def load(
    name: str,
    checkpoint: str | None = None,
    *,
    family: str | None = None,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    mask_token_id: int | None = None,
    eos_token_id: int | None = None,
    eot_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> LanguageModel:
    """Load a model with its attention under our eyes.

    Args:
        name: a name of ``sinks.families.MODELS``, a folder, or a hub id.
        checkpoint: a folder or hub id to take instead of the name's own.
        family: "LLaDA", "MMaDA", "Dream" or "autoregressive"; by default read from the checkpoint.
        device: "auto" (CUDA if there is one), "cpu", "cuda", "cuda:1", …
        dtype: "auto" (the checkpoint's on CUDA, float32 on a CPU), "float32", "bfloat16", "float16".
        attention: how to compute it: "auto" or a key of ``sinks.attention.PATHS``.
        device_map: spreads the layers over several devices, as in transformers; instead of ``device``.
        trust_remote_code: run the checkpoint's own code for its tokenizer, if it has no other. Never for the model.
        mask_token_id, eos_token_id, eot_token_id, pad_token_id: override what the checkpoint says.

    Raises:
        InputError: nothing was found, an option cannot be followed, or tensors are missing or left over.
    """
    named_family, source = resolve(name, checkpoint)
    folder, found_revision = folder_of(source, revision, [*FILES, "*.py"] if trust_remote_code else FILES)
    official = read_config(folder)
    known = known_family(family or named_family, official, folder)
    target = _device(device) if device_map is None else device_map
    kind = _dtype(dtype, on_cpu=isinstance(target, str) and target.split(":")[0] == "cpu")
    probe = seam.Probe(_path(attention, target))
    model = _model(folder, official, known, target, kind)
    prepare(model, known, probe)
    if known is None:
        _check_seam(folder, model, probe)
    tokenizer = tokenizer_in(folder, known, trust_remote_code)
    given = {
        "mask_token_id": mask_token_id,
        "eos_token_id": eos_token_id,
        "eot_token_id": eot_token_id,
        "pad_token_id": pad_token_id,
    }
    spec = _spec(model, known, official, tokenizer, given)
    return LanguageModel(model, tokenizer, spec, probe, source, found_revision)


def prepare(model: PreTrainedModel, family: Family | None, probe: seam.Probe) -> None:
    """Put a model's attention under our eyes, and let it compute as its family does and as fast as it can."""
    probe.attach(model)
    if family is None:
        return
    if family.rotary_float32:
        # The embedding looks at its input's dtype only; in float32 it rotates as the official code does.
        model.model.rotary_emb.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
    if _gains_from_compiling(model, probe):
        # Once for all layers, around the attention; the first step then takes some seconds more.
        for layer in model.model.layers:
            layer.compile()


def _gains_from_compiling(model: PreTrainedModel, probe: seam.Probe) -> bool:
    """Whether the elementwise parts (norms, rotation, gates) are worth a compiler: 16 bits on a single GPU.

    Measured with LLaDA-8B's shape on an H200: a step takes 0.77 of the time at 512 positions, 0.80 at 2,048. float32 is
    for comparisons with the official code, and stays as it is.
    """
    devices = {parameter.device for parameter in model.parameters()}
    on_one_gpu = len(devices) == 1 and devices.pop().type == "cuda"
    return probe.compute == "fused" and on_one_gpu and model.dtype != torch.float32


def check(device: str = "auto", dtype: str = "auto", attention: str = "auto") -> None:
    """InputError for what :func:`load` would refuse, before anything is read."""
    _device(device)
    _dtype(dtype, on_cpu=True)
    _path(attention)


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise InputError(f"unknown device {device!r}; use auto, cpu, cuda or cuda:N") from None
    if kind not in ("cpu", "cuda", "mps", "xpu"):
        raise InputError(f"device {device!r} cannot hold a model; use auto, cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {device} was asked for, but torch sees no CUDA device: use --device cpu")
    return device


def _dtype(name: str, on_cpu: bool) -> str | torch.dtype:
    if name == "auto":
        return torch.float32 if on_cpu else "auto"
    if name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}; use one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _path(name: str, target: str | dict[str, Any] = "cpu") -> str:
    """The way to compute attention; "auto" is ours for CUDA wherever that may be the device."""
    if name != "auto" and name not in seam.PATHS:
        raise InputError(f"unknown attention path {name!r}; use one of auto, {', '.join(seam.PATHS)}")
    if name != "auto":
        return name
    on_cpu = isinstance(target, str) and target.split(":")[0] == "cpu"
    return "chunked" if on_cpu or not torch.cuda.is_available() else "fused"


def _model(
    folder: Path,
    official: dict[str, Any],
    family: Family | None,
    device_map: str | dict[str, Any],
    dtype: str | torch.dtype,
) -> PreTrainedModel:
    common: dict[str, Any] = {
        "dtype": dtype,
        "device_map": device_map,
        "attn_implementation": seam.NAME,
        "output_loading_info": True,
        "key_mapping": family.key_mapping or None if family else None,
    }
    with quiet(), one_line(f"cannot load {folder}"):
        config = _autoregressive_config(folder) if family is None else family.config(official)
        check_sizes(folder, config.get_text_config())
        model_class: Any = AutoModelForCausalLM if family is None else family.model_class
        model, info = model_class.from_pretrained(
            str(folder), config=config, use_safetensors=True, ignore_mismatched_sizes=True, **common
        )
    _check_complete(folder, info)
    return model.eval()


def _check_seam(folder: Path, model: PreTrainedModel, probe: seam.Probe) -> None:
    """A forward pass of two tokens, to see that attention in every layer comes through our function."""
    ask = seam.Ask(frozenset({seam.Measure()}))
    with one_line(f"the attention of {folder} cannot be followed"), torch.no_grad(), probe.asked(ask) as seen:
        model(torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(seen) != list(range(layers)):
        raise InputError(f"the attention of {folder} can be followed in {len(seen)} of {layers} layers only")


def _autoregressive_config(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{folder} is an encoder-decoder model; only decoder-only models can be loaded")
    return config


def _check_complete(folder: Path, info: dict[str, Any]) -> None:
    """Never random weights: every tensor of the model comes from the checkpoint, and none is left over."""
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(key if isinstance(key, str) else str(key[0]) for key in info.get(problem) or ())
        if names:
            what = problem.split("_")[0]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise InputError(f"{folder} does not fit its config.json: {what} tensors {', '.join(names[:3])}{more}")


def _spec(
    model: PreTrainedModel,
    family: Family | None,
    official: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    given: dict[str, int | None],
) -> Spec:
    config = model.config.get_text_config()
    for name in ("num_hidden_layers", "num_attention_heads", "vocab_size"):
        if not isinstance(getattr(config, name, None), int):
            raise InputError(f"{type(model).__name__} has no {name}; only attention models can be followed")
    turn_end = family.turn_end if family else None
    tokens = tokenizer.get_vocab() if tokenizer is not None else {}
    from_tokenizer = {
        "mask_token_id": getattr(tokenizer, "mask_token_id", None),
        "eos_token_id": getattr(tokenizer, "eos_token_id", None),
        "eot_token_id": tokens.get(turn_end) if turn_end else None,
        "pad_token_id": getattr(tokenizer, "pad_token_id", None),
    }
    ids = {name: _first(name, given[name], official.get(name), from_tokenizer[name]) for name in given}
    mask = ids["mask_token_id"]
    if mask is not None and not (isinstance(mask, int) and 0 <= mask < config.vocab_size):
        raise InputError(f"mask_token_id {mask!r} is no id of this model's vocabulary of {config.vocab_size}")
    ends = [ids["eos_token_id"], ids["eot_token_id"], *_list("eos_token_id", model.generation_config.eos_token_id)]
    return Spec(
        family=family.name if family else AUTOREGRESSIVE,
        shift=family.shift if family else "next",
        attention="full" if family else "causal",
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None) or _UNLIMITED,
        end_token_ids=frozenset(token for token in ends if token is not None),
        **ids,
    )


def _first(name: str, *candidates: Any) -> int | None:
    """The first id that is named; of a list of ids the first."""
    return next((token for candidate in candidates for token in _list(name, candidate)), None)


def _list(name: str, ids: Any) -> list[int]:
    found = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(is_whole(token) and abs(token) < 2**31 for token in found):
        raise InputError(f"{name} {brief(repr(ids))} is no id of a token; it must be a whole number")
    return found
