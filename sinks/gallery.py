"""Which figures, films and tables a run gets, and where they lie: ``<run>/plots``, one folder per sample inside.

What is drawn already with the same settings is skipped, so a stopped command goes on where it was. Figures are drawn by
several processes, each of which holds one at a time.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from logging.handlers import BufferingHandler
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from sinks import frames, heatmaps, plotting, video
from sinks.errors import InputError
from sinks.files import explained, read_json, write_json
from sinks.runs import Run, Sample, evenly_spaced
from sinks.statistics import EPSILONS, Counts, Row, epsilon_for
from sinks.text_axis import TextAxis

_log = logging.getLogger(__name__)

FPS = 8
GIF_FRAMES = 48  # a GIF of all steps would be many times the film's size
PATTERN_MAPS = 4  # steps whose pattern is drawn
MOVEMENT = {
    "displacement_per_step": "signed displacement of the strongest sink (tokens per step, right positive)",
    "dwell_steps": "dwell time of the strongest sink (steps)",
    "persistence": "share of sinks that still are one a step later",
}
"""Columns of the table of movement that get a map of layers and heads, and what they are."""

Job = tuple[Path, Callable[[Path], object]]
Figures = Iterator[tuple[str, Callable[[Path], object]]]
Films = Iterator[tuple[str, Callable[[str, Path], object]]]


@dataclass(frozen=True)
class Options:
    """``layers`` (None: all that were kept) get figures of their own; ``films`` are the suffixes to write."""

    epsilon: float = 3.0
    layers: Sequence[int] | None = None
    suffix: str = ".png"
    films: Sequence[str] = (".mp4", ".gif")
    force: bool = False


def sample_jobs(run: Run, counted: Counts, options: Options) -> list[Job]:
    """Every figure and film of one sample."""
    folder = run.path / "plots" / counted.sample.folder.name
    text, title = text_axis(run, counted.sample), f"{_model(run)}, sample {counted.sample.index}"
    figures = [*_figures(counted, text, title, options), *_pattern_figures(counted.sample, text, title, options)]
    jobs: list[Job] = [(folder / f"{name}{options.suffix}", draw) for name, draw in figures]
    films = [(suffix, *film) for suffix in options.films for film in _films(counted, text, title, options)]
    for number, (suffix, name, draw) in enumerate(films):  # spread, for two at once would take twice the memory
        place = (number + 1) * len(figures) // (len(films) + 1) + number
        jobs.insert(place, (folder / f"{name}{suffix}", partial(draw, suffix)))
    return jobs


def run_jobs(run: Run, counts: Sequence[Counts], tables: Mapping[str, Sequence[Row]], options: Options) -> list[Job]:
    """Every figure over all samples that were counted, of their tables."""
    folder, title = run.path / "plots", f"{_model(run)}, {count_of(len(counts), 'sample')}, epsilon {options.epsilon:g}"
    return [(folder / f"{name}{options.suffix}", draw) for name, draw in _pooled_figures(counts, tables, title)]


def processes(count: int | None) -> AbstractContextManager[Executor | None]:
    """What :func:`draw` draws with: as many processes as there are CPUs, at most 4, unless told otherwise."""
    if count is not None and count < 1:
        raise InputError(f"processes is {count}; it must be 1 or more")
    count = count or min(os.cpu_count() or 1, 4)
    if count == 1:
        return nullcontext()
    return ProcessPoolExecutor(count, get_context("spawn"), initializer=_begin_process)


def _draw_and_forget(job: Callable[[Path], object], path: Path) -> list[str]:
    """Draw in a process of the pool; returns the warnings, which would otherwise come from each process.

    Figures refer to themselves, so that without a collection dozens of them would wait for one.
    """
    job(path)
    gc.collect()
    warnings = [record.getMessage() for record in _warnings.buffer]
    _warnings.flush()
    return warnings


_warnings = BufferingHandler(capacity=1000)


def _begin_process() -> None:
    logging.getLogger().addHandler(_warnings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's to handle
    Thread(target=_end_with_the_first_process, daemon=True).start()


def _end_with_the_first_process() -> None:
    first = parent_process()
    if first is not None:
        first.join()
        os._exit(1)


def draw(jobs: Sequence[Job], since: int, pool: Executor | None) -> Iterator[Path]:
    """Draw what is not there yet or older than ``since``; yields each path when it is done with."""
    old = {path: job for path, job in jobs if not path.exists() or path.stat().st_mtime_ns < since}
    yield from (path for path, _ in jobs if path not in old)
    if pool is None:
        for path, job in old.items():
            job(path)
            yield path
        return
    drawing = {pool.submit(_draw_and_forget, job, path): path for path, job in old.items()}
    try:
        for done in as_completed(drawing):
            for warning in done.result():
                _warn_once(warning)
            yield drawing[done]
    finally:
        for waiting in drawing:
            waiting.cancel()


@cache
def _warn_once(warning: str) -> None:
    _log.warning(warning)


def drawn_since(folder: Path, settings: Mapping[str, Any], force: bool) -> int:
    """From when on a picture in ``folder`` was drawn with these settings, as a file's time in nanoseconds.

    The settings lie beside the pictures. Where they change, they are written anew, and all that is older is stale.
    """
    record = folder / "drawn_with.json"
    with explained("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
    if force or not _recorded(record, settings):
        write_json(record, settings)
    return record.stat().st_mtime_ns


def _recorded(record: Path, settings: Mapping[str, Any]) -> bool:
    try:
        return bool(read_json(record) == settings)
    except InputError:  # there is none yet, or it is damaged
        return False


def text_axis(run: Run, sample: Sample) -> TextAxis:
    """The key positions of a sample."""
    block_len, gen_len = (run.manifest["sampling"][name] for name in ("block_len", "gen_len"))
    one_block = block_len >= gen_len  # also what families without blocks write
    return TextAxis(sample.tokens_text, sample.prompt_length, None if one_block else block_len, sample.unmasked_at)


def _figures(counted: Counts, text: TextAxis, title: str, options: Options) -> Figures:
    sample, means, whole = counted.sample, counted.means, "mean over layers and heads"
    names = _numbered("layer", sample.layers)
    yield "incoming", partial(heatmaps.incoming_map, means.mean(1), text, title=f"{title}: incoming attention, {whole}")
    yield (
        "incoming_layers",
        partial(heatmaps.incoming_grid, means.swapaxes(0, 1), names, text, title=f"{title}: mean over heads"),
    )
    above = f", epsilon {options.epsilon:g}"
    yield "over_steps", partial(_over_steps, counted, title=title + above)
    for layer in _layers(sample, options):
        i, of = sample.layers.index(layer), f"layer_{layer:02d}"
        heads, here = _numbered("head", sample.heads), f"{title}, layer {layer}"
        yield f"incoming_{of}", partial(heatmaps.incoming_map, means[:, i], text, title=f"{here}: mean over heads")
        yield f"heads_{of}", partial(_heads, sample, layer, heads, text, title=here)
        paths, strongest = counted.positions[:, i].swapaxes(0, 1), f"{here}: strongest sink{above}"
        yield f"strongest_{of}", partial(heatmaps.strongest_paths, paths, heads, text, title=strongest)


def _pattern_figures(sample: Sample, text: TextAxis, title: str, options: Options) -> Figures:
    steps = sample.pattern_steps
    for t in [steps[i] for i in evenly_spaced(PATTERN_MAPS, len(steps))] if steps else ():
        for layer in _pattern_layers(sample, options):
            yield f"pattern_layer_{layer:02d}_step_{t:04d}", partial(_pattern, sample, layer, t, text, title=title)


def _pattern_layers(sample: Sample, options: Options) -> Sequence[int]:
    """The chosen layers; of all, the first, the middle and the last."""
    if options.layers is not None:
        return _layers(sample, options)
    return [sample.layers[i] for i in evenly_spaced(3, len(sample.layers))]


def _layers(sample: Sample, options: Options) -> Sequence[int]:
    return sample.layers if options.layers is None else options.layers


def check_layers(samples: Sequence[Sample], wanted: Sequence[int] | None) -> None:
    """InputError if a layer that is to be drawn was not kept; a sample that cannot be read is left to its readers."""
    for sample in samples if wanted else ():
        try:
            kept = sample.layers
        except InputError:
            continue
        absent = ", ".join(map(str, sorted(set(wanted or ()) - set(kept))))
        if absent:
            raise InputError(f"layer {absent} is not in {sample.folder}: there are {', '.join(map(str, kept))}")


def _pooled_figures(counts: Sequence[Counts], tables: Mapping[str, Sequence[Row]], title: str) -> Figures:
    sample = counts[0].sample
    classes = [{"name": row["class"], "series": row["series"], **_bounded(row)} for row in tables["classes"]]
    yield "classes", partial(plotting.class_bars, classes, title=title)
    epsilons = {f"{share:.0%} unflagged": value for share, value in epsilon_for(counts).items()}
    flagged = np.array([row["share_of_tokens"] for row in tables["epsilon"]])
    marks = {name: value for name, value in epsilons.items() if value <= EPSILONS[-1]}
    yield "epsilon", partial(plotting.epsilon_curve, EPSILONS, flagged, title=title, marks=marks)
    if tables["unmasking"]:
        yield "unmasking", partial(_unmasking, tables["unmasking"], title=title)
    definitions = [{"name": row["definition"], **row} for row in tables["definitions"]]
    yield "definitions", partial(plotting.definitions_bars, definitions, title=title)
    for name, label in MOVEMENT.items():
        values = np.array([row[name] for row in tables["movement"]]).reshape(len(sample.layers), len(sample.heads))
        diverging = name == "displacement_per_step"
        of_heads = partial(plotting.layer_head_map, values, sample.layers, sample.heads)
        yield name, partial(of_heads, title=title, label=label, diverging=diverging)


def _bounded(row: Row) -> dict[str, float]:
    return {"share": row["share"], "low": row["share_low"], "high": row["share_high"]}


def _incoming_film(counted: Counts, text: TextAxis, title: str, suffix: str, path: Path) -> None:
    steps, names = _frames_of(range(len(counted.means)), suffix), _numbered("layer", counted.sample.layers)
    title = f"{title}: incoming attention, mean over heads"
    scale = (1.0, max(float(np.nanmax(counted.means)), 1.5))
    drawn = frames.incoming_frames(counted.means[steps], names, text, title, steps, scale=scale)
    video.write_video(drawn, path, FPS)


def _films(counted: Counts, text: TextAxis, title: str, options: Options) -> Films:
    sample = counted.sample
    yield "incoming_film", partial(_incoming_film, counted, text, title)
    if sample.pattern_steps:
        layers = _pattern_layers(sample, options)
        for layer in layers if options.layers is not None else [layers[len(layers) // 2]]:
            here = f"{title}, layer {layer}: pattern, mean over heads"
            yield f"pattern_film_layer_{layer:02d}", partial(_pattern_film, sample, layer, text, here)


def _pattern_film(sample: Sample, layer: int, text: TextAxis, title: str, suffix: str, path: Path) -> None:
    steps = _frames_of(sample.pattern_steps, suffix)
    vmax = max(float(np.nanmax(sample.pattern(t, layer))) for t in steps)
    patterns = (sample.pattern(t, layer) for t in steps)
    video.write_video(frames.pattern_frames(patterns, text, title, steps, vmax, text.masked), path, FPS)


def _frames_of(steps: Sequence[int], suffix: str) -> list[int]:
    return [steps[i] for i in evenly_spaced(GIF_FRAMES if suffix == ".gif" else len(steps), len(steps))]


def _heads(sample: Sample, layer: int, names: Sequence[str], text: TextAxis, path: Path, title: str) -> None:
    heatmaps.incoming_grid(sample.incoming(layer=layer).swapaxes(0, 1), names, text, path, title)


def _pattern(sample: Sample, layer: int, t: int, text: TextAxis, path: Path, title: str) -> None:
    title = f"{title}, layer {layer}, step {t}: mean over heads"
    heatmaps.pattern_map(sample.pattern(t, layer), text, path, title, masked=text.masked(t))


def _over_steps(counted: Counts, path: Path, title: str) -> None:
    tokens = counted.flags.sum((1, 2)) / np.maximum(counted.keys.sum((1, 2)), 1)
    pooled = {
        "attention held by sinks": np.nanmean(counted.held, axis=(1, 2)) * 100,
        "heads with a sink": (counted.positions >= 0).mean((1, 2)) * 100,
        "tokens that are sinks": tokens * 100,
    }
    plotting.curve_over_steps(pooled, path, title, "share (%), all layers and heads")


def _unmasking(rows: Sequence[Row], path: Path, title: str) -> None:
    columns = ("offset", "share", "share_low", "share_high")
    offset, share, low, high = (np.array([row[key] for row in rows]) for key in columns)
    plotting.unmasking_curve(offset, share, low, high, path, title)


def _numbered(what: str, numbers: Sequence[int]) -> list[str]:
    return [f"{what} {number}" for number in numbers]


def count_of(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _model(run: Run) -> str:
    return str(run.manifest["model"])
