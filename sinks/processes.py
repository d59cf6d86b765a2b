"""The processes of one launch, started by torchrun or accelerate."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import torch
from accelerate import PartialState

from sinks.errors import InputError

_LONGEST_WAIT = timedelta(days=30)  # of the first process to finish for the last


def processes(device: str = "auto") -> PartialState:
    """The processes of this launch, started by torchrun or accelerate, or just this one."""
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    state = PartialState(cpu=on_cpu, timeout=_LONGEST_WAIT)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != launched:
        raise InputError(f"{launched} processes were launched but do not see each other; start them with torchrun")
    return state


def wait_for_everyone() -> None:
    """Wait until all processes are here; torch's wait hears no Ctrl-C and no SIGTERM, so these end this one at once."""
    heard = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        processes().wait_for_everyone()
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)


def own_device(device: str) -> str:
    """Where this process computes: of several, each has its own where the settings leave it open."""
    state = processes(device)
    return str(state.device) if device in ("auto", "cuda") and state.num_processes > 1 else device
