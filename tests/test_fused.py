"""The path "fused" where it has no GPU: chunked, to the last bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sinks.attention import PATHS, Ask, Measure, Observation, Visible
from sinks.fused import fused, way_of

MEASURES = frozenset(
    Measure(after, itself, last) for after in (False, True) for itself in (False, True) for last in (False, True)
)
ROUNDING = {torch.float32: 1.0, torch.bfloat16: 2e4, torch.float16: 2e3}  # of an output, in units of 1e-6


def _problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, float, Visible]:
    seed = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 9, 8, generator=seed).to(dtype)
    key, value = (torch.randn(2, 2, 9, 8, generator=seed).to(dtype) for _ in range(2))
    return query, key, value, 0.5, Visible(torch.arange(9) >= torch.tensor([[0], [3]]), None, None, 0)


def _compute(path: str, ask: Ask, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Observation]:
    query, key, value, scale, visible = _problem(dtype)
    return PATHS[path](query, key, value, scale, visible, ask, 0)


@pytest.mark.parametrize("way", ["scores", "values"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("blocked", [None, torch.arange(9).expand(1, 2, 4, 9) % 3 == 0])
def test_without_a_gpu_it_is_chunked(way: str, dtype: torch.dtype, blocked: Tensor | None) -> None:
    ask = Ask(MEASURES, "full", None, False, blocked, way)
    output, seen = _compute("fused", ask, dtype)
    for path, tolerance in [("chunked", 0.0), ("reference", 1e-6)]:
        expected, known = _compute(path, ask, dtype)
        torch.testing.assert_close(output, expected, atol=tolerance * ROUNDING[dtype], rtol=tolerance * ROUNDING[dtype])
        torch.testing.assert_close(seen.pattern, known.pattern, atol=tolerance, rtol=0)
        assert seen.columns.keys() == known.columns.keys()
        for measure, sums in known.columns.items():
            torch.testing.assert_close(seen.columns[measure], sums, atol=tolerance * 10, rtol=0)


def test_the_table_holds_it() -> None:
    assert PATHS["fused"] is fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_has_no_kernels(dtype: torch.dtype) -> None:
    query, key, value, _, visible = _problem(dtype)
    assert way_of(query, key, value, visible, taken=False) == "chunked"
    assert way_of(query, key, value, visible, taken=True) == "chunked"


def test_gradients_flow() -> None:
    query, key, value, scale, visible = _problem()
    fused(query, key.requires_grad_(), value, scale, visible, Ask(), 0)[0].sum().backward()
    assert key.grad is not None
    assert key.grad.abs().max() > 0


def test_triton_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import torch, sinks.fused as f; from sinks.attention import *;"
        "x = torch.randn(1, 2, 5, 16).bfloat16();"
        "output, seen = f.fused(x, x, x, 0.25, Visible(None, None, None, 0), Ask(frozenset({Measure()})), 0);"
        "print(f.kernels.triton, seen.columns[Measure()].sum().round().item())"
    )
    root = Path(__file__).parents[1]
    done: Any = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "10.0"]
