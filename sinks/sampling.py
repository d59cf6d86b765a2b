"""Every setting of a generation: the families' defaults, upstream's names, what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from sinks.errors import InputError, is_real, is_whole
from sinks.families import AUTOREGRESSIVE

SINK_MASKED = "_sink_masked"
_MOST = 1_000_000  # of steps, tokens, …
SYNONYMS = {
    "gen_length": "gen_len",
    "max_new_tokens": "gen_len",
    "block_length": "block_len",
    "diffusion_steps": "steps",
    "alg": "remasking",
}
_LLADA_OPTIONS = {"logits_eos_inf": False, "confidence_eos_eot_inf": False, "eos_eot_last": False}
_OPTIONS: dict[str, dict[str, object]] = {
    "LLaDA": {**_LLADA_OPTIONS},
    "MMaDA": {"eot_token": None},
    "Dream": {"eps": 1e-3, "top_p": None, "top_k": None, "alg_temp": None},
    AUTOREGRESSIVE: {"top_p": None, "top_k": None},
}
REMASKING = {
    "LLaDA": ("low_confidence", "random"),
    "MMaDA": ("low_confidence", "random"),
    "Dream": ("entropy", "maskgit_plus", "topk_margin", "origin"),
    AUTOREGRESSIVE: ("next_token",),
}
_BLOCKWISE = ("LLaDA", "MMaDA")


@dataclass(frozen=True)
class Sampling:
    """Every setting of a generation, resolved; make it with :func:`resolve`.

    LLaDA: ``logits_eos_inf`` (end-of-text is never proposed) and ``confidence_eos_eot_inf`` are upstream's, faults
    included; ``eos_eot_last`` does what the latter is meant to: end tokens are kept only when nothing else is left.
    MMaDA: ``eot_token`` ends a row after the first block whose last token it is. Dream: ``eps`` (end of the noise
    schedule), ``top_p``, ``top_k``, ``alg_temp`` (temperature of the choice among positions).
    """

    family: str
    steps: int
    gen_len: int
    block_len: int
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: str = "low_confidence"
    seed: int = 0
    sink_masked: bool = False
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    eos_eot_last: bool = False
    eot_token: int | None = None
    eps: float = 1e-3
    top_p: float | None = None
    top_k: int | None = None
    alg_temp: float | None = None


def settings_of(family: str) -> dict[str, object]:
    """Every setting of a family with its default (None: see :func:`resolve`)."""
    common = {"steps": None, "gen_len": 128, "block_len": 32, "temperature": 0.0, "cfg_scale": 0.0}
    return {**common, "remasking": None, "seed": 0, **_OPTIONS[family]}


def resolve(family: str, **settings: object) -> Sampling:
    """Settings in the family's or in upstream's words, checked and completed.

    Raises:
        InputError: an unknown setting (the known ones are listed), or a value that cannot be used.
    """
    defaults = settings_of(family)
    given = {SYNONYMS.get(name, name): value for name, value in settings.items()}
    if len(given) < len(settings):
        raise InputError(f"a setting was given twice under two names: {', '.join(sorted(settings))}")
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise InputError(f"{unknown[0]!r} is no setting of {family}; known are {', '.join(defaults)}")
    values = {**defaults, **given}
    check_count("gen_len", values["gen_len"])
    if values["steps"] is None:
        values["steps"] = values["gen_len"]
    if family not in _BLOCKWISE:
        values["block_len"] = values["gen_len"]
    if family == AUTOREGRESSIVE:
        values["steps"] = values["gen_len"]
    name = str(values["remasking"] or REMASKING[family][0])
    values["sink_masked"] = name.endswith(SINK_MASKED) and family in _BLOCKWISE
    values["remasking"] = name.removesuffix(SINK_MASKED) if values["sink_masked"] else name
    sampling = Sampling(family=family, **values)  # type: ignore[arg-type]
    _check(sampling)
    return sampling


def check_count(name: str, value: Any) -> None:
    """InputError unless it is a whole number of 1 or more, and not so large that nothing could be laid out."""
    if not is_whole(value) or value < 1:
        raise InputError(f"{name} is {value!r}; it must be a whole number of 1 or more")
    if value > _MOST:
        raise InputError(f"{name} is {value}; it must be at most {_MOST:,}")


def _check(s: Sampling) -> None:
    for name in ("steps", "gen_len", "block_len"):
        check_count(name, getattr(s, name))
    if not is_whole(s.seed) or not 0 <= s.seed < 2**63:
        raise InputError(f"seed is {s.seed!r}; it must be a whole number between 0 and 2^63 - 1")
    if s.remasking not in REMASKING[s.family]:
        allowed = list(REMASKING[s.family])
        if s.family in _BLOCKWISE:
            allowed += [name + SINK_MASKED for name in allowed]
        raise InputError(f"remasking {s.remasking!r} is unknown to {s.family}; use one of {', '.join(allowed)}")
    if s.gen_len % s.block_len:
        raise InputError(
            f"gen_len {s.gen_len} is not divisible by block_len {s.block_len}; use a multiple of block_len, or a "
            f"block_len that divides gen_len, such as {gcd(s.gen_len, s.block_len)}"
        )
    blocks = s.gen_len // s.block_len
    if s.steps % blocks:
        raise InputError(
            f"steps {s.steps} is not divisible by the {blocks} blocks of gen_len/block_len; use a multiple of {blocks}"
        )
    _check_numbers(s)


def _check_numbers(s: Sampling) -> None:
    for name in ("temperature", "cfg_scale", "alg_temp"):
        value = getattr(s, name)
        if value is not None and (not is_real(value) or not 0 <= value < float("inf")):
            raise InputError(f"{name} is {value!r}; it must be a number of 0 or more")
    if s.family not in _BLOCKWISE and s.cfg_scale:
        raise InputError(f"cfg_scale is {s.cfg_scale}, but {s.family} has no classifier-free guidance; leave it at 0")
    if s.top_p is not None and (not is_real(s.top_p) or not 0 < s.top_p <= 1):
        raise InputError(f"top_p is {s.top_p}; it must lie above 0 and be at most 1")
    if s.top_k is not None:
        check_count("top_k", s.top_k)
    if not is_real(s.eps) or not 0 <= s.eps < 1:
        raise InputError(f"eps is {s.eps}; it must be at least 0 and below 1")
