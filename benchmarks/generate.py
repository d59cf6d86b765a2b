"""Whole generations: the plain loop, ours, ours with everything stored in a run folder, and dumping every pattern.

    python benchmarks/generate.py --out generate.json
    python benchmarks/generate.py --length 2048 --steps 64

"Stored" is what inference_model.py does with one sample: incoming attention of all layers and heads at every step, as
safetensors, on the disk and renamed when the clock stops. The run folder is opened before, as once in every run.
The pattern dump copies every pattern as float16 to host memory and writes nothing; a few steps are timed and scaled up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from plain import plain_steps, published
from shapes import options, random_model, start
from torch import Tensor

from sinks import Capture, inference
from sinks.checkpoints import tokenizer_in
from sinks.families import LLADA, MODELS
from sinks.models import LanguageModel
from sinks.plan import Plan, Settings
from sinks.prompts import Prompt
from sinks.samplers import Canvas, denoise
from sinks.sampling import Sampling
from sinks.writer import Layout

DUMPED = 4  # steps of the pattern dump


def seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = perf_counter()
    run()
    torch.cuda.synchronize()
    return perf_counter() - began


def drain(steps: Iterator[object]) -> None:
    for _ in steps:
        pass


def one_sample(lm: LanguageModel, canvas: Canvas, sampling: Sampling, capture: Capture) -> Plan:
    """The plan of a run, for the same code that the command line calls."""
    ids, spec = canvas.tokens[0, : canvas.prompt_lengths[0]].tolist(), lm.spec
    layout = Layout(
        sampling.steps, canvas.tokens.shape[1], range(spec.layers), range(spec.heads), spec.layers, spec.heads
    )
    prompt = Prompt("benchmark", "random tokens")
    return Plan(Settings("benchmark"), [prompt], lm, sampling, capture, None, [ids], [layout])


def seconds_stored(plan: Plan) -> float:
    command = ["benchmarks/generate.py"]
    with TemporaryDirectory() as folder, inference.open_run(plan, Path(folder), None, command) as launch:
        return seconds(lambda: inference.fill(plan, launch))


@torch.no_grad()
def dumped(lm: LanguageModel, tokens: Tensor) -> None:
    """Every pattern of some steps, as anyone would get them: materialised, float16, host memory."""
    with published(lm, "eager"):
        for _ in range(DUMPED):
            patterns = lm.model(tokens.to(lm.device), use_cache=False, output_attentions=True).attentions
            _ = [pattern.half().cpu() for pattern in patterns]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    lm = random_model(given.shape, given.attention, given.layers)
    lm.tokenizer = tokenizer_in(Path(MODELS["tiny"][1]), LLADA, False)
    (canvas, sampling), capture = start(lm, given.length, given.steps, given.temperature), Capture()
    plan = one_sample(lm, canvas, sampling, capture)
    cases: dict[str, Callable[[], float]] = {
        "plain loop": lambda: seconds(lambda: drain(plain_steps(lm, canvas.tokens, sampling))),
        "ours": lambda: seconds(lambda: drain(denoise(lm, canvas, sampling))),
        "ours, captured, not stored": lambda: seconds(lambda: drain(denoise(lm, canvas, sampling, capture))),
        "ours, captured and stored": lambda: seconds_stored(plan),
    }
    drain(islice(denoise(lm, canvas, sampling, capture), 3))  # warm-up: compilers and libraries
    times: dict[str, list[float]] = {name: [] for name in [*cases, "every pattern dumped (scaled up)"]}
    for _ in range(given.rounds):
        for name, case in cases.items():
            times[name].append(case())
        each = seconds(lambda: dumped(lm, canvas.tokens)) / DUMPED
        times["every pattern dumped (scaled up)"].append(each * sampling.steps)
    middle = {name: median(found) for name, found in times.items()}
    for name, found in middle.items():
        print(f"S {given.length}  {name:36}{found:9.2f} s{found / middle['plain loop']:8.2f} of the plain loop")
    for name in ("ours", "ours, captured, not stored"):
        print(f"captured and stored against {name}: {middle['ours, captured and stored'] / middle[name]:.3f}")
    if given.out:
        rows = [{"case": name, "seconds": found} for name, found in middle.items()]
        given.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "S": given.length, "rows": rows}))


if __name__ == "__main__":
    main()
