"""Sums, means and variances over the tokens that count."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks and returns the sum."""


def upcast(x: Tensor) -> Tensor:
    """Return `x` as float64 if it is float64, else as float32."""
    return x if x.dtype == torch.float64 else x.float()


def clean(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x`, upcast, with zeros off the mask.

    Call it on the *inputs* of a formula: masking only its result would still send NaN through the backward pass.

    Args:
        x: Any shape, any dtype.
        mask: The shape of `x`, bool or 0/1.

    Raises:
        ValueError: The shapes differ.
    """
    if x.shape != mask.shape:
        raise ValueError(f"`mask` is {tuple(mask.shape)} but what it masks is {tuple(x.shape)}; they must be equal.")
    x = upcast(x)
    return torch.where(mask.bool(), x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum `x` where `mask` is set: over everything, or over one dimension.

    Args:
        x: Any shape.
        mask: The shape of `x`, bool or 0/1.
        dim: The dimension to sum over; None sums all.
    """
    return clean(x, mask).sum() if dim is None else clean(x, mask).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average `x` where `mask` is set. The mean of nothing is 0, and so is its gradient.

    Args:
        x: Any shape.
        mask: The shape of `x`, bool or 0/1.
        dim: The dimension to average over; None averages all.
    """
    mask = mask.bool()
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def _moments(x: Tensor, mask: Tensor, reduce: Reduce | None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squares around that mean, over all ranks; the mean first, so that nothing cancels."""
    sums = reduce or (lambda t: t)
    x = clean(x, mask)
    count, total = sums(torch.stack([mask.bool().sum().to(x.dtype), x.sum()])).unbind()
    mean = total / count.clamp(min=1)
    return count, mean, sums(clean(x - mean, mask).square().sum())


def masked_var(x: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Return the unbiased variance of `x` where `mask` is set, over all ranks.

    Args:
        x: Any shape.
        mask: The shape of `x`, bool or 0/1.
        reduce: Sums over ranks; called by every rank, twice.

    Raises:
        ValueError: Fewer than two values, which have no variance.
    """
    count, _, squares = _moments(x, mask, reduce)
    _need_two(count)
    return squares / (count - 1)


def whiten(x: Tensor, mask: Tensor, reduce: Reduce | None = None, keep_mean: bool = False) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over the masked values of all ranks: ``(x - mean) * rsqrt(var + 1e-8)``.

    Args:
        x: Any shape.
        mask: The shape of `x`, bool or 0/1.
        reduce: Sums over ranks; called by every rank, twice.
        keep_mean: Add the mean back, so that only the scale changes.

    Returns:
        The shape of `x`, 0 off the mask.

    Raises:
        ValueError: Fewer than two values over all ranks.
    """
    count, mean, squares = _moments(x, mask, reduce)
    _need_two(count)
    white = (clean(x, mask) - mean) * torch.rsqrt(squares / (count - 1) + 1e-8)
    return clean(white + mean if keep_mean else white, mask)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Return ``1 - var(returns - values) / var(returns)``: 1 for a perfect critic, 0 for a constant, below 0 for worse.

    Args:
        values: (B, R) values predicted before the update.
        returns: (B, R) returns.
        mask: (B, R) bool or 0/1.
        reduce: Sums over ranks; called by every rank, four times.

    Returns:
        0-dim; NaN where all returns are equal, as there is nothing to explain.

    Raises:
        ValueError: Fewer than two values over all ranks.
    """
    target = clean(returns, mask)
    variance = masked_var(target, mask, reduce)
    rest = masked_var(target - clean(values, mask), mask, reduce)
    return torch.where(variance > 0, 1 - rest / variance, torch.full_like(variance, float("nan")))


def _need_two(count: Tensor) -> None:
    if count < 2:
        raise ValueError(
            f"A variance needs at least 2 response tokens over all ranks and there is {int(count)}. "
            "Sample more or longer responses, or turn whitening off."
        )
