"""Run folders in, figures, films and tables out; needs no torch.

python plots_creation.py tiny runs --report
python plots_creation.py LLaDA runs --samples 0,2-4 --layers 0,15,31 --format pdf
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from sinks import statistics
from sinks.commandline import Parser, exits_cleanly, needs, parse_indices
from sinks.detection import check_epsilon
from sinks.errors import InputError
from sinks.files import alone_in, explained
from sinks.report import write_report
from sinks.runs import Run, Sample, run_folders

with needs("plots"):
    from sinks import gallery, video
    from sinks.gallery import Options


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("model", metavar="MODEL", help="draw the runs of this model, as inference_model.py was told it")
    parser.add_argument("runs_dir", metavar="RUNS_DIR", type=Path, help="searched with all folders inside; or one run")
    parser.add_argument("--epsilon", type=float, default=3.0, help="sink threshold (default: 3)")
    parser.add_argument("--samples", metavar="0,2-4", help="samples to draw (default: all)")
    parser.add_argument("--layers", metavar="0,3-5", help="layers that get figures of their own (default: all)")
    parser.add_argument("--format", choices=("png", "pdf", "svg"), default="png", help="of the figures (default: png)")
    parser.add_argument("--no_video", action="store_true", help="no films")
    parser.add_argument("--report", action="store_true", help="also report.html: step through the run in a browser")
    parser.add_argument("--compare", metavar="RUN", type=Path, help="another run, beside the first in the report")
    parser.add_argument("--processes", metavar="N", type=int, help="draw in so many (default: one per CPU, at most 4)")
    parser.add_argument("--force", action="store_true", help="draw again what is there")
    return parser.parse_args()


def options_of(given: argparse.Namespace) -> Options:
    films: Sequence[str] = () if given.no_video else (".mp4", ".gif")
    missing = video.ffmpeg_missing()
    if films and missing:
        print(f"no mp4, only GIF: {missing}", file=sys.stderr)
        films = (".gif",)
    return Options(given.epsilon, parse_indices("layers", given.layers), f".{given.format}", films, given.force)


def chosen(run: Run, samples: Sequence[int] | None) -> list[Sample]:
    """The samples to draw; says which are not finished."""
    planned, done = [sample["index"] for sample in run.manifest["samples"]], {s.index: s for s in run.samples}
    wanted = planned if samples is None else [index for index in samples if index in planned]
    missing = [index for index in wanted if index not in done]
    if missing:
        names = ", ".join(map(str, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        print(f"{run.path}: sample {names} not finished, left out; --resume makes it", file=sys.stderr)
    return [done[index] for index in wanted if index in done]


def check_samples(runs: Sequence[Run], samples: Sequence[int] | None) -> None:
    """InputError for a sample that is in none of the runs."""
    planned = {sample["index"] for run in runs for sample in run.manifest["samples"]}
    absent = sorted(set(samples or ()) - planned)
    if absent and planned:
        raise InputError(f"sample {absent[0]} is in no run of this model: they have {min(planned)} to {max(planned)}")


def counterparts(samples: Sequence[Sample], other: Run) -> tuple[list[tuple[Sample, Sample]], int]:
    """Each sample that another run has too, with its own; damaged ones of that are named, left out and counted."""
    beside = {sample.index: sample for sample in other.samples}
    pairs, broken = [], 0
    for mine in samples:
        theirs = beside.get(mine.index)
        if theirs is None:
            continue
        try:
            theirs.check()
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            broken += 1
        else:
            pairs.append((mine, theirs))
    return pairs, broken


def draw_run(run: Run, samples: Sequence[Sample], options: Options, pool: Executor | None) -> list[Sample]:
    """Everything of one run; returns the samples that could be read, and names the others."""
    folder, counts = run.path / "plots", []
    with tqdm(unit="file", desc=run.path.name, disable=None) as bar:
        for sample in samples:
            try:
                counted = statistics.count(run, sample, options.epsilon)
            except InputError as error:
                print(f"error: {error}", file=sys.stderr)
                continue
            jobs = gallery.sample_jobs(run, counted, options)
            draw_all(jobs, folder / sample.folder.name, {"epsilon": options.epsilon}, options, pool, bar)
            statistics.write_table(statistics.head_steps(counted), folder / sample.folder.name / "head_steps.csv")
            counts.append(counted)
        whole = [counted.sample for counted in counts]
        if counts:
            tables = statistics.tables(counts, options.epsilon)
            settings = {"epsilon": options.epsilon, "samples": [sample.index for sample in whole]}
            draw_all(gallery.run_jobs(run, counts, tables, options), folder, settings, options, pool, bar)
            for name, rows in tables.items():
                statistics.write_table(rows, folder / f"{name}.csv")
    return whole


def report_run(run: Run, samples: list[Sample], epsilon: float, other: Run | None) -> int:
    """One page of the run's samples, each beside the same one of the other run, if there is one.

    Returns how many of the other run's samples could not be read.
    """
    pair, broken = None, 0
    if other is not None:
        pairs, broken = counterparts(samples, other)
        samples, pair = [mine for mine, _ in pairs], (other, [theirs for _, theirs in pairs])
        if any(mine.prompt != theirs.prompt for mine, theirs in pairs):
            print(f"{other.path} has other prompts than {run.path}: samples are paired by number", file=sys.stderr)
    if not samples:
        print(f"no report of {run.path}: no sample of it can be shown", file=sys.stderr)
        return broken
    write_report(run, run.path / "report.html", samples, epsilon, pair)
    print(f"report          {run.path / 'report.html'}")
    return broken


def draw_all(
    jobs: Sequence[gallery.Job],
    folder: Path,
    settings: Mapping[str, object],
    options: Options,
    pool: Executor | None,
    bar: tqdm,
) -> None:
    since = gallery.drawn_since(folder, settings, options.force)
    bar.total = (bar.total or 0) + len(jobs)
    for path in gallery.draw(jobs, since, pool):
        bar.set_postfix_str(path.name, refresh=False)
        bar.update()


def runs_of(model: str, runs_dir: Path) -> tuple[list[Run], int]:
    """The model's runs, and how many folders could not be read and may be more of them; those are named."""
    folders, runs = run_folders(runs_dir), []
    if not folders:
        raise InputError(f"there is no run in {runs_dir}; make one: python inference_model.py {model}")
    for folder in folders:
        try:
            runs.append(Run(folder))
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
    mine = [run for run in runs if run.manifest["model"] == model]
    if not mine and runs:
        there = ", ".join(sorted({str(run.manifest["model"]) for run in runs}))
        raise InputError(f"no run of {model} in {runs_dir}; there are runs of {there}")
    return mine, len(folders) - len(runs)


def check_common(runs: Sequence[Run], other: Run) -> None:
    """InputError if another run has no finished sample of those to be shown beside it."""
    theirs = {sample.index for sample in other.samples}
    for run in runs:
        if not theirs & {sample.index for sample in run.samples}:
            raise InputError(f"{other.path} and {run.path} have no finished sample in common, so cannot be compared")


@exits_cleanly
def main() -> None:
    logging.basicConfig(format="%(message)s")
    given = parse()
    check_epsilon(given.epsilon)
    wanted = parse_indices("samples", given.samples)
    options = options_of(given)
    other = None if given.compare is None else Run(given.compare)
    runs, broken = runs_of(given.model, given.runs_dir)
    check_samples(runs, wanted)
    if other is not None:
        check_common(runs, other)
    samples = [chosen(run, wanted) for run in runs]
    for of_run in samples:
        gallery.check_layers(of_run, options.layers)
    try:
        with gallery.processes(given.processes) as pool:
            for run, of_run in zip(runs, samples, strict=True):
                broken += draw_and_report(run, of_run, options, pool, given.report or other is not None, other)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on", file=sys.stderr)
        raise
    if broken:
        raise SystemExit(1)


def draw_and_report(
    run: Run, samples: Sequence[Sample], options: Options, pool: Executor | None, report: bool, other: Run | None
) -> int:
    """Returns how many samples could not be read."""
    folder = run.path / "plots"
    with explained("create", folder):
        folder.mkdir(exist_ok=True)
    with alone_in(folder):
        whole = draw_run(run, samples, options, pool)
        broken = len(samples) - len(whole)
        if whole:
            print(f"plots           {folder}")
            broken += report_run(run, whole, options.epsilon, other) if report else 0
        else:
            with suppress(OSError):  # figures of another time
                folder.rmdir()
    return broken


if __name__ == "__main__":
    main()
