"""The house style of every figure: fonts, colours and colour scales, texts that can be drawn, files.

Texts are drawn as they are (a token such as ``$`` is not mathematics), and one colour has one meaning everywhere.
"""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import seaborn as sns
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LogNorm, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from numpy.typing import NDArray

from sinks.errors import InputError
from sinks.files import explained, replacing
from sinks.tokens import visible
from sinks.writer import UNIT

Array = NDArray[Any]

WIDTH = 7.2  # inches: two columns of a paper
DPI = 200
LONGEST_SIDE = 16_000 / DPI  # inches

INK, FAINT, EMPTY = "#262626", "#B8B8B8", "#DCDCDC"  # text and rules; secondary rules; no value here
SINK, _ORANGE, _GREEN, FILLING, *OTHERS = sns.color_palette("colorblind").as_hex()[:6]  # FILLING: a token gets its text
COLOURS = {"": SINK, "sinks": SINK, "all tokens": "#949494", "random": _ORANGE, "bottom": _GREEN}

_CJK = {"Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "WenQuanYi Zen Hei", "PingFang SC", "Microsoft YaHei"}
HOUSE: dict[str, Any] = {
    "font.family": ["DejaVu Sans", *sorted(_CJK.intersection(font_manager.get_font_names()))],
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "figure.titlesize": 9,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.hashsalt": "dlms-sinks",
}
"""On top of matplotlib's own defaults; what the user's matplotlibrc says plays no part."""


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib's defaults and :data:`HOUSE`, whatever the user has set; also to be used as a decorator."""
    with matplotlib.style.context(["default", HOUSE]):
        yield


# Text


def printable(text: str) -> str:
    r"""``text`` with every character that no installed font can draw as an escape such as ``\u4e2d``."""
    return _escaped(text, keep="\n")


def token_label(text: str, longest: int = 14) -> str:
    """How a token is written in a picture: :func:`sinks.tokens.visible`, and all of it can be drawn."""
    return printable(visible(_escaped(text, keep="\n\r\t"), longest))


def _escaped(text: str, keep: str) -> str:
    return "".join(c if c in keep or ord(c) in _drawable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    if character.isprintable():
        _say_once_that_glyphs_are_missing()
    return f"\\u{ord(character):04x}"


@cache
def _drawable() -> frozenset[int]:
    """Code points that can be seen and that a font of the house style has."""
    fonts = [font_manager.get_font(font_manager.findfont(name)) for name in HOUSE["font.family"]]
    return frozenset(point for font in fonts for point in font.get_charmap() if chr(point).isprintable())


@cache
def _say_once_that_glyphs_are_missing() -> None:
    logging.getLogger(__name__).warning(
        "some characters are in no installed font and are shown as escapes; a font such as Noto Sans CJK helps"
    )


def cut(text: str, longest: int) -> str:
    """At most that many characters, cut in the middle, for what tells names apart is often at the end."""
    tail = longest // 2
    return text if len(text) <= longest else f"{text[: longest - tail - 1]}…{text[len(text) - tail :]}"


def text_width(text: str, size: float) -> float:
    """Inches that a text of ``size`` points takes."""
    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)
    return float(width) / 72


# Figures and files


def wrapped(title: str, width: float) -> str:
    """A title in lines that fit a figure of that many inches."""
    return "\n".join(textwrap.fill(line, int(width * 13)) for line in printable(title).split("\n"))


def new_figure(width: float, height: float, title: str) -> Figure:
    """A figure of that many inches, at most as large as 16,000 pixels, with its title over the left edge."""
    size = (min(width, LONGEST_SIDE), min(height, LONGEST_SIDE))
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    figure.suptitle(wrapped(title, width), x=0.06 / width, ha="left")
    return figure


@house_style()
def save(figure: Figure, path: Path, about: str) -> Figure:
    """Write a figure whole or not at all, with its title and ``about`` as metadata; the same figure, the same bytes."""
    texts = {"Title": figure.get_suptitle(), "Description": about}
    metadata: dict[str, dict[str, Any]] = {
        ".png": texts,
        ".svg": texts | {"Date": None},
        ".pdf": {"Title": texts["Title"], "Subject": about, "CreationDate": None},
    }
    if path.suffix not in metadata:
        raise InputError(f"{path} cannot be written: the name of a picture ends in {', '.join(metadata)}")
    with explained("write", path), replacing(path) as temporary:
        if path.suffix == ".png":  # savefig would draw everything twice
            FigureCanvasAgg(figure).print_png(temporary, metadata=texts, pil_kwargs={"compress_level": 4})
        else:
            figure.savefig(temporary, format=path.suffix[1:], metadata=metadata[path.suffix])
    return figure


def add_legend(axis: Axes, handles: Sequence[Any], names: Sequence[str], **place: Any) -> None:
    """A legend whose names are data: also one that begins with an underscore is shown."""
    legend = axis.legend(handles, [str(number) for number in range(len(names))], **place)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(printable(name))


# Colours


@dataclass(frozen=True)
class Colours:
    """How values become colours, and what the colour bar says about it."""

    norm: Normalize
    cmap: Colormap
    label: str
    ticks: dict[float, str]

    def paint(self, values: Array) -> Array:
        """uint8 (..., 4); the same value always gets the same colour, NaN the one for "no value"."""
        inside = np.ma.masked_array(np.maximum(values, float(self.norm.vmin or 0)), np.isnan(values))
        return np.asarray(self.cmap(self.norm(inside), bytes=True))

    def bar(self, figure: Figure, **place: Any) -> None:
        """Draw the colour bar, flat: beside ``ax`` or into ``cax``."""
        bar = figure.colorbar(ScalarMappable(self.norm, self.cmap), orientation="horizontal", **place)
        bar.outline.set_visible(False)
        bar.minorticks_off()
        bar.set_ticks(list(self.ticks), labels=list(self.ticks.values()))
        bar.set_label(self.label)


def incoming_colours(c: Array, scale: tuple[float, float] | None = None, note: str = "") -> Colours:
    """Log scale from the mean, 1, to the maximum of ``c``, at least 1.5; or from and to what ``scale`` says."""
    low, high = scale or (1.0, float(np.max(c, where=np.isfinite(c), initial=1.5)))
    candidates = [n * 10.0**e for e in range(-3, 6) for n in (1, 2, 5)]
    place = [(n, math.log(n / low, high / low)) for n in candidates if n > low]
    ticks = {n: f"{n:g}" for n, share in place if 0.06 < share < 0.86}
    ends = {low: f"≤ {low:g}", high: f"{'≥' if scale else 'max'} {high:.4g}"}
    label = f"{UNIT}\nlog scale from {low:g} to {high:.4g}{note}"
    return Colours(LogNorm(low, high), colour_map("cividis"), label, ends | ticks)


def pattern_colours(vmax: float, note: str = "") -> Colours:
    """From 0 to ``vmax``, by the square root, so that weak columns stay visible."""
    vmax = max(vmax, 1e-6)
    ticks = {share * vmax: f"{share * vmax:.2g}" for share in (0, 0.05, 0.2, 0.5)} | {vmax: f"{vmax:.3g}"}
    label = f"attention from a query to a key (rows sum to 1)\nsquare-root scale from 0 to {vmax:.3g}{note}"
    return Colours(PowerNorm(0.5, 0, vmax), colour_map("viridis"), label, ticks)


def value_colours(values: Array, label: str, diverging: bool) -> Colours:
    """Linear, over the range of ``values``; ``diverging``: two colours, equally far to both sides of 0."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if diverging:
        reach = max(abs(low), abs(high), 1e-9)
        ends, cmap = (-reach, 0.0, reach), colour_map("vlag")
    else:
        high = high if high > low else low + max(abs(low), 1.0)
        ends, cmap = (low, (low + high) / 2, high), colour_map("viridis")
    return Colours(
        Normalize(ends[0], ends[-1]), cmap, printable(label), {end: f"{end:.3g}".replace("-", "−") for end in ends}
    )


def colour_map(name: str) -> Colormap:
    return matplotlib.colormaps[name].with_extremes(bad=EMPTY)


# The sheet: everything but the picture itself, in inches


@dataclass(frozen=True)
class Sheet:
    """A figure with room for a picture at ``left``, ``low``, ``wide``, ``high``, in inches."""

    figure: Figure
    left: float
    low: float
    wide: float
    high: float

    def axes(self, left: float = 0, top: float = 0, wide: float = 1, high: float = 1, **more: Any) -> Axes:
        """Axes in a part of the room, in shares of it: by default all of it."""
        size = np.tile(self.figure.get_size_inches(), 2)
        place = [self.left + left * self.wide, self.low + (1 - top - high) * self.high, wide * self.wide]
        return self.figure.add_axes(tuple([*place, high * self.high] / size), **more)


def new_sheet(
    wide: float,
    high: float,
    title: str,
    entries: Sequence[Any],
    below: float,
    left: float = 0.6,
    colours: Colours | None = None,
) -> Sheet:
    """Title, colour bar and legend ``entries`` around room for a picture and, ``left`` and ``below`` it, its labels."""
    width = left + wide + 0.3
    length = sum(0.35 + text_width(entry.get_label(), 7) for entry in entries)
    columns = -(-len(entries) // math.ceil(max(length, 1) / width))
    foot = 0.1 + 0.17 * math.ceil(length / width)
    low = foot + below + (0.8 if colours else 0)
    heading = 0.3 + 0.16 * (wrapped(title, width).count("\n") + 1)
    high = min(high, LONGEST_SIDE - low - heading)
    height = low + high + heading
    figure = new_figure(width, height, title)
    figure.set_layout_engine("none")
    figure.suptitle(figure.get_suptitle(), x=0.06 / width, y=1 - 0.06 / height, ha="left", va="top")
    if entries:
        place: dict[str, Any] = dict(
            loc="lower left", bbox_to_anchor=(0.08 / width, 0.08 / height), borderaxespad=0.0, borderpad=0.0
        )
        figure.legend(handles=entries, ncols=columns, handlelength=1.2, columnspacing=1.4, labelspacing=0.4, **place)
    if colours:
        long = min(0.62 * wide + 0.5, wide)
        bar = ((left + wide / 2 - long / 2) / width, (foot + 0.62) / height, long / width, 0.09 / height)
        colours.bar(figure, cax=figure.add_axes(bar))
    return Sheet(figure, left, low, wide, high)
