"""What the samples of a run show, in numbers: one pass over each sample, layer by layer, then tidy tables over all.

A table is a list of rows, a row a mapping from column to value. Intervals are 95 % bootstrap intervals over samples.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sinks import trajectories as tr
from sinks.detection import DEFINITIONS, detect, detect_as
from sinks.errors import InputError
from sinks.files import write_text
from sinks.runs import Array, Run, Sample, evenly_spaced
from sinks.tokens import CLASSES, token_class

SPAN = 32  # steps before and after a token is filled
EPSILONS = np.round(np.arange(0, 10.01, 0.1), 1)
UNFLAGGED = (0.95, 0.96)  # shares of tokens that are no sinks, for which the sweep names the epsilon
_DEFINITION_STEPS = 16  # published definitions are compared at so many evenly spaced steps

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Counts:
    """One sample, counted at one epsilon; T steps, L' layers and H' heads that were kept, S positions.

    flags: (T, L', H') number of sinks; keys: (T, L', H') of key positions; held: share of the incoming attention that
    sinks hold; entropy: of incoming attention, nats; positions: of the strongest sink, -1 for none; survived, mortal:
    (L', H') sinks that still were one a step later, and sinks that had a next step; by_class: (2, classes) sinks and
    all tokens; around: (2, 2 SPAN + 1) sinks and all tokens by steps since unmasking; leaving: (4,) of
    :func:`sinks.trajectories.leaving`; histogram: of excesses; definitions: name -> tokens flagged, tokens, heads
    flagged, heads; means: (T, L', S) incoming attention, mean over heads.
    """

    sample: Sample
    flags: Array
    keys: Array
    held: Array
    entropy: Array
    positions: Array
    survived: Array
    mortal: Array
    by_class: Array
    around: Array
    leaving: Array
    histogram: Array
    definitions: dict[str, Array]
    means: Array


def classes(run: Run, sample: Sample) -> Array:
    """(T, S) the class of each position in the input of each step, as an index into CLASSES."""
    final = np.array([CLASSES.index(token_class(text)) for text in sample.tokens_text])
    masked = sample.tokens()[:-1] == run.manifest["spec"]["mask_token_id"]
    return np.where(masked, CLASSES.index("mask token"), final)


def count(run: Run, sample: Sample, epsilon: float) -> Counts:
    """Read a sample once, one layer at a time.

    Raises:
        InputError: the sample is damaged; it is named.
    """
    sample.check()
    try:
        return _count(run, sample, epsilon)
    except InputError as error:
        raise InputError(str(error) if str(sample.folder) in str(error) else f"{sample.folder}: {error}") from error


def _count(run: Run, sample: Sample, epsilon: float) -> Counts:
    kinds, unmasked_at = classes(run, sample), sample.unmasked_at
    causal = run.manifest["spec"]["attention"] == "causal"
    layers = [
        _count_layer(sample.incoming(layer=layer), kinds, unmasked_at, epsilon, causal) for layer in sample.layers
    ]
    means = np.stack([layer["means"] for layer in layers], axis=1)
    stacked = {
        name: np.stack([layer[name] for layer in layers], axis=1)
        for name in ("flags", "keys", "held", "entropy", "positions")
    }
    lived = {name: np.stack([layer[name] for layer in layers]) for name in ("survived", "mortal")}
    summed = {name: sum(layer[name] for layer in layers) for name in ("by_class", "around", "leaving", "histogram")}
    definitions = {name: sum(layer["definitions"][name] for layer in layers) for name in layers[0]["definitions"]}
    pooled = means.mean(1)
    definitions["sink-aware-pruning"] = _tally(detect_as("sink-aware-pruning", pooled), pooled)
    return Counts(sample, **stacked, **lived, **summed, definitions=definitions, means=means)


def _count_layer(c: Array, kinds: Array, unmasked_at: Array, epsilon: float, causal: bool) -> dict[str, Any]:
    """``c`` is (T, H', S)."""
    sinks, keys = detect(c, epsilon), ~np.isnan(c)
    alive = tr.persistence(sinks)
    around = tr.around_unmasking(sinks, unmasked_at, SPAN)
    return {
        "flags": sinks.sum(-1),
        "keys": keys.sum(-1),
        "held": tr.held(c, sinks),
        "entropy": tr.entropy(c),
        "positions": tr.strongest(c, among=sinks),
        "survived": alive.survived,
        "mortal": alive.sinks,
        "by_class": np.stack([tr.count_by_class(where, kinds, len(CLASSES)) for where in (sinks, keys)]),
        "around": np.stack(around),
        "leaving": np.array(tr.leaving(sinks, unmasked_at)),
        "histogram": tr.excess_histogram(tr.excess(c)),
        "definitions": _by_definition(c[evenly_spaced(_DEFINITION_STEPS, len(c))], epsilon, causal),
        "means": c.mean(1),
    }


def _by_definition(c: Array, epsilon: float, causal: bool) -> dict[str, Array]:
    """All but sink-aware pruning, which judges the mean over layers and heads."""
    options: dict[str, dict[str, Any]] = {"moving-sinks": {"epsilon": epsilon}, "attention-sink": {"causal": causal}}
    names = [name for name in DEFINITIONS if name != "sink-aware-pruning"]
    return {name: _tally(detect_as(name, c, **options.get(name, {})), c) for name in names}


def _tally(sinks: Array, c: Array) -> Array:
    """Tokens flagged, keys there are, heads with one, heads."""
    heads = sinks.any(-1)
    return np.array([sinks.sum(), (~np.isnan(c)).sum(), heads.sum(), heads.size])


# Tables


def tables(counts: Sequence[Counts], epsilon: float) -> dict[str, list[Row]]:
    """Every table, by the name of its file. All samples must have kept the same layers and heads."""
    return {
        "heads": [row for one in counts for row in _head_rows(one)],
        "movement": list(_movement_rows(counts)),
        "steps": [row for one in counts for row in _step_rows(one)],
        "classes": list(_class_rows(counts)),
        "unmasking": list(_unmasking_rows(counts)),
        "leaving": list(_leaving_rows(counts)),
        "epsilon": list(_epsilon_rows(counts)),
        "definitions": list(_definition_rows(counts)),
        "summary": [_summary(counts, epsilon)],
    }


def _head_rows(one: Counts) -> Iterator[Row]:
    moved, stay = tr.movement(one.positions), tr.dwell(one.positions)
    for (i, layer), (j, head) in _pairs(one.sample):
        yield {
            "sample": one.sample.index,
            "layer": layer,
            "head": head,
            "sinks_per_step": one.flags[:, i, j].mean(),
            "share_of_tokens": _share(one.flags[:, i, j].sum(), one.keys[:, i, j].sum()),
            "share_of_attention": _mean(one.held[:, i, j]),
            "entropy_nats": _mean(one.entropy[:, i, j]),
            "share_of_steps_with_sink": (one.positions[:, i, j] >= 0).mean(),
            "dwell_steps": _share(stay.steps[i, j], stay.stays[i, j]),
            "persistence": _share(one.survived[i, j], one.mortal[i, j]),
            "displacement_per_step": _share(moved.distance[i, j], moved.moves[i, j]),
            "moved_right": _share(moved.right[i, j], moved.moves[i, j]),
            "moved_left": _share(moved.left[i, j], moved.moves[i, j]),
            "stayed": _share(moved.stayed[i, j], moved.moves[i, j]),
        }


def _movement_rows(counts: Sequence[Counts]) -> Iterator[Row]:
    """Per layer and head, over samples: signed displacement, which way it goes, dwell time, persistence."""
    moved = [tr.movement(one.positions) for one in counts]
    moves = np.stack([one.moves for one in moved])
    displacement = tr.interval(np.stack([one.distance for one in moved]), moves)
    stays = [tr.dwell(one.positions) for one in counts]
    dwelt = tr.interval(np.stack([one.steps for one in stays]), np.stack([one.stays for one in stays]))
    alive = tr.interval(np.stack([one.survived for one in counts]), np.stack([one.mortal for one in counts]))
    shares = {
        name: tr.ratio(np.sum([getattr(one, name) for one in moved], axis=0), moves.sum(0))
        for name in ("right", "left", "stayed")
    }
    words = tr.direction(displacement, shares["stayed"])
    for (i, layer), (j, head) in _pairs(counts[0].sample):
        yield {
            "layer": layer,
            "head": head,
            **_bounds("displacement_per_step", displacement, (i, j)),
            "moves": str(words[i, j]),
            **{f"share_{name}": share[i, j] for name, share in shares.items()},
            **_bounds("dwell_steps", dwelt, (i, j)),
            **_bounds("persistence", alive, (i, j)),
        }


def _step_rows(one: Counts) -> Iterator[Row]:
    """Per step and layer, and pooled (layer "all": the mean over layers and heads)."""
    layers: list[Any] = ["all", *one.sample.layers]
    for t in range(len(one.flags)):
        for i, layer in enumerate(layers):
            of = slice(None) if layer == "all" else i - 1
            yield {
                "sample": one.sample.index,
                "step": t,
                "layer": layer,
                "sinks_per_head": one.flags[t, of].mean(),
                "share_of_tokens": _share(one.flags[t, of].sum(), one.keys[t, of].sum()),
                "share_of_attention": _mean(one.held[t, of]),
                "entropy_nats": _mean(one.entropy[t, of]),
                "share_of_heads_with_sink": (one.positions[t, of] >= 0).mean(),
            }


def _class_rows(counts: Sequence[Counts]) -> Iterator[Row]:
    """What the sinks are (arXiv 2510.15731, Table 2): shares of all sinks, beside the shares of all tokens."""
    for k, series in enumerate(("sinks", "all tokens")):
        of = np.stack([one.by_class[k] for one in counts])
        shares = tr.interval(of, np.repeat(of.sum(-1, keepdims=True), of.shape[1], axis=1))
        for i, name in enumerate(CLASSES):
            if any(one.by_class[:, i].any() for one in counts):
                yield {"series": series, "class": name, "count": of[:, i].sum(), **_bounds("share", shares, (i,))}


def _unmasking_rows(counts: Sequence[Counts]) -> Iterator[Row]:
    """Share of tokens that are sinks by steps since their own unmasking; 0: the first step that sees the token."""
    shares = tr.interval(np.stack([one.around[0] for one in counts]), np.stack([one.around[1] for one in counts]))
    for i, offset in enumerate(range(-SPAN, SPAN + 1)):
        if not np.isnan(shares.estimate[i]):
            yield {"offset": offset, **_bounds("share", shares, (i,))}


def _leaving_rows(counts: Sequence[Counts]) -> Iterator[Row]:
    of = np.stack([one.leaving for one in counts])
    for i, name in enumerate(("token just filled", "token not just filled")):
        share = tr.interval(of[:, [2 * i]], of[:, [2 * i + 1]])
        yield {"sink_whose": name, "sinks": of[:, 2 * i + 1].sum(), **_bounds("gone_a_step_later", share, (0,))}


def _epsilon_rows(counts: Sequence[Counts]) -> Iterator[Row]:
    for epsilon, share in zip(EPSILONS, tr.flagged_share(_histogram(counts), EPSILONS.tolist()), strict=True):
        yield {"epsilon": epsilon, "share_of_tokens": share}


def _definition_rows(counts: Sequence[Counts]) -> Iterator[Row]:
    """Every published definition on the same attention (at up to 16 steps; sink-aware pruning at all, pooled)."""
    for name in DEFINITIONS:
        tokens, of_tokens, heads, of_heads = np.sum([one.definitions[name] for one in counts], axis=0)
        yield {"definition": name, "tokens": _share(tokens, of_tokens), "heads": _share(heads, of_heads)}


def epsilon_for(counts: Sequence[Counts]) -> dict[float, float]:
    """Share of unflagged tokens -> the smallest epsilon that reaches it."""
    return {share: tr.epsilon_for(_histogram(counts), share) for share in UNFLAGGED}


def _summary(counts: Sequence[Counts], epsilon: float) -> Row:
    flags, keys = sum(one.flags.sum() for one in counts), sum(one.keys.sum() for one in counts)
    pooled = [tr.strongest(one.means.mean(1)) for one in counts]
    moved = [tr.movement(one) for one in pooled]
    drift = tr.interval(np.array([one.distance for one in moved]), np.array([one.moves for one in moved]))
    return {
        "samples": len(counts),
        "epsilon": epsilon,
        "share_of_tokens": _share(flags, keys),
        "share_of_attention": _mean(np.concatenate([one.held.ravel() for one in counts])),
        "share_of_heads_with_sink": np.mean(np.concatenate([(one.positions >= 0).ravel() for one in counts])),
        **{f"epsilon_{share:.0%}_unflagged": value for share, value in epsilon_for(counts).items()},
        **_bounds("pooled_displacement_per_step", drift, ()),
    }


def head_steps(one: Counts) -> Iterator[Row]:
    """One sample in full: every step, layer and head, with the place of the strongest sink (empty: there is none)."""
    text = one.sample.tokens_text
    for t in range(len(one.flags)):
        for (i, layer), (j, head) in _pairs(one.sample):
            position = one.positions[t, i, j]
            yield {
                "step": t,
                "layer": layer,
                "head": head,
                "sinks": one.flags[t, i, j],
                "share_of_tokens": _share(one.flags[t, i, j], one.keys[t, i, j]),
                "share_of_attention": one.held[t, i, j],
                "entropy_nats": one.entropy[t, i, j],
                "strongest": "" if position < 0 else position,
                "final_token": "" if position < 0 else text[position],
            }


def write_table(rows: Iterable[Row], path: Path) -> None:
    """A CSV file; unknown numbers are empty."""
    text = io.StringIO()
    rows = iter(rows)
    first = next(rows, {})
    writer = csv.DictWriter(text, fieldnames=list(first), lineterminator="\n")
    writer.writeheader()
    for row in chain([first] if first else [], rows):
        writer.writerow({key: _cell(value) for key, value in row.items()})
    write_text(path, text.getvalue())


def _cell(value: Any) -> Any:
    if not isinstance(value, (float, np.floating)):
        return value
    return "" if math.isnan(value) else f"{value:.6g}"


def _histogram(counts: Sequence[Counts]) -> Array:
    return np.sum([one.histogram for one in counts], axis=0)


def _pairs(sample: Sample) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for layer in enumerate(sample.layers):
        for head in enumerate(sample.heads):
            yield layer, head


def _bounds(name: str, of: tr.Interval, index: tuple[int, ...]) -> dict[str, Any]:
    return {name: of.estimate[index], f"{name}_low": of.low[index], f"{name}_high": of.high[index]}


def _share(part: Any, whole: Any) -> float:
    return float(tr.ratio(part, whole))


def _mean(values: Array) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan
