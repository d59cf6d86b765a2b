"""Frames into an mp4 or a GIF, one at a time, so that memory does not grow with a film's length."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import imageio_ffmpeg
import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from numpy.typing import NDArray
from PIL import Image
from PIL.GifImagePlugin import getdata

from sinks.errors import InputError
from sinks.files import explained, replacing
from sinks.style import EMPTY, FAINT, INK
from sinks.text_axis import STATES

Array = NDArray[Any]


def ffmpeg_missing() -> str | None:
    """Why no mp4 can be written here; None if one can."""
    try:
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-encoders"]
        encoders = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        return f"ffmpeg cannot be run ({error})"
    return None if "libx264" in encoders else f"{command[0]} has no H.264 encoder (libx264)"


def write_video(frames: Iterable[Array], path: Path, fps: int) -> None:
    """Write frames, one at a time, as H.264 (``.mp4``) or ``.gif``, whole or not at all.

    Args:
        frames: uint8 (H, W, 3), all of one size; an odd height or width is padded by its last row or column.
        path: its suffix says which format.
        fps: frames a second; a GIF rounds their duration to 0.01 s.
    """
    writers = {".mp4": _write_mp4, ".gif": _write_gif}
    if path.suffix not in writers:
        raise InputError(f"{path} cannot be written: the name of a film ends in {' or '.join(writers)}")
    if fps < 1:
        raise InputError(f"fps is {fps}; it must be at least 1")
    frames = iter(frames)
    first = next(frames, None)
    if first is None:
        raise ValueError("there are no frames")
    with explained("write", path), replacing(path) as temporary:
        writers[path.suffix](_even(chain([first], frames), first.shape), first.shape, temporary, fps)


def _even(frames: Iterable[Array], shape: tuple[int, ...]) -> Iterator[Array]:
    padding = [(0, shape[0] % 2), (0, shape[1] % 2), (0, 0)]
    for frame in frames:
        if frame.dtype != np.uint8 or frame.shape != shape or frame.shape[2:] != (3,):
            raise ValueError(f"a frame is {frame.dtype} {frame.shape}, expected uint8 {shape} with three colours")
        yield np.pad(frame, padding, mode="edge")


def _write_mp4(frames: Iterator[Array], shape: tuple[int, ...], path: Path, fps: int) -> None:
    reason = ffmpeg_missing()
    if reason is not None:
        raise InputError(f"the mp4 cannot be written: {reason}; a GIF needs no ffmpeg")
    size = f"{shape[1] + shape[1] % 2}x{shape[0] + shape[0] % 2}"
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(fps), "-i", "-"]
    colours = ["-vf", "scale=out_color_matrix=bt709:out_range=tv", "-colorspace", "bt709", "-color_primaries", "bt709"]
    encoder = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "16", "-pix_fmt", "yuv420p"]
    target = [*colours, "-color_trc", "bt709", *encoder]
    container = ["-movflags", "+faststart", "-f", "mp4"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *source, *target, *container]
    with TemporaryFile() as said:
        with subprocess.Popen([*command, str(path)], stdin=subprocess.PIPE, stderr=said) as process:
            try:
                _feed(frames, process.stdin)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            said.seek(0)
            reason = said.read().decode(errors="replace").strip()
            raise InputError(f"the mp4 cannot be written: ffmpeg says {reason}")


def _feed(frames: Iterator[Array], pipe: IO[bytes] | None) -> None:
    assert pipe is not None
    with suppress(BrokenPipeError), pipe:  # when ffmpeg stops early, it says why
        for frame in frames:
            pipe.write(frame.tobytes())


def _write_gif(frames: Iterator[Array], shape: tuple[int, ...], path: Path, fps: int) -> None:
    palette = Image.new("P", (1, 1))
    palette.putpalette(_gif_palette())
    with path.open("wb") as file:
        height, width = (size + size % 2 for size in shape[:2])
        file.write(b"GIF89a" + struct.pack("<HHBBB", width, height, 0xF7, 0, 0) + _gif_palette())
        file.write(b"\x21\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00")  # for ever
        for frame in frames:
            image = Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE)
            file.writelines(getdata(image, duration=max(20, round(1000 / fps))))
        file.write(b";")


@cache
def _gif_palette() -> bytes:
    """256 colours for all frames: those of our scales and signs, greys, and a cube of all others."""
    scales = [matplotlib.colormaps[name](np.linspace(0, 1, 80))[:, :3] for name in ("cividis", "viridis")]
    signs = [to_rgb(colour) for colour in (*STATES.values(), INK, FAINT, EMPTY)]
    greys = np.repeat(np.linspace(0, 1, 18)[1:-1, None], 3, axis=1)
    colours = np.concatenate([*scales, signs, greys, list(product(np.linspace(0, 1, 4), repeat=3))])
    return np.round(255 * np.pad(colours, [(0, 256 - len(colours)), (0, 0)])).astype(np.uint8).tobytes()
