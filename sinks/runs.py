"""The run folder: create, resume, read. One launch makes one folder; NumPy only, no torch.

A sample is done when its ``sample.json`` is there, which :mod:`sinks.writer` writes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sinks.errors import InputError
from sinks.files import brief, check_links, existing_part, explained, opened_tensors, read_json, write_json
from sinks.schema import manifest_problem, sample_problem, tensor_problem

SCHEMA_VERSION = 1

Array = NDArray[Any]


def run_name(steps: int, gen_len: int, block_len: int) -> str:
    return f"T{datetime.now():%m%d_%H%M%S}-S{steps}-L{gen_len}-B{block_len}"


def create_run(runs_dir: Path, name: str, manifest: dict[str, Any]) -> Path:
    """A new folder with the manifest in it: ``name``, or ``name-2``, ``name-3``, … when that is taken."""
    existing = existing_part(runs_dir)
    with explained("create", runs_dir):
        runs_dir.mkdir(parents=True, exist_ok=True)
        for number in range(1, 10_000):
            folder = runs_dir / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir()
                break
            except FileExistsError:
                continue
    try:
        write_json(folder / "manifest.json", {"schema_version": SCHEMA_VERSION, **manifest})
    except BaseException:
        discard(folder, existing)
        raise
    return folder


def discard(run: Path, existing: Path) -> None:
    """Remove a run folder and those above it that were made for it: all below ``existing``."""
    rmtree(run, ignore_errors=True)
    for parent in run.absolute().parents:
        if parent == existing:
            return
        with suppress(OSError):  # another run came to live there meanwhile
            parent.rmdir()


def sample_folder(run: Path, index: int) -> Path:
    return run / f"sample_{index:03d}"


def is_done(run: Path, index: int) -> bool:
    """Whether the sample is there whole; one with a damaged ``sample.json`` is not, so that resuming mends it."""
    try:
        return isinstance(read_json(sample_folder(run, index) / "sample.json"), dict)
    except InputError:
        return False


def fail(run: Path, index: int, problem: str) -> None:
    """Record why a sample could not be made; resuming tries again."""
    write_json(sample_folder(run, index) / "failed.json", {"problem": problem})


def _state(run: Path, index: int) -> dict[str, Any]:
    if is_done(run, index):
        return {"state": "done"}
    failed = sample_folder(run, index) / "failed.json"
    if not failed.is_file():
        return {"state": "missing"}
    content = read_json(failed)
    return {"state": "failed", "problem": brief(content.get("problem") if isinstance(content, dict) else content)}


def cut_batches(count: int, batch_size: int) -> list[range]:
    """The samples 0…count-1 in batches; a batch is shared out among processes, and redone, as a whole."""
    return [range(first, min(first + batch_size, count)) for first in range(0, count, batch_size)]


def evenly_spaced(count: int, steps: int) -> list[int]:
    """At most ``count`` of the steps 0…steps-1, the first and the last among them."""
    count = min(count, steps)
    return sorted({round(i * (steps - 1) / max(count - 1, 1)) for i in range(count)})


def unfinished(run: Path, batches: Sequence[range]) -> list[range]:
    """The batches of which a sample is missing."""
    return [batch for batch in batches if not all(is_done(run, index) for index in batch)]


def update_states(run: Path) -> dict[str, Any]:
    """Write into the manifest which samples are done, which failed and why; returns the manifest."""
    manifest: dict[str, Any] = read_json(run / "manifest.json")
    for sample in manifest["samples"]:
        sample.pop("problem", None)
        sample.update(_state(run, sample["index"]))
    write_json(run / "manifest.json", manifest)
    return manifest


class Run:
    """A run folder to read from.

    Raises:
        InputError: ``path`` is no run folder, a later version made it, or it holds a link to somewhere else.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with explained("read", self.path):
            if not (self.path / "manifest.json").is_file():
                raise InputError(f"{self.path} is not a run folder: it holds no manifest.json")
        check_links(self.path)
        self.manifest: dict[str, Any] = read_json(self.path / "manifest.json")
        version = self.manifest.get("schema_version") if isinstance(self.manifest, dict) else None
        if not isinstance(version, int):
            raise InputError(f"{self.path} is not a run folder: its manifest.json names no schema_version")
        named = f"{self.path} has schema version {brief(version)}"
        if version > SCHEMA_VERSION:
            raise InputError(f"{named}, known here is {SCHEMA_VERSION}: update sinks")
        if version < SCHEMA_VERSION:
            raise InputError(f"{named}, too old to be read; make it again, or use the version of sinks that made it")
        problem = manifest_problem(self.manifest)
        if problem:
            raise InputError(f"{self.path / 'manifest.json'} is damaged: {problem}")

    @cached_property
    def samples(self) -> list[Sample]:
        """The samples that are done, in order."""
        folders = [file.parent for file in self.path.glob("sample_*/sample.json")]
        folders = [folder for folder in folders if folder.name.removeprefix("sample_").isdecimal()]
        samples = sorted((Sample(folder) for folder in folders), key=lambda sample: sample.index)
        return [sample for sample in samples if sample.folder == sample_folder(self.path, sample.index)]  # no copies


class Sample:
    """One sample of a run. Step 0 is the first, -1 the last; layers and heads are the model's own numbers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = int(folder.name.removeprefix("sample_"))

    @cached_property
    def info(self) -> dict[str, Any]:
        """All of sample.json."""
        path = self.folder / "sample.json"
        info: dict[str, Any] = read_json(path)
        problem = sample_problem(info)
        if problem:
            raise InputError(f"{path} is damaged: {problem}")
        return info

    def check(self) -> None:
        """InputError, naming the file, unless everything of the sample is there and fits together."""
        absent = {"id", "prompt"} - self.info.keys()
        if absent:
            raise InputError(f"{self.folder / 'sample.json'} is damaged: {min(absent)} is missing")
        length, kept = len(self.tokens_text), (len(self.layers), len(self.heads))
        expected: dict[str, dict[str, tuple[int | None, ...]]] = {
            "incoming": {"incoming": (self.steps, *kept, length), "blocked": (self.steps, None, None)},
            "trajectory": {
                "tokens": (self.steps + 1, length),
                "confidence": (self.steps, length),
                "unmasked_at": (length,),
            },
        }
        for file, tensors in expected.items():
            path = self.folder / f"{file}.safetensors"
            with opened_tensors(path) as opened:
                for name, shape in tensors.items():
                    found = tuple(_tensor(opened, path, name).get_shape())
                    if any(wanted not in (None, size) for wanted, size in zip(shape, found, strict=True)):
                        raise InputError(f"{path} is damaged: {name} has the shape {found}, expected {shape}")
                    if 0 in found[:1]:
                        raise InputError(f"{path} is damaged: {name} holds no step")

    @property
    def prompt(self) -> str:
        return str(self.info.get("prompt", ""))

    @property
    def reference(self) -> str | None:
        reference: str | None = self.info.get("reference")
        return reference

    @property
    def text(self) -> str:
        """What was generated, up to the first end token."""
        return str(self.info["text"])

    @property
    def prompt_length(self) -> int:
        return int(self.info["prompt_length"])

    @property
    def tokens_text(self) -> list[str]:
        """The final tokens, one string per position."""
        return list(self.info["tokens_text"])

    @cached_property
    def layers(self) -> list[int]:
        """The layers that were kept, in the order of the arrays."""
        return self._kept("layers")

    @cached_property
    def heads(self) -> list[int]:
        """The heads that were kept, in the order of the arrays."""
        return self._kept("heads")

    @cached_property
    def steps(self) -> int:
        path = self.folder / "incoming.safetensors"
        with opened_tensors(path) as file:
            return int(_tensor(file, path, "incoming").get_shape()[0])

    @cached_property
    def pattern_steps(self) -> list[int]:
        """The steps whose patterns were kept."""
        files = (self.folder / "attention").glob("step_*.safetensors")
        numbers = [file.stem.removeprefix("step_") for file in files]
        return sorted(int(number) for number in numbers if number.isdecimal())

    def incoming(self, t: int | None = None, layer: int | None = None, head: int | None = None) -> Array:
        """Incoming attention before blocking, float32 (T, L', H', S) less the axes that are given."""
        return self._columns("incoming", t, layer, head)

    def value_norm(self, t: int | None = None, layer: int | None = None, head: int | None = None) -> Array:
        """Norms of the values that each head reads, float32 (T, L', H', S) less the axes that are given."""
        return self._columns("value_norm", t, layer, head)

    def blocked(self, t: int | None = None) -> Array:
        """How many keys were blocked, int16 (T, L, H) or (L, H), always in every layer and head."""
        return self._read("incoming", "blocked", (self._step(t, self.steps),))

    def tokens(self, t: int | None = None) -> Array:
        """Ids after ``t`` steps, int32 (T+1, S) or (S,): 0 is the start and -1 the result."""
        return self._read("trajectory", "tokens", (self._step(t, self.steps + 1),))

    def confidence(self, t: int | None = None) -> Array:
        """float32 (T, S) or (S,), NaN where no token could be placed."""
        return self._read("trajectory", "confidence", (self._step(t, self.steps),)).astype(np.float32)

    @property
    def unmasked_at(self) -> Array:
        """int32 (S,): the step at which a position got its token; -1: never, or it is of the prompt."""
        return self._read("trajectory", "unmasked_at", (slice(None),))

    def pattern(self, t: int, layer: int, head: int | None = None) -> Array:
        """The attention pattern, float32 (S, S) [query, key]; without a head the mean over the heads kept."""
        t = t % self.steps if -self.steps <= t < 0 else t
        if t not in self.pattern_steps:
            there = ", ".join(map(str, self.pattern_steps)) or "none; run again with --attention mean or full"
            raise InputError(f"{self.folder} keeps no pattern of step {t}; there are: {there}")
        name, layer = f"attention/step_{t:04d}", self._position("layer", layer)
        path = self.folder / f"{name}.safetensors"
        with opened_tensors(path) as file:
            full = (file.metadata() or {}).get("kind") == "full"
            *kept, queries, keys = _tensor(file, path, "pattern").get_shape()
        if kept != [len(self.layers), len(self.heads)][: 1 + full] or queries != keys:
            raise InputError(f"{path} is damaged: pattern has the shape {(*kept, queries, keys)}")
        if full and head is not None:
            return self._read(name, "pattern", (layer, self._position("head", head))).astype(np.float32)
        if head is not None:
            raise InputError(f"{self.folder} keeps the mean over heads only; run again with --attention full")
        pattern = self._read(name, "pattern", (layer,)).astype(np.float32)
        return np.asarray(pattern.mean(0)) if full else pattern

    def _columns(self, name: str, t: int | None, layer: int | None, head: int | None) -> Array:
        kept = (self._step(t, self.steps), self._position("layer", layer), self._position("head", head))
        return self._read("incoming", name, kept).astype(np.float32)

    def _step(self, t: int | None, count: int) -> int | slice:
        if t is None:
            return slice(None)
        if not -count <= t < count:
            raise InputError(f"step {t} is not in {self.folder}: there are 0 to {count - 1}")
        return t % count

    def _position(self, what: str, number: int | None) -> Any:
        """Where a layer or head lies in the arrays."""
        kept = self.layers if what == "layer" else self.heads
        if number is None:
            return slice(None)
        if number not in kept:
            raise InputError(f"{what} {number} is not in {self.folder}: there are {', '.join(map(str, kept))}")
        return kept.index(number)

    def _kept(self, what: str) -> list[int]:
        path = self.folder / "incoming.safetensors"
        with opened_tensors(path) as file:
            numbers = (file.metadata() or {}).get(what, "").split(",")
        if not all(number.isdecimal() and len(number) < 10 for number in numbers):
            raise InputError(f"{path} is damaged: it does not say which {what} it keeps")
        return [int(number) for number in numbers]

    def _read(self, file: str, name: str, index: tuple[int | slice, ...]) -> Array:
        path = self.folder / f"{file}.safetensors"
        with opened_tensors(path) as opened:
            values = np.asarray(_tensor(opened, path, name)[index])
        if values.dtype.kind == "f":
            with np.errstate(invalid="ignore"):
                if (np.abs(values) > np.finfo(np.float16).max).any():
                    raise InputError(f"{path} is damaged: {name} holds infinite or far too large numbers")
                values[np.isnan(values)] = np.nan  # quiet ones, at which no computation warns
        return values


def _tensor(opened: Any, path: Path, name: str) -> Any:
    """A tensor of an opened file, to be sliced."""
    problem = tensor_problem(opened, name)
    if problem:
        raise InputError(f"{path} {problem}")
    return opened.get_slice(name)


def find_runs(root: str | Path, model: str | None = None) -> list[Run]:
    """All runs in ``root`` and below, or ``root`` itself, by path; of one model when ``model`` is given."""
    runs = [Run(folder) for folder in run_folders(root)]
    return [run for run in runs if model in (None, run.manifest["model"])]


def run_folders(root: str | Path) -> list[Path]:
    """The folders of all runs in ``root`` and below, or ``root`` itself, also those that :class:`Run` would refuse."""
    root = Path(root)
    if not root.is_dir():
        raise InputError(f"there is no folder {root}")
    return [path.parent for path in sorted(root.rglob("manifest.json")) if _may_be_ours(path)]


def _may_be_ours(manifest: Path) -> bool:
    """Other programs write a manifest.json too; one that cannot be read may have been a run's."""
    try:
        content = read_json(manifest)
    except InputError:
        return True
    return isinstance(content, dict) and "schema_version" in content
