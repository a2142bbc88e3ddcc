"""Head, temperature, log-softmax and entropy in one differentiable step that never holds all logits.

The forward keeps two numbers a token. The backward computes a chunk's logits again, turns them into their gradients in
place, and multiplies these into the gradients of the hidden states and (if it is trained) of the head. On CUDA each
chunk is read once in the forward and once in the backward, by the kernels of `head_kernels`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from numbers import Real
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lit_ppo.roles.int8 import Int8Head, dtype_of, product, transposed

NEVER = -1e30
"""Logit of a suppressed token: its probability is exactly 0 and, unlike -inf, 0 * NEVER is not NaN."""


@dataclass(frozen=True)
class HeadSpec:
    """What an architecture does to the output of its head x: scale * x, then cap * tanh(. / cap)."""

    scale: float = 1.0
    """Factor of the logits (Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`)."""
    cap: float | None = None
    """Soft cap (Gemma 2's `final_logit_softcapping`); None: none."""

    @staticmethod
    def of(config: Any) -> HeadSpec:
        """Read it from a transformers configuration.

        Args:
            config: Of the model; that of its text part counts.
        """
        config = config.get_text_config()
        scale, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
        cap = getattr(config, "final_logit_softcapping", None)
        factor = float(scale) if isinstance(scale, Real) else 1.0
        return HeadSpec(factor / float(divisor or 1.0), None if not cap else float(cap))

    def __call__(self, logits: Tensor) -> Tensor:
        """Apply it, out of place."""
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


@dataclass(frozen=True)
class Tempering:
    """What turns the head's output into the logits that tokens are sampled from."""

    temperature: float = 1.0
    """Divides the logits; 0 (greedy decoding) leaves them as they are."""
    suppress: Tensor | None = None
    """(S,) int64 ids that are never sampled, S > 0; None: none."""
    spec: HeadSpec = HeadSpec()

    def __call__(self, logits: Tensor) -> Tensor:
        """Return (..., V) float32 logits, from the head's of any dtype."""
        logits = self.spec(logits.float())
        if self.temperature not in (0, 1):
            logits = logits / self.temperature
        return logits if self.suppress is None else logits.index_fill(-1, self.suppress.to(logits.device), NEVER)

    def slope(self, tempered: Tensor) -> Tensor | float:
        """Return the derivative of `__call__` at its result."""
        temperature = self.temperature or 1.0
        slope: Tensor | float = self.spec.scale / temperature
        if self.spec.cap is not None:
            slope = slope * (1 - (tempered * (temperature / self.spec.cap)).square())
        if self.suppress is not None:
            slope = slope * torch.ones_like(tempered).index_fill(-1, self.suppress.to(tempered.device), 0.0)
            slope = slope.nan_to_num(0.0)  # the square of NEVER is infinite
        return slope

    def suppress_table(self, vocab: int, device: torch.device) -> Tensor:
        """(V,) uint8, 1 where an id is suppressed."""
        assert self.suppress is not None
        return torch.zeros(vocab, dtype=torch.uint8, device=device).index_fill(0, self.suppress.to(device), 1)


def plain_forward(
    logits: Tensor, targets: Tensor, tempering: Tempering, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-prob, log of the sum of exponentials, and entropy of each row.

    Args:
        logits: (n, V) of the head.
        targets: (n,) int64.
        tempering: What makes of them the logits that are sampled from.
        entropy: Also compute the entropy.

    Returns:
        (n,) float32 each; the entropy may be None.
    """
    z = tempering(logits)
    total = z.logsumexp(-1)
    logprob = z.gather(-1, targets[:, None])[:, 0] - total
    if not entropy:
        return logprob, total, None
    z = z - total[:, None]
    return logprob, total, -(z.exp() * z).sum(-1)


def plain_backward(
    logits: Tensor,
    targets: Tensor,
    tempering: Tempering,
    total: Tensor,
    entropies: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Gradient of the head's output.

    With p the probabilities and H the entropy, d logprob / dz = onehot - p and dH / dz = -p (log p + H).

    Args:
        logits: (n, V) of the head.
        targets: (n,) int64.
        tempering: As in the forward.
        total: (n,) float32, from the forward.
        entropies: (n,) float32, from the forward.
        grad_logprob: (n,) float32.
        grad_entropy: (n,) float32, or None.

    Returns:
        (n, V), in the dtype of `logits`.
    """
    z = tempering(logits)
    log_prob = z - total[:, None]
    factor = -grad_logprob[:, None]
    if grad_entropy is not None:
        factor = factor - grad_entropy[:, None] * (log_prob + entropies[:, None])
    grad = log_prob.exp().mul_(factor)
    grad.scatter_add_(-1, targets[:, None], grad_logprob[:, None])
    return grad.mul_(tempering.slope(z)).to(logits.dtype)


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        from lit_ppo.roles import head_kernels
    except ImportError:  # no Triton
        return None
    return head_kernels


def kernels_for(logits: Tensor) -> ModuleType | None:
    """Return the kernels where they can serve these logits, else None."""
    half_or_single = logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return _kernels() if logits.is_cuda and half_or_single else None


class _FusedHead(torch.autograd.Function):
    """(N, H) hidden states, (V, H) weight, (V,) bias or None -> (N,) log-probs and entropies.

    With `scale`, (V,) float32, the weight is int8 rows and frozen.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        targets: Tensor,
        tempering: Tempering,
        entropy: bool,
        rows: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Compute chunk by chunk."""
        results = [torch.empty(len(hidden), dtype=torch.float32, device=hidden.device) for _ in range(3)]
        w, b = weight if scale is not None else weight.to(dtype), None if bias is None else bias.to(dtype)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = _logits(hidden[part].to(dtype), w, b, scale)
            kernels = kernels_for(logits)
            run = plain_forward if kernels is None else kernels.forward
            found = run(logits, targets[part], tempering, entropy)
            for row, x in zip(results, found, strict=True):
                if x is not None:
                    row[part] = x
            del logits, found
        logprobs, totals, entropies = results
        ctx.save_for_backward(hidden, weight, bias, scale, targets, totals, entropies)
        ctx.tempering, ctx.rows, ctx.dtype = tempering, rows, dtype
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> Any:
        """Compute each chunk's logits again, and from them all gradients."""
        hidden, weight, bias, scale, targets, totals, entropies = ctx.saved_tensors
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(totals)
        w, b = weight if scale is not None else weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            h = hidden[part].to(ctx.dtype)
            logits = _logits(h, w, b, scale)
            kernels = kernels_for(logits)
            run = plain_backward if kernels is None else kernels.backward_
            grad = run(
                logits, targets[part], ctx.tempering, totals[part], entropies[part], grad_logprob[part].contiguous(),
                None if grad_entropy is None else grad_entropy[part].contiguous(),
            )  # fmt: skip
            if grad_hidden is not None:
                grad_hidden[part] = grad @ w if scale is None else transposed(grad, w, scale)
            if grad_weight is not None and weight.dtype == ctx.dtype:
                grad_weight.addmm_(grad.t(), h)
            elif grad_weight is not None:
                grad_weight += grad.t() @ h
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
            del logits, grad
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """(n, H) -> (n, V), in the dtype of the states."""
    if scale is None:
        return nn.functional.linear(hidden, weight, bias)
    logits = product(hidden, weight, scale)
    return logits if bias is None else logits.add_(bias)


def fusable(head: Any) -> bool:
    """Whether a head is a plain linear layer, perhaps in int8: no adapter, no hook, so that its weight says it all."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    plain = type(head) is Int8Head or (type(head) is nn.Linear and head.weight.is_floating_point())
    return plain and "forward" not in vars(head) and not any(getattr(head, name) for name in hooks)


def fused_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: nn.Linear | Int8Head,
    tempering: Tempering,
    *,
    entropy: bool,
    chunk_elements: int,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets`, and the entropy, under softmax(tempering(head(hidden))).

    The matrix products run in the dtype of autocast, or in that of the head; everything after them is float32. The
    gradient of a trained head is summed over the chunks in a buffer of its own dtype: in bfloat16 each of C chunks
    rounds the sum by at most 2^-9 of it, about sqrt(C) 2^-9 in all (a float32 buffer would cost another 4 V H bytes).

    Args:
        hidden: (N, H).
        targets: (N,) int64.
        head: Such that `fusable`.
        tempering: Temperature, suppressed ids, soft cap and scale.
        entropy: Also return the entropy of each distribution.
        chunk_elements: Logits held at once.

    Returns:
        (N,) float32 log-probs, and (N,) float32 entropies or None.
    """
    weight, device, own = head.weight, hidden.device.type, dtype_of(head)
    autocast = torch.is_autocast_enabled(device) and own != torch.float64
    dtype = torch.get_autocast_dtype(device) if autocast else own
    scale = head.scale if isinstance(head, Int8Head) else None
    rows = max(1, chunk_elements // head.out_features)
    rows -= rows % 128 if rows > 128 else 0  # whole tiles of the matrix products
    logprobs, entropies = _FusedHead.apply(hidden, weight, head.bias, scale, targets, tempering, entropy, rows, dtype)
    return logprobs, entropies if entropy else None
