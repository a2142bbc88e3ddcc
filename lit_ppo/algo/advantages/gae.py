"""Generalised advantage estimation (https://arxiv.org/abs/1506.02438)."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_ppo.algo.masked import clean
from lit_ppo.algo.scan import discounted_sum


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``A_t = delta_t + gamma lam A_next`` with ``delta_t = r_t + gamma V_next - V_t``.

    Next is the next token of the row that is on the mask: masked spans inside a row are bridged. After the last token
    A is 0 and V is `bootstrap`.

    Args:
        rewards: (B, R).
        values: (B, R) V before each token.
        mask: (B, R) bool or 0/1.
        gamma: Discount per token.
        lam: Trades bias (0) for variance (1).
        bootstrap: (B,) V after the last token: the critic's value at the cut for rows cut by their length, 0 for rows
            that ended. None: 0 for all.

    Returns:
        Advantages, not whitened, and returns ``A + V``; (B, R) each, 0 off the mask.

    Raises:
        ValueError: Shapes that differ.
    """
    batch, width = mask.shape
    if bootstrap is not None and bootstrap.shape != (batch,):
        raise ValueError(f"`bootstrap` is {tuple(bootstrap.shape)}; it must hold one value per row: ({batch},).")
    rewards, values = clean(rewards, mask), clean(values, mask)
    last = torch.zeros_like(values[:, 0]) if bootstrap is None else bootstrap.to(values)
    padded = torch.cat([values, last[:, None]], 1)
    # Column of the next token on the mask; `width`, where `bootstrap` stands, after the last one.
    columns = torch.where(mask.bool(), torch.arange(width, device=mask.device), width)
    following = torch.full_like(columns, width)
    following[:, :-1] = columns.flip(1).cummin(1).values.flip(1)[:, 1:]
    delta = rewards + gamma * padded.gather(1, following) - values
    advantages = discounted_sum(delta, mask, gamma * lam)
    return advantages, advantages + values
