"""Prompts from files, from the embedded problems, and from a hub that is or is not there."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks.errors import InputError
from sinks.prompts import Prompt, load_prompts

GOOD = '{"question": "one?", "answer": "#### 1"}\n\n{"prompt": "two?", "other": 5}\n'


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    path.write_text(GOOD)
    return path


def test_a_file_with_questions_and_prompts(questions: Path) -> None:
    assert load_prompts(str(questions)) == [Prompt("q.jsonl/0", "one?", "#### 1"), Prompt("q.jsonl/1", "two?", None)]


def test_offset_and_number(questions: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_prompts(str(questions), num_samples=1) == [Prompt("q.jsonl/0", "one?", "#### 1")]
    assert caplog.records == []
    assert load_prompts(str(questions), offset=1, num_samples=5) == [Prompt("q.jsonl/1", "two?", None)]
    assert [record.getMessage() for record in caplog.records] == [
        f"{questions} has 1 prompts from offset 1 on, 5 were asked for"
    ]


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1), st.booleans())
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, texts: list[str], ascii_only: bool) -> None:
    path = tmp_path_factory.mktemp("any") / "q.jsonl"
    lines = [json.dumps({"question": text}, ensure_ascii=ascii_only) for text in texts]
    try:
        path.write_text("\n".join(lines), encoding="utf-8")
    except UnicodeEncodeError:  # half a surrogate pair has no bytes
        return
    assert [prompt.text for prompt in load_prompts(str(path))] == texts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "a"', r"q\.jsonl, line 4 is not valid JSON"),
        (b'{"question": "\xff"}', r"q\.jsonl, line 4 is not valid JSON"),
        (b"[" * 100_000, r"q\.jsonl, line 4 is not valid JSON"),
        (b'{"question": "\\ud800 a"}', r"line 4 holds half of a surrogate pair"),
        (b'{"question": "a", "answer": "\\udfff"}', r"line 4 holds half of a surrogate pair"),
        (b"5", r"line 4 must be an object"),
        (b"{}", r"line 4 needs question or prompt, as text"),
        (b'{"question": 5}', r"line 4 needs question or prompt, as text"),
        (b'{"question": null, "prompt": "x"}', r"line 4 needs question or prompt, as text"),
        (b'{"question": " \\n"}', r"line 4 has an empty prompt"),
        (b'{"question": "a", "answer": 5}', r"line 4 has an answer that is not text"),
    ],
)
def test_a_line_that_cannot_be_used(questions: Path, line: bytes, message: str) -> None:
    questions.write_bytes(GOOD.encode() + line + b"\n")
    with pytest.raises(InputError, match=message) as error:
        load_prompts(str(questions))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gsm9k",), r"unknown dataset 'gsm9k'; use one of gsm8k, humaneval, problems, FILE\.jsonl"),
        (("missing.jsonl",), r"there is no file missing\.jsonl"),
        (("problems", "train"), "no split 'train'; use test"),
        (("problems", "test", 500), "offset 500 is beyond the end of problems, which has 500 prompts"),
    ],
)
def test_what_is_not_there(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_prompts(*arguments)


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match="which has 0 prompts"):
        load_prompts(str(tmp_path / "empty.jsonl"))


def test_the_embedded_problems_have_answers() -> None:
    prompts = load_prompts("problems", offset=3, num_samples=4)
    assert [prompt.id for prompt in prompts] == [f"problems/{i}" for i in (3, 4, 5, 6)]
    assert all(prompt.reference is not None and "\n#### " in prompt.reference for prompt in prompts)


@pytest.mark.parametrize(
    ("name", "source", "row", "expected"),
    [
        ("gsm8k", ("openai/gsm8k", "main"), {"question": "q", "answer": "a"}, ("q", "a")),
        (
            "humaneval",
            ("openai/openai_humaneval", None),
            {"task_id": "t", "prompt": "p", "canonical_solution": "s"},
            ("p", "s"),
        ),
    ],
)
def test_data_sets_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, name: str, source: Any, row: dict[str, str], expected: tuple[str, str]
) -> None:
    asked = []

    def load_dataset(*args: Any, **options: Any) -> datasets.Dataset:
        asked.append((args, options))
        return datasets.Dataset.from_list([row] * 3)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_prompts(name, "test", 1, 9) == [Prompt(f"{name}/test/{i}", *expected) for i in (1, 2)]
    assert asked == [(source, {"split": "test"})]


def test_no_network_and_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    level = logging.getLogger("huggingface_hub").level

    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match=r"neither be fetched nor is it cached.*--dataset problems or a local"):
        load_prompts("gsm8k")
    assert logging.getLogger("huggingface_hub").level == level


def test_an_unknown_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ValueError("Unknown split \"dev\".\nShould be one of ['train', 'test'].")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match=r'gsm8k: Unknown split "dev"\. Should be one of'):
        load_prompts("gsm8k", "dev")
