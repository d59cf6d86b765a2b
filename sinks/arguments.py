"""Evaluation arguments (lm-eval's ``--model_args``) in the words of the official scripts, resolved into settings.

Every argument is checked before a model is loaded; one that is unknown is an error, never ignored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sinks import checkpoints, likelihood, models
from sinks import sampling as sampler
from sinks.commandline import parse_indices
from sinks.errors import InputError, is_whole
from sinks.families import AUTOREGRESSIVE
from sinks.masking import FIELDS, SinkMasking
from sinks.sampling import Sampling

LLADA_SCRIPT, DREAM_SCRIPT, AUTOREGRESSIVE_SCRIPT = "llada_dist", "dream", AUTOREGRESSIVE
FAMILIES_OF = {
    LLADA_SCRIPT: ("LLaDA", "MMaDA"),
    DREAM_SCRIPT: ("Dream",),
    AUTOREGRESSIVE_SCRIPT: (AUTOREGRESSIVE,),
}
_CHECKPOINT = ("model_path", "pretrained")
_LOAD = ("family", "revision", "device", "dtype", "attention", "trust_remote_code")
_IDS = ("mask_token_id", "eos_token_id", "eot_token_id", "pad_token_id")
_SYNONYMS = {"mask_id": "mask_token_id", "cfg": "cfg_scale", **sampler.SYNONYMS}
_PLAIN_MASKING = ("epsilon", "exclude_self", "mask_sink_ratio")  # as the LLaDA script spells them
_LISTS = ("sink_layers", "sink_heads", "sink_steps")
_COUNTS = ("batch_size", "max_length", "mc_num")
_SWITCHES = (
    *("trust_remote_code", "is_check_greedy", "add_bos_token", "escape_until", "enable_sink_masking"),
    *("exclude_self", "sink_exclude_self", "logits_eos_inf", "confidence_eos_eot_inf", "eos_eot_last"),
)
_DEFAULTS: dict[str, dict[str, Any]] = {
    LLADA_SCRIPT: {"gen_len": 1024, "mc_num": 128, "max_length": 4096, "is_check_greedy": True},
    DREAM_SCRIPT: {
        **{"gen_len": 128, "mc_num": 128, "max_length": 2048, "nll_type": "mc", "log_type": "ftb"},
        **{"sampling_eps": 1e-3, "add_bos_token": False, "escape_until": False},
    },
    AUTOREGRESSIVE_SCRIPT: {"gen_len": 256, "max_length": 4096, "add_bos_token": False},
}
# Options of the official Dream script that choose a way to load or do not work there: only the neutral value is taken.
_NEUTRAL: dict[str, dict[str, Any]] = {
    DREAM_SCRIPT: {"parallelize": False, "autogptq": False, "classifier_free_guidance": 1}
}


@dataclass(frozen=True)
class Settings:
    """Everything that decides an answer, and how it is computed.

    ``load`` are arguments of :func:`sinks.load`; ``scoring`` those of the likelihood. ``answers`` (a file of those
    already given) decides nothing, ``batch_size`` no generated answer.
    """

    script: str
    checkpoint: str
    sampling: Sampling
    masking: SinkMasking | None
    max_length: int
    load: Mapping[str, Any] = field(default_factory=dict)
    scoring: Mapping[str, Any] = field(default_factory=dict)
    add_bos_token: bool = False
    escape_until: bool = False
    batch_size: int = 1
    answers: str | None = None

    def deciding(self) -> dict[str, Any]:
        """The settings as plain data, without those that cannot change an answer."""
        data = dataclasses.asdict(self)
        for name in ("batch_size", "answers"):
            del data[name]
        data["load"] = {name: value for name, value in sorted(self.load.items()) if name != "device"}
        return data

    def digest(self) -> str:
        """Short hash of all deciding settings."""
        text = json.dumps(self.deciding(), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def resolve(script: str, arguments: Mapping[str, Any]) -> Settings:
    """Settings from the arguments of one of the evaluation scripts.

    Raises:
        InputError: an unknown argument (the known ones are listed), a value that cannot be used, or a model of a
            family that this script is not for.
    """
    given = _by_name(arguments)
    checkpoint = next((str(given.pop(name)) for name in _CHECKPOINT if given.get(name)), None)
    if checkpoint is None:
        raise InputError(f"no model was given; add {_CHECKPOINT[script != LLADA_SCRIPT]}=… to --model_args")
    family = checkpoints.identify(checkpoint, given.get("family"), given.get("revision"))
    if family not in FAMILIES_OF[script]:
        raise InputError(
            f"{checkpoint} is a {family} model, but this script is for {' and '.join(FAMILIES_OF[script])}"
        )
    _check_known(script, family, given)
    _check_kinds(given)
    models.check(*(given.get(name, "auto") for name in ("device", "dtype", "attention")))
    values = {**_DEFAULTS[script], **given}
    return Settings(
        script=script,
        checkpoint=checkpoint,
        sampling=_sampling(family, script, values),
        masking=_masking(values),
        load={name: values[name] for name in (*_LOAD, *_IDS) if values.get(name) is not None},
        scoring=_scoring(values),
        max_length=int(values["max_length"]),
        add_bos_token=bool(values.get("add_bos_token", False)),
        escape_until=bool(values.get("escape_until", False)),
        batch_size=int(values.get("batch_size", 1)),
        answers=values.get("answers"),
    )


def _by_name(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values under one name each."""
    given: dict[str, Any] = {}
    for name, value in arguments.items():
        ours = _SYNONYMS.get(name, name)
        if ours in given:
            twice = sorted(other for other in arguments if _SYNONYMS.get(other, other) == ours)
            raise InputError(f"{' and '.join(twice)} mean the same; give one of them")
        given[ours] = _plain(name, value)
    return given


def _check_kinds(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in _SWITCHES and not isinstance(value, bool):
            raise InputError(f"{name}={value!r} must be True or False")
        if name in _IDS and value is not None and not (is_whole(value) and value >= 0):
            raise InputError(f"{name}={value!r} must be a token id, a whole number of 0 or more")
        if name in _COUNTS:
            sampler.check_count(name, int(value) if str(value).isdecimal() else value)
    likelihood.check_types(given.get("nll_type", "mc"), given.get("log_type", "ftb"))


def _check_known(script: str, family: str, given: Mapping[str, Any]) -> None:
    masking = ["enable_sink_masking", *(f"sink_{name}" for name in FIELDS)]
    if script == LLADA_SCRIPT:
        masking += _PLAIN_MASKING
    neutral = _NEUTRAL.get(script, {})
    own = [*_DEFAULTS[script], "batch_size", "max_batch_size", "answers"]
    known = [*_CHECKPOINT, *_LOAD, *_IDS, *_SYNONYMS, *sampler.settings_of(family), *masking, *own, *neutral]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise InputError(f"unknown model_args: {', '.join(unknown)}; known are {', '.join(sorted(set(known)))}")
    for name, value in neutral.items():
        if name in given and given[name] != value:
            raise InputError(f"{name}={given[name]} is not supported; leave it out or give {value}")


def _sampling(family: str, script: str, values: Mapping[str, Any]) -> Sampling:
    chosen = {name: values[name] for name in sampler.settings_of(family) if name in values}
    if script == LLADA_SCRIPT:
        chosen["block_len"] = chosen.get("block_len") or chosen["gen_len"]
    # The masking object says it all; the name alone must not bring one back where it is switched off.
    return replace(sampler.resolve(family, **chosen), sink_masked=False)


def _masking(values: Mapping[str, Any]) -> SinkMasking | None:
    """The masking object: switched on by name, or by any of its fields unless ``enable_sink_masking`` is false."""
    fields = {name: values[f"sink_{name}"] for name in FIELDS if f"sink_{name}" in values}
    fields |= {name: values[name] for name in _PLAIN_MASKING if name in values and name not in fields}
    if {"epsilon", "sink_epsilon"} <= values.keys() and values["epsilon"] != values["sink_epsilon"]:
        raise InputError(f"epsilon={values['epsilon']} contradicts sink_epsilon={values['sink_epsilon']}; give one")
    if fields.get("steps") is not None:
        fields["steps"] = tuple(fields["steps"])
    masking = SinkMasking(**fields)  # also where it is off, so that a wrong value is never passed over
    named = str(values.get("remasking", "")).endswith(sampler.SINK_MASKED)
    asked = any(name.startswith("sink_") for name in values)
    if not values.get("enable_sink_masking", named or asked):
        return None
    return masking


def _scoring(values: Mapping[str, Any]) -> dict[str, Any]:
    names = ("mc_num", "nll_type", "log_type", "sampling_eps", "is_check_greedy")
    return {name: values[name] for name in names if name in values}


def _plain(name: str, value: Any) -> Any:
    """lm-eval reads -1 as -1.0, "none" as text, and 0;2-3 as text: say what was meant."""
    if isinstance(value, str) and value.lower() in ("none", ""):
        return None
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if name in _LISTS and value is not None:
        return parse_indices(name, value if isinstance(value, str | list) else str(value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value
