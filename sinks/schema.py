"""What the JSON files of a run folder must hold, so that no reader has to look twice: types and ranges, no meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sinks.errors import is_whole

_MANIFEST = {
    "model": str,
    "sampling": dict,
    "sampling.gen_len": int,
    "sampling.block_len": int,
    "spec": dict,
    "spec.attention": str,
    "samples": list,
}
_SAMPLE = {"prompt": str, "text": str, "prompt_length": int, "tokens_text": list}
_NAMES = {str: "a string", dict: "an object", int: "a whole number of 0 or more", list: "a list"}


def manifest_problem(manifest: Any) -> str | None:
    """What is wrong with the content of a manifest.json, in words; None if nothing is."""
    problem = _problem(manifest, _MANIFEST)
    if problem:
        return problem
    if not manifest["sampling"]["block_len"]:
        return "sampling.block_len is 0"
    mask = manifest["spec"].get("mask_token_id")
    if mask is not None and not is_whole(mask):
        return "spec.mask_token_id is no whole number"
    for number, sample in enumerate(manifest["samples"]):
        if not isinstance(sample, dict) or not is_whole(sample.get("index")):
            return f"entry {number} of samples has no index"
    return None


def sample_problem(info: Any) -> str | None:
    """What is wrong with the content of a sample.json, in words; None if nothing is."""
    problem = _problem(info, _SAMPLE)
    if problem:
        return problem
    if "id" not in info:
        return "id is missing"
    if not info["tokens_text"] or not all(isinstance(text, str) for text in info["tokens_text"]):
        return "tokens_text is no list of strings"
    if info["prompt_length"] > len(info["tokens_text"]):
        return f"prompt_length {info['prompt_length']} is more than there are tokens"
    return None


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
