"""The losses, token by token, and how they become one number.

A loss returns its value per token and a dict of statistics. The statistics are **sums** over the masked tokens, with
`tokens` the number of tokens: add them up over micro-batches and ranks, then divide by `tokens`. A mean of means
would weigh a token by the size of its micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_ppo.algo.masked import clean, masked_mean, masked_sum, upcast
from lit_ppo.config import AGGREGATIONS

Stats = dict[str, Tensor]


def policy_loss(
    logp: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Stats]:
    """Clipped surrogate loss of PPO (https://arxiv.org/abs/1707.06347, eq. 7), negated.

    ``L1 = -A rho``, ``L2 = -A clip(rho, 1 - clip_low, 1 + clip_high)``, the loss is the larger; with `dual_clip` = c it
    is at most ``-A c`` where A < 0 (https://arxiv.org/abs/1912.09729, eq. 5). The log-ratio is clamped to [-20, 20].

    Args:
        logp: (B, R) log-probs under the policy; the gradient flows through it.
        old: (B, R) log-probs before the first update.
        advantages: (B, R).
        mask: (B, R) bool or 0/1.
        clip_low: The ratio is clipped from below at 1 - clip_low.
        clip_high: And from above at 1 + clip_high.
        dual_clip: Bound of the loss where the advantage is negative, above 1; None is off.

    Returns:
        The loss per token (B, R), 0 off the mask; and sums over tokens: `tokens`; `clipfrac`, tokens where the clip
        binds; `dual_clipfrac`, where the dual clip binds; `approxkl`, half the squared log-ratio; `approxkl_k1`, old
        minus new log-prob; `ratio` and `ratio_sq`.

    Raises:
        ValueError: Shapes that differ, or `dual_clip` not above 1.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"`dual_clip={dual_clip!r}` must be above 1, where it would cut the unclipped loss.")
    advantages = clean(advantages, mask)
    d = (clean(logp, mask) - clean(old, mask)).clamp(-20, 20)
    ratio = d.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    dual = torch.zeros_like(mask, dtype=torch.bool)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        dual = (advantages < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
    with torch.no_grad():
        stats = {
            "tokens": masked_sum(torch.ones_like(d), mask),
            "clipfrac": masked_sum(clipped > unclipped, mask),
            "dual_clipfrac": masked_sum(dual, mask),
            "approxkl": masked_sum(d.square() / 2, mask),
            "approxkl_k1": masked_sum(-d, mask),
            "ratio": masked_sum(ratio, mask),
            "ratio_sq": masked_sum(ratio.square(), mask),
        }
    return loss, stats


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Stats]:
    """Half the squared error of the critic, with the clip of PPO's reference implementation.

    ``0.5 max((v - ret)^2, (clip(v, V_old - clip, V_old + clip) - ret)^2)``
    (https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/, detail 9).

    Args:
        values: (B, R) predictions; the gradient flows through it.
        old_values: (B, R) predictions before the first update.
        returns: (B, R) targets.
        mask: (B, R) bool or 0/1.
        clip: How far a value may move from its old one; None is off.

    Returns:
        The loss per token (B, R), 0 off the mask; and sums over tokens: `tokens`; `clipfrac`, tokens where the clip
        binds.

    Raises:
        ValueError: Shapes that differ.
    """
    values, returns = clean(values, mask), clean(returns, mask)
    loss = (values - returns).square()
    bound = torch.zeros_like(mask, dtype=torch.bool)
    if clip is not None:
        old_values = clean(old_values, mask)
        clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
        bound = clipped > loss
        loss = torch.maximum(loss, clipped)
    with torch.no_grad():
        stats = {"tokens": masked_sum(torch.ones_like(loss), mask), "clipfrac": masked_sum(bound, mask)}
    return 0.5 * loss, stats


def aggregate(
    token_loss: Tensor,
    mask: Tensor,
    mode: str,
    *,
    tokens: Tensor | float | None = None,
    sequences: Tensor | float | None = None,
    width: int | None = None,
) -> Tensor:
    """Turn a loss per token into one number.

    - ``token_mean``: sum over tokens / `tokens`.
    - ``token_sum``: sum over tokens.
    - ``seq_mean_token_sum``: sum over tokens / `sequences`.
    - ``seq_mean_token_mean``: sum over sequences of the mean of their tokens / `sequences`.
    - ``seq_mean_token_sum_norm``: sum over tokens / (`sequences` * `width`).

    `tokens` and `sequences` are the totals of the *global minibatch*, over all micro-batches and ranks, so that the
    results of micro-batches are summed and neither the loss nor the gradient depends on how the minibatch was cut.

    Args:
        token_loss: (B, R).
        mask: (B, R) bool or 0/1.
        mode: One of the above.
        tokens: Tokens of the global minibatch. None: those of `mask`.
        sequences: Sequences of the global minibatch that have a token. None: those of `mask`.
        width: The configured `max_new_tokens`, never the padded width, which depends on the batch.

    Returns:
        0-dim. A minibatch with no tokens at all gives 0.

    Raises:
        ValueError: An unknown `mode`, or ``seq_mean_token_sum_norm`` without `width`.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"`mode={mode!r}` is no aggregation: use one of {', '.join(AGGREGATIONS)}.")
    mask = mask.bool()
    if mode == "token_sum":
        return masked_sum(token_loss, mask)
    if mode == "token_mean":
        return masked_sum(token_loss, mask) / _at_least_one(mask.sum() if tokens is None else tokens)
    count = _at_least_one(mask.any(1).sum() if sequences is None else sequences)
    if mode == "seq_mean_token_mean":
        return masked_mean(token_loss, mask, 1).sum() / count
    if mode == "seq_mean_token_sum":
        return masked_sum(token_loss, mask) / count
    if width is None or width < 1:
        raise ValueError(
            f"`width={width!r}` must be the configured `max_new_tokens`, which `mode='{mode}'` divides by."
        )
    return masked_sum(token_loss, mask) / (count * width)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the softmax of `logits`, in nats. A logit of -inf is a token that cannot be sampled.

    Args:
        logits: (..., V), divided by the temperature already; any float dtype.

    Returns:
        (...,) float32 (float64 if `logits` is).
    """
    logp = torch.log_softmax(upcast(logits), -1)
    return -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)


def _at_least_one(count: Tensor | float) -> Tensor | float:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
