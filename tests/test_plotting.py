"""Figures show the numbers they are given: colours of known cells, texts, lengths of bars, points of lines."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from PIL import Image

from sinks import heatmaps, plotting, style
from sinks.errors import InputError
from sinks.heatmaps import every, shrink
from sinks.text_axis import FILLED, MASKED, NEW, PROMPT, STATES, TextAxis
from sinks.writer import UNIT

TOKENS = ["$", "$$", "\n", "_x^", "Ġthe", "中", "<|mask|>", " "]
GREY = tuple(round(255 * part) for part in to_rgb(style.EMPTY))


def text_axis(length: int, prompt: int = 0, block: int | None = None, steps: int = 8) -> TextAxis:
    """Tokens of all kinds, filled from left to right."""
    at = np.full(length, -1)
    at[prompt:] = np.arange(length - prompt) * steps // max(length - prompt, 1)
    return TextAxis([TOKENS[j % len(TOKENS)] for j in range(length)], prompt, block, at)


def cell(path: Path, figure: Figure, axis: Axes, row: int, column: int) -> tuple[int, ...]:
    """The colour that a png file has in the middle of a cell."""
    x, y = axis.transData.transform((column, row))
    with Image.open(path) as image:
        pixels = np.array(image.convert("RGB"))
    return tuple(int(part) for part in pixels[int(figure.bbox.height - y), int(x)])


def cividis(share: float) -> tuple[int, ...]:
    return tuple(int(part) for part in matplotlib.colormaps["cividis"](share, bytes=True)[:3])


def main_axes(figure: Figure) -> Axes:
    """The axes of the picture itself: those of the colour bar come first."""
    return figure.axes[1]


def tick_labels(labels: list[Text]) -> list[str]:
    return [label.get_text() for label in labels]


def sticks_out(figure: Figure) -> float:
    """By how many inches anything that is drawn passes the figure's edge."""
    with style.house_style():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        box = figure.get_tightbbox(canvas.get_renderer())
    return float(max(-box.x0, -box.y0, box.x1 - figure.get_figwidth(), box.y1 - figure.get_figheight()))


# Reducing


def test_shrink_takes_the_maximum_of_blocks() -> None:
    values = np.array([[1, 2, 3, 4, 5], [0, 9, 0, 0, np.nan], [np.nan, np.nan, 1, 7, np.nan]])
    expected = [[9, 4, 5], [np.nan, 7, np.nan]]  # blocks of 2 x 2; the last row and column are left over
    np.testing.assert_array_equal(shrink(values, 2, 3), expected)


def test_shrink_leaves_alone_what_fits() -> None:
    values = np.arange(6.0).reshape(2, 3)
    assert shrink(values, 2, 3) is values


@pytest.mark.parametrize(
    ("number", "most", "step"), [(40, 40, 1), (41, 40, 2), (400, 40, 10), (2048, 40, 100), (1, 0, 1)]
)
def test_every_leaves_at_most_so_many(number: int, most: int, step: int) -> None:
    assert every(number, most) == step


def test_a_single_bright_column_survives(tmp_path: Path) -> None:
    c = np.ones((2, 2048))
    c[:, 1777] = 50
    figure = heatmaps.incoming_map(c, text_axis(2048), tmp_path / "a.png", "")
    assert cell(tmp_path / "a.png", figure, main_axes(figure), 0, 1777) == cividis(1.0)
    assert cell(tmp_path / "a.png", figure, main_axes(figure), 0, 1787) == cividis(0.0)
    assert "each cell shows the maximum of 1 × 2 (steps × positions)" in main_axes(figure).get_xlabel()


# The text


def test_masked_and_states_at_a_step() -> None:
    text = TextAxis(["a", "b", "c", "d", "e"], 2, 2, np.array([-1, -1, 1, 0, -1]))
    assert text.masked(0).tolist() == [False, False, True, True, True]
    assert text.masked(1).tolist() == [False, False, True, False, True]  # the last is never filled
    states = text.states(text.masked(1), text.unmasked_at == 1)
    assert states.tolist() == [PROMPT, PROMPT, NEW, FILLED, MASKED]
    assert text.borders(3.0) == [2, 4]
    assert text.borders(0.1) == [2]  # too close to be told apart


def test_token_labels_are_shown_and_distinct(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    style._say_once_that_glyphs_are_missing.cache_clear()
    drawable = ord("中") in style._drawable()
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            figure = heatmaps.incoming_map(np.ones((3, 8)), text_axis(8), tmp_path / f"{number}.png", "$x_1$ 中")
    labels = tick_labels(main_axes(figure).get_xticklabels())
    shown = ["$", "$$", "↵", "_x^", "Ġthe", "中" if drawable else r"\u4e2d", "<|mask|>", "␣"]
    assert labels == [f"{position}: {token}" for position, token in enumerate(shown)]
    assert not any(text.get_parse_math() for text in figure.findobj(Text))
    assert figure.get_suptitle() == ("$x_1$ 中" if drawable else r"$x_1$ \u4e2d")
    assert len([record for record in caplog.records if "no installed font" in record.message]) == (0 if drawable else 1)


@pytest.mark.parametrize("token", ["\r", "\x00", "\ud800", "\u200b", "😀", "", "\t\t"])
def test_any_token_can_be_drawn(token: str, tmp_path: Path) -> None:
    text = TextAxis([token], 0, None, np.array([0]))
    for suffix in ("png", "svg", "pdf"):
        heatmaps.incoming_map(np.ones((1, 1)), text, tmp_path / f"a.{suffix}", f"title {token}")
    label = style.token_label(token)
    assert label and all(character.isprintable() for character in label)


def test_names_are_cut_in_the_middle() -> None:
    assert style.cut("layer 11 head 23", 16) == "layer 11 head 23"
    assert style.cut("layer 11 head 23", 9) == "laye…d 23"


# Incoming attention


def test_incoming_map_paints_known_cells(tmp_path: Path) -> None:
    c = np.array([[0.0, 1.0, 10.0, 100.0], [0.5, np.nan, 31.6227766, 1.0]])
    figure = heatmaps.incoming_map(c, text_axis(4), tmp_path / "a.png", "four tokens")
    expected = np.array([[0, 0, 0.5, 1], [0, np.nan, 0.75, 0]])  # shares of the log scale from 1 to 100
    for (row, column), share in np.ndenumerate(expected):
        colour = GREY if np.isnan(share) else cividis(share)
        assert cell(tmp_path / "a.png", figure, main_axes(figure), row, column) == pytest.approx(colour, abs=3)


def test_colour_bar_and_file_name_the_scale_and_the_unit(tmp_path: Path) -> None:
    c = np.array([[1.0, 47.25]])
    figure = heatmaps.incoming_map(c, text_axis(2), tmp_path / "a.png", "two tokens")
    bar = figure.axes[0]
    assert bar.get_xlabel() == f"{UNIT}\nlog scale from 1 to 47.25"
    labels = tick_labels(bar.get_xticklabels())
    assert labels[:2] == ["≤ 1", "max 47.25"] and "10" in labels
    with Image.open(tmp_path / "a.png") as image:
        assert image.info["Title"] == "two tokens" and UNIT in image.info["Description"]
        assert image.info["dpi"] == pytest.approx((200, 200), abs=0.1)


def test_no_scale_is_narrower_than_one_and_a_half(tmp_path: Path) -> None:
    figure = heatmaps.incoming_map(np.full((2, 2), np.nan), text_axis(2), tmp_path / "a.png", "")
    assert tick_labels(figure.axes[0].get_xticklabels()) == ["≤ 1", "max 1.5"]


def test_a_forced_scale_holds(tmp_path: Path) -> None:
    c = np.array([[10.0, 1000.0]])
    figure = heatmaps.incoming_map(c, text_axis(2), tmp_path / "a.png", "", scale=(1, 100))
    assert cell(tmp_path / "a.png", figure, main_axes(figure), 0, 0) == pytest.approx(cividis(0.5), abs=3)
    assert cell(tmp_path / "a.png", figure, main_axes(figure), 0, 1) == cividis(1.0)
    assert tick_labels(figure.axes[0].get_xticklabels())[:2] == ["≤ 1", "≥ 100"]


def dashes(line: Line2D) -> list[Any]:
    """The pieces of a broken line, as [[x0, y0], [x1, y1]]."""
    return np.asarray(line.get_xydata()).reshape(-1, 3, 2)[:, :2].tolist()


def test_fill_front_and_borders_are_where_they_belong(tmp_path: Path) -> None:
    text = TextAxis(list("abcdef"), 2, 2, np.array([-1, -1, 1, 0, 3, 2]))
    axis = main_axes(heatmaps.incoming_map(np.ones((4, 6)), text, tmp_path / "a.png", ""))
    *borders, front = axis.lines
    segments = dashes(front)
    assert segments[0] == [[1.5, 1.5], [2.5, 1.5]]  # position 2 is filled after step 1
    assert [segment[0][1] for segment in segments] == [1.5, 0.5, 3.5, 2.5]
    assert [np.unique(line.get_xdata()).tolist() for line in borders] == [[1.5], [3.5]]
    assert [line.get_linestyle() for line in borders] == ["-", ":"]


def test_grid_has_one_scale(tmp_path: Path) -> None:
    c = np.ones((3, 2, 4))
    c[0, 1, 2], c[1, 1, 2], c[2, 1, 2] = 10, 10, 100
    names = ["head 0", "_head $1$", "head 2"]
    figure = heatmaps.incoming_grid(c, names, text_axis(4), tmp_path / "a.png", "heads")
    panels = figure.axes[1:]
    assert [axis.get_title(loc="left") for axis in panels] == names
    colours = [cell(tmp_path / "a.png", figure, axis, 1, 2) for axis in panels]
    assert colours[0] == colours[1] == pytest.approx(cividis(0.5), abs=3)
    assert colours[2] == cividis(1.0)
    assert "log scale from 1 to 100" in figure.axes[0].get_xlabel()


# Patterns


def test_pattern_map_paints_by_the_square_root(tmp_path: Path) -> None:
    pattern = np.array([[0.0, 0.25], [1.0, 0.04]])
    figure = heatmaps.pattern_map(pattern, text_axis(2), tmp_path / "a.png", "")
    viridis = matplotlib.colormaps["viridis"]
    for (row, column), share in np.ndenumerate(np.sqrt(pattern)):
        colour = [int(part) for part in viridis(share, bytes=True)[:3]]
        assert cell(tmp_path / "a.png", figure, main_axes(figure), row, column) == pytest.approx(colour, abs=3)
    assert "square-root scale from 0 to 1" in figure.axes[0].get_xlabel()


def test_pattern_map_labels_mask_tokens(tmp_path: Path) -> None:
    masked = np.array([False, True, True, False])
    figure = heatmaps.pattern_map(np.eye(4), text_axis(4, 1), tmp_path / "a.png", "", masked, vmax=2)
    for labels in (main_axes(figure).get_xticklabels(), main_axes(figure).get_yticklabels()):
        assert tick_labels(labels) == ["0: $", "1: [MASK]", "2: [MASK]", "3: _x^"]
        assert labels[1].get_color() != labels[0].get_color()
    assert "from 0 to 2" in figure.axes[0].get_xlabel()
    band = main_axes(figure).child_axes[0].images[0].get_array()
    assert band is not None
    colours = [tuple(round(255 * part) for part in to_rgb(colour)) for colour in STATES.values()]
    assert [colours.index(tuple(pixel)) for pixel in band[0].tolist()] == [0, 2, 2, 1]


# Sizes


@pytest.mark.parametrize(
    ("length", "steps"), [(1, 1), (24, 1), (24, 32), (400, 32), (400, 256), (2048, 1), (2048, 256)]
)
def test_maps_of_all_sizes_are_labelled_and_whole(length: int, steps: int, tmp_path: Path) -> None:
    text = text_axis(length, length // 4, 32, steps)
    title = "a title that is longer than the figure is wide, so that it must be wrapped: " * 2
    figure = heatmaps.incoming_map(np.ones((steps, length)), text, tmp_path / "a.png", title)
    labels = main_axes(figure).get_xticklabels()
    assert 1 <= len(labels) <= 40
    step = every(length, 40)
    assert (f"one token in {step} is labelled" in main_axes(figure).get_xlabel()) == (step > 1)
    assert sticks_out(figure) <= 0
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 <= right.x0 + 1 for left, right in pairwise(boxes))
    picture = main_axes(figure).images[0].get_array()
    assert picture is not None
    assert picture.shape[1] <= main_axes(figure).bbox.width and picture.shape[0] <= main_axes(figure).bbox.height


@pytest.mark.parametrize(("count", "length", "steps"), [(1, 1, 1), (5, 24, 32), (64, 400, 32)])
def test_panels_of_all_sizes_are_whole(count: int, length: int, steps: int, tmp_path: Path) -> None:
    names = [f"layer {number} head {number}" for number in range(count)]
    text = text_axis(length, length // 4, 32, steps)
    grid = heatmaps.incoming_grid(np.ones((count, steps, length)), names, text, tmp_path / "a.png", "grid")
    paths = heatmaps.strongest_paths(np.zeros((count, steps), int), names, text, tmp_path / "b.png", "paths")
    assert sticks_out(grid) <= 0 and sticks_out(paths) <= 0
    assert len(paths.axes) == count and len(grid.axes) == count + 1


@pytest.mark.parametrize("length", [1, 24, 400, 2048])
def test_patterns_of_all_sizes_are_whole(length: int, tmp_path: Path) -> None:
    text = text_axis(length, length // 4, 32)
    figure = heatmaps.pattern_map(np.ones((length, length)), text, tmp_path / "a.png", "pattern", text.masked(4))
    assert sticks_out(figure) <= 0
    assert len(main_axes(figure).get_xticklabels()) <= 40


def test_no_side_passes_16000_pixels() -> None:
    assert max(style.new_figure(7, 500, "").get_size_inches() * style.DPI) <= 16_000
    assert max(style.new_sheet(6, 500, "", [], 0.5).figure.get_size_inches() * style.DPI) <= 16_000


# Lines and bars


def test_strongest_paths_draw_each_step(tmp_path: Path) -> None:
    positions = np.array([[0, 0, 3], [-1, 2, -1]])
    figure = heatmaps.strongest_paths(positions, ["head 0", "head 1"], text_axis(4), tmp_path / "a.svg", "")
    drawn = [dashes(axis.lines[-1]) for axis in figure.axes]
    assert drawn[0] == [[[0, -0.5], [0, 0.5]], [[0, 0.5], [0, 1.5]], [[3, 1.5], [3, 2.5]]]
    assert drawn[1] == [[[2, 0.5], [2, 1.5]]]
    assert figure.axes[0].yaxis_inverted()


def test_class_bars_are_as_long_as_the_shares(tmp_path: Path) -> None:
    rows = [
        {"name": "digit", "share": 0.5, "low": 0.4, "high": 0.7, "series": "sinks"},
        {"name": "digit", "share": 0.1, "low": np.nan, "high": np.nan, "series": "all tokens"},
        {"name": "$word$", "share": 0.25, "low": 0.2, "high": 0.3, "series": "sinks"},
    ]
    figure = plotting.class_bars(rows, tmp_path / "a.png", "classes")
    axis = figure.axes[0]
    widths = [[bar.get_width() for bar in group.patches] for group in axis.containers if hasattr(group, "patches")]
    assert widths == [[50, 25], [10]]
    lines = [group.lines[2][0] for group in axis.containers if isinstance(group, ErrorbarContainer)]
    np.testing.assert_allclose(lines[0].get_segments()[0][:, 0], [40, 70])
    assert axis.patches[0].get_facecolor()[:3] == to_rgb(style.SINK)
    assert tick_labels(axis.get_yticklabels()) == ["digit", "$word$"]
    legend = axis.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["sinks", "all tokens"]


def test_definitions_bars_are_as_long_as_the_shares(tmp_path: Path) -> None:
    rows = [{"name": "ours", "tokens": 0.01, "heads": 0.5}, {"name": "attention-sink", "tokens": 0.02, "heads": 1.0}]
    figure = plotting.definitions_bars(rows, tmp_path / "a.png", "definitions")
    assert [[bar.get_width() for bar in axis.patches] for axis in figure.axes] == [[1, 2], [50, 100]]  # type: ignore[attr-defined]
    assert tick_labels(figure.axes[0].get_yticklabels()) == ["ours", "attention-sink"]


def legend_texts(axis: Axes) -> list[str]:
    legend = axis.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


def test_epsilon_curve_and_its_marks(tmp_path: Path) -> None:
    epsilons, flagged = np.array([0.0, 1.0, 3.0]), np.array([0.5, 0.05, 0.0])
    figure = plotting.epsilon_curve(epsilons, flagged, tmp_path / "a.png", "", {"95 % unflagged": 1.0})
    axis = figure.axes[0]
    assert np.array(axis.lines[0].get_xydata()).tolist() == [[0, 50], [1, 5], [3, 0]]
    assert np.unique(axis.lines[1].get_xdata()).tolist() == [1]
    assert legend_texts(axis) == ["95 % unflagged: ε = 1"]
    several = plotting.epsilon_curve(epsilons, {"_x^": flagged, "b": flagged}, tmp_path / "a.png", "", {})
    assert legend_texts(several.axes[0]) == ["_x^", "b"]
    plotting.epsilon_curve(epsilons, np.zeros(3), tmp_path / "a.png", "no sink at all", {"none": 0.0})


def test_unmasking_curve_has_its_interval(tmp_path: Path) -> None:
    offsets, share = np.array([-1, 0, 1]), np.array([0.1, 0.3, 0.2])
    axis = plotting.unmasking_curve(offsets, share, share - 0.1, share + 0.1, tmp_path / "a.png", "").axes[0]
    np.testing.assert_allclose(np.array(axis.lines[0].get_xydata()), [[-1, 10], [0, 30], [1, 20]])
    np.testing.assert_allclose(axis.collections[0].get_datalim(axis.transData).intervaly, [0, 40], atol=1e-9)
    assert np.unique(axis.lines[1].get_xdata()).tolist() == [-0.5]


def test_curves_over_steps(tmp_path: Path) -> None:
    series = {"_x^": np.array([1.0, np.nan, 2.0]), "sinks": np.array([3.0])}
    figure = plotting.curve_over_steps(series, tmp_path / "a.png", "", "sinks per head")
    axis = figure.axes[0]
    np.testing.assert_array_equal(axis.lines[0].get_ydata(), [1, np.nan, 2])
    assert axis.lines[1].get_color() == style.SINK
    assert legend_texts(axis) == ["_x^", "sinks"]
    one = plotting.curve_over_steps({"": np.array([1.0])}, tmp_path / "a.png", "", "$").axes[0]
    assert legend_texts(one) == [] and one.get_ylabel() == "$"
    assert [tick for tick in one.get_xticks() if -0.5 <= tick <= 0.5] == [0]


def test_many_series_have_different_colours(tmp_path: Path) -> None:
    series = {f"head {number}": np.ones(4) for number in range(32)}
    axis = plotting.curve_over_steps(series, tmp_path / "a.png", "", "").axes[0]
    assert len({str(line.get_color()) for line in axis.lines}) == 32


def test_layer_head_map_is_centred_and_names_what_was_kept(tmp_path: Path) -> None:
    values = np.array([[-2.0, 0.0, 1.0], [np.nan, 0.5, 0.0]])
    path = tmp_path / "a.png"
    figure = plotting.layer_head_map(values, [3, 7], [0, 4, 5], path, "", "positions per step", diverging=True)
    axis = figure.axes[0]
    assert tick_labels(axis.get_yticklabels()) == ["3", "7"] and tick_labels(axis.get_xticklabels()) == ["0", "4", "5"]
    vlag = matplotlib.colormaps["vlag"]
    for row, column, share in ((0, 0, 0.0), (0, 1, 0.5), (0, 2, 0.75)):
        colour = [int(part) for part in vlag(share, bytes=True)[:3]]
        assert cell(path, figure, axis, row, column) == pytest.approx(colour, abs=3)
    assert cell(path, figure, axis, 1, 0) == GREY
    assert tick_labels(figure.axes[1].get_xticklabels()) == ["−2", "0", "2"]


def test_layer_head_map_spans_the_values(tmp_path: Path) -> None:
    values = np.array([[2.0, 6.0]])
    figure = plotting.layer_head_map(values, [0], [0, 1], tmp_path / "a.png", "", "steps")
    assert tick_labels(figure.axes[1].get_xticklabels()) == ["2", "4", "6"]
    assert cell(tmp_path / "a.png", figure, figure.axes[0], 0, 1) == pytest.approx((253, 231, 36), abs=3)


def test_accuracy_by_k_draws_every_control(tmp_path: Path) -> None:
    whole = {"model": "tiny", "path": "keys", "k": 0, "control": "none", "accuracy": 95, "low": 90, "high": 98}
    masked = [
        whole | {"k": 1, "control": control, "accuracy": accuracy, "low": accuracy - 2, "high": accuracy + 3}
        for control, accuracy in (("sinks", 9), ("random", 93), ("bottom", 94))
    ]
    axis = plotting.accuracy_by_k([whole, *masked], tmp_path / "a.png").axes[0]
    lines = [group.lines[0] for group in axis.containers if isinstance(group, ErrorbarContainer)]
    assert [np.array(line.get_xydata()).tolist() for line in lines if line is not None] == [
        [[0, 95], [1, 9]],
        [[0, 95], [1, 93]],
        [[0, 95], [1, 94]],
    ]
    assert legend_texts(axis) == ["top-k sinks", "k random other keys", "k weakest keys"]


# Files


def draw(path: Path, title: str = "title") -> Figure:
    return heatmaps.incoming_map(np.array([[1.0, 5.0]]), text_axis(2), path, title)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_same_figure_gives_the_same_bytes(suffix: str, tmp_path: Path) -> None:
    draw(tmp_path / f"a.{suffix}")
    draw(tmp_path / f"b.{suffix}")
    content = (tmp_path / f"a.{suffix}").read_bytes()
    assert content == (tmp_path / f"b.{suffix}").read_bytes()
    assert b"CreationDate" not in content and b"dc:date" not in content
    if suffix == "svg":
        assert UNIT.encode() in content


def test_the_users_settings_play_no_part(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    with matplotlib.rc_context({"savefig.bbox": "tight", "font.size": 30, "savefig.dpi": 50, "image.origin": "lower"}):
        draw(tmp_path / "b.png")
        assert matplotlib.rcParams["font.size"] == 30
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("name", ["a.bmp", "no folder/a.png"])
def test_a_file_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot"):
        draw(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(tmp_path / "a.png")
    before = (tmp_path / "a.png").read_bytes()

    def half(self: FigureCanvasAgg, name: Path, **_: Any) -> None:
        name.write_bytes(b"half")
        raise RuntimeError

    monkeypatch.setattr(FigureCanvasAgg, "print_png", half)
    with pytest.raises(RuntimeError):
        draw(tmp_path / "a.png", "another title")
    assert (tmp_path / "a.png").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
