"""What a run shows, in a few figures; NumPy only, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sinks.detection import detect
from sinks.runs import Run, Sample, evenly_spaced
from sinks.tiny.problems import extract_answer
from sinks.trajectories import strongest

_NAMED = 5  # tokens
_STEPS_READ = 500  # of all samples together: figures of a large run come from a part of it


@dataclass(frozen=True)
class Summary:
    """Figures of the samples that are done; shares lie between 0 and 1.

    failed: samples for which the model computed NaN or infinity; the manifest says where.
    masked, empty: answers that still hold mask tokens, and that hold no text.
    exact: answers whose number after ``####`` is that of the reference, of ``judged`` that have one there.
    sink_heads: share of (step, layer, head) with a sink; sink_tokens: share of (step, layer, head, token) that are one.
    moves: share of (layer, head) whose strongest key is another one than a step before; None with one step.
    strongest: the token strings that are most often the strongest key, and how often; "[MASK]" while not yet filled.
    """

    samples: int
    planned: int
    failed: int
    tokens_per_second: float
    exact: int
    judged: int
    masked: int
    empty: int
    epsilon: float
    sink_heads: float
    sink_tokens: float
    moves: float | None
    strongest: list[tuple[str, float]]

    def lines(self) -> list[str]:
        lines = [f"samples         {self.samples} of {self.planned} done, {self.tokens_per_second:.0f} tokens/s"]
        if self.failed:
            lines.append(f"failed          {self.failed}; manifest.json says why")
        if self.judged:
            lines.append(f"exact answers   {self.exact} of {self.judged}")
        if self.masked or self.empty:
            lines.append(f"answers         {self.masked} still hold mask tokens, {self.empty} are empty")
        lines.append(
            f"sinks           in {self.sink_heads:.1%} of all (step, layer, head), epsilon {self.epsilon:g}; "
            f"{self.sink_tokens:.2%} of the tokens there"
        )
        if self.moves is not None:
            lines.append(f"strongest key   another one than a step before in {self.moves:.1%} of all (layer, head)")
        named = ", ".join(f"{text!r} {share:.0%}" for text, share in self.strongest)
        lines.append(f"                most often {named}")
        return lines


def summarise(run: Run, epsilon: float = 3.0) -> Summary:
    """Read a run once; of a large one, evenly spaced steps."""
    samples = run.samples
    pairs = [(extract_answer(s.text), extract_answer(s.reference or "")) for s in samples]
    mask = run.manifest["spec"]["mask_token_id"]
    finals = [sample.tokens(-1)[sample.prompt_length :] for sample in samples]
    sink_heads, sink_tokens, moves, strongest = _sinks(samples, epsilon)
    return Summary(
        samples=len(samples),
        planned=len(run.manifest["samples"]),
        failed=sum(sample.get("state") == "failed" for sample in run.manifest["samples"]),
        tokens_per_second=_speed(samples, sum(len(final) for final in finals)),
        exact=sum(expected is not None and answer == expected for answer, expected in pairs),
        judged=sum(expected is not None for _, expected in pairs),
        masked=sum(bool(np.any(final == mask)) for final in finals),
        empty=sum(not sample.text.strip() for sample in samples),
        epsilon=epsilon,
        sink_heads=sink_heads,
        sink_tokens=sink_tokens,
        moves=moves,
        strongest=strongest,
    )


def _speed(samples: Sequence[Sample], tokens: int) -> float:
    """Tokens per second of computing, 0 where nobody took the time; the samples of a batch share its seconds."""
    timings = [sample.info.get("timings", {}) for sample in samples]
    seconds = sum(timing.get("seconds", 0) / max(timing.get("samples_together", 1), 1) for timing in timings)
    return tokens / seconds if seconds else 0.0


def _sinks(samples: Sequence[Sample], epsilon: float) -> tuple[float, float, float | None, list[tuple[str, float]]]:
    names: Counter[str] = Counter()
    steps = [(sample, t) for sample in samples for t in range(sample.steps)]
    heads, tokens, moves = [], [], []
    for sample, t in [steps[i] for i in evenly_spaced(_STEPS_READ, len(steps))]:
        incoming = sample.incoming(t)
        sinks = detect(incoming, epsilon)
        heads.append(sinks.any(-1).mean())
        tokens.append(sinks.sum() / (~np.isnan(incoming)).sum())
        names.update(_names(sample, t, strongest(incoming)))
        if t > 0:
            moves.append((strongest(incoming) != strongest(sample.incoming(t - 1))).mean())
    common = [(name, count / names.total()) for name, count in names.most_common(_NAMED)]
    return float(np.mean(heads)), float(np.mean(tokens)), float(np.mean(moves)) if moves else None, common


def _names(sample: Sample, t: int, positions: np.ndarray) -> list[str]:
    """What stands at some positions at the start of step ``t``."""
    waiting, texts = sample.unmasked_at >= t, sample.tokens_text
    return ["[MASK]" if waiting[position] else texts[position] for position in positions.ravel().tolist()]
