"""What the files of a run folder must hold, so that no reader has to look twice: types and ranges, no meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sinks.errors import is_real, is_whole
from sinks.files import brief

_MANIFEST = {
    "model": str,
    "sampling": dict,
    "sampling.gen_len": int,
    "sampling.block_len": int,
    "spec": dict,
    "spec.attention": str,
    "samples": list,
}
_SAMPLE = {"text": str, "prompt_length": int, "tokens_text": list}
_NAMES = {str: "a string", dict: "an object", int: "a whole number of 0 or more", list: "a list"}
_FLOATS, _INTEGERS = ("F16", "F32"), ("I16", "I32")
_TENSORS = {  # dtypes and numbers of axes
    "incoming": (_FLOATS, (4,)),
    "value_norm": (_FLOATS, (4,)),
    "blocked": (_INTEGERS, (3,)),
    "tokens": (_INTEGERS, (2,)),
    "confidence": (_FLOATS, (2,)),
    "unmasked_at": (_INTEGERS, (1,)),
    "pattern": (_FLOATS, (3, 4)),
}
_MOST_SAMPLES = 10**9


def manifest_problem(manifest: Any) -> str | None:
    """What is wrong with the content of a manifest.json, in words; None if nothing is."""
    problem = _problem(manifest, _MANIFEST)
    if problem:
        return problem
    if not manifest["sampling"]["block_len"]:
        return "sampling.block_len is 0"
    mask = manifest["spec"].get("mask_token_id", "missing")
    if mask is not None and not is_whole(mask):
        return "spec.mask_token_id is neither a whole number nor null"
    seen = set[int]()
    for number, sample in enumerate(manifest["samples"]):
        index: Any = sample.get("index") if isinstance(sample, dict) else None
        if not is_whole(index) or not 0 <= index < _MOST_SAMPLES or index in seen:
            return f"entry {number} of samples has no index of its own, of 0 or more"
        seen.add(index)
    return None


def sample_problem(info: Any) -> str | None:
    """What is wrong with the content of a sample.json, in words; None if nothing is."""
    problem = _problem(info, _SAMPLE)
    if problem:
        return problem
    if not isinstance(info.get("prompt", ""), str):
        return "prompt is not a string"
    if not isinstance(info.get("reference"), str | None):
        return "reference is neither a string nor null"
    if not info["tokens_text"] or not all(isinstance(text, str) for text in info["tokens_text"]):
        return "tokens_text is no list of strings"
    if not _are_timings(info.get("timings", {})):
        return "timings holds something other than numbers"
    if info["prompt_length"] > len(info["tokens_text"]):
        return f"prompt_length {brief(info['prompt_length'])} is more than there are tokens"
    return None


def _are_timings(timings: Any) -> bool:
    return isinstance(timings, dict) and all(is_real(value) and 0 <= value < 1e18 for value in timings.values())


def tensor_problem(opened: Any, name: str) -> str | None:
    """What is wrong with a tensor of an opened safetensors file, in words; None if nothing is."""
    dtypes, axes = _TENSORS[name]
    if name not in opened.keys():  # noqa: SIM118 (not a mapping)
        return f"holds no {name}; this run did not keep it" if name == "value_norm" else f"is damaged: no {name} in it"
    tensor = opened.get_slice(name)
    dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
    return None if dtype in dtypes and len(shape) in axes else f"is damaged: {name} is {dtype} of shape {brief(shape)}"


def _problem(content: Any, fields: Mapping[str, type]) -> str | None:
    if not isinstance(content, dict):
        return "it holds no object"
    for name, kind in fields.items():
        value: Any = content
        for part in name.split("."):
            if part not in value:
                return f"{name} is missing"
            value = value[part]
        fits = is_whole(value) and value >= 0 if kind is int else isinstance(value, kind)
        if not fits:
            return f"{name} is not {_NAMES[kind]}"
    return None
