"""Films: their size, their scale, what is marked in every frame, and files that other programs can read."""

from __future__ import annotations

import gc
import logging
import warnings
import weakref
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import imageio.v2 as imageio
import imageio_ffmpeg
import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image, ImageSequence

from sinks import frames as frames_module
from sinks import style
from sinks.errors import InputError
from sinks.frames import current_block, frame, incoming_frames, pattern_frames
from sinks.runs import Array
from sinks.style import save
from sinks.text_axis import STATES, TextAxis
from sinks.video import ffmpeg_missing, write_video

needs_ffmpeg = pytest.mark.skipif(ffmpeg_missing() is not None, reason=str(ffmpeg_missing()))


def text_axis(length: int, prompt: int = 0, block: int | None = None) -> TextAxis:
    """Filled from left to right, one token a step."""
    at = np.arange(length) - prompt
    return TextAxis([f"w{j}" for j in range(length)], prompt, block, np.where(at < 0, -1, at))


def read(path: Path) -> list[Array]:
    """All frames; iterating, for ``list(reader)`` asks for a length that is infinite."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # imageio leaves the pipes of ffmpeg to the collector
        reader: Any = imageio.get_reader(path)
        frames = [np.asarray(image)[..., :3] for image in reader]
        reader.close()
        del reader
        gc.collect()
    return frames


def colours_in(image: Array) -> set[tuple[int, ...]]:
    return {tuple(colour) for colour in np.unique(image.reshape(-1, 3), axis=0).tolist()}


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(round(255 * part) for part in to_rgb(colour))


class Scenes:
    """Keeps the scene that the frames are drawn with, to look into it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        for name in ("_incoming_scene", "_pattern_scene"):
            monkeypatch.setattr(frames_module, name, self._keeping(getattr(frames_module, name)))

    def _keeping(self, build: Any) -> Any:
        def keep(*arguments: Any) -> Any:
            self.made.append(build(*arguments))
            return self.made[-1]

        return keep

    def bar_texts(self) -> list[str]:
        bar = self.made[-1]._figure.axes[0]
        return [bar.get_xlabel(), *(label.get_text() for label in bar.get_xticklabels())]

    def header(self) -> str:
        return str(self.made[-1]._header.get_text())


@pytest.fixture
def scenes(monkeypatch: pytest.MonkeyPatch) -> Scenes:
    return Scenes(monkeypatch)


# Files


@style.house_style()
def growing_label(number: int) -> Figure:
    """One of 12 figures whose y-labels grow from "1" to "10" to "100"."""
    figure = style.new_figure(3.0, 2.0, f"step {number}")
    axis = figure.subplots()
    axis.plot([0, 1], [0, 10 ** (number // 4)])
    axis.set_yticks([10 ** (number // 4)])
    return figure


@needs_ffmpeg
def test_tight_boxes_and_growing_labels_change_no_frame_size(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("savefig.bbox: tight\n")
    with matplotlib.rc_context(fname=str(tmp_path / "matplotlibrc")):
        figures = [growing_label(number) for number in range(12)]
        write_video((frame(figure) for figure in figures), tmp_path / "a.mp4", fps=12)
        save(figures[0], tmp_path / "first.png", "")
        save(figures[-1], tmp_path / "last.png", "")
    frames = read(tmp_path / "a.mp4")
    assert {image.shape for image in frames} == {(400, 600, 3)} and len(frames) == 12
    for image, name in ((frames[0], "first"), (frames[-1], "last")):
        alone = np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB"), dtype=float)
        assert np.abs(image - alone).mean() < 8
    assert np.abs(frames[0].astype(float) - frames[-1]).mean() > 0.5  # and they differ


def square(count: int = 12, height: int = 615, width: int = 721) -> Iterator[Array]:
    for _ in range(count):
        image = np.full((height, width, 3), 255, dtype=np.uint8)
        image[200:300, 300:400] = (213, 94, 0)
        yield image


@needs_ffmpeg
def test_odd_sizes_are_padded_not_scaled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        write_video(square(), tmp_path / "a.mp4", fps=12)
    assert caplog.records == []
    frames = read(tmp_path / "a.mp4")
    assert [image.shape for image in frames] == [(616, 722, 3)] * 12
    dark = frames[5][..., 2] < 128
    rows, columns = np.flatnonzero(dark.any(1)), np.flatnonzero(dark.any(0))
    assert (rows[0], rows[-1], columns[0], columns[-1]) == pytest.approx((200, 299, 300, 399), abs=1)
    assert frames[5][250, 350].tolist() == pytest.approx([213, 94, 0], abs=6)


@needs_ffmpeg
def test_mp4_is_h264_that_every_player_shows(tmp_path: Path) -> None:
    write_video(square(25, 64, 64), tmp_path / "a.mp4", fps=25)
    reader = imageio_ffmpeg.read_frames(tmp_path / "a.mp4")
    facts = next(reader)
    reader.close()
    assert facts["codec"] == "h264" and facts["pix_fmt"].startswith("yuv420p")
    assert facts["fps"] == 25 and facts["duration"] == pytest.approx(1.0, abs=0.05)


def test_gif_has_every_frame_and_one_palette(tmp_path: Path) -> None:
    colours = [rgb(colour) for colour in (style.FILLING, STATES["filled"], "white")]
    write_video((np.full((5, 7, 3), colour, np.uint8) for colour in colours), tmp_path / "a.gif", fps=10)
    with Image.open(tmp_path / "a.gif") as film:
        assert film.info["duration"] == 100 and film.info["loop"] == 0
        frames = [np.asarray(image.convert("RGB")) for image in ImageSequence.Iterator(film)]
    assert [image.shape for image in frames] == [(6, 8, 3)] * 3
    assert [colours_in(image) for image in frames] == [{colour} for colour in colours]


@pytest.mark.parametrize("suffix", ["gif", pytest.param("mp4", marks=needs_ffmpeg)])
def test_frames_are_taken_one_at_a_time(suffix: str, tmp_path: Path) -> None:
    seen: list[weakref.ref[Array]] = []

    def frames() -> Iterator[Array]:
        for _ in range(50):
            image = np.zeros((64, 64, 3), np.uint8)
            seen.append(weakref.ref(image))
            yield image
            assert sum(frame() is not None for frame in seen) <= 3

    write_video(frames(), tmp_path / f"a.{suffix}", fps=10)
    assert len(seen) == 50


@pytest.mark.parametrize("suffix", ["gif", pytest.param("mp4", marks=needs_ffmpeg)])
def test_frames_of_two_sizes_are_refused_and_leave_the_old_film(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="expected uint8"):
        write_video([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 6, 3), np.uint8)], path, fps=10)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("name", "fps"), [("a.avi", 10), ("a.gif", 0), ("no folder/a.gif", 10)])
def test_films_that_cannot_be_written(name: str, fps: int, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        write_video(square(1), tmp_path / name, fps)
    assert list(tmp_path.iterdir()) == []


def test_no_frames(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no frames"):
        write_video([], tmp_path / "a.gif", 10)


def test_without_ffmpeg_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "missing"))
    reason = ffmpeg_missing()
    assert reason is not None and str(tmp_path / "missing") in reason
    with pytest.raises(InputError, match="a GIF needs no ffmpeg"):
        write_video(square(2), tmp_path / "a.mp4", 10)
    write_video(square(2), tmp_path / "a.gif", 10)
    assert [path.name for path in tmp_path.iterdir()] == ["a.gif"]


def test_an_ffmpeg_without_h264_is_no_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "ffmpeg"
    fake.write_text("#!/bin/sh\necho ' V..... mpeg4'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(fake))
    assert ffmpeg_missing() == f"{fake} has no H.264 encoder (libx264)"


def test_what_ffmpeg_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "ffmpeg"
    fake.write_text("#!/bin/sh\n[ $2 = -encoders ] && echo libx264 && exit 0\necho 'no space' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(fake))
    with pytest.raises(InputError, match="ffmpeg says no space"):
        write_video(square(), tmp_path / "a.mp4", 10)
    assert list(tmp_path.iterdir()) == [fake]


# Incoming attention


def picture_of(image: Array, scene: Any) -> Array:
    """The part of a frame that holds the picture."""
    box = scene.image.axes.bbox
    height = image.shape[0]
    return image[round(height - box.y1) : round(height - box.y0), round(box.x0) : round(box.x1)]


def cell(image: Array, scene: Any, row: int, column: int) -> tuple[int, ...]:
    x, y = scene.image.axes.transData.transform((column, row))
    return tuple(image[int(image.shape[0] - y), int(x)].tolist())


def three_maxima() -> Array:
    """(3, 1, 4): maxima 1, 10, 100, and a 5 at the same place in all of them but the first."""
    return np.array([[[1, 1, 1, 1]], [[10, 5, 1, 1]], [[1, 5, 100, 1]]], dtype=float)


def test_one_scale_holds_and_is_printed(scenes: Scenes) -> None:
    first, second, third = incoming_frames(three_maxima(), ["layer 0"], text_axis(4), "title", range(3))
    (scene,) = scenes.made
    assert scenes.bar_texts()[0].endswith("log scale from 1 to 100, the same in all frames")
    assert scenes.bar_texts()[1:3] == ["≤ 1", "max 100"]
    assert first.dtype == np.uint8 and first.shape == second.shape == third.shape
    assert cell(second, scene, 0, 1) == cell(third, scene, 0, 1)
    assert cell(first, scene, 0, 0) == cell(third, scene, 0, 0) == (0, 34, 77)
    assert cell(second, scene, 0, 0) == pytest.approx((124, 123, 120), abs=2)  # half of the log scale
    assert cell(third, scene, 0, 2) == (253, 231, 55)
    bar = first.shape[0] - int(scene._figure.axes[0].bbox.y0) - 2
    assert np.array_equal(first[bar:], third[bar:])  # the colour bar and all below


def test_each_frame_gets_its_own_scale_only_on_request(scenes: Scenes) -> None:
    frames = incoming_frames(three_maxima(), ["layer 0"], text_axis(4), "", range(3), per_frame_scale=True)
    brightest = []
    for maximum, place, image in zip(("1.5", "10", "100"), (0, 0, 2), frames, strict=True):
        assert scenes.bar_texts()[0].endswith(f"log scale from 1 to {maximum}, of this frame only")
        assert f"max {maximum}" in scenes.bar_texts()
        brightest.append(cell(image, scenes.made[0], 0, place))
    assert brightest == [(0, 34, 77), (253, 231, 55), (253, 231, 55)]


def test_a_forced_scale_holds(scenes: Scenes) -> None:
    image = next(incoming_frames(three_maxima(), ["layer 0"], text_axis(4), "", range(3), scale=(1, 1000)))
    assert scenes.bar_texts()[1:3] == ["≤ 1", "≥ 1000"]
    assert cell(image, scenes.made[0], 0, 0) == (0, 34, 77)


def test_rows_and_steps_are_not_mixed_up(scenes: Scenes) -> None:
    c = np.ones((3, 2, 5))
    for t, row in np.ndindex(3, 2):
        c[t, row, (t + 2 * row) % 5] = 50
    frames = list(incoming_frames(c, ["a", "b"], text_axis(5), "", range(3)))
    for t, image in enumerate(frames):
        bright = [
            [column for column in range(5) if cell(image, scenes.made[0], row, column) == (253, 231, 55)]
            for row in range(2)
        ]
        assert bright == [[t], [(t + 2) % 5]]


def test_band_block_and_header_follow_the_step(scenes: Scenes) -> None:
    text = text_axis(7, prompt=2, block=2)  # blocks 2-3, 4-5 and 6
    frames = incoming_frames(np.ones((6, 1, 7)), ["layer 0"], text, "", range(6))
    prompt, filled, masked, new = range(4)
    bands = {0: [new, masked, masked, masked, masked], 3: [filled, filled, filled, new, masked]}
    blocks = {0: (1.5, 2), 3: (3.5, 2)}
    said = {
        0: "denoising step 0 · block 1 of 3 · 0 of 5 answer tokens filled",
        3: "denoising step 3 · block 2 of 3 · 3 of 5 answer tokens filled",
    }
    colours = [rgb(colour) for colour in STATES.values()]
    for t, _ in enumerate(frames):
        if t in said:
            scene = scenes.made[0]
            band = scene._bands[0].get_array()[0].tolist()
            assert [colours.index(tuple(pixel)) for pixel in band] == [prompt, prompt, *bands[t]]
            assert (scene._block.get_x(), scene._block.get_width()) == blocks[t]
            assert scene._new.get_xdata().tolist() == [2 + t]
            assert scenes.header() == said[t]
    assert scenes.header() == "denoising step 5 · 5 of 5 answer tokens filled"  # no block is left


def test_true_step_numbers_count(scenes: Scenes) -> None:
    list(incoming_frames(np.ones((2, 1, 9)), ["layer 0"], text_axis(9), "", [0, 8]))
    assert scenes.header() == "denoising step 8 · 8 of 9 answer tokens filled"


def test_marks_are_in_the_pixels(scenes: Scenes) -> None:
    text = text_axis(6, prompt=2, block=2)
    image = next(incoming_frames(np.ones((1, 1, 6)), ["layer 0"], text, "", [0]))
    assert rgb(style.FILLING) in colours_in(picture_of(image, scenes.made[0]))  # the frame around the block
    above = image[: image.shape[0] - int(scenes.made[0].image.axes.bbox.y1)]
    states = [rgb(STATES[name]) for name in ("prompt", "still masked", "filled at this step")]
    assert colours_in(above).issuperset(states)


@pytest.mark.parametrize(("step", "block"), [(0, (0, 2, 5)), (2, (0, 2, 5)), (3, (1, 5, 7)), (4, (1, 5, 7)), (5, None)])
def test_current_block_by_hand(step: int, block: tuple[int, int, int] | None) -> None:
    text = text_axis(7, prompt=2, block=3)
    assert current_block(text, step) == block
    assert current_block(TextAxis(text.labels, 2, None, text.unmasked_at), step) is None


def test_missing_keys_are_grey(scenes: Scenes) -> None:
    c = np.array([[[1.0, np.nan]]])
    image = next(incoming_frames(c, ["layer 0"], text_axis(2), "", [0]))
    assert cell(image, scenes.made[0], 0, 1) == rgb(style.EMPTY)


def test_tokens_that_no_font_has_give_one_warning_not_one_a_frame(
    scenes: Scenes, caplog: pytest.LogCaptureFixture
) -> None:
    style._say_once_that_glyphs_are_missing.cache_clear()
    tokens = ["$", "$$", "\n", "_x^", "Ġthe", "中", "𓀀", "<|mask|>", " "]  # few machines have hieroglyphs
    text = TextAxis(tokens, 0, None, np.arange(9))
    with caplog.at_level(logging.WARNING):
        frames = list(incoming_frames(np.ones((5, 1, 9)), ["$layer$ 𓀀"], text, "𓀀", range(5)))
    assert len(frames) == 5 and len(caplog.records) == 1
    labels = [label.get_text() for label in scenes.made[0].image.axes.get_xticklabels()]
    assert len(set(labels)) == 9 and labels[0] == "0: $" and labels[6] == r"6: \u13000"


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (32, 400), (64, 2048)])
def test_frames_of_all_sizes_are_whole(rows: int, length: int, scenes: Scenes) -> None:
    c = np.ones((1, rows, length))
    c[0, 0, length // 2] = 9
    names = [f"layer {row}" for row in range(rows)]
    image = next(incoming_frames(c, names, text_axis(length, length // 4, 32), "title", [0]))
    for edge in (image[0], image[-1], image[:, 0], image[:, -1]):
        assert colours_in(edge) == {(255, 255, 255)}
    assert (253, 231, 55) in colours_in(picture_of(image, scenes.made[0]))
    assert max(image.shape) <= 1500


def test_a_frame_is_drawn_quickly() -> None:
    c = np.ones((256, 32, 400), dtype=np.float32)
    names = [f"layer {row}" for row in range(32)]
    frames = incoming_frames(c, names, text_axis(400, 100, 32), "", range(256))
    next(frames)  # draws all that does not move
    seconds = []
    for _ in range(10):
        start = perf_counter()
        next(frames)
        seconds.append(perf_counter() - start)
    assert min(seconds) < 0.1  # 0.045 on one core that does nothing else


# Patterns


def patterns(count: int, length: int) -> Iterator[Array]:
    """All queries look at one key, 0, 1, … by step, with weights 1, 1/2, 1/3, …"""
    for t in range(count):
        pattern = np.zeros((length, length))
        pattern[:, t] = 1 / (t + 1)
        yield pattern


def label_texts(labels: Sequence[Any]) -> list[str]:
    return [label.get_text() for label in labels]


def test_pattern_frames_keep_the_scale_and_name_mask_tokens(scenes: Scenes) -> None:
    text = text_axis(4, prompt=1)
    viridis = matplotlib.colormaps["viridis"]
    for t, image in enumerate(pattern_frames(patterns(3, 4), text, "title", range(3), 1.0, text.masked)):
        (scene,) = scenes.made
        colour = [int(part) for part in viridis(np.sqrt(1 / (t + 1)), bytes=True)[:3]]
        assert cell(image, scene, 2, t) == pytest.approx(colour, abs=2)
        assert cell(image, scene, 2, 3) == (68, 1, 84)
        shown = [f"{j}: [MASK]" if j > t else f"{j}: w{j}" for j in range(4)]
        assert label_texts([label for _, label in scene._labels]) == [*shown[1:], *shown[1:]]
        assert scenes.header() == f"denoising step {t} · {t} of 3 answer tokens filled"
    assert "square-root scale from 0 to 1, the same in all frames" in scenes.bar_texts()[0]


def test_labels_of_mask_tokens_change_in_the_pixels() -> None:
    text = text_axis(3)
    masked = rgb(STATES["still masked"])
    same = [np.full((3, 3), 1 / 3)] * 4
    frames = pattern_frames(same, text, "", range(4), 1.0, text.masked)
    counts = [int((image == masked).all(-1).sum()) for image in frames]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]
    assert len(set(counts)) >= 3


def test_patterns_are_asked_for_one_at_a_time() -> None:
    asked = []

    def lazily() -> Iterator[Array]:
        for t, pattern in enumerate(patterns(8, 8)):
            asked.append(t)
            yield pattern

    text = text_axis(8)
    taken = list(islice(pattern_frames(lazily(), text, "", range(8), 1.0, text.masked), 2))
    assert len(taken) == 2 and asked == [0, 1]


@pytest.mark.parametrize("length", [1, 24, 400, 2048])
def test_pattern_frames_of_all_sizes_are_whole(length: int, scenes: Scenes) -> None:
    text, pattern = text_axis(length, length // 4, 32), np.zeros((length, length), dtype=np.float32)
    pattern[:, length // 3] = 0.5
    image = next(pattern_frames([pattern], text, "title", [0], 0.5, text.masked))
    for edge in (image[0], image[-1], image[:, 0], image[:, -1]):
        assert colours_in(edge) == {(255, 255, 255)}
    assert (253, 231, 36) in colours_in(picture_of(image, scenes.made[0]))  # one column survives the reduction


def test_settings_of_the_caller_are_left_alone_between_frames() -> None:
    with matplotlib.rc_context({"font.size": 30}):
        frames = incoming_frames(np.ones((2, 1, 3)), ["a"], text_axis(3), "", range(2))
        first = next(frames)
        assert matplotlib.rcParams["font.size"] == 30
    plain = next(incoming_frames(np.ones((2, 1, 3)), ["a"], text_axis(3), "", range(2)))
    assert np.array_equal(first, plain)
