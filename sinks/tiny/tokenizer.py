"""The embedded models' tokenizer: byte-level BPE, digits one by one, with LLaDA's special tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sinks.files import write_json
from sinks.tiny.problems import Problem

VOCABULARY = 1024
BOS, EOS = "<|startoftext|>", "<|endoftext|>"
HEADER, HEADER_END = "<|start_header_id|>", "<|end_header_id|>"
EOT, MASK = "<|eot_id|>", "<|mdm_mask|>"
SPECIAL = [BOS, EOS, HEADER, HEADER_END, EOT, MASK]

# A digit, or a word, or signs, or white space. A space before a digit belongs to what precedes it, so that a number
# costs its digits alone.
PIECES = r"\d| ?\p{L}+(?: (?=\d))?| ?[^\s\p{L}\d]+(?: (?=\d))?|\s+"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# What the template puts around one question.
BEFORE = f"{BOS}{HEADER}user{HEADER_END}\n\n"
AFTER = f"{EOT}{HEADER}assistant{HEADER_END}\n\n"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of 1,024 entries in all; every text survives encoding and decoding."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, which ``AutoTokenizer`` loads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": MASK,
        "additional_special_tokens": [HEADER, HEADER_END, EOT],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "padding_side": "left",
    }
    write_json(folder / "tokenizer_config.json", settings)


def encode_problem(tokenizer: Tokenizer, problem: Problem) -> tuple[list[int], list[int]]:
    """Ids of the prompt in the chat format, and of the answer with its end of turn."""
    prompt = tokenizer.encode(BEFORE + problem.question + AFTER).ids
    return prompt, tokenizer.encode(problem.answer + EOT).ids
