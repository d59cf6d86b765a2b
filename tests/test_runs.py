"""The run folder: what is written is read back, exactly and a step at a time; nothing half-written stays."""

from __future__ import annotations

import errno
import json
import re
import resource
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks import files, runs
from sinks.errors import InputError
from sinks.files import write_json
from sinks.runs import Run, create_run, cut_batches, find_runs, run_name, unfinished, update_states
from sinks.writer import Layout, SampleWriter

LAYOUT = Layout(
    steps=3,
    length=4,
    layers=[2, 0],
    heads=[1, 3, 0],
    layer_count=3,
    head_count=4,
    patterns="full",
    pattern_steps=[0, 2],
)


def manifest(samples: int = 2, model: str = "tiny") -> dict[str, Any]:
    return {
        "model": model,
        "sampling": {"gen_len": 3, "block_len": 3},
        "spec": {"attention": "full", "mask_token_id": 9},
        "samples": [{"index": i, "state": "missing"} for i in range(samples)],
    }


class Written(NamedTuple):
    tokens: np.ndarray
    confidence: np.ndarray
    incoming: np.ndarray
    blocked: np.ndarray
    pattern: np.ndarray


def write_sample(run: Path, index: int, layout: Layout = LAYOUT, info: dict[str, Any] | None = None) -> Written:
    """Random numbers of the right kinds; positions 1, 3, 2 are filled at steps 0, 1, 2."""
    random = np.random.default_rng(index)
    shape = (layout.steps, len(layout.layers), len(layout.heads), layout.length)
    tokens = np.array([[5, 9, 9, 9], [5, 6, 9, 9], [5, 6, 9, 8], [5, 6, 7, 8]])
    confidence = np.where(tokens[:-1] == 9, random.random((3, 4)), np.nan)
    blocked = random.integers(0, 9, (layout.steps, layout.layer_count, layout.head_count))
    pattern_shape = (layout.steps, *next(iter(layout.pattern.values()))[1])
    written = Written(tokens, confidence, random.random(shape), blocked, random.random(pattern_shape))
    with SampleWriter(run, index, layout, tokens[0]) as sample:
        for t in range(layout.steps):
            sample.step(
                t,
                tokens[t + 1],
                confidence[t],
                written.incoming[t],
                written.blocked[t],
                value_norm=written.incoming[t] * 2 if layout.value_norm else None,
                pattern=written.pattern[t] if t in layout.pattern_steps else None,
            )
        sample.finish(info or {"prompt": "p", "reference": None, "text": "t", "prompt_length": 1, "tokens_text": ["a"]})
    return written


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return create_run(tmp_path, run_name(3, 3, 3), manifest())


def half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def test_what_is_written_is_read_back_a_step_at_a_time(run: Path) -> None:
    written = write_sample(run, 0)
    sample = Run(run).samples[0]
    assert (sample.index, sample.steps, sample.layers, sample.heads) == (0, 3, [2, 0], [1, 3, 0])
    for t in range(3):
        np.testing.assert_array_equal(sample.incoming(t), half(written.incoming[t]))
        np.testing.assert_array_equal(sample.blocked(t), written.blocked[t])
        np.testing.assert_array_equal(sample.confidence(t), half(written.confidence[t]))
    np.testing.assert_array_equal(sample.incoming(), half(written.incoming))
    np.testing.assert_array_equal(sample.incoming(-1), sample.incoming(2))
    np.testing.assert_array_equal(sample.tokens(), written.tokens)
    np.testing.assert_array_equal(sample.tokens(-1), [5, 6, 7, 8])
    np.testing.assert_array_equal(sample.unmasked_at, [-1, 0, 2, 1])
    assert (sample.prompt, sample.reference, sample.text, sample.prompt_length) == ("p", None, "t", 1)
    assert sample.tokens_text == ["a"]


def test_layers_and_heads_are_the_models_own_numbers(run: Path) -> None:
    written = write_sample(run, 0)
    sample = Run(run).samples[0]
    np.testing.assert_array_equal(sample.incoming(1, layer=0), half(written.incoming[1, 1]))
    np.testing.assert_array_equal(sample.incoming(layer=2, head=3), half(written.incoming[:, 0, 1]))
    np.testing.assert_array_equal(sample.pattern(2, layer=0, head=3), half(written.pattern[2, 1, 1]))
    mean = half(written.pattern[0, 0]).mean(0)
    np.testing.assert_allclose(sample.pattern(0, layer=2), mean, rtol=1e-6)


def test_mean_patterns_and_value_norms(run: Path) -> None:
    layout = Layout(3, 4, [0, 1], [0], 2, 1, value_norm=True, patterns="mean", pattern_steps=[1], dtype="float32")
    written = write_sample(run, 0, layout)
    sample = Run(run).samples[0]
    np.testing.assert_array_equal(sample.incoming(2), written.incoming[2].astype(np.float32))
    np.testing.assert_array_equal(sample.value_norm(2), half(written.incoming[2] * 2))
    np.testing.assert_array_equal(sample.pattern(1, layer=1), half(written.pattern[1, 1]))
    with pytest.raises(InputError, match="mean over heads only"):
        sample.pattern(1, layer=1, head=0)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda sample: sample.incoming(3), "step 3 is not in .*: there are 0 to 2"),
        (lambda sample: sample.tokens(-5), "step -5 is not in .*: there are 0 to 3"),
        (lambda sample: sample.incoming(0, layer=1), "layer 1 is not in .*: there are 2, 0"),
        (lambda sample: sample.pattern(0, layer=2, head=2), "head 2 is not in .*: there are 1, 3, 0"),
        (lambda sample: sample.pattern(1, layer=2), "keeps no pattern of step 1; there are: 0, 2"),
        (lambda sample: sample.value_norm(), "holds no value_norm"),
    ],
)
def test_asking_for_what_is_not_there(run: Path, ask: Any, message: str) -> None:
    write_sample(run, 0)
    with pytest.raises(InputError, match=message):
        ask(Run(run).samples[0])


def test_a_damaged_file_is_named(run: Path) -> None:
    write_sample(run, 0)
    path = run / "sample_000" / "incoming.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"incoming\.safetensors is damaged"):
        Run(run).samples[0].incoming(0)


def test_metadata_name_the_unit(run: Path) -> None:
    write_sample(run, 0)
    header = (run / "sample_000" / "incoming.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    metadata = json.loads(header[8 : 8 + length])["__metadata__"]
    assert metadata == {
        "unit": "incoming attention: sum over queries, mean 1",
        "layers": "2,0",
        "heads": "1,3,0",
    }


def test_values_that_are_not_numbers_and_values_that_are_too_large(run: Path) -> None:
    layout = Layout(1, 3, [0], [0], 1, 1)
    incoming = np.array([[[np.nan, 8192.0, 1e6]]])
    with SampleWriter(run, 0, layout, np.array([-1, -1, -1])) as sample:
        sample.step(0, np.array([4, -1, -1]), np.array([np.nan, 1.0, 0.5]), incoming)
        sample.finish({})
    read = Run(run).samples[0]
    np.testing.assert_array_equal(read.incoming(0), [[[np.nan, 8192.0, 65504.0]]])  # saturated, never infinite
    np.testing.assert_array_equal(read.tokens(), [[-1, -1, -1], [4, -1, -1]])
    np.testing.assert_array_equal(read.blocked(), [[[0]]])


def test_a_sample_counts_once_its_json_is_there(run: Path) -> None:
    write_sample(run, 0)
    with SampleWriter(run, 1, LAYOUT, np.array([5, 9, 9, 9])):
        pass
    assert [sample.index for sample in Run(run).samples] == [0]
    assert [sample["state"] for sample in update_states(run)["samples"]] == ["done", "missing"]
    assert unfinished(run, cut_batches(2, 1)) == [range(1, 2)]
    assert unfinished(run, cut_batches(2, 2)) == [range(0, 2)]


def test_an_interrupted_sample_leaves_no_half_files_and_is_written_anew(run: Path) -> None:
    with pytest.raises(KeyboardInterrupt), SampleWriter(run, 0, LAYOUT, np.array([5, 9, 9, 9])):
        raise KeyboardInterrupt
    assert list((run / "sample_000").iterdir()) == []
    (run / "sample_000" / "left-over").touch()
    write_sample(run, 0)
    names = sorted(path.name for path in (run / "sample_000").iterdir())
    assert names == ["attention", "incoming.safetensors", "sample.json", "trajectory.safetensors"]


def test_the_same_sample_is_the_same_bytes(tmp_path: Path) -> None:
    folders = [create_run(tmp_path, "run", manifest()) for _ in range(2)]
    assert [folder.name for folder in folders] == ["run", "run-2"]
    for folder in folders:
        write_sample(folder, 0)
    first, second = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in folders
    )
    assert first == second


def test_names_of_runs(tmp_path: Path) -> None:
    assert re.fullmatch(r"T\d{4}_\d{6}-S64-L128-B32", run_name(64, 128, 32))
    names = [create_run(tmp_path / "a" / "b", "x", manifest()).name for _ in range(3)]
    assert names == ["x", "x-2", "x-3"]


def test_samples_beyond_999_stay_in_order(run: Path) -> None:
    for index in (1000, 999, 2):
        write_sample(run, index)
    assert [sample.index for sample in Run(run).samples] == [2, 999, 1000]


def test_find_runs_below_a_folder_and_at_it(tmp_path: Path) -> None:
    first = create_run(tmp_path / "LLaDA", "r", manifest(model="LLaDA"))
    second = create_run(tmp_path / "deep" / "MMaDA", "r", manifest(model="MMaDA"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text("{}")
    assert [run.path for run in find_runs(tmp_path)] == [first, second]
    assert [run.path for run in find_runs(tmp_path, "MMaDA")] == [second]
    assert [run.path for run in find_runs(first)] == [first]
    with pytest.raises(InputError, match="there is no folder"):
        find_runs(tmp_path / "missing")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not a run folder: it holds no manifest.json"),
        ("{", "is not valid JSON"),
        ("[]", "names no schema_version"),
        ('{"schema_version": "a"}', "names no schema_version"),
        ('{"schema_version": 99}', "has schema version 99, known here is 1"),
    ],
)
def test_what_is_no_run(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=message):
        Run(tmp_path)


@given(count=st.integers(0, 50), batch_size=st.integers(1, 9))
def test_batches_cover_the_samples_in_order(count: int, batch_size: int) -> None:
    batches = cut_batches(count, batch_size)
    assert [index for batch in batches for index in batch] == list(range(count))
    assert all(len(batch) == batch_size for batch in batches[:-1])


@pytest.mark.parametrize("steps", [16, 64])
def test_memory_does_not_grow_with_the_steps(run: Path, steps: int) -> None:
    layout = Layout(steps, 1024, range(3), range(4), 3, 4)
    incoming = np.ones((3, 4, 1024), dtype=np.float32)
    tokens, confidence = np.zeros(1024, dtype=np.int64), np.zeros(1024, dtype=np.float32)
    with SampleWriter(run, 0, layout, tokens) as sample:
        tracemalloc.start()
        for t in range(steps):
            sample.step(t, tokens, confidence, incoming)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        sample.finish({})
    assert peak < 5 * incoming.nbytes
    assert np.all(Run(run).samples[0].incoming(steps - 1) == 1)


def test_the_size_estimate_is_what_the_files_take(run: Path) -> None:
    write_sample(run, 0)
    sizes = [path.stat().st_size for path in (run / "sample_000").rglob("*.safetensors")]
    headers = 1024 * len(sizes)
    assert LAYOUT.nbytes <= sum(sizes) <= LAYOUT.nbytes + headers
    # tokens 4·4·4, confidence 3·4·2, unmasked_at 4·4; incoming 3·2·3·4·2, blocked 3·3·4·2; patterns 2·3·4·4·2
    assert LAYOUT.nbytes == 64 + 24 + 16 + 144 + 72 + 2 * 192


def test_errors_of_the_disk_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot create .*file/runs: a part of this path is a file") as error:
        create_run(tmp_path / "file" / "runs", "x", manifest())
    assert "\n" not in str(error.value)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(InputError, match=r"cannot write .*x\.json: the disk is full"):
        write_json(tmp_path / "x.json", {})
    assert not (tmp_path / "x.json").exists()


def test_a_file_that_may_not_grow(run: Path) -> None:
    """A real limit of the operating system, hit in the middle of a stream."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    layout = Layout(8, 4096, range(4), range(4), 4, 4)
    tokens, confidence = np.zeros(4096), np.zeros(4096)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, before[1]))
    try:
        with (
            pytest.raises(InputError, match=r"incoming\.safetensors: the file would pass the size that is allowed"),
            SampleWriter(run, 0, layout, tokens) as sample,
        ):
            for t in range(8):
                sample.step(t, tokens, confidence, np.zeros((4, 4, 4096)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((run / "sample_000").iterdir()) == []


def test_reading_needs_no_torch(run: Path) -> None:
    write_sample(run, 0)
    code = (
        "import sys; from sinks import Run; sample = Run(sys.argv[1]).samples[0]; "
        "sample.incoming(0), sample.pattern(0, 2); print('torch' in sys.modules)"
    )
    root = Path(runs.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code, run], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_run_that_was_moved_is_still_a_run(run: Path, tmp_path: Path) -> None:
    written = write_sample(run, 0)
    shutil.move(run, tmp_path / "elsewhere")
    np.testing.assert_array_equal(Run(tmp_path / "elsewhere").samples[0].tokens(), written.tokens)
