# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels of the decode step. Each has a plain PyTorch twin that it is tested against, named in its docstring.

A decode step is bound by memory: every weight and every stored key and value is read once for one token a row. These
kernels keep what surrounds the matrix products from costing as much again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_ppo.rollout.cache import AttentionSpec

if TYPE_CHECKING:
    from lit_ppo.rollout.board import Board

SAMPLE_BLOCK, SAMPLE_WARPS = 4096, 8
"""Vocabulary entries that one program of the sampler looks at, and its warps."""

ATTENTION_BLOCK, ATTENTION_WARPS, ATTENTION_STAGES = 32, 2, 3
"""Stored tokens that a program of the attention reads at once, its warps, and how many reads are under way."""

MOST_PROGRAMS, SHORTEST_SPAN = 528, 512
"""A sequence is split among programs while there are no more than these (four on each multiprocessor of an H200), and
not into spans shorter than this: joining them would cost more."""


def _next_power(n: int) -> int:
    return max(1, 1 << (n - 1).bit_length())


# ---------------------------------------------------------------------------------------------------- attention


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
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
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
    part = q.new_empty((rows, n_heads, splits, dim + 2) if splits > 1 else (1,), dtype=torch.float32)
    dim_block, group = max(16, _next_power(dim)), n_heads // kv_heads
    cos, sin = table if table is not None else (q, q)
    q_norm, k_norm, eps = norms if norms is not None else (q, q, 0.0)
    _decode_attention[(rows, kv_heads, splits)](
        q, keys, values, slots, lengths, out, part, cos, sin, q_norm, k_norm, eps,
        spec.scale, spec.softcap or 0.0, spec.window or 0, keys.stride(0), keys.stride(1),
        HEADS=kv_heads, GROUP=group, DIM=dim, DIM_BLOCK=dim_block, ROWS=max(16, _next_power(group)),
        BLOCK=ATTENTION_BLOCK, SPLITS=splits, SOFTCAP=spec.softcap is not None, WINDOW=spec.window is not None,
        FUSED=table is not None, NORM=norms is not None, num_warps=ATTENTION_WARPS, num_stages=ATTENTION_STAGES,
    )  # fmt: skip
    if splits > 1:
        _join_splits[(rows * n_heads,)](part, out, DIM=dim, DIM_BLOCK=dim_block, SPLITS=splits, num_warps=1)


# ----------------------------------------------------------------------------------------------------- sampling


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _row_key(base_ptr, index_ptr, step_ptr, row):
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    one = tl.full((), 1, tl.uint64)
    base = tl.load(base_ptr).to(tl.uint64, bitcast=True)
    index = tl.load(index_ptr + row).to(tl.uint64, bitcast=True)
    step = tl.load(step_ptr + row).to(tl.uint64, bitcast=True)
    return _mix(_mix(base + golden * (index + one)) + golden * (step + one))


@triton.jit
def _exponential(key, ids):
    # -log1p(-w) of the recipe in lit_ppo.algo.noise: its negative logarithm is the Gumbel noise.
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    h = ids.to(tl.uint32) * 0x9E3779B9 + k0
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) + k1
    h = h * 0x846CA68B
    h = (h ^ (h >> 16)) & 0x7FFFFFFF
    w = tl.minimum((h.to(tl.float32) + 0.5) * 4.656612873077393e-10, 1.0 - 5.960464477539063e-08)
    small = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5 + w * (1 / 6))))))
    return tl.where(w < 0.03125, small, -tl.log(1.0 - w))


@triton.jit
def _sample_blocks(
    logits_ptr,
    suppress_ptr,
    base_ptr,
    index_ptr,
    step_ptr,
    part_ptr,
    place_ptr,
    temperature,
    vocab,
    stride,
    BLOCK: tl.constexpr,
    NOISE: tl.constexpr,
    TEMPER: tl.constexpr,
    SUPPRESS: tl.constexpr,
):
    # One program: one row, BLOCK vocabulary entries -> (max, sum of exp, best perturbed logit, its logit), its id.
    row = tl.program_id(0)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    real = ids < vocab
    logit = tl.load(logits_ptr + row.to(tl.int64) * stride + ids, mask=real, other=-1.0e30).to(tl.float32)
    if TEMPER:
        logit = tl.where(real, tl.div_rn(logit, temperature), -1.0e30)
    if SUPPRESS:
        logit = tl.where(tl.load(suppress_ptr + ids, mask=real, other=0) != 0, -1.0e30, logit)
    top = tl.max(logit, 0)
    weight = tl.where(real, tl.exp(logit - top), 0.0)
    total = tl.sum(weight, 0)
    # The largest logit + Gumbel is the largest exp(logit) / exponential: one logarithm an entry less.
    noisy = tl.where(real, logit, float("-inf"))
    if NOISE:
        noisy = weight / _exponential(_row_key(base_ptr, index_ptr, step_ptr, row), ids)
    best = tl.max(noisy, 0)
    place = tl.min(tl.where((noisy == best) & real, ids, 2147483647), 0)
    if NOISE:
        best = top + tl.log(best)
    chosen = tl.max(tl.where(ids == place, logit, float("-inf")), 0)
    at = row * tl.num_programs(1) + block
    tl.store(part_ptr + at * 4, top)
    tl.store(part_ptr + at * 4 + 1, total)
    tl.store(part_ptr + at * 4 + 2, best)
    tl.store(part_ptr + at * 4 + 3, chosen)
    tl.store(place_ptr + at, place)


@triton.jit
def _sample_rows(part_ptr, place_ptr, token_ptr, logprob_ptr, BLOCKS: tl.constexpr, BLOCKS_POWER: tl.constexpr):
    row = tl.program_id(0)
    b = tl.arange(0, BLOCKS_POWER)
    real = b < BLOCKS
    at = part_ptr + (row * BLOCKS + b) * 4
    top = tl.load(at, mask=real, other=-1.0e38)
    total = tl.load(at + 1, mask=real, other=0.0)
    best = tl.load(at + 2, mask=real, other=float("-inf"))
    chosen = tl.load(at + 3, mask=real, other=0.0)
    place = tl.load(place_ptr + row * BLOCKS + b, mask=real, other=2147483647)
    highest = tl.max(top, 0)
    log_total = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    token = tl.min(tl.where(best == tl.max(best, 0), place, 2147483647), 0)
    logit = tl.max(tl.where(place == token, chosen, float("-inf")), 0)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, logit - log_total)


def sample(
    logits: Tensor, temperature: float, suppress_table: Tensor | None, base: Tensor, index: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample a token a row and take its log-prob in one pass over the logits. Twin: `DeviceSampler` without kernels.

    Args:
        logits: (B, V), the last dimension contiguous.
        temperature: Divides the logits; 0 takes the likeliest.
        suppress_table: (V,) bool, True for tokens that are never sampled, or None.
        base: () int64 noise key of the rollout.
        index: (B,) int64 noise index of each row.
        step: (B,) int64 number of the token in its response.

    Returns:
        (B,) int64 tokens, (B,) float32 log-probs.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, SAMPLE_BLOCK)
    part = torch.empty(rows, blocks, 4, dtype=torch.float32, device=logits.device)
    place = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprob = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _sample_blocks[(rows, blocks)](
        logits, part if suppress_table is None else suppress_table, base, index, step, part, place,
        temperature, vocab, logits.stride(0), BLOCK=SAMPLE_BLOCK, NOISE=temperature > 0,
        TEMPER=temperature not in (0, 1), SUPPRESS=suppress_table is not None, num_warps=SAMPLE_WARPS,
    )  # fmt: skip
    _sample_rows[(rows,)](part, place, token, logprob, BLOCKS=blocks, BLOCKS_POWER=_next_power(blocks), num_warps=1)
    return token, logprob


# ---------------------------------------------------------------------------------------------------- the board


@triton.jit
def _advance(
    rows_ptr,
    queue_ptr,
    scalars_ptr,
    ids_ptr,
    logprobs_ptr,
    lengths_ptr,
    stopped_ptr,
    token_ptr,
    logprob_ptr,
    stop_ptr,
    count,
    width,
    queue_width,
    response_width,
    trash,
    BLOCK: tl.constexpr,
):
    row = tl.arange(0, BLOCK)
    real = row < count
    request = tl.load(rows_ptr + row, mask=real, other=-1)
    length = tl.load(rows_ptr + 2 * width + row, mask=real, other=0)
    slot = tl.load(rows_ptr + 3 * width + row, mask=real, other=0)
    step = tl.load(rows_ptr + 4 * width + row, mask=real, other=0)
    index = tl.load(rows_ptr + 5 * width + row, mask=real, other=0)
    token = tl.load(token_ptr + row, mask=real, other=0)
    logprob = tl.load(logprob_ptr + row, mask=real, other=0.0)
    head = tl.load(scalars_ptr)
    tail = tl.load(scalars_ptr + 1)
    limit = tl.load(scalars_ptr + 2)
    busy = real & (request >= 0)
    tl.store(ids_ptr + request * response_width + step, token, mask=busy)
    tl.store(logprobs_ptr + request * response_width + step, logprob, mask=busy)
    stop = tl.load(stop_ptr + token, mask=busy, other=0) != 0
    step = step + 1
    ended = busy & (stop | (step >= limit))
    tl.store(lengths_ptr + request, step, mask=ended)
    tl.store(stopped_ptr + request, stop, mask=ended)
    going = busy & (ended == 0)
    idle = real & (going == 0)
    candidate = head + tl.cumsum(idle.to(tl.int32), 0).to(tl.int64) - 1
    take = idle & (candidate < tail)
    zero = tl.zeros_like(step)
    request = tl.where(take, candidate, tl.where(going, request, zero - 1))
    token = tl.where(going, token, tl.load(queue_ptr + candidate, mask=take, other=0))
    length = tl.where(going, length + 1, tl.load(queue_ptr + queue_width + candidate, mask=take, other=0))
    slot = tl.where(going, slot, tl.where(take, tl.load(queue_ptr + 2 * queue_width + candidate, mask=take), trash))
    index = tl.where(take, tl.load(queue_ptr + 3 * queue_width + candidate, mask=take), index)
    tl.store(rows_ptr + row, request, mask=real)
    tl.store(rows_ptr + width + row, token, mask=real)
    tl.store(rows_ptr + 2 * width + row, length, mask=real)
    tl.store(rows_ptr + 3 * width + row, slot, mask=real)
    tl.store(rows_ptr + 4 * width + row, tl.where(going, step, zero), mask=real)
    tl.store(rows_ptr + 5 * width + row, index, mask=real)
    tl.store(scalars_ptr, head + tl.sum(take.to(tl.int32), 0))


def advance(board: Board, rows: int, token: Tensor, logprob: Tensor, stop_table: Tensor) -> None:
    """Do `Board.advance` in one program."""
    _advance[(1,)](
        board.rows, board.queue, board.scalars, board.ids, board.logprobs, board.lengths, board.stopped,
        token, logprob, stop_table, rows, board.rows.shape[1], board.queue.shape[1], board.ids.shape[1], board.trash,
        BLOCK=_next_power(rows), num_warps=4,
    )  # fmt: skip
