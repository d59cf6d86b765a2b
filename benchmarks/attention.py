"""What recording and blocking cost in one layer's attention, beside torch's own.

    python benchmarks/attention.py --out attention.json

Every way is a CUDA graph over several sets of inputs, together larger than the L2 cache; the ways take turns, and the
median of the rounds counts. Only the dump, which waits for the host, is timed as it runs. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from sinks.attention import Ask, Measure, Visible, chunked
from sinks.fused import fused

SUMS = frozenset({Measure()})
EVERYTHING = Visible(None, None, None, 0)
ROTATED_BYTES = 256 * 2**20
PATTERN_BYTES = 8 * 2**30  # larger patterns are not made, in whole or in chunks


@dataclass(frozen=True)
class Inputs:
    """Queries, keys and values (B, H, S, D) of one layer; blocked: (1, B, H, S) bool, the first key of every head."""

    query: Tensor
    key: Tensor
    value: Tensor
    blocked: Tensor

    def ask(self, ask: Ask, compute: Callable[..., object] = fused) -> None:
        compute(self.query, self.key, self.value, self.query.shape[-1] ** -0.5, EVERYTHING, ask, 0)

    def pattern(self) -> Tensor:
        return (self.query @ self.key.transpose(-1, -2) * self.query.shape[-1] ** -0.5).softmax(-1)

    @property
    def pattern_bytes(self) -> int:
        batch, heads, length, _ = self.query.shape
        return batch * heads * length**2 * self.query.element_size()


def sdpa(x: Inputs) -> None:
    F.scaled_dot_product_attention(x.query, x.key, x.value)


def plain(x: Inputs) -> None:
    x.ask(Ask())


def captured(x: Inputs) -> None:
    x.ask(Ask(SUMS))


def blocked(x: Inputs) -> None:
    x.ask(Ask(blocked=x.blocked))


def blocked_and_captured(x: Inputs) -> None:
    x.ask(Ask(SUMS, blocked=x.blocked))


def silenced_and_captured(x: Inputs) -> None:
    x.ask(Ask(SUMS, blocked=x.blocked, path="values"))


def chunked_and_captured(x: Inputs) -> None:
    x.ask(Ask(SUMS), chunked)


def eager(x: Inputs) -> None:
    """The pattern in memory, mixed with the values and summed."""
    pattern = x.pattern()
    pattern.sum(-2, dtype=torch.float32)
    pattern @ x.value


def dumped(x: Inputs) -> None:
    """The pattern in memory, mixed with the values and copied to the host."""
    pattern = x.pattern()
    pattern @ x.value
    pattern.cpu()


GRAPHED = (sdpa, plain, captured, blocked, blocked_and_captured, silenced_and_captured, chunked_and_captured, eager)
SLOW = (chunked_and_captured, eager, dumped)


def make(batch: int, heads: int, length: int, dim: int) -> list[Inputs]:
    """So many sets that one round drives every other out of the cache."""
    count = min(max(2, ROTATED_BYTES // (6 * batch * heads * length * dim)), 16)
    first = torch.zeros(1, batch, heads, length, dtype=torch.bool, device="cuda")
    first[..., 0] = True
    sets = []
    for _ in range(count):
        projected = torch.randn(3, batch, length, heads, dim, device="cuda", dtype=torch.bfloat16)
        query, key, value = projected.transpose(2, 3)
        sets.append(Inputs(query, key, value, first))
    return sets


def recorded(way: Callable[[Inputs], None], sets: Sequence[Inputs]) -> Callable[[], None]:
    """One call that does the work for all sets."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        way(sets[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs in sets:
            way(inputs)
    return graph.replay


def timed(run: Callable[[], object]) -> float:
    """Milliseconds on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure(batch: int, heads: int, length: int, dim: int, rounds: int) -> dict[str, float | None]:
    """Median milliseconds of one call by name of the way; None where the pattern is too large."""
    sets = make(batch, heads, length, dim)
    fits = sets[0].pattern_bytes <= PATTERN_BYTES
    runs = {way.__name__: recorded(way, sets) for way in GRAPHED if fits or way not in SLOW}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timed(run) / len(sets))
    if fits:
        times["dumped"] = [timed(lambda: dumped(sets[0])) for _ in range(3)]
    names = [way.__name__ for way in (*GRAPHED, dumped)]
    return {name: median(times[name]) if name in times else None for name in names}


@dataclass(frozen=True)
class Row:
    batch: int
    length: int
    milliseconds: dict[str, float | None]

    @property
    def heading(self) -> str:
        return " | ".join(["batch", "length", *(f"{name:>21}" for name in self.milliseconds)])

    def __str__(self) -> str:
        base = self.milliseconds["sdpa"]
        assert base is not None
        cells = ["too large" if x is None else f"{x:.3f} ({x / base:.2f})" for x in self.milliseconds.values()]
        return " | ".join([f"{self.batch:5}", f"{self.length:6}", *(f"{cell:>21}" for cell in cells)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    rows: list[Row] = []
    for batch in options.batches:
        for length in options.lengths:
            rows.append(Row(batch, length, measure(batch, options.heads, length, options.dim, options.rounds)))
            if len(rows) == 1:
                sys.stdout.write(f"milliseconds (times sdpa's)\n{rows[0].heading}\n")
            sys.stdout.write(f"{rows[-1]}\n")
            sys.stdout.flush()
            torch.cuda.empty_cache()
    if options.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        about |= {name: getattr(options, name) for name in ("heads", "dim", "rounds")}
        options.out.write_text(json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    with torch.no_grad():
        main()
