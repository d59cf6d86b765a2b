"""Train an embedded model from scratch: ``python -m sinks.tiny.train {llada,ar,dream}``, minutes on one GPU."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import sinks
from sinks.commandline import exits_cleanly
from sinks.errors import InputError
from sinks.tiny.data import Dataset, make_dataset, make_tokenizer
from sinks.tiny.formats import save_checkpoint
from sinks.tiny.objective import Batch, Settings, Vocabulary, loss_of
from sinks.tiny.tokenizer import VOCABULARY

HERE = Path(__file__).parent


STAGES = {
    "llada": [
        Settings(),
        Settings(
            steps=4000, learning_rate=1e-3, warmup=100, problems=500_000, seed=1, blockwise=0.5, hidden_words=0.15
        ),
    ],
    "ar": [
        Settings(steps=2500),
        Settings(steps=2500, learning_rate=1e-3, warmup=100, problems=500_000, seed=1, hidden_words=0.15),
    ],
    "dream": [
        Settings(steps=3500),
        Settings(steps=3500, learning_rate=1e-3, warmup=100, problems=500_000, seed=1, hidden_words=0.15),
    ],
}


def build(kind: str, settings: Settings) -> PreTrainedModel:
    """A model with random weights, as the family's own but for its size."""
    sizes: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=settings.hidden,
        intermediate_size=settings.mlp,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=settings.max_positions,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    config = Qwen2Config(**sizes) if kind == "dream" else LlamaConfig(**sizes)
    if kind != "ar":
        config.is_causal = False
    return Qwen2ForCausalLM(config) if kind == "dream" else LlamaForCausalLM(config)


def start_from(model: PreTrainedModel, start: Path) -> None:
    """Take the weights of another embedded model; the biases that only Dream has begin at zero."""
    weights = sinks.load(str(start), device="cpu", dtype="float32").model.state_dict()
    for name, parameter in model.named_parameters():
        if name.endswith("proj.bias") and name not in weights:
            weights[name] = torch.zeros_like(parameter)
    model.load_state_dict(weights)


def batches(data: Dataset, settings: Settings, fill: int, device: torch.device) -> Iterator[Batch]:
    """Endless batches, drawn from the problems that fit the width of each."""
    ids = torch.from_numpy(data.ids).to(device)
    prompts = torch.from_numpy(data.prompts).to(device)
    lengths = torch.from_numpy(data.lengths)
    draw = torch.Generator(device).manual_seed(settings.seed)
    widths = [settings.short, settings.middle] * 10
    widths[-1] = settings.long
    fitting = {width: int(torch.searchsorted(lengths, width, right=True)) for width in set(widths)}
    while True:
        for width in widths:
            rows = torch.randint(fitting[width], (settings.batch_size,), generator=draw, device=device)
            padded = nn.functional.pad(ids[rows].long(), (0, max(0, width - ids.shape[1])), value=fill)
            answer = torch.arange(width, device=device) >= prompts[rows, None]
            yield Batch(padded[:, :width], answer)


def optimizer_of(
    model: PreTrainedModel, settings: Settings
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW and its schedule: warm-up, constant for the first half, then linear to 1 %."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = model.device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=fused)

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / settings.warmup, max(0.01, 2 * (1 - step / settings.steps)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train(kind: str, settings: Settings, model: PreTrainedModel, data: Dataset, tokenizer: Tokenizer) -> None:
    """Train in place, with a progress line."""
    optimizer, schedule = optimizer_of(model, settings)
    vocabulary = Vocabulary.of(tokenizer, model.device)
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    progress = tqdm(range(settings.steps), desc=kind, mininterval=5, unit="step")
    begin, tokens = time.perf_counter(), 0
    for step, batch in zip(progress, batches(data, settings, vocabulary.fill, model.device), strict=False):
        with torch.autocast(model.device.type, torch.bfloat16, enabled=on_gpu):
            loss = loss_of(kind, model, batch, settings, vocabulary)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += batch.ids.numel()
        if step % 100 == 99 or step == settings.steps - 1:
            rate = tokens / (time.perf_counter() - begin)
            progress.set_postfix_str(f"loss {loss.item():.4f}, {rate:,.0f} tokens/s")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=list(STAGES), help="which model to train")
    parser.add_argument("--out", type=Path, help="where to write the checkpoint (default: beside this file)")
    parser.add_argument("--start", type=Path, help="weights to begin with (default: none; for dream those of ar)")
    parser.add_argument("--first_stage", type=int, default=0, help="skip the stages before this one (needs --start)")
    for field in fields(Settings):
        parser.add_argument(
            f"--{field.name}", type=type(field.default), help="in every stage (default: the stage's own)"
        )
    return parser.parse_args()


def stages_of(args: argparse.Namespace) -> list[Settings]:
    """The stages to run, with what the command line changes in them."""
    given = {field.name: getattr(args, field.name) for field in fields(Settings)}
    changed = {name: value for name, value in given.items() if value is not None}
    stages = STAGES[args.kind][args.first_stage :]
    if not stages or args.first_stage < 0:
        raise InputError(f"{args.kind} has the stages 0 to {len(STAGES[args.kind]) - 1}")
    if args.first_stage and args.start is None:
        raise InputError("--first_stage skips a stage: name the weights that it made with --start")
    return [replace(stage, **changed) for stage in stages]


@exits_cleanly
def main() -> None:
    args = parse()
    stages, out = stages_of(args), args.out or HERE / args.kind
    start = args.start or (HERE / "ar" if args.kind == "dream" else None)
    torch.manual_seed(stages[0].seed)
    model = build(args.kind, stages[0])
    if start is not None:
        start_from(model, start)
    tokenizer, seconds = make_tokenizer(), 0.0
    for settings in stages:
        data = make_dataset(tokenizer, settings.problems, settings.seed)
        if torch.cuda.is_available():
            nn.Module.cuda(model)
        torch.manual_seed(settings.seed)
        begin = time.perf_counter()
        train(args.kind, settings, model, data, tokenizer)
        seconds += time.perf_counter() - begin
    save_checkpoint(args.kind, model, tokenizer, out)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{out}: {size:,} parameters, trained in {seconds:.0f} s")


if __name__ == "__main__":
    main()
