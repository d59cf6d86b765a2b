"""The embedded models: their problems, tokenizer, training objective, checkpoints, and how they are judged."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from fractions import Fraction
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import sinks
from sinks.samplers import Generation
from sinks.tiny import data, evaluate, train
from sinks.tiny.formats import save_checkpoint
from sinks.tiny.objective import Batch, Settings, Vocabulary, hidden_words, loss_of, masked
from sinks.tiny.problems import Problem, Split, choose_wordings, extract_answer, generate, held_out, templates
from sinks.tiny.tokenizer import AFTER, BEFORE, encode_problem

TINY = Path(data.__file__).parent
GOLDEN = Path(__file__).parent / "golden"
KINDS = ("llada", "ar", "dream")
SPLITS: tuple[Split, ...] = ("train", "test")
SMALL = Settings(hidden=32, layers=2, heads=2, mlp=48, batch_size=8)
CPU = torch.device("cpu")


def some(split: Split, count: int, seed: int = 11) -> list[Problem]:
    return list(islice(generate(split, seed), count))


@cache
def core(kind: str = "llada") -> Tokenizer:
    return Tokenizer.from_file(str(TINY / kind / "tokenizer.json"))


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


# Problems


@pytest.mark.parametrize("split", SPLITS)
def test_a_seed_decides_the_problems(split: Split) -> None:
    assert some(split, 50, seed=3) == some(split, 50, seed=3)
    assert some(split, 50, seed=3) != some(split, 50, seed=4)


@pytest.mark.parametrize("split", SPLITS)
def test_every_worked_line_is_right_and_leads_to_the_answer(split: Split) -> None:
    for problem in some(split, 3000):
        *lines, last = problem.answer.split("\n")
        known = [*numbers(problem.question), 2]  # "half" and "twice" are not written as numbers
        result = None
        for line in lines:
            left, sign, right, given_result = re.search(r"(\d+) ([-+*/]) (\d+) = (\d+)", line).groups()  # type: ignore[union-attr]
            x, y, result = Fraction(left), Fraction(right), int(given_result)
            assert result == {"+": x + y, "-": x - y, "*": x * y, "/": x / y}[sign]
            assert x in known and y in known, f"{line} uses a number that nobody gave"
            assert 2 <= result <= 999
            known.append(result)
        assert 2 <= len(lines) <= 4
        assert last == f"#### {result}"
        assert problem.final == str(result) == extract_answer(problem.answer)


def test_templates_are_many_and_numbers_have_up_to_three_digits() -> None:
    kinds, distractors = templates()
    assert len(kinds) == len({kind.name for kind in kinds}) >= 24
    assert {len(kind.work) for kind in kinds} == {2, 3, 4}
    assert len(distractors["train"]) == len(distractors["test"])
    assert any(number > 99 for problem in some("test", 50) for number in numbers(problem.question))


def test_a_distractor_gives_a_number_that_nobody_uses() -> None:
    used = [set(numbers(problem.answer)) for problem in some("test", 400)]
    spare = sum(bool(set(numbers(p.question)) - use) for p, use in zip(some("test", 400), used, strict=True))
    assert 0.4 < spare / 400 < 0.6


def test_held_out_wordings_are_never_seen_in_training() -> None:
    kinds, distractors = templates()
    wordings = {
        split: {w for kind in kinds for slot in kind.wordings[split] for w in slot}
        | {w for slot in distractors[split] for w in slot}
        for split in SPLITS
    }
    assert not wordings["train"] & wordings["test"]


def test_a_held_out_problem_has_new_wordings_in_at_least_one_sentence() -> None:
    rng = random.Random(0)
    new, sentences = 0, 0
    for kind in templates()[0] * 40:
        assert choose_wordings(kind, "train", rng) == kind.wordings["train"]
        chosen = choose_wordings(kind, "test", rng)
        fresh = [slot in kind.wordings["test"] for slot in chosen]
        assert any(fresh) and sum(slot in kind.wordings["train"] for slot in chosen) == len(chosen) - sum(fresh)
        new, sentences = new + sum(fresh), sentences + len(fresh)
    assert 0.6 < new / sentences < 0.7  # one for certain, each other with one half


def test_no_question_comes_twice() -> None:
    questions = [problem.question for problem in some("train", 20_000)]
    assert len(set(questions)) == len(questions)


def test_training_and_held_out_problems_share_no_token_ids() -> None:
    held = {tuple(encode_problem(core(), problem)[0]) for problem in held_out()}
    assert len(held) == 500
    trained = {tuple(encode_problem(core(), problem)[0]) for problem in some("train", 20_000, seed=0)}
    assert not held & trained


@pytest.mark.long
@pytest.mark.parametrize("stage", train.STAGES["llada"], ids=["first", "second"])
def test_the_whole_training_set_shares_no_token_ids_with_the_held_out_problems(stage: Settings) -> None:
    held = {tuple(encode_problem(core(), problem)[0]) for problem in held_out()}
    made = data.make_dataset(core(), stage.problems, stage.seed)
    assert len(made.ids) > 0.99 * stage.problems
    assert not held & {tuple(row[:length].tolist()) for row, length in zip(made.ids, made.prompts, strict=True)}


def test_a_held_out_problem_drawn_for_training_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    known = held_out()[7]
    monkeypatch.setattr(data, "generate", lambda split, seed: iter([known, *some("train", 3)]))
    ids, prompts, lengths = data.encode_shard((core().to_str(), 4, "any"))
    assert len(ids) == len(prompts) == len(lengths) == 3
    assert tuple(encode_problem(core(), known)[0]) not in {tuple(row.tolist()[: prompts[0]]) for row in ids}


def test_the_committed_problems_are_what_the_generator_makes() -> None:
    assert held_out() == some("test", 500, seed=0)
    lines = (TINY / "problems.jsonl").read_text(encoding="utf-8").splitlines()
    assert all(json.loads(line).keys() == {"question", "answer"} for line in lines)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so\n#### 42", "42"),
        ("#### 1,234", "1234"),
        ("#### 3\nno, rather #### 4", "4"),
        ("####7 apples", "7"),
        ("#### $18.50 in all", "18.50"),
        ("#### -5", "-5"),
        ("the answer is 42", None),
        ("#### forty", None),
        ("#### 3 and then ####", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, number: str | None) -> None:
    assert extract_answer(text) == number


def test_problems_need_the_standard_library_alone() -> None:
    code = "import sys, sinks.tiny.problems; print([m for m in ('numpy', 'torch', 'tokenizers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Tokenizer


@given(st.text())
@settings(max_examples=300)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = core()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_loads_without_remote_code_and_keeps_spaces(kind: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY / kind)
    assert len(tokenizer) == tokenizer.vocab_size == 1024
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|endoftext|>")
    text = "  Janet's ducks lay 1,600 eggs , don't they ? \n\n café …  漢字 $ 3 . 50 !"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    digits = [token for token in tokenizer.convert_ids_to_tokens(ids) if any(c.isdigit() for c in token)]
    assert digits == list("1600350")


def test_the_chat_template_is_lladas() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY / "llada")
    messages = [{"role": "user", "content": " How many? \n"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nHow many?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert rendered == BEFORE + "How many?" + AFTER
    turns = [*messages, {"role": "assistant", "content": "#### 2"}]
    closed = tokenizer.apply_chat_template(turns, tokenize=False)
    assert closed == rendered + "#### 2<|eot_id|>"


def test_training_prompts_are_what_a_loaded_model_is_asked() -> None:
    lm = sinks.load("tiny", device="cpu")
    for problem in held_out()[:50]:
        assert lm.encode(problem.question) == encode_problem(core(), problem)[0]


def test_answers_fit_into_64_tokens() -> None:
    assert all(len(encode_problem(core(), problem)[1]) <= 64 for problem in held_out())
    trained = some("train", 5000)
    assert sum(len(encode_problem(core(), problem)[1]) <= 64 for problem in trained) >= 0.998 * len(trained)


# Training


def batch_of(count: int, width: int = 96) -> tuple[Batch, Vocabulary]:
    tokenizer = core()
    made = data.encode_shard((tokenizer.to_str(), count, "5"))
    ids, prompts = torch.from_numpy(made[0]).long(), torch.from_numpy(made[1])
    return Batch(ids[:, :width], torch.arange(width) >= prompts[:, None]), Vocabulary.of(tokenizer, CPU)


def test_the_masked_loss_weighs_every_answer_token_once_on_average() -> None:
    torch.manual_seed(0)
    batch, vocabulary = batch_of(64)
    draws = [masked(batch, SMALL, vocabulary) for _ in range(400)]
    for inputs, weights in draws[:20]:
        hidden = inputs == vocabulary.mask
        assert not (hidden & ~batch.answer).any()
        assert torch.equal(inputs[~hidden], batch.ids[~hidden])
        assert torch.equal(weights > 0, hidden)
        assert (weights[hidden] >= 1).all()
    mean = torch.stack([weights[batch.answer].mean() for _, weights in draws]).mean()
    assert mean == pytest.approx(1, abs=0.03)


def test_blockwise_rows_know_what_comes_before_and_nothing_after() -> None:
    torch.manual_seed(0)
    batch, vocabulary = batch_of(64, width=160)
    blockwise = Settings(blockwise=1.0)
    block = (batch.answer.cumsum(1) - 1) // blockwise.block_len
    seen = set()
    for _ in range(20):
        inputs, weights = masked(batch, blockwise, vocabulary)
        for row in range(len(inputs)):
            learnt = block[row][weights[row] > 0].unique().tolist()
            assert len(learnt) <= 1
            for current in learnt:
                seen.add(current)
                assert (inputs[row][block[row] < current] == batch.ids[row][block[row] < current]).all()
                assert (inputs[row][block[row] > current] == vocabulary.mask).all()
    assert seen == {0, 1}


def test_hidden_words_are_words_of_the_prompt() -> None:
    torch.manual_seed(0)
    batch, vocabulary = batch_of(64)
    hidden = hidden_words(batch, Settings(hidden_words=0.5), vocabulary)
    assert not (hidden & batch.answer).any()
    names = {index: token for token, index in core().get_vocab().items()}
    tokens = [names[int(index)] for index in batch.ids[hidden].unique()]
    assert tokens and not any(any(c.isdigit() for c in token) or token.startswith("<|") for token in tokens)
    assert 0.2 < hidden.any(1).float().mean() < 0.8  # half of the rows
    assert not hidden_words(batch, SMALL, vocabulary).any()


class Oracle(torch.nn.Module):
    """Knows every token, and says it at its own place or one place before."""

    def __init__(self, ids: torch.Tensor, early: bool) -> None:
        super().__init__()
        self.ids = torch.cat([ids[:, 1:], ids[:, :1]], 1) if early else ids

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Generation:
        logits = 50.0 * torch.nn.functional.one_hot(self.ids, 1024)
        return type("Output", (), {"logits": logits})  # type: ignore[return-value]


@pytest.mark.parametrize(("kind", "early"), [("llada", False), ("ar", True), ("dream", True)])
def test_who_knows_the_answer_has_no_loss(kind: str, early: bool) -> None:
    batch, vocabulary = batch_of(16)
    right, wrong = Oracle(batch.ids, early), Oracle(batch.ids, not early)
    assert loss_of(kind, right, batch, SMALL, vocabulary) == pytest.approx(0, abs=1e-6)  # type: ignore[arg-type]
    assert loss_of(kind, wrong, batch, SMALL, vocabulary) > 1  # type: ignore[arg-type]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    train.main()


SHORT = "--steps 2 --batch_size 4 --problems 300 --hidden 32 --layers 2 --heads 2 --mlp 48".split()


def test_one_command_makes_each_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokenizer = core()
    monkeypatch.setattr(train, "make_tokenizer", lambda: tokenizer)
    run(monkeypatch, "llada", "--out", str(tmp_path / "llada"), *SHORT)
    run(monkeypatch, "ar", "--out", str(tmp_path / "ar"), *SHORT)
    run(monkeypatch, "dream", "--out", str(tmp_path / "dream"), "--start", str(tmp_path / "ar"), *SHORT)
    assert {path.name for path in tmp_path.iterdir()} == set(KINDS)
    for kind, family in zip(KINDS, ("LLaDA", "autoregressive", "Dream"), strict=True):
        lm = sinks.load(str(tmp_path / kind))
        assert (lm.spec.family, lm.spec.layers, lm.spec.heads) == (family, 2, 2)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["dream", "--start", "nowhere"], "nowhere"),
        (["llada", "--first_stage", "2"], "stages 0 to 1"),
        (["llada", "--first_stage", "1"], "--start"),
    ],
)
def test_what_cannot_be_trained_is_said_in_one_line(
    arguments: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *arguments, "--out", str(tmp_path / "out"))
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert complaint in message and message.count("\n") == 1
    assert not any(tmp_path.iterdir())


# Checkpoints


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_computes_the_same_when_loaded(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = train.build(kind, SMALL).bfloat16().float().eval()
    save_checkpoint(kind, model, core(), tmp_path / kind)
    lm = sinks.load(str(tmp_path / kind), device="cpu", dtype="float32")
    ids = torch.randint(1024, (2, 20))
    with torch.no_grad():
        expected, got = (m(input_ids=ids, use_cache=False).logits for m in (model, lm.model))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    tokens = core().get_vocab()
    assert lm.spec.mask_token_id == tokens["<|mdm_mask|>"]
    assert lm.spec.pad_token_id == tokens["<|endoftext|>"]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_are_small_and_in_bfloat16(kind: str) -> None:
    file = TINY / kind / "model.safetensors"
    assert file.stat().st_size <= 12_000_000
    with safe_open(file, "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118


def test_the_tensor_names_are_lladas() -> None:
    parts = ["attn_norm", "attn_out", "ff_norm", "ff_out", "ff_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
    blocks = {f"model.transformer.blocks.{i}.{part}.weight" for i in range(8) for part in parts}
    others = {f"model.transformer.{part}.weight" for part in ("wte", "ln_f", "ff_out")}
    with safe_open(TINY / "llada" / "model.safetensors", "pt") as tensors:
        assert set(tensors.keys()) == blocks | others


@pytest.mark.parametrize(("kind", "folder"), [("llada", "llada"), ("dream", "dream")])
def test_config_has_every_official_key_and_no_code(kind: str, folder: str) -> None:
    official = json.loads((GOLDEN / folder / "config.json").read_text(encoding="utf-8"))
    ours = json.loads((TINY / kind / "config.json").read_text(encoding="utf-8"))
    assert official.keys() - ours.keys() <= {"auto_map", "transformers_version"}
    assert ours.keys() - official.keys() == {"eot_token_id"}
    sizes = re.compile(r"size|vocab|theta|length|_id$|^d_model|^n_|layers|heads|position|eps|dtype|version")
    same = {key for key in ours.keys() & official.keys() if not sizes.search(key)}
    assert {key: ours[key] for key in same} == {key: official[key] for key in same}


def test_all_embedded_models_share_one_tokenizer() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert len({(TINY / kind / file).read_bytes() for kind in KINDS}) == 1


@pytest.mark.long
def test_the_committed_tokenizer_is_what_training_makes() -> None:
    assert json.loads(data.make_tokenizer().to_str()) == json.loads(core().to_str())


# Judging


@pytest.mark.parametrize(
    ("right", "n", "low", "high"), [(5, 10, 0.2366, 0.7634), (500, 500, 0.9924, 1.0), (0, 10, 0.0, 0.2775)]
)
def test_wilsons_interval(right: int, n: int, low: float, high: float) -> None:
    assert evaluate.wilson(right, n) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        ("<|mdm_mask|>", "mask"),
        ("<|eot_id|>", "end"),
        ("<|startoftext|>", "header"),
        ("7", "digit"),
        ("Ġapples", "word"),
        ("ĠhasĠ", "word"),
        ("Ġ=Ġ", "sign"),
        (".", "sign"),
        ("Ċ", "space"),
    ],
)
def test_kinds_of_tokens(token: str, kind: str) -> None:
    assert evaluate.kind_of(token) == kind


def test_sinks_are_counted_as_by_hand() -> None:
    # One layer, one head, two steps, one item of four positions whose first is padding.
    # Mean 1 over three keys: with epsilon 1 both strongest pass, 1.8 > 0.6 + 1 and 2.6 > 0.2 + 1.
    incoming = torch.tensor([[0.0, 0.6, 1.8, 0.6], [0.0, 2.6, 0.2, 0.2]])[:, None, None, None]
    trajectory = torch.tensor([[9, 0, 2, 1], [9, 0, 2, 3], [9, 0, 2, 3]])[:, None]
    g = Generation(trajectory[-1], trajectory, torch.zeros(2, 1, 4), incoming, None, None, {}, None)
    tally, kinds = evaluate.Tally(correct=[True]), torch.full((10,), evaluate.KINDS.index("word"))
    evaluate.count_sinks(tally, g, torch.tensor([[False, True, True, True]]), kinds, "raw")
    assert (tally.cases, tally.pairs, tally.moves) == (2, 1, 1)
    assert (tally.above[1.0], tally.above[3.0]) == (2, 0)
    assert (tally.heads[1.0], tally.heads[3.0]) == (1, 0)
    assert tally.kinds == {"word": 1, "first token": 1}
    assert "exact answers: 1 of 1, 100.0%" in next(iter(tally.report(heads=1)))


def test_tiny_solves_problems_that_it_has_never_seen() -> None:
    lm = sinks.load("tiny", device="cpu")
    problems = held_out()[:6]
    g = sinks.generate(lm, [problem.question for problem in problems], steps=64, gen_len=64, block_len=32, seed=0)
    assert g.text is not None
    solved = [extract_answer(text) == problem.final for text, problem in zip(g.text, problems, strict=True)]
    assert sum(solved) >= 5
