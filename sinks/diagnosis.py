"""Sink or content? Two readings of a capture that tell a place for unneeded attention from a token that is read.

A sink in the proper sense takes a large share of a head's attention and gives nothing back: its value vector is short.
A strong column of a small model may as well be an operand, and then its value is as long as any other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinks.detection import detect

STRONG = 0.3  # of a head's attention in one key


def sink_profile(incoming: Tensor, value_norm: Tensor, epsilon: float = 3.0) -> dict[str, float]:
    """Shares and ratios over all (step, layer, row, head) of a capture.

    Args:
        incoming, value_norm: (T, L, B, H, S), NaN where no key is; padding has incoming 0.

    Returns:
        ``strong_share``: how often one key holds more than 30 % of the attention, in percent;
        ``strong_value_ratio``: value norm of those keys over the head's median (NaN if there are none);
        ``top_value_ratio``: the same of the strongest key, whatever it holds;
        ``flagged_value_ratio``: the same of all keys above epsilon; ``moved_share``: how often the strongest key is
        another one than at the step before, in percent; ``first_share``: how often it is the first token.
    """
    keys = ~incoming.isnan() & (incoming > 0)
    c = incoming.nan_to_num().double()
    share = c / c.sum(-1, keepdim=True).clamp_min(1e-12)
    median = value_norm.masked_fill(~keys, torch.nan).nanmedian(-1, keepdim=True).values
    ratio = value_norm / median
    top = share.argmax(-1, keepdim=True)
    strong = share > STRONG
    flagged = detect(incoming, epsilon, exclude=~keys)
    first = keys.int().argmax(-1, keepdim=True)
    return {
        "strong_share": _percent(strong.any(-1)),
        "strong_value_ratio": _median(ratio[strong]),
        "top_value_ratio": _median(ratio.gather(-1, top)),
        "flagged_value_ratio": _median(ratio[flagged]),
        "moved_share": _percent(top[1:] != top[:-1]),
        "first_share": _percent(top == first),
    }


def _percent(where: Tensor) -> float:
    return 100 * where.double().mean().item() if where.numel() else float("nan")


def _median(values: Tensor) -> float:
    return values.double().nanmedian().item() if values.numel() else float("nan")
