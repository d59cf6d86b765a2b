"""The report page: what is packed, what the browser makes of it, and that it counts the sinks that detect finds."""

from __future__ import annotations

import base64
import gzip
import json
import re
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import launched, opened
from numpy.typing import NDArray
from synthetic_runs import MASK, planted, write_run

import sinks
from sinks.errors import InputError
from sinks.report import (
    FLOORS,
    Size,
    Thinning,
    choose_thinning,
    count_kept,
    kept,
    means,
    pack,
    packed_bytes,
    write_report,
)
from sinks.runs import Run, create_run, update_states
from sinks.writer import Layout, SampleWriter

Array = NDArray[Any]

STEPS, LAYERS, HEADS, LENGTH = 6, 3, 4, 16
MANY = [0.0, 0.35, 1.0, 2.5, 3.0, 7.0]  # epsilons


def heavy(steps: int = STEPS, length: int = LENGTH, seed: int = 0, layers: int = LAYERS, heads: int = HEADS) -> Array:
    """Random incoming attention (T, L, H, S) with mean 1, some of it strong; another number of sinks in every head."""
    rows = np.exp(1.3 * np.random.default_rng(seed).normal(size=(steps, layers, heads, length)))
    return (rows / rows.mean(-1, keepdims=True)).astype(np.float32)


def growing() -> Array:
    """As of an autoregressive model: position 4 + t and all later ones are no keys yet at step t."""
    incoming = heavy()
    for t in range(STEPS):
        incoming[t, :, :, 4 + t :] = np.nan
    return incoming


def run_of(folder: Path, *incoming: Array, **options: Any) -> Run:
    return Run(write_run(folder, incoming=incoming or [heavy()], **options))


def report_of(folder: Path, run: Run, **options: Any) -> Path:
    write_report(run, folder / "report.html", run.samples, **options)
    return folder / "report.html"


def read_report(file: Path) -> tuple[dict[str, Any], list[list[dict[str, Array]]]]:
    """What a page carries: its JSON, and of each run and sample the arrays, flat."""
    scripts = dict(re.findall(r'<script type="[a-z/]+" id="([a-z0-9-]+)">(.*?)</script>', file.read_text("utf-8")))
    report = json.loads(scripts["report"])
    arrays = []
    for samples in report["samples"]:
        blobs = [gzip.decompress(base64.b64decode(scripts[about["data"]])) for about in samples]
        arrays.append(
            [
                {
                    name: np.frombuffer(blob, f"<{np.dtype(kind).str[1:]}", size, start)
                    for name, (kind, start, size) in about["arrays"].items()
                }
                for about, blob in zip(samples, blobs, strict=True)
            ]
        )
    return report, arrays


# What is kept


def test_steps_kept_have_the_first_and_the_last() -> None:
    assert Thinning(1).steps(4) == [0, 1, 2, 3]
    assert Thinning(3).steps(9) == [0, 3, 6, 8]
    assert Thinning(8).steps(9) == [0, 8]
    assert Thinning(5).steps(1) == [0]


def test_thinning_says_what_is_left_out() -> None:
    assert Thinning().stated(9) == "All 9 steps. All keys of all heads."
    assert Thinning(1, 0.5).stated(9) == (
        "All 9 steps. Means are complete; of single heads the file keeps keys more than 0.5 above the mean of the "
        "others, and always the strongest."
    )
    assert Thinning(3, 3.0).stated(9).startswith("Thinned to 4 of 9 steps. Means are complete; ")


def test_packed_bytes_by_hand() -> None:
    size = Size(steps=2, layers=1, heads=2, length=10)
    a_step = 4 + 40 + 2 * 10 * 2 + 10 * 4  # its number; ids; the mean and that of the layer; totals and key counts
    assert packed_bytes(size, 2, None) == 80 + 2 * (a_step + 2 * 2 * 10)
    assert packed_bytes(size, 2, 7) == 80 + 2 * (a_step + 2 * 2) + 4 * 7
    blocking = Size(steps=2, layers=1, heads=2, length=10, blocking=True)
    assert packed_bytes(blocking, 2, 7) == packed_bytes(size, 2, 7) + 2 * 2 * 2


def test_ladder_by_hand() -> None:
    size = Size(steps=5, layers=1, heads=2, length=100)
    kept_keys = np.array([[50] * 5, [40] * 5, [30] * 5, [20] * 5, [9, 11, 12, 13, 10]])
    rungs = {
        Thinning(): packed_bytes(size, 5, None),
        Thinning(1, 0.0): packed_bytes(size, 5, 250),
        Thinning(1, 0.5): packed_bytes(size, 5, 200),
        Thinning(1, 1.0): packed_bytes(size, 5, 150),
        Thinning(1, 2.0): packed_bytes(size, 5, 100),
        Thinning(1, 3.0): packed_bytes(size, 5, 55),
        Thinning(2, 3.0): packed_bytes(size, 3, 9 + 12 + 10),  # steps 0, 2, 4
        Thinning(4, 3.0): packed_bytes(size, 2, 9 + 10),
    }
    for thinning, need in rungs.items():
        assert choose_thinning(size, kept_keys, need) == thinning
    for (_, need), gentler in zip(list(rungs.items())[:-2], list(rungs)[1:], strict=False):
        assert choose_thinning(size, kept_keys, need - 1) == gentler
    with pytest.raises(InputError, match=r"does not fit into 0.0 MB, not even two of its steps"):
        choose_thinning(size, kept_keys, min(rungs.values()) - 1)


def test_kept_keys_pass_the_floor_or_are_the_strongest() -> None:
    c = np.array([[1, 5, 1, 2, 1], [1, 1, 1, 1, 1], [np.nan, 4, np.nan, np.nan, np.nan], [np.nan] * 5])
    assert kept(c, 0.5).tolist() == [
        [False, True, False, False, False],  # 2 is below the mean of the others, 2, plus 0.5
        [True, False, False, False, False],
        [False, True, False, False, False],
        [False] * 5,
    ]
    assert kept(c, 3.9)[0].tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("incoming", [heavy(), growing(), np.ones((2, 3, 4, 5), dtype=np.float32)])
def test_count_kept_counts_what_is_kept(incoming: Array) -> None:
    for step in incoming:
        assert count_kept(step) == [int(kept(step, floor).sum()) for floor in FLOORS]


def test_means_are_rounded_means_of_rounded_values() -> None:
    incoming = np.array([[[1.0, 3.0], [2.0, np.nan]], [[4.0, 0.1], [1.0, 0.2]]], dtype=np.float32)
    tenths = (np.float64(np.float16(0.1)) + np.float64(np.float16(0.2))) / 2
    expected = np.array([[2.0, np.nan], [1.5, np.nan], [2.5, tenths]]).astype(np.float16)
    np.testing.assert_array_equal(means(incoming), expected)


# What is packed


@pytest.mark.parametrize("incoming", [heavy(), growing()], ids=["full", "growing"])
def test_everything_comes_back_from_a_page(tmp_path: Path, incoming: Array) -> None:
    run = run_of(tmp_path, incoming)
    sample = run.samples[0]
    about, [[arrays]] = read_report(report_of(tmp_path, run))
    assert about["samples"][0][0]["floor"] is None
    assert arrays["steps"].tolist() == list(range(STEPS))
    values = arrays["values"].reshape(STEPS, LAYERS, HEADS, LENGTH)
    np.testing.assert_array_equal(values, incoming.astype(np.float16))
    np.testing.assert_array_equal(arrays["tokens"].reshape(STEPS, LENGTH), sample.tokens()[:-1])
    np.testing.assert_array_equal(arrays["final"], sample.tokens(-1))
    np.testing.assert_array_equal(arrays["filled_at"], sample.unmasked_at)
    rows = 1 + LAYERS + LAYERS * HEADS
    totals, keys = arrays["totals"].reshape(STEPS, rows), arrays["keys"].reshape(STEPS, rows)
    mean_rows = np.stack([means(step) for step in incoming])
    np.testing.assert_array_equal(arrays["means"].reshape(STEPS, 1 + LAYERS, LENGTH), mean_rows)
    judged = np.concatenate([mean_rows, values.reshape(STEPS, -1, LENGTH)], axis=1)
    np.testing.assert_array_equal(totals, np.nansum(judged.astype(np.float64), axis=-1))
    np.testing.assert_array_equal(keys, (~np.isnan(judged)).sum(-1))
    assert "blocked" not in arrays


def test_thinned_values_are_the_kept_keys(tmp_path: Path) -> None:
    sample = run_of(tmp_path).samples[0]
    arrays = pack(sample, Thinning(every=2, floor=1.0))
    assert arrays["steps"].tolist() == [0, 2, 4, 5]
    ends = np.cumsum(arrays["counts"])
    for at, (t, layer, head) in enumerate((t, i, h) for t in (0, 2, 4, 5) for i in range(LAYERS) for h in range(HEADS)):
        c = sample.incoming(t, layer, head)
        where = np.flatnonzero(kept(c, 1.0))
        part = slice(ends[at] - len(where), ends[at])
        assert arrays["positions"][part].tolist() == where.tolist()
        assert arrays["values"][part].tolist() == c[where].tolist()
    assert len(arrays["values"]) == ends[-1]


@pytest.mark.parametrize("thinning", [Thinning(), Thinning(1, 0.5), Thinning(2, 3.0)], ids=str)
def test_packed_bytes_are_those_of_the_arrays(tmp_path: Path, thinning: Thinning) -> None:
    arrays = pack(run_of(tmp_path).samples[0], thinning)
    steps, keys = len(thinning.steps(STEPS)), None if thinning.floor is None else len(arrays["positions"])
    size = Size(STEPS, LAYERS, HEADS, LENGTH)
    assert sum(array.nbytes for array in arrays.values()) == packed_bytes(size, steps, keys)


def test_budget_holds_for_the_whole_file_and_is_used(tmp_path: Path) -> None:
    incoming = [heavy(steps=40, length=200, seed=seed) for seed in (0, 1)]
    run = run_of(tmp_path, *incoming)
    generous = write_report(run, tmp_path / "report.html", run.samples)
    size = (tmp_path / "report.html").stat().st_size
    assert generous == [Thinning(), Thinning()]
    assert write_report(run, tmp_path / "report.html", run.samples, budget=int(1.1 * size)) == generous
    uncompressed = 2 * packed_bytes(Size(40, LAYERS, HEADS, 200), 40, None) * 4 / 3
    assert 1.1 * size < uncompressed  # what gzip gains is used
    seen = set()
    for budget in range(size, 110_000, -20_000):
        thinnings = write_report(run, tmp_path / "report.html", run.samples, budget=budget)
        assert (tmp_path / "report.html").stat().st_size <= budget
        seen |= set(thinnings)
    assert {Thinning(1, 0.5), Thinning(1, 2.0)} < seen
    assert any(thinning.every > 1 for thinning in seen)


def test_full_size_sample_fits_by_thinning() -> None:
    """600 tokens, 256 steps, 32 layers of 32 heads in 25 MB: 4 kept keys a head do, all keys are 17 times too many."""
    size, room = Size(256, 32, 32, 600), 25_000_000 * 3 // 4 - 100_000
    assert packed_bytes(size, 256, None) == 2400 * 2 + 256 * (4 + 2400 + 1200 * 33 + 10 * 1057 + 1200 * 1024)
    kept_keys = np.array([[1024 * keys] * 256 for keys in (120, 60, 20, 8, 4)])
    assert choose_thinning(size, kept_keys, room) == Thinning(1, 3.0)
    assert choose_thinning(size, kept_keys * 2, room) == Thinning(2, 3.0)


@pytest.mark.long
def test_full_size_build(tmp_path: Path) -> None:
    sample_of_full_size(tmp_path / "full")
    run = Run(tmp_path / "full")
    file = report_of(tmp_path, run)
    assert file.stat().st_size <= 25_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1_000_000  # KiB


def sample_of_full_size(path: Path) -> None:
    steps, length, count = 256, 600, 32
    spec, sampling = {"attention": "full", "mask_token_id": MASK}, {"gen_len": 256, "block_len": 32}
    samples = [{"index": 0, "id": "0", "state": "missing"}]
    manifest = {"model": "large", "sampling": sampling, "spec": spec, "samples": samples}
    run = create_run(path.parent, path.name, manifest)
    layout = Layout(steps, length, range(count), range(count), count, count)
    tokens = np.arange(length, dtype=np.int32)
    writer = SampleWriter(run, 0, layout, tokens)
    for t in range(steps):
        writer.step(t, tokens, np.zeros(length, np.float32), heavy(1, length, t, count, count)[0])
    texts = ["word"] * length
    writer.finish({"index": 0, "id": "0", "prompt": "", "text": "", "prompt_length": 0, "tokens_text": texts})
    update_states(run)


def test_what_cannot_be_shown_is_refused_in_one_line(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    file = tmp_path / "report.html"
    with pytest.raises(InputError, match=r"has no finished sample to show$"):
        write_report(run, file, [])
    with pytest.raises(InputError, match=r"^1 samples cannot be shown beside 2: give as many of both runs$"):
        write_report(run, file, run.samples, compared=(run, run.samples * 2))
    with pytest.raises(InputError, match=r"does not fit into 0.0 MB"):
        write_report(run, file, run.samples, budget=50_000)
    with pytest.raises(InputError, match="epsilon is -1"):
        write_report(run, file, run.samples, epsilon=-1)
    assert not file.exists()


def test_nothing_in_the_data_can_end_a_script(tmp_path: Path) -> None:
    attack = "</script><script>window.hacked=1</script><!--&amp;\u2028"
    file = report_of(tmp_path, run_of(tmp_path, tokens_text=[attack] * LENGTH, model=attack))
    text = file.read_text("utf-8")
    assert attack not in text and "hacked" in text and "\u2028" not in text
    assert text.count("</script>") == text.count("<script") == 7  # data and code of the page, nothing else
    report, _ = read_report(file)
    assert report["runs"][0]["model"] == attack


# What the browser makes of it


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


def ready(page: Any) -> Any:
    page.locator(".count:not(:empty)").first.wait_for()
    return page


def choose(page: Any, layer: int | str, head: int | str = "mean", epsilon: float | None = None, step: int = 0) -> None:
    """Set the controls as a reader would."""
    page.select_option("#layer", str(layer))
    if layer != "mean":
        page.select_option("#head", str(head))
    if epsilon is not None:
        page.fill("#epsilon", str(epsilon))
    page.evaluate("step => { const s = document.getElementById('step'); s.value = step;"
                  " s.dispatchEvent(new Event('input')); }", step)  # fmt: skip


def count(page: Any, panel: int = 0) -> int:
    return int(page.locator(".count").nth(panel).text_content().split()[0])


def colours(page: Any) -> list[str]:
    listed: list[str] = page.eval_on_selector_all(
        ".tokens .token", "spans => spans.map(span => getComputedStyle(span).backgroundColor)"
    )
    return listed


def positions_with(page: Any, name: str) -> list[int]:
    found: list[int] = page.eval_on_selector_all(
        f".tokens .token.{name}", "spans => spans.map(span => Number(span.dataset.position))"
    )
    return found


@pytest.mark.parametrize("incoming", [heavy(), growing()], ids=["full", "growing"])
def test_counts_are_those_of_detect(browser: Any, tmp_path: Path, incoming: Array) -> None:
    run = run_of(tmp_path, incoming)
    sample = run.samples[0]
    expected, shown, marked = [], [], []
    with opened(browser, report_of(tmp_path, run)) as page:
        ready(page)
        for number, epsilon in enumerate(MANY):
            for layer, head in [(0, 1), (1, 0), (2, 3), (number % LAYERS, number % HEADS)]:
                t = (layer + head + number) % STEPS
                found = sinks.detect(sample.incoming(t, layer, head), epsilon)
                choose(page, layer, head, epsilon, t)
                expected.append(np.flatnonzero(found).tolist())
                shown.append(count(page))
                marked.append(positions_with(page, "sink"))
    assert shown == [len(positions) for positions in expected]
    assert marked == expected
    assert len(set(shown)) > 2


def test_means_are_judged_as_packed(browser: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with opened(browser, report_of(tmp_path, run)) as page:
        ready(page)
        for t, epsilon in [(0, 0.0), (3, 0.5), (5, 1.0)]:
            rows = means(run.samples[0].incoming(t))
            choose(page, "mean", epsilon=epsilon, step=t)
            assert page.locator("#head").is_disabled()
            assert count(page) == sinks.detect(rows[0], epsilon).sum()
            for layer in range(LAYERS):
                choose(page, layer, "mean", epsilon, t)
                assert count(page) == sinks.detect(rows[1 + layer], epsilon).sum()


def test_thinned_heads_count_exactly_from_the_floor(browser: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path, heavy(steps=40, length=200))
    [thinning] = write_report(run, tmp_path / "report.html", run.samples, epsilon=0.25, budget=210_000)
    assert thinning == Thinning(1, 0.5)
    floor = 0.5
    with opened(browser, tmp_path / "report.html") as page:
        ready(page)
        for layer, head, t in [(0, 1, 0), (2, 3, 39), (1, 0, 17)]:
            c = run.samples[0].incoming(t, layer, head)
            for epsilon in (floor, 2.75, 5.0):
                choose(page, layer, head, epsilon, t)
                assert count(page) == sinks.detect(c, epsilon).sum()
            assert positions_with(page, "below") == np.flatnonzero(~kept(c, floor)).tolist()
        assert page.get_attribute("#epsilon", "min") == f"{floor:g}"
        assert page.text_content("#floor-note") == f"In this file single heads begin at ε = {floor:g}."
        page.fill("#epsilon", "0.1")  # refused: the number stays invalid, the count that of before
        assert count(page) == sinks.detect(c, 5.0).sum()
        choose(page, 1, "mean", 0.1, 17)
        assert count(page) == sinks.detect(means(run.samples[0].incoming(17))[2], 0.1).sum()
        assert positions_with(page, "below") == []
        assert thinning.stated(40) in page.text_content("#kept")


def test_left_out_steps_keep_their_numbers(browser: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path, heavy(steps=40, length=200))
    [thinning] = write_report(run, tmp_path / "report.html", run.samples, budget=130_000)
    steps = thinning.steps(40)
    assert 2 < len(steps) < 40
    with opened(browser, tmp_path / "report.html") as page:
        ready(page)
        for at in (1, len(steps) - 1):
            choose(page, 2, 1, 3, at)
            assert page.text_content("#where") == f"Step {steps[at]} of 39"
            assert count(page) == sinks.detect(run.samples[0].incoming(steps[at], 2, 1), 3.0).sum()


def test_steps_change_the_picture(browser: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path, planted(8, 12))
    with opened(browser, report_of(tmp_path, run)) as page:
        ready(page)
        seen = []
        for t in (0, 1, 7):
            choose(page, 1, 2, 3, t)
            fills = colours(page)
            strong = (1 * HEADS + 2 + t) % 12  # where the planted key stands
            assert positions_with(page, "sink") == [strong]
            assert fills.count(fills[strong]) == 1 and len(set(fills)) == 2
            seen.append(fills[strong])
        assert len(set(seen)) == 1  # one scale for all steps
        assert positions_with(page, "mask") == [11]
        assert positions_with(page, "new") == [11]


def test_the_text_tells_masks_prompt_and_block(browser: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path, planted(8, 12), prompt_length=4, block_len=4)
    with opened(browser, report_of(tmp_path, run)) as page:
        ready(page)
        choose(page, 0, 0, 3, 2)
        assert positions_with(page, "mask") == [6, 7, 8, 9, 10, 11]
        assert positions_with(page, "new") == [6]
        texts = page.locator(".tokens").all_text_contents()
        assert texts == ["w0w1w2w3", "w4w5w6" + "·" * 5]  # what the step fills is already printed
        assert page.locator(".tokens .block.current .token").all_text_contents() == ["w4", "w5", "w6", "·"]
        assert page.text_content(".masked") == "6 of 12"
        choose(page, 0, 0, 3, 4)
        assert page.locator(".tokens .block.current .token").count() == 4
        assert page.locator(".tokens .block.current .token").first.get_attribute("data-position") == "8"


def test_keys_and_playing(browser: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path, planted(8, 12))
    with opened(browser, report_of(tmp_path, run)) as page:
        where = ready(page).locator("#where")
        for key, step in [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 7), ("ArrowRight", 7)]:
            page.keyboard.press(key)
            assert where.text_content() == f"Step {step} of 7"
        page.keyboard.press("Home")
        page.keyboard.press("ArrowLeft")
        assert where.text_content() == "Step 0 of 7"
        page.locator("#step").focus()
        page.keyboard.press("ArrowRight")
        assert where.text_content() == "Step 1 of 7"  # once, though the slider has arrows of its own
        page.select_option("#speed", "20")
        page.click("#play")
        assert page.text_content("#play") == "Pause"
        page.locator("#where", has_text="Step 7 of 7").wait_for()
        assert page.text_content("#play") == "Play"
        page.select_option("#speed", "1")
        page.locator("body").click(position={"x": 5, "y": 5})
        page.keyboard.press("Space")  # from the beginning
        assert page.text_content("#play") == "Pause"
        assert where.text_content() == "Step 0 of 7"
        assert where.get_attribute("aria-live") == "off"
        page.keyboard.press("Space")
        assert page.text_content("#play") == "Play"
        assert where.get_attribute("aria-live") == "polite"


def test_numbers_of_a_token(browser: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path, planted(8, 12))
    c = run.samples[0].incoming(2, 1, 2).astype(np.float64)
    with opened(browser, report_of(tmp_path, run)) as page:
        ready(page)
        choose(page, 1, 2, 3, 2)
        page.locator(".token[data-position='8']").hover()
        others = (c.sum() - c[8]) / 11
        assert page.locator("#tip dd").all_text_contents() == [
            "8 (answer)",
            "w8",
            "mask, filled at step 4",
            f"{c[8]:.3f}",
            f"{others + 3:.3f}",
            "yes",
        ]
        page.mouse.move(0, 0)  # a pointer that rests on a token shows it again whenever the page moves below it
        page.locator(".token[data-position='0']").focus()
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.dataset.position") == "1"
        assert page.locator("#tip dd").all_text_contents()[:3] == ["1 (prompt)", "w1", "given"]
        assert page.text_content("#where") == "Step 2 of 7"  # the arrow moved in the text
        page.keyboard.press(".")
        assert page.text_content("#where") == "Step 3 of 7"
        page.keyboard.press("Escape")
        assert page.locator("#tip").is_hidden()


def cell_centre(page: Any, layer: int, head: int) -> dict[str, float]:
    box: dict[str, float] = page.evaluate(
        "row => { const b = panels[0].map.boxOf(row); return { x: b.x + b.width / 2, y: b.y + b.height / 2 }; }",
        1 + LAYERS + layer * HEADS + head,
    )
    return box


def pixels(page: Any, places: list[dict[str, float]]) -> list[str]:
    """Colours of the map, read at once, since Chromium warns of many readings."""
    colours: list[str] = page.evaluate(
        """(places) => {
          const canvas = document.querySelector(".map canvas"), ratio = devicePixelRatio;
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const at = ({ x, y }) => 4 * (Math.round(y * ratio) * canvas.width + Math.round(x * ratio));
          return places.map((place) => data.slice(at(place), at(place) + 3).join(" "));
        }""",
        places,
    )
    return colours


def test_the_map_is_laid_out_and_chosen_from(browser: Any, tmp_path: Path) -> None:
    incoming = np.ones((2, LAYERS, HEADS, LENGTH), dtype=np.float32)
    incoming[1, 2, 1, 5] = 9  # one strong key: layer 2, head 1, step 1
    with opened(browser, report_of(tmp_path, run_of(tmp_path, incoming))) as page:
        ready(page)
        assert (page.input_value("#layer"), page.input_value("#head")) == ("2", "1")  # where the strongest is
        choose(page, 0, 0, 3, 1)
        cells = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
        centres = {cell: cell_centre(page, *cell) for cell in cells}
        painted = dict(zip(cells, pixels(page, list(centres.values())), strict=True))
        assert [cell for cell in cells if painted[cell] != painted[0, 0]] == [(2, 1)]
        for layer, head in [(2, 1), (0, 3), (1, 0)]:
            page.locator(".map canvas").click(position=centres[layer, head])
            assert (page.input_value("#layer"), page.input_value("#head")) == (str(layer), str(head))
            assert count(page) == ((layer, head) == (2, 1))
        page.select_option(".counting", "count")
        assert "From 0 to 8 or more sinks at ε = 3" in page.text_content(".map .note")
        page.locator(".path canvas").click(position={"x": 45, "y": 60})
        assert page.text_content("#where") == "Step 0 of 1"


def test_numbers_of_layers_and_heads_are_the_models(browser: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path, layers=[3, 7, 30], heads=[1, 4, 5, 9])
    with opened(browser, report_of(tmp_path, run)) as page:
        ready(page)
        assert page.locator("#layer option").all_text_contents() == ["mean over layers", "3", "7", "30"]
        assert page.locator("#head option").all_text_contents() == ["mean over heads", "1", "4", "5", "9"]
        choose(page, 30, 5, 1, 2)
        assert count(page) == sinks.detect(run.samples[0].incoming(2, 30, 5), 1.0).sum()


def block(run: Run, blocked: Array) -> None:
    """Write a run's only sample again, with numbers of blocked keys (T, L, H)."""
    sample = run.samples[0]
    incoming, tokens, info = sample.incoming(), sample.tokens(), sample.info
    steps, layers, heads, length = incoming.shape
    layout = Layout(steps, length, range(layers), range(heads), layers, heads)
    writer = SampleWriter(run.path, 0, layout, tokens[0])
    for t in range(steps):
        writer.step(t, tokens[t + 1], np.zeros(length, np.float32), incoming[t], blocked[t])
    writer.finish(info)


def test_two_runs_side_by_side(browser: Any, tmp_path: Path) -> None:
    long, short = run_of(tmp_path / "long", heavy(6)), run_of(tmp_path / "short", heavy(3, seed=1))
    blocked = np.arange(3 * LAYERS * HEADS, dtype=np.int16).reshape(3, LAYERS, HEADS)
    block(short, blocked)
    short = Run(short.path)
    write_report(long, tmp_path / "report.html", long.samples, compared=(short, short.samples))
    with opened(browser, tmp_path / "report.html") as page:
        ready(page)
        for t, layer, head in [(1, 2, 1), (5, 0, 3)]:
            choose(page, layer, head, 1.5, t)
            own = min(t, 2)
            assert count(page, 0) == sinks.detect(long.samples[0].incoming(t, layer, head), 1.5).sum()
            assert count(page, 1) == sinks.detect(short.samples[0].incoming(own, layer, head), 1.5).sum()
            assert page.locator(".blocked").all_text_contents() == ["0", str(blocked[own, layer, head])]
        assert page.locator(".own-step").nth(1).text_content() == "2, its last"
        assert page.locator(".own-step").nth(0).is_hidden()
        choose(page, 1, "mean", 1.5, 0)
        assert page.locator(".blocked").nth(1).text_content() == f"{blocked[0, 1].sum()} in all heads"
        boxes = [page.locator(".panel").nth(i).bounding_box() for i in (0, 1)]
        assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]


def test_samples_can_be_picked(browser: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path, heavy(seed=0), heavy(seed=1))
    with opened(browser, report_of(tmp_path, run)) as page:
        ready(page)
        for index in (1, 0):
            page.select_option("#sample", str(index))
            page.locator(f".panel[data-sample='{index}: {index}']").wait_for()
            choose(page, 2, 2, 0.5, 4)
            assert count(page) == sinks.detect(run.samples[index].incoming(4, 2, 2), 0.5).sum()


AWKWARD = ["a\nb", "\n\n", "🙂", "中", "<b>x</b>", "\t", "</script><script>window.hacked=1</script>"]


def test_awkward_tokens_are_shown_and_do_nothing(browser: Any, tmp_path: Path) -> None:
    incoming = planted(2, len(AWKWARD))
    run = run_of(tmp_path, incoming, tokens_text=AWKWARD, prompt_length=len(AWKWARD), model="<script>hacked=1</script>")
    with opened(browser, report_of(tmp_path, run)) as page:
        ready(page)
        shown = page.locator(".tokens .token").all_text_contents()
        assert shown == ["a↵b", "↵↵", "🙂", "中", "<b>x</b>", "⇥", AWKWARD[-1]]
        assert page.locator(".tokens br").count() == 3
        assert page.locator("h2").text_content() == "<script>hacked=1</script>, nothing blocked"
        assert page.evaluate("typeof hacked") == "undefined"


def test_ids_stand_in_for_missing_texts(browser: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path, planted(2, 6), tokens_text=[""] * 6, prompt_length=6)
    with opened(browser, report_of(tmp_path, run)) as page:
        ready(page)
        assert page.locator(".tokens .token").all_text_contents() == [f"#{j}" for j in range(6)]


SMALL: dict[str, Array] = {
    "one of everything": np.ones((1, 1, 1, 1), dtype=np.float32),
    "all equal": np.ones((2, 1, 2, 7), dtype=np.float32),
    "no key": np.full((1, 1, 1, 3), np.nan, dtype=np.float32),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_and_even_samples_have_no_sink(browser: Any, tmp_path: Path, name: str) -> None:
    incoming = SMALL[name]
    run = run_of(tmp_path, incoming, prompt_length=1)
    with opened(browser, report_of(tmp_path, run, epsilon=0)) as page:
        ready(page)
        keys = int((~np.isnan(incoming[0, 0, 0])).sum())
        assert page.text_content(".count") == f"0 of {keys} keys"
        assert page.text_content(".strongest").startswith("1.00 at 0" if keys else "none")
        page.keyboard.press("End")
        assert page.text_content("#where") == f"Step {len(incoming) - 1} of {len(incoming) - 1}"


def test_long_texts_scroll_and_go_to_the_last_step(browser: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path, heavy(steps=8, length=2048, layers=4, heads=8))
    with opened(browser, report_of(tmp_path, run)) as page:
        ready(page)
        page.keyboard.press("End")
        assert page.text_content("#where") == "Step 7 of 7"
        assert page.evaluate("document.documentElement.scrollHeight > 2 * innerHeight")


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (400, 800)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_and_nothing_sticks_out(
    browser: Any, tmp_path: Path, width: int, height: int, scheme: str
) -> None:
    file = report_of(tmp_path, run_of(tmp_path))
    with opened(browser, file, viewport={"width": width, "height": height}, color_scheme=scheme) as page:
        ready(page)
        choose(page, 1, 2, 1, 3)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert contrasts(page) == []
        page.click("#theme")
        assert contrasts(page) == []
        unnamed = page.eval_on_selector_all(
            "button, select, input",
            "all => all.filter(e => !(e.labels?.length || e.ariaLabel || e.textContent)).length",
        )
        assert unnamed == 0


def contrasts(page: Any) -> Sequence[str]:
    """Texts whose contrast with what lies behind them is below 4.5, as WCAG reckons it."""
    low: list[str] = page.evaluate(
        """() => {
          const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
          const light = (rgb) => { const [r, g, b] = rgb.map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
          const behind = (e) => { for (; e; e = e.parentElement) {
            const c = numbers(getComputedStyle(e).backgroundColor);
            if (c.length < 4 || c[3] > 0) return c.slice(0, 3); }
            return [255, 255, 255]; };
          return [...document.body.querySelectorAll("*")]
            .filter((e) => e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
            .filter((e) => !e.closest(":disabled, script"))
            .filter((e) => { const a = light(numbers(getComputedStyle(e).color).slice(0, 3)), b = light(behind(e));
              return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5; })
            .map((e) => `${e.tagName} ${e.className} ${e.textContent.slice(0, 30)}`);
        }"""
    )
    return low


def test_a_browser_that_cannot_unpack_is_told_so(browser: Any, tmp_path: Path) -> None:
    file = report_of(tmp_path, run_of(tmp_path))
    with opened(browser, file, before="delete window.DecompressionStream") as page:
        problem = page.locator("#problem")
        problem.wait_for(state="visible")
        assert problem.text_content() == (
            "This browser is too old for this page: use Chrome 123, Firefox 120, Safari 17.5 or later."
        )
        assert page.locator("#main").is_hidden()
