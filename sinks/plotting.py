"""Figures. No science is computed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import seaborn as sns
from matplotlib.figure import Figure

_LABELS = {"sinks": "top-k sinks", "random": "k random other keys", "bottom": "k weakest keys"}


def accuracy_by_k(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Accuracy against the number of masked keys, one panel per model and masking path, one line per control.

    ``rows`` are those of :func:`sinks.sweep.table`, accuracy and interval in percent.
    """
    panels = list(dict.fromkeys((row["model"], row["path"]) for row in rows if row["k"] > 0))
    colours = dict(zip(_LABELS, sns.color_palette("colorblind"), strict=False))
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(3.2 * len(panels), 3.0), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, (model, masked) in zip(axes, panels, strict=True):
            here = [row for row in rows if row["model"] == model and (row["path"] == masked or row["k"] == 0)]
            for control in _LABELS:
                line = sorted((row for row in here if row["control"] == control or row["k"] == 0), key=lambda r: r["k"])
                if len(line) > 1:
                    _line(axis, line, _LABELS[control], colours[control])
            axis.set_title(f"{model}, {masked}")
            axis.set_xlabel("keys masked per layer, head and step")
            axis.set_ylim(-3, 103)
        axes[0].set_ylabel("accuracy (%, 95 % Wilson interval)")
        axes[0].legend(frameon=False, loc="best")
        temporary = path.with_name(f".{path.name}")
        figure.savefig(temporary, format=path.suffix[1:], dpi=200)
        temporary.replace(path)


def _line(axis: Any, line: Sequence[Mapping[str, Any]], label: str, colour: Any) -> None:
    k, accuracy = [row["k"] for row in line], [row["accuracy"] for row in line]
    below = [row["accuracy"] - row["low"] for row in line]
    above = [row["high"] - row["accuracy"] for row in line]
    axis.errorbar(k, accuracy, yerr=[below, above], label=label, color=colour, marker="o", markersize=3, capsize=2)
