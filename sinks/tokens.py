"""What a token is called: a label that can be seen, and the class it belongs to."""

from __future__ import annotations

import unicodedata

CLASSES = (
    "mask token",
    "newline",
    "punctuation",
    "digit",
    "word",
    "space",
    "BOS",
    "EOS",
    "header",
    "other special",
    "unknown",
)
"""Every class that :func:`token_class` gives; the rows of arXiv 2510.15731, Table 2, fall into these."""

_SPECIAL = {
    "mask token": ("<|mdm_mask|>", "<|mask|>", "<mask>", "[MASK]"),
    "BOS": ("<s>", "<bos>", "<|startoftext|>", "<|begin_of_text|>", "<|beginoftext|>", "[CLS]"),
    "EOS": ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<|dlm_pad|>", "[SEP]"),
    "header": ("<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<|user|>", "<|assistant|>", "<|system|>"),
}
_CLASS_OF_SPECIAL = {text: name for name, texts in _SPECIAL.items() for text in texts}
_SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥", " ": "␣", "": "∅"}


def token_class(text: str) -> str:
    """The class of one token's text, one of :data:`CLASSES`; "unknown" when there is no text.

    Whitespace with a line break in it is "newline", whatever else it holds; a token of several kinds of characters is
    a word if it holds a letter, else a digit if it holds one.
    """
    if text in _CLASS_OF_SPECIAL:
        return _CLASS_OF_SPECIAL[text]
    if not text:
        return "unknown"
    if text.startswith("<|") and text.endswith("|>"):
        return "other special"
    if text.isspace():
        return "newline" if "\n" in text or "\r" in text else "space"
    if any(character.isalpha() for character in text):
        return "word"
    return "digit" if any(character.isnumeric() for character in text) else "punctuation"


def visible(text: str, longest: int = 14) -> str:
    """A label in which blanks, line breaks, control characters and the empty token can be seen.

    More than ``longest`` characters are cut in the middle.
    """
    label = _SIGNS[""] if not text else "".join(map(_sign, text))
    if len(label) <= longest:
        return label
    head = (longest - 1) // 2
    return f"{label[:head]}…{label[len(label) - (longest - 1 - head) :]}"


def _sign(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    if unicodedata.category(character)[0] in "CZ":  # control, surrogate, unassigned; separators
        return f"\\u{ord(character):04x}"
    return character
