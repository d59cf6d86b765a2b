"""Pictures of attention over key positions: steps, heads and layers by position, patterns, paths of sinks.

Every function builds a Figure, writes it to ``path`` (png, pdf or svg), and returns it. Incoming attention has one
colour scale everywhere: logarithmic, from the mean, 1, at or below which all is dark, to the maximum. Arrays that are
larger than the picture are reduced by the maximum over blocks of cells, so that no single bright column is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from sinks.style import (
    DPI,
    FAINT,
    FILLING,
    INK,
    SINK,
    Colours,
    cut,
    house_style,
    incoming_colours,
    new_sheet,
    pattern_colours,
    printable,
    save,
    text_width,
)
from sinks.text_axis import FILLED, MASKED, NEW, PROMPT, STATES, TextAxis, paint_states

Array = NDArray[Any]

AT_A_STEP = {"filled": FILLED, "still masked": MASKED, "filled at this step": NEW}  # what the legend of a frame names

_BAND = 0.08  # inches
MAP, SQUARE = (700, 1100), (1000, 1000)  # at most so many rows and columns of cells: fewer than the picture has pixels
MOST_LABELS = 40


# Reducing


def block(shape: Sequence[int], most: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of the smallest equal blocks into which ``shape`` falls with at most ``most`` of them."""
    high, wide = (-(-have // limit) for have, limit in zip(shape, most, strict=True))
    return high, wide


def shrink(values: Array, rows: int, columns: int) -> Array:
    """At most ``rows`` x ``columns`` of (R, C) values: the maximum of each :func:`block`, NaN if all is."""
    high, wide = block(values.shape, (rows, columns))
    if high == wide == 1:
        return values
    padding = [(0, -have % size) for have, size in zip(values.shape, (high, wide), strict=True)]
    padded = np.pad(np.asarray(values, dtype=float), padding, constant_values=np.nan)
    blocks = padded.reshape(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    return np.asarray(np.fmax.reduce(np.fmax.reduce(blocks, axis=3), axis=1))


def every(number: int, most: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, … such that at most ``most`` of ``number`` labels remain."""
    return next(n * 10**e for e in count() for n in (1, 2, 5) if number <= max(most, 1) * n * 10**e)


# Parts of a picture


def picture(axis: Axes, values: Array, paint: Callable[[Array], Array], most: tuple[int, int]) -> AxesImage:
    """Show (R, C) values, reduced to ``most`` cells, so that value (r, c) stands around the point (c, r)."""
    high, wide = block(values.shape, most)
    image = paint(shrink(values, *most))
    extent = (-0.5, image.shape[1] * wide - 0.5, image.shape[0] * high - 0.5, -0.5)
    shown = axis.imshow(image, extent=extent, aspect="auto", interpolation="nearest")
    axis.set(xlim=(-0.5, values.shape[1] - 0.5), ylim=(values.shape[0] - 0.5, -0.5))
    axis.spines[:].set_visible(False)
    return shown


def strip(axis: Axes, states: Array, upright: bool = False) -> AxesImage:
    """A band above (or right of) a picture that tells tokens apart, see :data:`STATES`."""
    size = _BAND * DPI / (axis.bbox.width if upright else axis.bbox.height)
    place = (1 + size / 2, 0, size, 1) if upright else (0, 1 + size / 2, 1, size)
    band = axis.inset_axes(place, xticks=[], yticks=[])
    values, most = (states[:, None], (SQUARE[0], 1)) if upright else (states[None], (1, SQUARE[1]))
    return picture(band, values, paint_states, most)


def labelled(text: TextAxis, inches: float) -> range:
    """The positions that get a label on an axis: at most 40, and no more than ``inches`` have room for."""
    return range(0, len(text), every(len(text), min(MOST_LABELS, inches / 0.13)))


def room(text: TextAxis, inches: float) -> float:
    """Inches that the longest of the labels takes, "[MASK]" included, together with the name of the axis."""
    at = labelled(text, inches)
    return 0.32 + max(text_width(text.label(position, masked), 7) for position in at for masked in (False, True))


def label_tokens(side: Axis, text: TextAxis, inches: float, name: str, masked: Array | None = None) -> None:
    """Tokens along an axis; those that are ``masked`` (S,) are visibly labelled so."""
    at = labelled(text, inches)
    hidden = np.zeros(len(text), bool) if masked is None else masked
    labels = [text.label(position, hidden[position]) for position in at]
    side.set_ticks(at, labels, rotation=90 if isinstance(side, XAxis) else 0)
    for label, position in zip(side.get_ticklabels(), at, strict=True):
        label.set_color(label_colour(hidden[position]))
    side.set_label_text(name + (f" (one token in {at.step} is labelled)" if at.step > 1 else ""))


def label_colour(masked: bool) -> str:
    return STATES["still masked"] if masked else INK


def reduced(shape: Sequence[int], most: Sequence[int], rows: str) -> str:
    """What stands under the axis when an array is too large for the picture."""
    high, wide = block(shape, most)
    return f"\neach cell shows the maximum of {high} × {wide} ({rows} × positions)" if high * wide > 1 else ""


def mark_text(axis: Axes, text: TextAxis, colour: str = "white") -> list[Line2D]:
    """Lines at the end of the prompt (solid) and where a further block begins (dotted)."""
    inside = [border for border in text.borders(axis.bbox.width / DPI) if 0 < border < len(text)]
    style = {text.prompt_length: {"linewidth": 0.9}}
    dotted = {"linewidth": 0.5, "linestyle": ":"}
    return [axis.axvline(border - 0.5, color=colour, **style.get(border, dotted)) for border in inside]


def _front(axis: Axes, text: TextAxis, width: float) -> None:
    """The edge between masked (above) and filled (below), on steps that run downwards."""
    at = np.flatnonzero(text.unmasked_at >= 0)
    edge = text.unmasked_at[at] + 0.5
    _dashes(axis, (at - 0.5, at + 0.5), (edge, edge), color=FILLING, linewidth=width)


def _dashes(axis: Axes, x: tuple[Array, Array], y: tuple[Array, Array], **style: Any) -> None:
    """Short lines from (x0, y0) to (x1, y1), as one broken line: hundreds of them cost as much as one."""
    gap = np.full(len(x[0]), np.nan)
    xs, ys = (np.stack([*ends, gap], axis=-1).ravel() for ends in (x, y))
    axis.plot(xs, ys, solid_capstyle="butt", scalex=False, scaley=False, **style)


def keys(text: TextAxis, inches: float, states: Mapping[str, int], front: bool = False) -> list[Any]:
    """Entries of the legend of a picture so wide: token states by name, block borders, the fill front."""
    shown = {"prompt": PROMPT, **states} if text.prompt_length and states else states
    colours = list(STATES.values())
    entries: list[Any] = [Patch(color=colours[state], label=name) for name, state in shown.items()]
    if 0 < text.prompt_length < len(text) and not states:
        entries.append(Line2D([], [], color=FAINT, linewidth=1, label="end of the prompt"))
    if len(text.borders(inches)) > 1:
        entries.append(Line2D([], [], color=FAINT, linestyle=":", linewidth=1, label="block border"))
    if front and (text.unmasked_at >= 0).any():
        entries.append(Line2D([], [], color=FILLING, label="fill front (masked above)"))
    if NEW in states.values() and text.block_len is not None:
        entries.append(Patch(facecolor="none", edgecolor=FILLING, label="current block"))
    return entries


def _panels(
    names: Sequence[str], text: TextAxis, steps: int, title: str, label: str, note: str, colours: Colours | None = None
) -> tuple[Figure, list[Axes]]:
    """Small axes of steps by positions, up to 8 in a row, with names, the prompt's end and the fill front."""
    columns = min(8, math.ceil(math.sqrt(len(names))))
    rows, wide, high = -(-len(names) // columns), 6.4 / columns, 5.6 / columns + 0.1
    below = (room(text, wide) if columns == 1 else 0.36) + 0.13 * note.count("\n")
    sheet = new_sheet(6.5, rows * (high + 0.2), title, keys(text, 0.9 * wide, {}, front=True), below, 0.65, colours)
    figure, grid = sheet.figure, []
    for number, name in enumerate(names):  # axes that share their limits would take quadratic time
        row, column = divmod(number, columns)
        part = (column / columns, (row + 1 - high / (high + 0.2)) / rows, 0.9 / columns, high / (high + 0.2) / rows)
        axis = sheet.axes(*part, xlim=(-0.5, len(text) - 0.5), ylim=(steps - 0.5, -0.5))
        axis.set_title(cut(printable(name), int(wide * 20)), fontsize=6 if columns > 4 else 7, pad=2)
        axis.tick_params(labelsize=6)
        # Ticks cost more than all else in a panel, so only the outer ones have some.
        lowest, most = number + columns >= len(names), min(9, wide / 0.2)
        axis.set_yticks([] if column else range(0, steps, every(steps, most)))
        axis.set_xticks(range(0, len(text), every(len(text), 2.5 * wide)) if lowest else [])
        mark_text(axis, text, "white" if colours else FAINT)
        _front(axis, text, 0.6)
        grid.append(axis)
    figure.supylabel("denoising step", x=0.08 / figure.get_figwidth(), fontsize=8)
    if columns == 1:
        grid[0].tick_params(labelsize=7)
        label_tokens(grid[0].xaxis, text, wide, label)
        grid[0].set_xlabel(grid[0].get_xlabel() + note)
    else:
        figure.supxlabel(label + note, y=(sheet.low - below) / figure.get_figheight(), va="bottom", fontsize=8)
    return figure, grid


# Pictures


@house_style()
def incoming_map(c: Array, text: TextAxis, path: Path, title: str, scale: tuple[float, float] | None = None) -> Figure:
    """Incoming attention by denoising step (downwards) and key position, with the fill front over it.

    Args:
        c: (T, S); NaN: no such key at that step.
        scale: limits of the colour scale, to compare pictures; by default 1 to the maximum.
    """
    wide, high = float(np.clip(0.14 * len(text), 3.0, 6.4)), float(np.clip(0.05 * len(c), 0.4, 4.2))
    colours, note = incoming_colours(c, scale), reduced(c.shape, MAP, "steps")
    below = room(text, wide) + 0.13 * note.count("\n")
    sheet = new_sheet(wide, high, title, keys(text, wide, {"answer": FILLED}, front=True), below, colours=colours)
    axis = sheet.axes()
    picture(axis, c, colours.paint, MAP)
    strip(axis, text.states(np.zeros(len(text), bool)))
    mark_text(axis, text)
    _front(axis, text, 0.8)
    axis.set_yticks(range(0, len(c), every(len(c), min(9, high / 0.2))))
    axis.set_ylabel("denoising step" if high > 1 else "step")
    label_tokens(axis.xaxis, text, wide, "key position")
    axis.set_xlabel(axis.get_xlabel() + note)
    return save(sheet.figure, path, colours.label)


@house_style()
def incoming_grid(
    c: Array, names: Sequence[str], text: TextAxis, path: Path, title: str, scale: tuple[float, float] | None = None
) -> Figure:
    """Incoming attention by step and position in small panels, such as the heads of a layer, on one colour scale.

    Args:
        c: (N, T, S).
        names: (N) over the panels.
        scale: limits of the colour scale; by default 1 to the maximum over all panels.
    """
    colours = incoming_colours(c, scale)
    cells = int(0.85 * DPI * 6.4 / min(8, math.ceil(math.sqrt(len(c)))))
    most = (cells * 3 // 4, cells)
    note = reduced(c.shape[1:], most, "steps")
    figure, axes = _panels(names, text, c.shape[1], title, "key position", note, colours)
    for axis, values in zip(axes, c, strict=True):
        picture(axis, values, colours.paint, most)
    return save(figure, path, colours.label)


@house_style()
def pattern_map(
    pattern: Array, text: TextAxis, path: Path, title: str, masked: Array | None = None, vmax: float | None = None
) -> Figure:
    """Which query attends to which key at one denoising step.

    Args:
        pattern: (S, S) [query, key], rows sum to 1.
        masked: bool (S,): still mask tokens, labelled as such.
        vmax: upper end of the colour scale; by default the maximum.
    """
    colours = pattern_colours(float(np.max(pattern, where=np.isfinite(pattern), initial=0)) if vmax is None else vmax)
    states = {"answer": FILLED} if masked is None else {"filled": FILLED, "still masked": MASKED}
    figure, _ = pattern_figure(pattern, text, title, masked, colours, states)
    return save(figure, path, colours.label)


def pattern_figure(
    pattern: Array, text: TextAxis, title: str, masked: Array | None, colours: Colours, states: Mapping[str, int]
) -> tuple[Figure, list[AxesImage]]:
    """The figure of a pattern and its images: the pattern, the keys' and the queries' band."""
    size, note = float(np.clip(0.15 * len(text), 3.0, 5.4)), reduced(pattern.shape, SQUARE, "queries")
    left = room(text, size)
    sheet = new_sheet(size, size, title, keys(text, size, states), left + 0.13 * note.count("\n"), left, colours)
    axis = sheet.axes()
    of_tokens = text.states(np.zeros(len(text), bool) if masked is None else masked)
    images = [
        picture(axis, pattern, colours.paint, SQUARE),
        strip(axis, of_tokens),
        strip(axis, of_tokens, upright=True),
    ]
    mark_text(axis, text)
    label_tokens(axis.yaxis, text, size, "query position", masked)
    label_tokens(axis.xaxis, text, size, "key position", masked)
    axis.set_xlabel(axis.get_xlabel() + note)
    axis.xaxis.set_label_coords(0.5, -(left - 0.22) / size)
    axis.yaxis.set_label_coords(-(left - 0.22) / size, 0.5)
    return sheet.figure, images


@house_style()
def strongest_paths(positions: Array, names: Sequence[str], text: TextAxis, path: Path, title: str) -> Figure:
    """Where the strongest sink of each head stands at every denoising step (downwards), with the fill front.

    Args:
        positions: (N, T) key positions; -1: no sink at that step.
        names: (N) over the panels.
    """
    figure, axes = _panels(names, text, positions.shape[1], title, "key position of the strongest sink", "")
    for axis, places in zip(axes, positions, strict=True):
        at = np.flatnonzero(places >= 0)
        _dashes(axis, (places[at], places[at]), (at - 0.5, at + 0.5), color=SINK, linewidth=1.8)
    return save(figure, path, "key position of the strongest sink by denoising step")
