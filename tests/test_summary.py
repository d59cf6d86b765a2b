"""The figures that are printed after a run, on a run made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sinks.runs import Run, create_run
from sinks.summary import summarise
from sinks.writer import Layout, SampleWriter

MASK = 9


def write(run: Path, index: int, final: list[int], text: str, reference: str | None) -> None:
    """One layer, two heads, two steps, ten keys: head 0 has a sink that moves from key 0 to key 1, head 1 has none."""
    layout = Layout(2, 10, [0], [0, 1], 1, 2)
    first, second = np.full((1, 2, 10), 0.5), np.full((1, 2, 10), 0.5)
    first[0, 0, 0] = second[0, 0, 1] = 5.5
    first[0, 1] = second[0, 1] = np.linspace(1.1, 0.9, 10)
    with SampleWriter(run, index, layout, np.full(10, MASK)) as sample:
        for t, incoming in enumerate((first, second)):
            sample.step(t, np.array(final), np.zeros(10), incoming)
        timings = {"seconds": 2.0, "samples_together": 2}
        info = {"text": text, "reference": reference, "prompt_length": 4, "tokens_text": list("abcdefghij")}
        sample.finish({**info, "timings": timings})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    samples = [{"index": i} for i in range(4)]
    spec, sampling = {"attention": "full", "mask_token_id": MASK}, {"gen_len": 6, "block_len": 6}
    folder = create_run(tmp_path, "run", {"model": "tiny", "sampling": sampling, "samples": samples, "spec": spec})
    write(folder, 0, [1] * 10, "so\n#### 1,200", "#### 1200")
    write(folder, 1, [1] * 9 + [MASK], " ", "#### 7")
    write(folder, 2, [MASK] + [1] * 9, "x", None)  # a mask token of the prompt is nobody's fault
    return Run(folder)


def test_figures(run: Run) -> None:
    summary = summarise(run, epsilon=3.0)
    assert (summary.samples, summary.planned) == (3, 4)
    assert (summary.exact, summary.judged) == (1, 2)
    assert (summary.masked, summary.empty) == (1, 1)
    assert summary.tokens_per_second == 3 * 6 / (3 * 2.0 / 2)
    assert summary.sink_heads == 0.5
    assert summary.sink_tokens == pytest.approx(1 / 20)
    assert summary.moves == 0.5
    # Twelve strongest keys: at step 0 nothing was filled in the first two samples; in the third key 0 never is.
    assert summary.strongest == [("a", 5 / 12), ("[MASK]", 4 / 12), ("b", 3 / 12)]


def test_epsilon_is_the_threshold(run: Run) -> None:
    assert summarise(run, epsilon=5.01).sink_heads == 0
    assert summarise(run, epsilon=0.0).sink_heads == 1


def test_lines(run: Run) -> None:
    assert summarise(run).lines() == [
        "samples         3 of 4 done, 6 tokens/s",
        "exact answers   1 of 2",
        "answers         1 still hold mask tokens, 1 are empty",
        "sinks           in 50.0% of all (step, layer, head), epsilon 3; 5.00% of the tokens there",
        "strongest key   another one than a step before in 50.0% of all (layer, head)",
        "                most often 'a' 42%, '[MASK]' 33%, 'b' 25%",
    ]
