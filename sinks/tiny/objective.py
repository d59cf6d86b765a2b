"""What training minimises: the loss of masked diffusion (LLaDA, Dream), or of the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinks.tiny.tokenizer import EOS, MASK, SPECIAL

ANSWER_BLOCKS = 2  # blocks that hold an answer


@dataclass(frozen=True)
class Settings:
    """How one model is made; every field is an option of the command line.

    A share of 1/20 of the batches is ``long``, 9/20 ``middle``, half ``short`` tokens wide; a problem that does not
    fill its row is followed by end-of-text tokens, which are learnt like the rest. A share ``blockwise`` of the rows is
    masked as the sampler leaves them: the blocks before one are known, those after it are all masked. In half of the
    rows a share ``hidden_words`` of the prompt's words is masked, against clinging to one wording.
    """

    steps: int = 6000
    batch_size: int = 512
    learning_rate: float = 2e-3
    warmup: int = 200
    weight_decay: float = 0.1
    problems: int = 1_000_000
    seed: int = 0
    hidden: int = 256
    layers: int = 8
    heads: int = 8
    mlp: int = 512
    max_positions: int = 1024
    short: int = 128
    middle: int = 160
    long: int = 352
    blockwise: float = 0.0
    block_len: int = 32
    hidden_words: float = 0.0


@dataclass(frozen=True)
class Vocabulary:
    """mask, fill: the tokens that hide and that fill up; words: (V,) bool, entries with a letter."""

    mask: int
    fill: int
    words: Tensor

    @classmethod
    def of(cls, tokenizer: Tokenizer, device: torch.device) -> Vocabulary:
        ids = tokenizer.get_vocab()
        words = torch.zeros(len(ids), dtype=torch.bool)
        for token, index in ids.items():
            words[index] = token not in SPECIAL and any(letter.isascii() and letter.isalpha() for letter in token)
        return cls(ids[MASK], ids[EOS], words.to(device))


@dataclass(frozen=True)
class Batch:
    """ids: (B, L) int64; answer: (B, L) bool, the answer, its end of turn and what fills the row after it."""

    ids: Tensor
    answer: Tensor


def masked(batch: Batch, settings: Settings, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """The ids with a share t of every answer masked, and (B, L) weights of the loss: 1/t where masked, else 0.

    t is uniform, spread evenly over the batch. In blockwise rows one block of the answer, drawn at random, is learnt.
    """
    rows, device = len(batch.ids), batch.ids.device
    t = (torch.rand((), device=device) + torch.arange(rows, device=device) / rows).frac().clamp_min(1e-3)[:, None]
    blockwise = torch.rand(rows, 1, device=device) < settings.blockwise
    block = (batch.answer.cumsum(1) - 1) // settings.block_len
    current = torch.randint(ANSWER_BLOCKS, (rows, 1), device=device)
    learnt = batch.answer & (torch.rand(batch.ids.shape, device=device) < t) & ~(blockwise & (block != current))
    later = batch.answer & blockwise & (block > current)
    weights = learnt / t * torch.where(blockwise, ANSWER_BLOCKS, 1)
    return batch.ids.masked_fill(learnt | later | hidden_words(batch, settings, vocabulary), vocabulary.mask), weights


def hidden_words(batch: Batch, settings: Settings, vocabulary: Vocabulary) -> Tensor:
    """(B, L) bool: words of the prompt to hide."""
    rate = settings.hidden_words * (torch.rand(len(batch.ids), 1, device=batch.ids.device) < 0.5)
    return ~batch.answer & vocabulary.words[batch.ids] & (torch.rand(batch.ids.shape, device=batch.ids.device) < rate)


def loss_of(kind: str, model: PreTrainedModel, batch: Batch, settings: Settings, vocabulary: Vocabulary) -> Tensor:
    """The weighted cross-entropy per answer token; what only fills the rows counts, but not in their number."""
    if kind == "ar":
        inputs = batch.ids.masked_fill(hidden_words(batch, settings, vocabulary), vocabulary.mask)
        weights = batch.answer.float()
    else:
        inputs, weights = masked(batch, settings, vocabulary)
    logits = model(input_ids=inputs, use_cache=False).logits
    targets = batch.ids
    if kind != "llada":  # these predict the next token
        logits, targets, weights = logits[:, :-1], targets[:, 1:], weights[:, 1:]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / (batch.answer & (batch.ids != vocabulary.fill)).sum()
