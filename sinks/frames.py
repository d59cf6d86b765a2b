"""Attention over the denoising steps, as the frames of a film.

Frames are drawn one at a time: what never changes is drawn once, so that a frame takes milliseconds, and one colour
scale holds for all of them, so that the same value has the same colour in every frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text
from numpy.typing import NDArray
from PIL import Image

from sinks import heatmaps
from sinks.heatmaps import MAP, SQUARE, shrink
from sinks.style import (
    DPI,
    FILLING,
    Colours,
    cut,
    house_style,
    incoming_colours,
    new_sheet,
    pattern_colours,
    printable,
    text_width,
)
from sinks.text_axis import TextAxis, paint_states

Array = NDArray[Any]


@house_style()
def frame(figure: Figure) -> Array:
    """A whole figure as a frame, uint8 (H, W, 3); its size is the figure's, whatever is drawn."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return _pixels(canvas)


def incoming_frames(
    c: Array,
    names: Sequence[str],
    text: TextAxis,
    title: str,
    steps: Sequence[int] | Array,
    scale: tuple[float, float] | None = None,
    per_frame_scale: bool = False,
) -> Iterator[Array]:
    """Incoming attention of layers or heads by key position, one frame per denoising step.

    A band above the picture tells tokens apart; triangles point at those filled at this step, a frame marks the block.

    Args:
        c: (T, N, S).
        names: (N) of the layers or heads.
        text: the key positions; its ``unmasked_at`` counts as ``steps`` do.
        title: over every frame.
        steps: (T,) the true numbers of the steps.
        scale: limits of the colour scale; by default 1 to the maximum over all steps.
        per_frame_scale: give each frame the scale of its own maximum; the frame says so.

    Yields:
        uint8 (H, W, 3).
    """
    colours = incoming_colours(c, scale, ", the same in all frames")
    scene = _incoming_scene(c[0], names, text, title, colours)
    for values, step in zip(c, steps, strict=True):
        if per_frame_scale:
            colours = incoming_colours(values, note=", of this frame only")
            scene.rescale(colours)
        scene.image.set_data(colours.paint(shrink(values, *MAP)))
        scene.go_to(int(step), text.masked(int(step)))
        yield scene.stage.frame()


def pattern_frames(
    patterns: Iterable[Array],
    text: TextAxis,
    title: str,
    steps: Sequence[int] | Array,
    vmax: float,
    masked: Callable[[int], Array],
) -> Iterator[Array]:
    """Attention patterns, one frame per denoising step; only one pattern is held at a time.

    Args:
        patterns: (S, S) [query, key] each, as many as steps.
        text: the key positions; its ``unmasked_at`` counts as ``steps`` do.
        title: over every frame.
        steps: (T,) the true numbers of the steps.
        vmax: upper end of the one colour scale.
        masked: step -> bool (S,), the positions that are mask tokens in the input of that step.

    Yields:
        uint8 (H, W, 3).
    """
    colours = pattern_colours(vmax, ", the same in all frames")
    scene = None
    for pattern, step in zip(patterns, steps, strict=True):
        hidden = masked(int(step))
        scene = scene or _pattern_scene(pattern, text, title, hidden, colours)
        scene.image.set_data(colours.paint(shrink(pattern, *SQUARE)))
        scene.go_to(int(step), hidden)
        yield scene.stage.frame()


def current_block(text: TextAxis, step: int) -> tuple[int, int, int] | None:
    """Number, first position and end of the block of the first position that is still to be filled."""
    waiting = np.flatnonzero(text.unmasked_at >= step)
    if text.block_len is None or not len(waiting):
        return None
    number = (int(waiting[0]) - text.prompt_length) // text.block_len
    first = text.prompt_length + number * text.block_len
    return number, first, min(first + text.block_len, len(text))


class _Stage:
    """A figure of which only the ``moving`` artists change from frame to frame; all else is drawn once."""

    def __init__(self, figure: Figure, moving: Sequence[Artist]) -> None:
        self._canvas, self._moving = FigureCanvasAgg(figure), moving
        self._canvas.draw()  # gives every tick label its place
        self.repaint()

    @house_style()
    def repaint(self) -> None:
        """Draw anew what does not move."""
        for artist in self._moving:
            artist.set_visible(False)
        self._canvas.draw()
        self._still = self._canvas.copy_from_bbox(self._canvas.figure.bbox)

    @house_style()
    def frame(self) -> Array:
        """The moving artists as they are now, over all else: uint8 (H, W, 3)."""
        self._canvas.restore_region(self._still)
        for artist in self._moving:
            artist.set_visible(True)
            artist.draw(self._canvas.get_renderer())
        return _pixels(self._canvas)


def _pixels(canvas: FigureCanvasAgg) -> Array:
    image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba(), "raw", "RGBA", 0, 1)
    return np.array(image.convert("RGB"))


class _Scene:
    """What moves in both kinds of frames: picture, bands, header, marks of the current block and of new tokens."""

    @house_style()
    def __init__(
        self, figure: Figure, text: TextAxis, images: Sequence[AxesImage], labels: Sequence[tuple[int, Text]]
    ) -> None:
        self._figure, self._text, self._bands, self._labels = figure, text, images[1:], labels
        self.image, axis = images[0], images[0].axes
        inch = DPI / axis.bbox.height  # as a share of the picture's height
        style = dict(color=FILLING, markersize=3.5, markeredgewidth=0, clip_on=False)
        (self._new,) = axis.plot([], [], "v", transform=axis.get_xaxis_transform(), **style)
        self._new_height = 1 + 0.17 * inch
        self._block = axis.axvspan(0, 1, fill=False, edgecolor=FILLING, linewidth=1.2)
        width, height = figure.bbox.width / DPI, figure.bbox.height / DPI
        self._header = figure.text(0.06 / width, (axis.bbox.y1 / DPI + 0.24) / height, "")
        moving = [*images, *axis.lines, self._block, self._header, *(label for _, label in labels)]
        self.stage = _Stage(figure, moving)

    def go_to(self, step: int, masked: Array) -> None:
        """Write and mark what holds at a step; ``masked`` bool (S,) in its input."""
        text, new = self._text, self._text.unmasked_at == step
        states = text.states(masked, new)
        self._bands[0].set_data(paint_states(shrink(states[None], 1, SQUARE[1])))
        for band in self._bands[1:]:
            band.set_data(paint_states(shrink(states[:, None], SQUARE[0], 1)))
        self._new.set_data(np.flatnonzero(new), np.full(new.sum(), self._new_height))
        for position, label in self._labels:
            label.set(text=text.label(position, masked[position]), color=heatmaps.label_colour(masked[position]))
        self._mark_block(step, len(text) - text.prompt_length - int(masked.sum()))

    def _mark_block(self, step: int, filled: int) -> None:
        block, answer = current_block(self._text, step), len(self._text) - self._text.prompt_length
        said = [f"denoising step {step}", f"{filled} of {answer} answer tokens filled"]
        if block is not None and self._text.block_len is not None:
            number, first, end = block
            said.insert(1, f"block {number + 1} of {-(-answer // self._text.block_len)}")
            self._block.set(x=first - 0.5, width=end - first)
        self._block.set_alpha(0 if block is None else 1)
        self._header.set_text(" · ".join(said))

    @house_style()
    def rescale(self, colours: Colours) -> None:
        """Draw another colour bar."""
        bar = self._figure.axes[0]
        bar.clear()
        colours.bar(self._figure, cax=bar)
        self.stage.repaint()


@house_style()
def _incoming_scene(c: Array, names: Sequence[str], text: TextAxis, title: str, colours: Colours) -> _Scene:
    wide, high = 6.2, float(np.clip(0.13 * len(names), 1.2, 4.2))
    note, shown = heatmaps.reduced(c.shape, MAP, "rows"), [cut(printable(name), 20) for name in names]
    entries = heatmaps.keys(text, wide, heatmaps.AT_A_STEP)
    below, left = heatmaps.room(text, wide) + 0.13 * note.count("\n"), 0.2 + max(text_width(name, 7) for name in shown)
    sheet = new_sheet(wide, high, f"{title}\n", entries, below, left, colours)
    axis = sheet.axes()
    images = [heatmaps.picture(axis, c, colours.paint, MAP), heatmaps.strip(axis, text.states(text.masked(0)))]
    heatmaps.mark_text(axis, text)
    heatmaps.label_tokens(axis.xaxis, text, wide, "key position")
    axis.set_xlabel(axis.get_xlabel() + note)
    at = range(0, len(shown), heatmaps.every(len(shown), min(heatmaps.MOST_LABELS, high / 0.12)))
    axis.set_yticks(at, [shown[row] for row in at])
    return _Scene(sheet.figure, text, images, [])


@house_style()
def _pattern_scene(pattern: Array, text: TextAxis, title: str, masked: Array, colours: Colours) -> _Scene:
    figure, images = heatmaps.pattern_figure(pattern, text, f"{title}\n", masked, colours, heatmaps.AT_A_STEP)
    axis = images[0].axes
    at = heatmaps.labelled(text, axis.bbox.width / DPI)
    labels = [*zip(at, axis.get_xticklabels(), strict=True), *zip(at, axis.get_yticklabels(), strict=True)]
    return _Scene(figure, text, images, [label for label in labels if label[0] >= text.prompt_length])
