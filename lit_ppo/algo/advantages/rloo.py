"""REINFORCE with a leave-one-out baseline (https://arxiv.org/abs/2402.14740)."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_ppo.algo.advantages.grpo import group_mean
from lit_ppo.algo.masked import clean


def rloo(scores: Tensor, groups: Tensor, keep: Tensor | None = None) -> Tensor:
    """Subtract the mean of the *other* samples of a group: ``n / (n - 1) (s - mean)``; a group of one keeps its score.

    Args:
        scores: (B,).
        groups: (B,) integers, equal for the samples of one prompt; a whole group in one call.
        keep: (B,) bool, False for samples that have no part in their group. None: all have.

    Returns:
        (B,), 0 where not kept.

    Raises:
        ValueError: Shapes that differ.
    """
    keep = torch.ones_like(groups, dtype=torch.bool) if keep is None else keep
    mean, count, _ = group_mean(scores, groups, keep)
    scores = clean(scores, keep)
    return clean(torch.where(count > 1, count * (scores - mean) / (count - 1).clamp(min=1), scores), keep)
