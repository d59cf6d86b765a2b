"""Diffusion (and, for comparison, autoregressive) language models for lm-eval, with or without sink masking.

One class answers the requests of every family; the evaluation scripts differ only in the names of their arguments.
Each process answers its share of the requests and waits for the others once, at the end.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any, TypeVar

import torch
from accelerate.utils import gather, gather_object
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.api.registry import register_model
from torch import Tensor
from tqdm import tqdm

from sinks import arguments, checkpoints, likelihood, models
from sinks.answers import Answers
from sinks.arguments import Settings
from sinks.errors import InputError
from sinks.masking import SinkMasking
from sinks.models import LanguageModel
from sinks.processes import processes, wait_for_everyone
from sinks.samplers import denoise, lay_out

_log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Occurrence = tuple[Instance, int]  # a request and how many of its repeats came before


class EvaluatedModel(TemplateLM):
    """The lm-eval interface of a model; it is loaded at the first request, after lm-eval has checked everything."""

    script = ""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self._answer_under(arguments.resolve(self.script, given))

    @classmethod
    def of(cls, settings: Settings) -> EvaluatedModel:
        """A model under settings that are resolved already."""
        model = cls.__new__(cls)
        TemplateLM.__init__(model)
        model._answer_under(settings)
        return model

    def _answer_under(self, settings: Settings) -> None:
        self.settings = settings
        self.process = processes(str(settings.load.get("device", "auto")))
        self._rank, self._world_size = self.process.process_index, self.process.num_processes
        self._device = self.process.device
        self.counts: Counter[str] = Counter()
        self._everyones: Counter[str] | None = None
        _log.info("process %d of %d", self._rank + 1, self._world_size)

    @cached_property
    def lm(self) -> LanguageModel:
        load = dict(self.settings.load)
        if self._world_size > 1:
            load["device"] = str(self._device)
        return models.load(self.settings.checkpoint, **load)

    @cached_property
    def tokenizer(self) -> Any:
        """Without the weights, so that lm-eval can lay out its prompts first."""
        load = self.settings.load
        tokenizer = checkpoints.load_tokenizer(
            self.settings.checkpoint, load.get("family"), load.get("revision"), bool(load.get("trust_remote_code"))
        )
        if tokenizer is None:
            raise InputError(f"{self.settings.checkpoint} has no tokenizer, which an evaluation needs")
        return tokenizer

    @cached_property
    def answers(self) -> Answers | None:
        if self.settings.answers is None:
            return None
        deciding = [self.settings.digest(), checkpoints.fingerprint(self.settings.checkpoint)]
        if self.settings.load.get("dtype", "auto") == "auto":  # what that is depends on the device
            deciding.append(self._device.type)
        return Answers(self.settings.answers, " ".join(deciding))

    def with_masking(self, masking: SinkMasking | None) -> None:
        """Answer from now on under another masking, with the model as loaded."""
        self.settings = replace(self.settings, masking=masking)
        self.__dict__.pop("answers", None)

    # What lm-eval calls.

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.settings.checkpoint.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if self.tokenizer.chat_template is None:
            raise InputError(f"{self.settings.checkpoint} has no chat template; leave --apply_chat_template out")
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text; a text that already begins with the first token (a chat template's) gets no second one."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
            if self.settings.add_bos_token and bos and add_special_tokens:
                string, add_special_tokens = bos + string, False
        return self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return self._answer("generate_until", requests, self._generate, self.settings.batch_size, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise InputError("rolling likelihood (perplexity tasks) is not defined for these models, nor upstream")

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        progress = tqdm(requests, desc="likelihood", disable=disable_tqdm or self._rank > 0, unit="request")
        return [self._score(texts, prompt, target) for texts, prompt, target in progress]

    def get_model_info(self) -> dict[str, Any]:
        """Goes into the results file: what decided the answers, and where they were computed."""
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        return {
            "settings": self.settings.deciding(),
            "settings_hash": self.settings.digest(),
            "model_dtype": str(self.lm.dtype).removeprefix("torch."),
            "attention_path": self.lm.attention_path,
            "model_revision": self.lm.revision,
            "hardware": gpu or platform.processor() or platform.machine(),
            "world_size": self._world_size,
            **self._doubts(),
        }

    def _doubts(self) -> dict[str, int]:
        """How often a figure may be lower than the model deserves: of all processes, answers kept earlier aside."""
        found = self.counts if self._everyones is None else self._everyones
        return {name: found[name] for name in ("truncated_prompts", "answers_with_mask_tokens", "empty_answers")}

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        if cache_hook.dbdict is not None:
            raise InputError(
                "lm-eval's response cache does not know which settings gave an answer; use the model argument "
                "answers=FILE (the evaluation scripts' --use_cache), whose keys do"
            )

    def all_gather(self, tensor: Tensor) -> Tensor:
        return gather(tensor.reshape(1).to(self._device))

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Results of all processes, on ``dst``, in the order of a single one: documents went out in turn."""
        everything = gather_object([(obj, self.counts)])
        self._everyones = sum((counts for _, counts in everything), Counter())
        return [_in_turn([found for found, _ in everything])] if self._rank == dst else None

    def barrier(self) -> None:
        wait_for_everyone()

    # How a request is answered.

    def _answer(
        self,
        kind: str,
        requests: Sequence[Instance],
        compute: Callable[[list[Occurrence]], list[Answer]],
        size: int,
        quiet: bool,
    ) -> list[Answer]:
        """Answer every request once, ``size`` at a time; what is known already is not computed again."""
        seen: Counter[int] = Counter()
        order: list[tuple[int, int]] = []
        known: dict[tuple[int, int], Answer] = {}
        open_: dict[tuple[int, int], Occurrence] = {}
        for request in requests:
            # lm-eval evens out the processes by repeating a request once more than it asked for.
            repeat = min(seen[id(request)], request.repeats - 1)
            seen[id(request)] += 1
            key = (id(request), repeat)
            order.append(key)
            found = self.answers.get(kind, _identity(request, repeat)) if self.answers else None
            if found is not None:
                known[key] = found
            elif key not in open_:
                open_[key] = (request, repeat)
        todo = list(open_.items())
        with tqdm(total=len(todo), desc=kind, disable=quiet or self._rank > 0, unit="request") as progress:
            for first in range(0, len(todo), size):
                some = todo[first : first + size]
                for (key, (request, repeat)), answer in zip(some, compute([item for _, item in some]), strict=True):
                    known[key] = answer
                    if self.answers:
                        self.answers.put(kind, _identity(request, repeat), answer)
                progress.update(len(some))
        return [known[key] for key in order]

    def _generate(self, batch: list[Occurrence]) -> list[str]:
        sampling, masking = self.settings.sampling, self.settings.masking
        prompts = [self._shorten(self.tok_encode(request.args[0])) for request, _ in batch]
        canvas = lay_out(self.lm, prompts, sampling)
        items = [int(request.doc_id or 0) + (repeat << 32) for request, repeat in batch]
        tokens = canvas.tokens
        for step in denoise(self.lm, canvas, sampling, masking=masking, items=items):
            tokens = step.tokens
        written = tokens[:, -sampling.gen_len :].tolist()
        answers = [
            self._cut(self.lm.decode(row), request.args[1]) for row, (request, _) in zip(written, batch, strict=True)
        ]
        self.counts["answers_with_mask_tokens"] += sum(self.lm.spec.mask_token_id in row for row in written)
        self.counts["empty_answers"] += sum(not answer.strip() for answer in answers)
        return answers

    def _shorten(self, prompt: list[int]) -> list[int]:
        """The end of a prompt that is too long, counted."""
        room = min(self.settings.max_length, self.lm.spec.max_positions) - self.settings.sampling.gen_len
        if room < 1:
            raise InputError(f"gen_len {self.settings.sampling.gen_len} leaves no room for a prompt")
        if len(prompt) > room:
            self.counts["truncated_prompts"] += 1
            _log.warning("a prompt of %d tokens was cut to its last %d", len(prompt), room)
        return prompt[-room:]

    def _cut(self, text: str, options: dict[str, Any]) -> str:
        if self.settings.escape_until:
            return text
        until = options.get("until") or []
        for stop in [until] if isinstance(until, str) else until:
            text = text.split(stop)[0] if stop else text
        return text

    def _score(self, texts: tuple[str, str], prompt: list[int], target: list[int]) -> tuple[float, bool]:
        request = [*texts, self.settings.batch_size]  # the estimate's draws come in batches
        known = self.answers.get("likelihood", request) if self.answers else None
        if known is None:
            known = self._likelihood(prompt, target)
            if self.answers:
                self.answers.put("likelihood", request, known)
        value, greedy = known
        return float(value), bool(greedy)

    def _likelihood(self, prompt: list[int], target: list[int]) -> tuple[float, bool]:
        if self.settings.script == arguments.DREAM_SCRIPT and self.lm.spec.eos_token_id is not None:
            target = [*target, self.lm.spec.eos_token_id]  # as Dream's evaluation does
        prompt = prompt[-max(1, self.settings.max_length - len(target)) :]
        if self.lm.spec.attention == "causal":
            return likelihood.exact(self.lm, prompt, target)
        scoring = dict(self.settings.scoring)
        greedy = scoring.pop("is_check_greedy", False) and likelihood.is_greedy(self.lm, prompt, target)
        # Draws belong to the request, not to its place in the order.
        digest = hashlib.sha256(repr((self.settings.sampling.seed, prompt, target)).encode()).digest()
        value = likelihood.loglikelihood(
            self.lm,
            prompt,
            target,
            batch_size=self.settings.batch_size,
            cfg_scale=self.settings.sampling.cfg_scale,
            seed=int.from_bytes(digest[:7]),
            **scoring,
        )
        return value, bool(greedy)


def _identity(request: Instance, repeat: int) -> list[Any]:
    """What makes a request this one: its document and text; draws depend on the former, the answer on both."""
    return [request.doc_id, repeat, *request.args]


def _in_turn(parts: list[Any]) -> Any:
    """Lists of several processes, dealt out in turn, as one; dictionaries of such lists likewise."""
    if all(isinstance(part, dict) for part in parts):
        return {key: _in_turn([part[key] for part in parts if key in part]) for key in parts[0]}
    missing = object()
    return [value for value in chain.from_iterable(zip_longest(*parts, fillvalue=missing)) if value is not missing]


@register_model(arguments.LLADA_SCRIPT)
class LLaDAModel(EvaluatedModel):
    """LLaDA and MMaDA, with the arguments of LLaDA's evaluation script."""

    script = arguments.LLADA_SCRIPT


@register_model(arguments.DREAM_SCRIPT)
class DreamModel(EvaluatedModel):
    """Dream, DreamCoder and DiffuCoder, with the arguments of Dream's evaluation script."""

    script = arguments.DREAM_SCRIPT


@register_model(arguments.AUTOREGRESSIVE_SCRIPT)
class AutoregressiveModel(EvaluatedModel):
    """Any decoder-only model."""

    script = arguments.AUTOREGRESSIVE_SCRIPT
