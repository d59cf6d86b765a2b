"""Evaluation arguments: the official names and values, resolved, checked, and hashed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_dream, write_llada, write_llama

from sinks.arguments import AUTOREGRESSIVE_SCRIPT, DREAM_SCRIPT, LLADA_SCRIPT, resolve
from sinks.errors import InputError
from sinks.masking import SinkMasking


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        LLADA_SCRIPT: str(write_llada(root / "llada")),
        DREAM_SCRIPT: str(write_dream(root / "dream")),
        AUTOREGRESSIVE_SCRIPT: str(write_llama(root / "llama")),
    }


def _llada(folders: dict[str, str], **given: Any) -> Any:
    return resolve(LLADA_SCRIPT, {"pretrained": folders[LLADA_SCRIPT], "gen_length": 32, **given})


def test_command_of_the_paper_for_llada(folders: dict[str, str]) -> None:
    settings = resolve(
        LLADA_SCRIPT,
        {
            **{"model_path": folders[LLADA_SCRIPT], "is_check_greedy": False, "mc_num": 128, "cfg": 0, "steps": 512},
            **{"gen_length": 512, "block_length": 32, "remasking": "low_confidence_sink_masked", "epsilon": 0.0},
            **{"exclude_self": False, "mask_sink_ratio": 1.0, "sink_top_k": 1, "batch_size": "1"},
        },
    )
    sampling = settings.sampling
    assert (sampling.steps, sampling.gen_len, sampling.block_len, sampling.cfg_scale) == (512, 512, 32, 0)
    assert sampling.remasking == "low_confidence"
    assert settings.masking == SinkMasking(epsilon=0, top_k=1)
    assert settings.scoring == {"mc_num": 128, "is_check_greedy": False}


def test_command_of_the_paper_for_dream(folders: dict[str, str]) -> None:
    settings = resolve(
        DREAM_SCRIPT,
        {
            **{"pretrained": folders[DREAM_SCRIPT], "trust_remote_code": True, "max_new_tokens": 768},
            **{"diffusion_steps": 768, "dtype": "bfloat16", "temperature": 0.1, "top_p": 0.9, "alg": "entropy"},
            **{"enable_sink_masking": True, "sink_epsilon": 0.0, "sink_top_k": 1},
        },
    )
    sampling = settings.sampling
    assert (sampling.steps, sampling.gen_len, sampling.temperature, sampling.top_p) == (768, 768, 0.1, 0.9)
    assert sampling.remasking == "entropy"
    assert settings.masking == SinkMasking(epsilon=0, top_k=1)
    assert settings.load == {"dtype": "bfloat16", "trust_remote_code": True}


@pytest.mark.parametrize(
    ("given", "masking"),
    [
        ({}, None),
        ({"remasking": "random_sink_masked"}, SinkMasking()),
        ({"sink_top_k": 5}, SinkMasking(top_k=5)),
        ({"sink_top_k": 0}, SinkMasking(top_k=0)),
        ({"sink_top_k": "none", "enable_sink_masking": True}, SinkMasking()),
        ({"sink_top_k": 5, "enable_sink_masking": False}, None),
        ({"remasking": "low_confidence_sink_masked", "enable_sink_masking": False}, None),
        ({"epsilon": 2, "enable_sink_masking": True}, SinkMasking(epsilon=2)),
        ({"epsilon": 2}, None),
        ({"sink_layers": "0;2-3", "sink_heads": [1, 2]}, SinkMasking(layers=[0, 2, 3], heads=[1, 2])),
        ({"sink_steps": [2, 9], "sink_control": "random"}, SinkMasking(steps=(2, 9), control="random")),
    ],
)
def test_masking_object(folders: dict[str, str], given: dict[str, Any], masking: SinkMasking | None) -> None:
    settings = _llada(folders, **given)
    assert settings.masking == masking
    assert not settings.sampling.sink_masked  # else denoising would mask by the name alone


def test_values_as_lm_eval_reads_them(folders: dict[str, str]) -> None:
    settings = _llada(folders, steps=16.0, sink_top_k=2.0, eot_token_id=7.0, block_length="none")
    assert settings.sampling.steps == 16
    assert isinstance(settings.sampling.steps, int)
    assert settings.masking == SinkMasking(top_k=2)
    assert settings.load["eot_token_id"] == 7
    assert settings.sampling.block_len == 32  # of one block, which is what none means


def test_digest_holds_what_decides_an_answer(folders: dict[str, str]) -> None:
    base = _llada(folders, sink_top_k=1)
    others: list[dict[str, Any]] = [
        *({"sink_top_k": 2}, {"sink_epsilon": 1}, {"sink_layers": [0]}, {"sink_heads": [1]}, {"sink_steps": [0, 4]}),
        *({"seed": 1}, {"sink_seed": 1}, {"steps": 16}, {"cfg": 1}, {"dtype": "bfloat16"}, {"temperature": 1}),
        *({"attention": "reference"}, {"remasking": "random"}, {"mask_token_id": 5}, {"max_length": 512}),
    ]
    digests = [_llada(folders, **{"sink_top_k": 1, **other}).digest() for other in others]
    assert len({base.digest(), *digests}) == len(others) + 1
    same = _llada(folders, sink_top_k=1, batch_size=7, answers="elsewhere.db", device="cpu")
    assert same.digest() == base.digest()


@pytest.mark.parametrize(
    ("script", "given", "message"),
    [
        (LLADA_SCRIPT, {"gen_lenght": 5}, r"unknown model_args: gen_lenght; known are .*gen_length"),
        (LLADA_SCRIPT, {"top_p": 0.9}, "unknown model_args: top_p"),
        (DREAM_SCRIPT, {"epsilon": 1}, "unknown model_args: epsilon"),
        (DREAM_SCRIPT, {"classifier_free_guidance": 2.0}, "classifier_free_guidance=2 is not supported"),
        (LLADA_SCRIPT, {"block_length": 5}, "not divisible"),
        (LLADA_SCRIPT, {"sink_control": "rnd"}, "control='rnd' is unknown; use one of sinks, random, bottom"),
        (LLADA_SCRIPT, {"sink_layers": "a"}, "sink_layers 'a' cannot be read; write numbers"),
        (LLADA_SCRIPT, {"batch_size": "auto"}, "batch_size is 'auto'"),
        (LLADA_SCRIPT, {"max_length": "abc"}, "max_length is 'abc'"),
        (LLADA_SCRIPT, {"mc_num": 0}, "mc_num is 0"),
        (LLADA_SCRIPT, {"enable_sink_masking": "maybe"}, "enable_sink_masking='maybe' must be True or False"),
        (LLADA_SCRIPT, {"is_check_greedy": 7}, "is_check_greedy=7 must be True or False"),
        (LLADA_SCRIPT, {"epsilon": -1}, "epsilon=-1"),
        (LLADA_SCRIPT, {"epsilon": 1, "sink_epsilon": 2}, "epsilon=1 contradicts sink_epsilon=2"),
        (LLADA_SCRIPT, {"mask_id": "abc"}, "mask_token_id='abc' must be a token id"),
        (LLADA_SCRIPT, {"gen_len": 8}, "gen_len and gen_length mean the same"),
        (DREAM_SCRIPT, {"nll_type": "foo"}, "nll_type 'foo' is unknown"),
        (DREAM_SCRIPT, {"nll_type": "ar_ftb", "log_type": "btf"}, "goes with log_type ftb"),
        (LLADA_SCRIPT, {"dtype": "fp8"}, "unknown dtype 'fp8'"),
        (AUTOREGRESSIVE_SCRIPT, {"cfg_scale": 1.0}, "no classifier-free guidance"),
    ],
)
def test_refused(folders: dict[str, str], script: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(script, {"pretrained": folders[script], "gen_length": 32, **given})


def test_model_of_another_script(folders: dict[str, str]) -> None:
    with pytest.raises(InputError, match="is a Dream model, but this script is for LLaDA and MMaDA"):
        resolve(LLADA_SCRIPT, {"pretrained": folders[DREAM_SCRIPT]})
    with pytest.raises(InputError, match="no model was given"):
        resolve(LLADA_SCRIPT, {})


def test_mmada_goes_through_the_llada_script(tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "mmada", architectures=["MMadaModelLM"], model_type="mmada")
    assert resolve(LLADA_SCRIPT, {"model_path": str(folder), "gen_length": 8}).sampling.family == "MMaDA"
