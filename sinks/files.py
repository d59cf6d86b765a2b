"""Files that appear whole or not at all: JSON, and tensors written piece by piece."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import psutil
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from sinks.errors import InputError

_SYNC = 16 * 2**20  # bytes: what a stream may leave to be carried to the disk at its end
_DTYPES = {"float16": "F16", "float32": "F32", "int16": "I16", "int32": "I32"}
_REASONS = {
    errno.EACCES: "permission denied",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would pass the size that is allowed",
    errno.ENOSPC: "the disk is full",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.EROFS: "the disk is read-only",
}


@contextmanager
def explained(what: str, path: Path) -> Iterator[None]:
    """Turn an error of the operating system into one line: what could not be done, where, and why."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise InputError(f"cannot {what} {path}: {reason}") from error


def brief(problem: object) -> str:
    """What another library says, or what stands in a file, as a part of one line."""
    text = " ".join(str(problem).split())
    return text if len(text) <= 300 else f"{text[:300]} …"


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` readably and always the same way: sets as sorted lists; NaN is refused, being no JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=sorted) + "\n")


def write_text(path: Path, text: str) -> None:
    """UTF-8, as it is."""
    with explained("write", path), _replacing_file(path) as file:
        file.write(text.encode("utf-8"))


def read_json(path: Path) -> Any:
    """Raises: InputError when the file is missing or broken, or holds what :func:`write_json` never writes."""
    with explained("read", path):
        if path.exists() and not path.is_file():  # a pipe would never end
            raise InputError(f"cannot read {path}: it is no file")
        data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); it may be damaged") from error
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
        return value
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path} is not valid JSON (line {error.lineno}); it may be from an interrupted copy"
        ) from error
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply to be read") from error
    except ValueError as error:  # NaN, an endless number, half of a surrogate pair
        raise InputError(f"{path} is no JSON that can be used: {brief(error)}") from error


@contextmanager
def opened_tensors(path: Path) -> Iterator[Any]:
    """A safetensors file to read from; what is wrong with it becomes an InputError."""
    try:
        with explained("read", path), safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise InputError(
            f"{path} is damaged ({brief(error)}); --resume cannot mend it, make the sample again"
        ) from error


def check_links(folder: Path) -> None:
    """InputError for a link that leads out of a folder: through a stranger's, nothing else is read or written."""
    root, waiting = os.path.realpath(folder), [str(folder)]
    while waiting:
        with explained("read", folder), suppress(FileNotFoundError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    if not Path(os.path.realpath(entry.path)).is_relative_to(root):
                        raise InputError(f"{entry.path} is a link out of {folder}, which is not followed")
                elif entry.is_dir():
                    waiting.append(entry.path)
                elif not entry.is_file():
                    raise InputError(f"{entry.path} is neither a file nor a folder")


class TensorStream:
    """A safetensors file whose tensors are filled slice by slice, so that memory holds one slice at a time.

    Shapes and dtypes are fixed at the start; the file gets its name when the ``with`` block ends well. What was written
    goes to the disk on the way, so that the end has not to wait for all of it.

    Args:
        path: the file to make.
        tensors: name -> (dtype, shape); dtypes float16, float32, int16, int32.
        metadata: strings kept in the file's header.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
    ) -> None:
        self._path = path
        self._tensors = {name: (np.dtype(dtype), shape) for name, (dtype, shape) in tensors.items()}
        self._header, self._offsets = _lay_out(self._tensors, metadata)
        self._pending = 0

    def __enter__(self) -> TensorStream:
        with explained("write", self._path):
            self._replacing = _replacing_file(self._path)
            self._file = self._replacing.__enter__()
            self._file.write(self._header)
        return self

    def __exit__(self, *error: Any) -> None:
        with explained("write", self._path):
            self._replacing.__exit__(*error)

    def put(self, name: str, values: NDArray[Any], index: int | None = None) -> None:
        """Write ``tensors[name][index]``, or the whole tensor without an index; wider floats saturate in 16 bits."""
        dtype, shape = self._tensors[name]
        expected = shape if index is None else shape[1:]
        if values.shape != expected:
            raise ValueError(f"{name} has the shape {values.shape}, expected {expected}")
        data = _cast(values, dtype)
        with explained("write", self._path):
            self._file.seek(self._offsets[name] + (index or 0) * data.nbytes)
            self._file.write(data.data)
            self._pending += data.nbytes
            if self._pending >= _SYNC:
                _sync(self._file)
                self._pending = 0


def _lay_out(
    tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The file's header, and where each tensor begins; widest first, which keeps all of them aligned."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    begins, position = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        end = position + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        entries[name] = {"dtype": _DTYPES[dtype.name], "shape": shape, "data_offsets": [position, end]}
        begins[name], position = position, end
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def _cast(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype == np.float16 and values.dtype != dtype:
        limit = np.finfo(np.float16).max
        values = np.clip(values, -limit, limit)
    return np.ascontiguousarray(values, dtype=dtype.newbyteorder("<"))


@contextmanager
def _replacing_file(path: Path) -> Iterator[BinaryIO]:
    """The same as an open file, which is on the disk before it gets its name."""
    with replacing(path) as temporary, temporary.open("xb") as file:
        yield file
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, which becomes it at the end and vanishes on an error.

    What an interrupted attempt left there is removed first: were it a link, another file would be written.
    """
    temporary = path.with_name(f".{path.name}.part")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Have :func:`alone_in` refuse ``folder``. Several processes may use it at once; a killed one does not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network disk may know no locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def alone_in(folder: Path) -> Iterator[Callable[[], None]]:
    """Refuse when another process is at work in ``folder``; until the end others are refused, or wait in ``in_use``.

    The function that it gives lets the latter in.
    """
    descriptor = os.open(folder, os.O_RDONLY)

    def lock(kind: int) -> None:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder} is being filled by another process; wait for it or stop it first") from None
        except OSError:  # a network disk may know no locks
            pass

    try:
        lock(fcntl.LOCK_EX)
        yield partial(lock, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def ensure_space(folder: Path, need: int) -> None:
    """Refuse when the disk of ``folder`` (it need not exist yet) has less than ``need`` bytes free."""
    with explained("write into", folder):
        free = shutil.disk_usage(existing_part(folder)).free
    if need > free:
        raise InputError(
            f"this run needs {gib(need)}, but {folder} has {gib(free)} free: keep fewer --layers or --heads, "
            "lower --attention_steps, or use another --runs_dir"
        )


def ensure_memory(need: int, what: str) -> None:
    """Refuse when this process cannot get ``need`` more bytes of memory."""
    process = psutil.Process()
    free = psutil.virtual_memory().available
    if hasattr(process, "rlimit"):  # Linux
        limit = process.rlimit(psutil.RLIMIT_AS)[0]
        free = free if limit == psutil.RLIM_INFINITY else min(free, limit - process.memory_info().vms)
    if need > free:
        raise InputError(
            f"{what} take {gib(need)} of memory, but {gib(free)} is free: keep fewer layers or heads, "
            "the mean over heads, or incoming attention only"
        )


def existing_part(path: Path) -> Path:
    """The nearest of ``path`` and its parents that exists."""
    return next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())


def gib(size: int) -> str:
    return f"{max(size / 2**30, 0.001):.3f} GiB"
