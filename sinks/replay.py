"""A denoising step as one launch: on CUDA, work of one kind is recorded once as a graph and replayed.

Up to about a thousand positions a step of an 8B model waits for Python and for launches more than for the GPU; a graph
has neither. What is recorded must change its state in place and may not wait for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

_log = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=Hashable)


class Replayed(Generic[Kind]):
    """Calls ``work(kind)``; on CUDA the second call of a kind is recorded, and that and all further ones are replays.

    The first call of a kind runs plainly, which also warms up what may not be recorded (libraries, compilers).

    Args:
        work: changes its state in place and returns a dataclass whose tensors belong to this call.
        model: what the work runs; where it rules a recording out, that is said once.
    """

    def __init__(self, work: Callable[[Kind], Any], model: nn.Module) -> None:
        self.work = work
        self.recordings: dict[Kind, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.ran: set[Kind] = set()
        self.pool: Any = None
        self.possible = _device(model).type == "cuda"
        reason = _obstacle(model) if self.possible else None
        if reason is not None:
            self._run_plainly(reason)

    def __call__(self, kind: Kind, recordable: bool = True) -> Any:
        if not self.possible or not recordable or kind not in self.ran:
            self.ran.add(kind)
            return self.work(kind)
        if kind not in self.recordings:
            try:
                self.recordings[kind] = self._record(kind)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self._run_plainly(str(error).partition("\n")[0])
                return self.work(kind)
        graph, outputs = self.recordings[kind]
        graph.replay()
        return _owned(outputs)

    def _record(self, kind: Kind) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.pool):
            outputs = self.work(kind)
        return graph, outputs

    def _run_plainly(self, reason: str) -> None:
        self.possible = False
        _log.warning("steps are launched one operation at a time, without a CUDA graph: %s", reason)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _obstacle(model: nn.Module) -> str | None:
    """Why the model's work cannot be recorded; None if it can."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return f"the model lies on {len(devices)} devices"
    return None


def _owned(outputs: Any) -> Any:
    """A copy that the next replay does not overwrite."""
    tensors = {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    return replace(outputs, **{name: value.clone() for name, value in tensors.items() if isinstance(value, Tensor)})
