"""From settings to a run that can start: everything is checked, the model is loaded, every sample is laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args, get_type_hints

from sinks import checkpoints, families, models
from sinks.attention import Capture
from sinks.commandline import parse_indices
from sinks.detection import check_epsilon
from sinks.errors import InputError, is_real, is_whole
from sinks.files import brief
from sinks.masking import SinkMasking
from sinks.prompts import Prompt, load_prompts
from sinks.runs import evenly_spaced
from sinks.samplers import Canvas, lay_out
from sinks.sampling import Sampling, resolve
from sinks.writer import Layout

PATTERNS = {"incoming": "none", "mean": "mean", "full": "full"}  # what --attention says, as Capture says it
_COUNTS = ("num_samples", "gen_len", "steps", "block_len", "batch_size", "attention_steps")
_SAMPLING = ("gen_len", "steps", "block_len", "temperature", "cfg_scale", "remasking", "seed")
_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "left out"}
_FAMILY_OPTIONS = ("top_p", "top_k", "alg_temp", "eps")


@dataclass(frozen=True)
class Settings:
    """What a run is asked to do; the options of inference_model.py, with the same names and meanings."""

    model: str
    checkpoint: str | None = None
    dataset: str | None = None
    split: str = "test"
    offset: int = 0
    num_samples: int = 10
    prompt: str | None = None
    gen_len: int = 256
    steps: int | None = None
    block_len: int = 32
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: str | None = None
    top_p: float | None = None
    top_k: int | None = None
    alg_temp: float | None = None
    eps: float | None = None
    batch_size: int | str = 1
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    attention: str = "incoming"
    attention_steps: int = 32
    layers: str | None = None
    heads: str | None = None
    epsilon: float = 3.0
    mask_sinks: int | None = None
    mask_epsilon: float = 0.0

    def __post_init__(self) -> None:
        self._check_types()
        for name in _COUNTS:
            value = getattr(self, name)
            if value is None or (name == "batch_size" and value == "auto"):
                continue
            if not is_whole(value) or value < 1:
                raise InputError(f"{name} is {value}; it must be 1 or more")
        if self.attention not in PATTERNS:
            raise InputError(f"attention {self.attention!r} is unknown; use one of {', '.join(PATTERNS)}")
        if self.offset < 0:
            raise InputError(f"offset is {self.offset}; it must be 0 or more")
        for name in ("epsilon", "mask_epsilon"):
            check_epsilon(getattr(self, name), name)
        if self.prompt is not None and not self.prompt.strip():
            raise InputError("the prompt is empty")
        if self.prompt is not None and self.dataset is not None:
            raise InputError("give a prompt or a dataset, not both")

    def _check_types(self) -> None:
        """What is read from a manifest may be anything."""
        for name, hint in get_type_hints(type(self)).items():
            value, allowed = getattr(self, name), get_args(hint) or (hint,)
            number = float in allowed and is_real(value)
            if not (number or isinstance(value, allowed)) or (isinstance(value, bool) and bool not in allowed):
                kinds = " or ".join(_KINDS[kind] for kind in allowed)
                raise InputError(f"{name} is {brief(repr(value))}; it must be {kinds}")


@dataclass(frozen=True)
class Plan:
    """A run that can start: all that the settings lead to. ``ids`` and ``layouts`` have one entry per prompt."""

    settings: Settings
    prompts: list[Prompt]
    lm: models.LanguageModel
    sampling: Sampling
    capture: Capture
    masking: SinkMasking | None
    ids: list[list[int]]
    layouts: list[Layout]

    @property
    def nbytes(self) -> int:
        """What the run takes on the disk."""
        return sum(layout.nbytes for layout in self.layouts)

    def pattern_nbytes(self, batches: Sequence[range]) -> int:
        """What the patterns of one step take in memory, where they are kept."""
        if self.capture.patterns == "none":
            return 0
        return max(sum(_float32_pattern(self.layouts[i]) for i in batch) for batch in batches)

    def canvas(self, batch: Sequence[int]) -> Canvas:
        """Where the generation of these samples together starts."""
        return lay_out(self.lm, [self.ids[i] for i in batch], self.sampling)


def plan(settings: Settings, device: str | None = None) -> Plan:
    """Check all that can be checked, load the model, and lay out every sample; nothing is written.

    Args:
        device: this process's own, where the settings leave it open.

    Raises:
        InputError: a setting, prompt or checkpoint that cannot be used; what can be known early is said early.
    """
    family, source = _family(settings)
    sampling = _sampling(settings, family)
    masking = _masking(settings, sampling)
    layers, heads = parse_indices("layers", settings.layers), parse_indices("heads", settings.heads)
    settings, prompts = _prompts(settings, source)
    lm = models.load(
        settings.model,
        settings.checkpoint,
        device=device or settings.device,
        dtype=settings.dtype,
        trust_remote_code=settings.trust_remote_code,
    )
    steps = evenly_spaced(settings.attention_steps, sampling.steps)
    capture = Capture(layers=layers, heads=heads, steps=steps, patterns=PATTERNS[settings.attention])
    ids = [lm.encode(prompt.text) for prompt in prompts]
    canvas = lay_out(lm, ids, sampling)  # all together, only to see that they can be
    layouts = [_layout(lm.spec, sampling, capture, int(length)) for length in canvas.valid.sum(-1)]
    return Plan(settings, prompts, lm, sampling, capture, masking, ids, layouts)


def _family(settings: Settings) -> tuple[str, str]:
    """The family, from the name or config.json, and where the checkpoint is; nothing else is read or fetched."""
    named, source = checkpoints.resolve(settings.model, settings.checkpoint)
    folder, _ = checkpoints.folder_of(source, None, ["config.json"])
    family = checkpoints.known_family(named, checkpoints.read_config(folder), folder)
    return family.name if family else families.AUTOREGRESSIVE, source


def _sampling(settings: Settings, family: str) -> Sampling:
    options = {name: getattr(settings, name) for name in _SAMPLING}
    given = {name: getattr(settings, name) for name in _FAMILY_OPTIONS}
    return resolve(family, **options, **{name: v for name, v in given.items() if v is not None})


def _masking(settings: Settings, sampling: Sampling) -> SinkMasking | None:
    if settings.mask_sinks is None and not sampling.sink_masked:
        if settings.mask_epsilon:
            raise InputError("mask_epsilon has no effect without --mask_sinks; say how many keys to mask")
        return None
    top_k = 1 if settings.mask_sinks is None else settings.mask_sinks
    return SinkMasking(epsilon=settings.mask_epsilon, top_k=top_k)


def _prompts(settings: Settings, source: str) -> tuple[Settings, list[Prompt]]:
    if settings.prompt is not None:
        return settings, [Prompt("prompt", settings.prompt)]
    embedded = Path(source).is_relative_to(Path(__file__).parent)
    settings = replace(settings, dataset=settings.dataset or ("problems" if embedded else "gsm8k"))
    prompts = load_prompts(str(settings.dataset), settings.split, settings.offset, settings.num_samples)
    return settings, prompts


def _layout(spec: models.Spec, sampling: Sampling, capture: Capture, length: int) -> Layout:
    return Layout(
        steps=sampling.steps,
        length=length,
        layers=_chosen("layer", capture.layers, spec.layers),
        heads=_chosen("head", capture.heads, spec.heads),
        layer_count=spec.layers,
        head_count=spec.heads,
        patterns=capture.patterns,
        pattern_steps=capture.steps or (),
    )


def _float32_pattern(layout: Layout) -> int:
    heads = len(layout.heads) if layout.patterns == "full" else 1
    return 4 * len(layout.layers) * heads * layout.length**2


def _chosen(what: str, numbers: Sequence[int] | None, count: int) -> Sequence[int]:
    if numbers is None:
        return range(count)
    if max(numbers) >= count:
        raise InputError(f"{what} {max(numbers)} does not exist; the model has {what}s 0 to {count - 1}")
    return numbers
