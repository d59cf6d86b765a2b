"""The plain denoising loop, as LLaDA's authors publish it: what our steps are compared with.

Attention is torch's own, logits of all positions are computed, and each step is a few hundred launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sinks.models import LanguageModel
from sinks.sampling import Sampling


@contextmanager
def published(lm: LanguageModel, attention: str = "sdpa") -> Iterator[None]:
    """The model with an attention of transformers, both ways, uncompiled; the rotation in its own dtype."""
    model = lm.model
    ours, hooks = model.config._attn_implementation, model.model.rotary_emb._forward_pre_hooks
    kept, compiled = dict(hooks), {layer: layer._compiled_call_impl for layer in model.model.layers}
    model.set_attn_implementation(attention)
    hooks.clear()
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False  # type: ignore[assignment]
    for layer in compiled:
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        model.set_attn_implementation(ours)
        hooks.update(kept)
        for layer, implementation in compiled.items():
            layer._compiled_call_impl = implementation


@torch.no_grad()
def plain_steps(lm: LanguageModel, tokens: Tensor, sampling: Sampling) -> Iterator[None]:
    """Low-confidence remasking, one token a step; nothing is reported."""
    mask, tokens = torch.tensor(lm.spec.mask_token_id, device=lm.device), tokens.to(lm.device)
    start = tokens.shape[1] - sampling.gen_len
    with published(lm):
        for step in range(sampling.steps):
            logits = lm.model(tokens, use_cache=False).logits
            if lm.spec.shift == "next":
                logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
            proposal = _drawn(logits, sampling.temperature).argmax(-1)
            confidence = logits.softmax(-1).gather(-1, proposal[..., None]).squeeze(-1)
            block = step * sampling.gen_len // sampling.steps // sampling.block_len
            confidence[:, start + (block + 1) * sampling.block_len :] = -torch.inf
            confidence = torch.where(tokens.eq(mask), confidence, -torch.inf)
            best = confidence.topk(1).indices
            tokens = tokens.scatter(1, best, proposal.gather(1, best))
            yield


def _drawn(logits: Tensor, temperature: float) -> Tensor:
    """The published form of Gumbel noise, in float64."""
    if temperature == 0:
        return logits
    exact = logits.to(torch.float64)
    return exact.exp() / (-torch.rand_like(exact).log()) ** temperature
