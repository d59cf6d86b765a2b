"""The command line of the evaluation scripts: lm-eval's own, with presets, a safe cache and ``--print_config``."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import yaml
from lm_eval._cli import HarnessCLI
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.utils import setup_logging

from sinks import arguments, harness
from sinks.errors import InputError
from sinks.files import brief, explained
from sinks.processes import processes

PRESETS = Path(__file__).parent / "presets"
_OWN_KEYS = ("about", "report", "our_choice")  # of a preset; all others are lm-eval's


def main(script: str) -> None:
    """Run an evaluation script; ``script`` is the name its model is registered under.

    Raises:
        InputError: anything that a user can put right.
    """
    own, rest = _own_options()
    preset = read_preset(own.preset) if own.preset else {}
    if preset.get("tasks") and "--tasks" not in rest:
        rest += ["--tasks", ",".join(preset["tasks"])]
    sys.argv[1:] = rest
    setup_logging()
    cli = HarnessCLI()
    options = _parse(cli)
    if options.command != "run":
        return cli.execute(options)
    _complete(options, script, preset, own.use_cache)
    run = {"batch_size": options.batch_size, "device": options.device}
    settings = arguments.resolve(options.model, {**options.model_args, **run})
    with _one_line():
        if own.print_config:
            return _print_config(options, settings)
        state = processes(options.device)
        if state.is_main_process:
            sys.stderr.write(f"world size: {state.num_processes}\n")
        try:
            cli.execute(options)
        except KeyboardInterrupt:
            if state.is_main_process:
                sys.stderr.write(f"\nstopped; {_what_is_kept(settings.answers)}\n")
            raise


def _what_is_kept(answers: str | None) -> str:
    if answers is None:
        return "no answer was kept; with --use_cache FILE every answer is, and the same command goes on"
    return f"the answers so far are in {answers}, and the same command goes on"


@contextmanager
def _one_line() -> Iterator[None]:
    """lm-eval's complaints about the command line, and data that cannot be had; any other fault keeps its traceback."""
    try:
        yield
    except ConnectionError as error:
        raise InputError(f"{error}: no network and no copy is cached; use --include_path with a local task") from error
    except ValueError as error:
        if str(error).startswith(
            ("Attempted to run task", "Tasks not found", "No tasks specified", "Specify --output_path")
        ):
            raise InputError(f"{error} (--tasks, --include_path, --confirm_run_unsafe_code)") from error
        raise


def _own_options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset")
    parser.add_argument("--print_config", action="store_true")
    parser.add_argument("--use_cache", "-c")
    return parser.parse_known_args()


def _parse(cli: HarnessCLI) -> argparse.Namespace:
    """lm-eval's options; of what it says of bad ones, the lines on their usage are left out."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return cli.parse_args()
    except (SystemExit, ValueError) as error:
        if isinstance(error, SystemExit) and not error.code:  # --help
            raise
        problem = said.getvalue().rpartition("error: ")[2] if isinstance(error, SystemExit) else error
        raise InputError(f"the options cannot be read: {brief(problem)}; --help shows their form") from error


def _complete(options: argparse.Namespace, script: str, preset: dict[str, Any], answers: str | None) -> None:
    """Fill in what was not given: from a preset, and where lm-eval's default would mislead."""
    given = getattr(options, "model_args", None) or {}
    options.model_args = {**preset.get("model_args", {}), **given}
    if "model_path" in options.model_args:  # lm-eval names the folder of the results after "pretrained"
        options.model_args["pretrained"] = options.model_args.pop("model_path")
    for name, value in preset.items():
        if name not in (*_OWN_KEYS, "model_args") and not getattr(options, name, None):
            setattr(options, name, value)
    options.model = getattr(options, "model", None) or script
    if options.model not in arguments.FAMILIES_OF:
        raise InputError(f"--model {options.model} is not for this script; use {script}")
    if getattr(options, "gen_kwargs", None):
        raise InputError("--gen_kwargs has no effect on these models; give sampling settings in --model_args")
    if getattr(options, "limit", None) is not None and options.limit <= 0:
        raise InputError(f"--limit {options.limit} leaves nothing to answer; give 1 or more, or a share below 1")
    options.batch_size = options.model_args.pop("batch_size", None) or getattr(options, "batch_size", None) or 1
    options.device = options.model_args.pop("device", None) or getattr(options, "device", None) or "auto"
    if answers:
        options.model_args["answers"] = answers
    if not isinstance(options.model_args.get("answers", ""), str):
        raise InputError("answers in --model_args is no name of a file; --use_cache FILE gives one")
    _ensure_results_can_be_written(getattr(options, "output_path", None))


def _ensure_results_can_be_written(output_path: str | None) -> None:
    """Before the first answer, for lm-eval only logs that it could not."""
    if output_path is not None:
        folder = Path(output_path).parent if Path(output_path).suffix == ".json" else Path(output_path)
        with explained("create", folder):
            folder.mkdir(parents=True, exist_ok=True)


def read_preset(name: str) -> dict[str, Any]:
    """A preset by name or file: lm-eval's configuration, with what the paper leaves open under ``our_choice``."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else PRESETS / f"{name}.yaml"
    try:
        preset = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        known = ", ".join(sorted(file.stem for file in PRESETS.glob("*.yaml")))
        raise InputError(f"no preset {name!r}; use one of {known}, or a YAML file") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(preset, dict):
        raise InputError(f"{path} must hold a mapping")
    return preset


def _print_config(options: argparse.Namespace, settings: arguments.Settings) -> None:
    """Resolved settings, their hash and the first prompt of every task, as JSON."""
    config = EvaluatorConfig.from_cli(options)
    loaded = config.process_tasks(config.metadata).load(config.tasks)["tasks"]
    model = harness.EvaluatedModel.of(settings)
    prompts = {name: _first_prompt(task, config, model) for name, task in loaded.items()}
    shown = {
        "settings": settings.deciding(),
        "settings_hash": settings.digest(),
        "num_fewshot": config.num_fewshot,
        "apply_chat_template": config.apply_chat_template,
        "first_prompt": prompts,
    }
    sys.stdout.write(json.dumps(shown, indent=2, ensure_ascii=False, default=str) + "\n")


def _first_prompt(task: Any, config: EvaluatorConfig, model: harness.EvaluatedModel) -> str:
    if config.num_fewshot is not None and task.get_config("num_fewshot") != 0:
        task.set_config(key="num_fewshot", value=config.num_fewshot)
    task.set_fewshot_seed(seed=config.seed[3] if config.seed else None)
    chat = bool(config.apply_chat_template)
    task.build_all_requests(
        limit=1,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat if config.fewshot_as_multiturn is None else config.fewshot_as_multiturn,
        system_instruction=config.system_instruction,
        chat_template=model.apply_chat_template if chat else None,
        tokenizer_name=model.tokenizer_name if chat else "",
    )
    return str(task.instances[0].args[0])
