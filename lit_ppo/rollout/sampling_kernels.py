# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Sampling over the vocabulary in one pass, and what follows a sampled token: `Board.advance` without the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from lit_ppo.rollout.layer_kernels import next_power

if TYPE_CHECKING:
    from lit_ppo.rollout.board import Board

SAMPLE_BLOCK, SAMPLE_WARPS = 2048, 4
"""Vocabulary entries that one program of the sampler looks at, and its warps."""


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
def _exponential(key, ids, FAST: tl.constexpr):
    # -log1p(-w) of the recipe in lit_ppo.algo.noise: its negative logarithm is the Gumbel noise.
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    h = ids.to(tl.uint32) * 0x9E3779B9 + k0
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) + k1
    h = h * 0x846CA68B
    h = (h ^ (h >> 16)) & 0x7FFFFFFF
    w = tl.minimum((h.to(tl.float32) + 0.5) * 4.656612873077393e-10, 1.0 - 5.960464477539063e-08)
    small = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5)))))
    if FAST:  # the device's own logarithm, off by no more than 1e-5 of the result here
        return tl.where(w < 0.03125, small, -libdevice.fast_logf(1.0 - w))
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
    FAST: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    # One program: one row, BLOCK vocabulary entries -> (max, sum of exp, best perturbed logit, its logit), its id;
    # with ENTROPY also the sum of exp times how far below the max a logit is.
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
        noisy = weight / _exponential(_row_key(base_ptr, index_ptr, step_ptr, row), ids, FAST)
    best = tl.max(noisy, 0)
    place = tl.min(tl.where((noisy == best) & real, ids, 2147483647), 0)
    if NOISE:
        best = top + tl.log(best)
    chosen = tl.max(tl.where(ids == place, logit, float("-inf")), 0)
    at = row * tl.num_programs(1) + block
    tl.store(place_ptr + at, place)
    at *= 4 + ENTROPY
    tl.store(part_ptr + at, top)
    tl.store(part_ptr + at + 1, total)
    tl.store(part_ptr + at + 2, best)
    tl.store(part_ptr + at + 3, chosen)
    if ENTROPY:
        tl.store(part_ptr + at + 4, tl.sum(tl.where(weight > 0, weight * (top - logit), 0.0), 0))


@triton.jit
def _sample_rows(
    part_ptr,
    place_ptr,
    token_ptr,
    logprob_ptr,
    entropy_ptr,
    BLOCKS: tl.constexpr,
    BLOCKS_POWER: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    row = tl.program_id(0)
    b = tl.arange(0, BLOCKS_POWER)
    real = b < BLOCKS
    at = part_ptr + (row * BLOCKS + b) * (4 + ENTROPY)
    top = tl.load(at, mask=real, other=-1.0e38)
    total = tl.load(at + 1, mask=real, other=0.0)
    best = tl.load(at + 2, mask=real, other=float("-inf"))
    chosen = tl.load(at + 3, mask=real, other=0.0)
    place = tl.load(place_ptr + row * BLOCKS + b, mask=real, other=2147483647)
    highest = tl.max(top, 0)
    scale = tl.exp(top - highest)
    whole = tl.sum(total * scale, 0)
    log_total = highest + tl.log(whole)
    token = tl.min(tl.where(best == tl.max(best, 0), place, 2147483647), 0)
    logit = tl.max(tl.where(place == token, chosen, float("-inf")), 0)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, logit - log_total)
    if ENTROPY:
        below = tl.load(at + 4, mask=real, other=0.0) + total * (highest - top)  # of the highest of all blocks
        tl.store(entropy_ptr + row, tl.log(whole) + tl.sum(tl.where(scale > 0, scale * below, 0.0), 0) / whole)


def sample(
    logits: Tensor,
    temperature: float,
    suppress_table: Tensor | None,
    base: Tensor,
    index: Tensor,
    step: Tensor,
    entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sample a token a row and take its log-prob in one pass over the logits. Twin: `DeviceSampler` without kernels.

    Args:
        logits: (B, V), the last dimension contiguous.
        temperature: Divides the logits; 0 takes the likeliest.
        suppress_table: (V,) bool, True for tokens that are never sampled, or None.
        base: () int64 noise key of the rollout.
        index: (B,) int64 noise index of each row.
        step: (B,) int64 number of the token in its response.
        entropy: Also compute the entropy of each row's distribution.

    Returns:
        (B,) int64 tokens, (B,) float32 log-probs, (B,) float32 entropies in nats or None.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, SAMPLE_BLOCK)
    part = torch.empty(rows, blocks, 4 + entropy, dtype=torch.float32, device=logits.device)
    place = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprob = torch.empty(rows, dtype=torch.float32, device=logits.device)
    entropies = torch.empty_like(logprob) if entropy else None
    _sample_blocks[(rows, blocks)](
        logits, part if suppress_table is None else suppress_table, base, index, step, part, place,
        temperature, vocab, logits.stride(0), BLOCK=SAMPLE_BLOCK, NOISE=temperature > 0,
        TEMPER=temperature not in (0, 1), SUPPRESS=suppress_table is not None, FAST=logits.is_cuda,
        ENTROPY=entropy, num_warps=SAMPLE_WARPS,
    )  # fmt: skip
    _sample_rows[(rows,)](
        part,
        place,
        token,
        logprob,
        logprob if entropies is None else entropies,
        BLOCKS=blocks,
        BLOCKS_POWER=next_power(blocks),
        ENTROPY=entropy,
        num_warps=1,
    )
    return token, logprob, entropies


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
    entropies_ptr,
    entropy_ptr,
    count,
    width,
    queue_width,
    response_width,
    trash,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
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
    if ENTROPY:
        entropy = tl.load(entropy_ptr + row, mask=real, other=0.0)
        tl.store(entropies_ptr + request * response_width + step, entropy, mask=busy)
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


def advance(
    board: Board, rows: int, token: Tensor, logprob: Tensor, stop_table: Tensor, entropy: Tensor | None = None
) -> None:
    """Do `Board.advance` in one program."""
    into, of = (board.logprobs, logprob) if entropy is None else (board.entropy, entropy)
    _advance[(1,)](
        board.rows, board.queue, board.scalars, board.ids, board.logprobs, board.lengths, board.stopped,
        token, logprob, stop_table, into, of,
        rows, board.rows.shape[1], board.queue.shape[1], board.ids.shape[1], board.trash,
        BLOCK=next_power(rows), ENTROPY=entropy is not None, num_warps=4,
    )  # fmt: skip
