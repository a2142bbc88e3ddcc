"""Advantage estimators, one file each, behind one function: `estimate`."""

from __future__ import annotations

from torch import Tensor

from lit_ppo.algo.advantages.gae import gae
from lit_ppo.algo.advantages.grpo import grpo
from lit_ppo.algo.advantages.reinforce_pp import reinforce_pp
from lit_ppo.algo.advantages.rloo import rloo
from lit_ppo.algo.masked import Reduce, clean, masked_sum, whiten
from lit_ppo.config import ADVANTAGES

__all__ = ["estimate", "gae", "grpo", "reinforce_pp", "rloo", "spread"]


def spread(sequence_advantage: Tensor, mask: Tensor) -> Tensor:
    """Give every response token the advantage of its sequence.

    Args:
        sequence_advantage: (B,).
        mask: (B, R) bool or 0/1.

    Returns:
        (B, R), 0 off the mask.
    """
    return clean(sequence_advantage[:, None].expand(mask.shape), mask)


def estimate(
    name: str,
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    values: Tensor | None = None,
    bootstrap: Tensor | None = None,
    groups: Tensor | None = None,
    whiten_advantages: bool = True,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute advantages with the estimator called `name`, and returns if it has a critic to train.

    Args:
        name: gae, grpo, rloo or reinforce_pp.
        rewards: (B, R) token rewards with the KL penalty in; grpo and rloo score a sequence by their sum.
        mask: (B, R) bool or 0/1; a row with no token has no part in anything.
        gamma: Discount per token (gae, reinforce_pp).
        lam: GAE's lambda.
        values: (B, R) V before each token (gae).
        bootstrap: (B,) V at the cut of truncated rows, 0 elsewhere (gae).
        groups: (B,) integers, equal for the samples of one prompt (grpo, rloo); a whole group on one rank.
        whiten_advantages: Whiten over all response tokens of all ranks (gae; reinforce_pp always does).
        reduce: Sums over ranks.

    Returns:
        Advantages (B, R), and returns (B, R) for gae, else None. Both 0 off the mask.

    Raises:
        ValueError: An unknown `name`, what it needs is missing, or shapes that differ.
    """
    if name == "gae":
        if values is None:
            raise ValueError("`values` is missing: `name='gae'` needs the values of a critic.")
        advantages, returns = gae(rewards, values, mask, gamma, lam, bootstrap)
        return (whiten(advantages, mask, reduce) if whiten_advantages else advantages), returns
    if name == "reinforce_pp":
        return reinforce_pp(rewards, mask, gamma, reduce), None
    if name not in ("grpo", "rloo"):
        raise ValueError(f"`name={name!r}` is no advantage estimator: use one of {', '.join(ADVANTAGES)}.")
    if groups is None:
        raise ValueError(f"`groups` is missing: `name={name!r}` compares the samples of one prompt.")
    scores, keep = masked_sum(rewards, mask, 1), mask.bool().any(1)
    relative = grpo(scores, groups, keep=keep) if name == "grpo" else rloo(scores, groups, keep)
    return spread(relative, mask), None
