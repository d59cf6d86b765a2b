"""Runs that are killed at random moments and resumed end like one that was left alone. Real processes, real signals."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from checkpoints import write_llada
from test_inference_model import contents

from sinks.runs import Run

ROOT = Path(__file__).parents[1]
SAMPLES = 6
COMMAND = ("--dataset", "problems", "--num_samples", str(SAMPLES), "--gen_len", "64", "--block_len", "32")
KEEPS = ("--attention", "mean", "--attention_steps", "8", "--temperature", "1")
GENTLE = {signal.SIGTERM: 143, signal.SIGINT: 130}


def launch(
    folder: Path,
    *arguments: object,
    script: str = "inference_model.py",
    processes: int = 1,
    limit: int | None = None,
) -> subprocess.Popen[str]:
    """A script in ``folder``, in a session of its own; ``limit`` is the largest file in bytes."""
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}

    def restrict() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests in the background of a shell hear none
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    call = [sys.executable, *several, str(ROOT / script), *map(str, arguments)]
    pipes: dict[str, Any] = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(call, cwd=folder, env=environment, start_new_session=True, preexec_fn=restrict, **pipes)


def ended(process: subprocess.Popen[str]) -> str:
    """What it said, after it ended by itself."""
    try:
        return process.communicate(timeout=300)[1]
    finally:
        kill_tree(process)


def kill_tree(process: subprocess.Popen[str]) -> None:
    """The process and all that it started, which a launcher puts into groups of their own."""
    with suppress(psutil.NoSuchProcess):
        for started in [*psutil.Process(process.pid).children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                started.kill()


def until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while process.poll() is None and not happened():
        time.sleep(0.01)


class Trial:
    """One run that is killed again and again, in a folder of its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        folder.mkdir(parents=True)
        self.folder, self.model, self.before = folder, model, set[str]()

    @property
    def run(self) -> Path | None:
        return next((path.parent for path in (self.folder / "runs").glob("*/manifest.json")), None)

    @property
    def done(self) -> set[str]:
        """Samples that lie there whole."""
        return set() if self.run is None else {sample.folder.name for sample in Run(self.run).samples}

    def start(self, **options: Any) -> subprocess.Popen[str]:
        arguments = (self.model, *COMMAND, *KEEPS) if self.run is None else ("--resume", self.run)
        return launch(self.folder, *arguments, **options)

    def check(self) -> None:
        """Nothing that was done is lost, and all of it can be read."""
        assert self.before <= self.done
        self.before = self.done
        if self.run is not None:
            for sample in Run(self.run).samples:
                sample.check()
        assert len(list((self.folder / "runs").glob("*"))) <= 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llada(tmp_path_factory.mktemp("models") / "llada")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Any]:
    trial = Trial(tmp_path_factory.mktemp("unbroken") / "trial", model)
    process = trial.start()
    said = ended(process)
    assert process.returncode == 0, said
    assert trial.run is not None and len(trial.done) == SAMPLES
    return contents(trial.run)


def finish(trial: Trial, unbroken: dict[str, Any], **options: Any) -> None:
    process = trial.start(**options)
    said = ended(process)
    assert process.returncode == 0, said
    assert trial.run is not None and contents(trial.run) == unbroken


def kill(trial: Trial, number: signal.Signals, wait: float, **options: Any) -> bool:
    """Start or resume, let it compute for a while, send the signal; whether that was in time."""
    done = len(trial.done)
    process = trial.start(**options)
    until(lambda: trial.run is not None and bool(list(trial.run.glob("sample_*/.*.part"))), process)
    time.sleep(wait)
    in_time = process.poll() is None
    if number == signal.SIGKILL:
        kill_tree(process)
    else:
        process.send_signal(number)
    said = ended(process)
    trial.check()
    interrupted = trial.run is not None and in_time and len(trial.done) < SAMPLES
    if trial.run is not None and interrupted and number in GENTLE and "processes" not in options:
        assert process.returncode == GENTLE[number], said
        assert "go on with: python inference_model.py --resume " in said and str(trial.run.name) in said
        assert list(trial.run.rglob("*.part")) == []
        assert "Traceback" not in said
    return in_time and len(trial.done) >= done


@pytest.mark.parametrize(
    ("number", "kills"),
    [
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGTERM, 15, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, 25, marks=pytest.mark.long),
        pytest.param(signal.SIGINT, 15, marks=pytest.mark.long),
    ],
)
def test_one_process(tmp_path: Path, model: Path, unbroken: dict[str, Any], number: signal.Signals, kills: int) -> None:
    random, trial, killed, round_ = Random(kills), Trial(tmp_path / "0", model), 0, 0
    while killed < kills:
        killed += kill(trial, number, random.uniform(0, 0.8))
        if len(trial.done) == SAMPLES:
            finish(trial, unbroken)
            round_ += 1
            trial = Trial(tmp_path / str(round_), model)
    finish(trial, unbroken)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("processes", [[2, 2, 2], [2, 1, 2], [1, 2, 1]], ids=str)
def test_several_processes(
    tmp_path: Path, model: Path, unbroken: dict[str, Any], number: signal.Signals, processes: list[int]
) -> None:
    random, trial = Random(sum(processes)), Trial(tmp_path / "trial", model)
    for count in processes[:-1]:
        kill(trial, number, random.uniform(0, 0.6), processes=count)
    finish(trial, unbroken, processes=processes[-1])


@pytest.mark.long
@pytest.mark.parametrize("limit", [200, 4_000, 60_000])
def test_a_file_that_may_not_grow(tmp_path: Path, model: Path, unbroken: dict[str, Any], limit: int) -> None:
    trial = Trial(tmp_path / "trial", model)
    if limit > 10_000:
        kill(trial, signal.SIGKILL, 0.3)
    process = trial.start(limit=limit)
    said = ended(process)
    assert process.returncode == 2, said
    assert "the file would pass the size that is allowed" in said
    assert "Traceback" not in said
    trial.check()
    finish(trial, unbroken)


@pytest.mark.long
def test_a_disk_that_fills(tmp_path: Path, model: Path, unbroken: dict[str, Any]) -> None:
    disk = tmp_path / "trial" / "runs"
    trial = Trial(tmp_path / "trial", model)
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        process = trial.start()
        until(lambda: bool(trial.done), process)
        ballast = disk.parent / "runs" / "ballast"
        with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        said = ended(process)
        ballast.unlink()
        assert process.returncode == 2, said
        assert "the disk is full" in said
        trial.check()
        finish(trial, unbroken)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.long
def test_a_folder_that_cannot_be_written_any_more(tmp_path: Path, model: Path, unbroken: dict[str, Any]) -> None:
    trial = Trial(tmp_path / "trial", model)
    process = trial.start()
    until(lambda: bool(trial.done), process)
    assert trial.run is not None
    obstacle = trial.run / f"sample_{SAMPLES - 1:03d}"
    obstacle.touch()  # a file where a folder is to be
    said = ended(process)
    assert process.returncode == 2, said
    assert f"cannot create {obstacle.relative_to(trial.folder)}" in said
    obstacle.unlink()
    trial.check()
    finish(trial, unbroken)


@pytest.mark.long
def test_eight_launches_at_once_make_eight_folders(tmp_path: Path, model: Path) -> None:
    arguments = (model, "--prompt", "a b c", "--gen_len", "4", "--block_len", "4")
    processes = [launch(tmp_path, *arguments) for _ in range(8)]
    assert all(ended(process) is not None and process.returncode == 0 for process in processes)
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 8
    assert all(len(Run(folder).samples) == 1 for folder in folders)


def evaluate(folder: Path) -> subprocess.Popen[str]:
    """An evaluation that keeps its answers; its results go to ``folder``."""
    options = f"--tasks problems --include_path {ROOT / 'tests' / 'tasks'} --limit 12 --batch_size 2 --log_samples"
    paths = ["--output_path", str(folder / "results"), "--use_cache", str(folder / "answers.sqlite")]
    model_args = ["--model_args", "model_path=tiny,gen_length=32,steps=32,block_length=32"]
    return launch(folder, *options.split(), *paths, *model_args, script="eval_llada.py")


def changed(file: Path, before: int) -> bool:
    return file.exists() and file.stat().st_mtime_ns > before


def results(folder: Path) -> tuple[Any, list[Any]]:
    """The scores and every answer of an evaluation."""
    [scores] = folder.rglob("results_*.json")
    [samples] = folder.rglob("samples_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    return json.loads(scores.read_text(encoding="utf-8"))["results"], lines


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_an_evaluation_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    process = evaluate(tmp_path / "whole")
    said = ended(process)
    assert process.returncode == 0, said
    answers, random = tmp_path / "killed" / "answers.sqlite", Random(number)
    for _ in range(3):
        process = evaluate(tmp_path / "killed")
        before = answers.stat().st_mtime_ns if answers.exists() else 0
        until(partial(changed, answers, before), process)
        time.sleep(random.uniform(0, 0.3))
        in_time = process.poll() is None
        process.send_signal(number)
        said = ended(process)
        if in_time and number in GENTLE:
            assert process.returncode == GENTLE[number], said
            assert "the answers so far are in" in said
    process = evaluate(tmp_path / "killed")
    said = ended(process)
    assert process.returncode == 0, said
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
