"""Seeing and switching off attention sinks in diffusion language models.

The names below are the public API. They are resolved on first use, so that ``import sinks.detection`` or reading a
run folder costs no import of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinks.attention import Capture as Capture
    from sinks.detection import detect as detect
    from sinks.errors import InputError as InputError
    from sinks.likelihood import loglikelihood as loglikelihood
    from sinks.masking import SinkMasking as SinkMasking
    from sinks.models import load as load
    from sinks.recording import record as record
    from sinks.runs import Run as Run
    from sinks.samplers import generate as generate

_HOME = {
    "Capture": "attention",
    "record": "recording",
    "detect": "detection",
    "InputError": "errors",
    "loglikelihood": "likelihood",
    "SinkMasking": "masking",
    "load": "models",
    "Run": "runs",
    "generate": "samplers",
}

__all__ = [
    "Capture",
    "InputError",
    "Run",
    "SinkMasking",
    "detect",
    "generate",
    "load",
    "loglikelihood",
    "record",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sinks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sinks.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
