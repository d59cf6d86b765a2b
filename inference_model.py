"""Model in, run folder out: generate text with a diffusion language model and keep its attention sinks.

python inference_model.py tiny
python inference_model.py LLaDA --dataset gsm8k --num_samples 10 --gen_len 128
python inference_model.py --resume runs/T1201_101500-S128-L128-B32
accelerate launch inference_model.py LLaDA --num_samples 100
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from sinks import inference
from sinks.commandline import Parser, exits_cleanly
from sinks.errors import InputError
from sinks.families import MODELS
from sinks.files import gib
from sinks.plan import PATTERNS, Settings, plan
from sinks.processes import own_device, processes
from sinks.prompts import DATASETS
from sinks.runs import Run
from sinks.summary import summarise


def parse() -> dict[str, Any]:
    """The options that were given, by name."""
    parser = Parser(__doc__, argument_default=argparse.SUPPRESS)  # what was not given is left out
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{', '.join(MODELS)}, a folder, or a hub id")
    parser.add_argument("--checkpoint", metavar="ID_OR_PATH", help="instead of the model's own")
    parser.add_argument("--trust_remote_code", action="store_true", help="run a checkpoint's code for its tokenizer")
    parser.add_argument("--dtype", help="auto (default), float32, bfloat16, float16")
    parser.add_argument("--device", help="auto (default), cpu, cuda, cuda:N")
    parser.add_argument("--runs_dir", type=Path, help="where run folders go (default: runs)")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run, with its settings")

    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--dataset", help=f"{', '.join(DATASETS)} (default: gsm8k; problems for tiny models)")
    prompts.add_argument("--split", help="of a data set of the hub (default: test)")
    prompts.add_argument("--offset", type=int, help="the first sample (default: 0)")
    prompts.add_argument("--num_samples", type=int, help="how many (default: 10)")
    prompts.add_argument("--prompt", metavar="TEXT", help="this one prompt instead of a data set")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--gen_len", type=int, help="tokens to generate (default: 256)")
    sampling.add_argument("--steps", type=int, help="denoising steps (default: gen_len)")
    sampling.add_argument("--block_len", type=int, help="tokens in a block (default: 32)")
    sampling.add_argument("--temperature", type=float, help="0 (default): always the most probable token")
    sampling.add_argument("--cfg_scale", type=float, help="classifier-free guidance (default: 0, none)")
    sampling.add_argument("--remasking", help="which tokens a step keeps (default: the family's)")
    sampling.add_argument("--batch_size", type=whole_or_auto, help="samples together (default: 1), or auto: what fits")
    sampling.add_argument("--seed", type=int, help="default: 0")
    sampling.add_argument("--top_p", type=float, help="Dream: keep the most probable tokens up to this sum")
    sampling.add_argument("--top_k", type=int, help="Dream: keep so many tokens")
    sampling.add_argument("--alg_temp", type=float, help="Dream: temperature of the choice among positions")
    sampling.add_argument("--eps", type=float, help="Dream: end of the noise schedule (default: 0.001)")

    sinks = parser.add_argument_group("attention and sinks")
    sinks.add_argument("--attention", choices=PATTERNS, help="incoming (default), or with mean or full patterns")
    sinks.add_argument("--attention_steps", type=int, help="steps whose patterns are kept (default: 32)")
    sinks.add_argument("--layers", metavar="0,3-5", help="layers to keep (default: all)")
    sinks.add_argument("--heads", metavar="0,3-5", help="heads to keep (default: all)")
    sinks.add_argument("--epsilon", type=float, help="sink threshold of the figures printed (default: 3)")
    sinks.add_argument("--mask_sinks", type=int, metavar="K", help="block the K strongest sinks of the last step")
    sinks.add_argument("--mask_epsilon", type=float, help="sink threshold of --mask_sinks (default: 0)")
    return vars(parser.parse_args())


def whole_or_auto(text: str) -> int | str:
    if text != "auto" and not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto")
    return text if text == "auto" else int(text)


@exits_cleanly
def main() -> None:
    logging.basicConfig(format="%(message)s")
    given = parse()
    runs_dir, resumed = given.pop("runs_dir", Path("runs")), given.pop("resume", None)
    if resumed is None and "model" not in given:
        raise InputError(f"name a MODEL: {', '.join(MODELS)}, a folder, or a hub id")
    settings = Settings(**given) if resumed is None else inference.resumed_settings(resumed, given)
    planned = plan(settings, own_device(settings.device))
    speaks = processes().is_main_process
    with inference.open_run(planned, runs_dir, resumed, sys.argv) as launch:
        if speaks:
            samples, steps = len(planned.prompts), planned.sampling.steps
            print(f"{launch.folder}: samples {samples}, steps {steps}, on the disk {gib(planned.nbytes)}")
        try:
            inference.fill(planned, launch)
        except KeyboardInterrupt:
            if speaks:
                trust = " --trust_remote_code" if settings.trust_remote_code else ""
                resume = f"python inference_model.py --resume {launch.folder}{trust}"
                print(f"\nstopped; go on with: {resume}", file=sys.stderr)
            raise
    if speaks:
        summary = summarise(Run(launch.folder), settings.epsilon)
        print(f"run             {launch.folder}", *summary.lines(), sep="\n")
        if summary.failed:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
