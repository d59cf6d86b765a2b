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
from pathlib import Path

from tqdm import tqdm

from sinks import gallery, statistics, video
from sinks.commandline import Parser, exits_cleanly, parse_indices
from sinks.detection import check_epsilon
from sinks.errors import InputError
from sinks.gallery import Options
from sinks.report import write_report
from sinks.runs import Run, Sample, run_folders


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
        names = ", ".join(map(str, missing))
        print(f"{run.path}: sample {names} not finished, left out; --resume makes it", file=sys.stderr)
    return [done[index] for index in wanted if index in done]


def draw_run(run: Run, samples: Sequence[Sample], options: Options, pool: Executor | None) -> list[Sample]:
    """Everything of one run; returns the samples that could be read, and names the others."""
    folder, counts, tables = run.path / "plots", [], {}
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


def report_run(run: Run, samples: Sequence[Sample], epsilon: float, compared: Path | None) -> None:
    """One page of the run's samples, each beside the same one of the other run, if there is one."""
    pair = None
    if compared is not None:
        other = Run(compared)
        beside = {sample.index: sample for sample in other.samples}
        samples = [sample for sample in samples if sample.index in beside]
        pair = (other, [beside[sample.index] for sample in samples])
    write_report(run, run.path / "report.html", samples, epsilon, pair)
    print(f"report          {run.path / 'report.html'}")


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


@exits_cleanly
def main() -> None:
    logging.basicConfig(format="%(message)s")
    given = parse()
    check_epsilon(given.epsilon)
    wanted = parse_indices("samples", given.samples)
    options = options_of(given)
    runs, broken = runs_of(given.model, given.runs_dir)
    samples = [chosen(run, wanted) for run in runs]
    for of_run in samples:
        gallery.check_layers(of_run, options.layers)
    with gallery.processes(given.processes) as pool:
        for run, of_run in zip(runs, samples, strict=True):
            whole = draw_run(run, of_run, options, pool)
            broken += len(of_run) - len(whole)
            print(f"plots           {run.path / 'plots'}")
            if whole and (given.report or given.compare):
                report_run(run, whole, given.epsilon, given.compare)
    if broken:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
