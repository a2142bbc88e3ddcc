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


def _next_power(n: int) -> int:
    return max(1, 1 << (n - 1).bit_length())


@triton.jit
def _add_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
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
    block = _next_power(width)
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
    slot_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    eps,
    slot_stride,
    head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    STORE: tl.constexpr,
):
    # One program: HEAD_BLOCK heads of one token. Each head is two halves that rotate into each other.
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    d = tl.arange(0, HALF_BLOCK)
    dim = 2 * HALF
    dtype = q_ptr.dtype.element_ty
    real = (h[:, None] < HEADS + 2 * KV_HEADS) & (d[None, :] < HALF)
    at = (row * (HEADS + 2 * KV_HEADS) + h[:, None]) * dim + d[None, :]
    left = tl.load(qkv_ptr + at, mask=real, other=0.0)
    right = tl.load(qkv_ptr + at + HALF, mask=real, other=0.0)
    place = tl.load(place_ptr + row)
    is_q = h[:, None] < HEADS
    is_v = h[:, None] >= HEADS + KV_HEADS
    a = left.to(tl.float32)
    b = right.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / dim + eps)[:, None]
        low = d[None, :] < HALF
        wq_l = tl.load(q_norm_ptr + d[None, :], mask=low, other=0.0)
        wq_r = tl.load(q_norm_ptr + HALF + d[None, :], mask=low, other=0.0)
        wk_l = tl.load(k_norm_ptr + d[None, :], mask=low, other=0.0)
        wk_r = tl.load(k_norm_ptr + HALF + d[None, :], mask=low, other=0.0)
        a = ((a * scale).to(dtype).to(tl.float32) * tl.where(is_q, wq_l, wk_l).to(tl.float32)).to(dtype).to(tl.float32)
        b = ((b * scale).to(dtype).to(tl.float32) * tl.where(is_q, wq_r, wk_r).to(tl.float32)).to(dtype).to(tl.float32)
    in_half = d < HALF
    cos_l = tl.load(cos_ptr + place * dim + d, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos_r = tl.load(cos_ptr + place * dim + HALF + d, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_l = tl.load(sin_ptr + place * dim + d, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_r = tl.load(sin_ptr + place * dim + HALF + d, mask=in_half, other=0.0).to(tl.float32)[None, :]
    new_a = ((a * cos_l).to(dtype).to(tl.float32) - (b * sin_l).to(dtype).to(tl.float32)).to(dtype)
    new_b = ((b * cos_r).to(dtype).to(tl.float32) + (a * sin_r).to(dtype).to(tl.float32)).to(dtype)
    q_at = (row * HEADS + h[:, None]) * dim + d[None, :]
    tl.store(q_ptr + q_at, new_a, mask=real & is_q)
    tl.store(q_ptr + q_at + HALF, new_b, mask=real & is_q)
    is_k = real & (is_q == 0) & (is_v == 0)
    if STORE:
        slot = tl.load(slot_ptr + row)
        kv_at = slot * slot_stride + place * dim + d[None, :]
        stride = head_stride
    else:
        kv_at = row * KV_HEADS * dim + d[None, :]
        stride = dim
    k_at = kv_at + (h[:, None] - HEADS) * stride
    v_at = kv_at + (h[:, None] - HEADS - KV_HEADS) * stride
    tl.store(k_ptr + k_at, new_a, mask=is_k)
    tl.store(k_ptr + k_at + HALF, new_b, mask=is_k)
    tl.store(v_ptr + v_at, left, mask=real & is_v)
    tl.store(v_ptr + v_at + HALF, right, mask=real & is_v)


def rotate(
    qkv: Tensor,
    table: tuple[Tensor, Tensor],
    places: Tensor,
    heads: tuple[int, int],
    norms: tuple[Tensor, Tensor, float] | None = None,
    store: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys, after their norms if any. Twin: transformers' `apply_rotary_pos_emb`.

    Args:
        qkv: (n, (H + 2 HK) D) contiguous: queries, keys, values.
        table: Cosines and sines, each (positions, D) of qkv's dtype.
        places: (n,) int64 positions.
        heads: H and HK.
        norms: Weights of the query's and the key's norm, each (D,), and their epsilon.
        store: Keys (slots, HK, width, D), values, and (n,) int64 slots: write there, at `places`.

    Returns:
        Queries (n, H, D); keys and values (n, HK, D), or with `store` those given.
    """
    n_heads, kv_heads = heads
    tokens, dim = len(qkv), qkv.shape[1] // (n_heads + 2 * kv_heads)
    q = qkv.new_empty(tokens, n_heads, dim)
    if store is None:
        k, v = qkv.new_empty(tokens, kv_heads, dim), qkv.new_empty(tokens, kv_heads, dim)
        slots, strides = places, (0, 0)
    else:
        k, v, slots = store
        strides = (k.stride(0), k.stride(1))
    half_block = _next_power(dim // 2)
    head_block = min(_next_power(n_heads + 2 * kv_heads), max(1, 1024 // half_block))
    q_norm, k_norm, eps = norms if norms is not None else (qkv, qkv, 0.0)
    _rotate[(tokens, triton.cdiv(n_heads + 2 * kv_heads, head_block))](
        qkv, table[0], table[1], places, slots, q_norm, k_norm, q, k, v, eps, *strides,
        HEADS=n_heads, KV_HEADS=kv_heads, HALF=dim // 2, HALF_BLOCK=half_block, HEAD_BLOCK=head_block,
        NORM=norms is not None, STORE=store is not None, num_warps=4,
    )  # fmt: skip
    return q, k, v


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
    block = min(2048, _next_power(width))
    _swiglu[(len(x), triton.cdiv(width, block))](x, out, width, BLOCK=block, num_warps=4)
    return out
