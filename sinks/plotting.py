"""Figures of numbers: bars, curves, layers by heads; those over key positions are in :mod:`sinks.heatmaps`.

Arrays and labels in, files out; no science is computed here. Every function builds a Figure, writes it to ``path``
(png, pdf or svg), and returns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from sinks.heatmaps import MOST_LABELS, every, picture
from sinks.style import (
    COLOURS,
    FILLING,
    INK,
    OTHERS,
    SINK,
    WIDTH,
    add_legend,
    house_style,
    new_figure,
    printable,
    save,
    value_colours,
    wrapped,
)

_CONTROLS = {"sinks": "top-k sinks", "random": "k random other keys", "bottom": "k weakest keys"}

# Bars


@house_style()
def class_bars(rows: Sequence[Mapping[str, Any]], path: Path, title: str, label: str = "share (%)") -> Figure:
    """Horizontal bars, one per token class, with the interval as a line.

    Args:
        rows: ``name`` and ``share``, ``low``, ``high`` (0 to 1; NaN bounds: no interval); with ``series``, such as
            "sinks" and "all tokens", one bar for each side by side.
        label: what the share is of, in percent.
    """
    names = list(dict.fromkeys(row["name"] for row in rows))
    groups = list(dict.fromkeys(row.get("series", "") for row in rows))
    figure = new_figure(5.4, 1.1 + len(names) * (0.1 + 0.14 * len(groups)), title)
    axis = figure.subplots()
    colours, thickness = _series_colours(groups), 0.8 / max(len(groups), 1)
    bars = []
    for number, group in enumerate(groups):
        here = [row for row in rows if row.get("series", "") == group]
        place = [names.index(row["name"]) + (number - (len(groups) - 1) / 2) * thickness for row in here]
        shares = _percent([row["share"] for row in here])
        bounds = _percent([[row.get("low", np.nan) for row in here], [row.get("high", np.nan) for row in here]])
        bars.append(axis.barh(place, shares, thickness * 0.92, color=colours[group]))
        axis.errorbar(shares, place, xerr=np.abs(bounds - shares), fmt="none", ecolor=INK, elinewidth=0.7, capsize=1.5)
    _name_bars(axis, names)
    axis.set_xlabel(printable(label))
    axis.set_xlim(left=0)
    if any(groups):
        add_legend(axis, bars, groups, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return save(figure, path, label)


@house_style()
def definitions_bars(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> Figure:
    """Published definitions of a sink side by side.

    Args:
        rows: ``name``, ``tokens`` (share of tokens that are sinks), ``heads`` (share of query heads with one), 0 to 1.
    """
    figure = new_figure(WIDTH, 1.2 + 0.26 * len(rows), title)
    panels = figure.subplots(1, 2, sharey=True)
    texts = {"tokens": "tokens that are sinks (%)", "heads": "query heads with at least one sink (%)"}
    for axis, (key, text) in zip(panels, texts.items(), strict=True):
        shares = _percent([row[key] for row in rows])
        bars = axis.barh(range(len(rows)), shares, 0.7, color=SINK)
        axis.bar_label(bars, [f"{share:.3g}" for share in shares], padding=2, fontsize=7)
        axis.set_xlabel(text)
        axis.margins(x=0.16)
        axis.tick_params(axis="y", length=0)
    _name_bars(panels[0], [row["name"] for row in rows])
    return save(figure, path, " and ".join(texts.values()))


def _name_bars(axis: Axes, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), [printable(name) for name in names])
    axis.set_ylim(len(names) - 0.45, -0.55)
    axis.tick_params(axis="y", length=0)


def _percent(shares: Any) -> NDArray[Any]:
    return 100 * np.asarray(shares, dtype=float)


# Maps


@house_style()
def layer_head_map(
    values: NDArray[Any],
    layers: Sequence[int],
    heads: Sequence[int],
    path: Path,
    title: str,
    label: str,
    diverging: bool = False,
) -> Figure:
    """One number for every layer and query head.

    Args:
        values: (L, H); NaN: no value.
        layers, heads: the model's numbers of the rows and columns.
        label: what the number is, with its unit.
        diverging: two colours around 0.
    """
    wide, high = (float(np.clip(0.28 * size, 1.2, 5.6)) for size in (len(heads), len(layers)))
    width = max(wide + 0.8, 3.2)
    figure = new_figure(width, high + 1.6, title)
    axis = figure.subplots()
    known = wrapped(label, width) + ("\ngrey: no value" if np.isnan(values).any() else "")
    colours = value_colours(values, known, diverging)
    picture(axis, values, lambda cells: colours.paint(np.asarray(cells)), values.shape)
    for side, numbers, inches in ((axis.xaxis, heads, wide), (axis.yaxis, layers, high)):
        at = range(0, len(numbers), every(len(numbers), min(MOST_LABELS, inches / 0.17)))
        side.set_ticks(at, [str(numbers[i]) for i in at])
    axis.set(xlabel="query head", ylabel="layer")
    colours.bar(figure, ax=axis, shrink=0.62, aspect=45, pad=0.02)
    return save(figure, path, label)


# Curves


@house_style()
def epsilon_curve(
    epsilons: NDArray[Any],
    flagged: NDArray[Any] | Mapping[str, NDArray[Any]],
    path: Path,
    title: str,
    marks: Mapping[str, float],
) -> Figure:
    """Share of tokens that are sinks against the threshold.

    Args:
        epsilons: (K,).
        flagged: (K,) shares from 0 to 1, or name -> (K,).
        marks: name -> threshold, drawn as upright lines.
    """
    figure = new_figure(6.4, 3.4, title)
    axis = figure.subplots()
    series = {name: _percent(shares) for name, shares in _named(flagged).items()}
    legend = _lines(axis, np.asarray(epsilons), series)
    for (name, epsilon), dashes in zip(marks.items(), cycle(["--", ":", "-.", (0, (6, 1, 1, 1, 1, 1))]), strict=False):
        legend[f"{name}: ε = {epsilon:.3g}"] = axis.axvline(epsilon, color=INK, linestyle=dashes, linewidth=0.8)
    axis.set_xlabel("threshold ε over the mean of the other tokens")
    axis.set_ylabel("tokens that are sinks (%, log scale; 0 is not drawn)")
    if any((shares > 0).any() for shares in series.values()):
        axis.set_yscale("log", nonpositive="mask")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
    _beside(axis, legend)
    return save(figure, path, "share of tokens that are sinks by threshold")


@house_style()
def unmasking_curve(
    offsets: NDArray[Any], share: NDArray[Any], low: NDArray[Any], high: NDArray[Any], path: Path, title: str
) -> Figure:
    """Share of tokens that are sinks, before and after they are unmasked.

    Args:
        offsets: (K,) denoising steps since the token's own unmasking; 0: the first step that sees it as filled.
        share, low, high: (K,) the share and its interval, 0 to 1.
    """
    figure = new_figure(5.4, 3.2, title)
    axis = figure.subplots()
    axis.fill_between(offsets, _percent(low), _percent(high), color=SINK, alpha=0.2, linewidth=0)
    _lines(axis, offsets, {"": _percent(share)})
    axis.axvline(-0.5, color=FILLING, linewidth=0.8)
    for side, text in (("right", "still masked  "), ("left", "  filled")):
        axis.text(-0.5, 1.0, text, ha=side, va="bottom", transform=axis.get_xaxis_transform(), fontsize=7)
    axis.set_xlabel("denoising steps since the token's own unmasking (0: first step that sees it filled)")
    axis.set_ylabel("tokens that are sinks (%)")
    axis.set_ylim(bottom=0)
    return save(figure, path, "share of tokens that are sinks around their own unmasking")


@house_style()
def curve_over_steps(series: Mapping[str, NDArray[Any]], path: Path, title: str, label: str) -> Figure:
    """Quantities against the denoising step.

    Args:
        series: name -> (T,); NaN leaves a gap.
        label: what they are, with the unit.
    """
    figure = new_figure(WIDTH, 3.2, title)
    axis = figure.subplots()
    steps = np.arange(max((len(values) for values in series.values()), default=0))
    _beside(axis, _lines(axis, steps, series))
    axis.set_xlabel("denoising step")
    axis.set_ylabel(printable(label))
    axis.set_xlim(-0.5, max(len(steps), 1) - 0.5)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return save(figure, path, label)


@house_style()
def accuracy_by_k(rows: Sequence[Mapping[str, Any]], path: Path) -> Figure:
    """Accuracy against the number of masked keys, one panel per model and masking path, one line per control.

    ``rows`` are those of :func:`sinks.sweep.table`, accuracy and interval in percent.
    """
    panels = list(dict.fromkeys((row["model"], row["path"]) for row in rows if row["k"] > 0))
    figure = Figure(figsize=(3.2 * len(panels), 3.0), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (model, masked) in zip(axes, panels, strict=True):
        here = [row for row in rows if row["model"] == model and (row["path"] == masked or row["k"] == 0)]
        for control, label in _CONTROLS.items():
            line = sorted((row for row in here if row["control"] == control or row["k"] == 0), key=lambda r: r["k"])
            if len(line) > 1:
                k, accuracy, low, high = np.array(
                    [[row[x] for x in ("k", "accuracy", "low", "high")] for row in line]
                ).T
                bars = dict(yerr=[accuracy - low, high - accuracy], capsize=2, marker="o", markersize=3)
                axis.errorbar(k, accuracy, label=label, color=COLOURS[control], **bars)
        axis.set_title(printable(f"{model}, {masked}"))
        axis.set_xlabel("keys masked per layer, head and step")
        axis.set_ylim(-3, 103)
    axes[0].set_ylabel("accuracy (%, 95 % Wilson interval)")
    axes[0].legend(loc="best")
    return save(figure, path, "accuracy by number of masked keys")


def _lines(axis: Axes, x: NDArray[Any], series: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """One line per series, name -> line; points are marked where they are few."""
    colours = _series_colours(list(series))
    marker = "o" if len(x) <= 40 else ""
    return {
        name: axis.plot(x[: len(y)], y, color=colours[name], marker=marker, markersize=2.5)[0]
        for name, y in series.items()
    }


def _beside(axis: Axes, legend: Mapping[str, Any]) -> None:
    """A legend right of the curves, of those that have a name."""
    shown = {name: handle for name, handle in legend.items() if name}
    if shown:
        place = dict(loc="upper left", bbox_to_anchor=(1.0, 1.0), ncols=-(-len(shown) // 16))
        add_legend(axis, list(shown.values()), list(shown), **place)


def _named(values: Any) -> Mapping[str, Any]:
    return values if isinstance(values, Mapping) else {"": values}


def _series_colours(names: Sequence[str]) -> dict[str, Any]:
    """What has a colour of its own keeps it; of the others few get distinct colours, and many a ramp."""
    others = [name for name in names if name not in COLOURS]
    ramp = sns.color_palette("viridis", len(others)).as_hex()
    return COLOURS | dict(zip(others, ramp if len(others) > len(OTHERS) else OTHERS, strict=False))
