# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels for what surrounds the matrix products of a decoder layer: norms, rotary embedding, SwiGLU.

Each rounds where transformers rounds, so that a 16-bit rollout stays as close to the training forward as it can, and is
tested against the plain PyTorch twin that its docstring names.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def next_power(n: int) -> int:
    """Return the least power of 2 that is not below `n`."""
    return max(1, 1 << (n - 1).bit_length())


@triton.jit
def _add_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    real = d < WIDTH
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * WIDTH + d, mask=real, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(residual_ptr + row * WIDTH + d, mask=real, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual_ptr + row * WIDTH + d, x, mask=real)
    x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + d, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + d, (x.to(dtype).to(tl.float32) * weight).to(dtype), mask=real)


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `x` to the residual stream in place, and return its RMS norm. Twin: `residual + x`, then LlamaRMSNorm.

    Args:
        x: (n, H) contiguous.
        residual: (n, H) contiguous, updated; None: the norm of `x` itself.
        weight: (H,).
        eps: Of the norm.

    Returns:
        (n, H) of x's dtype, rounded where transformers rounds.
    """
    out = torch.empty_like(x)
    width = x.shape[1]
    block = next_power(width)
    _add_norm[(len(x),)](
        x, x if residual is None else residual, weight, out, eps, WIDTH=width, BLOCK=block, ADD=residual is not None,
        num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return out


@triton.jit
def _rotate(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    place_ptr,
    q_norm_ptr,
    k_norm_ptr,
    out_ptr,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    # One program: HEAD_BLOCK heads of one token. Each head is two halves that rotate into each other.
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    d = tl.arange(0, HALF_BLOCK)
    dim = 2 * HALF
    dtype = out_ptr.dtype.element_ty
    real = (h[:, None] < HEADS + KV_HEADS) & (d[None, :] < HALF)
    a = tl.load(qkv_ptr + (row * (HEADS + 2 * KV_HEADS) + h[:, None]) * dim + d[None, :], mask=real, other=0.0)
    b = tl.load(qkv_ptr + (row * (HEADS + 2 * KV_HEADS) + h[:, None]) * dim + HALF + d[None, :], mask=real, other=0.0)
    place = tl.load(place_ptr + row)
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    low = d < HALF
    if NORM:
        is_q = h[:, None] < HEADS
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / dim + eps)[:, None]
        q_a = tl.load(q_norm_ptr + d, mask=low, other=0.0).to(tl.float32)[None, :]
        q_b = tl.load(q_norm_ptr + HALF + d, mask=low, other=0.0).to(tl.float32)[None, :]
        k_a = tl.load(k_norm_ptr + d, mask=low, other=0.0).to(tl.float32)[None, :]
        k_b = tl.load(k_norm_ptr + HALF + d, mask=low, other=0.0).to(tl.float32)[None, :]
        a = ((a * scale).to(dtype).to(tl.float32) * tl.where(is_q, q_a, k_a)).to(dtype).to(tl.float32)
        b = ((b * scale).to(dtype).to(tl.float32) * tl.where(is_q, q_b, k_b)).to(dtype).to(tl.float32)
    cos_a = tl.load(cos_ptr + place * dim + d, mask=low, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos_ptr + place * dim + HALF + d, mask=low, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin_ptr + place * dim + d, mask=low, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin_ptr + place * dim + HALF + d, mask=low, other=0.0).to(tl.float32)[None, :]
    at = (row * (HEADS + KV_HEADS) + h[:, None]) * dim + d[None, :]
    new_a = (a * cos_a).to(dtype).to(tl.float32) - (b * sin_a).to(dtype).to(tl.float32)
    new_b = (b * cos_b).to(dtype).to(tl.float32) + (a * sin_b).to(dtype).to(tl.float32)
    tl.store(out_ptr + at, new_a.to(dtype), mask=real)
    tl.store(out_ptr + at + HALF, new_b.to(dtype), mask=real)


def rotate(
    qkv: Tensor,
    table: tuple[Tensor, Tensor],
    places: Tensor,
    heads: tuple[int, int],
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys, after their norms if any. Twin: transformers' `apply_rotary_pos_emb`.

    Args:
        qkv: (n, (H + 2 HK) D) contiguous: queries, keys, values.
        table: Cosines and sines, each (positions, D) of qkv's dtype.
        places: (n,) int64 positions.
        heads: H and HK.
        norms: Weights of the query's and the key's norm, each (D,), and their epsilon.

    Returns:
        Queries (n, H, D), keys and values (n, HK, D).
    """
    n_heads, kv_heads = heads
    tokens, dim = len(qkv), qkv.shape[1] // (n_heads + 2 * kv_heads)
    out = qkv.new_empty(tokens, n_heads + kv_heads, dim)
    half_block = next_power(dim // 2)
    head_block = min(next_power(n_heads + kv_heads), max(1, 1024 // half_block))
    q_norm, k_norm, eps = norms if norms is not None else (qkv, qkv, 0.0)
    _rotate[(tokens, triton.cdiv(n_heads + kv_heads, head_block))](
        qkv, table[0], table[1], places, q_norm, k_norm, out, eps,
        HEADS=n_heads, KV_HEADS=kv_heads, HALF=dim // 2, HALF_BLOCK=half_block, HEAD_BLOCK=head_block,
        NORM=norms is not None, num_warps=4,
    )  # fmt: skip
    return out[:, :n_heads], out[:, n_heads:], qkv.view(tokens, -1, dim)[:, n_heads + kv_heads :]


@triton.jit
def _swiglu(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = d < width
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * 2 * width + d, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + d, mask=real, other=0.0).to(tl.float32)
    silu = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + d, (silu * up).to(dtype), mask=real)


def swiglu(x: Tensor) -> Tensor:
    """(n, 2 I) contiguous, gate and up -> (n, I). Twin: `silu(gate) * up`."""
    width = x.shape[1] // 2
    out = x.new_empty(len(x), width)
    block = min(2048, next_power(width))
    _swiglu[(len(x), triton.cdiv(width, block))](x, out, width, BLOCK=block, num_warps=4)
    return out
