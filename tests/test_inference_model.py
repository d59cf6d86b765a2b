"""The command line: what a user types, what lies in the folder afterwards, what is said when it cannot be done."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_dream, write_llada, write_llama
from safetensors.torch import load_file, save_file

import inference_model
from sinks import files, inference
from sinks.errors import NotFinite
from sinks.runs import Run

Cli = Callable[..., Run]
SHORT = ("--gen_len", "8", "--block_len", "4")


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llada(tmp_path_factory.mktemp("models") / "llada")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Five prompts of unequal lengths."""
    path = tmp_path / "questions.jsonl"
    texts = ["a b c", "d", "e f g h i j", "k l", "m n o p"]
    path.write_text("\n".join(json.dumps({"question": text, "answer": "#### 5"}) for text in texts))
    return path


@pytest.fixture
def run_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call the script in this process, inside an empty folder."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    def run(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["inference_model.py", *map(str, arguments)])
        inference_model.main()

    return run


@pytest.fixture
def cli(run_in: Callable[..., None], tmp_path: Path) -> Cli:
    """Call the script and return the one run that it made or resumed."""

    def call(*arguments: object) -> Run:
        before = set((tmp_path / "cwd" / "runs").glob("*"))
        run_in(*arguments)
        made = set((tmp_path / "cwd" / "runs").glob("*")) - before
        assert len(made) == 1
        return Run(made.pop())

    return call


def contents(folder: Path) -> dict[str, Any]:
    """Every file of a run: JSON without what differs between equal runs, the rest as bytes."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".json":
            value = json.loads(path.read_text(encoding="utf-8"))
            found[str(path.relative_to(folder))] = {
                k: v for k, v in value.items() if k not in ("timings", "created", "command", "git_commit")
            }
        elif path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def test_full_patterns_of_an_unmodified_model(cli: Cli, llada: Path) -> None:
    plain = cli(llada, "--prompt", "a b c", *SHORT, "--steps", 8).samples[0]
    sample = cli(llada, "--prompt", "a b c", *SHORT, "--steps", 8, "--attention", "full").samples[0]
    assert sample.pattern_steps == list(range(8))
    patterns = np.array(
        [[[sample.pattern(t, layer, head) for head in range(4)] for layer in range(3)] for t in range(8)]
    )
    assert patterns.shape == (8, 3, 4, 11, 11)
    np.testing.assert_allclose(patterns.sum(-1), 1, atol=1e-3)  # kept as float16
    np.testing.assert_allclose(patterns.sum(-2), sample.incoming(), atol=5e-3)
    np.testing.assert_array_equal(sample.tokens(), plain.tokens())
    assert plain.pattern_steps == []


def test_what_a_run_holds(cli: Cli, llada: Path, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = cli("LLaDA", "--checkpoint", llada, "--dataset", questions, *SHORT, "--steps", 4)
    assert run.path.name.endswith("-S4-L8-B4")
    manifest = run.manifest
    assert (manifest["model"], manifest["checkpoint"], manifest["revision"]) == ("LLaDA", str(llada), None)
    assert (manifest["device"], manifest["dtype"], manifest["seed"]) == ("cpu", "float32", 0)
    assert manifest["attention_path"] in ("chunked", "reference")
    assert manifest["settings"]["steps"] == manifest["sampling"]["steps"] == 4
    assert manifest["sampling"]["remasking"] == "low_confidence"
    assert manifest["samples"] == [{"index": i, "id": f"questions.jsonl/{i}", "state": "done"} for i in range(5)]
    sample = run.samples[2]
    assert (sample.prompt, sample.reference, sample.prompt_length) == ("e f g h i j", "#### 5", 6)
    assert sample.tokens_text[:6] == ["e", "f", "g", "h", "i", "j"]
    assert sample.incoming().shape == (4, 3, 4, 14)
    np.testing.assert_allclose(sample.incoming().sum(-1), 14, rtol=1e-3)
    assert sorted(sample.unmasked_at[6:]) == [0, 0, 1, 1, 2, 2, 3, 3]  # two tokens a step, block by block
    assert sorted(sample.unmasked_at[6:10]) == [0, 0, 1, 1]
    out = capsys.readouterr().out
    assert f"run             {run.path.relative_to(Path.cwd())}" in out
    assert "samples         5 of 5 done" in out
    assert "exact answers   0 of 5" in out


def test_batches_change_nothing(cli: Cli, llada: Path, questions: Path) -> None:
    arguments = (llada, "--dataset", questions, *SHORT, "--attention", "mean", "--attention_steps", 2)
    alone, together = (cli(*arguments, "--batch_size", size) for size in (1, 3))
    for one, other in zip(alone.samples, together.samples, strict=True):
        np.testing.assert_array_equal(one.tokens(), other.tokens())
        assert (one.text, one.prompt_length) == (other.text, other.prompt_length)
        assert one.pattern_steps == other.pattern_steps == [0, 7]
        a, b = (sample.incoming().astype(np.float16) for sample in (one, other))
        assert np.all(np.abs(a.astype(np.float32) - b.astype(np.float32)) <= np.spacing(np.maximum(a, b)))
        np.testing.assert_allclose(one.pattern(7, 2), other.pattern(7, 2), atol=1e-3)


def test_samples_that_do_not_fit_together_go_in_halves(
    cli: Cli, llada: Path, questions: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of five, two and one fit and three do not; memory runs out in the middle of a generation."""
    expected = cli(llada, "--dataset", questions, *SHORT, "--batch_size", 2)
    really, tried = inference.denoise, []

    def denoise(lm: Any, canvas: Any, *rest: Any) -> Iterator[Any]:
        tried.append(len(canvas.tokens))
        for step in really(lm, canvas, *rest):
            if len(canvas.tokens) > 2 and step.index == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            yield step

    monkeypatch.setattr(inference, "denoise", denoise)
    run = cli(llada, "--dataset", questions, *SHORT, "--batch_size", 5)
    assert tried == [5, 2, 3, 1, 2]
    assert caplog.text.count("going on with halves") == 2
    for one, other in zip(run.samples, expected.samples, strict=True):
        np.testing.assert_array_equal(one.tokens(), other.tokens())


def test_a_sample_that_does_not_fit_is_named(
    run_in: Any, llada: Path, questions: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denoise(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(inference, "denoise", denoise)
    with pytest.raises(SystemExit, match="2"):
        run_in(llada, "--dataset", questions, *SHORT)
    assert "sample 0 (" in capsys.readouterr().err
    assert not list(Path.cwd().glob("runs/*"))


def test_the_largest_batch_is_one_on_a_cpu(cli: Cli, llada: Path, questions: Path) -> None:
    run = cli(llada, "--dataset", questions, *SHORT, "--batch_size", "auto")
    assert run.manifest["settings"]["batch_size"] == "auto"
    assert [sample.info["timings"]["samples_together"] for sample in run.samples] == [1] * 5


def test_a_part_of_the_layers_and_heads(cli: Cli, llada: Path) -> None:
    arguments = (llada, "--prompt", "a b c", *SHORT, "--attention", "full", "--attention_steps", 1)
    everything, part = (cli(*arguments, *more).samples[0] for more in ((), ("--layers", "2,0", "--heads", "1-2")))
    assert (part.layers, part.heads, part.pattern_steps) == ([2, 0], [1, 2], [0])
    np.testing.assert_array_equal(part.incoming(3, layer=0, head=2), everything.incoming(3, layer=0, head=2))
    np.testing.assert_array_equal(part.pattern(0, layer=2, head=1), everything.pattern(0, layer=2, head=1))
    assert part.blocked(0).shape == (3, 4)


def test_sink_masking(cli: Cli, llada: Path) -> None:
    arguments = (llada, "--prompt", "a b c", *SHORT)
    plain, none, one = (cli(*arguments, *more) for more in ((), ("--mask_sinks", 0), ("--mask_sinks", 1)))
    assert (plain.manifest["masking"], one.manifest["masking"]["top_k"]) == (None, 1)
    np.testing.assert_array_equal(none.samples[0].tokens(), plain.samples[0].tokens())
    assert not none.samples[0].blocked().any()
    blocked = one.samples[0].blocked()
    assert not blocked[0].any()
    assert np.all(blocked[1:] == 1)  # with epsilon 0 the strongest key is always above the mean of the others


def test_a_dream_model(cli: Cli, tmp_path: Path) -> None:
    model = write_dream(tmp_path / "dream")
    run = cli(model, "--prompt", "a b c", "--gen_len", 6, "--steps", 3, "--top_p", 0.9, "--alg_temp", 0.5)
    assert run.path.name.endswith("-S3-L6-B6")  # no blocks
    assert run.manifest["sampling"]["top_p"] == 0.9
    assert run.samples[0].incoming().shape == (3, 3, 4, 9)
    assert np.all(run.samples[0].tokens(-1) != 63)


def test_an_autoregressive_model(cli: Cli, tmp_path: Path) -> None:
    model = write_llama(tmp_path / "llama")
    sample = cli(model, "--prompt", "a b c", "--gen_len", 4, "--attention", "full").samples[0]
    assert sample.tokens(0).tolist() == [0, 1, 2, -1, -1, -1, -1]
    assert sample.unmasked_at.tolist() == [-1, -1, -1, 0, 1, 2, 3]
    exists = ~np.isnan(sample.incoming()[:, 0, 0])
    np.testing.assert_array_equal(exists, np.tri(4, 7, 2, dtype=bool))  # 3, 4, 5, 6 keys
    pattern = sample.pattern(2, layer=1, head=3)
    assert np.argwhere(~np.isnan(pattern)).tolist() == [[4, key] for key in range(5)]  # only the newest query
    np.testing.assert_allclose(np.nansum(pattern), 1, atol=1e-3)


def test_autoregressive_answers_that_end_in_different_places(cli: Cli) -> None:
    """Rows that have ended write no more, while others of the batch go on; a stored sample keeps its length."""
    run = cli("tiny-ar", "--num_samples", 3, "--gen_len", 64, "--batch_size", 3)
    assert len({int((sample.tokens(-1) >= 0).sum()) - sample.prompt_length for sample in run.samples}) > 1
    for sample in run.samples:
        incoming = sample.incoming(-1)
        written = int((sample.tokens(-1) >= 0).sum())
        assert incoming.shape == (8, 8, sample.prompt_length + 64)
        np.testing.assert_array_equal(~np.isnan(incoming[0, 0]), np.arange(incoming.shape[-1]) < written - 1)
        np.testing.assert_allclose(np.nansum(incoming, -1), written - 1, atol=0.5)


@pytest.fixture
def finished(cli: Cli, llada: Path, questions: Path) -> Run:
    """An unbroken run of five samples in batches of two."""
    return cli(llada, "--dataset", questions, *SHORT, "--batch_size", 2)


def test_a_run_that_is_being_filled_is_not_resumed(
    finished: Run, run_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with files.in_use(finished.path), files.in_use(finished.path), pytest.raises(SystemExit, match="2"):
        run_in("--resume", finished.path)
    assert capsys.readouterr().err.endswith(
        f"error: {finished.path} is being filled by another process; wait for it or stop it first\n"
    )
    run_in("--resume", finished.path)


@pytest.mark.parametrize("missing", [[1], [4], [0, 3], [0, 1, 2, 3, 4]])
def test_resuming_ends_like_an_unbroken_run(finished: Run, run_in: Callable[..., None], missing: list[int]) -> None:
    expected = contents(finished.path)
    for sample in (finished.path / f"sample_{index:03d}" for index in missing):
        (sample / "sample.json").unlink()
        (sample / ".incoming.safetensors.part").touch()  # the process was killed
    kept = (finished.path / "sample_002" / "incoming.safetensors").stat().st_mtime_ns
    run_in("--resume", finished.path, "--batch_size", 2)
    assert contents(finished.path) == expected
    redone = (finished.path / "sample_002" / "incoming.safetensors").stat().st_mtime_ns != kept
    assert redone == (2 in missing)  # a batch is computed as a whole, but what is there is left alone


def test_an_error_while_resuming_removes_nothing(finished: Run, run_in: Callable[..., None]) -> None:
    expected = contents(finished.path / "sample_000")
    shutil.rmtree(finished.path / "sample_001")
    (finished.path / "sample_001").touch()
    with pytest.raises(SystemExit):
        run_in("--resume", finished.path)
    assert contents(finished.path / "sample_000") == expected
    for sample in finished.path.glob("sample_*/"):
        shutil.rmtree(sample)
    (finished.path / "sample_000").touch()
    with pytest.raises(SystemExit):
        run_in("--resume", finished.path)
    assert (finished.path / "manifest.json").exists()


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_what_is_half_written_is_no_way_out_of_the_run(
    finished: Run, run_in: Callable[..., None], tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    mine = finished.path / "sample_000" / "sample.json" if link is os.symlink else tmp_path / "mine"
    if link is os.link:
        mine.write_bytes(b"mine")
    before = mine.read_bytes()
    link(mine, finished.path / ".manifest.json.part")
    (finished.path / "sample_001" / "sample.json").unlink()
    run_in("--resume", finished.path)
    assert mine.read_bytes() == before and not (finished.path / "manifest.json").is_symlink()


def test_a_manifest_of_other_samples_is_not_resumed(
    finished: Run, run_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((finished.path / "manifest.json").read_text(encoding="utf-8"))
    (finished.path / "manifest.json").write_text(json.dumps(manifest | {"samples": []}))
    with pytest.raises(SystemExit):
        run_in("--resume", finished.path)
    assert "lists other samples than its settings name" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b'{"index": 1', b"\xff\xff", b"[1, 2]"])
def test_a_damaged_sample_is_made_again(finished: Run, run_in: Callable[..., None], content: bytes) -> None:
    expected = contents(finished.path)
    (finished.path / "sample_001" / "sample.json").write_bytes(content)
    run_in("--resume", finished.path)
    assert contents(finished.path) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", 4, "--seed", 1), "was made with steps=None, seed=0; leave these out"),
        (("tiny",), "was made with model="),
    ],
)
def test_resuming_with_other_settings(
    finished: Run, run_in: Callable[..., None], capsys: pytest.CaptureFixture[str], arguments: Any, message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_in("--resume", finished.path, *arguments)
    assert message in capsys.readouterr().err


def test_resuming_with_other_prompts(
    finished: Run, run_in: Callable[..., None], questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions.write_text(questions.read_text().replace("a b c", "a b d"))
    with pytest.raises(SystemExit, match="2"):
        run_in("--resume", finished.path)
    assert "prompts_sha256 would not be the same" in capsys.readouterr().err


def stop_at(batch: int, error: BaseException) -> Callable[..., Iterator[Any]]:
    """A denoise that fails in the middle of the given batch."""
    calls = []

    def denoise(*arguments: Any) -> Iterator[Any]:
        calls.append(arguments)
        for step in original(*arguments):
            if len(calls) > batch and step.index == 3:
                raise error
            yield step

    original = inference.denoise
    return denoise


def test_an_interruption_can_be_resumed(
    finished: Run,
    run_in: Callable[..., None],
    llada: Path,
    questions: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = contents(finished.path)
    shutil.rmtree(finished.path)
    with monkeypatch.context() as patch:
        patch.setattr(inference, "denoise", stop_at(1, KeyboardInterrupt()))
        with pytest.raises(SystemExit, match="130"):
            run_in(llada, "--dataset", questions, *SHORT, "--batch_size", 2)
    [folder] = Path("runs").iterdir()
    assert f"go on with: python inference_model.py --resume {folder}" in capsys.readouterr().err
    assert [sample.index for sample in Run(folder).samples] == [0, 1]
    assert [path.name for path in folder.rglob("*.part")] == []
    run_in("--resume", folder)
    assert contents(folder) == expected


def test_a_failure_leaves_nothing_unless_a_sample_is_done(
    run_in: Callable[..., None], llada: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch, left in ((0, []), (1, ["sample_000"])):
        with monkeypatch.context() as patch:
            patch.setattr(inference, "denoise", stop_at(batch, RuntimeError("out of memory")))
            with pytest.raises(RuntimeError, match="out of memory"):
                run_in(llada, "--dataset", questions, *SHORT, "--runs_dir", "new/deeper")
        assert [path.parent.name for path in Path().rglob("sample.json")] == left
        assert Path("new").exists() == bool(left)


BAD = [
    ((), "name a MODEL: LLaDA, "),
    (("LLama9",), "unknown model 'LLama9'; use one of LLaDA, "),
    (("LLaDA", "--checkpoint", "./missing", "--dataset", "problems"), "no checkpoint at ./missing"),
    (("LLADA", "--gen_len", "10", "--block_len", "4"), "gen_len 10 is not divisible by block_len 4"),
    (("LLADA", "--gen_len", "8", "--block_len", "4", "--steps", "3"), "steps 3 is not divisible by the 2 blocks"),
    (("LLADA", "--steps", "0"), "steps is 0; it must be 1 or more"),
    (("LLADA", "--num_samples", "0"), "num_samples is 0; it must be 1 or more"),
    (("LLADA", "--batch_size", "-1"), "batch_size is -1; it must be 1 or more"),
    (("LLADA", "--batch_size", "some"), "'some' is neither a whole number nor auto"),
    (("LLADA", "--attention_steps", "0"), "attention_steps is 0"),
    (("LLADA", "--steps", "x"), "argument --steps: invalid int value: 'x'"),
    (("LLADA", "--step", "1"), "unrecognized arguments: --step 1"),
    (("LLADA", "--attention", "all"), "invalid choice: 'all'"),
    (("LLADA", "--offset", "-1"), "offset is -1; it must be 0 or more"),
    (("LLADA", "--epsilon", "-1"), "epsilon is -1.0; it must be a number of 0 or more"),
    (("LLADA", "--epsilon", "nan"), "epsilon is nan; it must be a number of 0 or more"),
    (("LLADA", "--mask_sinks", "1", "--mask_epsilon", "nan"), "mask_epsilon is nan"),
    (("LLADA", "--mask_epsilon", "inf"), "mask_epsilon is inf"),
    (("LLADA", "--mask_epsilon", "2"), "mask_epsilon has no effect without --mask_sinks"),
    (("LLADA", "--layers", "0-99999999999"), "cannot be read; write numbers and ranges"),
    (("LLADA", "--mask_sinks", "-1"), "top_k=-1"),
    (("LLADA", "--temperature", "nan"), "temperature is nan"),
    (("LLADA", "--remasking", "entropy"), "remasking 'entropy' is unknown to LLaDA; use one of low_confidence"),
    (("LLADA", "--top_p", "0.5"), "'top_p' is no setting of LLaDA"),
    (("LLADA", "--prompt", " "), "the prompt is empty"),
    (("LLADA", "--prompt", "a", "--dataset", "problems"), "give a prompt or a dataset, not both"),
    (("LLADA", "--dataset", "gsm9k"), "unknown dataset 'gsm9k'; use one of gsm8k, humaneval, problems"),
    (("LLADA", "--dataset", "broken.jsonl"), "broken.jsonl, line 2 is not valid JSON"),
    (("LLADA", "--dataset", "empty.jsonl"), "empty.jsonl, line 1 has an empty prompt"),
    (("LLADA", "--dataset", "problems", "--offset", "500"), "offset 500 is beyond the end of problems"),
    (("LLADA", "--prompt", "a", "--gen_len", "4096", "--block_len", "4096"), "model's 4096 positions"),
    (("LLADA", "--prompt", "a", *SHORT, "--layers", "1,3"), "layer 3 does not exist; the model has layers 0 to 2"),
    (("LLADA", "--prompt", "a", *SHORT, "--heads", "4"), "head 4 does not exist; the model has heads 0 to 3"),
    (("LLADA", "--prompt", "a", *SHORT, "--layers", "2-"), "layers '2-' cannot be read; write numbers and ranges"),
    (("LLADA", "--prompt", "a", *SHORT, "--heads", "1,0-2"), "heads '1,0-2' names one of them twice"),
    (("LLADA", "--prompt", "a", *SHORT, "--runs_dir", "empty.jsonl/runs"), "a part of this path is a file"),
    (("LLADA", "--prompt", "a", *SHORT, "--device", "cuda"), "torch sees no CUDA device"),
    (("LLADA", "--prompt", "a", *SHORT, "--device", "abacus"), "unknown device 'abacus'"),
    (("LLADA", "--prompt", "a", *SHORT, "--dtype", "int3"), "unknown dtype 'int3'"),
    (("--resume", "nowhere"), "nowhere is not a run folder"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) or "nothing" for arguments, _ in BAD])
def test_bad_input(
    run_in: Callable[..., None],
    llada: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    Path("broken.jsonl").write_text('{"question": "a"}\n{"question": \n')
    Path("empty.jsonl").write_text('{"question": ""}\n')
    with pytest.raises(SystemExit, match="2"):
        run_in(*(llada if argument == "LLADA" else argument for argument in arguments))
    out, err = capsys.readouterr()
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert "Traceback" not in err
    assert out == ""
    assert sorted(path.name for path in Path().iterdir()) == ["broken.jsonl", "empty.jsonl"]


EARLY = [case for case in BAD if not {"--layers", "--heads", "--runs_dir", "--device", "--dtype"} & {*case[0]}]


@pytest.mark.parametrize("arguments", [arguments for arguments, message in EARLY if "positions" not in message])
def test_what_can_be_known_early_is_said_before_a_model_loads(
    run_in: Callable[..., None], llada: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("transformers.modeling_utils.PreTrainedModel.from_pretrained", load)
    Path("broken.jsonl").write_text('{"question": "a"}\n{"question": \n')
    Path("empty.jsonl").write_text('{"question": ""}\n')
    with pytest.raises(SystemExit, match="2"):
        run_in(*(llada if argument == "LLADA" else argument for argument in arguments))


def test_no_network_and_no_cache(
    run_in: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("sinks.checkpoints.snapshot_download", download)
    with pytest.raises(SystemExit, match="2"):
        run_in("LLaDA", "--dataset", "problems")
    assert "cannot get GSAI-ML/LLaDA-8B-Instruct from the hub" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_full_patterns_are_refused_when_the_disk_is_too_small(
    run_in: Callable[..., None], llada: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**30}))
    arguments = (llada, "--prompt", "a b c", "--gen_len", 1021, "--block_len", 1021, "--steps", 64)
    with pytest.raises(SystemExit, match="2"):
        run_in(*arguments, "--attention", "full", "--attention_steps", 64)
    # 64 steps · 3 layers · 4 heads · 1024² keys and queries · 2 bytes are 1.5 GiB, incoming attention 0.0015
    assert "needs 1.502 GiB, but runs has 1.000 GiB free" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_a_sample_without_numbers_is_recorded_and_the_others_go_on(
    cli: Cli,
    finished: Run,
    llada: Path,
    questions: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def denoise(*arguments: Any) -> Iterator[Any]:
        *_, items = arguments
        for step in original(*arguments):
            if 3 in items and step.index == 2:
                raise NotFinite("the model computed NaN at step 2")
            yield step

    original = inference.denoise
    with monkeypatch.context() as patch:
        patch.setattr(inference, "denoise", denoise)
        with pytest.raises(SystemExit, match="1"):
            cli(llada, "--dataset", questions, *SHORT, "--batch_size", 5, "--runs_dir", "failing")
    [folder] = Path("failing").iterdir()
    states = Run(folder).manifest["samples"]
    assert [sample["state"] for sample in states] == ["done", "done", "done", "failed", "done"]
    assert states[3]["problem"] == "the model computed NaN at step 2"
    assert "failed          1; manifest.json says why" in capsys.readouterr().out
    for sample in Run(folder).samples:
        np.testing.assert_array_equal(sample.tokens(), finished.samples[sample.index].tokens())


@pytest.mark.parametrize(
    ("weight", "value", "where"),
    [
        ("blocks.1.q_proj.weight", torch.nan, "step 0, layer 1, head 0 of those captured"),
        ("transformer.ff_out.weight", torch.inf, "step 0, the logits"),
    ],
)
def test_broken_weights_are_named_and_recorded(
    run_in: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    weight: str,
    value: float,
    where: str,
) -> None:
    folder = write_llada(tmp_path / "broken")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    [name] = [name for name in tensors if name.endswith(weight)]
    tensors[name][0] = value
    save_file(tensors, file)
    with pytest.raises(SystemExit, match="2"):
        run_in(folder, "--dataset", "problems", "--num_samples", 2, *SHORT)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: no sample could be made: the model computed NaN or infinity at {where}")
    [run] = Path("runs").iterdir()
    assert [sample["state"] for sample in Run(run).manifest["samples"]] == ["failed", "failed"]
