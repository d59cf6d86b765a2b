"""The sweep: exact paired tests, intervals, the same items, and going on where it stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import write_llada

from sinks import harness, sweep
from sinks.diagnosis import sink_profile
from sinks.errors import InputError
from sinks.sweep import Cell, paired_p, table

TASKS = str(Path(__file__).parent / "tasks")


def _items(answers: str) -> dict[str, bool]:
    return {str(place): answer == "1" for place, answer in enumerate(answers)}


def test_paired_test_by_hand() -> None:
    # Five items differ, all in one direction: 2 / 2^5.
    assert paired_p(_items("1111100"), _items("0000000")) == pytest.approx(0.0625)
    # One against three: (1 + 4) * 2 / 2^4.
    assert paired_p(_items("1000"), _items("0111")) == pytest.approx(0.625)
    assert paired_p(_items("1010"), _items("1010")) == 1.0


def test_table_by_hand() -> None:
    results = {
        Cell("m", 0): _items("1111111100"),
        Cell("m", 1, "sinks"): _items("0000000000"),
        Cell("m", 1, "random"): _items("1111111000"),
    }
    unmasked, sinks, random = table(results)
    assert (unmasked["accuracy"], unmasked["p_unmasked"], unmasked["p_random"]) == (80.0, None, None)
    # Wilson's interval for 8 of 10, to three digits.
    assert (unmasked["low"], unmasked["high"]) == pytest.approx((49.0, 94.3), abs=0.05)
    assert sinks["p_unmasked"] == pytest.approx(2 / 2**8)
    assert sinks["p_random"] == pytest.approx(2 / 2**7)
    assert (random["p_unmasked"], random["p_random"]) == (1.0, None)


def test_different_items_are_not_compared() -> None:
    with pytest.raises(InputError, match="different items"):
        table({Cell("m", 0): _items("11"), Cell("m", 1, "sinks"): _items("111")})


def test_cells() -> None:
    found = list(sweep.cells("m", [0, 1], ["sinks", "random"], ["scores"]))
    assert found == [Cell("m", 0), Cell("m", 1, "sinks"), Cell("m", 1, "random")]


def test_sweep_goes_on_and_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = write_llada(tmp_path / "model"), tmp_path / "out"
    options = [
        str(folder),
        "--tasks",
        "problems",
        "--include_path",
        TASKS,
        "--limit",
        "3",
        "--k",
        "1",
        "--batch_size",
        "3",
    ]
    options += ["--control", "sinks", "random", "--model_args", "gen_len=8", "--profile", "2", "--out", str(out)]
    manager = sweep.TaskManager
    monkeypatch.setattr(
        sweep, "TaskManager", lambda include_path: manager(include_path=include_path, include_defaults=False)
    )
    monkeypatch.setattr(sys, "argv", ["sweep", *options])
    sweep.main()
    first = (out / "table.csv").read_text()
    assert [line.split(",")[2:5] for line in first.splitlines()[1:]] == [
        *(["none", "0", "3"], ["sinks", "1", "3"], ["random", "1", "3"]),
    ]
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "table.json").read_text())["profiles"][str(folder)]["moved_share"] >= 0
    monkeypatch.setattr(harness, "denoise", lambda *_, **__: pytest.fail("an answer was computed again"))
    sweep.main()
    assert (out / "table.csv").read_text() == first


def test_profile_by_hand() -> None:
    incoming = torch.tensor([[3.2, 0.4, 0.4, 0.0], [0.4, 3.2, 0.4, 0.0]]).view(2, 1, 1, 1, 4)  # the last is padding
    norm = torch.tensor([[0.1, 1.0, 2.0, 9.0], [0.1, 1.0, 2.0, 9.0]]).view(2, 1, 1, 1, 4)
    found = sink_profile(incoming, norm, epsilon=1.0)
    assert found["strong_share"] == 100
    assert found["top_value_ratio"] == pytest.approx(0.1)  # torch's median of two values is the lower one
    assert found["moved_share"] == 100
    assert found["first_share"] == 50
    nothing_strong = sink_profile(torch.ones(1, 1, 1, 1, 8), torch.ones(1, 1, 1, 1, 8))
    assert nothing_strong["strong_share"] == 0
    assert nothing_strong["strong_value_ratio"] != nothing_strong["strong_value_ratio"]  # NaN: there are none
