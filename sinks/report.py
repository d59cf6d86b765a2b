"""A page that plays the denoising steps: one HTML file, tokens coloured by incoming attention. NumPy only, no torch.

The page judges sinks itself, for every epsilon, and counts exactly those that :func:`sinks.detect` finds: a *row* (one
head, or a mean) carries 16-bit values, its float64 total and its number of keys, and the rule is one line of doubles.
Rows of a step lie in this order: the mean over layers and heads, the mean over heads of every layer, then all heads,
layer by layer. What does not fit the budget is left out by :func:`choose_thinning`, and the page says what.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sinks.detection import above, check_epsilon, normalize
from sinks.errors import InputError
from sinks.files import write_text
from sinks.runs import Run, Sample
from sinks.tokens import visible
from sinks.trajectories import strongest

FLOORS = (0.0, 0.5, 1.0, 2.0, 3.0)
"""By how much a key of a single head must exceed the mean of the others to be kept, where not all keys fit."""

SCRIPTS = ("data.js", "colours.js", "text.js", "figures.js", "viewer.js")
_SLACK = 4096  # bytes of a sample beside its arrays: their directory, and what gzip adds to noise
_SETTINGS = {
    "steps": "{} denoising steps",
    "gen_len": "{} tokens to generate",
    "block_len": "blocks of {}",
    "remasking": "remasking {}",
    "temperature": "temperature {}",
    "seed": "seed {}",
    "dtype": "{}",
}
_MASKING = ("control", "top_k", "mask_sink_ratio", "epsilon", "scope", "path")

Array = NDArray[Any]


@dataclass(frozen=True)
class Size:
    """What decides how many bytes a sample takes: denoising steps T, layers L, query heads H, positions S."""

    steps: int
    layers: int
    heads: int
    length: int
    blocking: bool = False  # some key was blocked

    @property
    def rows(self) -> int:
        return 1 + self.layers + self.layers * self.heads


@dataclass(frozen=True)
class Thinning:
    """What a page keeps of a sample.

    every: each ``every``-th step, and the last.
    floor: of single heads only keys that exceed the mean of the others by more, and the strongest; None: all keys.
    """

    every: int = 1
    floor: float | None = None

    def steps(self, count: int) -> list[int]:
        """The steps kept of 0…count-1."""
        return sorted({*range(0, count, self.every), count - 1})

    def stated(self, count: int) -> str:
        """What the page says about it; ``count`` is the number of steps there were."""
        steps = f"Thinned to {len(self.steps(count))} of {count} steps." if self.every > 1 else f"All {count} steps."
        if self.floor is None:
            return f"{steps} All keys of all heads."
        return (
            f"{steps} Means are complete; of single heads the file keeps keys more than {self.floor:g} "
            f"above the mean of the others, and always the strongest."
        )


def ladder(steps: int) -> list[Thinning]:
    """What a page may keep of a sample, gentlest first: all; a floor, from the lowest; the highest, every n-th step."""
    rungs = [Thinning(), *(Thinning(1, floor) for floor in FLOORS)]
    return rungs + [Thinning(every, FLOORS[-1]) for every in range(2, steps)]


def choose_thinning(size: Size, kept_keys: Array, room: int) -> Thinning:
    """The gentlest thinning of :func:`ladder` that fits.

    Args:
        size: of the sample.
        kept_keys: (F, T) how many keys of single heads each of FLOORS keeps at each step, the strongest included.
        room: bytes for the sample's arrays.

    Raises:
        InputError: not even the first and the last step fit.
    """
    for thinning in ladder(size.steps):
        steps, floor = thinning.steps(size.steps), thinning.floor
        keys = None if floor is None else int(kept_keys[FLOORS.index(floor), steps].sum())
        if packed_bytes(size, len(steps), keys) <= room:
            return thinning
    raise InputError(
        f"a sample of {size.length} tokens, {size.layers} layers and {size.heads} heads does not fit into "
        f"{max(room, 0) / 1e6:.1f} MB, not even two of its steps: put fewer samples into a report, or raise its budget"
    )


def packed_bytes(size: Size, steps: int, keys: int | None) -> int:
    """Bytes of the arrays that :func:`pack` makes, before gzip; ``keys`` of single heads, or None for all."""
    heads = size.layers * size.heads
    per_step = 4 + 4 * size.length + 2 * size.length * (1 + size.layers) + 10 * size.rows + 2 * heads * size.blocking
    per_step += 2 * heads * size.length if keys is None else 2 * heads
    return 8 * size.length + steps * per_step + 4 * (keys or 0)


def means(incoming: Array) -> Array:
    """The mean rows as a page judges them: the mean over layers and heads, then over the heads of every layer.

    Args:
        incoming: (L, H, S), rounded to float16 first, as it is stored.

    Returns:
        float16 (1 + L, S): rounded means; NaN where any of the heads has no key.
    """
    stored = incoming.astype(np.float16)
    overall = stored.mean(axis=(0, 1), dtype=np.float64)
    return np.concatenate([overall[None], stored.mean(axis=1, dtype=np.float64)]).astype(np.float16)


def kept(incoming: Array, floor: float) -> Array:
    """bool (..., S): keys that exceed the mean of the others by more than ``floor``, and the strongest key."""
    strength, keys = normalize(incoming)
    return above(strength, keys, floor) | (np.arange(incoming.shape[-1]) == strongest(incoming)[..., None])


def count_kept(incoming: Array) -> list[int]:
    """How many keys :func:`kept` keeps for each of FLOORS of one step's incoming attention (L, H, S)."""
    strength, keys = normalize(incoming)
    return [int(np.maximum(above(strength, keys, floor).sum(-1), keys.any(-1)).sum()) for floor in FLOORS]


def pack(sample: Sample, thinning: Thinning) -> dict[str, Array]:
    """The arrays of one sample by name; K steps are kept, R rows as the module says. Read step by step.

    ``steps`` int32 (K): their numbers. ``tokens`` int32 (K, S): ids that a step reads; ``final``, ``filled_at`` int32
    (S). ``totals`` float64 (K, R), ``keys`` uint16 (K, R): sum and number of each row's keys. ``means`` float16
    (K, 1 + L, S). Single heads: ``values`` float16 (K, L, H, S), NaN where no key is; or with a floor, ``counts``
    uint16 (K, L, H), and so many ``positions`` uint16 and ``values`` float16 one after the other. ``blocked`` int16
    (K, L, H), if any key was.
    """
    steps, blocked = thinning.steps(sample.steps), _blocked(sample)
    columns: defaultdict[str, list[Array]] = defaultdict(list)
    for t in steps:
        for name, part in _pack_step(sample.incoming(t).astype(np.float16), thinning.floor).items():
            columns[name].append(part)
    trajectory = sample.tokens()
    arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
    arrays |= {
        "steps": np.array(steps, dtype=np.int32),
        "tokens": trajectory[steps],
        "final": trajectory[-1],
        "filled_at": sample.unmasked_at,
    }
    if blocked.any():
        arrays["blocked"] = blocked[steps]
    return dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))  # widest first, which keeps all aligned


def _pack_step(incoming: Array, floor: float | None) -> dict[str, Array]:
    mean_rows = means(incoming)
    rows = np.concatenate([mean_rows, incoming.reshape(-1, incoming.shape[-1])])
    strength, keys = normalize(rows)
    packed = {
        "totals": np.where(keys, strength, 0.0).sum(-1),
        "keys": keys.sum(-1).astype(np.uint16),
        "means": mean_rows.ravel(),
    }
    if floor is None:
        return packed | {"values": incoming.ravel()}
    where = kept(incoming, floor)
    return packed | {
        "counts": where.sum(-1).astype(np.uint16).ravel(),
        "positions": where.nonzero()[-1].astype(np.uint16),
        "values": incoming[where],
    }


def _blocked(sample: Sample) -> Array:
    """(T, L', H'): keys blocked in the layers and heads that were kept."""
    return sample.blocked()[:, sample.layers][:, :, sample.heads]


def _size(sample: Sample) -> Size:
    length, blocking = len(sample.unmasked_at), bool(_blocked(sample).any())
    if length > np.iinfo(np.uint16).max:
        raise InputError(f"{sample.folder} has {length} tokens; a report shows {np.iinfo(np.uint16).max} at most")
    return Size(sample.steps, len(sample.layers), len(sample.heads), length, blocking)


def write_report(
    run: Run,
    path: Path,
    samples: Sequence[Sample],
    epsilon: float = 3.0,
    compared: tuple[Run, Sequence[Sample]] | None = None,
    budget: int = 25_000_000,
) -> list[Thinning]:
    """Write one HTML file that needs nothing else and opens from the disk.

    Args:
        run: the samples' run; its settings are shown.
        path: the file to make.
        samples: shown one at a time; each gets an equal share of the budget.
        epsilon: where the page's threshold begins; the reader can move it.
        compared: another run with as many samples, the i-th shown beside the i-th.
        budget: bytes that the file takes at most.

    Returns:
        What was kept of each sample, and then of each compared one.

    Raises:
        InputError: there is no sample, the runs' samples do not pair, or the budget is too small.
    """
    check_epsilon(epsilon)
    runs = [(run, samples)] + ([compared] if compared else [])
    if not samples:
        raise InputError(f"{run.path} has no finished sample to show")
    if any(len(others) != len(samples) for _, others in runs):
        raise InputError(f"{len(samples)} samples cannot be shown beside {len(runs[1][1])}: give as many of both runs")
    described = [[_describe(owner, sample) for sample in chosen] for owner, chosen in runs]
    report: dict[str, Any] = {"epsilon": epsilon, "runs": [_introduce(owner) for owner, _ in runs]}
    skeleton = len(_page(report | {"samples": described}, []).encode())
    room = (budget - skeleton) // (len(runs) * len(samples)) * 3 // 4 * 999 // 1000 - _SLACK
    blobs: list[str] = []
    thinnings: list[Thinning] = []
    for descriptions, (_, chosen) in zip(described, runs, strict=True):
        for description, sample in zip(descriptions, chosen, strict=True):
            thinning, arrays, blob = _fit(sample, room)
            description |= {
                "arrays": _directory(arrays),
                "floor": thinning.floor,
                "kept": thinning.stated(sample.steps),
                "maximum": float(np.nanmax(arrays["values"], initial=1.0)),
                "data": f"data-{len(blobs)}",
            }
            blobs.append(base64.b64encode(blob).decode("ascii"))
            thinnings.append(thinning)
    write_text(path, _page(report | {"samples": described}, blobs))
    return thinnings


def _fit(sample: Sample, room: int) -> tuple[Thinning, dict[str, Array], bytes]:
    """The gentlest thinning whose arrays fit into ``room`` bytes; gzip's gain is measured once, and used."""
    size = _size(sample)
    kept_keys = np.array([count_kept(sample.incoming(t).astype(np.float16)) for t in range(sample.steps)]).T
    certain = choose_thinning(size, kept_keys, room)
    arrays = pack(sample, certain)
    blob = _compress(arrays)
    gain = sum(array.nbytes for array in arrays.values()) / len(blob)
    hoped = choose_thinning(size, kept_keys, int(room * max(gain, 1)))
    rungs = ladder(size.steps)
    for thinning in rungs[rungs.index(hoped) : rungs.index(certain)]:
        more = pack(sample, thinning)
        if len(compressed := _compress(more)) <= room:
            return thinning, more, compressed
    return certain, arrays, blob


def _introduce(run: Run) -> dict[str, str]:
    """How the page names a run; its masking is empty where there was none."""
    sampling, masking = run.manifest.get("sampling") or {}, run.manifest.get("masking") or {}
    settings = sampling | {name: run.manifest.get(name) for name in ("seed", "dtype")}
    return {
        "model": str(run.manifest["model"]),
        "folder": run.path.resolve().name,
        "settings": ", ".join(text.format(settings[k]) for k, text in _SETTINGS.items() if settings.get(k) is not None),
        "masking": ", ".join(f"{k} {masking[k]}" for k in _MASKING if masking.get(k) is not None),
    }


def _describe(run: Run, sample: Sample) -> dict[str, Any]:
    final = sample.tokens(-1).tolist()
    texts = [text or f"#{token}" for text, token in zip(sample.tokens_text, final, strict=True)]
    return {
        "name": f"{sample.index}: {sample.info['id']}",
        "steps": sample.steps,
        "layers": sample.layers,
        "heads": sample.heads,
        "mask": run.manifest["spec"]["mask_token_id"],
        "prompt_length": sample.prompt_length,
        "block_len": (run.manifest.get("sampling") or {}).get("block_len"),
        "texts": [_running_text(text) for text in texts],
        "labels": [visible(text, longest=40) for text in texts],
    }


def _running_text(text: str) -> str:
    """Blanks and line breaks as they are; every other character that cannot be seen as a sign or an escape."""
    return "".join(letter if letter in " \n" or letter.isprintable() else visible(letter) for letter in text)


def _directory(arrays: dict[str, Array]) -> dict[str, tuple[str, int, int]]:
    """Where each array lies in the unpacked bytes: its type, first byte and number of items."""
    ends = np.cumsum([array.nbytes for array in arrays.values()]).tolist()
    return {
        name: (array.dtype.name, end - array.nbytes, array.size)
        for (name, array), end in zip(arrays.items(), ends, strict=True)
    }


def _compress(arrays: dict[str, Array]) -> bytes:
    parts = [np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes() for array in arrays.values()]
    return gzip.compress(b"".join(parts), 6, mtime=0)


def _page(report: dict[str, Any], blobs: Sequence[str]) -> str:
    folder = resources.files("sinks") / "viewer"
    template, style, *scripts = [(folder / name).read_text("utf-8") for name in ("viewer.html", "viewer.css", *SCRIPTS)]
    policy = f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}"
    data = (f'<script type="text/plain" id="data-{i}">{blob}</script>\n' for i, blob in enumerate(blobs))
    return Template(template).substitute(
        policy=f"{policy}; base-uri 'none'; form-action 'none'",
        style=style,
        report=_json_in_html(report),
        data="".join(data),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json_in_html(value: Any) -> str:
    """JSON in which nothing can end a script element: only ASCII, and no ``<``, ``>``, ``&``."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
