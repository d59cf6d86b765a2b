"""A run of many samples: memory, open files and seconds of inference_model.py while it goes on.

python benchmarks/long_run.py --samples 2000 --out long_run.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from tqdm import tqdm

from sinks.prompts import load_prompts

ROOT = Path(__file__).parents[1]


def command(folder: Path, samples: int) -> list[str]:
    """The embedded model on problems that repeat, two denoising steps each."""
    prompts = islice(cycle(load_prompts("problems", "test", 0, 500)), samples)
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"question": prompt.text}) for prompt in prompts), encoding="utf-8")
    options = {"dataset": file, "num_samples": samples, "gen_len": 8, "block_len": 8, "steps": 2, "runs_dir": folder}
    flags = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    return [sys.executable, str(ROOT / "inference_model.py"), "tiny", *flags]


def watch(folder: Path, samples: int, every: int) -> list[dict[str, float]]:
    """Rows of samples done, resident MiB, open files, and seconds since the first sample began."""
    rows: list[dict[str, float]] = []
    process = subprocess.Popen(command(folder, samples), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    seen, began = psutil.Process(process.pid), time.perf_counter()
    with tqdm(total=samples, unit="sample") as bar:
        while process.poll() is None:
            done = sum(1 for _ in folder.glob("*/sample_*/sample.json"))
            began = began if done else time.perf_counter()
            bar.update(done - bar.n)
            if done >= every * len(rows) + 1:
                memory, files = seen.memory_info().rss / 2**20, seen.num_fds()
                rows.append({"done": done, "mib": memory, "files": files, "seconds": time.perf_counter() - began})
            time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"inference_model.py ended with {process.returncode}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        rows = watch(Path(folder), given.samples, given.every)
    for row in rows:
        print("{done:6.0f} done{mib:9.0f} MiB{files:5.0f} open files{seconds:9.1f} s".format(**row))
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
