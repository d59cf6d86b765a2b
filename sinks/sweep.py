"""How much does a model need its sinks? Accuracy over k masked keys and controls of equal budget, on the same items.

    python -m sinks.sweep tiny tiny-dream tiny-ar --tasks problems --include_path tests/tasks \\
        --apply_chat_template --batch_size 50 --model_args gen_len=64 --out sweep

Every answer is kept as soon as it is given: the same command continues an interrupted sweep.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sinks import arguments, checkpoints
from sinks.attention import Capture
from sinks.commandline import exits_cleanly, needs
from sinks.diagnosis import sink_profile
from sinks.errors import InputError
from sinks.files import write_text
from sinks.masking import SinkMasking
from sinks.processes import processes
from sinks.samplers import collect, denoise, lay_out

with needs("eval"):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import setup_logging, simple_parse_args_string
    from scipy.stats import binomtest

    from sinks.evaluation import read_preset
    from sinks.harness import EvaluatedModel
with needs("plots"):
    from sinks.plotting import accuracy_by_k

_log = logging.getLogger(__name__)

CONTROLS = ("sinks", "random", "bottom")
PATHS = ("scores", "values")
COLUMNS = ("model", "path", "control", "k", "n", "correct", "accuracy", "low", "high", "p_unmasked", "p_random")


@dataclass(frozen=True)
class Cell:
    """One setting of the sweep."""

    model: str
    k: int
    control: str = "none"
    path: str = "scores"

    def masking(self, epsilon: float) -> SinkMasking | None:
        return SinkMasking(epsilon, top_k=self.k, control=self.control, path=self.path) if self.k else None


Items = dict[str, bool]  # an item, by document and prompt, and whether it was answered correctly


def cells(model: str, ks: Sequence[int], controls: Sequence[str], paths: Sequence[str]) -> Iterator[Cell]:
    """The unmasked run first, then every k under every control."""
    yield Cell(model, 0)
    for path in paths:
        for k in ks:
            for control in controls:
                if k > 0:
                    yield Cell(model, k, control, path)


def table(results: Mapping[Cell, Items]) -> list[dict[str, Any]]:
    """One row per cell: accuracy with its Wilson interval, and exact paired tests (McNemar) on the same items.

    Raises:
        InputError: two cells of one model did not answer the same items.
    """
    rows = []
    for cell, items in results.items():
        unmasked = results.get(Cell(cell.model, 0))
        random = results.get(Cell(cell.model, cell.k, "random", cell.path))
        correct, n = sum(items.values()), len(items)
        low, high = binomtest(correct, n).proportion_ci(method="wilson")
        rows.append(
            {
                **asdict(cell),
                **{"n": n, "correct": correct, "accuracy": 100 * correct / n, "low": 100 * low, "high": 100 * high},
                "p_unmasked": paired_p(items, unmasked) if cell.k and unmasked else None,
                "p_random": paired_p(items, random) if cell.control in ("sinks", "bottom") and random else None,
            }
        )
    return rows


def paired_p(these: Items, those: Items) -> float:
    """Two-sided exact test that both answer the same items equally well (McNemar, binomial)."""
    if these.keys() != those.keys():
        raise InputError("two settings answered different items, so they cannot be compared; use one --limit for all")
    won = sum(these[item] and not those[item] for item in these)
    lost = sum(those[item] and not these[item] for item in these)
    return float(binomtest(won, won + lost).pvalue) if won + lost else 1.0


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| model | path | control | k | accuracy (95 % interval) | p against k = 0 | p against random |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        interval = f"{row['accuracy']:.1f} ({row['low']:.1f}–{row['high']:.1f})"
        p_values = " | ".join("" if row[name] is None else f"{row[name]:.2g}" for name in ("p_unmasked", "p_random"))
        lines.append(f"| {row['model']} | {row['path']} | {row['control']} | {row['k']} | {interval} | {p_values} |")
    return "\n".join(lines) + "\n"


def run_cell(
    model: EvaluatedModel, cell: Cell, options: argparse.Namespace, tasks: TaskManager
) -> tuple[Items, list[str]]:
    """Evaluate one setting through lm-eval; what was answered before is not asked again. Items, and their prompts."""
    model.with_masking(cell.masking(options.epsilon))
    results = simple_evaluate(
        model=model,
        tasks=[options.tasks],
        task_manager=tasks,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        apply_chat_template=options.apply_chat_template,
        fewshot_as_multiturn=options.apply_chat_template,
        confirm_run_unsafe_code=options.confirm_run_unsafe_code,
        log_samples=True,
        bootstrap_iters=0,
    )
    if results is None:  # a process other than the first
        return {}, []
    metric, _, chosen = options.report.partition(",")
    samples = [s for s in results["samples"][options.tasks] if chosen in ("", s["filter"])]
    if not samples or metric not in samples[0]:
        known = sorted({f"{name},{s['filter']}" for s in results["samples"][options.tasks] for name in s["metrics"]})
        raise InputError(f"the task reports no {options.report}; use --report with one of {', '.join(known)}")
    prompts = [str(s["arguments"][0][0]) for s in samples]
    return {f"{s['doc_id']} {s['doc_hash']} {s['prompt_hash']}": bool(s[metric]) for s in samples}, prompts


def profile(model: EvaluatedModel, prompts: Sequence[str]) -> dict[str, float]:
    """What the strongest columns of the unmasked model are like; see :mod:`sinks.diagnosis`."""
    canvas = lay_out(model.lm, [model.tok_encode(prompt) for prompt in prompts], model.settings.sampling)
    steps = denoise(model.lm, canvas, model.settings.sampling, Capture(value_norm=True))
    generation = collect(model.lm, canvas, model.settings.sampling, steps)
    assert generation.incoming is not None and generation.value_norm is not None
    return sink_profile(generation.incoming, generation.value_norm)


def run(options: argparse.Namespace) -> tuple[dict[Cell, Items], dict[str, dict[str, float]]]:
    """All cells of all models, and the profile of each model."""
    tasks = TaskManager(include_path=options.include_path)
    results: dict[Cell, Items] = {}
    profiles: dict[str, dict[str, float]] = {}
    for name in options.models:
        model = _model(name, options)
        for cell in cells(name, options.k, options.control, options.path):
            _log.info("%s", cell)
            results[cell], prompts = run_cell(model, cell, options, tasks)
            if cell.k == 0 and options.profile:
                profiles[name] = profile(model, prompts[: options.profile])
    return results, profiles


def _model(name: str, options: argparse.Namespace) -> EvaluatedModel:
    """The model under the arguments of its family's evaluation script."""
    given = {**options.preset_args, **options.model_args}
    family = checkpoints.identify(name, given.get("family"), given.get("revision"))
    script = next(script for script, families in arguments.FAMILIES_OF.items() if family in families)
    answers = str(Path(options.out) / "answers.db")
    own = {"pretrained": name, "batch_size": options.batch_size, "device": options.device, "answers": answers}
    return EvaluatedModel.of(arguments.resolve(script, {**given, **own}))


def write(out: Path, rows: list[dict[str, Any]], profiles: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """table.csv, table.md, table.json and accuracy.png, each whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(out / "table.csv", text.getvalue())
    write_text(out / "table.md", markdown(rows))
    everything = {"settings": settings, "rows": rows, "profiles": profiles}
    write_text(out / "table.json", json.dumps(everything, indent=1, default=str) + "\n")
    accuracy_by_k(rows, out / "accuracy.png")


def main() -> None:
    """The command line; see the module's docstring."""
    options = _options()
    setup_logging()
    results, profiles = run(options)
    if processes(options.device).is_main_process:
        rows = table(results)
        write(Path(options.out), rows, profiles, vars(options))
        sys.stdout.write(markdown(rows) + f"written to {options.out}\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sinks.sweep", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", help="names, folders or hub ids")
    parser.add_argument("--preset", help="take model, task and sampling from a preset")
    parser.add_argument("--tasks", help="the lm-eval task to answer")
    parser.add_argument("--include_path", help="a folder with further tasks")
    parser.add_argument("--report", default="exact_match", help="metric[,filter] to count as correct")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 5, 10], help="keys masked per layer, head and step")
    parser.add_argument("--control", nargs="+", default=list(CONTROLS), choices=CONTROLS)
    parser.add_argument("--path", nargs="+", default=["scores"], choices=PATHS)
    parser.add_argument("--epsilon", type=float, default=0.0)
    parser.add_argument("--limit", type=int, help="items per cell")
    parser.add_argument("--num_fewshot", type=int)
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model_args", type=simple_parse_args_string, default={}, help="as for the evaluation scripts")
    parser.add_argument("--apply_chat_template", action="store_true")
    parser.add_argument("--confirm_run_unsafe_code", action="store_true")
    parser.add_argument("--profile", type=int, default=16, metavar="N", help="items for the reading of sinks (0: none)")
    parser.add_argument("--out", default="sweep", help="folder for the answers and the table")
    options = parser.parse_args()
    _apply_preset(options)
    if not options.models or not options.tasks:
        raise InputError("name at least one model and --tasks, or give --preset")
    if min(options.k) < 0 or options.batch_size < 1 or (options.limit is not None and options.limit < 1):
        raise InputError("--k must be 0 or more, --batch_size and --limit 1 or more")
    return options


def _apply_preset(options: argparse.Namespace) -> None:
    preset = read_preset(options.preset) if options.preset else {}
    options.preset_args = dict(preset.get("model_args", {}))
    source = options.preset_args.pop("pretrained", None)
    options.models = options.models or ([source] if source else [])
    options.tasks = options.tasks or next(iter(preset.get("tasks", [])), None)
    options.num_fewshot = preset.get("num_fewshot") if options.num_fewshot is None else options.num_fewshot
    options.apply_chat_template |= bool(preset.get("apply_chat_template"))
    if preset.get("report") and options.report == "exact_match":
        options.report = preset["report"]


if __name__ == "__main__":
    exits_cleanly(main)()
