"""Judge an embedded model on the held-out problems: ``python -m sinks.tiny.evaluate CHECKPOINT``.

Prints the share of exact answers, and what the strongest keys are: how often one passes epsilon, where it is, how
often it moves, and what kind of token it is.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

import sinks
from sinks.commandline import exits_cleanly
from sinks.errors import InputError
from sinks.models import LanguageModel
from sinks.samplers import Generation
from sinks.tiny.problems import HELD_OUT_SIZE, Problem, extract_answer, held_out

EPSILONS = (1.0, 3.0, 5.0)
KINDS = ("first token", "mask", "end", "header", "digit", "word", "sign", "space")


@dataclass
class Tally:
    """Sums over batches; a case is one (step, layer, head, item)."""

    correct: list[bool] = field(default_factory=list)
    cases: int = 0
    above: Counter[float] = field(default_factory=Counter)
    heads: Counter[float] = field(default_factory=Counter)  # (layer, head, item) with a sink at some step
    pairs: int = 0  # cases with a step before them
    moves: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def report(self, heads: int) -> Iterator[str]:
        n, right = len(self.correct), sum(self.correct)
        low, high = wilson(right, n)
        yield f"exact answers: {right} of {n}, {right / n:.1%} (95 % interval {low:.1%} to {high:.1%})"
        for epsilon in EPSILONS:
            share, ever = self.above[epsilon] / self.cases, self.heads[epsilon] / (heads * n)
            yield (
                f"epsilon {epsilon:g}: a token above it in {share:.1%} of (step, layer, head, item), "
                f"at some step in {ever:.1%} of an item's heads"
            )
        yield f"strongest key is the first token: {self.kinds['first token'] / self.cases:.1%}"
        yield f"strongest key moves from one step to the next: {self.moves / self.pairs:.1%}"
        kinds = ", ".join(f"{kind} {count / self.cases:.1%}" for kind, count in self.kinds.most_common())
        yield f"strongest key by kind of token: {kinds}"


def wilson(right: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval of a share."""
    share = right / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return middle - half, middle + half


def kind_of(token: str) -> str:
    """What a vocabulary entry is."""
    text = token.replace("Ġ", " ").replace("Ċ", "\n")
    if token.startswith("<|"):
        return {"<|mdm_mask|>": "mask", "<|endoftext|>": "end", "<|eot_id|>": "end"}.get(token, "header")
    if text.isspace():
        return "space"
    return "digit" if text.isdigit() else "word" if any(letter.isalpha() for letter in text) else "sign"


def kinds_of_vocabulary(lm: LanguageModel) -> Tensor:
    """(V,) int64, the index in KINDS of every token."""
    assert lm.tokenizer is not None
    tokens = lm.tokenizer.convert_ids_to_tokens(list(range(lm.spec.vocab_size)))
    return torch.tensor([KINDS.index(kind_of(token)) for token in tokens])


def evaluate(
    lm: LanguageModel,
    problems: Sequence[Problem],
    *,
    steps: int,
    gen_len: int,
    block_len: int,
    batch_size: int,
    visibility: str = "raw",
) -> Tally:
    """Answer all problems and look at the attention of every step."""
    tally, kinds = Tally(), kinds_of_vocabulary(lm)
    for begin in tqdm(range(0, len(problems), batch_size), desc="batches"):
        batch = problems[begin : begin + batch_size]
        questions, capture = [problem.question for problem in batch], sinks.Capture()
        g = sinks.generate(lm, questions, steps=steps, gen_len=gen_len, block_len=block_len, seed=0, capture=capture)
        assert g.text is not None and lm.spec.pad_token_id is not None
        tally.correct += [extract_answer(text) == problem.final for text, problem in zip(g.text, batch, strict=True)]
        count_sinks(tally, g, (g.trajectory[0] != lm.spec.pad_token_id).cumsum(-1) > 0, kinds, visibility)
    return tally


def count_sinks(tally: Tally, g: Generation, valid: Tensor, kinds: Tensor, visibility: str) -> None:
    """Add one generation; valid: (B, S) bool, False = padding."""
    assert g.incoming is not None
    padding = ~valid[:, None, :]
    for epsilon in EPSILONS:
        above = torch.stack([sinks.detect(c, epsilon, padding, visibility=visibility).any(-1) for c in g.incoming])
        tally.above[epsilon] += int(above.sum())
        tally.heads[epsilon] += int(above.any(0).sum())
    strength = g.incoming.masked_fill(g.incoming.isnan() | padding, -torch.inf)
    top = strength.argmax(-1)  # (T, L, B, H)
    seen = strength.amax(-1).isfinite()
    tally.cases += int(seen.sum())
    both = seen[1:] & seen[:-1]
    tally.pairs += int(both.sum())
    tally.moves += int((both & (top[1:] != top[:-1])).sum())
    kind = kinds[g.trajectory[:-1].clamp_min(0)][:, None].expand(-1, top.shape[1], -1, -1).gather(3, top)
    kind = kind.masked_fill(top == valid.int().argmax(-1)[:, None], KINDS.index("first token"))
    counts = torch.bincount(kind[seen], minlength=len(KINDS)).tolist()
    tally.kinds.update({name: count for name, count in zip(KINDS, counts, strict=True) if count})


@exits_cleanly
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="a model name or a folder")
    parser.add_argument("--num_problems", type=int, default=500)
    parser.add_argument("--gen_len", type=int, default=64)
    parser.add_argument("--steps", type=int, help="default: gen_len, one token a step")
    parser.add_argument("--block_len", type=int, default=32)
    parser.add_argument("--batch_size", type=int, default=100)
    parser.add_argument(
        "--visibility", choices=["raw", "per_query"], default="raw", help="per_query: fair to causal models"
    )
    args = parser.parse_args()
    if not 1 <= args.num_problems <= HELD_OUT_SIZE or args.batch_size < 1:
        raise InputError(f"--num_problems must lie between 1 and {HELD_OUT_SIZE}, --batch_size above 0")
    lm = sinks.load(args.checkpoint, dtype="float32")
    tally = evaluate(
        lm,
        held_out()[: args.num_problems],
        steps=args.steps or args.gen_len,
        gen_len=args.gen_len,
        block_len=args.block_len,
        batch_size=args.batch_size,
        visibility=args.visibility,
    )
    print("\n".join(tally.report(lm.spec.layers * lm.spec.heads)))


if __name__ == "__main__":
    main()
