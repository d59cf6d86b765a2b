"""Peak GPU memory beside the weights, over lengths and over denoising steps: the plain loop and ours with capture.

python benchmarks/memory.py --out memory.json
"""

from __future__ import annotations

import json
from itertools import islice

import torch
from shapes import options, peak_memory, random_model
from step import steps_of

from sinks.models import LanguageModel

CASES = ("plain loop", "ours, capture", "ours, capture and blocking")


def peak_of(lm: LanguageModel, case: str, length: int, temperature: float, steps: int) -> float:
    """GiB that so many steps take beside the weights."""
    with peak_memory() as peak:
        run = steps_of(case, lm, length, temperature)
        for _ in islice(run, steps):
            pass
        run.close()
        return peak()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 64])
    given = parser.parse_args()
    lm = random_model(given.shape, given.attention, given.layers)
    rows = []
    for length in given.lengths:
        for temperature in (0.0, 1.0):
            for case in CASES:
                for steps in given.steps if case != "plain loop" else given.steps[:1]:
                    found = peak_of(lm, case, length, temperature, steps)
                    print(f"S {length:5}  T {temperature:g}  {case:28}{steps:4} steps{found:8.2f} GiB")
                    rows.append(dict(S=length, temperature=temperature, case=case, steps=steps, gib=found))
    if given.out:
        given.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
