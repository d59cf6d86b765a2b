"""Files from strangers: whatever they hold, they are read or refused in one line, and nothing else is touched."""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from functools import partial, reduce
from itertools import product
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_dream, write_llada
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import load, save
from synthetic_runs import planted, write_run

import sinks
from sinks import statistics
from sinks.answers import Answers
from sinks.checkpoints import identify
from sinks.errors import InputError
from sinks.inference import resumed_settings
from sinks.plan import Settings, plan
from sinks.prompts import load_prompts
from sinks.runs import Run, Sample, find_runs, update_states

counted = pytest.mark.parametrize("count", [20, pytest.param(5000, marks=pytest.mark.long)])  # inputs tried

NASTY = ["../../x", "/etc/passwd", "a\nb", "\ud800", "\0", "x" * 2000, "BF16", "F8_E4M3", "I16", "F32", "0,0", "full"]
LETTERS = st.text(st.characters(exclude_categories=()), max_size=8)  # halves of surrogate pairs too
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | LETTERS | st.sampled_from([*NASTY, -1, 10**4000])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(LETTERS, inner), max_leaves=6)
BROKEN = [b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf{}", b"1" * 5000, b"[" * 100_000, b'{"a":' * 100_000, b"1e999", b"NaN"]


@contextmanager
def read_or_refused() -> Iterator[None]:
    """No other error passes, and warnings are errors here."""
    said = "read"
    try:
        yield
    except InputError as error:
        said = str(error)
    assert said.strip() and said.splitlines() == [said] and len(said.encode()) < 1000


def fuzz(path: Path, contents: st.SearchStrategy[bytes], read: Callable[[], Any], count: int, known: list[Any]) -> None:
    """Read a file of many contents, and before of those (bytes, or values as JSON) that are known to be hard."""

    def check(content: Any) -> None:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        with read_or_refused():
            read()

    for content in known:
        check(content)
    settings(max_examples=count, suppress_health_check=list(HealthCheck))(given(contents)(check))()


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


@st.composite
def changed(draw: st.DrawFn, valid: Any) -> Any:
    """A JSON value with up to three of its parts replaced, dropped or added."""
    value = copy.deepcopy(valid)
    for *parents, last in draw(st.lists(st.sampled_from(list(places(valid))), min_size=1, max_size=3)):
        with suppress(LookupError, TypeError):  # a part that was changed before may hold nothing
            parent = reduce(getitem, parents, value)
            change = draw(st.sampled_from(("replace", "replace", "drop", "add")))
            if change == "drop":
                del parent[last]
            elif change == "replace" or isinstance(parent, list):
                parent[last] = draw(VALUES)
            else:
                parent[draw(LETTERS)] = draw(VALUES)
    return value


def documents(valid: Any) -> st.SearchStrategy[bytes]:
    """Contents of a JSON file: nearly valid ones most of the time."""
    values = (changed(valid) | changed(valid) | VALUES).map(json.dumps)
    return values.map(str.encode) | st.binary(max_size=40) | st.sampled_from(BROKEN)


def packed(header: str | bytes, data: bytes, length: int | None = None) -> bytes:
    """A safetensors file, which may lie about the length of its header."""
    header = header.encode() if isinstance(header, str) else header
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


@st.composite
def tensor_files(draw: st.DrawFn, valid: bytes) -> bytes:
    """A safetensors file with another header, length or data; or a whole one that holds another array."""
    size = 8 + int.from_bytes(valid[:8], "little")
    header, data = valid[8:size], valid[size:]
    kind = draw(st.sampled_from(("array", "header", "bytes", "length", "data", "cut")))
    if kind == "array":
        name = draw(st.sampled_from(sorted(load(valid))))
        dtype = draw(st.sampled_from(("float16", "float32", "float64", "int16", "int32", "int64", "uint8", "bool")))
        shape = draw(st.just(load(valid)[name].shape) | array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4))
        array = draw(arrays(dtype, shape))
        return save(load(valid) | {name: array}, json.loads(header).get("__metadata__"))
    if kind == "header":
        header = json.dumps(draw(changed(json.loads(header)))).encode()
    elif kind == "bytes":
        header = draw(st.binary(max_size=60) | st.sampled_from(BROKEN))
    elif kind == "data":
        data = (draw(st.binary(min_size=1, max_size=8)) * len(data))[: len(data)]
    elif kind == "cut":
        return valid[: draw(st.integers(0, len(valid)))]
    length = draw(st.sampled_from([0, 1, 2**31, 2**60, 2**64 - 1])) if kind == "length" else None
    return packed(header, data, length)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    incoming = [planted(2, 5, 2, 2)] * 2
    return write_run(tmp_path / "runs", "run", "tiny", incoming, prompt_length=2, patterns="full", pattern_steps=1)


def outside(run: Path) -> dict[Path, bytes]:
    """All files around a run folder."""
    paths = (path for path in run.parents[1].rglob("*") if path.is_file() and not path.is_relative_to(run))
    return {path: path.read_bytes() for path in paths}


READS: list[Callable[[Sample], Any]] = [
    Sample.check,
    lambda sample: (sample.prompt, sample.reference, sample.text, sample.prompt_length, sample.tokens_text),
    lambda sample: (sample.layers, sample.heads, sample.steps, sample.pattern_steps),
    lambda sample: (sample.incoming(), sample.incoming(0, 0, 0), sample.incoming(-1, layer=1)),
    lambda sample: (sample.blocked(), sample.blocked(1), sample.value_norm(0)),
    lambda sample: (sample.tokens(), sample.tokens(-1), sample.unmasked_at),
    lambda sample: (sample.confidence(), sample.confidence(0)),
    lambda sample: (sample.pattern(0, 1), sample.pattern(0, 0, 1)),
]


def read_all(folder: Path) -> None:
    """Everything that a run folder can be asked for; then what resuming it writes."""
    before = outside(folder)
    with read_or_refused():
        find_runs(folder.parent)
    with read_or_refused():
        run = Run(folder)
        for sample, read in product(run.samples, [*READS, lambda sample: statistics.count(run, sample, 3.0)]):
            with read_or_refused():
                read(sample)
        update_states(folder)
    assert outside(folder) == before


@counted
def test_manifests(run: Path, count: int) -> None:
    path = run / "manifest.json"
    valid = json.loads(path.read_bytes())
    known = [
        b'{"schema_version": ' + b"1" * 5000 + b"}",
        valid | {"schema_version": 10**4000},
        valid | {"model": "\ud800"},
        valid | {"seed": float("nan")},
        valid | {"samples": [{"index": 10**4000}]},
        valid | {"samples": [{"index": 0, "id": "../../x"}]},
        valid | {"spec": {"attention": "full"}},
    ]
    fuzz(path, documents(valid), partial(read_all, run), count, known)


@pytest.mark.parametrize("indices", [[-1], [0, 0], [True], [1.0], ["0"], ["../../x"], [None]])
def test_indices_of_samples_are_told_apart(run: Path, indices: list[Any]) -> None:
    path = run / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"samples": [{"index": index} for index in indices]}))
    with pytest.raises(InputError, match="samples has no index"):
        Run(run)


@counted
def test_descriptions_of_samples(run: Path, count: int) -> None:
    path = run / "sample_000" / "sample.json"
    valid = json.loads(path.read_bytes())
    known = [valid | {"prompt_length": 10**4000}, valid | {"index": "../../x"}, valid | {"reference": 5}]
    known.append({name: value for name, value in valid.items() if name != "reference"})
    fuzz(path, documents(valid), partial(read_all, run), count, known)


@counted
def test_settings_of_a_resumed_run(run: Path, count: int) -> None:
    path = run / "manifest.json"
    valid = json.loads(path.read_bytes()) | {"settings": {"model": "tiny"}}
    full = asdict(Settings("tiny", gen_len=8, block_len=8, prompt="one?"))
    known = [
        valid | {"settings": full | {name: value}}
        for name, value in product(full, [5, 0.5, "a\nb", [], {}, None, True, 10**400, "0-999999," * 300])
    ]
    fuzz(path, documents(valid | {"settings": full}), lambda: plan(resumed_settings(run, {})), count, known)


def test_a_stranger_does_not_have_us_run_code(run: Path) -> None:
    path = run / "manifest.json"
    settings = {"model": "tiny", "trust_remote_code": True}
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"settings": settings}))
    with pytest.raises(InputError, match="add --trust_remote_code"):
        resumed_settings(run, {})
    assert resumed_settings(run, {"trust_remote_code": True}).trust_remote_code


@counted
def test_samples_that_failed(run: Path, count: int) -> None:
    (run / "sample_000" / "sample.json").unlink()
    path = run / "sample_000" / "failed.json"
    known = [[], {"problem": 5}, {"problem": "x", "index": "../../x"}]
    fuzz(path, documents({"problem": "NaN"}), partial(read_all, run), count, known)
    path.write_text(json.dumps(known[-1]))
    assert update_states(run)["samples"][0]["index"] == 0


@counted
@pytest.mark.parametrize("file", ["incoming", "trajectory", "attention/step_0000"])
def test_tensors(run: Path, file: str, count: int) -> None:
    path = run / "sample_000" / f"{file}.safetensors"
    valid, before = path.read_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tensors, metadata = load(valid), {"layers": "0,1", "heads": "0,1", "kind": "full"}
    known = [
        valid.replace(b'"F16"', b'"BF16"'),
        valid.replace(b'"I32"', b'"F32"'),
        save({name: np.array(1.0, dtype=np.float32) for name in tensors}, metadata),
        save({name: np.full(array.shape, np.inf, np.float32) for name, array in tensors.items()}, metadata),
        save(tensors),
        valid[:-80] + b"\x7c" * 80,  # signalling NaN
        save(tensors, metadata | {"layers": "1" * 5000}),
        packed("{}", b"", 2**60),
        packed(json.dumps({"incoming": {"dtype": "F16", "shape": [1] * 300, "data_offsets": [0, 2]}}), b"ab"),
        packed(json.dumps({"incoming": {"dtype": "F16", "shape": [2**59], "data_offsets": [0, 2**60]}}), b""),
        packed(json.dumps({"incoming": {"dtype": "a\nb" * 999, "shape": [], "data_offsets": [0, 0]}}), b""),
    ]
    fuzz(path, tensor_files(valid), partial(read_all, run), count, known)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


@pytest.mark.parametrize("name", ["sample_00", "sample_٠٠٠", "sample_-1", "sample_000-copy"])
def test_copies_of_samples_are_none(run: Path, name: str) -> None:
    (run / "sample_001").rename(run / name)
    (run / "sample_000" / "attention" / "step_x.safetensors").touch()
    [sample] = Run(run).samples
    assert sample.index == 0 and sample.pattern_steps == [0]


@pytest.mark.parametrize("name", "manifest.json sample_000 sample_001/sample.json plots .manifest.json.part".split())
@pytest.mark.parametrize("absolute", [True, False])
def test_links_out_of_a_run_are_not_followed(run: Path, name: str, absolute: bool) -> None:
    link, target = run / name, run.parents[1] / "elsewhere"
    link.rename(target) if link.exists() else target.touch()
    link.symlink_to(target if absolute else os.path.relpath(target, link.parent))
    with pytest.raises(InputError, match=f"{re.escape(str(link))} is a link out of "):
        Run(run)
    read_all(run)


def test_links_that_stay_in_the_run(run: Path, tmp_path: Path) -> None:
    (run / "sample_002").symlink_to("sample_001")
    (tmp_path / "link").symlink_to(run)
    assert [sample.index for sample in Run(tmp_path / "link").samples] == [0, 1, 2]


@pytest.mark.parametrize("name", ["manifest.json", "sample_000/sample.json", "sample_000/incoming.safetensors"])
def test_a_pipe_does_not_stall(run: Path, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(InputError, match=r"is neither a file nor a folder|is not a run folder"):
        Run(run)
    read_all(run)


@counted
def test_prompts(tmp_path: Path, count: int) -> None:
    path, row = tmp_path / "prompts.jsonl", {"question": "one?", "answer": "#### 1", "other": [1, {"a": None}]}
    known = [
        {"question": "x" * 10**7},
        {"question": "\ud800"},
        {"question": "\0"},
        {"question": float("nan")},
        b"\xef\xbb\xbf" + json.dumps(row).encode(),
    ]
    lines = st.lists(documents(row) | st.just(b""), max_size=4)
    fuzz(path, lines.map(b"\n".join), lambda: load_prompts(str(path)), count, [*known, *BROKEN])


@counted
@pytest.mark.parametrize("write", [write_llada, write_dream])
def test_configurations(tmp_path: Path, write: Callable[..., Path], count: int) -> None:
    path = write(tmp_path / "model", layers=1, hidden=8, tokenizer=False) / "config.json"
    valid = json.loads(path.read_bytes())
    known = [
        *(valid | {name: size} for name in valid for size in (10**6, 10**12, 10**400, 0, -1)),
        valid | {"eos_token_id": {}},
        valid | {"eos_token_id": [1, "2"]},
        valid | {"eos_token_id": 10**30},
        {"model_type": []},
        {"architectures": 5},
        {"model_type": "llada", "architectures": "a\nb"},
        {"model_type": "llada", "architectures": ["x" * 2000]},
    ]

    def read() -> None:
        with read_or_refused():
            identify(str(path.parent))
        sinks.load(str(path.parent), device="cpu")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fuzz(path, documents(valid), read, count, [*known, *BROKEN])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match="cannot read"):
        identify(str(path.parent))


@counted
def test_weights(tmp_path: Path, count: int) -> None:
    path = write_llada(tmp_path / "model", layers=1, hidden=8, heads=2, tokenizer=False) / "model.safetensors"
    contents = st.binary(max_size=60) | tensor_files(path.read_bytes())
    fuzz(path, contents, lambda: sinks.load(str(path.parent), device="cpu"), count, [b""])
    path.rename(path.with_name("pytorch_model.bin"))
    with pytest.raises(InputError, match="cannot load"):
        sinks.load(str(path.parent), device="cpu")


@counted
def test_kept_answers(tmp_path: Path, count: int) -> None:
    answers, path = Answers(str(tmp_path / "answers.db"), "settings"), tmp_path / "answer"
    answers.put("kind", ["request"], 1)
    with closing(sqlite3.connect(answers.path, isolation_level=None)) as database:
        database.execute("CREATE TABLE untyped AS SELECT * FROM answers")
        database.execute("DROP TABLE answers")
        database.execute("ALTER TABLE untyped RENAME TO answers")

        def read(kind: str) -> None:
            database.execute(f"UPDATE answers SET answer = CAST(? AS {kind})", [path.read_bytes()])
            answers.get("kind", ["request"])

        for kind in ("TEXT", "BLOB", "INTEGER"):
            fuzz(path, documents([{"a": 1.0}]), partial(read, kind), count, [*BROKEN, b"\xff\n" * 999])


@counted
def test_files_that_hold_no_answers(tmp_path: Path, count: int) -> None:
    path = tmp_path / "answers.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE answers (other)")
    valid = path.read_bytes()

    def read() -> None:
        answers = Answers(str(path), "settings")
        with read_or_refused():
            answers.get("kind", ["request"])
        answers.put("kind", ["request"], 1)

    starts = st.binary(max_size=200)
    fuzz(path, starts | starts.map(lambda start: start + valid[len(start) :]), read, count, [valid])


def test_nothing_is_ever_unpickled() -> None:
    root = Path(sinks.__file__).parents[1]
    sources = [path for place in ("*.py", "sinks/**/*.py", "benchmarks/**/*.py") for path in root.glob(place)]
    found = re.compile(r"\b(\w*pickle|dill|joblib|shelve|marshal|torch\.load|torch\.jit\.load)\b")
    assert len(sources) > 50
    assert [path for path in sources if found.search(path.read_text(encoding="utf-8"))] == []
