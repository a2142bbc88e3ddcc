# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""AdamW's step of one weight in one Triton kernel: 8-bit moments and stochastic rounding included."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_ppo.optim.codes import BLOCK

TILE, WARPS = 8, 8
"""Blocks of 256 that one program updates, and its warps."""


@triton.jit
def _hash(x, k0, k1):
    h = x * 0x9E3779B9 + k0
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) + k1
    h = h * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def _fourth(x):
    return (x * x) * (x * x)


@triton.jit(do_not_specialize=["k0", "k1", "start"])
def _step(
    weight_ptr,
    grad_ptr,
    param_ptr,
    first_ptr,
    first_scale_ptr,
    second_ptr,
    second_scale_ptr,
    k0,
    k1,
    start,
    blocks,
    cols,
    per_row,
    keep,
    beta1,
    beta2,
    rest1,
    rest2,
    step_size,
    root,
    eps,
    EIGHT: tl.constexpr,
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
):
    # One program: HEIGHT blocks of WIDTH neighbours in a row.
    block = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    row = block // per_row
    col = ((block - row * per_row) * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    there = block < blocks
    real = there[:, None] & (col < cols)
    at = row[:, None] * cols + col
    weight = tl.load(weight_ptr + at, mask=real, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=real, other=0.0).to(tl.float32)
    if EIGHT:
        code = tl.load(first_ptr + at, mask=real, other=0).to(tl.float32)
        part = code / 127.0
        scale = tl.load(first_scale_ptr + block, mask=there, other=0.0)
        first = _fourth(part) * scale[:, None]
        first = tl.where(code < 0, -first, first)
        part = tl.load(second_ptr + at, mask=real, other=0).to(tl.float32) / 255.0
        scale = tl.load(second_scale_ptr + block, mask=there, other=0.0)
        second = _fourth(part * part) * scale[:, None]
    else:
        first = tl.load(first_ptr + at, mask=real, other=0.0)
        second = tl.load(second_ptr + at, mask=real, other=0.0)
    first = first * beta1 + grad * rest1
    second = second * beta2 + grad * grad * rest2
    weight = weight * keep - step_size * first / (tl.sqrt(second) / root + eps)
    if EIGHT or STOCHASTIC:
        place = (at + start).to(tl.uint32)
        key0 = k0.to(tl.uint32)
        key1 = k1.to(tl.uint32)
        bits = _hash(place, key0, key1)
        others = _hash(bits ^ place, key1, key0)
    if STOCHASTIC:
        raised = (weight.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)) & 0xFFFF0000
        tl.store(param_ptr + at, raised.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=real)
    else:
        tl.store(weight_ptr + at, weight.to(weight_ptr.dtype.element_ty), mask=real)
        if MASTER:
            tl.store(param_ptr + at, weight.to(param_ptr.dtype.element_ty), mask=real)
    if EIGHT:
        size = tl.abs(first)
        scale = tl.max(size, 1)
        tl.store(first_scale_ptr + block, scale, mask=there)
        ratio = tl.minimum(size / tl.maximum(scale, 1e-38)[:, None], 1.0)
        low = tl.minimum(tl.floor(tl.sqrt(tl.sqrt(ratio)) * 127.0), 126.0)
        below = _fourth(low / 127.0)
        above = _fourth((low + 1.0) / 127.0)
        chance = (bits >> 16).to(tl.float32) / 65536.0
        low = tl.where(chance * (above - below) < ratio - below, low + 1.0, low)
        tl.store(first_ptr + at, tl.where(first < 0, -low, low).to(tl.int8), mask=real)
        scale = tl.max(second, 1)
        tl.store(second_scale_ptr + block, scale, mask=there)
        ratio = tl.minimum(second / tl.maximum(scale, 1e-38)[:, None], 1.0)
        low = tl.minimum(tl.floor(tl.sqrt(tl.sqrt(tl.sqrt(ratio))) * 255.0), 254.0)
        part = low / 255.0
        below = _fourth(part * part)
        part = (low + 1.0) / 255.0
        above = _fourth(part * part)
        chance = (others >> 8).to(tl.float32) / 16777216.0
        low = tl.where(chance * (above - below) < ratio - below, low + 1.0, low)
        tl.store(second_ptr + at, low.to(tl.int32).to(tl.uint8), mask=real)
    else:
        tl.store(first_ptr + at, first, mask=real)
        tl.store(second_ptr + at, second, mask=real)


def step(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    key: tuple[int, int],
    start: int,
    *,
    keep: float,
    betas: tuple[float, float],
    step_size: float,
    root: float,
    eps: float,
    stochastic: bool,
) -> None:
    """Update a weight and its state in place. Twin: `lit_ppo.optim.lean.update`, which says what the arguments are."""
    master = state.get("master")
    weight = param if master is None else master
    cols = weight.shape[-1] if weight.dim() else 1
    per_row = -(-cols // BLOCK)
    blocks = weight.numel() // max(cols, 1) * per_row
    eight = "exp_avg_scale" in state
    first, second = state["exp_avg"], state["exp_avg_sq"]
    with torch.cuda.device_of(weight):
        _step[(triton.cdiv(blocks, TILE),)](
            weight, grad, param,
            first, state["exp_avg_scale"] if eight else first,
            second, state["exp_avg_sq_scale"] if eight else second,
            key[0], key[1], start, blocks, cols, per_row,
            keep, betas[0], betas[1], 1 - betas[0], 1 - betas[1], step_size, root, eps,
            EIGHT=eight, MASTER=master is not None, STOCHASTIC=stochastic, WIDTH=BLOCK, HEIGHT=TILE, num_warps=WARPS,
        )  # fmt: skip
