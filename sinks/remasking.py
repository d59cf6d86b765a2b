"""Which tokens a denoising step proposes, and which of them it keeps: the families' schedules and strategies.

A strategy sees logits and returns tensors of fixed shape; nothing in it waits for the device. What it does is what the
official code does, save where that would destroy data: a position that holds no mask token is never written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sinks import detection
from sinks.errors import InputError
from sinks.noise import CONFIDENCE, ORDER, Noise, gumbel
from sinks.sampling import Sampling


class Extent(NamedTuple):
    """What differs between steps in the shape of the work, and not only in its values.

    rows: no row of the batch has more eligible positions; taken: how many are filled, where that is fixed.
    """

    rows: int
    taken: int | None = None


class Remasking(Protocol):
    """One family's way through a generation.

    Tensors are (B, S), or (B, R) for the R positions that are worth computing, unless said otherwise. ``step`` is a
    number or, on a GPU whose work was recorded, () int64.
    """

    def extent(self, index: int) -> Extent:
        """Of the step with that number, before it begins."""

    def eligible(self, masked: Tensor, step: int | Tensor) -> Tensor:
        """bool: the positions that may be filled at this step."""

    def propose(self, logits: Tensor, positions: Tensor, step: int | Tensor) -> tuple[Tensor, Tensor]:
        """Token and confidence (B, R), from logits (B, R, V) that predict these positions (B, R)."""

    def choose(
        self, confidence: Tensor, eligible: Tensor, positions: Tensor, step: int | Tensor, taken: int | None
    ) -> Tensor:
        """bool: the positions that keep their proposal."""

    def finished(self, tokens: Tensor, step: int | Tensor) -> Tensor:
        """(B, 1) bool after a step: the rows that take no further tokens from now on."""


def _at(table: Tensor, step: int | Tensor) -> Tensor:
    """(1,) the entry of a step; indexing by a tensor would make the device wait for the host."""
    return table.index_select(0, torch.as_tensor(step, device=table.device).reshape(1))


class BlockwiseRemasking:
    """LLaDA and MMaDA: blocks from left to right, a fixed number of tokens per step, the most confident first.

    ``masked`` (B, S) is the start: mask tokens that a prompt holds may be filled at any step.
    """

    def __init__(
        self, sampling: Sampling, ends: tuple[int | None, int | None], valid: Tensor, masked: Tensor, noise: Noise
    ) -> None:
        self.s, (self.eos, self.eot), self.noise = sampling, ends, noise
        start = valid.shape[1] - sampling.gen_len
        padding = (~valid).sum(-1)
        self.by_padding = {int(left): (padding == left).nonzero()[:, 0] for left in padding.unique()}
        # A step of a block fills what the block holds and no more, so never more are left than in the prompt.
        self.rows = int(masked[:, :start].sum(-1).max()) + sampling.block_len
        blocks = sampling.gen_len // sampling.block_len
        per_block = sampling.steps // blocks
        share, rest = divmod(sampling.block_len, per_block)
        self.schedule = [share + (step < rest) for step in range(per_block)]
        steps = torch.arange(sampling.steps, device=valid.device)
        self.block_end = start + (steps // per_block + 1) * sampling.block_len
        self.closes_block = (steps + 1) % per_block == 0

    def extent(self, index: int) -> Extent:
        return Extent(self.rows, self.schedule[index % len(self.schedule)])

    def eligible(self, masked: Tensor, step: int | Tensor) -> Tensor:
        return masked & (torch.arange(masked.shape[1], device=masked.device) < _at(self.block_end, step))

    def propose(self, logits: Tensor, positions: Tensor, step: int | Tensor) -> tuple[Tensor, Tensor]:
        if self.s.logits_eos_inf:
            logits = _without(logits, self.eos)
        tokens = self._tokens(logits, positions, step)
        if self.s.remasking == "random":
            return tokens, self.noise.over_positions(CONFIDENCE, step, positions).float()
        if self.s.confidence_eos_eot_inf:
            # Upstream touches the noisy logits of one end token and the plain ones of the other: the same tensor only
            # at temperature 0 (LLaDA issue 137).
            logits = _without(logits, self.eot)
            logits = _without(logits, self.eos) if self.s.temperature == 0 else logits
        exact = torch.float64 if self.s.family == "MMaDA" else logits.dtype
        confidence = logits.to(exact).softmax(-1).gather(-1, tokens[..., None])[..., 0]
        if self.s.eos_eot_last:
            confidence = confidence - 2.0 * ((tokens == self.eos) | (tokens == self.eot))
        return tokens, confidence

    def _tokens(self, logits: Tensor, positions: Tensor, step: int | Tensor) -> Tensor:
        if self.s.temperature == 0:
            return logits.argmax(-1)
        # Upstream's exp(logits) / (-ln U)^temperature in float64, under a logarithm that changes no order.
        draws = self.noise.over_tokens(step, positions, logits.shape[-1])
        return (logits.double() + self.s.temperature * gumbel(draws)).argmax(-1)

    def choose(
        self, confidence: Tensor, eligible: Tensor, positions: Tensor, step: int | Tensor, taken: int | None
    ) -> Tensor:
        # topk, not a stable sort: where confidences tie (in bfloat16 they often do) its order is upstream's. As that
        # order depends on the length, rows are ranked without their padding, as if alone.
        assert taken is not None
        confidence = confidence.masked_fill(~eligible, -torch.inf)
        chosen = torch.zeros_like(eligible)
        for left, rows in self.by_padding.items():
            best = confidence[rows, left:].topk(taken).indices + left
            chosen[rows] = chosen[rows].scatter(1, best, True)
        return eligible & chosen

    def finished(self, tokens: Tensor, step: int | Tensor) -> Tensor:
        if self.s.eot_token is None:
            return torch.zeros_like(tokens[:, :1], dtype=torch.bool)
        last = tokens.index_select(1, _at(self.block_end, step) - 1)
        return _at(self.closes_block, step) & (last == self.s.eot_token)


class ScheduledRemasking:
    """Dream: no blocks; how many tokens a step fills follows a noise schedule t from 1 to eps.

    ``masked`` (B, S) is the start.
    """

    def __init__(self, sampling: Sampling, masked: Tensor, noise: Noise) -> None:
        self.s, self.noise = sampling, noise
        times = torch.linspace(1, sampling.eps, sampling.steps + 1)
        fractions = 1 - times[1:] / times[:-1]
        self.remaining = _remaining(int(masked.sum(-1).max()), fractions, known=sampling.remasking != "origin")
        self.fractions = fractions.to(masked.device)

    def extent(self, index: int) -> Extent:
        return Extent(self.remaining[index])

    def eligible(self, masked: Tensor, step: int | Tensor) -> Tensor:
        return masked

    def propose(self, logits: Tensor, positions: Tensor, step: int | Tensor) -> tuple[Tensor, Tensor]:
        if self.s.temperature > 0:
            logits = logits / self.s.temperature
        probabilities = restrict(logits, self.s).softmax(-1)
        if self.s.temperature > 0:
            draws = self.noise.over_tokens(step, positions, logits.shape[-1])
            tokens = (probabilities.double().log() + gumbel(draws)).argmax(-1)
        else:
            tokens = probabilities.argmax(-1)
        chosen = probabilities.gather(-1, tokens[..., None])[..., 0]
        return tokens, _CONFIDENCE.get(self.s.remasking, lambda _, chosen: chosen)(probabilities, chosen)

    def choose(
        self, confidence: Tensor, eligible: Tensor, positions: Tensor, step: int | Tensor, taken: int | None
    ) -> Tensor:
        fraction = _at(self.fractions, step)
        last = torch.as_tensor(step, device=eligible.device) == self.s.steps - 1
        if self.s.remasking == "origin":
            draws = self.noise.over_positions(CONFIDENCE, step, positions).float()
            return eligible & (last | (draws < fraction))
        masks = eligible.sum(-1, keepdim=True).float()
        count = torch.where(last, masks, masks * fraction).long()
        if self.s.alg_temp:
            # Drawing without replacement from a softmax is taking the largest after adding Gumbel noise.
            draws = self.noise.over_positions(ORDER, step, positions)
            confidence = confidence.double() / self.s.alg_temp + gumbel(draws)
        return detection.select(confidence, eligible, count)

    def finished(self, tokens: Tensor, step: int | Tensor) -> Tensor:
        return torch.zeros_like(tokens[:, :1], dtype=torch.bool)


_EXTENT = 32  # rows come in multiples of this, so that work recorded on a GPU serves many steps


def _remaining(masks: int, fractions: Tensor, known: bool) -> list[int]:
    """How many mask tokens a row holds at most before each step; all that there were if chance decides."""
    before = []
    for fraction in fractions:
        before.append(-(-masks // _EXTENT) * _EXTENT)
        masks -= int(torch.tensor(float(masks)) * fraction) if known else 0
    return before


def _margin(probabilities: Tensor, chosen: Tensor) -> Tensor:
    first, second = probabilities.topk(2).values.unbind(-1)
    return first - second


def _negative_entropy(probabilities: Tensor, chosen: Tensor) -> Tensor:
    return (probabilities * torch.log(probabilities + 1e-10)).sum(-1)


_CONFIDENCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "topk_margin": _margin,
    "entropy": _negative_entropy,
}


def _without(logits: Tensor, token: int | None) -> Tensor:
    """The logits with one token impossible."""
    if token is None:
        raise InputError("the checkpoint names no end token (eos, eot) that this option needs; pass it to sinks.load")
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(ids == token, -torch.inf)


def restrict(logits: Tensor, sampling: Sampling) -> Tensor:
    """Nucleus (top_p) and then top_k filtering of (…, V) logits, as far as they are set."""
    return _top_k(_top_p(logits, sampling.top_p), sampling.top_k)


def _top_p(logits: Tensor, p: float | None) -> Tensor:
    """Keep the most probable tokens until their sum exceeds p, the one that crosses the line included."""
    if p is None or p >= 1:
        return logits
    ordered, order = logits.sort(descending=True)
    total = ordered.softmax(-1).cumsum(-1)
    drop = (total > p).roll(1, -1)
    drop[..., 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), torch.finfo(logits.dtype).min)


def _top_k(logits: Tensor, k: int | None) -> Tensor:
    if k is None:
        return logits
    least = logits.topk(min(k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < least, torch.finfo(logits.dtype).min)
