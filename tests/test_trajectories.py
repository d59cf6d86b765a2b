"""Statistics of sinks on small cases whose answer is known, with three layers and four heads that all differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from synthetic_runs import HEADS, LAYERS, planted

from sinks.detection import detect
from sinks.trajectories import (
    Interval,
    around_unmasking,
    count_by_class,
    direction,
    dwell,
    entropy,
    epsilon_for,
    excess,
    excess_histogram,
    flagged_share,
    held,
    interval,
    leaving,
    movement,
    persistence,
    strongest,
)

NAN = float("nan")


def column(*positions: int) -> np.ndarray:
    """(T, 1) positions of one head."""
    return np.array(positions)[:, None]


def attention(positions: list[int], length: int = 10, strength: float = 6.0) -> np.ndarray:
    """(T, S) with one strong key at every step, or none where the position is -1."""
    c = np.ones((len(positions), length))
    for t, position in enumerate(positions):
        if position >= 0:
            c[t] = (length - strength) / (length - 1)
            c[t, position] = strength
    return c


# Which key is strongest


def test_the_strongest_key_of_every_layer_and_head() -> None:
    expected = (np.arange(LAYERS * HEADS).reshape(LAYERS, HEADS) + np.arange(5)[:, None, None]) % 20
    assert strongest(planted(5, 20)).tolist() == expected.tolist()


def test_only_among_sinks_and_never_where_no_key_is() -> None:
    c = np.array([[1.0, NAN, 5.0, 9.0], [NAN, NAN, NAN, NAN]])
    assert strongest(c).tolist() == [3, -1]
    assert strongest(c, among=np.array([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=bool)).tolist() == [2, -1]


# Thresholds


@given(arrays(np.float32, (2, 3, 7), elements=st.floats(0, 20, width=16)), st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0]))
def test_a_key_is_a_sink_for_every_epsilon_below_its_excess(c: np.ndarray, epsilon: float) -> None:
    margin = excess(c)
    clear = np.abs(margin - epsilon) > 1e-9
    assert ((margin > epsilon) == detect(c, epsilon))[clear].all()


def test_excess_of_absent_and_lonely_keys() -> None:
    assert excess(np.array([4.0, NAN, 1.0, 1.0])).tolist() == [3.0, -np.inf, -1.5, -1.5]
    assert excess(np.array([[1.0]])).tolist() == [[-np.inf]]


def test_epsilon_sweep_by_hand() -> None:
    # excesses: 3, and three times 1 - (4 + 1 + 1) / 3 = -1
    histogram = excess_histogram(excess(np.array([[4.0, 1.0, 1.0, 1.0]])))
    assert flagged_share(histogram, [0, 2.99, 3.0, 10.0]).tolist() == [0.25, 0.25, 0.0, 0.0]
    assert epsilon_for(histogram, 0.75) == 0.0
    assert epsilon_for(histogram, 0.76) == pytest.approx(3.0)


def test_epsilon_sweep_agrees_with_detection_and_adds_up() -> None:
    c = np.random.default_rng(0).gamma(0.3, 3.0, (6, 3, 4, 50)).astype(np.float16).astype(np.float32)
    histogram = excess_histogram(excess(c[:2])) + excess_histogram(excess(c[2:]))
    for epsilon in (0, 0.5, 3, 10):
        assert flagged_share(histogram, [epsilon])[0] == pytest.approx(detect(c, epsilon).mean(), abs=1e-12)
    at = epsilon_for(histogram, 0.95)
    assert detect(c, at).mean() <= 0.05 < detect(c, at - 0.01).mean()


def test_epsilon_sweep_without_any_token() -> None:
    histogram = excess_histogram(excess(np.full((2, 3), NAN)))
    assert np.isnan(epsilon_for(histogram, 0.95))
    assert np.isnan(flagged_share(histogram, [3.0])).all()


# Shares and entropy


def test_share_of_attention_held_by_sinks() -> None:
    c = np.array([[7.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, NAN], [0.0, 0.0, 0.0, 0.0]])
    sinks = np.array([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], dtype=bool)
    assert held(c, sinks)[:2].tolist() == [0.7, 1.0]
    assert np.isnan(held(c, sinks)[2])


def test_entropy_of_equal_single_and_absent_keys() -> None:
    weights = np.array([[2.0, 2.0, 2.0, 2.0], [0.0, 5.0, 0.0, 0.0], [1.0, 1.0, NAN, NAN]])
    assert entropy(weights) == pytest.approx([np.log(4), 0.0, np.log(2)])
    assert np.isnan(entropy(np.zeros((1, 3)))).all()


# Staying and moving: the signed displacement, how long a sink dwells, whether a token stays a sink

CASES = {
    "static": ([4] * 6, 0.0, (0, 0, 5), 6.0, 1.0),
    "right": ([0, 1, 2, 3, 4, 5], 1.0, (5, 0, 0), 1.0, 0.0),
    "left": ([9, 7, 5, 3, 1], -2.0, (0, 4, 0), 1.0, 0.0),
    "vanishing": ([2, 2, 2, -1, -1], 0.0, (0, 0, 2), 3.0, 2 / 3),
    "alternating": ([1, 8, 1, 8, 1], 0.0, (2, 2, 0), 1.0, 0.0),
    "with a gap": ([3, 3, -1, 3], 0.0, (0, 0, 1), 1.5, 0.5),
    "one step": ([5], NAN, (0, 0, 0), 1.0, NAN),
    "never": ([-1, -1, -1], NAN, (0, 0, 0), NAN, NAN),
}


@pytest.mark.parametrize(("places", "displacement", "moves", "dwelt", "persists"), CASES.values(), ids=CASES)
def test_trajectory(
    places: list[int], displacement: float, moves: tuple[int, int, int], dwelt: float, persists: float
) -> None:
    sinks = detect(attention(places), 3.0)
    positions = strongest(attention(places), among=sinks)
    assert positions.tolist() == places
    with np.errstate(invalid="ignore"):
        moved, stay, alive = movement(positions[:, None]), dwell(positions[:, None]), persistence(sinks[:, None, :])
        assert moved.distance / moved.moves == pytest.approx([displacement], nan_ok=True)
        assert (moved.right[0], moved.left[0], moved.stayed[0]) == moves
        assert stay.steps / stay.stays == pytest.approx([dwelt], nan_ok=True)
        assert alive.survived / alive.sinks == pytest.approx([persists], nan_ok=True)


@given(arrays(np.int64, (9, 3, 4), elements=st.integers(-1, 6)))
def test_backwards_in_time_right_is_left(positions: np.ndarray) -> None:
    forth, back = movement(positions), movement(positions[::-1])
    assert (forth.distance == -back.distance).all()
    assert (forth.right == back.left).all() and (forth.stayed == back.stayed).all()
    assert all((one == other).all() for one, other in zip(dwell(positions), dwell(positions[::-1]), strict=True))


def test_heads_are_not_mixed_up() -> None:
    positions = np.zeros((5, 3, 4), dtype=int)
    positions[:, 2, 1] = [0, 2, 4, 6, 8]
    moved = movement(positions)
    assert moved.distance[2, 1] == 8 and moved.distance.sum() == 8
    assert dwell(positions).stays[2, 1] == 5 and dwell(positions).stays.sum() == 5 + 11


def test_everything_a_sink() -> None:
    sinks = np.ones((4, 3, 4, 5), dtype=bool)
    alive = persistence(sinks)
    assert alive.survived.tolist() == alive.sinks.tolist() == np.full((3, 4), 15).tolist()


# Intervals over samples


def test_interval_of_equal_samples_is_a_point() -> None:
    estimate, low, high = interval(np.full((5, 2), 3.0), np.full((5, 2), 4.0))
    assert estimate.tolist() == low.tolist() == high.tolist() == [0.75, 0.75]


def test_interval_covers_what_resampling_gives() -> None:
    estimate, low, high = interval(np.array([0.0, 1.0] * 50)[:, None], np.ones((100, 1)))
    assert estimate == pytest.approx(0.5)
    assert low[0] == pytest.approx(0.5 - 1.96 * 0.05, abs=0.015) and high[0] == pytest.approx(0.598, abs=0.015)


def test_interval_of_one_sample_and_of_nothing() -> None:
    estimate, low, high = interval(np.array([[2.0, 0.0]]), np.array([[4.0, 0.0]]))
    assert estimate[0] == 0.5 and np.isnan(estimate[1])
    assert np.isnan([low, high]).all()
    assert np.isnan(interval(np.zeros((3, 1)), np.zeros((3, 1)))).all()


def test_direction_in_words() -> None:
    moved = Interval(*np.array([[1, -1, 0, 0, 1.0], [0.5, -2, -1, -1, NAN], [2, -0.5, 1, 1, NAN]]))
    stayed = np.array([0, 0, 0.95, 0.2, 1.0])
    expected = ["moves right", "moves left", "static", "no direction", "unknown"]
    assert direction(moved, stayed).tolist() == expected


# What the sinks are, and when their tokens are filled


def test_count_by_class_follows_the_step() -> None:
    sinks = np.zeros((2, 3, 4, 3), dtype=bool)
    sinks[0, 0, 1, 2] = sinks[1, 2, 3, 2] = sinks[1, 0, 0, 0] = True
    classes = np.array([[0, 0, 5], [1, 0, 3]])
    assert count_by_class(sinks, classes, 6).tolist() == [0, 1, 0, 1, 0, 1]


def test_around_unmasking_by_hand() -> None:
    sinks = np.zeros((4, 1, 2, 3), dtype=bool)
    sinks[:2, 0, 0, 1] = True  # while masked: position 1 is filled at step 1
    flagged, seen = around_unmasking(sinks, np.array([-1, 1, -1]), span=3)
    assert flagged.tolist() == [0, 1, 1, 0, 0, 0, 0]  # offsets -3 to 3: steps 0, 1, 2, 3 are -2, -1, 0, 1
    assert seen.tolist() == [0, 2, 2, 2, 2, 0, 0]


def test_a_sink_that_leaves_when_its_token_is_filled() -> None:
    sinks = np.zeros((4, 1, 1, 3), dtype=bool)
    sinks[:2, 0, 0, 1] = True  # leaves at its filling, after step 1
    sinks[:, 0, 0, 0] = True  # of the prompt, stays
    assert [int(count) for count in leaving(sinks, np.array([-1, 1, -1]))] == [1, 1, 0, 4]
