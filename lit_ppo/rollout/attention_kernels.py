# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Grouped-query attention of one token a row over its KV slot, split among programs where that pays."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, float32

from lit_ppo.roles.attention import AttentionSpec
from lit_ppo.rollout.layer_kernels import next_power

FEW_PROGRAMS = 264
FEW, MANY = (64, 4, 3), (32, 2, 3)
"""Stored tokens that a program of the attention reads at once, its warps, and how many reads are under way: where no
more than `FEW_PROGRAMS` (two on each multiprocessor of an H200) share the device, and where more do."""

MOST_PROGRAMS, SHORTEST_SPAN = 528, 512
"""A sequence is split among programs while there are no more than these (four on each multiprocessor of an H200), and
not into spans shorter than this: joining them would cost more."""


@triton.jit
def _rotated(
    x_ptr, at, mask, weight_ptr, cos_ptr, sin_ptr, place, d, eps, dtype, DIM: tl.constexpr, NORM: tl.constexpr
):
    # Heads at `at`, after their norm if any, turned by the angle of `place`; rounded where transformers rounds.
    partner = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
    x = tl.load(x_ptr + at[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + at[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        here = tl.load(weight_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        there = tl.load(weight_ptr + partner, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        x = ((x * scale).to(dtype).to(tl.float32) * here).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * there).to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + place * DIM + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + place * DIM + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
    turned = tl.where(d[None, :] < DIM // 2, -y, y) * sin
    return ((x * cos).to(dtype).to(tl.float32) + turned.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _decode_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    length_ptr,
    out_ptr,
    part_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    scale,
    softcap,
    window,
    slot_stride,
    head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    FUSED: tl.constexpr,
    NORM: tl.constexpr,
):
    # One program: one sequence, one KV head with its group of query heads, one of SPLITS spans of the stored tokens.
    # FUSED: q_ptr holds queries, keys and values as projected; the new token is rotated, stored and attended to here.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(slot_ptr + row)
    length = tl.load(length_ptr + row)
    seen_last = length.to(tl.int32)  # the last token that is seen
    count = seen_last + 1
    if FUSED:
        count = seen_last  # of those in memory
    low = 0
    if WINDOW:
        low = tl.maximum(seen_last + 1 - window, 0) // BLOCK * BLOCK
    span = tl.cdiv(tl.maximum(count - low, 0), SPLITS * BLOCK) * BLOCK
    first = low + split * span
    last = tl.minimum(first + span, count)

    g = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_BLOCK)
    n = tl.arange(0, BLOCK)
    real = (g[:, None] < GROUP) & (d[None, :] < DIM)
    base = slot * slot_stride + head.to(tl.int64) * head_stride
    best = tl.full((ROWS,), -1.0e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM_BLOCK), tl.float32)
    if FUSED:
        dtype = k_ptr.dtype.element_ty
        q_row = row * (HEADS * (GROUP + 2)) * DIM
        q = _rotated(
            q_ptr,
            q_row + (head * GROUP + g) * DIM,
            real,
            q_norm_ptr,
            cos_ptr,
            sin_ptr,
            length,
            d,
            eps,
            dtype,
            DIM,
            NORM,
        )
        if split == 0:
            one = tl.arange(0, 1)
            k_at = q_row + (HEADS * GROUP + head + one) * DIM
            in_head = (one[:, None] == 0) & (d[None, :] < DIM)
            k_new = _rotated(q_ptr, k_at, in_head, k_norm_ptr, cos_ptr, sin_ptr, length, d, eps, dtype, DIM, NORM)
            v_new = tl.load(q_ptr + k_at[:, None] + HEADS * DIM + d[None, :], mask=in_head, other=0.0).to(dtype)
            stored = base + length * DIM + d[None, :] + one[:, None]
            tl.store(k_ptr + stored, k_new, mask=in_head)
            tl.store(v_ptr + stored, v_new, mask=in_head)
            best = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scale
            if SOFTCAP:
                best = softcap * (1 - 2 / (tl.exp(2 * best / softcap) + 1))
            total += 1.0
            acc += v_new.to(tl.float32)
    else:
        q = tl.load(q_ptr + ((row * HEADS + head) * GROUP + g[:, None]) * DIM + d[None, :], mask=real, other=0.0)
    for start in range(first, last, BLOCK):
        place = start + n
        seen = place < last
        at = base + place[:, None] * DIM + d[None, :]
        mask = seen[:, None] & (d[None, :] < DIM)
        k = tl.load(k_ptr + at, mask=mask, other=0.0)
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            score = softcap * (1 - 2 / (tl.exp(2 * score / softcap) + 1))  # tanh
        if WINDOW:
            seen = seen & (place > seen_last - window)
        score = tl.where(seen[None, :], score, -1.0e30)
        new = tl.maximum(best, tl.max(score, 1))
        p = tl.where(seen[None, :], tl.exp(score - new[:, None]), 0.0)
        shrink = tl.exp(best - new)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        best = new
    heads = (row * HEADS + head) * GROUP + g
    if SPLITS == 1:
        out = acc / total[:, None]
        tl.store(out_ptr + heads[:, None] * DIM + d[None, :], out.to(out_ptr.dtype.element_ty), mask=real)
    else:
        at = (heads * SPLITS + split) * (DIM + 2)
        tl.store(part_ptr + at[:, None] + d[None, :], acc, mask=real)
        tl.store(part_ptr + at + DIM, best, mask=g < GROUP)
        tl.store(part_ptr + at + DIM + 1, total, mask=g < GROUP)


@triton.jit
def _join_splits(part_ptr, out_ptr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    head = tl.program_id(0)
    d = tl.arange(0, DIM_BLOCK)
    s = tl.arange(0, SPLITS)
    at = (head * SPLITS + s) * (DIM + 2)
    best = tl.load(part_ptr + at + DIM)
    weight = tl.exp(best - tl.max(best, 0))
    total = tl.sum(tl.load(part_ptr + at + DIM + 1) * weight, 0)
    acc = tl.load(part_ptr + at[:, None] + d[None, :], mask=(s[:, None] >= 0) & (d[None, :] < DIM), other=0.0)
    out = tl.sum(acc * weight[:, None], 0) / total
    tl.store(out_ptr + head * DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < DIM)


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, spec: AttentionSpec, splits: int = 0
) -> Tensor:
    """Split-KV grouped-query attention of one token a row. Twin: `DecodeAttention.read` without kernels.

    Args:
        q: (B, H, D).
        keys: (slots, HK, width, D), contiguous; q is converted to its dtype.
        values: As `keys`.
        slots: (B,) int64 slot of each row.
        lengths: (B,) int64: tokens 0 .. lengths[b] of the slot are attended to.
        spec: Scale, window, soft cap.
        splits: Programs that share one sequence and head, a power of 2. 0: what pays.

    Returns:
        (B, H, D) of q's dtype.
    """
    out = q.new_empty(q.shape)
    _attend(q.to(keys.dtype).contiguous(), out, keys, values, slots, lengths, spec, splits, None, None)
    return out


def fused_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    spec: AttentionSpec,
    n_heads: int,
    table: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor, float] | None = None,
    splits: int = 0,
) -> Tensor:
    """Norm, rotate, store and attend in one kernel. Twin: `layer_kernels.rotate`, then `DecodeAttention.attend`.

    Args:
        qkv: (B, (H + 2 HK) D) contiguous: queries, keys, values as projected.
        keys: (slots, HK, width, D), contiguous; the new key is written at `lengths[b]` of the row's slot.
        values: As `keys`.
        slots: (B,) int64 slot of each row; rows with the same slot must not both be read.
        lengths: (B,) int64 tokens stored before this one, which is its position.
        spec: Scale, window, soft cap.
        n_heads: H.
        table: Cosines and sines, each (positions, D).
        norms: Weights of the query's and the key's norm, each (D,), and their epsilon.
        splits: As in `decode_attention`.

    Returns:
        (B, H D) of qkv's dtype.
    """
    out = qkv.new_empty(len(qkv), n_heads, keys.shape[3])
    _attend(qkv, out, keys, values, slots, lengths, spec, splits, table, norms)
    return out.flatten(1)


def _attend(
    q: Tensor,
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    spec: AttentionSpec,
    splits: int,
    table: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor, float] | None,
) -> None:
    rows, n_heads, dim = out.shape
    kv_heads, width = keys.shape[1], keys.shape[2]
    if not splits:
        splits = 1
        while 2 * splits * rows * kv_heads <= MOST_PROGRAMS and width >= 2 * splits * SHORTEST_SPAN:
            splits *= 2
    part = q.new_empty((rows, n_heads, splits, dim + 2) if splits > 1 else (1,), dtype=float32)
    dim_block, group = max(16, next_power(dim)), n_heads // kv_heads
    block, warps, stages = FEW if rows * kv_heads * splits <= FEW_PROGRAMS else MANY
    cos, sin = table if table is not None else (q, q)
    q_norm, k_norm, eps = norms if norms is not None else (q, q, 0.0)
    _decode_attention[(rows, kv_heads, splits)](
        q, keys, values, slots, lengths, out, part, cos, sin, q_norm, k_norm, eps,
        spec.scale, spec.softcap or 0.0, spec.window or 0, keys.stride(0), keys.stride(1),
        HEADS=kv_heads, GROUP=group, DIM=dim, DIM_BLOCK=dim_block, ROWS=max(16, next_power(group)),
        BLOCK=block, SPLITS=splits, SOFTCAP=spec.softcap is not None, WINDOW=spec.window is not None,
        FUSED=table is not None, NORM=norms is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _join_splits[(rows * n_heads,)](
            part,
            out,
            DIM=dim,
            DIM_BLOCK=dim_block,
            SPLITS=splits,
            num_warps=1,
        )
