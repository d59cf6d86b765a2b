"""Decoding from left to right with a key-value cache: what the field compares diffusion models with.

Step 0 is the prefill and blocks nothing. The query of step t may not use the sinks found at step t - 1. A row of a
causal pattern never changes once it was computed, so incoming attention adds up: one new row a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from sinks.attention import Measure
from sinks.models import LanguageModel
from sinks.noise import Noise, gumbel
from sinks.observer import Observer, Seen, Step
from sinks.recording import columns
from sinks.remasking import restrict
from sinks.sampling import Sampling

UNWRITTEN = -1


class Decoding:
    """The state of one generation between its steps; a row that has ended writes no more."""

    def __init__(
        self,
        lm: LanguageModel,
        tokens: Tensor,
        valid: Tensor,
        sampling: Sampling,
        observer: Observer,
        noise: Noise,
    ) -> None:
        self.lm, self.sampling, self.observer, self.noise = lm, sampling, observer, noise
        self.tokens, self.valid = tokens.to(lm.device), valid.to(lm.device, copy=True)
        self.positions = (self.valid.cumsum(-1) - 1).clamp_min(0)
        self.prompt_length = tokens.shape[1] - sampling.gen_len
        self.ends = torch.tensor(sorted(lm.spec.end_token_ids), dtype=torch.int64, device=lm.device)
        self.done = torch.zeros(len(tokens), dtype=torch.bool, device=lm.device)
        self.cache = DynamicCache()  # without the config, so that a sliding window hides keys but never drops them
        self.sums: dict[Measure, Tensor] = {}

    def run(self) -> Iterator[Step]:
        step = None
        for index in range(self.sampling.steps):
            if step is None or not bool(self.done.all()):
                step = self._step(index)
            else:
                # Nothing is written any more and no row is added: what was seen stays as it is.
                none = None if step.blocked is None else torch.zeros_like(step.blocked)
                nowhere = torch.full_like(step.confidence, torch.nan)
                step = replace(step, index=index, confidence=nowhere, blocked=none, patterns=None)
            yield step

    @torch.no_grad()
    def _step(self, index: int) -> Step:
        keys = self.prompt_length + index  # that exist now; the new token becomes one at the next step
        pattern = self.observer.keeps_pattern(index)
        blocked = self._blocked(index, keys)
        logits, seen = self._forward(index, keys, blocked, pattern)
        token, probability = self._choose(logits, index, keys)
        self.tokens, confidence = (
            self.tokens.clone(),
            torch.full(self.tokens.shape, torch.nan, device=logits.device),
        )
        self.tokens[:, keys] = token.masked_fill(self.done, UNWRITTEN)
        confidence[:, keys] = probability.masked_fill(self.done, torch.nan)
        self.done = self.done | torch.isin(token, self.ends)
        self.valid[:, keys] = ~self.done  # a row that has ended is never asked again, so its end is no key
        step = Step(index, self.tokens, confidence, (logits < torch.inf).all())  # false for NaN too
        return self._accumulated(self.observer.report(step, seen, blocked, pattern), keys)

    def _blocked(self, index: int, keys: int) -> Tensor | None:
        """(L, B, H, keys) bool: judged over the keys of the step before, so the newest one is always open."""
        before = keys - 1
        measure = self.observer.judged
        judged = self.sums[measure] if measure is not None and self.observer.blocks_at(index) else None
        prompt = torch.arange(before, device=self.tokens.device).expand(len(self.tokens), -1) < self.prompt_length
        valid, nothing = self.valid[:, :before], torch.zeros_like(prompt)
        blocked = self.observer.blocked(index, judged, valid, nothing, prompt)
        return None if blocked is None else F.pad(blocked & ~self.done[:, None, None], (0, 1))

    def _forward(self, index: int, keys: int, blocked: Tensor | None, pattern: bool) -> tuple[Tensor, Seen]:
        """Logits (B, V) for the next token. The first pass takes the prompt, every later one the newest token."""
        first = 0 if index == 0 else keys - 1
        inputs = self.tokens[:, first:keys].clamp_min(0)
        with self.lm.probe.asked(self.observer.ask(blocked, pattern)) as seen:
            logits = self.lm.model(
                inputs,
                attention_mask=self.valid[:, :keys],
                position_ids=self.positions[:, first:keys],
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
        for measure in self.observer.measures:
            self._add(measure, columns(seen, measure))
        return logits, seen

    def _add(self, measure: Measure, rows: Tensor) -> None:
        earlier = self.sums.get(measure)
        if earlier is not None and not measure.last_query:
            rows = rows + F.pad(earlier, (0, 1))
        self.sums[measure] = rows

    def _choose(self, logits: Tensor, index: int, position: int) -> tuple[Tensor, Tensor]:
        if self.sampling.temperature > 0:
            logits = logits / self.sampling.temperature
        probabilities = restrict(logits, self.sampling).float().softmax(-1)
        if self.sampling.temperature > 0:
            draws = self.noise.over_tokens(index, self.positions[:, position, None], logits.shape[-1])[:, 0]
            token = (probabilities.double().log() + gumbel(draws)).argmax(-1)
        else:
            token = logits.argmax(-1)
        return token, probabilities.gather(-1, token[:, None])[:, 0]

    def _accumulated(self, step: Step, keys: int) -> Step:
        """Sums over all rows so far instead of this pass's, NaN where no key is yet."""
        kept, capture = self.observer.kept, self.observer.capture
        if kept is None or capture is None:
            return step
        incoming = self.sums[kept] if capture.layers is None else self.sums[kept][list(capture.layers)]
        incoming = incoming if capture.heads is None else incoming[:, :, list(capture.heads)]
        return replace(step, incoming=self._grown(incoming, keys), value_norm=self._grown(step.value_norm, keys))

    def _grown(self, values: Tensor | None, keys: int) -> Tensor | None:
        """(…, S) with NaN beyond the keys of this step, and where a row that has ended has none."""
        if values is None:
            return None
        values = F.pad(values, (0, self.tokens.shape[1] - keys), value=torch.nan)
        absent = ~self.valid
        absent[:, : self.prompt_length] = False
        return values.masked_fill(absent[:, None, :], torch.nan)
