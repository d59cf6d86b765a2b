"""Files appear whole or not at all, and a tensor stream is an ordinary safetensors file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import load_file

from sinks import files
from sinks.errors import InputError
from sinks.files import TensorStream, alone_in, ensure_space, in_use, read_json, write_json


@given(
    st.lists(
        st.sampled_from(["float16", "float32", "int16", "int32"]).flatmap(
            lambda dtype: arrays(dtype, array_shapes(max_dims=3, max_side=4, min_side=0))
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_stream_is_a_safetensors_file(tmp_path_factory: pytest.TempPathFactory, values: list[np.ndarray]) -> None:
    path = tmp_path_factory.mktemp("stream") / "x.safetensors"
    with TensorStream(path, {f"t{i}": (v.dtype.name, v.shape) for i, v in enumerate(values)}, {"a": "b"}) as stream:
        for i, value in enumerate(values):
            for row in reversed(range(len(value))):
                stream.put(f"t{i}", value[row], row)
    read = load_file(path)
    for i, value in enumerate(values):
        np.testing.assert_array_equal(read[f"t{i}"], value)


def test_a_stream_saturates_what_16_bits_cannot_hold(tmp_path: Path) -> None:
    with TensorStream(tmp_path / "x", {"x": ("float16", (4,))}, {}) as stream:
        stream.put("x", np.array([1e6, -np.inf, 65504.0, np.nan], np.float32))
    np.testing.assert_array_equal(load_file(tmp_path / "x")["x"], np.array([65504, -65504, 65504, np.nan], np.float16))


def test_a_stream_refuses_another_shape(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"x has the shape \(3,\), expected \(2,\)"),
        TensorStream(tmp_path / "x", {"x": ("int32", (4, 2))}, {}) as stream,
    ):
        stream.put("x", np.zeros(3), 0)
    assert list(tmp_path.iterdir()) == []


def test_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 2**30})
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage)
    ensure_space(tmp_path / "not" / "yet", 2**30)
    with pytest.raises(InputError, match=r"needs 97\.000 GiB, but .* has 1\.000 GiB free"):
        ensure_space(tmp_path / "not" / "yet", 97 * 2**30)


def test_a_folder_has_one_launch(tmp_path: Path) -> None:
    refused = pytest.raises(InputError, match="is being filled by another process")
    with alone_in(tmp_path) as let_others_in:
        with refused, alone_in(tmp_path):
            pass
        let_others_in()
        with in_use(tmp_path), refused, alone_in(tmp_path):
            pass
    with in_use(tmp_path), refused, alone_in(tmp_path):  # the first process of a launch died, another lives
        pass
    with alone_in(tmp_path):
        pass


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"b": "ä", "a": 1})
    assert path.read_text(encoding="utf-8") == '{\n  "b": "ä",\n  "a": 1\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, float("nan"))
    assert read_json(path) == {"b": "ä", "a": 1}
    assert list(tmp_path.iterdir()) == [path]
