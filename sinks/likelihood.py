"""Likelihood of a continuation under a diffusion language model, as the official evaluation scripts estimate it.

LLaDA and MMaDA: Monte Carlo over how many target tokens are masked (ML-GSAI/LLaDA, get_log_likelihood). Dream: Monte
Carlo over a masking probability, or a left-to-right or right-to-left score (DreamLM/Dream, eval). Draws are made on the
CPU in the official order, so that a seed gives the official value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sinks.errors import InputError
from sinks.models import LanguageModel
from sinks.samplers import generate, guided

NLL_TYPES = {"mc": ("ftb", "btf", "union"), "ar_ftb": ("ftb",), "ar_btf": ("btf",)}


@dataclass(frozen=True)
class _Batch:
    """Masked copies of a sequence and what each masked token counts: noisy (b, S) int64, weight (b, S) float."""

    noisy: Tensor
    weight: Tensor


@torch.inference_mode()
def loglikelihood(
    lm: LanguageModel,
    prompt: Tensor | Sequence[int],
    target: Tensor | Sequence[int],
    mc_num: int = 128,
    batch_size: int = 16,
    cfg_scale: float = 0.0,
    seed: int = 0,
    *,
    nll_type: str = "mc",
    log_type: str = "ftb",
    sampling_eps: float = 1e-3,
) -> float:
    """Estimate log p(target | prompt), in nats.

    Args:
        prompt, target: ids; nothing is added to them.
        mc_num: how many masked copies in all, ``batch_size`` at a time (for LLaDA a multiple of it).
        cfg_scale: LLaDA and MMaDA: classifier-free guidance, hiding the prompt.
        nll_type, log_type, sampling_eps: Dream only. "mc" with "ftb" (target given prompt), "btf" (prompt given
            target) or "union" (both, divided by the length); "ar_ftb" and "ar_btf" go token by token.

    Raises:
        InputError: an autoregressive model, an empty target, settings that do not go together.
    """
    prompt, target = _ids(prompt), _ids(target)
    _check_ids(lm, prompt, target)
    _check(lm, mc_num, batch_size, nll_type, log_type, cfg_scale)
    generator = torch.Generator().manual_seed(seed)
    batches = max(mc_num // batch_size, 1)
    drawn: Iterator[_Batch]
    if lm.spec.family != "Dream":
        drawn = (_count_masked(lm, prompt, target, batch_size, generator) for _ in range(batches))
    elif nll_type == "mc":
        drawn = (
            _probability_masked(lm, prompt, target, batch_size, log_type, sampling_eps, generator)
            for _ in range(batches)
        )
    else:
        batches = 1
        drawn = _token_by_token(lm, prompt, target, batch_size, log_type)
    sequence = torch.cat([prompt, target])
    total = sum(_weighted(lm, sequence, len(prompt), batch, cfg_scale) for batch in drawn)
    length = len(sequence) if lm.spec.family == "Dream" and log_type == "union" else 1
    return -total / batches / length


def is_greedy(
    lm: LanguageModel, prompt: Tensor | Sequence[int], target: Tensor | Sequence[int], cfg_scale: float = 0.0
) -> bool:
    """Whether denoising greedily, one token a step in one block, writes exactly ``target`` (LLaDA's evaluation)."""
    prompt, target = _ids(prompt), _ids(target)
    n = len(target)
    g = generate(lm, prompt[None], steps=n, gen_len=n, block_len=n, cfg_scale=cfg_scale)
    return torch.equal(g.tokens[0, -n:], target)


@torch.inference_mode()
def exact(lm: LanguageModel, prompt: Tensor | Sequence[int], target: Tensor | Sequence[int]) -> tuple[float, bool]:
    """log p(target | prompt) of an autoregressive model, and whether greedy decoding would write ``target``."""
    prompt, target = _ids(prompt), _ids(target)
    _check_ids(lm, prompt, target)
    if not len(prompt):
        raise InputError("an autoregressive model needs a token before the target")
    inputs = torch.cat([prompt, target])[None, :-1].to(lm.device)
    logits = lm.model(inputs, use_cache=False, logits_to_keep=len(target)).logits[0].float()
    truth = target.to(lm.device)
    value = logits.log_softmax(-1).gather(-1, truth[:, None]).sum()
    return float(value), torch.equal(logits.argmax(-1), truth)


def _ids(ids: Tensor | Sequence[int]) -> Tensor:
    return torch.as_tensor(ids, dtype=torch.int64).reshape(-1)


def _check_ids(lm: LanguageModel, prompt: Tensor, target: Tensor) -> None:
    length, ids = len(prompt) + len(target), torch.cat([prompt, target])
    if not len(target):
        raise InputError("the target is empty")
    if length > lm.spec.max_positions:
        raise InputError(f"prompt and target have {length} tokens, the model only {lm.spec.max_positions} positions")
    if not 0 <= int(ids.min()) <= int(ids.max()) < lm.spec.vocab_size:
        raise InputError(f"ids must lie between 0 and {lm.spec.vocab_size - 1}")


def _check(lm: LanguageModel, mc_num: int, batch_size: int, nll_type: str, log_type: str, cfg_scale: float) -> None:
    if lm.spec.attention != "full":
        raise InputError(f"{lm.spec.family} models have an exact likelihood; this estimate is for diffusion models")
    if lm.spec.mask_token_id is None:
        raise InputError(f"{lm.checkpoint} names no mask token; pass mask_token_id to sinks.load")
    if not 0 <= cfg_scale < float("inf") or (cfg_scale and lm.spec.family == "Dream"):
        raise InputError(f"cfg_scale is {cfg_scale}; it must be 0 or more, and 0 for Dream")
    if mc_num < 1 or batch_size < 1:
        raise InputError(f"mc_num {mc_num} and batch_size {batch_size} must be 1 or more")
    if lm.spec.family != "Dream" and mc_num % batch_size:
        raise InputError(f"mc_num {mc_num} is not a multiple of batch_size {batch_size}")
    check_types(nll_type, log_type)


def check_types(nll_type: str, log_type: str) -> None:
    """InputError unless the two exist and go together."""
    if nll_type not in NLL_TYPES:
        raise InputError(f"nll_type {nll_type!r} is unknown; use one of {', '.join(NLL_TYPES)}")
    if log_type not in NLL_TYPES[nll_type]:
        raise InputError(
            f"nll_type {nll_type!r} goes with log_type {' or '.join(NLL_TYPES[nll_type])}, not {log_type!r}"
        )


def _noisy(lm: LanguageModel, sequence: Tensor, masked: Tensor) -> Tensor:
    assert lm.spec.mask_token_id is not None
    return sequence.expand_as(masked).masked_fill(masked, lm.spec.mask_token_id)


def _count_masked(lm: LanguageModel, prompt: Tensor, target: Tensor, rows: int, generator: torch.Generator) -> _Batch:
    """Row r masks ((round(k + r n / b) - 1) mod n) + 1 of the n target tokens, k drawn once, at random places."""
    n = len(target)
    k = int(torch.randint(1, n + 1, (), generator=generator))
    counts = torch.linspace(float(k), k + (rows - 1) * (n / rows), steps=rows).round().long()
    counts = (counts - 1) % n + 1
    places = torch.stack([torch.randperm(n, generator=generator) for _ in range(rows)])
    masked = F.pad(places < counts[:, None], (len(prompt), 0))
    weight = (n / counts)[:, None].expand(rows, masked.shape[1])
    return _Batch(_noisy(lm, torch.cat([prompt, target]), masked), weight)


def _probability_masked(
    lm: LanguageModel,
    prompt: Tensor,
    target: Tensor,
    rows: int,
    log_type: str,
    eps: float,
    generator: torch.Generator,
) -> _Batch:
    """Row r masks every token with probability (1 - eps) ((u + r / b) mod 1) + eps, never the first nor the last."""
    sequence = torch.cat([prompt, target])
    times = (torch.rand(1, generator=generator) + torch.arange(rows) / rows) % 1
    probability = ((1 - eps) * times + eps)[:, None].expand(rows, len(sequence))
    masked = torch.rand(rows, len(sequence), generator=generator) < probability
    masked[:, [0, -1]] = False
    if log_type == "ftb":
        masked[:, : len(prompt)] = False
    elif log_type == "btf":
        masked[:, len(prompt) :] = False
    return _Batch(_noisy(lm, sequence, masked), 1 / probability)


def _token_by_token(lm: LanguageModel, prompt: Tensor, target: Tensor, rows: int, log_type: str) -> Iterator[_Batch]:
    """Row i hides target tokens i and later ("btf": prompt tokens up to i) and counts token i alone."""
    sequence, places = torch.cat([prompt, target]), torch.arange(len(prompt) + len(target))
    counted = places[len(prompt) :] if log_type == "ftb" else places[: len(prompt)]
    for some in counted.split(rows):
        masked = places >= some[:, None] if log_type == "ftb" else places <= some[:, None]
        # Every batch is averaged over its rows below, which a sum over tokens must undo.
        weight = (places == some[:, None]) * float(len(some))
        yield _Batch(_noisy(lm, sequence, masked), weight)


def _weighted(lm: LanguageModel, sequence: Tensor, prompt_length: int, batch: _Batch, cfg_scale: float) -> float:
    """Mean over the rows of the weighted cross-entropy at their masked positions."""
    inputs = batch.noisy.to(lm.device)
    logits = _logits(lm, inputs, prompt_length, cfg_scale)
    masked = torch.eq(batch.noisy, lm.spec.mask_token_id or 0)
    truth = sequence.expand_as(batch.noisy)[masked].to(lm.device)
    losses = F.cross_entropy(logits[masked.to(lm.device)], truth, reduction="none")
    return float((losses * batch.weight[masked].to(lm.device)).sum()) / len(inputs)


def _logits(lm: LanguageModel, inputs: Tensor, prompt_length: int, cfg_scale: float) -> Tensor:
    if not cfg_scale:
        logits = lm.model(inputs, use_cache=False).logits
    else:
        hidden = inputs.clone()
        hidden[:, :prompt_length] = lm.spec.mask_token_id  # type: ignore[assignment]
        logits = guided(lm.model(torch.cat([inputs, hidden]), use_cache=False).logits, cfg_scale)
    return torch.cat([logits[:, :1], logits[:, :-1]], 1) if lm.spec.shift == "next" else logits
