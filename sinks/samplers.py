"""The one denoising loop: every family, with or without capture, with or without sink masking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sinks import autoregressive
from sinks.attention import Capture
from sinks.errors import InputError
from sinks.masking import SinkMasking
from sinks.models import LanguageModel
from sinks.noise import Noise
from sinks.observer import Observer, Seen, Step, checked
from sinks.recording import columns
from sinks.remasking import BlockwiseRemasking, Extent, Remasking, ScheduledRemasking
from sinks.replay import Replayed
from sinks.sampling import Sampling
from sinks.sampling import resolve as resolve


@dataclass(frozen=True)
class Canvas:
    """Where a generation starts: left-padded prompts, then room for what is generated.

    tokens: (B, S) int64; valid: (B, S) bool, False = padding; prompt_lengths: one per row, without padding.
    """

    tokens: Tensor
    valid: Tensor
    prompt_lengths: list[int]


@dataclass(frozen=True)
class Generation:
    """A finished generation; tensors on the CPU, T steps, S positions (padding included).

    tokens: (B, S) int64; trajectory: (T+1, B, S) ids before the first and after every step.
    confidence: (T, B, S) float32, NaN where no token could be placed.
    incoming: (T, L', B, H', S) float32 or None; value_norm likewise; blocked: (T, L, B, H) int64 or None.
    patterns: by step, (L', B, H', S, S) or (L', B, S, S). text: one string per row when there is a tokenizer.
    """

    tokens: Tensor
    trajectory: Tensor
    confidence: Tensor
    incoming: Tensor | None
    blocked: Tensor | None
    value_norm: Tensor | None
    patterns: dict[int, Tensor]
    text: list[str] | None


def generate(
    lm: LanguageModel,
    prompts_or_ids: str | Sequence[str] | Tensor,
    attention_mask: Tensor | None = None,
    *,
    capture: Capture | None = None,
    masking: SinkMasking | None = None,
    items: Sequence[int] | None = None,
    **settings: object,
) -> Generation:
    """Generate, and keep what was asked for in memory.

    Args:
        prompts_or_ids: one message, several (the checkpoint's chat format is put around them), or ids (B, P) int64,
            to which nothing is added.
        attention_mask: (B, P), 0 = padding; only with ids.
        capture, masking: what to record and what to block (None: nothing).
        items: which item of a data set each row is; random draws belong to (seed, item). Default: 0, 1, …
        settings: ``steps``, ``gen_len``, ``block_len``, ``temperature``, ``cfg_scale``, ``remasking``, ``seed`` and
            the family's own, see :func:`sinks.sampling.resolve`. The default number of steps is ``gen_len``.

    Raises:
        InputError: a setting that cannot be used, an unknown mask id, a prompt longer than the model's positions.
    """
    sampling = resolve(lm.spec.family, **settings)
    if isinstance(prompts_or_ids, Tensor):
        canvas = _canvas_of_ids(lm, prompts_or_ids, attention_mask, sampling)
    else:
        texts = [prompts_or_ids] if isinstance(prompts_or_ids, str) else list(prompts_or_ids)
        canvas = lay_out(lm, [lm.encode(text) for text in texts], sampling)
    return collect(lm, canvas, sampling, denoise(lm, canvas, sampling, capture, masking, items))


def lay_out(lm: LanguageModel, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Canvas:
    """Prompts of any lengths side by side, left-padded, followed by ``gen_len`` positions to fill."""
    if not prompts or not all(prompts):
        raise InputError("a prompt is empty" if prompts else "there are no prompts")
    longest = max(len(prompt) for prompt in prompts)
    # What stands in a padded place is never seen; any id of the vocabulary will do when the checkpoint names none.
    filler = lm.spec.pad_token_id or 0
    rows = [[filler] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return _canvas_of_ids(lm, torch.tensor(rows, dtype=torch.int64), mask, sampling)


def _canvas_of_ids(lm: LanguageModel, ids: Tensor, mask: Tensor | None, sampling: Sampling) -> Canvas:
    if ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        raise InputError(f"prompt ids must be integers of shape (batch, length), not {ids.dtype} {tuple(ids.shape)}")
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else torch.as_tensor(mask, device=ids.device).bool()
    if valid.shape != ids.shape:
        raise InputError(f"attention_mask has shape {tuple(valid.shape)}, the prompts {tuple(ids.shape)}")
    lengths = valid.sum(-1).tolist()
    if min(lengths) < 1:
        raise InputError(f"prompt {lengths.index(0)} is empty")
    if bool((valid[:, :-1] & ~valid[:, 1:]).any()):
        raise InputError("attention_mask must hold its zeros (padding) on the left of every prompt")
    if max(lengths) + sampling.gen_len > lm.spec.max_positions:
        raise InputError(
            f"prompt {lengths.index(max(lengths))} has {max(lengths)} tokens; with gen_len {sampling.gen_len} that is "
            f"more than the model's {lm.spec.max_positions} positions"
        )
    if not 0 <= int(ids.min()) <= int(ids.max()) < lm.spec.vocab_size:
        raise InputError(f"prompt ids must lie between 0 and {lm.spec.vocab_size - 1}")
    empty = autoregressive.UNWRITTEN if lm.spec.attention == "causal" else _mask_id(lm)
    room = torch.full((len(ids), sampling.gen_len), empty, dtype=torch.int64, device=ids.device)
    return Canvas(torch.cat([ids.long(), room], 1), torch.cat([valid, torch.ones_like(room).bool()], 1), lengths)


def _mask_id(lm: LanguageModel) -> int:
    if lm.spec.mask_token_id is None:
        raise InputError(f"{lm.checkpoint} names no mask token; pass mask_token_id to sinks.load")
    return lm.spec.mask_token_id


def denoise(
    lm: LanguageModel,
    canvas: Canvas,
    sampling: Sampling,
    capture: Capture | None = None,
    masking: SinkMasking | None = None,
    items: Iterable[int] | None = None,
) -> Iterator[Step]:
    """The loop, a step at a time; nothing of a step is kept here once it was given away.

    A causal model goes from left to right instead, one token a step (:mod:`sinks.autoregressive`).
    """
    if masking is None and sampling.sink_masked:
        masking = SinkMasking(top_k=1)
    rows = list(range(len(canvas.tokens)) if items is None else items)
    if len(rows) != len(canvas.tokens):
        raise InputError(f"items names {len(rows)} items, but there are {len(canvas.tokens)} prompts")
    item_ids = torch.tensor(rows, dtype=torch.int64, device=lm.device)
    guided = 2 if sampling.cfg_scale > 0 else 1
    control = Noise(masking.seed if masking else 0, item_ids.repeat(guided))
    observer = Observer(lm.spec, capture, masking, canvas.valid, control)
    loop = autoregressive.Decoding if lm.spec.attention == "causal" else _Denoising
    steps = loop(lm, canvas.tokens, canvas.valid, sampling, observer, Noise(sampling.seed, item_ids))
    return checked(steps.run(), canvas.tokens.shape[1] - sampling.gen_len)


class _Kind(NamedTuple):
    """What decides which work a step does, values aside: steps of one kind can be one recording on a GPU."""

    extent: Extent
    blocks: bool
    pattern: bool


class _Denoising:
    """The state of one generation between its steps: tensors that every step changes in place."""

    def __init__(
        self,
        lm: LanguageModel,
        tokens: Tensor,
        valid: Tensor,
        sampling: Sampling,
        observer: Observer,
        noise: Noise,
    ) -> None:
        self.lm, self.sampling, self.observer, self.mask_id = lm, sampling, observer, _mask_id(lm)
        self.tokens, self.valid = tokens.to(lm.device, copy=True), valid.to(lm.device)
        self.given = (self.tokens != self.mask_id) & self.valid
        self.prompt = torch.ones_like(self.valid)
        self.prompt[:, -sampling.gen_len :] = False
        self.padded = not bool(valid.all())
        # Counted without padding, so that a padded row is what it would be alone.
        self.positions = (self.valid.cumsum(-1) - 1).clamp_min(0)
        self.strategy = _strategy(lm, sampling, self.valid, ~self.given & self.valid, noise)
        # With guidance the batch is doubled: conditional rows first, then the same rows without their prompt.
        self.copies = 2 if sampling.cfg_scale > 0 else 1
        shape = (lm.spec.layers, self.copies * len(tokens), lm.spec.heads, tokens.shape[1])
        self.judged = torch.zeros(shape, device=lm.device) if observer.judged is not None else None
        self.done = torch.zeros(len(tokens), 1, dtype=torch.bool, device=lm.device)
        self.number = torch.zeros((), dtype=torch.int64, device=lm.device)
        self.remasked = torch.zeros((), dtype=torch.bool, device=lm.device)

    def run(self) -> Iterator[Step]:
        work = Replayed(self._step, self.lm.model)
        remasked = False
        for index in range(self.sampling.steps):
            extent = self.strategy.extent(index)
            if remasked:  # more positions may wait than the schedule counts on
                extent = extent._replace(rows=self.tokens.shape[1])
            kind = _Kind(extent, self.observer.blocks_at(index), self.observer.keeps_pattern(index))
            step = work(kind, recordable=not kind.pattern)
            remasked = bool(self.remasked)
            yield replace(step, index=index)

    @torch.no_grad()
    def _step(self, kind: _Kind) -> Step:
        eligible = self.strategy.eligible((self.tokens == self.mask_id) & self.valid, self.number) & ~self.done
        inputs = self._inputs()
        blocked = self._blocked(inputs) if kind.blocks else None
        hidden, seen = self._forward(inputs, blocked, kind.pattern)
        proposal, confidence, finite = self._propose(hidden, eligible, kind.extent.rows)
        chosen = self.strategy.choose(confidence, eligible, self.positions, self.number, kind.extent.taken) & eligible
        self.tokens.copy_(torch.where(chosen, proposal, self.tokens))
        self.remasked |= (chosen & (proposal == self.mask_id)).any()  # the mask token itself was placed
        self.done |= self.strategy.finished(self.tokens, self.number)
        self.number += 1
        step = Step(-1, self.tokens.clone(), confidence.masked_fill(~eligible, torch.nan), finite)
        return self.observer.report(step, seen, blocked, kind.pattern)

    def _inputs(self) -> Tensor:
        if self.copies == 1:
            return self.tokens
        return torch.cat([self.tokens, self.tokens.masked_fill(self.given, self.mask_id)])

    def _copied(self, rows: Tensor) -> Tensor:
        return rows.repeat(self.copies, 1)

    def _blocked(self, inputs: Tensor) -> Tensor | None:
        valid, prompt = self._copied(self.valid), self._copied(self.prompt)
        return self.observer.blocked(self.number, self.judged, valid, inputs == self.mask_id, prompt)

    def _forward(self, inputs: Tensor, blocked: Tensor | None, pattern: bool) -> tuple[Tensor, Seen]:
        """The last hidden states (copies B, S, D), and what the layers showed."""
        valid, positions = self._copied(self.valid), self._copied(self.positions)
        masks = {"attention_mask": valid, "position_ids": positions} if self.padded else {}
        with self.lm.probe.asked(self.observer.ask(blocked, pattern)) as seen:
            hidden = self.lm.hidden(inputs, **masks)
        if self.judged is not None and self.observer.judged is not None:
            self.judged.copy_(columns(seen, self.observer.judged))
        return hidden, seen

    def _propose(self, hidden: Tensor, eligible: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Token and confidence (B, S), computed for ``most`` positions of each row, and whether all numbers were such.

        Those are the eligible ones, of which there are no more, and some others that serve as filling.
        """
        rows = (~eligible).to(torch.uint8).argsort(dim=-1, stable=True)[:, :most]
        positions = self.positions.gather(1, rows)
        predicting = rows
        if self.lm.spec.shift == "next":
            # Logits predict the next token: take each position's from the one before, the first token's from itself.
            predicting = torch.where(positions > 0, rows - 1, rows)
        picked = self._copied(predicting)[..., None].expand(-1, -1, hidden.shape[-1])
        logits = self.lm.logits(hidden.gather(1, picked.to(hidden.device)).to(self.lm.device))
        if self.copies == 2:
            logits = guided(logits, self.sampling.cfg_scale)
        finite = hidden.isfinite().all().to(logits.device) & (logits < torch.inf).all()  # false for NaN too
        parts = [self._few(logits, positions, part) for part in _slices(rows.shape[1], _AT_ONCE // len(rows))]
        tokens, confidence = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        nowhere = torch.zeros(eligible.shape, dtype=confidence.dtype, device=confidence.device)
        return self.tokens.scatter(1, rows, tokens), nowhere.scatter(1, rows, confidence), finite

    def _few(self, logits: Tensor, positions: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        return self.strategy.propose(logits[:, part], positions[:, part], self.number)


_AT_ONCE = 64  # positions whose tokens are chosen together: float64 noise for a vocabulary is large


def _slices(length: int, size: int) -> list[slice]:
    return [slice(first, first + max(size, 1)) for first in range(0, length, max(size, 1))]


def guided(logits: Tensor, cfg_scale: float) -> Tensor:
    """(B, S, V) by classifier-free guidance from (2 B, S, V): rows with their prompt, then the same without it."""
    conditional, without_prompt = logits.chunk(2)
    return without_prompt + (cfg_scale + 1) * (conditional - without_prompt)


def _strategy(lm: LanguageModel, sampling: Sampling, valid: Tensor, masked: Tensor, noise: Noise) -> Remasking:
    if sampling.family == "Dream":
        return ScheduledRemasking(sampling, masked, noise)
    return BlockwiseRemasking(sampling, (lm.spec.eos_token_id, lm.spec.eot_token_id), valid, masked, noise)


_STACKED = ("confidence", "incoming", "blocked", "value_norm")


def collect(lm: LanguageModel, canvas: Canvas, sampling: Sampling, steps: Iterator[Step]) -> Generation:
    """Keep every step in memory, on the CPU."""
    trajectory = [canvas.tokens.cpu()]
    parts: dict[str, list[Tensor | None]] = {name: [] for name in _STACKED}
    patterns = {}
    for step in steps:
        trajectory.append(step.tokens.cpu())
        for name, kept in parts.items():
            value = getattr(step, name)
            kept.append(None if value is None else value.cpu())
        if step.patterns is not None:
            patterns[step.index] = step.patterns
    text = None
    if lm.tokenizer is not None:
        text = [lm.decode(row[-sampling.gen_len :].tolist()) for row in trajectory[-1]]
    confidence, incoming, blocked, value_norm = (_stacked(parts[name]) for name in _STACKED)
    assert confidence is not None
    return Generation(
        tokens=trajectory[-1],
        trajectory=torch.stack(trajectory),
        confidence=confidence,
        incoming=incoming,
        blocked=blocked,
        value_norm=value_norm,
        patterns=patterns,
        text=text,
    )


def _stacked(parts: list[Tensor | None]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.stack(found) if found else None
