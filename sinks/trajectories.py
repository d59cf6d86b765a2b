"""How sinks behave over the denoising steps: pure NumPy functions of incoming attention, flags and positions.

Axis 0 is always the denoising step and, where there is one, the last axis the key position: ``c`` is (T, ..., S) with
NaN where no key is, ``sinks`` the bool of the same shape that :func:`sinks.detect` gives, ``positions`` (T, ...) the
place of one sink at every step, -1 at steps without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sinks.detection import normalize

Array = NDArray[Any]

STATIC = 0.9  # a sink that stays put in this share of its steps, and has no drift, is called static


class Interval(NamedTuple):
    """An estimate and its interval; NaN where nothing was counted, and for the bounds of a single sample."""

    estimate: Array
    low: Array
    high: Array


def excess(c: Array) -> Array:
    """By how much each key passes the mean of the others: it is a sink for every epsilon below that.

    Returns:
        float64 (..., S), -inf where no key is and in rows of a single key, which has no others.
    """
    strength, keys = normalize(c)
    strength = np.where(keys, strength, 0.0)
    n = keys.sum(-1, keepdims=True)
    others = (strength.sum(-1, keepdims=True) - strength) / np.maximum(n - 1, 1)
    return np.where(keys & (n > 1), strength - others, -np.inf)


def strongest(c: Array, among: Array | None = None) -> Array:
    """(...) the position of the strongest key, of those ``among`` (bool, the shape of ``c``); -1 if there is none."""
    candidates = ~np.isnan(c) if among is None else among & ~np.isnan(c)
    position = np.where(candidates, c, -np.inf).argmax(-1)
    return np.where(candidates.any(-1), position, -1)


def held(c: Array, sinks: Array) -> Array:
    """(...) the share of all incoming attention that the sinks hold; NaN where there is no attention at all."""
    c = np.nan_to_num(c.astype(np.float64))
    return ratio(np.where(sinks, c, 0.0).sum(-1), c.sum(-1))


def entropy(weights: Array) -> Array:
    """(...) Shannon entropy in nats of weights along the last axis, normalised to sum 1; NaN counts as 0.

    Of incoming attention it says how evenly the keys share it (log S: equally; 0: one key has all); of the rows of an
    attention pattern it is the attention entropy of each query. NaN where all weights are 0.
    """
    weights = np.nan_to_num(weights.astype(np.float64))
    share = ratio(weights, weights.sum(-1, keepdims=True))
    logarithm = np.log(share, out=np.zeros_like(share), where=share > 0)
    return -(share * logarithm).sum(-1)


class Dwell(NamedTuple):
    """Stays of a sink at one place: how many there were, and how many steps they lasted together."""

    stays: Array
    steps: Array


def dwell(positions: Array) -> Dwell:
    """Stays per (...): a stay is a longest row of steps with one and the same position; steps without a sink are none.

    ``steps / stays`` is the mean dwell time in steps. The first and the last stay are cut off by the ends of the
    generation, so the true mean is larger, the more so the longer sinks stay.
    """
    present = positions >= 0
    continued = present[1:] & (positions[1:] == positions[:-1])
    return Dwell(present.sum(0) - continued.sum(0), present.sum(0))


class Survival(NamedTuple):
    """Sinks that had a next step, and how many of them were sinks there as well."""

    survived: Array
    sinks: Array


def persistence(sinks: Array) -> Survival:
    """Counts per (...): ``survived / sinks`` is the chance that a token that is a sink is one a step later too."""
    return Survival((sinks[:-1] & sinks[1:]).sum((0, -1)), sinks[:-1].sum((0, -1)))


class Movement(NamedTuple):
    """Moves between two steps that both have a sink: tokens moved in all (signed), and how many went which way."""

    distance: Array
    right: Array
    left: Array
    stayed: Array

    @property
    def moves(self) -> Array:
        return self.right + self.left + self.stayed


def movement(positions: Array) -> Movement:
    """Counts per (...). ``distance / moves`` is the signed displacement per step, in tokens; right is positive."""
    both = (positions[1:] >= 0) & (positions[:-1] >= 0)
    moved = np.where(both, positions[1:] - positions[:-1], 0)
    return Movement(moved.sum(0), (moved > 0).sum(0), (moved < 0).sum(0), (both & (moved == 0)).sum(0))


def direction(displacement: Interval, stayed: Array) -> Array:
    """(...) str: what the paper says in words (arXiv 2510.15731), decided by numbers.

    "moves right" or "moves left" when the interval of the signed displacement leaves out 0; else "static" when the sink
    stays put in at least 90 % of its steps, else "no direction". "unknown" without an interval.
    """
    known = ~np.isnan(displacement.low)
    return np.select(
        [~known, displacement.low > 0, displacement.high < 0, stayed >= STATIC],
        ["unknown", "moves right", "moves left", "static"],
        "no direction",
    )


def interval(
    numerator: Array, denominator: Array, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Ratio of sums over samples with a percentile bootstrap interval; whole samples are drawn, with replacement.

    Args:
        numerator, denominator: (N, ...) one entry per sample.
        level: how much of the bootstrap distribution the interval holds.
        resamples: how many times N samples are drawn.
    """
    shape, samples = numerator.shape[1:], len(numerator)
    top, bottom = (np.asarray(part, dtype=np.float64).reshape(samples, -1) for part in (numerator, denominator))
    estimate = ratio(top.sum(0), bottom.sum(0))
    if samples < 2:
        unknown = np.full(shape, np.nan)
        return Interval(estimate.reshape(shape), unknown, unknown)
    drawn = np.random.default_rng(seed).multinomial(samples, np.full(samples, 1 / samples), size=resamples)
    tails = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.empty_like(estimate), np.empty_like(estimate)
    for column in range(estimate.size):
        ratios = ratio(drawn @ top[:, column], drawn @ bottom[:, column])
        some = ratios[~np.isnan(ratios)]
        low[column], high[column] = np.quantile(some, tails) if some.size else (np.nan, np.nan)
    return Interval(estimate.reshape(shape), low.reshape(shape), high.reshape(shape))


def count_by_class(where: Array, classes: Array, count: int) -> Array:
    """(count,) how many of the flagged tokens are of each class.

    Args:
        where: (T, ..., S) bool or integer counts.
        classes: (T, S) the class of every position at every step, as 0…count-1.
    """
    per_position = where.sum(tuple(range(1, where.ndim - 1)))
    return np.bincount(classes.ravel(), weights=per_position.ravel(), minlength=count).astype(np.int64)


class AroundUnmasking(NamedTuple):
    """Counts by offset: of flagged (token, layer, head), and of all that were looked at."""

    flagged: Array
    seen: Array


def around_unmasking(sinks: Array, unmasked_at: Array, span: int) -> AroundUnmasking:
    """Sinks before and after their token was filled.

    Offset 0 is the first step whose input shows the token, the one after ``unmasked_at``; at offset -1 it was still
    masked. Positions of the prompt and never filled ones (``unmasked_at`` -1) are left out.

    Args:
        sinks: (T, ..., S) bool; unmasked_at: (S,) the step at which each position got its token.
        span: offsets run from -span to span, (2 span + 1,) entries.
    """
    steps, heads = len(sinks), int(np.prod(sinks.shape[1:-1], dtype=np.int64))
    offset = np.arange(steps)[:, None] - np.asarray(unmasked_at)[None, :] - 1
    counted = (np.asarray(unmasked_at) >= 0)[None, :] & (np.abs(offset) <= span)
    per_position = sinks.sum(tuple(range(1, sinks.ndim - 1)))
    index, size = offset[counted] + span, 2 * span + 1
    flagged = np.bincount(index, weights=per_position[counted], minlength=size).astype(np.int64)
    return AroundUnmasking(flagged, np.bincount(index, minlength=size) * heads)


class Leaving(NamedTuple):
    """Sinks that were gone a step later, and all of them: those whose token was just filled, and the others."""

    left_when_filled: Array
    when_filled: Array
    left_otherwise: Array
    otherwise: Array


def leaving(sinks: Array, unmasked_at: Array) -> Leaving:
    """Does a sink leave when its token is filled? Compare the two shares of sinks that are gone at the next step."""
    filled = np.arange(len(sinks) - 1)[:, None] == np.asarray(unmasked_at)[None, :]
    filled = filled.reshape(filled.shape[0], *(1,) * (sinks.ndim - 2), filled.shape[1])
    before, gone = sinks[:-1], sinks[:-1] & ~sinks[1:]
    return Leaving((gone & filled).sum(), (before & filled).sum(), (gone & ~filled).sum(), (before & ~filled).sum())


EPSILON_STEP = 0.01  # resolution of the sweep
_EPSILON_BINS = 100_000  # up to 1000; what lies above falls into the last bin


def excess_histogram(margins: Array) -> Array:
    """(bins,) how many tokens pass the others' mean by at most 0, 0.01, 0.02, …: counts of rounded-up excesses.

    ``margins`` is what :func:`excess` gives; entries that are no key (-inf) are left out. Histograms add up.
    """
    finite = margins[np.isfinite(margins)]
    rounded_up = np.ceil(np.clip(finite, 0, (_EPSILON_BINS - 1) * EPSILON_STEP) / EPSILON_STEP - 1e-9)
    return np.bincount(rounded_up.astype(np.int64), minlength=_EPSILON_BINS)


def flagged_share(histogram: Array, epsilons: Sequence[float]) -> Array:
    """(K,) the share of tokens that are sinks at each epsilon, a multiple of 0.01 below 1000."""
    unflagged = np.cumsum(histogram)
    index = np.rint(np.asarray(epsilons) / EPSILON_STEP).astype(np.int64)
    return 1 - ratio(unflagged[index], unflagged[-1])


def epsilon_for(histogram: Array, unflagged: float) -> float:
    """The smallest epsilon, a multiple of 0.01, at which at least this share of tokens is no sink; NaN without any."""
    total = histogram.sum()
    if not total:
        return float("nan")
    enough = np.cumsum(histogram) >= unflagged * total - 1e-9
    return float(np.argmax(enough) * EPSILON_STEP)


def ratio(numerator: Array, denominator: Array) -> Array:
    """NaN where there is nothing to divide by."""
    numerator, denominator = np.broadcast_arrays(
        np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    )
    return np.divide(numerator, denominator, out=np.full(numerator.shape, np.nan), where=denominator != 0)
