"""The embedded model on a CPU: plain generation, with capture, with blocking, and the two ways to compute attention.

    python benchmarks/cpu.py --out cpu.json

Run it before and after a change: what makes a GPU faster must not make a laptop slower. Each case in turn, several
rounds, medians; ratios are to the plain generation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import sinks
from sinks.prompts import load_prompts

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("chunked", {}),
    "capture": ("chunked", {"capture": sinks.Capture()}),
    "capture and blocking": ("chunked", {"capture": sinks.Capture(), "masking": sinks.SinkMasking(top_k=1)}),
    "full patterns": ("chunked", {"capture": sinks.Capture(patterns="full")}),
    "reference attention, capture": ("reference", {"capture": sinks.Capture()}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gen_len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    models = {path: sinks.load("tiny", device="cpu", attention=path) for path in ("chunked", "reference")}
    question = load_prompts("problems", num_samples=1)[0].text
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(given.rounds):
        for name, (path, options) in CASES.items():
            began = perf_counter()
            sinks.generate(models[path], question, gen_len=given.gen_len, **options)
            times[name].append(perf_counter() - began)
    middle = {name: median(found) for name, found in times.items()}
    for name, found in middle.items():
        print(f"{name:32}{1e3 * found / given.gen_len:8.2f} ms a step{found / middle['plain']:8.2f} of plain")
    if given.out:
        given.out.write_text(json.dumps({"threads": given.threads, "torch": torch.__version__, "seconds": middle}))


if __name__ == "__main__":
    main()
