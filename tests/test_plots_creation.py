"""plots_creation.py as a user runs it: which files appear, with which numbers, and what is said when it cannot."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from safetensors.numpy import save_file
from synthetic_runs import HEADS, LAYERS, planted, write_run

import plots_creation
from sinks import statistics
from sinks.detection import detect
from sinks.errors import InputError
from sinks.files import alone_in
from sinks.runs import Run


def draw(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Exit code of the command, drawing in this process unless told otherwise."""
    processes = () if "--processes" in arguments else ("--processes", "1")
    monkeypatch.setattr(sys, "argv", ["plots_creation.py", *map(str, arguments), *processes])
    try:
        plots_creation.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_numbers_of_planted_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    incoming = planted(steps=6, length=20)
    run = write_run(tmp_path, incoming=[incoming, incoming], prompt_length=14)
    assert draw(monkeypatch, "tiny", tmp_path, "--no_video", "--layers", "1") == 0

    heads = rows(run / "plots" / "heads.csv")
    assert len(heads) == 2 * LAYERS * HEADS
    assert {row["displacement_per_step"] for row in heads} == {"1"}
    assert {row["sinks_per_step"] for row in heads} == {"1"}
    assert float(heads[0]["share_of_attention"]) == pytest.approx(0.4, abs=1e-3)
    movement = rows(run / "plots" / "movement.csv")
    assert {row["moves"] for row in movement} == {"moves right"}
    [summary] = rows(run / "plots" / "summary.csv")
    assert float(summary["share_of_tokens"]) == pytest.approx(detect(incoming, 3.0).mean())
    sinks = {row["class"]: int(row["count"]) for row in rows(run / "plots" / "classes.csv") if row["series"] == "sinks"}
    assert sum(sinks.values()) == 2 * 6 * LAYERS * HEADS

    steps = rows(run / "plots" / "sample_001" / "head_steps.csv")
    assert len(steps) == 6 * LAYERS * HEADS
    [one] = [row for row in steps if (row["step"], row["layer"], row["head"]) == ("4", "1", "2")]
    assert (one["strongest"], one["final_token"], one["sinks"]) == (str(1 * HEADS + 2 + 4), "w10", "1")

    drawn = {path.name for path in (run / "plots" / "sample_001").iterdir()}
    assert drawn == {
        "drawn_with.json",
        "head_steps.csv",
        "incoming.png",
        "incoming_layers.png",
        "over_steps.png",
        "incoming_layer_01.png",
        "heads_layer_01.png",
        "strongest_layer_01.png",
    }


def test_films_patterns_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path, patterns="mean", pattern_steps=3)
    assert draw(monkeypatch, "tiny", run, "--layers", "0", "--report", "--format", "svg") == 0
    drawn = {path.name for path in (run / "plots" / "sample_000").iterdir()}
    films = {f"{name}{suffix}" for name in ("incoming_film", "pattern_film_layer_00") for suffix in (".mp4", ".gif")}
    assert films <= drawn
    assert {f"pattern_layer_00_step_{t:04d}.svg" for t in (0, 4, 7)} <= drawn
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_what_is_drawn_is_skipped_unless_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path)
    arguments = ("tiny", tmp_path, "--no_video", "--layers", "0")
    draw(monkeypatch, *arguments)
    figure = run / "plots" / "sample_000" / "incoming.png"
    figure.write_bytes(b"mine")
    draw(monkeypatch, *arguments)
    assert figure.read_bytes() == b"mine"
    draw(monkeypatch, *arguments, "--force")
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_other_settings_draw_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path, incoming=[planted(4, 12), planted(4, 12)])
    arguments = ("tiny", tmp_path, "--no_video", "--layers", "0")
    draw(monkeypatch, *arguments, "--samples", "0")
    of_sample, pooled = run / "plots" / "sample_000" / "over_steps.png", run / "plots" / "classes.png"
    for picture in (of_sample, pooled):
        picture.write_bytes(b"mine")
    draw(monkeypatch, *arguments)  # more samples: what is of one sample stands, what is of all does not
    assert of_sample.read_bytes() == b"mine" and pooled.read_bytes() != b"mine"
    draw(monkeypatch, *arguments, "--epsilon", "1")
    assert of_sample.read_bytes() != b"mine"


def test_several_processes_draw_the_same_files_and_warn_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = [*"abcdefghijk", "\u16a0\U0001d100\U00013000"]  # runes, music, hieroglyphs: all three are in few fonts
    one, two = (
        write_run(tmp_path / name, patterns="mean", pattern_steps=2, tokens_text=tokens) for name in ("one", "two")
    )
    for run, count in ((one, "1"), (two, "2")):
        assert draw(monkeypatch, "tiny", run, "--layers", "0", "--no_video", "--processes", count) == 0
    assert sum("no installed font" in record.message for record in caplog.records) <= 2  # once by each command
    files = sorted(path.relative_to(one) for path in (one / "plots").rglob("*.*"))
    assert len(files) > 20 and files == sorted(path.relative_to(two) for path in (two / "plots").rglob("*.*"))
    assert all((one / file).read_bytes() == (two / file).read_bytes() for file in files)


def test_only_runs_of_the_named_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = write_run(tmp_path / "a", model="tiny")
    other = write_run(tmp_path / "b", model="LLaDA")
    assert draw(monkeypatch, "tiny", tmp_path, "--no_video", "--layers", "0") == 0
    assert (mine / "plots").exists() and not (other / "plots").exists()


def test_an_unfinished_run_is_drawn_as_far_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, missing=1)
    assert draw(monkeypatch, "tiny", tmp_path, "--no_video", "--layers", "0") == 0
    assert "sample 1 not finished" in capsys.readouterr().err
    assert (run / "plots" / "summary.csv").exists()


def test_a_damaged_file_is_named_and_the_rest_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, incoming=[planted(4, 12), planted(4, 12)])
    damaged = run / "sample_000" / "incoming.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:50])
    assert draw(monkeypatch, "tiny", tmp_path, "--no_video", "--layers", "0", "--report") == 1
    assert str(damaged) in capsys.readouterr().err
    assert [path.name for path in (run / "plots").glob("sample_*")] == ["sample_001"]
    assert (run / "report.html").exists()


@pytest.mark.parametrize(
    "content", [b'{"model": "tiny"', b"\xff\xfe", b'{"schema_version": 99}', b'{"schema_version": 0}']
)
def test_a_run_that_cannot_be_read_is_named_and_the_others_drawn(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, whole = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    (damaged / "manifest.json").write_bytes(content)
    assert draw(monkeypatch, "tiny", tmp_path, "--no_video", "--layers", "0") == 1
    error = capsys.readouterr().err
    assert str(damaged) in error and error.count("error:") == 1
    assert (whole / "plots" / "summary.csv").exists() and not (damaged / "plots").exists()


def _edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def _without(*names: str) -> Callable[[Any], Any]:
    """Remove what lies at the end of these names."""

    def change(content: Any) -> Any:
        inside = content
        for name in names[:-1]:
            inside = inside[name]
        del inside[names[-1]]
        return content

    return change


MANIFEST_DAMAGE: dict[str, Callable[[Any], Any]] = {
    "no model": _without("model"),
    "no spec": _without("spec"),
    "no block length": _without("sampling", "block_len"),
    "spec is a list": lambda content: content | {"spec": []},
    "block length is a text": lambda content: content | {"sampling": {"gen_len": 8, "block_len": "4"}},
    "block length is 0": lambda content: content | {"sampling": {"gen_len": 8, "block_len": 0}},
    "samples are null": lambda content: content | {"samples": None},
    "samples are numbers": lambda content: content | {"samples": [0, 1]},
    "a sample without index": lambda content: content | {"samples": [{}]},
    "a list": lambda content: [content],
}


@pytest.mark.parametrize("name", MANIFEST_DAMAGE)
def test_a_manifest_that_lies_is_named(name: str, tmp_path: Path) -> None:
    damaged = write_run(tmp_path)
    _edit(damaged / "manifest.json", MANIFEST_DAMAGE[name])
    with pytest.raises(InputError, match="manifest") as error:
        Run(damaged)
    assert str(damaged) in str(error.value)


def test_a_manifest_that_lies_ends_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, whole = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    _edit(damaged / "manifest.json", MANIFEST_DAMAGE["no model"])
    assert draw(monkeypatch, "tiny", tmp_path, "--no_video", "--layers", "0") == 1
    assert f"error: {damaged / 'manifest.json'} is damaged" in capsys.readouterr().err
    assert (whole / "plots" / "summary.csv").exists()


SAMPLE_DAMAGE: dict[str, Callable[[Any], Any]] = {
    "null": lambda content: None,
    "no texts": _without("tokens_text"),
    "no prompt length": _without("prompt_length"),
    "no id": _without("id"),
    "texts are numbers": lambda content: content | {"tokens_text": [1] * 12},
    "too few texts": lambda content: content | {"tokens_text": content["tokens_text"][:-1]},
    "prompt length is a text": lambda content: content | {"prompt_length": "4"},
    "prompt length is negative": lambda content: content | {"prompt_length": -5},
    "prompt length is too large": lambda content: content | {"prompt_length": 9999},
}


@pytest.mark.parametrize("name", SAMPLE_DAMAGE)
def test_a_sample_that_lies_is_named(name: str, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    Run(run).samples[0].check()
    _edit(run / "sample_000" / "sample.json", SAMPLE_DAMAGE[name])
    with pytest.raises(InputError, match="is damaged") as error:
        Run(run).samples[0].check()
    assert str(run / "sample_000") in str(error.value)


def test_a_sample_that_lies_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, incoming=[planted(4, 12), planted(4, 12)])
    _edit(run / "sample_001" / "sample.json", SAMPLE_DAMAGE["null"])
    assert draw(monkeypatch, "tiny", tmp_path, "--no_video", "--layers", "0", "--report") == 1
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and str(run / "sample_001") in error and "damaged" in error
    assert (run / "plots" / "sample_000" / "incoming.png").exists() and (run / "report.html").exists()


KEPT = {"layers": "0,1,2", "heads": "0,1,2,3"}
INCOMING, BLOCKED = np.ones((4, 3, 4, 12)), np.ones((4, 3, 4))
TOKENS, CONFIDENCE = np.ones((5, 12)), np.ones((4, 12))


@pytest.mark.parametrize(
    ("file", "tensors", "metadata"),
    [
        ("incoming", {"other": np.ones(3)}, KEPT),
        ("incoming", {"incoming": INCOMING, "blocked": BLOCKED}, None),
        ("incoming", {"incoming": INCOMING}, KEPT),
        ("incoming", {"incoming": INCOMING, "blocked": BLOCKED}, {"layers": "a", "heads": "0"}),
        ("incoming", {"incoming": INCOMING, "blocked": BLOCKED}, {"layers": "0", "heads": "0"}),
        ("incoming", {"incoming": INCOMING[:0], "blocked": BLOCKED[:0]}, KEPT),
        ("trajectory", {"tokens": TOKENS, "confidence": CONFIDENCE, "unmasked_at": np.ones(3)}, {}),
        ("trajectory", {"tokens": TOKENS[:3], "confidence": CONFIDENCE, "unmasked_at": np.ones(12)}, {}),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    file: str, tensors: dict[str, Any], metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    run = write_run(tmp_path, incoming=[planted(4, 12)])
    save_file(tensors, run / "sample_000" / f"{file}.safetensors", metadata)
    with pytest.raises(InputError, match="damaged") as error:
        Run(run).samples[0].check()
    assert str(run / "sample_000") in str(error.value)


def test_a_copy_of_a_sample_is_no_sample(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    shutil.copytree(run / "sample_000", run / "sample_000 copy")
    assert [sample.index for sample in Run(run).samples] == [0]


def test_keys_that_do_not_exist_yet_are_no_tokens(tmp_path: Path) -> None:
    """A sequence that grows: half of the positions are never keys, and count in no definition."""
    incoming = planted(6, 20)
    run = Run(write_run(tmp_path, incoming=[np.concatenate([incoming, np.full_like(incoming, np.nan)], axis=-1)]))
    found = statistics.count(run, run.samples[0], 3.0).definitions
    shares = {name: tokens / of for name, (tokens, of, _, _) in found.items()}
    assert shares["moving-sinks"] == shares["diffusion-transformers"] == pytest.approx(1 / 20)
    assert shares["streaming-llm"] == pytest.approx(4 / 20)


def test_comparing_with_a_damaged_sample_leaves_its_pair_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = (write_run(tmp_path / name, incoming=[planted(4, 12), planted(4, 12)]) for name in ("a", "b"))
    (other / "sample_000" / "sample.json").write_text("null")
    assert draw(monkeypatch, "tiny", run, "--no_video", "--layers", "0", "--compare", other) == 1
    assert str(other / "sample_000") in capsys.readouterr().err
    assert (run / "report.html").exists()


def test_no_ffmpeg_gives_a_gif_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "missing"))
    run = write_run(tmp_path)
    assert draw(monkeypatch, "tiny", tmp_path, "--layers", "0") == 0
    assert "only GIF" in capsys.readouterr().err
    films = {path.name for path in (run / "plots" / "sample_000").glob("*film*")}
    assert films == {"incoming_film.gif"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tiny", "nothing"), "there is no folder"),
        (("tiny", "."), "there is no run in"),
        (("LLaDA", "runs"), "there are runs of tiny"),
        (("tiny", "runs", "--epsilon", "-1"), "0 or more"),
        (("tiny", "runs", "--samples", "a"), "numbers and ranges"),
        (("tiny", "runs", "--format", "gif"), "invalid choice"),
        (("tiny", "runs", "--layers", "0,7"), "layer 7 is not in"),
        (("tiny", "runs", "--processes", "0"), "1 or more"),
        (("tiny", "runs", "--samples", "0,99"), "sample 99 is in no run of this model: they have 0 to 0"),
        (("tiny", "runs", "--compare", "nowhere"), "nowhere is not a run folder"),
        (("tiny", "runs", "--compare", "empty_run"), "no finished sample in common"),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    write_run(tmp_path / "runs")
    write_run(tmp_path, "empty_run")
    shutil.rmtree(tmp_path / "empty_run" / "sample_000")
    monkeypatch.chdir(empty if arguments[1] == "." else tmp_path)
    assert draw(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not list(tmp_path.rglob("plots"))


def test_a_single_step_and_a_single_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path, incoming=[np.ones((1, 1, 1, 1), dtype=np.float32)], prompt_length=0)
    assert draw(monkeypatch, "tiny", tmp_path, "--no_video") == 0
    [head] = rows(run / "plots" / "heads.csv")
    assert head["sinks_per_step"] == "0" and head["displacement_per_step"] == "" and head["dwell_steps"] == ""


def test_two_commands_do_not_draw_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path)
    (run / "plots").mkdir()
    with alone_in(run / "plots"):
        assert draw(monkeypatch, "tiny", tmp_path, "--no_video") == 2
    assert f"error: {run / 'plots'} is being filled by another process" in capsys.readouterr().err
    assert not list((run / "plots").iterdir())
    assert draw(monkeypatch, "tiny", tmp_path, "--no_video") == 0


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_a_stopped_command_leaves_nothing_behind(sent: signal.Signals, tmp_path: Path) -> None:
    """Neither a half-written picture under its own name nor a process; the same command then goes on."""
    run = write_run(tmp_path, incoming=[planted(32, 60, 8, 8)])
    command = [sys.executable, plots_creation.__file__, "tiny", str(tmp_path), "--processes", "2"]
    hear = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which tests in the background would not
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=hear)
    while not list((run / "plots").glob("*/*.png")):
        assert process.poll() is None
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.send_signal(sent)
    _, said = process.communicate(timeout=60)
    assert "Traceback" not in said
    if sent is signal.SIGINT:
        assert process.returncode == 130 and "the same command goes on" in said
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    for picture in (run / "plots").glob("*/*.png"):
        Image.open(picture).load()
