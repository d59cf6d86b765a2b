"""Peak GPU memory beside the weights, over lengths and over denoising steps: the plain loop and ours with capture.

python benchmarks/memory.py --out memory.json
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

import torch
from shapes import SHAPES, random_model
from step import steps_of

from sinks.models import LanguageModel

CASES = ("plain loop", "ours, capture", "ours, capture and blocking")


def peak(lm: LanguageModel, case: str, length: int, temperature: float, steps: int) -> float:
    """GiB that so many steps take beside the weights."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run = steps_of(case, lm, length, temperature)
    for _ in islice(run, steps):
        pass
    run.close()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="LLaDA-8B")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lm = random_model(given.shape, given.attention, given.layers)
    rows = []
    for length in given.lengths:
        for temperature in (0.0, 1.0):
            for case in CASES:
                for steps in given.steps if case != "plain loop" else given.steps[:1]:
                    found = peak(lm, case, length, temperature, steps)
                    print(f"S {length:5}  T {temperature:g}  {case:28}{steps:4} steps{found:8.2f} GiB")
                    rows.append(dict(S=length, temperature=temperature, case=case, steps=steps, gib=found))
    if given.out:
        given.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
