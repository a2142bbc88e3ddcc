"""Log-probs of given tokens from hidden states, without ever holding (tokens, vocabulary) logits for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_ppo.roles.fused_head import HeadSpec, Tempering, fusable, fused_logprobs, plain_forward

CHUNK_ELEMENTS = 2**27
"""Logits held at once, whatever the vocabulary: 256 MiB in half precision."""

UNCHANGED = HeadSpec()


def tempered_logits(logits: Tensor, temperature: float, suppress: Tensor | None) -> Tensor:
    """Return the float32 logits that tokens are sampled from; the one definition that every log-prob uses.

    Args:
        logits: (..., V) of any float dtype: the model's, scaled or capped as its architecture does.
        temperature: Divides the logits; 0 (greedy decoding) leaves them as they are.
        suppress: (S,) int64 ids that are never sampled, or None.
    """
    return _tempering(temperature, suppress, UNCHANGED)(logits)


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    temperature: float = 1.0,
    suppress: Tensor | None = None,
    spec: HeadSpec = UNCHANGED,
    entropy: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets`, and the entropy, with the head applied to a chunk of tokens at a time.

    The backward computes each chunk's logits again rather than keep them, so the peak depends on the chunk and not on
    the number of tokens. A plain linear head takes the fused path (`lit_ppo.roles.fused_head`); one with an adapter, a
    quantized one or one with hooks is called, under torch's checkpointing.

    Args:
        hidden: (N, H) last hidden states at the positions that predict `targets`.
        targets: (N,) int64.
        head: Maps (n, H) to (n, V) logits.
        temperature: As in `tempered_logits`.
        suppress: As in `tempered_logits`.
        spec: What the architecture does to the head's output.
        entropy: Also return the entropy of each distribution.
        chunk_elements: Logits held at once.

    Returns:
        (N,) float32 log-probs, and (N,) float32 entropies or None.
    """
    tempering = _tempering(temperature, suppress, spec)
    if fusable(head):
        linear: Any = head
        return fused_logprobs(hidden, targets, linear, tempering, entropy=entropy, chunk_elements=chunk_elements)

    def run(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = head(h)  # of a role on several devices perhaps elsewhere
        logprob, _, entropies = plain_forward(logits, t.to(logits.device), tempering, entropy)
        return logprob.to(h.device), None if entropies is None else entropies.to(h.device)

    rows = max(1, chunk_elements // head_width(head, hidden))
    if len(hidden) <= rows:
        return run(hidden, targets)
    parts = []
    for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(run, h, t, use_reentrant=False))
        else:
            parts.append(run(h, t))
    logprobs = torch.cat([p[0] for p in parts])
    return logprobs, torch.cat([p[1] for p in parts]) if entropy else None


def _tempering(temperature: float, suppress: Tensor | None, spec: HeadSpec) -> Tempering:
    return Tempering(temperature, suppress if suppress is not None and suppress.numel() else None, spec)


def head_width(head: Callable[[Tensor], Tensor], hidden: Tensor) -> int:
    """Return V, the number of logits of a head."""
    features = getattr(head, "out_features", None)
    if features is None:  # a wrapped head (an adapter, a quantized layer): ask it about one token
        with torch.no_grad():
            features = head(hidden[:1]).shape[-1] if len(hidden) else 1
    return int(features)


def values_from(hidden: Tensor, head: nn.Module) -> Tensor:
    """Apply a scalar head in float32, whatever the trunk's dtype.

    Args:
        hidden: (N, H).
        head: A linear layer with one output.

    Returns:
        (N,) float32 values.
    """
    weight: Any = head.weight
    bias: Any = getattr(head, "bias", None)
    with torch.autocast(hidden.device.type, enabled=False):
        values = nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    return values[:, 0]
