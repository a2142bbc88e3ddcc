# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""RMS norm, SwiGLU and rotary embedding, in one pass forward and one backward. Twins: `lit_ppo.roles.fused_layers`.

Forwards round where transformers rounds. Backwards compute in float32 and round what they return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from lit_ppo.roles.fused_layers import NormKind

TILE, WARPS = 4096, 8
"""Elements that a program of a norm looks at once, and its warps."""
PARTS = 512
"""Partial sums of a norm's weight gradient at most: a fixed order of summation, so the same bits every time."""
SPAN = 2048
"""Elements of a program of SwiGLU."""
PAIRS = 1024
"""Pairs that a program of the rotary embedding turns at once."""


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x_ptr,
    weight_ptr,
    out_ptr,
    rstd_ptr,
    eps,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    at = row[:, None].to(tl.int64) * WIDTH + d[None, :]
    real = (row[:, None] < rows) & (d[None, :] < WIDTH)
    x = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    y = x * rstd[:, None]
    if ROUNDS:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=d < WIDTH, other=0.0).to(tl.float32) + OFFSET
    tl.store(out_ptr + at, (y * weight[None, :]).to(out_ptr.dtype.element_ty), mask=real)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "steps"])
def _norm_backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    grad_x_ptr,
    parts_ptr,
    rows,
    steps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    # One program: steps x ROWS rows, and their sum for the gradient of the weight.
    d = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + d, mask=d < WIDTH, other=0.0).to(tl.float32) + OFFSET
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(steps):
        row = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * WIDTH + d[None, :]
        real = (row[:, None] < rows) & (d[None, :] < WIDTH)
        grad = tl.load(grad_ptr + at, mask=real, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        y = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32) * rstd
        scaled = grad * weight[None, :]
        shared = tl.sum(scaled * y, 1) / WIDTH
        grad_x = (scaled - y * shared[:, None]) * rstd
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=real)
        if WEIGHT:
            if ROUNDS:
                y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
            total += tl.sum(grad * y, 0)
    if WEIGHT:
        tl.store(parts_ptr + tl.program_id(0) * WIDTH + d, total, mask=d < WIDTH)


def _tile(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {
        "WIDTH": width,
        "BLOCK": block,
        "ROWS": max(1, TILE // block),
        "num_warps": WARPS * (2 if block > 8192 else 1),
    }


def norm(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> tuple[Tensor, Tensor]:
    """As `kind(x, weight, eps)`.

    Args:
        x: (..., H) contiguous.
        weight: (H,).
        eps: Of the norm.
        kind: Of the norm.

    Returns:
        (..., H) of the dtype that transformers returns, and (n,) float32 inverse root mean squares of the n rows.
    """
    width = x.shape[-1]
    rows, tile = x.numel() // width, _tile(width)
    out = torch.empty_like(x, dtype=kind.out_dtype(x, weight))
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _norm[(triton.cdiv(rows, tile["ROWS"]),)](
            x, weight, out, rstd, eps, rows, OFFSET=kind.offset, ROUNDS=kind.rounds, **tile
        )
    return out, rstd


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, kind: NormKind, weighs: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `norm`.

    Args:
        grad: (..., H) contiguous, of its output.
        x: (..., H) contiguous, from the forward.
        weight: (H,) from the forward.
        rstd: (n,) from the forward.
        kind: From the forward.
        weighs: Whether the weight needs a gradient.

    Returns:
        Those of x and, or None, of the weight.
    """
    width = x.shape[-1]
    tile, grad_x = _tile(width), torch.empty_like(x)
    blocks = triton.cdiv(len(rstd), tile["ROWS"])
    steps = triton.cdiv(blocks, PARTS) if weighs else 1
    programs = triton.cdiv(blocks, steps)
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device) if weighs else rstd
    with torch.cuda.device_of(x):
        _norm_backward[(programs,)](
            grad, x, weight, rstd, grad_x, parts, len(rstd), steps,
            OFFSET=kind.offset, ROUNDS=kind.rounds, WEIGHT=weighs, **tile,
        )  # fmt: skip
    return grad_x, parts.sum(0).to(weight.dtype) if weighs else None


@triton.jit
def _swiglu(gate_ptr, up_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    silu = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + at, (silu * up).to(dtype), mask=at < count)


@triton.jit
def _swiglu_backward(grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dtype = grad_up_ptr.dtype.element_ty
    grad = tl.load(grad_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-gate))
    silu = (gate * share).to(dtype).to(tl.float32)
    slope = share * (1 + gate * (1 - share))
    tl.store(grad_up_ptr + at, (grad * silu).to(dtype), mask=at < count)
    tl.store(grad_gate_ptr + at, (grad * up * slope).to(dtype), mask=at < count)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, of one shape and dtype, contiguous."""
    out, count = torch.empty_like(gate), gate.numel()
    with torch.cuda.device_of(gate):
        _swiglu[(triton.cdiv(count, SPAN),)](gate, up, out, count, BLOCK=SPAN, num_warps=4)
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `swiglu` for gate and up; all of one shape and dtype, contiguous."""
    grad_gate, grad_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    with torch.cuda.device_of(gate):
        _swiglu_backward[(triton.cdiv(count, SPAN),)](
            grad, gate, up, grad_gate, grad_up, count, BLOCK=SPAN, num_warps=4
        )
    return grad_gate, grad_up


@triton.jit(do_not_specialize=["places"])
def _rotate(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    places,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BACK: tl.constexpr,
):
    # One program: HEAD_BLOCK heads of one token. Each head is two halves that rotate into each other.
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    d = tl.arange(0, HALF_BLOCK)
    low = d < HALF
    dtype = q_out_ptr.dtype.element_ty
    is_q = (h[:, None] < HEADS) & low[None, :]
    is_k = (h[:, None] >= HEADS) & (h[:, None] < HEADS + KV_HEADS) & low[None, :]
    q_at = (row * HEADS + h[:, None]) * (2 * HALF) + d[None, :]
    k_at = (row * KV_HEADS + h[:, None] - HEADS) * (2 * HALF) + d[None, :]
    # One of the two is read, the other 0.
    a = tl.load(q_ptr + q_at, mask=is_q, other=0.0).to(tl.float32)
    b = tl.load(q_ptr + q_at + HALF, mask=is_q, other=0.0).to(tl.float32)
    a += tl.load(k_ptr + k_at, mask=is_k, other=0.0).to(tl.float32)
    b += tl.load(k_ptr + k_at + HALF, mask=is_k, other=0.0).to(tl.float32)
    place = (row % places) * (2 * HALF)
    cos_a = tl.load(cos_ptr + place + d, mask=low, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos_ptr + place + HALF + d, mask=low, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin_ptr + place + d, mask=low, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin_ptr + place + HALF + d, mask=low, other=0.0).to(tl.float32)[None, :]
    if BACK:
        new_a = a * cos_a + b * sin_b
        new_b = b * cos_b - a * sin_a
    else:
        new_a = (a * cos_a).to(dtype).to(tl.float32) - (b * sin_a).to(dtype).to(tl.float32)
        new_b = (b * cos_b).to(dtype).to(tl.float32) + (a * sin_b).to(dtype).to(tl.float32)
    tl.store(q_out_ptr + q_at, new_a.to(dtype), mask=is_q)
    tl.store(q_out_ptr + q_at + HALF, new_b.to(dtype), mask=is_q)
    tl.store(k_out_ptr + k_at, new_a.to(dtype), mask=is_k)
    tl.store(k_out_ptr + k_at + HALF, new_b.to(dtype), mask=is_k)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, back: bool) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys as `apply_rotary_pos_emb` does, or their gradients back.

    Args:
        q: (B, H, T, D), D even.
        k: (B, HK, T, D) of the same dtype.
        cos: (B or 1, T, D) contiguous.
        sin: The same.
        dtype: Of the results.
        back: The transposed rotation.

    Returns:
        Both, in memory as (B, T, heads, D).
    """
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    new_q, new_k = (torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device) for x in (q, k))
    (batch, heads, length, dim), kv_heads = q.shape, k.shape[1]
    half_block = triton.next_power_of_2(dim // 2)
    head_block = min(triton.next_power_of_2(heads + kv_heads), max(1, PAIRS // half_block))
    with torch.cuda.device_of(q):
        _rotate[(batch * length, triton.cdiv(heads + kv_heads, head_block))](
            q, k, cos, sin, new_q, new_k, cos.numel() // dim, HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2,
            HALF_BLOCK=half_block, HEAD_BLOCK=head_block, BACK=back, num_warps=4,
        )  # fmt: skip
    return new_q, new_k
