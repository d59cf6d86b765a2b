"""How many samples fit into a GPU's memory together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from sinks.plan import Plan
from sinks.samplers import denoise

_MOST = 64  # samples; more are hardly faster, and all of them would be lost when a run is stopped
_USED = 0.8  # of the memory that is free; what a step takes differs a little from step to step
_STEPS = 4  # of a trial: enough to see every kind of work once, recorded too


def largest_batch(plan: Plan) -> int:
    """The largest number of samples that fits: estimated from one sample, then tried with the longest prompts.

    On a CPU it is 1: more at once gains nothing there.
    """
    device = plan.lm.device
    if device.type != "cuda":
        return 1
    longest = sorted(range(len(plan.ids)), key=lambda index: -len(plan.ids[index]))
    free, _ = torch.cuda.mem_get_info(device)
    alone = _peak(plan, longest[:1])
    size = min(max(int(_USED * free / max(alone, 1)), 1), len(longest), _MOST)
    while size > 1 and not _fits(plan, longest[:size]):
        size //= 2
    return size


def _peak(plan: Plan, samples: Sequence[int]) -> int:
    """Bytes on the device that the first steps take beside the weights."""
    device = plan.lm.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    canvas = plan.canvas(samples)
    for _ in islice(denoise(plan.lm, canvas, plan.sampling, plan.capture, plan.masking, samples), _STEPS):
        pass
    return torch.cuda.max_memory_allocated(device) - before


def _fits(plan: Plan, samples: Sequence[int]) -> bool:
    try:
        _peak(plan, samples)
    except torch.OutOfMemoryError:
        fits = False
    else:
        fits = True
    torch.cuda.empty_cache()
    return fits
