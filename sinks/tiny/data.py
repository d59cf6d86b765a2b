"""The training set: problems as token ids, made by all processor cores, none of them held out and none twice."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sinks.tiny.problems import generate, held_out
from sinks.tiny.tokenizer import EOS, encode_problem, train_tokenizer

LONGEST = 160  # tokens of a prompt and its answer
TOKENIZER_SEED, TOKENIZER_PROBLEMS = 0, 50_000
SHARDS = 64

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the shards are what runs side by side


@dataclass(frozen=True)
class Dataset:
    """Problems sorted by length, shortest first.

    ids: (N, LONGEST) int16, prompt, answer, end of turn, then end-of-text tokens; prompts, lengths: (N,) int16.
    """

    ids: NDArray[np.int16]
    prompts: NDArray[np.int16]
    lengths: NDArray[np.int16]


def make_tokenizer() -> Tokenizer:
    """The tokenizer of all embedded models: always the same."""
    problems = islice(generate("train", TOKENIZER_SEED), TOKENIZER_PROBLEMS)
    return train_tokenizer(f"{problem.question}\n{problem.answer}" for problem in problems)


def make_dataset(tokenizer: Tokenizer, count: int, seed: int) -> Dataset:
    """``count`` draws of training problems, less those that came twice."""
    shards = [(tokenizer.to_str(), -(-count // SHARDS), f"{seed}.{shard}") for shard in range(SHARDS)]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        parts = list(pool.map(encode_shard, shards))
    ids, prompts, lengths = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    _, first = np.unique(ids.view(f"V{ids.itemsize * LONGEST}").ravel(), return_index=True)
    order = first[np.argsort(lengths[first], kind="stable")]
    return Dataset(ids[order], prompts[order], lengths[order])


def encode_shard(shard: tuple[str, int, str]) -> tuple[NDArray[np.int16], NDArray[np.int16], NDArray[np.int16]]:
    """ids, prompts, lengths as in :class:`Dataset`; held-out problems and those that are too long are left out."""
    core, count, seed = shard
    tokenizer = Tokenizer.from_str(core)
    rows = [(p, a) for p, a in training_ids(tokenizer, count, seed) if len(p) + len(a) <= LONGEST]
    ids = np.full((len(rows), LONGEST), tokenizer.token_to_id(EOS), dtype=np.int16)
    for row, (prompt, answer) in zip(ids, rows, strict=True):
        row[: len(prompt) + len(answer)] = prompt + answer
    prompts = np.array([len(p) for p, _ in rows], dtype=np.int16)
    lengths = np.array([len(p) + len(a) for p, a in rows], dtype=np.int16)
    return ids, prompts, lengths


def training_ids(tokenizer: Tokenizer, count: int, seed: int | str) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and answer ids of ``count`` training problems, without any that is held out."""
    forbidden = {tuple(encode_problem(tokenizer, problem)[0]) for problem in held_out()}
    for problem in islice(generate("train", seed), count):
        prompt, answer = encode_problem(tokenizer, problem)
        if tuple(prompt) not in forbidden:
            yield prompt, answer
