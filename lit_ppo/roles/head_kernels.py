# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Log-prob, entropy and their gradient from a chunk of logits, in one pass each. Twins: `lit_ppo.roles.fused_head`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from lit_ppo.roles.fused_head import Tempering

BLOCK, WARPS = 4096, 8
"""Vocabulary entries that a program looks at once, and its warps."""


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def _temper(x, suppressed, scale, cap, temperature, SCALE: tl.constexpr, CAP: tl.constexpr, TEMPER: tl.constexpr):
    # What the head gave -> (the logit that is sampled from, its derivative).
    z = x.to(tl.float32)
    slope = tl.full((), 1.0, tl.float32)
    if SCALE:
        z = z * scale
        slope = slope * scale
    if CAP:
        u = _tanh(z / cap)
        z = cap * u
        slope = slope * (1.0 - u * u)
    if TEMPER:
        z = tl.div_rn(z, temperature)
        slope = slope / temperature
    return tl.where(suppressed, -1.0e30, z), tl.where(suppressed, 0.0, slope)


@triton.jit
def _forward(
    logits_ptr,
    targets_ptr,
    suppress_ptr,
    logprob_ptr,
    total_ptr,
    entropy_ptr,
    scale,
    cap,
    temperature,
    vocab,
    stride,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    TEMPER: tl.constexpr,
    SUPPRESS: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    # One program: one row. Running maximum, sum of exp, and (for the entropy) sum of exp times the distance to the top.
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    top = tl.full((), -1.0e30, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        real = ids < vocab
        out = real == 0
        if SUPPRESS:
            out = out | (tl.load(suppress_ptr + ids, mask=real, other=0) != 0)
        x = tl.load(row_ptr + ids, mask=real, other=0.0)
        z, _ = _temper(x, out, scale, cap, temperature, SCALE, CAP, TEMPER)
        new = tl.maximum(top, tl.max(z, 0))
        weight = tl.where(out, 0.0, tl.exp(z - new))
        shift = top - new
        kept = tl.exp(shift)
        if ENTROPY:
            weighted = kept * (weighted + total * shift) + tl.sum(weight * (z - new), 0)
        total = kept * total + tl.sum(weight, 0)
        top = new
    target = tl.load(targets_ptr + row)
    out = target < 0
    if SUPPRESS:
        out = out | (tl.load(suppress_ptr + target) != 0)
    chosen, _ = _temper(tl.load(row_ptr + target), out, scale, cap, temperature, SCALE, CAP, TEMPER)
    log_total = top + tl.log(total)
    tl.store(logprob_ptr + row, chosen - log_total)
    tl.store(total_ptr + row, log_total)
    if ENTROPY:
        tl.store(entropy_ptr + row, tl.log(total) - weighted / total)


@triton.jit
def _backward(
    logits_ptr,
    targets_ptr,
    suppress_ptr,
    total_ptr,
    entropy_ptr,
    grad_logprob_ptr,
    grad_entropy_ptr,
    scale,
    cap,
    temperature,
    vocab,
    stride,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    TEMPER: tl.constexpr,
    SUPPRESS: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    # One program: one row, BLOCK vocabulary entries. Logits are replaced by their gradients.
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = ids < vocab
    out = real == 0
    if SUPPRESS:
        out = out | (tl.load(suppress_ptr + ids, mask=real, other=0) != 0)
    at = logits_ptr + row * stride + ids
    z, slope = _temper(tl.load(at, mask=real, other=0.0), out, scale, cap, temperature, SCALE, CAP, TEMPER)
    log_prob = z - tl.load(total_ptr + row)
    grad = tl.load(grad_logprob_ptr + row)
    wanted = tl.where(ids == tl.load(targets_ptr + row), grad, 0.0)
    factor = grad
    if ENTROPY:
        factor = grad + tl.load(grad_entropy_ptr + row) * (log_prob + tl.load(entropy_ptr + row))
    result = (wanted - tl.exp(log_prob) * factor) * slope
    tl.store(at, result.to(logits_ptr.dtype.element_ty), mask=real)


def forward(logits: Tensor, targets: Tensor, tempering: Tempering, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `fused_head.plain_forward`, in one pass over the logits.

    Args:
        logits: (n, V) of the head, the last dimension contiguous.
        targets: (n,) int64.
        tempering: What makes of them the logits that are sampled from.
        entropy: Also compute the entropy.
    """
    rows = len(logits)
    logprob, total, entropies = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        _forward[(rows,)](
            logits, targets, *_suppressed(tempering, logits), logprob, total, entropies, *_numbers(tempering),
            logits.shape[1], logits.stride(0), BLOCK=BLOCK, ENTROPY=entropy, **_switches(tempering), num_warps=WARPS,
        )  # fmt: skip
    return logprob, total, entropies


def backward_(
    logits: Tensor,
    targets: Tensor,
    tempering: Tempering,
    total: Tensor,
    entropies: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """As `fused_head.plain_backward`, in place.

    Args:
        logits: (n, V) of the head, which become their own gradient.
        targets: (n,) int64.
        tempering: As in the forward.
        total: (n,) float32, from the forward.
        entropies: (n,) float32, from the forward.
        grad_logprob: (n,) float32.
        grad_entropy: (n,) float32, or None.
    """
    rows, vocab = logits.shape
    with torch.cuda.device_of(logits):
        _backward[(rows, triton.cdiv(vocab, BLOCK))](
            logits, targets, *_suppressed(tempering, logits), total, entropies, grad_logprob,
            grad_logprob if grad_entropy is None else grad_entropy, *_numbers(tempering),
            vocab, logits.stride(0), BLOCK=BLOCK, ENTROPY=grad_entropy is not None, **_switches(tempering),
            num_warps=WARPS,
        )  # fmt: skip
    return logits


def _suppressed(tempering: Tempering, logits: Tensor) -> tuple[Tensor]:
    return (logits if tempering.suppress is None else tempering.suppress_table(logits.shape[1], logits.device),)


def _numbers(tempering: Tempering) -> tuple[float, float, float]:
    spec = tempering.spec
    return spec.scale, 1.0 if spec.cap is None else spec.cap, tempering.temperature or 1.0


def _switches(tempering: Tempering) -> dict[str, Any]:
    return {
        "SCALE": tempering.spec.scale != 1,
        "CAP": tempering.spec.cap is not None,
        "TEMPER": tempering.temperature not in (0, 1),
        "SUPPRESS": tempering.suppress is not None,
    }
