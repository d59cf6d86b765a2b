"""Where prompts come from: data sets of the hub, embedded problems, local JSONL files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinks.errors import InputError
from sinks.files import explained
from sinks.tiny import problems

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One thing to answer: where it is from, the user's message, and the answer that is expected, if one is known."""

    id: str
    text: str
    reference: str | None = None


@dataclass(frozen=True)
class HubDataset:
    """A data set of the hub, and which of its columns are what."""

    path: str
    config: str | None
    prompt: str
    reference: str


HUB = {
    "gsm8k": HubDataset("openai/gsm8k", "main", "question", "answer"),
    "humaneval": HubDataset("openai/openai_humaneval", None, "prompt", "canonical_solution"),
}
DATASETS = (*HUB, "problems", "FILE.jsonl")


def load_prompts(dataset: str, split: str = "test", offset: int = 0, num_samples: int | None = None) -> list[Prompt]:
    """The prompts ``offset`` … ``offset + num_samples - 1``; fewer when there are fewer, with a warning.

    Args:
        dataset: "gsm8k" or "humaneval" (hub or cache), "problems" (embedded), or a file whose lines are JSON objects
            with ``question`` or ``prompt``, and ``answer`` if there is one.
        split: of a data set of the hub.

    Raises:
        InputError: an unknown or unreachable data set, a line that cannot be used, an offset beyond the end.
    """
    if dataset in HUB:
        total, prompts = _from_hub(dataset, split, offset, num_samples)
    else:
        every = _embedded(split) if dataset == "problems" else _from_file(dataset)
        end = None if num_samples is None else offset + num_samples
        total, prompts = len(every), every[offset:end]
    if not prompts:
        raise InputError(f"offset {offset} is beyond the end of {dataset}, which has {total} prompts")
    if num_samples is not None and len(prompts) < num_samples:
        _log.warning(
            "%s has %d prompts from offset %d on, %d were asked for", dataset, len(prompts), offset, num_samples
        )
    return prompts


def _embedded(split: str) -> list[Prompt]:
    if split != "test":
        raise InputError(f"the embedded problems have no split {split!r}; use test")
    return [Prompt(f"problems/{i}", p.question, p.answer) for i, p in enumerate(problems.held_out())]


def _from_hub(name: str, split: str, offset: int, num_samples: int | None) -> tuple[int, list[Prompt]]:
    source = HUB[name]
    rows = _hub_rows(name, source, split)
    end = len(rows) if num_samples is None else min(offset + num_samples, len(rows))
    chosen = (rows[i] for i in range(offset, end))
    return len(rows), [
        Prompt(f"{name}/{split}/{offset + i}", row[source.prompt], row[source.reference])
        for i, row in enumerate(chosen)
    ]


def _hub_rows(name: str, source: HubDataset, split: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise InputError(f"{name} needs the package datasets; install it, or use a local FILE.jsonl") from None
    try:
        with _quiet("huggingface_hub"):
            return datasets.load_dataset(source.path, source.config, split=split)
    except ValueError as error:
        raise InputError(f"{name}: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise InputError(
            f"{name} ({source.path}) can neither be fetched nor is it cached: check the network, or use "
            "--dataset problems or a local FILE.jsonl"
        ) from error


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep a library's warnings (one for every attempt to connect) off the screen, for a while."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _from_file(name: str) -> list[Prompt]:
    path = Path(name).expanduser()
    if not path.is_file():
        if path.suffix == ".jsonl":
            raise InputError(f"there is no file {name}")
        raise InputError(f"unknown dataset {name!r}; use one of {', '.join(DATASETS)}")
    with explained("read", path):
        lines = path.read_bytes().splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    return [_from_line(path, number, line, i) for i, (number, line) in enumerate(numbered)]


def _from_line(path: Path, number: int, line: bytes, index: int) -> Prompt:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise InputError(f"{where} must be an object with question or prompt, and answer if there is one")
    text, reference = row.get("question", row.get("prompt")), row.get("answer")
    if not isinstance(text, str):
        raise InputError(f"{where} needs question or prompt, as text")
    if not text.strip():
        raise InputError(f"{where} has an empty prompt")
    if reference is not None and not isinstance(reference, str):
        raise InputError(f"{where} has an answer that is not text")
    try:
        f"{text}{reference}".encode()
    except UnicodeEncodeError:
        raise InputError(f"{where} holds half of a surrogate pair, which is no text") from None
    return Prompt(f"{path.name}/{index}", text, reference)
