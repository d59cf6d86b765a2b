"""Grade-school word problems, made by us: the data that the embedded models learn from and are judged on.

A template (templates.toml) holds sentences in several wordings and the worked lines of the answer; the equations in
those lines are what is computed. Needs the standard library alone.
"""

from __future__ import annotations

import json
import operator
import os
import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Literal

Split = Literal["train", "test"]

HELD_OUT_FILE = Path(__file__).with_name("problems.jsonl")
HELD_OUT_SEED = 0
HELD_OUT_SIZE = 500
SMALLEST, LARGEST = 2, 999  # of every computed number: no "1 apples", three digits at most
DISTRACTOR_RATE = 0.5
NEW_RATE = 0.5  # how likely each sentence of a held-out problem has a wording that training never sees

NAMES = """
Ada Amir Ben Bo Carl Cleo Dana Eli Emma Eva Finn Gil Gus Hana Hugo Ida Ines Ivan Jan Jo Juan Kai Kim Lea Leo Lin Lou
Luca Mara Max Mei Mia Milo Nina Noa Omar Otto Pia Ravi Rosa Ruth Sam Sara Tara Theo Tom Uma Vera Yara Zoe
""".split()
THINGS = """
acorns apples badges balloons bananas beads bells berries bottles bricks buttons candles carrots cherries coins cookies
corks crayons dolls drums feathers figs flags flowers grapes hats kites lamps leaves magnets marbles masks melons mugs
nails nuts onions oranges pencils pens pins plums puzzles ribbons rings ropes seeds shells spoons stamps tickets tiles
""".split()
PLACES = """
bakery beach bridge camp castle fair farm field garage harbor hill hotel island lake market mill museum park river
school shop square station stadium tower village zoo
""".split()
CONTAINERS = {"bag": "bags", "basket": "baskets", "box": "boxes", "crate": "crates", "jar": "jars", "sack": "sacks"}

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
EQUATION = re.compile(r"(\{\w\}|\d+) ([-+*/]) (\{\w\}|\d+) = \{(\w)\}")
NUMBER = re.compile(r"\s*\$?(-?\d[\d,]*(?:\.\d+)?)")


@dataclass(frozen=True)
class Problem:
    """A question and its worked answer, whose last line is ``#### N``."""

    question: str
    answer: str

    @property
    def final(self) -> str:
        """The number asked for."""
        return self.answer.rpartition("#### ")[2]


@dataclass(frozen=True)
class Template:
    """One kind of problem; ``wordings[split]`` lists, sentence by sentence, the ways to say it."""

    name: str
    numbers: dict[str, tuple[int, int]]
    wordings: dict[Split, list[list[str]]]
    work: list[str]

    @property
    def equations(self) -> list[tuple[str, str, str, str]]:
        """(left, operator, right, result) of every worked line."""
        return [equation for line in self.work for equation in EQUATION.findall(line)]


def extract_answer(text: str) -> str | None:
    """The number after the last ``####`` without its commas (GSM8K has the same mark), or None when there is none."""
    _, mark, rest = text.rpartition("####")
    number = NUMBER.match(rest) if mark else None
    return number.group(1).replace(",", "") if number else None


@cache
def templates() -> tuple[list[Template], dict[Split, list[list[str]]]]:
    """All templates, and the sentences that only distract."""
    data = tomllib.loads(Path(__file__).with_name("templates.toml").read_text("utf-8"))
    kinds = [
        Template(t["name"], t["numbers"], {"train": t["train"], "test": t["test"]}, t["work"]) for t in data["template"]
    ]
    return kinds, data["distractors"]


def compute(template: Template, numbers: dict[str, int]) -> dict[str, int] | None:
    """The numbers with every result, or None when a result is no whole number between the bounds."""
    known = dict(numbers)
    for left, sign, right, result in template.equations:
        x, y = (known[side[1]] if side.startswith("{") else int(side) for side in (left, right))
        value = OPERATORS[sign](x, y)
        if not SMALLEST <= value <= LARGEST or (sign == "/" and value * y != x):
            return None
        known[result] = value
    return known


def draw_numbers(template: Template, rng: random.Random) -> dict[str, int]:
    """Numbers of the template, drawn until every result is allowed."""
    while True:
        known = compute(template, {key: rng.randint(*bounds) for key, bounds in template.numbers.items()})
        if known is not None:
            return known


def draw_words(rng: random.Random) -> dict[str, str]:
    """People A, B, C and E, things n, m and o, places p and q, a container. E, o and q only distract."""
    fields = dict(zip("ABCE", rng.sample(NAMES, 4), strict=True))
    fields["n"], fields["m"], fields["o"] = rng.sample(THINGS, 3)
    fields["p"], fields["q"] = (f"the {place}" for place in rng.sample(PLACES, 2))
    fields["box"] = rng.choice(list(CONTAINERS))
    return fields | {"boxes": CONTAINERS[fields["box"]]}


def choose_wordings(template: Template, split: Split, rng: random.Random) -> list[list[str]]:
    """Sentence by sentence, the wordings to draw from: in a held-out problem some are new, at least one."""
    known, new = template.wordings["train"], template.wordings["test"]
    if split == "train":
        return known
    always = rng.randrange(len(known))
    return [new[i] if i == always or rng.random() < NEW_RATE else known[i] for i in range(len(known))]


def draw_problem(split: Split, rng: random.Random) -> Problem:
    """One problem in the split's wordings."""
    kinds, distractors = templates()
    template = rng.choice(kinds)
    sentences = [rng.choice(wordings) for wordings in choose_wordings(template, split, rng)]
    if rng.random() < DISTRACTOR_RATE:  # first, or before the question: elsewhere "them" could mean it
        sentences.insert(rng.choice([0, len(sentences) - 1]), rng.choice(rng.choice(distractors[split])))
    fields = draw_words(rng) | draw_numbers(template, rng) | {"z": rng.randint(2, 99)}
    question = " ".join(sentences).format_map(fields)
    result = fields[template.equations[-1][-1]]
    return Problem(question, "\n".join([*template.work, f"#### {result}"]).format_map(fields))


def generate(split: Split, seed: int | str) -> Iterator[Problem]:
    """Endless problems of a split, no question twice; the same for the same seed.

    No question of one split is one of the other: of the sentences of a held-out problem two thirds, at least one,
    are paraphrases that training never sees.
    """
    rng = random.Random(f"{split} {seed}")
    seen = set()
    while True:
        problem = draw_problem(split, rng)
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem


def held_out() -> list[Problem]:
    """The 500 problems on which the embedded models are judged."""
    lines = HELD_OUT_FILE.read_text("utf-8").splitlines()
    return [Problem(**json.loads(line)) for line in lines]


def main() -> None:
    """Write the held-out problems beside this file."""
    problems = islice(generate("test", HELD_OUT_SEED), HELD_OUT_SIZE)
    temporary = HELD_OUT_FILE.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in problems), "utf-8")
    os.replace(temporary, HELD_OUT_FILE)


if __name__ == "__main__":
    main()
