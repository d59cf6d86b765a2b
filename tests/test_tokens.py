"""Token classes and labels: every row of the paper's Table 2 has a class, and no two labels are mixed up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks.tokens import CLASSES, token_class, visible

AWKWARD = ["$", "$$", "\n", "\\n", "_x^", "Ġthe", " the", "the", "中", "<|mask|>", " ", "", "\t", "\x00"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|mdm_mask|>", "mask token"),
        ("\n", "newline"),
        ("\n\n", "newline"),
        (" \r\n", "newline"),
        (".", "punctuation"),
        ("$$", "punctuation"),
        ("####", "punctuation"),
        (" +", "punctuation"),
        ("7", "digit"),
        (" 42", "digit"),
        ("½", "digit"),
        ("the", "word"),
        (" the", "word"),
        ("x2", "word"),
        ("中", "word"),
        ("  ", "space"),
        ("\t", "space"),
        ("<|startoftext|>", "BOS"),
        ("<|endoftext|>", "EOS"),
        ("<|im_end|>", "EOS"),
        ("<|end_header_id|>", "header"),
        ("<|reserved_token_7|>", "other special"),
        ("", "unknown"),
    ],
)
def test_class(text: str, expected: str) -> None:
    assert token_class(text) == expected


@given(st.text(max_size=20))
def test_every_text_has_a_known_class(text: str) -> None:
    assert token_class(text) in CLASSES


def test_awkward_labels_are_distinct_and_visible() -> None:
    labels = [visible(text) for text in AWKWARD]
    assert len(set(labels)) == len(AWKWARD)
    assert all(label.strip() and label.isprintable() for label in labels)
    assert visible("\n") == "↵"
    assert visible(" the") == "␣the"


@given(st.text(max_size=60), st.integers(3, 30))
def test_labels_are_printable_and_short(text: str, longest: int) -> None:
    label = visible(text, longest)
    assert 1 <= len(label) <= longest
    assert label.isprintable() and " " not in label


def test_a_long_label_keeps_both_ends() -> None:
    assert visible("antidisestablishment", 9) == "anti…ment"
