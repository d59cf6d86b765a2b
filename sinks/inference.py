"""From a plan to a filled run folder, batch by batch.

Processes share the batches of one folder; they wait for each other only when it is opened and when it is full.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from tqdm import tqdm

from sinks.background import Background
from sinks.errors import InputError, NotFinite
from sinks.files import alone_in, brief, ensure_memory, ensure_space, existing_part, in_use
from sinks.fitting import largest_batch
from sinks.observer import Step, on_host
from sinks.plan import Plan, Settings
from sinks.processes import processes, wait_for_everyone
from sinks.provenance import provenance
from sinks.runs import Array, Run, create_run, cut_batches, discard, fail, is_done, run_name, unfinished, update_states
from sinks.samplers import denoise
from sinks.writer import SampleWriter

_log = logging.getLogger(__name__)

_WAITING = 1  # steps that wait to be written, beside the one that is
_COPIES = 4 + _WAITING  # of the patterns at once: rows are joined, layers stacked, limited, made float16


@dataclass(frozen=True)
class Launch:
    """An open run folder, the batches to do, and of a new run the part of its path that was there before it."""

    folder: Path
    batches: list[range]
    existing: Path | None


@contextmanager
def open_run(plan: Plan, runs_dir: Path, resumed: Path | None, command: Sequence[str]) -> Iterator[Launch]:
    """The folder of this launch and the batches to do; decided by the first process, told to the others.

    Until the block ends, no other launch can open the folder.

    Raises:
        InputError: no space or no right to write; a resumed run that this launch would not continue.
    """
    outcome: list[Any] = [None]
    with ExitStack() as held:
        if processes().is_main_process:
            try:
                existing = existing_part(runs_dir)
                size = plan.settings.batch_size
                batches = cut_batches(len(plan.prompts), size if isinstance(size, int) else largest_batch(plan))
                folder = resumed or _create(plan, batches, runs_dir, command)
                let_others_in = held.enter_context(alone_in(folder))
                if resumed is not None:
                    _check_resumable(plan, folder)
                    update_states(folder)  # also shows that the folder can be written, before anything is computed
                outcome = [Launch(folder, unfinished(folder, batches), existing if resumed is None else None)]
            except InputError as error:
                outcome = [error]
        [result] = broadcast_object_list(outcome)
        if isinstance(result, InputError):
            raise result
        assert isinstance(result, Launch)
        if processes().is_main_process:
            let_others_in()
        else:
            held.enter_context(in_use(result.folder))
        yield result


def _create(plan: Plan, batches: Sequence[range], runs_dir: Path, command: Sequence[str]) -> Path:
    ensure_space(runs_dir, plan.nbytes)
    ensure_memory(_COPIES * plan.pattern_nbytes(batches), "the attention patterns of one step")
    sampling = plan.sampling
    name = run_name(sampling.steps, sampling.gen_len, sampling.block_len)
    return create_run(runs_dir, name, _manifest(plan, command))


def _manifest(plan: Plan, command: Sequence[str]) -> dict[str, Any]:
    return {
        "model": plan.settings.model,
        **_reproducible(plan),
        "seed": plan.sampling.seed,
        "settings": asdict(plan.settings),
        "sampling": asdict(plan.sampling),
        "capture": asdict(plan.capture),
        "masking": None if plan.masking is None else asdict(plan.masking),
        "spec": asdict(plan.lm.spec),
        **provenance(command),
        "samples": [{"index": i, "id": p.id, "state": "missing"} for i, p in enumerate(plan.prompts)],
    }


def _reproducible(plan: Plan) -> dict[str, Any]:
    """What must be the same again when a run is resumed."""
    prompts = json.dumps([asdict(prompt) for prompt in plan.prompts])
    return {
        "checkpoint": plan.lm.checkpoint,
        "revision": plan.lm.revision,
        "device": plan.lm.device.type,
        "dtype": str(plan.lm.dtype).removeprefix("torch."),
        "attention_path": plan.lm.attention_path,
        "prompts_sha256": hashlib.sha256(prompts.encode()).hexdigest(),
    }


def _check_resumable(plan: Plan, folder: Path) -> None:
    before = Run(folder).manifest
    changed = [name for name, value in _reproducible(plan).items() if before.get(name) != value]
    if changed:
        raise InputError(f"{folder} cannot be resumed here: {', '.join(changed)} would not be the same")
    if [sample["index"] for sample in before["samples"]] != list(range(len(plan.prompts))):
        raise InputError(
            f"the manifest of {folder} lists other samples than its settings name, so it cannot be resumed"
        )


def resumed_settings(folder: Path, given: dict[str, Any]) -> Settings:
    """The settings of a run, which may be repeated on the command line but not changed."""
    try:
        settings = Settings(**Run(folder).manifest["settings"])
    except (InputError, KeyError, TypeError) as error:
        raise InputError(f"the manifest of {folder} is damaged ({brief(error)}), so it cannot be resumed") from error
    if settings.trust_remote_code and not given.get("trust_remote_code"):
        raise InputError(f"{folder} was made by running code of its checkpoint: to do so, add --trust_remote_code")
    changed = [name for name, value in given.items() if value != getattr(settings, name)]
    if changed:
        was = ", ".join(f"{name}={getattr(settings, name)}" for name in changed)
        raise InputError(f"{folder} was made with {was}; leave these out to resume it, or start a new run")
    return settings


def fill(plan: Plan, launch: Launch) -> None:
    """Generate this process's share of the batches into the folder.

    An error of a single process before any sample is done removes a new folder again; an interruption never does, and
    of several processes another may be at work there. A sample for which the model computes no numbers is recorded as
    failed, and the others go on.

    Raises:
        InputError: all samples failed.
    """
    state = processes()
    mine = launch.batches[state.process_index :: state.num_processes]
    try:
        steps = len(mine) * plan.sampling.steps
        with tqdm(total=steps, unit="step", disable=not state.is_main_process) as bar:
            for batch in mine:
                _write_as_fits(plan, launch.folder, batch, bar)
    except Exception:
        kept = any(is_done(launch.folder, index) for index in range(len(plan.prompts)))
        if launch.existing is not None and state.num_processes == 1 and not kept:
            discard(launch.folder, launch.existing)
        raise
    wait_for_everyone()
    if state.is_main_process:
        samples = update_states(launch.folder)["samples"]
        if all(sample["state"] == "failed" for sample in samples):
            raise InputError(f"no sample could be made: {samples[0]['problem']}")
    state.destroy_process_group()


def _write_as_fits(plan: Plan, folder: Path, batch: range, bar: Any) -> None:
    """A batch, or its halves one after the other where it cannot be made as a whole; the results are the same."""
    before = bar.n
    try:
        return _write_batch(plan, folder, batch, bar)
    except NotFinite as error:
        if len(batch) == 1:
            bar.update(before + plan.sampling.steps - bar.n)
            _log.warning("sample %d failed: %s", batch[0], error)
            return fail(folder, batch[0], str(error))
        reason = "at least one of %d samples cannot be made; going on with halves"
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise InputError(
                f"sample {batch[0]} ({plan.layouts[batch[0]].length} positions) does not fit into the GPU's memory: "
                "lower --gen_len, use --dtype bfloat16, or spread the model over more GPUs"
            ) from None
        reason = "%d samples do not fit into the GPU's memory together; going on with halves"
    torch.cuda.empty_cache()
    _log.warning(reason, len(batch))
    bar.total += plan.sampling.steps
    bar.update(before - bar.n)
    middle = len(batch) // 2
    for half in (batch[:middle], batch[middle:]):
        _write_as_fits(plan, folder, half, bar)


def _write_batch(plan: Plan, folder: Path, batch: range, bar: Any) -> None:
    canvas, started = plan.canvas(batch), perf_counter()
    keep = canvas.valid.cpu().numpy()
    tokens = canvas.tokens.cpu().numpy()
    bar.set_description(f"sample {batch[-1] + 1}/{len(plan.prompts)}")
    # A batch is computed as a whole, so that it comes out the same; what it already left is not touched.
    missing = {row: index for row, index in enumerate(batch) if not is_done(folder, index)}
    with ExitStack() as stack:
        writers = {
            row: stack.enter_context(SampleWriter(folder, index, plan.layouts[index], tokens[row, keep[row]]))
            for row, index in missing.items()
        }
        items = [plan.settings.offset + index for index in batch]
        with Background(partial(_write_step, writers, keep), _WAITING) as writing:
            for step in denoise(plan.lm, canvas, plan.sampling, plan.capture, plan.masking, items):
                writing.put(on_host(_as_stored(step, plan.layouts[batch[0]].dtype)))
                speed = _speed(plan, batch, step.index + 1, perf_counter() - started)
                bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
                bar.update()
        tokens = step.tokens.cpu().numpy()
        seconds = perf_counter() - started
        for row, writer in writers.items():
            writer.finish(_describe(plan, batch[row], tokens[row, keep[row]].tolist(), batch, seconds))


def _write_step(writers: Mapping[int, SampleWriter], keep: Array, copied: tuple[Step, torch.cuda.Event | None]) -> None:
    step, event = copied
    if event is not None:
        event.synchronize()
    rows = list(_rows(step, keep))
    for row, writer in writers.items():
        writer.step(step.index, **rows[row])


def _speed(plan: Plan, batch: range, steps: int, seconds: float) -> float:
    """Tokens per second over a batch of which some steps are done."""
    return len(batch) * plan.sampling.gen_len * steps / plan.sampling.steps / seconds


def _as_stored(step: Step, dtype: str) -> Step:
    """The step with values in the precision of the files, while they are still on the device.

    There it costs nothing, and half as much is copied; the patterns are on the host already and are left to the writer.
    """
    incoming = step.incoming if dtype == "float32" else _half(step.incoming)
    return replace(step, incoming=incoming, value_norm=_half(step.value_norm))


def _half(values: Tensor | None) -> Tensor | None:
    """float16, saturated."""
    limit = torch.finfo(torch.float16).max
    return None if values is None else values.clamp(-limit, limit).half()


def _rows(step: Step, keep: Array) -> Iterator[dict[str, Any]]:
    """What a step did, sample by sample, without padding; ``keep`` is (B, S) bool."""
    tokens, confidence = _numpy(step.tokens), _numpy(step.confidence.float())
    incoming, blocked = _numpy(step.incoming), _numpy(step.blocked)
    value_norm, patterns = _numpy(step.value_norm), _numpy(_half(step.patterns))
    for row, valid in enumerate(keep):
        kept = slice(int(valid.argmax()), None)  # padding is on the left
        yield {
            "tokens": tokens[row, kept],
            "confidence": confidence[row, kept],
            "incoming": incoming[:, row, :, kept],
            "blocked": None if blocked is None else blocked[:, row],
            "value_norm": None if value_norm is None else value_norm[:, row, :, kept],
            "pattern": None if patterns is None else _square(patterns[:, row], len(valid))[..., kept, kept],
        }


def _numpy(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.numpy()


def _square(pattern: Array, size: int) -> Array:
    """(…, S, S) from a causal model's (…, Q, K), whose queries are the last of its keys; NaN elsewhere."""
    queries, keys = pattern.shape[-2:]
    if queries == size:
        return pattern
    square = np.full((*pattern.shape[:-2], size, size), np.nan, dtype=pattern.dtype)
    square[..., keys - queries : keys, :keys] = pattern
    return square


def _describe(plan: Plan, index: int, tokens: list[int], batch: range, seconds: float) -> dict[str, Any]:
    """What sample.json holds; all that differs between two equal runs is under ``timings``."""
    prompt, length = plan.prompts[index], len(tokens) - plan.sampling.gen_len
    return {
        "index": index,
        "id": prompt.id,
        "prompt": prompt.text,
        "reference": prompt.reference,
        "text": plan.lm.decode(tokens[length:]),
        "prompt_length": length,
        "tokens_text": [_token_text(plan, token) for token in tokens],
        "timings": {
            "seconds": seconds,
            "samples_together": len(batch),
            "seconds_per_step": seconds / plan.sampling.steps,
            "tokens_per_second": _speed(plan, batch, plan.sampling.steps, seconds),
            "peak_gpu_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        },
    }


def _token_text(plan: Plan, token: int) -> str:
    tokenizer = plan.lm.tokenizer
    return "" if token < 0 or tokenizer is None else str(tokenizer.decode([token]))
