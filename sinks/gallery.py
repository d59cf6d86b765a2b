"""Which figures, films and tables a run gets, and where they lie: ``<run>/plots``, one folder per sample inside.

What is drawn already is skipped, so a stopped command goes on where it was; one figure is held at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from sinks import plotting, statistics, video
from sinks.errors import InputError
from sinks.files import explained
from sinks.plotting import TextAxis
from sinks.runs import Array, Run, Sample, evenly_spaced
from sinks.statistics import Counts

FPS = 8
GIF_FRAMES = 48  # a GIF of all steps would be many times the film's size
PATTERN_MAPS = 4  # steps whose pattern is drawn

Job = tuple[Path, Callable[[Path], object]]


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
    jobs = [*_figures(run, counted, options), *_pattern_figures(run, counted.sample, options)]
    named = [(folder / f"{name}{options.suffix}", draw) for name, draw in jobs]
    films = [*_incoming_films(run, counted), *_pattern_films(run, counted.sample, options)]
    return named + [
        (folder / f"{name}{suffix}", partial(draw, suffix)) for suffix in options.films for name, draw in films
    ]


def run_jobs(run: Run, counts: Sequence[Counts], options: Options) -> list[Job]:
    """Every figure over all samples that were counted."""
    folder, title = run.path / "plots", f"{_model(run)}, {len(counts)} samples, epsilon {options.epsilon:g}"
    return [(folder / f"{name}{options.suffix}", draw) for name, draw in _pooled_figures(counts, title)]


def draw(jobs: Sequence[Job], force: bool) -> Iterator[Path]:
    """Draw what is not there yet; yields each path when it is done with."""
    for path, job in jobs:
        with explained("create", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        if force or not path.exists():
            job(path)
        yield path


def text_axis(run: Run, sample: Sample) -> TextAxis:
    """The key positions of a sample; blocks only where the family has them."""
    sampling, spec = run.manifest["sampling"], run.manifest["spec"]
    blocks = spec["family"] in ("LLaDA", "MMaDA") and sampling["block_len"] < sampling["gen_len"]
    return TextAxis(
        sample.tokens_text, sample.prompt_length, sampling["block_len"] if blocks else None, sample.unmasked_at
    )


def _figures(run: Run, counted: Counts, options: Options) -> Iterator[tuple[str, Callable[[Path], object]]]:
    sample, means, title = counted.sample, counted.means, f"{_model(run)}, sample {counted.sample.index}"
    text, names = text_axis(run, sample), [f"layer {layer}" for layer in sample.layers]
    whole = "mean over layers and heads"
    yield "incoming", partial(_map, means.mean(1), text, title=f"{title}: incoming attention, {whole}")
    yield "incoming_layers", partial(_grid, means.swapaxes(0, 1), names, text, title=f"{title}: mean over heads")
    yield "over_steps", partial(_over_steps, counted, title=title)
    for layer in _layers(sample, options):
        i, of = sample.layers.index(layer), f"layer_{layer:02d}"
        heads, here = [f"head {head}" for head in sample.heads], f"{title}, layer {layer}"
        yield f"incoming_{of}", partial(_map, means[:, i], text, title=f"{here}: mean over heads")
        yield f"heads_{of}", partial(_heads, sample, layer, heads, text, title=here)
        paths = counted.positions[:, i].swapaxes(0, 1)
        yield f"strongest_{of}", partial(_paths, paths, heads, text, title=f"{here}: strongest sink")


def _pattern_figures(run: Run, sample: Sample, options: Options) -> Iterator[tuple[str, Callable[[Path], object]]]:
    steps = sample.pattern_steps
    for t in [steps[i] for i in evenly_spaced(PATTERN_MAPS, len(steps))] if steps else ():
        for layer in _pattern_layers(sample, options):
            yield f"pattern_layer_{layer:02d}_step_{t:04d}", partial(_pattern, run, sample, layer, t)


def _pattern_layers(sample: Sample, options: Options) -> Sequence[int]:
    """The chosen layers; of all, the first, the middle and the last."""
    if options.layers is not None:
        return _layers(sample, options)
    return [sample.layers[i] for i in evenly_spaced(3, len(sample.layers))]


def _layers(sample: Sample, options: Options) -> Sequence[int]:
    if options.layers is None:
        return sample.layers
    absent = sorted(set(options.layers) - set(sample.layers))
    if absent:
        kept = ", ".join(map(str, sample.layers))
        raise InputError(f"layers {', '.join(map(str, absent))} are not in {sample.folder}: there are {kept}")
    return options.layers


def _pooled_figures(counts: Sequence[Counts], title: str) -> Iterator[tuple[str, Callable[[Path], object]]]:
    sample = counts[0].sample
    classes = [{"name": row["class"], **_plain(row)} for row in statistics.class_rows(counts)]
    yield "classes", partial(plotting.class_bars, classes, title=title)
    epsilons = {f"{share:.0%} unflagged": value for share, value in statistics.epsilon_for(counts).items()}
    flagged = np.array([row["share_of_tokens"] for row in statistics.epsilon_rows(counts)])
    marks = {name: value for name, value in epsilons.items() if value <= statistics.EPSILONS[-1]}
    yield "epsilon", partial(plotting.epsilon_curve, statistics.EPSILONS, flagged, title=title, marks=marks)
    around = list(statistics.unmasking_rows(counts))
    if around:
        yield "unmasking", partial(_unmasking, around, title=title)
    rows = [{"name": row["definition"], **row} for row in statistics.definition_rows(counts)]
    yield "definitions", partial(plotting.definitions_bars, rows, title=title)
    moved, shape = list(statistics.movement_rows(counts)), (len(sample.layers), len(sample.heads))
    for name, label in (
        ("displacement_per_step", "signed displacement of the strongest sink (tokens per step, right positive)"),
        ("dwell_steps", "dwell time of the strongest sink (steps)"),
        ("persistence", "share of sinks that still are one a step later"),
    ):
        values = np.array([row[name] for row in moved]).reshape(shape)
        named = partial(plotting.layer_head_map, values, sample.layers, sample.heads, title=title, label=label)
        yield name, partial(named, diverging=name.startswith("displacement"))


def _plain(row: statistics.Row) -> dict[str, object]:
    return {"series": row["series"], "share": row["share"], "low": row["share_low"], "high": row["share_high"]}


def _incoming_films(run: Run, counted: Counts) -> Iterator[tuple[str, Callable[[str, Path], object]]]:
    yield "incoming_film", partial(_incoming_film, run, counted)


def _incoming_film(run: Run, counted: Counts, suffix: str, path: Path) -> None:
    steps = _frames_of(range(len(counted.means)), suffix)
    names = [f"layer {layer}" for layer in counted.sample.layers]
    title = f"{_model(run)}, sample {counted.sample.index}: incoming attention, mean over heads"
    scale = (1.0, max(float(np.nanmax(counted.means)), 1.5))
    text = text_axis(run, counted.sample)
    frames = video.incoming_frames(counted.means[steps], names, text, title, steps, scale=scale)
    video.write_video(frames, path, FPS)


def _pattern_films(run: Run, sample: Sample, options: Options) -> Iterator[tuple[str, Callable[[str, Path], object]]]:
    if sample.pattern_steps:
        layers = _pattern_layers(sample, options)
        for layer in layers if options.layers is not None else [layers[len(layers) // 2]]:
            yield f"pattern_film_layer_{layer:02d}", partial(_pattern_film, run, sample, layer)


def _pattern_film(run: Run, sample: Sample, layer: int, suffix: str, path: Path) -> None:
    steps, text = _frames_of(sample.pattern_steps, suffix), text_axis(run, sample)
    title = f"{_model(run)}, sample {sample.index}, layer {layer}: pattern, mean over heads"
    vmax = max(float(np.nanmax(sample.pattern(t, layer))) for t in steps)
    patterns = (sample.pattern(t, layer) for t in steps)
    video.write_video(video.pattern_frames(patterns, text, title, steps, vmax, text.masked), path, FPS)


def _frames_of(steps: Sequence[int], suffix: str) -> list[int]:
    return [steps[i] for i in evenly_spaced(GIF_FRAMES if suffix == ".gif" else len(steps), len(steps))]


def _map(c: Array, text: TextAxis, path: Path, title: str) -> None:
    plotting.incoming_map(c, text, path, title)


def _grid(c: Array, names: Sequence[str], text: TextAxis, path: Path, title: str) -> None:
    plotting.incoming_grid(c, names, text, path, title)


def _paths(positions: Array, names: Sequence[str], text: TextAxis, path: Path, title: str) -> None:
    plotting.strongest_paths(positions, names, text, path, title)


def _heads(sample: Sample, layer: int, names: Sequence[str], text: TextAxis, path: Path, title: str) -> None:
    plotting.incoming_grid(sample.incoming(layer=layer).swapaxes(0, 1), names, text, path, title)


def _pattern(run: Run, sample: Sample, layer: int, t: int, path: Path) -> None:
    text, title = (
        text_axis(run, sample),
        f"{_model(run)}, sample {sample.index}, layer {layer}, step {t}: mean over heads",
    )
    plotting.pattern_map(sample.pattern(t, layer), text, path, title, masked=text.masked(t))


def _over_steps(counted: Counts, path: Path, title: str) -> None:
    tokens = counted.flags.sum((1, 2)) / np.maximum(counted.keys.sum((1, 2)), 1)
    pooled = {
        "attention held by sinks": np.nanmean(counted.held, axis=(1, 2)) * 100,
        "heads with a sink": (counted.positions >= 0).mean((1, 2)) * 100,
        "tokens that are sinks": tokens * 100,
    }
    plotting.curve_over_steps(pooled, path, title, "share (%), all layers and heads")


def _unmasking(rows: Sequence[statistics.Row], path: Path, title: str) -> None:
    columns = ("offset", "share", "share_low", "share_high")
    offset, share, low, high = (np.array([row[key] for row in rows]) for key in columns)
    plotting.unmasking_curve(offset, share, low, high, path, title)


def _model(run: Run) -> str:
    return str(run.manifest["model"])
