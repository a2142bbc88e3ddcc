"""Attention of ours in transformers' models: which models it can serve, and what it computes in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer asks of attention beyond its tensors."""

    scale: float
    """Multiplies query-key products."""
    window: int | None = None
    """A token sees itself and the `window` - 1 before it; None: all before it."""
    softcap: float | None = None
    """Scores are squashed to (-softcap, softcap) by a tanh; None: not."""

    @staticmethod
    def of(query: Tensor, options: dict[str, Any]) -> AttentionSpec:
        """Read it from the arguments of an attention function.

        Args:
            query: (..., D).
            options: What transformers passes by name.

        Raises:
            NotImplementedError: It asks for something else.
        """
        for name in ("s_aux", "position_bias"):
            if options.get(name) is not None:
                raise NotImplementedError(f"its attention uses `{name}`")
        if options.get("is_causal") is False:
            raise NotImplementedError("it attends in both directions")
        scale = options.get("scaling")
        return AttentionSpec(
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            window=options.get("sliding_window"),
            softcap=options.get("softcap"),
        )


def unreachable(base: Any) -> str | None:
    """Say why attention of ours cannot replace a model's own, as far as its class and configuration tell.

    Args:
        base: A transformers model.

    Returns:
        The reason, or None if nothing speaks against it.
    """
    config = base.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if not getattr(base, "_supports_attention_backend", False):
        return "its attention does not go through transformers' AttentionInterface"
    if kinds:
        return f"it has layers of another kind: {', '.join(sorted(kinds))}"
    if getattr(config, "use_bidirectional_attention", False):
        return "it attends in both directions"
    if base.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    return None


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Attention with grouped queries.

    Args:
        q: (B, H, T, D).
        k: (B, HK, S, D), HK a divisor of H.
        v: (B, HK, S, D).
        mask: Broadcastable to (B, H, T, S) bool, True where a query sees a key. None: causal, T == S.
        spec: Scale and soft cap; a window is the mask's business.

    Returns:
        (B, H, T, D).
    """
    if spec.softcap is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=spec.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)) * spec.scale
    scores = (torch.tanh(scores / spec.softcap) * spec.softcap).float()
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(q.dtype) @ v


def window_mask(width: int, window: int | None, device: torch.device) -> Tensor | None:
    """(width, width) bool mask of causal attention within a window; None where causality alone says it.

    Args:
        width: Tokens.
        window: As in `AttentionSpec`.
        device: Of the mask.
    """
    if window is None or window >= width:
        return None
    ones = torch.ones(width, width, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)
