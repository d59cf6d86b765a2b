"""One launch on several GPUs against one on a single GPU: the same results, how much faster, and when a process dies.

    python benchmarks/multi_gpu.py --out multi_gpu.json       # two GPUs, LLaDA-8B's shape with random weights
    python benchmarks/multi_gpu.py --cpu                      # the same on processes of a CPU, with the embedded model

Throughput is that of each process after its first samples, in which kernels are compiled; "to join" is the time from
the last sample to the end of the run. The model that is spread over several GPUs has four layers, in float32.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from random_checkpoint import LAYERS, write

import sinks
from sinks.runs import Run, Sample

ROOT = Path(__file__).parents[1]
WARM_UP = 2  # samples of each process that are not timed
PROBLEMS = ["--tasks", "problems", "--include_path", str(ROOT / "tests" / "tasks"), "--apply_chat_template"]


@dataclass(frozen=True)
class Bench:
    """Where everything is put, how many processes are compared with one, and the size of a run."""

    folder: Path
    processes: int
    cpu: bool
    samples: int
    steps: int

    def start(self, processes: int, script: str, *arguments: object) -> subprocess.Popen[bytes]:
        accelerate = ["accelerate.commands.launch", f"--num_processes={processes}", "--num_machines=1"]
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        call = [sys.executable, "-m", *(torchrun if self.cpu else accelerate), script, *map(str, arguments)]
        return subprocess.Popen(call, cwd=ROOT, env=os.environ | ({"ACCELERATE_USE_CPU": "true"} if self.cpu else {}))

    def launch(self, processes: int, script: str, *arguments: object) -> float:
        """Seconds until it ended well."""
        began = time.perf_counter()
        if code := self.start(processes, script, *arguments).wait():
            raise SystemExit(f"{script} on {processes} processes ended with {code}")
        return time.perf_counter() - began

    @property
    def generation(self) -> list[object]:
        checkpoint = [] if self.cpu else ["--checkpoint", self.checkpoint(LAYERS)]
        sizes = ["--num_samples", self.samples, "--gen_len", self.steps, "--steps", self.steps]
        return [
            "tiny" if self.cpu else "LLaDA",
            *checkpoint,
            "--dataset",
            "problems",
            *sizes,
            "--block_len",
            self.steps,
        ]

    def checkpoint(self, layers: int) -> Path:
        folder = self.folder / f"random-{layers}"
        if not folder.exists():
            write(folder, layers, seed=0)
        return folder


def run_in(runs_dir: Path) -> Path:
    """The only run there, for a launch makes one, however many processes it has."""
    [run] = runs_dir.glob("*/")
    return run


def contents(run: Path) -> dict[str, Any]:
    """Every file, without what differs between equal runs."""
    ignored, found = ("timings", "created", "command", "git_commit"), dict[str, Any]()
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        value = json.loads(path.read_bytes()) if path.suffix == ".json" else path.read_bytes()
        kept = {k: v for k, v in value.items() if k not in ignored} if isinstance(value, dict) else value
        found[str(path.relative_to(run))] = kept
    return found


def throughput(samples: list[Sample], processes: int) -> float:
    """Tokens a second of all processes together; each takes every ``processes``-th sample."""
    total = 0.0
    for rank in range(processes):
        mine = samples[rank::processes][WARM_UP:]
        seconds = sum(sample.info["timings"]["seconds"] for sample in mine)
        total += sum(len(sample.tokens_text) - sample.prompt_length for sample in mine) / seconds
    return total


def seconds_to_join(run: Path) -> float:
    last = max(path.stat().st_mtime for path in run.glob("sample_*/sample.json"))
    return (run / "manifest.json").stat().st_mtime - last


def generations(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rates, runs = [], []
    for processes in (1, bench.processes):
        runs_dir = bench.folder / f"runs-{processes}"
        seconds = bench.launch(processes, "inference_model.py", *bench.generation, "--runs_dir", runs_dir)
        run = run_in(runs_dir)
        rates.append(throughput(list(Run(run).samples), processes))
        runs.append(contents(run))
        found[f"{processes} processes"] = {
            "seconds": seconds,
            "tokens_per_second": rates[-1],
            "seconds_to_join": seconds_to_join(run),
        }
    return found | {"throughput_ratio": rates[1] / rates[0], "equal": runs[0] == runs[1]}


def evaluations(bench: Bench) -> dict[str, Any]:
    """Seven items, which no two processes share evenly, with sinks masked."""
    model, answers = "model_path=tiny,gen_length=32,block_length=32,dtype=float32,sink_top_k=1", []
    for processes in (1, bench.processes):
        folder = bench.folder / f"evaluation-{processes}"
        options = ["--limit", 7, "--model_args", model, "--output_path", folder, "--log_samples"]
        bench.launch(processes, "eval_llada.py", *PROBLEMS, *options)
        [log] = folder.rglob("samples_*.jsonl")
        items = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        # Where the counts are uneven, lm-eval has an item answered twice, and scores it once.
        answers.append({item["doc_id"]: (item["resps"][0][0], item["filtered_resps"]) for item in items})
    return {"items": len(answers[0]), "equal": answers[0] == answers[1]}


def spread(bench: Bench) -> dict[str, Any]:
    """One model over all GPUs, against the same on the first."""
    if bench.cpu:
        return {"skipped": "needs several GPUs"}
    logging.basicConfig(format="%(message)s")  # says why there is no CUDA graph
    checkpoint, found, devices = str(bench.checkpoint(4)), [], set[str]()
    places: list[dict[str, Any]] = [{"device": "cuda:0"}, {"device_map": "auto"}]
    for place in places:
        lm = sinks.load(checkpoint, dtype="float32", **place)
        devices = {str(parameter.device) for parameter in lm.model.parameters()}
        options: dict[str, Any] = {"gen_len": 64, "steps": 32, "block_len": 32, "temperature": 1.0}
        prompt = "Tom has 3 boxes with 12 pens each. How many pens has he?"
        found.append(sinks.generate(lm, prompt, capture=sinks.Capture(), masking=sinks.SinkMasking(top_k=1), **options))
        del lm
        torch.cuda.empty_cache()
    alone, together = found
    assert alone.incoming is not None and together.incoming is not None
    return {
        "devices": sorted(devices),
        "equal_tokens": torch.equal(alone.trajectory, together.trajectory),
        "largest_difference_of_incoming": float((alone.incoming - together.incoming).abs().max()),
    }


def loss_of_a_process(bench: Bench) -> dict[str, Any]:
    """The last process is killed after its first sample; the others must end, and --resume must make the same run."""
    runs_dir = bench.folder / "runs-killed"
    launched = bench.start(bench.processes, "inference_model.py", *bench.generation, "--runs_dir", runs_dir)
    while launched.poll() is None and len(list(runs_dir.glob("*/sample_*/sample.json"))) < bench.processes:
        time.sleep(0.05)
    last = {"RANK": str(bench.processes - 1), "LOCAL_RANK": str(bench.processes - 1)}
    for process in psutil.Process(launched.pid).children(recursive=True):
        if last.items() <= process.environ().items():
            process.send_signal(signal.SIGKILL)
    began = time.perf_counter()
    code, seconds = launched.wait(), time.perf_counter() - began
    run = run_in(runs_dir)
    left = len(Run(run).samples)
    bench.launch(bench.processes, "inference_model.py", "--resume", run)
    return {
        "exit_code": code,
        "seconds_until_all_had_ended": seconds,
        "samples_left": left,
        "equal_after_resume": contents(run) == contents(run_in(bench.folder / "runs-1")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--folder", type=Path, help="where checkpoint and runs are kept (default: nowhere)")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory() as temporary:
        bench = Bench(given.folder or Path(temporary), given.processes, given.cpu, given.samples, given.steps)
        found = {part.__name__: part(bench) for part in (generations, evaluations, spread, loss_of_a_process)}
    for name, part in found.items():
        print(name.replace("_", " "))
        for key, value in part.items():
            print(f"  {key.replace('_', ' '):32}{value}")
    if given.out:
        device = "CPU" if given.cpu else torch.cuda.get_device_name()
        given.out.write_text(json.dumps({"device": device, **found}))


if __name__ == "__main__":
    main()
