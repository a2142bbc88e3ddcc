"""Estimators of the KL divergence between policy and reference from the sampled tokens alone.

Source: J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_ppo.algo.masked import clean, upcast

_KINDS = ("k1", "abs", "k2", "k3")


def kl_estimate(logp: Tensor, ref: Tensor, kind: str, mask: Tensor | None = None) -> Tensor:
    """Estimate KL(policy || reference) token by token, with ``d = logp - ref``.

    - ``k1``: d. Unbiased, high variance, negative for some tokens.
    - ``abs``: the absolute value of d.
    - ``k2``: d^2 / 2. Its gradient is an unbiased estimate of the KL's.
    - ``k3``: exp(-d) - 1 + d. Unbiased, never negative; d is clamped to 20 and the result to 10.
    - a trailing ``+`` keeps the value and takes the gradient of ``k2``.

    Args:
        logp: Log-probs of the sampled tokens under the policy, any shape.
        ref: Their log-probs under the reference, the same shape.
        kind: One of the above.
        mask: The same shape, bool or 0/1; the estimate is 0 off it. None: every token counts.

    Returns:
        The shape of `logp`, float32 (float64 if `logp` is).

    Raises:
        ValueError: An unknown `kind`, or shapes that differ.
    """
    base = kind.removesuffix("+")
    if base not in _KINDS:
        raise ValueError(f"`kind={kind!r}` is no KL estimator: use {', '.join(_KINDS)}, or one of them with a '+'.")
    if logp.shape != ref.shape:
        raise ValueError(f"`logp` is {tuple(logp.shape)} but `ref` is {tuple(ref.shape)}; they must be equal.")
    d = upcast(logp) - upcast(ref) if mask is None else clean(logp, mask) - clean(ref, mask)
    k2 = d.square() / 2
    if base == "k1":
        kl = d
    elif base == "abs":
        kl = d.abs()
    elif base == "k2":
        kl = k2
    else:
        q = (-d).clamp(-20, 20)
        kl = (torch.expm1(q) - q).clamp(-10, 10)
    return kl.detach() + (k2 - k2.detach()) if kind.endswith("+") else kl
