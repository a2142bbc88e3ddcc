"""REINFORCE++ (https://arxiv.org/abs/2501.03262)."""

from __future__ import annotations

from torch import Tensor

from lit_ppo.algo.masked import Reduce, whiten
from lit_ppo.algo.scan import discounted_sum


def reinforce_pp(rewards: Tensor, mask: Tensor, gamma: float, reduce: Reduce | None = None) -> Tensor:
    """Whiten the discounted return of the KL-adjusted token rewards over all response tokens of all ranks.

    Args:
        rewards: (B, R).
        mask: (B, R) bool or 0/1.
        gamma: Discount per token.
        reduce: Sums over ranks; called by every rank, twice.

    Returns:
        (B, R), 0 off the mask.

    Raises:
        ValueError: Shapes that differ, or fewer than two tokens over all ranks.
    """
    return whiten(discounted_sum(rewards, mask, gamma), mask, reduce)
