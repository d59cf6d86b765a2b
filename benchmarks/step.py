"""One denoising step of an 8B model: the plain loop beside ours, with and without capture, blocking and a CUDA graph.

    python benchmarks/step.py --out step.json
    python benchmarks/step.py --shape Dream-7B --lengths 512 2048 --temperatures 0 1

The plain loop is what LLaDA's authors publish: torch's own attention, logits of all positions, no graph, nothing
captured. Every case is measured in turn, several rounds; the medians are shown. Weights are random.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter

import torch
from plain import plain_steps
from shapes import options, parameters, peak_memory, random_model, start
from tqdm import tqdm

import sinks
from sinks import replay
from sinks.models import LanguageModel
from sinks.observer import Step
from sinks.samplers import denoise

BANDWIDTH, PRODUCTS = 4.55e12, 790e12  # bytes and FLOP a second of an H200, as measured with a copy and a large product
WARM, TIMED = 6, 10
MASKING = sinks.SinkMasking(top_k=1)
CASES = ("plain loop", "ours", "ours, capture", "ours, capture and blocking", "ours, capture, no graph")


@contextmanager
def no_graph() -> Iterator[None]:
    before = replay._obstacle
    replay._obstacle = lambda model: "this benchmark says so"
    try:
        yield
    finally:
        replay._obstacle = before


def steps_of(case: str, lm: LanguageModel, length: int, temperature: float) -> Generator[Step | None, None, None]:
    gen_len = min(256, length // 2)
    canvas, sampling = start(lm, length, gen_len, temperature)
    if case == "plain loop":
        yield from plain_steps(lm, canvas.tokens, sampling)
        return
    capture = sinks.Capture() if "capture" in case else None
    masking = MASKING if "blocking" in case else None
    if "no graph" in case:
        with no_graph():
            yield from denoise(lm, canvas, sampling, capture, masking)
    else:
        yield from denoise(lm, canvas, sampling, capture, masking)


def timed(steps: Generator[Step | None, None, None]) -> tuple[float, float, float]:
    """Median seconds of a step after the warm-up, seconds of the first, peak GiB beside the weights."""
    times = []
    with peak_memory() as peak:
        for _ in range(WARM + TIMED):
            torch.cuda.synchronize()
            began = perf_counter()
            next(steps)
            torch.cuda.synchronize()
            times.append(perf_counter() - began)
        steps.close()
        return median(times[WARM:]), times[0], peak()


def measure(lm: LanguageModel, length: int, temperature: float, rounds: int) -> list[dict[str, float | str]]:
    found: dict[str, list[tuple[float, float, float]]] = {case: [] for case in CASES}
    for _ in range(rounds):
        for case in CASES:
            found[case].append(timed(steps_of(case, lm, length, temperature)))
    middle = {case: median(seconds for seconds, _, _ in of) for case, of in found.items()}
    products = 2 * parameters(lm) * length / PRODUCTS
    weights = 2 * parameters(lm) / BANDWIDTH
    limit = max(products, weights)
    return [
        {
            "S": length,
            "temperature": temperature,
            "case": case,
            "ms": 1e3 * seconds,
            "of_plain_loop": seconds / middle["plain loop"],
            "share_of_limit": limit / seconds,
            "peak_gib_over_weights": max(peak for _, _, peak in found[case]),
            "first_step_s": found[case][0][1],
        }
        for case, seconds in middle.items()
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    lm = random_model(given.shape, given.attention, given.layers)
    rows = []
    for length in tqdm(given.lengths, desc="lengths"):
        for temperature in given.temperatures:
            rows += measure(lm, length, temperature, given.rounds)
            for row in rows[-len(CASES) :]:
                tqdm.write(
                    f"S {row['S']:5}  T {row['temperature']:g}  {row['case']:28}{row['ms']:8.2f} ms"
                    f"{row['of_plain_loop']:8.2f} of the plain loop{100 * row['share_of_limit']:6.0f} % of the limit"
                    f"{row['peak_gib_over_weights']:7.2f} GiB over the weights"
                )
    if given.out:
        device = torch.cuda.get_device_name()
        given.out.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
