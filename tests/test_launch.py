"""What only whole processes show: several of them fill one folder, and one of them stays small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_llada

from sinks.runs import Run

ROOT = Path(__file__).parents[1]
ALLOCATOR = 48 * 1024  # KiB by which the peak of one and the same run varies; one step's patterns are 48 MiB

# Every process believes another time, and a second passes at every look at the clock.
CLOCK = """
import datetime, os, sys
import inference_model, sinks.runs

class Clock(datetime.datetime):
    second_now = 10 * int(os.environ.get("RANK", 0))

    @classmethod
    def now(cls, tz=None):
        cls.second_now += 1
        return cls(2026, 1, 1, 0, 0, cls.second_now)

sinks.runs.datetime = Clock
inference_model.main()
"""

# The peak is read after 16 and after 64 steps of one process that may take 1 GiB more than it has.
MEMORY = """
import resource, sys
import psutil, torch
import inference_model

def run(steps, *more):
    sys.argv = ["inference_model.py", sys.argv[1], "--prompt", "a b c", "--block_len", "1024", "--gen_len", "1024",
                "--steps", str(steps), *more]
    inference_model.main()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

run(1)
start = psutil.Process().memory_info()
resource.setrlimit(resource.RLIMIT_AS, (start.vms + 2**30, -1))
run(16)
print("PEAKS", start.rss // 1024, run(16), run(64), flush=True)
run(1, "--gen_len", "4000", "--block_len", "4000", "--attention", "full")
"""


def run_script(code: str, folder: Path, *command: str, processes: int = 0) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(code)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    call = [sys.executable, *launcher, str(script), *command]
    return subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_two_processes_fill_one_folder(tmp_path: Path) -> None:
    model = write_llada(tmp_path / "model")
    arguments = (str(model), "--dataset", "problems", "--num_samples", "5", "--gen_len", "4", "--block_len", "4")
    done = run_script(CLOCK, tmp_path, *arguments, processes=2)
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "runs").iterdir()
    together = Run(folder)
    assert [sample.index for sample in together.samples] == list(range(5))
    assert {sample["state"] for sample in together.manifest["samples"]} == {"done"}
    assert done.stdout.count("samples         5 of 5 done") == 1

    assert run_script(CLOCK, tmp_path, *arguments, "--runs_dir", "alone").returncode == 0
    [folder] = (tmp_path / "alone").iterdir()
    for one, other in zip(together.samples, Run(folder).samples, strict=True):
        np.testing.assert_array_equal(one.tokens(), other.tokens())
        np.testing.assert_array_equal(one.incoming(), other.incoming())


def test_an_error_of_the_first_process_ends_all(tmp_path: Path) -> None:
    model = write_llada(tmp_path / "model")
    (tmp_path / "runs").touch()
    arguments = (str(model), "--prompt", "a b c", "--gen_len", "4", "--block_len", "4")
    done = run_script(CLOCK, tmp_path, *arguments, processes=2)
    assert done.returncode != 0
    assert "error: cannot create" in done.stderr


def test_memory_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    model = write_llada(tmp_path / "model")
    done = run_script(MEMORY, tmp_path, str(model))
    [peaks] = [line for line in done.stdout.splitlines() if line.startswith("PEAKS")]
    start, short, long = map(int, peaks.split()[1:])
    assert long - start < 1.1 * (short - start) + ALLOCATOR
    # Full patterns of 4003 positions would not fit: 3 layers · 4 heads · 4003² · 4 bytes · 5 copies.
    assert done.returncode == 2, done.stderr
    assert "the attention patterns of one step take 3.582 GiB of memory" in done.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 4


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_and_the_bare_command(tmp_path: Path, arguments: list[str]) -> None:
    call = [sys.executable, str(ROOT / "inference_model.py"), *arguments]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True)
    if arguments:
        assert (done.returncode, done.stderr) == (0, "")
        assert "--mask_sinks" in done.stdout
    else:
        assert done.returncode == 2
        assert done.stderr.startswith("error: name a MODEL: LLaDA, ")
        assert done.stderr.count("\n") == 1
