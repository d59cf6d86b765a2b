"""Sinks of incoming attention: hand-computed cases, and a second computation in plain Python."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sinks import detection
from sinks.detection import detect, detect_as
from sinks.errors import InputError

# Column 5 receives 0.9 from each of eight rows; the other columns share the rest.
PLANT = np.full((8, 8), 0.1 / 7)
PLANT[:, 5] = 0.9
PLANTED = PLANT.sum(0)
ONLY_5 = [False] * 5 + [True] + [False] * 2

MAKERS: list[Callable[[Any], Any]] = [np.asarray, torch.as_tensor]
NAN = math.nan


def bits(found: Any) -> Any:
    """The same in lists of bool."""
    return found.tolist()


def expected(row: list[float], epsilon: float, excluded: list[bool], mean: bool, per_query: bool) -> list[bool | None]:
    """The rule, key by key; None where it hangs on the last digits."""
    exists = [not math.isnan(c) for c in row]
    received = [c if here else 0.0 for c, here in zip(row, exists, strict=True)]
    keys = [here and not out for here, out in zip(exists, excluded, strict=True)]
    if mean:
        everything = math.fsum(received)
        received = [c / everything if everything > 0 else c for c in received]
    if per_query:
        seeing = [sum(exists[j:]) for j in range(len(row))]
        keys = [key and n >= 8 for key, n in zip(keys, seeing, strict=True)]
        shares = [c / n if key else 0.0 for c, n, key in zip(received, seeing, keys, strict=True)]
        average = math.fsum(shares) / max(1, sum(keys))
        received = [share / average if average > 0 else share for share in shares]
    n, total = sum(keys), math.fsum(c for c, key in zip(received, keys, strict=True) if key)
    if n < 2:
        return [False] * len(row)
    margins = [c - (total - c) / (n - 1) - epsilon for c in received]
    return [
        None if key and abs(margin) < 1e-9 else key and margin > 0 for key, margin in zip(keys, margins, strict=True)
    ]


def agrees(found: list[bool], wanted: list[bool | None]) -> bool:
    return all(want is None or got is want for got, want in zip(found, wanted, strict=True))


@st.composite
def captures(draw: st.DrawFn) -> tuple[list[list[float]], list[list[bool]]]:
    """Rows of incoming attention, some cut short by NaN, and keys to leave out."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 14))
    value = st.floats(0, 20, allow_nan=False, width=32)
    incoming = draw(st.lists(st.lists(value, min_size=length, max_size=length), min_size=rows, max_size=rows))
    for row in incoming:
        exists = draw(st.integers(0, length))
        row[exists:] = [NAN] * (length - exists)
    flags = st.lists(st.booleans(), min_size=length, max_size=length)
    return incoming, draw(st.lists(flags, min_size=rows, max_size=rows))


@settings(max_examples=300)
@given(
    capture=captures(),
    epsilon=st.floats(0, 0.99),
    mean=st.booleans(),
    per_query=st.booleans(),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
)
def test_numpy_and_torch_agree_with_plain_python(
    capture: tuple[list[list[float]], list[list[bool]]], epsilon: float, mean: bool, per_query: bool, dtype: str
) -> None:
    array, excluded = np.asarray(capture[0], dtype=dtype), capture[1]
    options = {"normalization": "mean" if mean else "sum", "visibility": "per_query" if per_query else "raw"}
    wanted = [
        expected([float(c) for c in row], epsilon, out, mean, per_query)
        for row, out in zip(array.tolist(), excluded, strict=True)
    ]
    for make in MAKERS:
        found = detect(make(array), epsilon, make(np.asarray(excluded)), **options)
        assert all(agrees(got, want) for got, want in zip(bits(found), wanted, strict=True))
        assert isinstance(found, type(make(array)))


@settings(max_examples=60)
@given(capture=captures(), epsilon=st.floats(0, 5), shape=st.permutations([1, 2, 1]))
def test_every_row_is_judged_on_its_own(
    capture: tuple[list[list[float]], list[list[bool]]], epsilon: float, shape: list[int]
) -> None:
    rows = np.asarray(capture[0])
    each = [bits(detect(row, epsilon)) for row in rows]
    for make in MAKERS:
        assert bits(detect(make(rows), epsilon)) == each
        stacked = np.broadcast_to(rows, (*shape, *rows.shape))
        found = detect(make(np.ascontiguousarray(stacked)), epsilon)
        assert found.shape == (*shape, *rows.shape)
        assert bits(found.reshape(-1, *rows.shape)) == [each] * 2


@pytest.mark.parametrize("make", MAKERS)
def test_one_planted_sink(make: Callable[[Any], Any]) -> None:
    """7.2 against 0.114 + 3."""
    assert PLANTED[5] == pytest.approx(7.2)
    assert PLANTED[0] == pytest.approx(0.8 / 7)
    assert bits(detect(make(PLANTED))) == ONLY_5
    assert bits(detect(make(PLANTED), epsilon=7.08)) == ONLY_5  # 7.2 - 0.1142857 = 7.0857
    assert bits(detect(make(PLANTED), epsilon=7.09)) == [False] * 8


@pytest.mark.parametrize("make", MAKERS)
def test_a_mean_of_at_most_one(make: Callable[[Any], Any]) -> None:
    """0.9 against 0.0142857."""
    assert bits(detect(make(PLANTED), epsilon=0.88, normalization="mean")) == ONLY_5
    assert bits(detect(make(PLANTED), epsilon=0.89, normalization="mean")) == [False] * 8
    for epsilon in (1.0, 3.0):
        with pytest.raises(InputError, match=f"epsilon is {epsilon}.*no token can receive more than 1"):
            detect(make(PLANTED), epsilon, normalization="mean")
    with pytest.raises(InputError, match="no token can receive more than 1"):
        detect(make(PLANTED), normalization="mean")  # the default of 3 as well


@given(size=st.integers(2, 600), level=st.floats(0.0625, 500, width=32), epsilon=st.sampled_from([0.0, 1e-6, 0.5, 3.0]))
def test_uniform_attention_has_no_sink(size: int, level: float, epsilon: float) -> None:
    for make in MAKERS:
        assert not bool(detect(make(np.full(size, level, dtype=np.float32)), epsilon).any())


@given(values=st.lists(st.floats(0, 20), min_size=2, max_size=30), epsilon=st.floats(0, 5))
def test_the_short_form_of_the_rule(values: list[float], epsilon: float) -> None:
    """With n = T = S the rule reads c > 1 + epsilon (S - 1) / S."""
    size, total = len(values), math.fsum(values)
    if total <= 0:
        return
    scaled = np.asarray(values) * size / total
    line = 1 + epsilon * (size - 1) / size
    clear = np.abs(scaled - line) > 1e-6
    assert (detect(scaled, epsilon) == (scaled > line))[clear].all()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("incoming", "exclude", "epsilon", "found"),
    [
        pytest.param([5.0], None, 0.0, [False], id="one key has no others"),
        pytest.param([5.0, NAN, NAN], None, 0.0, [False] * 3, id="one key that exists"),
        pytest.param([NAN, NAN], None, 0.0, [False] * 2, id="no key at all"),
        pytest.param([4.0, 1.0, 1.0, NAN], None, 2.9, [True, False, False, False], id="4 against 1 + 2.9"),
        pytest.param([4.0, 1.0, 1.0, NAN], None, 3.0, [False] * 4, id="4 does not pass 1 + 3"),
        pytest.param(
            [9.0, 4.0, 1.0, 1.0], [True, False, False, False], 2.9, [False, True, False, False], id="left out"
        ),
        pytest.param([9.0, 4.0, 1.0, 1.0], None, 2.9, [True, False, False, False], id="not left out"),
        pytest.param([9.0, 4.0, 1.0], [True, True, False], 0.0, [False] * 3, id="one key is left"),
        pytest.param([0.0, 0.0, 0.0], None, 0.0, [False] * 3, id="nothing received"),
        pytest.param([3.0, 3.0, 0.0, 0.0], None, 0.9, [True, True, False, False], id="two: 3 against 1 + 0.9"),
    ],
)
def test_cases_by_hand(
    make: Callable[[Any], Any], incoming: list[float], exclude: list[bool] | None, epsilon: float, found: list[bool]
) -> None:
    left_out = None if exclude is None else make(np.asarray(exclude))
    assert bits(detect(make(np.asarray(incoming)), epsilon, left_out)) == found


@pytest.mark.parametrize("make", MAKERS)
def test_padding_may_be_given_for_many_rows_at_once(make: Callable[[Any], Any]) -> None:
    incoming = make(np.asarray([[[0.0, 2.0, 0.5, 0.5]], [[9.0, 0.5, 2.0, 0.5]]]))
    found = detect(incoming, 1.4, make(np.asarray([True, False, False, False])))
    assert bits(found) == [[[False, True, False, False]], [[False, False, True, False]]]


def test_sixteen_bits_are_enough() -> None:
    """The mean over the others is taken in float64: 2,000 keys of 1.0 would not add up in float16."""
    incoming = np.ones(4000, dtype=np.float16)
    incoming[7] = 4.5
    for array in (incoming, torch.as_tensor(incoming), torch.as_tensor(incoming).bfloat16()):
        assert detect(array, 3.0).sum() == 1
        assert not detect(array, 3.6).any()


@pytest.mark.parametrize("make", MAKERS)
def test_per_query_is_fair_to_late_keys(make: Callable[[Any], Any]) -> None:
    """Uniform causal attention, c_j = 1/(j+1) + … + 1/S: raw finds sinks in it, the first token above all."""
    size = 400
    rows = np.tril(np.ones((size, size))) / np.arange(1, size + 1)[:, None]
    incoming = make(rows.sum(0))
    assert float(incoming[0]) == pytest.approx(6.57, abs=0.01)
    others = (size - rows.sum(0)) / (size - 1)
    assert bits(detect(incoming)) == (rows.sum(0) > others + 3).tolist()
    assert bits(detect(incoming))[0]
    assert not bool(detect(incoming, visibility="per_query").any())
    strength, keys = detection.normalize(incoming, visibility="per_query")
    assert int(keys.sum()) == size - 7  # the last seven are seen by fewer than eight queries
    assert float(strength[keys].mean()) == pytest.approx(1)
    ratio = float(strength[0] / strength[100])
    assert ratio == pytest.approx((rows.sum(0)[0] / 400) / (rows.sum(0)[100] / 300))


@pytest.mark.parametrize("make", MAKERS)
def test_per_query_counts_only_positions_that_exist(make: Callable[[Any], Any]) -> None:
    """Ten keys of which the last is seen by one query; a column of 1 per query stands among columns of 0.1."""
    seeing = np.arange(10, 0, -1)
    incoming = 0.1 * seeing
    incoming[1] = 9.0
    longer = make(np.append(incoming, [NAN, NAN]))
    assert detection.queries_seeing(longer).tolist() == [*seeing.tolist(), 0, 0]
    found = detect(longer, 0.5, visibility="per_query")
    assert bits(found) == [False, True] + [False] * 10
    strength, keys = detection.normalize(longer, visibility="per_query")
    assert bits(keys) == [True] * 3 + [False] * 9
    assert strength[:3].tolist() == pytest.approx([0.25, 2.5, 0.25])  # 0.1, 1, 0.1 over their mean of 0.4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": -0.1}, "epsilon is -0.1"),
        ({"epsilon": NAN}, "epsilon is nan"),
        ({"epsilon": math.inf}, "epsilon is inf"),
        ({"normalization": "max"}, "'max' is unknown; use one of sum, mean"),
        ({"visibility": "causal"}, "'causal' is unknown; use one of raw, per_query"),
    ],
)
def test_what_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        detect(PLANTED, **options)


@pytest.mark.parametrize("make", MAKERS)
def test_infinite_attention_is_an_error(make: Callable[[Any], Any]) -> None:
    with pytest.raises(InputError, match="infinite"):
        detect(make(np.asarray([1.0, math.inf])))


@pytest.mark.parametrize("make", MAKERS)
def test_scopes_are_means(make: Callable[[Any], Any]) -> None:
    """Two layers of two heads over two keys."""
    incoming = make(np.asarray([[[1.0, 0.0], [3.0, 2.0]], [[5.0, 4.0], [7.0, 10.0]]]))
    assert detection.pool(incoming, "head", 0).tolist() == incoming.tolist()
    assert detection.pool(incoming, "layer", 0).tolist() == [[[2.0, 1.0]], [[6.0, 7.0]]]
    assert detection.pool(incoming, "model", 0).tolist() == [[[4.0, 4.0]]]
    with pytest.raises(InputError, match="'all' is unknown; use one of head, layer, model"):
        detection.pool(incoming, "all", 0)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("strength", "candidates", "count", "found"),
    [
        ([1.0, 3.0, 2.0], [True] * 3, 2, [False, True, True]),
        ([2.0, 2.0, 2.0], [True] * 3, 1, [True, False, False]),
        ([2.0, 2.0, 2.0], [False, True, True], 1, [False, True, False]),
        ([2.0, 5.0, 2.0, 2.0], [True] * 4, 3, [True, True, True, False]),
        ([1.0, 9.0], [True, False], 2, [True, False]),
        ([1.0, 9.0], [True, True], 0, [False, False]),
        ([-3.0, -1.0, -2.0], [True] * 3, 2, [False, True, True]),
        ([-3.0, 7.0], [True, False], 1, [True, False]),
    ],
)
def test_the_strongest_and_of_equals_the_first(
    make: Callable[[Any], Any], strength: list[float], candidates: list[bool], count: int, found: list[bool]
) -> None:
    taken = detection.select(make(np.asarray(strength)), make(np.asarray(candidates)), make(np.asarray([count])))
    assert bits(taken) == found


@given(values=st.lists(st.integers(0, 4), min_size=1, max_size=40), count=st.integers(0, 45))
@example(values=[3, 1] * 100, count=150)
def test_select_is_a_stable_sort(values: list[int], count: int) -> None:
    order = sorted(range(len(values)), key=lambda j: (-values[j], j))[:count]
    for make in MAKERS:
        everything = make(np.ones(len(values), dtype=bool))
        strength, budget = make(np.asarray(values, dtype=float)), make(np.asarray([count]))
        taken = detection.select(strength, everything, budget)
        for most in (count, count + 1):  # found one after the other: the same
            few = detection.select(strength, everything, budget, most)
            assert np.array_equal(np.asarray(few), np.asarray(taken))
        assert [j for j, chosen in enumerate(bits(taken)) if chosen] == sorted(order)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("found", "ratio", "top_k", "count"),
    [
        (10, 1.0, None, 10),
        (10, 0.1, None, 1),
        (10, 0.3, None, 3),  # 0.3 * 10 is 3.0000000000000004 in no computer's favour
        (10, 0.7, None, 7),
        (10, 0.71, None, 8),
        (3, 0.5, None, 2),
        (1, 0.01, None, 1),
        (10, 0.0, None, 0),
        (0, 0.5, None, 0),
        (10, 0.5, 4, 4),
        (10, 0.5, 9, 5),
        (10, 1.0, 0, 0),
    ],
)
def test_the_share_is_rounded_up_before_the_cap(
    make: Callable[[Any], Any], found: int, ratio: float, top_k: int | None, count: int
) -> None:
    sinks = make(np.arange(12) < found)
    assert detection.budget(sinks, ratio, top_k).tolist() == [count]


@given(found=st.integers(0, 200), percent=st.integers(0, 100))
def test_the_share_is_the_exact_one(found: int, percent: int) -> None:
    assert detection.budget(np.arange(200) < found, percent / 100).tolist() == [-(-found * percent // 100)]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("definition", "incoming", "options", "found"),
    [
        pytest.param("moving-sinks", PLANTED, {}, ONLY_5, id="moving-sinks"),
        # Queries that see key j: 4, 3, 2, 1. Means 0.25, 0.4, 0.3, 1: above 0.3 are the second and the last.
        pytest.param("attention-sink", [1.0, 1.2, 0.6, 1.0], {}, [False, True, False, True], id="attention-sink"),
        # Every query sees every key: means 0.5, 0.3, 0.15, 0.05.
        pytest.param(
            "attention-sink", [2.0, 1.2, 0.6, 0.2], {"causal": False}, [True, False, False, False], id="bidirectional"
        ),
        # Nine of 1 and one of 6: mean 1.5, deviation 1.5, line 4.5; with two such keys mean 2, deviation 2, line 6.
        pytest.param("sink-aware-pruning", [1.0] * 9 + [6.0], {}, [False] * 9 + [True], id="sink-aware-pruning"),
        pytest.param("sink-aware-pruning", [1.0] * 8 + [6.0] * 2, {}, [False] * 10, id="two sinks hide each other"),
        pytest.param("streaming-llm", [1.0] * 6, {}, [True] * 4 + [False] * 2, id="streaming-llm"),
        pytest.param("streaming-llm", [1.0, NAN, NAN], {}, [True, False, False], id="fewer than four"),
        pytest.param("diffusion-transformers", [1.0, 3.0, 2.0], {}, [False, True, False], id="diffusion-transformers"),
        pytest.param(
            "diffusion-transformers", [1.0, 3.0, NAN, 2.0], {"count": 2}, [False, True, False, True], id="two"
        ),
    ],
)
def test_published_definitions(
    make: Callable[[Any], Any], definition: str, incoming: Any, options: dict[str, Any], found: list[bool]
) -> None:
    assert bits(detect_as(definition, make(np.asarray(incoming)), **options)) == found


def test_definitions_are_listed() -> None:
    with pytest.raises(InputError, match="'mine' is unknown; use one of moving-sinks, attention-sink, "):
        detect_as("mine", PLANTED)


def test_detection_needs_no_torch() -> None:
    code = "import sys, numpy, sinks.detection as d; d.detect(numpy.ones(9)); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
