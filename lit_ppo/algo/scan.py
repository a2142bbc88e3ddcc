"""Discounted sums from the right, in log2(R) steps instead of R."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_ppo.algo.masked import clean


def discounted_sum(x: Tensor, mask: Tensor, factor: float) -> Tensor:
    """Return ``y_t = x_t + factor * y_next``, where next is the next token of the row that is on the mask.

    A token is the map ``y -> x_t + factor * y``, a masked one the identity; maps compose associatively, so a scan that
    doubles its stride (Hillis and Steele, 1986) needs log2(R) steps over whole tensors.

    Args:
        x: (B, R).
        mask: (B, R) bool or 0/1.
        factor: The discount per token.

    Returns:
        (B, R), 0 off the mask.
    """
    total = clean(x, mask)
    scale = torch.full_like(total, factor).masked_fill(~mask.bool(), 1)
    stride = 1
    while stride < total.shape[1]:
        total[:, :-stride] += scale[:, :-stride] * total[:, stride:]
        scale[:, :-stride] = scale[:, :-stride] * scale[:, stride:]
        stride *= 2
    return clean(total, mask)
