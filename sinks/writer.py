"""Writing one sample of a run step by step; NumPy only, no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sinks.files import TensorStream, explained, write_json
from sinks.runs import sample_folder

UNIT = "incoming attention: sum over queries, mean 1"

Array = NDArray[Any]


@dataclass(frozen=True)
class Layout:
    """What is kept of one sample.

    Args:
        steps: denoising steps T.
        length: positions S, prompt and answer, without padding.
        layers, heads: the model's numbers of those kept, in the order in which they are stored (L', H').
        layer_count, head_count: how many the model has (L, H).
        value_norm: keep the norms of the values.
        patterns: "none", "mean" over heads, or "full"; kept at ``pattern_steps``.
        dtype: of incoming attention, "float16" or "float32".
    """

    steps: int
    length: int
    layers: Sequence[int]
    heads: Sequence[int]
    layer_count: int
    head_count: int
    value_norm: bool = False
    patterns: str = "none"
    pattern_steps: Collection[int] = ()
    dtype: str = "float16"

    @property
    def trajectory(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensors of trajectory.safetensors: name -> (dtype, shape)."""
        return {
            "tokens": ("int32", (self.steps + 1, self.length)),
            "confidence": ("float16", (self.steps, self.length)),
            "unmasked_at": ("int32", (self.length,)),
        }

    @property
    def incoming(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensors of incoming.safetensors: name -> (dtype, shape)."""
        columns = (self.steps, len(self.layers), len(self.heads), self.length)
        tensors = {
            "incoming": (self.dtype, columns),
            "blocked": ("int16", (self.steps, self.layer_count, self.head_count)),
        }
        return tensors | ({"value_norm": ("float16", columns)} if self.value_norm else {})

    @property
    def pattern(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensors of one file in attention/: name -> (dtype, shape)."""
        heads = (len(self.heads),) if self.patterns == "full" else ()
        return {"pattern": ("float16", (len(self.layers), *heads, self.length, self.length))}

    @property
    def nbytes(self) -> int:
        """What the sample's tensors take on the disk."""
        recorded = 0 if self.patterns == "none" else len(self.pattern_steps)
        return _nbytes(self.trajectory) + _nbytes(self.incoming) + recorded * _nbytes(self.pattern)

    @property
    def metadata(self) -> dict[str, str]:
        return {
            "unit": UNIT,
            "layers": ",".join(map(str, self.layers)),
            "heads": ",".join(map(str, self.heads)),
        }


def _nbytes(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> int:
    return sum(np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64)) for dtype, shape in tensors.values())


class SampleWriter:
    """Writes one sample step by step, in memory that does not grow with the number of steps.

    Args:
        run: the run folder; what an interrupted attempt left of this sample is removed.
        index: the sample's number in the run.
        layout: what is kept.
        tokens: (S,) the ids before the first step.
    """

    def __init__(self, run: Path, index: int, layout: Layout, tokens: Array) -> None:
        self.folder, self.layout = sample_folder(run, index), layout
        self._tokens = tokens
        self._unmasked_at = np.full(layout.length, -1, dtype=np.int32)
        self._open = ExitStack()
        with explained("create", self.folder):
            if self.folder.exists():
                rmtree(self.folder)
            self.folder.mkdir()
        self._trajectory = self._stream("trajectory", layout.trajectory)
        self._incoming = self._stream("incoming", layout.incoming)
        self._trajectory.put("tokens", tokens, 0)

    def _stream(self, name: str, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> TensorStream:
        path = self.folder / f"{name}.safetensors"
        return self._open.enter_context(TensorStream(path, tensors, self.layout.metadata))

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def step(
        self,
        t: int,
        tokens: Array,
        confidence: Array,
        incoming: Array,
        blocked: Array | None = None,
        value_norm: Array | None = None,
        pattern: Array | None = None,
    ) -> None:
        """Write what step ``t`` did, without padding.

        Args:
            tokens: (S,) ids after the step; confidence: (S,), NaN where no token could be placed.
            incoming: (L', H', S), NaN at positions not written yet; value_norm likewise.
            blocked: (L, H) how many keys were blocked (None: none).
            pattern: (L', S, S) or (L', H', S, S), at the recorded steps.
        """
        self._unmasked_at[tokens != self._tokens] = t
        self._tokens = tokens
        self._trajectory.put("tokens", tokens, t + 1)
        self._trajectory.put("confidence", confidence, t)
        self._incoming.put("incoming", incoming, t)
        if blocked is None:
            blocked = np.zeros((self.layout.layer_count, self.layout.head_count), dtype=np.int16)
        self._incoming.put("blocked", blocked, t)
        if value_norm is not None:
            self._incoming.put("value_norm", value_norm, t)
        if pattern is not None:
            self._write_pattern(t, pattern)

    def _write_pattern(self, t: int, pattern: Array) -> None:
        path = self.folder / "attention" / f"step_{t:04d}.safetensors"
        with explained("create", path.parent):
            path.parent.mkdir(exist_ok=True)
        metadata = self.layout.metadata | {
            "unit": "attention pattern, rows sum to 1",
            "kind": self.layout.patterns,
        }
        with TensorStream(path, self.layout.pattern, metadata) as stream:
            for layer, of_layer in enumerate(pattern):  # one at a time: a pattern of all of them may be gigabytes
                stream.put("pattern", of_layer, layer)

    def finish(self, info: dict[str, Any]) -> None:
        """Give the files their names and write sample.json: from here on the sample is done."""
        self._trajectory.put("unmasked_at", self._unmasked_at)
        self._open.close()
        write_json(self.folder / "sample.json", info)
