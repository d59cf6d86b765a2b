"""Checkpoints in, models out: loading on transformers' own classes, with our attention function and no remote code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sinks import attention as seam
from sinks.errors import InputError
from sinks.families import AUTOREGRESSIVE, FAMILIES, MODELS, Family, family_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


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

    def encode(self, text: str) -> list[int]:
        """A user's message as the ids of a prompt: the checkpoint's chat format if it has one, else plain text."""
        tokenizer = self._tokenizer()
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
    folder, found_revision = _folder(source, revision, trust_remote_code)
    official = _read_config(folder)
    known = _family(family or named_family, official, folder)
    target = _device(device) if device_map is None else device_map
    kind = _dtype(dtype, on_cpu=str(target) == "cpu")
    probe = seam.Probe(_path(attention))
    model = _model(folder, official, known, target, kind)
    probe.attach(model)
    tokenizer = _load_tokenizer(folder, known, trust_remote_code)
    given = {
        "mask_token_id": mask_token_id,
        "eos_token_id": eos_token_id,
        "eot_token_id": eot_token_id,
        "pad_token_id": pad_token_id,
    }
    spec = _spec(model, known, official, tokenizer, given)
    return LanguageModel(model, tokenizer, spec, probe, source, found_revision)


def resolve(name: str, checkpoint: str | None = None) -> tuple[str | None, str]:
    """Family (None: not told by the name) and source of a model, without touching disk or network."""
    if name in MODELS:
        family, source = MODELS[name]
        return (family, source) if checkpoint is None else (family, checkpoint)
    if checkpoint is None and not Path(name).exists() and "/" not in name:
        raise InputError(f"unknown model {name!r}; use one of {', '.join(MODELS)}, a folder, or a hub id (owner/name)")
    return None, checkpoint or name


def _folder(source: str, revision: str | None, with_code: bool) -> tuple[Path, str | None]:
    """A local folder that holds the checkpoint, and the revision if it came from the hub."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path, None
    if path.exists() or path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1:
        raise InputError(f"no checkpoint at {source}: give a folder with config.json and safetensors, or a hub id")
    patterns = [*_FILES, "*.py"] if with_code else _FILES
    try:
        snapshot = Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise InputError(
            f"cannot get {source} from the hub and no copy is cached ({type(error).__name__}): check the name and the "
            "network, or give a local folder"
        ) from error
    return snapshot, snapshot.name


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{folder} holds no config.json, so it is no checkpoint") from None
    except ValueError as error:
        raise InputError(f"{folder / 'config.json'} is not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise InputError(f"{folder / 'config.json'} must hold an object")
    return config


def _family(name: str | None, official: dict[str, Any], folder: Path) -> Family | None:
    """The family to load as; None for an autoregressive model."""
    if name == AUTOREGRESSIVE:
        return None
    if name is not None and name not in FAMILIES:
        raise InputError(f"unknown family {name!r}; use one of {', '.join([*FAMILIES, AUTOREGRESSIVE])}")
    family = FAMILIES[name] if name is not None else family_of(official)
    if family is None and official.get("model_type") in {kind for f in FAMILIES.values() for kind in f.model_types}:
        raise InputError(f"{folder} is a {'/'.join(official['architectures'])}, which is not supported yet")
    return family


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise InputError(f"unknown device {device!r}; use auto, cpu, cuda or cuda:N") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {device} was asked for, but torch sees no CUDA device: use --device cpu")
    return device


def _dtype(name: str, on_cpu: bool) -> str | torch.dtype:
    if name == "auto":
        return torch.float32 if on_cpu else "auto"
    if name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}; use one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _path(name: str) -> str:
    if name != "auto" and name not in seam.PATHS:
        raise InputError(f"unknown attention path {name!r}; use one of auto, {', '.join(seam.PATHS)}")
    return "chunked" if name == "auto" else name


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
    }
    try:
        if family is None:
            model_class: Any = AutoModelForCausalLM
            common |= {"config": _autoregressive_config(folder)}
        else:
            model_class = family.model_class
            common |= {"config": family.config(official), "key_mapping": family.key_mapping or None}
        model, info = model_class.from_pretrained(str(folder), use_safetensors=True, **common)
    except InputError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise InputError(f"cannot load {folder}: {' '.join(str(error).split())[:300]}") from error
    _check_complete(folder, info)
    return model.eval()


def _autoregressive_config(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(str(folder))
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{folder} is an encoder-decoder model; only decoder-only models can be loaded")
    return config


def _check_complete(folder: Path, info: dict[str, Any]) -> None:
    """Never random weights: every tensor of the model comes from the checkpoint, and none is left over."""
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(key) for key in info.get(problem) or ())
        if names:
            what = problem.split("_")[0]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise InputError(f"{folder} does not fit its config.json: {what} tensors {', '.join(names[:3])}{more}")


def _load_tokenizer(folder: Path, family: Family | None, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    settings = folder / "tokenizer_config.json"
    if not settings.exists() and not (folder / "tokenizer.json").exists():
        return None
    remote = settings.exists() and "auto_map" in json.loads(settings.read_text(encoding="utf-8"))
    if remote and not trust_remote_code and not (folder / "tokenizer.json").exists():
        raise InputError(
            f"the tokenizer of {folder} exists only as code in the checkpoint; pass --trust_remote_code "
            "(trust_remote_code=True) to run that code"
        )
    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=remote and trust_remote_code)
    if family is not None and family.chat_template is not None:
        tokenizer.chat_template = family.chat_template
    return tokenizer


def _spec(
    model: PreTrainedModel,
    family: Family | None,
    official: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    given: dict[str, int | None],
) -> Spec:
    config = model.config.get_text_config()
    turn_end = family.turn_end if family else None
    tokens = tokenizer.get_vocab() if tokenizer is not None else {}
    from_tokenizer = {
        "mask_token_id": getattr(tokenizer, "mask_token_id", None),
        "eos_token_id": getattr(tokenizer, "eos_token_id", None),
        "eot_token_id": tokens.get(turn_end) if turn_end else None,
        "pad_token_id": getattr(tokenizer, "pad_token_id", None),
    }
    ids = {name: _first(given[name], official.get(name), from_tokenizer[name]) for name in given}
    ends = [ids["eos_token_id"], ids["eot_token_id"], *_list(model.generation_config.eos_token_id)]
    return Spec(
        family=family.name if family else AUTOREGRESSIVE,
        shift=family.shift if family else "next",
        attention="full" if family else "causal",
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        end_token_ids=frozenset(token for token in ends if token is not None),
        **ids,
    )


def _first(*candidates: int | list[int] | None) -> int | None:
    """The first id that is named; of a list of ids the first."""
    return next((token for candidate in candidates for token in _list(candidate)), None)


def _list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else ids if isinstance(ids, list) else [ids]
