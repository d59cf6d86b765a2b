"""The lm-eval class: batches, repeats, kept answers, likelihood, consent, several processes."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_dream, write_llada, write_llama
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.tasks import TaskManager

import sinks
from sinks import arguments, evaluation, harness
from sinks.commandline import exits_cleanly
from sinks.errors import InputError
from sinks.harness import AutoregressiveModel, DreamModel, EvaluatedModel, LLaDAModel

ROOT = Path(__file__).parent.parent
TASKS = str(Path(__file__).parent / "tasks")
PROMPTS = [
    "a b c",
    "a b c d",
    "b c d e f",
    "a b c d e f g h i",
    "l k j i h g f e d c b a",
    " ".join("abcdefghijklmnopqrst"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "llada": write_llada(root / "llada"),
        "dream": write_dream(root / "dream"),
        "ar": write_llama(root / "ar"),
    }


def _requests(prompts: list[str] = PROMPTS, repeats: int = 1, **options: Any) -> list[Instance]:
    return [
        Instance("generate_until", {}, (prompt, options), index, metadata=("task", index, repeats))
        for index, prompt in enumerate(prompts)
    ]


_CLASSES = {"llada": LLaDAModel, "dream": DreamModel, "ar": AutoregressiveModel}


def _model(folders: dict[str, Path], _kind: str = "llada", **given: Any) -> EvaluatedModel:
    blocks = {"block_len": 4} if _kind == "llada" else {}
    model: EvaluatedModel = _CLASSES[_kind](pretrained=str(folders[_kind]), gen_len=8, **blocks, **given)
    return model


@pytest.mark.parametrize("kind", ["llada", "dream", "ar"])
@pytest.mark.parametrize(
    "extra", [{}, {"sink_top_k": 2}, {"temperature": 0.8, "sink_top_k": 1, "sink_control": "random"}]
)
def test_answers_do_not_depend_on_the_batch_size(folders: dict[str, Path], kind: str, extra: dict[str, Any]) -> None:
    alone = [
        _model(folders, kind, batch_size=size, **extra).generate_until(_requests(), disable_tqdm=True)
        for size in (1, 2, 3, 6)
    ]
    assert alone[0] == alone[1] == alone[2] == alone[3]
    assert len(set(alone[0])) > 1


def test_answers_are_those_of_generate(folders: dict[str, Path]) -> None:
    answers = _model(folders, batch_size=6).generate_until(_requests(), disable_tqdm=True)
    lm = sinks.load(str(folders["llada"]))
    assert [sinks.generate(lm, prompt, gen_len=8, block_len=4).text for prompt in PROMPTS] == [[a] for a in answers]


def test_sinks_do_not_depend_on_the_batch(folders: dict[str, Path]) -> None:
    lm = sinks.load(str(folders["llada"]))
    together = sinks.generate(lm, PROMPTS, gen_len=8, block_len=4, capture=sinks.Capture())
    assert together.incoming is not None
    for row, prompt in enumerate(PROMPTS):
        alone = sinks.generate(lm, prompt, gen_len=8, block_len=4, capture=sinks.Capture())
        assert alone.incoming is not None
        c = together.incoming[:, :, row, :, -alone.incoming.shape[-1] :]
        torch.testing.assert_close(c, alone.incoming[:, :, 0], atol=1e-4, rtol=0)
        assert torch.equal(sinks.detect(c, 0.3), sinks.detect(alone.incoming[:, :, 0], 0.3))


def test_answer_ends_at_a_stop_text(folders: dict[str, Path]) -> None:
    whole = _model(folders).generate_until(_requests(PROMPTS[:1]), disable_tqdm=True)[0]
    stop = whole.split()[2]
    [cut] = _model(folders).generate_until(_requests(PROMPTS[:1], until=[stop]), disable_tqdm=True)
    assert cut == whole.split(stop)[0] != whole


def test_repeats_draw_anew_and_padding_of_processes_does_not(folders: dict[str, Path]) -> None:
    [request] = _requests(PROMPTS[:1], repeats=2)
    model = _model(folders, temperature=1.0)
    first, second, padding = model.generate_until([request, request, request], disable_tqdm=True)
    assert first != second == padding


def test_long_prompt_keeps_its_end_and_is_counted(folders: dict[str, Path]) -> None:
    short = _model(folders, max_length=11)
    cut = short.generate_until(_requests(["a b c d e f"]), disable_tqdm=True)
    assert short.get_model_info()["truncated_prompts"] == 1
    assert cut == _model(folders).generate_until(_requests(["d e f"]), disable_tqdm=True)


# User report 7: answers of other settings must never be given.


def _count_forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    original = harness.denoise

    def denoise(lm: Any, canvas: Any, *args: Any, **kwargs: Any) -> Any:
        for step in original(lm, canvas, *args, **kwargs):
            counted.append(step.index)
            yield step

    monkeypatch.setattr(harness, "denoise", denoise)
    return counted


@pytest.mark.parametrize(
    "other",
    [
        *({"sink_top_k": 5}, {"sink_top_k": 0, "sink_epsilon": 1.0}, {"sink_layers": [1]}, {"sink_steps": [1, 3]}),
        *({"seed": 3}, {"steps": 4}),
    ],
    ids=str,
)
def test_kept_answers_know_their_settings(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    forwards, answers = _count_forwards(monkeypatch), str(tmp_path / "c.db")
    base: dict[str, Any] = {"sink_top_k": 0, "answers": answers}
    expected = _model(folders, **base).generate_until(_requests(PROMPTS[:3]), disable_tqdm=True)
    assert len(forwards) == 3 * 8
    forwards.clear()
    assert _model(folders, **base).generate_until(_requests(PROMPTS[:3]), disable_tqdm=True) == expected
    assert not forwards
    _model(folders, **{**base, **other}).generate_until(_requests(PROMPTS[:3]), disable_tqdm=True)
    assert forwards


def test_kept_answers_know_their_model(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards, answers = _count_forwards(monkeypatch), str(tmp_path / "c.db")
    folder = write_llada(tmp_path / "model")
    for seed in (0, 1):
        write_llada(folder, seed=seed)
        forwards.clear()
        LLaDAModel(pretrained=str(folder), gen_len=8, answers=answers).generate_until(_requests(PROMPTS[:1]))
        assert len(forwards) == 8


@pytest.mark.parametrize("damage", ["garbage", "schema", "row"])
def test_damaged_answers_are_one_line(folders: dict[str, Path], tmp_path: Path, damage: str) -> None:
    path = tmp_path / "c.db"
    given: dict[str, Any] = {"answers": str(path)}
    _model(folders, **given).generate_until(_requests(PROMPTS[:1]), disable_tqdm=True)
    if damage == "garbage":
        path.write_bytes(path.read_bytes()[:100] + b"x" * 9000)
    with contextlib.suppress(sqlite3.DatabaseError), contextlib.closing(sqlite3.connect(path)) as database:
        if damage == "schema":
            database.executescript("DROP TABLE answers; CREATE TABLE answers (other TEXT)")
        elif damage == "row":
            database.execute("UPDATE answers SET answer = '{'")
            database.commit()
    with pytest.raises(InputError, match=r"c\.db"):
        _model(folders, **given).generate_until(_requests(PROMPTS[:1]), disable_tqdm=True)


def test_cache_of_lm_eval_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not know which settings gave an answer"):
        CachingLM(_model(folders), str(tmp_path / "c.db"))


# Likelihood.


def _pairs() -> list[Instance]:
    pairs = [("a b c", " d e"), ("a b", " c"), ("d ", "e f g")]
    return [Instance("loglikelihood", {}, pair, index, metadata=("task", index, 1)) for index, pair in enumerate(pairs)]


def test_likelihood_is_that_of_the_package_and_of_no_order(folders: dict[str, Path]) -> None:
    scoring: dict[str, Any] = {"mc_num": 8, "batch_size": 4}
    values = _model(folders, **scoring).loglikelihood(_pairs(), disable_tqdm=True)
    assert _model(folders, **scoring).loglikelihood(_pairs()[::-1], disable_tqdm=True) == values[::-1]
    assert all(value < 0 for value, _ in values)
    lm = sinks.load(str(folders["llada"]))
    many = sinks.loglikelihood(lm, [0, 1, 2], [3, 4], mc_num=512, batch_size=16)
    assert values[0][0] == pytest.approx(many, rel=0.35)  # two estimates of one value


def test_kept_likelihoods_know_their_batches(folders: dict[str, Path], tmp_path: Path) -> None:
    kept: dict[str, Any] = {"mc_num": 8, "answers": str(tmp_path / "c.db")}
    values = [_model(folders, batch_size=size, **kept).loglikelihood(_pairs(), disable_tqdm=True) for size in (4, 8, 4)]
    assert values[0] == values[2] != values[1]
    assert values[1] == _model(folders, batch_size=8, mc_num=8).loglikelihood(_pairs(), disable_tqdm=True)


def test_dream_likelihood_counts_the_end_token(folders: dict[str, Path]) -> None:
    model = _model(folders, "dream", nll_type="ar_ftb", log_type="ftb")
    [(value, _), *_] = model.loglikelihood(_pairs(), disable_tqdm=True)
    lm = sinks.load(str(folders["dream"]))
    assert value == pytest.approx(
        sinks.loglikelihood(lm, [0, 1, 2], [3, 4, 62], nll_type="ar_ftb", log_type="ftb"), abs=1e-4
    )


def test_autoregressive_likelihood_is_exact(folders: dict[str, Path]) -> None:
    model = _model(folders, "ar")
    [(value, greedy), *_] = model.loglikelihood(_pairs(), disable_tqdm=True)
    with torch.no_grad():
        logits = model.lm.model(torch.tensor([[0, 1, 2, 3]])).logits[0].log_softmax(-1)
    assert value == pytest.approx(float(logits[2, 3] + logits[3, 4]), abs=1e-5)
    assert greedy == bool(logits[2].argmax() == 3 and logits[3].argmax() == 4)


def test_perplexity_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="rolling likelihood"):
        _model(folders).loglikelihood_rolling([])


# Through lm-eval.


@pytest.fixture(scope="module")
def tasks() -> TaskManager:
    return TaskManager(include_path=TASKS, include_defaults=False)


def test_generated_programs_need_consent_before_anything_is_loaded(
    folders: dict[str, Path], tasks: TaskManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.models, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match="unsafe"):
        simple_evaluate(_model(folders), tasks=["humaneval_local"], task_manager=tasks, limit=2)


def test_right_and_wrong_programs(
    folders: dict[str, Path], tasks: TaskManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def solve(self: Any, requests: list[Instance], **_: Any) -> list[str]:
        return [r.doc["canonical_solution"] if r.doc_id != 1 else "    return None" for r in requests]

    monkeypatch.setattr(LLaDAModel, "generate_until", solve)
    found = simple_evaluate(
        _model(folders), tasks=["humaneval_local"], task_manager=tasks, limit=4, confirm_run_unsafe_code=True
    )
    assert found["results"]["humaneval_local"]["pass@1,none"] == 0.75


def test_worked_examples_stand_before_the_question(folders: dict[str, Path], tasks: TaskManager) -> None:
    options: dict[str, Any] = {"tasks": ["gsm8k_local"], "task_manager": tasks, "limit": 2, "log_samples": True}
    found = simple_evaluate(_model(folders), num_fewshot=2, **options)
    assert found["n-shot"]["gsm8k_local"] == 2
    first = found["samples"]["gsm8k_local"][0]
    prompt = first["arguments"][0][0]
    assert prompt.endswith(f"Question: {first['doc']['question']}\nAnswer:")
    assert prompt.count("Question: ") == 3
    assert prompt.count("#### ") == 2
    assert first["doc"]["answer"] not in prompt


def test_results_carry_the_settings(folders: dict[str, Path], tasks: TaskManager) -> None:
    model = _model(folders, sink_top_k=3)
    found = simple_evaluate(model, tasks=["problems"], task_manager=tasks, limit=1)
    config = found["config"]
    assert config["settings"]["masking"]["top_k"] == 3
    assert config["settings_hash"] == model.settings.digest()
    assert (config["attention_path"], config["model_dtype"], config["world_size"]) == ("chunked", "float32", 1)
    assert json.dumps(config["settings"])


def test_in_turn() -> None:
    assert harness._in_turn([{"a": [0, 2, 4], "b": [1]}, {"a": [1, 3], "b": []}]) == {"a": [0, 1, 2, 3, 4], "b": [1]}


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    own = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **own}, timeout=300)


def test_two_processes_give_the_answers_of_one(folders: dict[str, Path], tmp_path: Path) -> None:
    options = ["--tasks", "problems", "--include_path", TASKS, "--limit", "5", "--batch_size", "2", "--log_samples"]
    options += ["--model_args", f"model_path={folders['llada']},gen_length=8,block_length=4,steps=8"]
    logged = {}
    for name, launcher in {
        "one": [sys.executable],
        "two": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    }.items():
        done = _run([*launcher, "eval_llada.py", *options, "--output_path", str(tmp_path / name)])
        assert done.returncode == 0, done.stderr[-2000:]
        assert f"world size: {1 if name == 'one' else 2}" in done.stderr
        [file] = (tmp_path / name).rglob("samples_*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        logged[name] = [(line["doc_id"], line["resps"][0][0], line["exact_match"]) for line in lines]
    assert logged["one"] == logged["two"]
    assert [doc for doc, *_ in logged["two"]] == [0, 1, 2, 3, 4]


# The command line, in this process.


@pytest.fixture
def run_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run an evaluation script's main with a TaskManager that knows only our tasks (lm-eval's own take seconds)."""
    monkeypatch.setattr(
        "lm_eval.tasks.TaskManager",
        lambda include_path=None, metadata=None: TaskManager(
            include_path=include_path, include_defaults=False, metadata=metadata
        ),
    )

    monkeypatch.setattr(evaluation, "setup_logging", lambda: None)  # it would hold on to this test's stderr

    def run(script: str, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"eval_{script}.py", *options])
        try:
            exits_cleanly(lambda: evaluation.main(script))()
        except SystemExit as end:
            return int(end.code or 0), *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


def test_print_config(folders: dict[str, Path], run_script: Callable[..., tuple[int, str, str]]) -> None:
    given = f"model_path={folders['llada']},gen_length=8,sink_top_k=2"
    code, out, _ = run_script(
        arguments.LLADA_SCRIPT, "--print_config", "--tasks", "problems", "--include_path", TASKS, "--model_args", given
    )
    shown = json.loads(out)
    expected = arguments.resolve(
        arguments.LLADA_SCRIPT, {"pretrained": str(folders["llada"]), "gen_len": 8, "sink_top_k": 2}
    )
    assert code == 0
    assert shown["settings_hash"] == expected.digest()
    assert shown["settings"]["sampling"]["block_len"] == 8
    first = json.loads((ROOT / "sinks" / "tiny" / "problems.jsonl").read_text().splitlines()[0])
    assert shown["first_prompt"] == {"problems": first["question"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model_args", "model_path=nowhere/at/all"], "no checkpoint at nowhere/at/all"),
        (["--model_args", "gen_length=8"], "no model was given"),
        (["--model_args", "{bad"], "the options cannot be read"),
        (["--model_args", "gen_length"], "the options cannot be read: argument --model_args"),
        (["--no_such_option"], "the options cannot be read: unrecognized arguments: --no_such_option"),
        (["--model_args", "model_path=LLADA,speed=9"], "unknown model_args: speed"),
        (["--model_args", "model_path=LLADA,gen_length=8", "--tasks", "nonsense"], "Tasks not found: nonsense"),
        (["--model_args", "model_path=LLADA,gen_length=8", "--device", "cuda"], "torch sees no CUDA device"),
        (["--model_args", "model_path=LLADA", "--preset", "nonsense"], "no preset 'nonsense'; use one of dream-gsm8k"),
        (["--model", "dream", "--model_args", "model_path=LLADA"], "is a LLaDA model, but this script is for Dream"),
        (["--model_args", "model_path=LLADA,gen_length=8", "--limit", "0"], "--limit 0.0 leaves nothing to answer"),
        (["--model_args", "model_path=LLADA,gen_length=8", "--gen_kwargs", "temperature=1"], "--gen_kwargs has no"),
        (["--model_args", "model_path=LLADA,gen_length=8", "--log_samples"], "Specify --output_path"),
        (
            ["--model_args", "model_path=LLADA,gen_length=8", "--output_path", "/dev/null/x"],
            "cannot create /dev/null/x",
        ),
        (["--model_args", "model_path=LLADA,gen_length=8,answers=5"], "answers in --model_args is no name of a file"),
        (["--model_args", f"model_path=LLADA,sink_top_k=1,sink_epsilon={'9' * 400}"], "epsilon"),
        (["--model_args", "model_path=LLADA,gen_length=8", "--apply_chat_template"], "has no chat template"),
        (["--model", "hf", "--model_args", "model_path=LLADA"], "--model hf is not for this script; use llada_dist"),
        (["--model_args", "model_path=LLADA,gen_length=8", "--tasks", "humaneval_local"], "confirm_run_unsafe_code"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    folders: dict[str, Path],
    run_script: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("a CUDA device is there")
    given = [option.replace("LLADA", str(folders["llada"])) for option in options]
    common = [] if "--tasks" in given else ["--tasks", "problems"]
    code, _, err = run_script(arguments.LLADA_SCRIPT, *given, *common, "--include_path", TASKS)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in err


def test_a_preset_alone(
    folders: dict[str, Path], tmp_path: Path, run_script: Callable[..., tuple[int, str, str]]
) -> None:
    """A preset names everything; --model_args then changes only what it names."""
    preset = tmp_path / "mine.yaml"
    preset.write_text(
        f"model: llada_dist\ntasks: [problems]\ninclude_path: {TASKS}\nnum_fewshot: 0\n"
        f"model_args: {{pretrained: {folders['llada']}, gen_length: 16, block_length: 8}}\nour_choice: [all]\n"
    )
    for given, expected in [([], (16, 8)), (["--model_args", "gen_length=32"], (32, 8))]:
        code, out, _ = run_script(arguments.LLADA_SCRIPT, "--preset", str(preset), "--print_config", *given)
        assert code == 0
        sampling = json.loads(out)["settings"]["sampling"]
        assert (sampling["gen_len"], sampling["block_len"]) == expected


def test_data_that_cannot_be_had_is_one_line(
    folders: dict[str, Path],
    run_script: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(evaluation.HarnessCLI, "execute", load)
    given = ["--tasks", "problems", "--model_args", f"model_path={folders['llada']},gen_length=8"]
    code, _, err = run_script(arguments.LLADA_SCRIPT, *given)
    assert code == 2
    assert "error: Couldn't reach 'openai/gsm8k' on the Hub: no network and no copy is cached" in err


def test_every_cell_of_the_paper_has_a_preset() -> None:
    names = {f"{model}-{task}" for model in ("dream", "llada", "mmada", "llama") for task in ("gsm8k", "humaneval")}
    assert {file.stem for file in evaluation.PRESETS.glob("*.yaml")} == names
    for name in names:
        preset = evaluation.read_preset(name)
        assert preset["our_choice"]
        assert preset["model"] in arguments.FAMILIES_OF
    assert evaluation.read_preset("llada-gsm8k")["model_args"]["block_length"] == 32
    assert evaluation.read_preset("llada-humaneval")["model_args"]["gen_length"] == 512
