"""Where checkpoints are and what lies in them besides the weights: folders, the hub, config.json, tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from sinks.errors import InputError, is_whole
from sinks.families import AUTOREGRESSIVE, FAMILIES, MODELS, Family, family_of
from sinks.files import brief, explained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
FILES = [*TOKENIZER_FILES, "*.safetensors"]
_MOST_LAYERS = 10_000
_MOST_PACKED = 8  # weights in one element of a tensor: quantised ones may be packed into int32


def resolve(name: str, checkpoint: str | None = None) -> tuple[str | None, str]:
    """Family (None: not told by the name) and source of a model, without touching disk or network."""
    if name in MODELS:
        family, source = MODELS[name]
        return (family, source) if checkpoint is None else (family, checkpoint)
    if checkpoint is None and local(name) is None and "/" not in name:
        raise InputError(f"unknown model {name!r}; use one of {', '.join(MODELS)}, a folder, or a hub id (owner/name)")
    return None, checkpoint or name


def identify(name: str, family: str | None = None, revision: str | None = None) -> str:
    """The family of a model, from its config.json alone; nothing else is read or fetched."""
    named, source = resolve(name)
    if family or named:
        known = known_family(family or named, {}, Path(source))
    else:
        folder, _ = folder_of(source, revision, ["config.json"])
        known = known_family(None, read_config(folder), folder)
    return known.name if known else AUTOREGRESSIVE


def folder_of(source: str, revision: str | None, patterns: list[str]) -> tuple[Path, str | None]:
    """A local folder that holds the checkpoint, and the revision if it came from the hub."""
    path = local(source)
    if source and path is not None and path.is_dir():
        _check_files(path)
        return path, None
    if path is not None or source.startswith(("/", ".", "~")) or source.count("/") != 1:
        raise InputError(f"no checkpoint at {source}: give a folder with config.json and safetensors, or a hub id")
    try:
        snapshot = Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise InputError(
            f"cannot get {source} from the hub and no copy is cached ({type(error).__name__}): check the name and the "
            "network, or give a local folder"
        ) from error
    return snapshot, snapshot.name


def local(name: str) -> Path | None:
    """What exists on this machine under a name."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, the home of nobody, no name for a file
        return None


def _check_files(folder: Path) -> None:
    """InputError for a pipe or a device, which would be read without end; links to files are fine."""
    for path in folder.iterdir():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise InputError(f"{path} is neither a file nor a folder, so {folder} is no checkpoint")


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        raise InputError(f"{folder} holds no config.json, so it is no checkpoint")
    with explained("read", path):
        data = path.read_bytes()
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({brief(error)})") from None
    if not isinstance(config, dict):
        raise InputError(f"{path} must hold an object")
    names = config.get("architectures")
    if not isinstance(names, str | list | None) or not all(isinstance(name, str) for name in names or ()):
        raise InputError(f"{path}: architectures is no list of strings")
    if not isinstance(config.get("model_type"), str | None):
        raise InputError(f"{path}: model_type is no string")
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for name, value in part.items():
            if "layer" in name and is_whole(value) and value > _MOST_LAYERS:  # transformers would list all of them
                raise InputError(f"{path}: {name} is {brief(value)}, more layers than any model has")
    return config


def check_sizes(folder: Path, config: Any) -> None:
    """InputError for a configuration of far more than the weights, before memory is taken for it.

    Args:
        config: of transformers, of a language model.
    """
    shapes = [shape for path in sorted(folder.glob("*.safetensors")) for shape in _shapes(path)]
    held = _MOST_PACKED * sum(prod(shape) for shape in shapes)
    layers, width, heads = (_size(config, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    keys = max(heads, _size(config, "num_key_value_heads")) * max(_size(config, "head_dim"), width // max(heads, 1))
    needed = width * max(_size(config, "vocab_size"), layers * max(keys, _size(config, "intermediate_size")))
    if shapes and (layers > len(shapes) or needed > held):
        raise InputError(f"{folder} does not fit its config.json, which describes a larger model than the weights are")


def _size(config: Any, name: str) -> int:
    size = getattr(config, name, None)
    return size if isinstance(size, int) else 0


def _shapes(path: Path) -> list[list[int]]:
    """Of all tensors in a safetensors file; their data are not read."""
    with safe_open(path, framework="numpy") as file:
        return [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 (not a mapping)


def known_family(name: str | None, official: dict[str, Any], folder: Path) -> Family | None:
    """The family to load as; None for an autoregressive model."""
    if name == AUTOREGRESSIVE:
        return None
    if name is not None and name not in FAMILIES:
        raise InputError(f"unknown family {name!r}; use one of {', '.join([*FAMILIES, AUTOREGRESSIVE])}")
    family = FAMILIES[name] if name is not None else family_of(official)
    if family is None and official.get("model_type") in {kind for f in FAMILIES.values() for kind in f.model_types}:
        raise InputError(f"{folder} is a {brief(official.get('architectures'))} model, which is not supported yet")
    return family


def load_tokenizer(
    name: str, family: str | None = None, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """A model's tokenizer without its weights; None if it has none."""
    named_family, source = resolve(name)
    folder, _ = folder_of(source, revision, [*TOKENIZER_FILES, "*.py"] if trust_remote_code else TOKENIZER_FILES)
    known = known_family(family or named_family, read_config(folder), folder)
    return tokenizer_in(folder, known, trust_remote_code)


def fingerprint(name: str) -> str:
    """Changes when a local checkpoint is written anew; empty for one of the hub, which its revision tells apart."""
    folder = local(resolve(name)[1])
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    return " ".join(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files)


def tokenizer_in(folder: Path, family: Family | None, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    settings, fast = folder / "tokenizer_config.json", (folder / "tokenizer.json").exists()
    if not settings.exists() and not fast:
        return None
    with quiet(), one_line(f"cannot read the tokenizer of {folder}"):
        remote = settings.exists() and "auto_map" in json.loads(settings.read_text(encoding="utf-8"))
        if remote and not trust_remote_code and not fast:
            raise InputError(
                f"the tokenizer of {folder} exists only as code in the checkpoint; pass --trust_remote_code "
                "(trust_remote_code=True) to run that code"
            )
        if remote and not trust_remote_code:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=remote)
    if family is not None and family.chat_template is not None:
        tokenizer.chat_template = family.chat_template
    return tokenizer


@contextmanager
def one_line(what: str) -> Iterator[None]:
    """Whatever goes wrong while a checkpoint is read comes from the checkpoint."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{what}: {type(error).__name__}: {brief(error)}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' remarks on names and missing tensors, which we judge ourselves."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
