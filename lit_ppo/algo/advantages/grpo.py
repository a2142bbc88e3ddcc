"""Group-relative advantages (https://arxiv.org/abs/2402.03300)."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_ppo.algo.masked import clean, masked_mean, masked_sum


def grpo(scores: Tensor, groups: Tensor, scale: bool = True, keep: Tensor | None = None) -> Tensor:
    """Compare each sample with its group: ``(s - mean) / (std + 1e-6)``, std unbiased. A group of one keeps its score.

    Args:
        scores: (B,).
        groups: (B,) integers, equal for the samples of one prompt; a whole group in one call.
        scale: Divide by the standard deviation; without it, https://arxiv.org/abs/2503.20783.
        keep: (B,) bool, False for samples that have no part in their group. None: all have.

    Returns:
        (B,), 0 where not kept.

    Raises:
        ValueError: Shapes that differ.
    """
    keep = torch.ones_like(groups, dtype=torch.bool) if keep is None else keep
    mean, count, together = group_mean(scores, groups, keep)
    advantages = clean(scores, keep) - mean.masked_fill(count < 2, 0)
    if scale:
        squares = masked_sum(advantages.square().expand(together.shape), together, 1)
        std = (squares / (count - 1).clamp(min=1)).sqrt() + 1e-6
        advantages = advantages / std.masked_fill(count < 2, 1)
    return clean(advantages, keep)


def group_mean(scores: Tensor, groups: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and size of each sample's group, without atomics, so that it is the same in every run.

    Args:
        scores: (B,).
        groups: (B,) integers.
        keep: (B,) bool, True for samples that count.

    Returns:
        (B,) mean of the kept samples of the group; (B,) their number; (B, B) bool, True where column j is a kept
        sample of the group of row i.

    Raises:
        ValueError: Shapes that differ.
    """
    for name, other in (("groups", groups), ("keep", keep)):
        if other.shape != scores.shape or scores.dim() != 1:
            raise ValueError(
                f"`{name}` is {tuple(other.shape)} and `scores` is {tuple(scores.shape)}: both must be (B,)."
            )
    together = (groups[:, None] == groups) & keep.bool()
    return masked_mean(scores.expand(together.shape), together, 1), together.sum(1), together
