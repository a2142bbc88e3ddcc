# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Matrix products of a few rows with a weight that is read once, together with what follows them.

With some hundred rows at most, a product is bound by the weight's bytes, or has too few tiles to fill the device. So
the inner dimension is split among programs whose partial sums the next kernel, the norm, adds up; and SwiGLU happens
where gate and up are still in registers.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_ppo.rollout.layer_kernels import next_power


class Tiles(NamedTuple):
    """How a product is cut: rows, columns and inner elements of a tile; programs along the inner dimension; ..."""

    rows: int
    columns: int
    inner: int
    splits: int
    warps: int
    stages: int


@triton.jit
def _product(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    columns,
    inner,
    span,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
):
    # One program: a tile of the output over `span` inner elements. GATED: silu of it times the tile `columns` further.
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    k = tl.arange(0, INNER)
    in_rows = m < rows
    in_columns = n < columns
    first = split * span
    last = tl.minimum(first + span, inner)
    x_at = x_ptr + m[:, None] * inner + first + k[None, :]
    w_at = weight_ptr + n[None, :].to(tl.int64) * inner + first + k[:, None]
    up_at = w_at + columns.to(tl.int64) * inner
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    up_acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, last, INNER):
        if EVEN:
            x = tl.load(x_at, mask=in_rows[:, None], other=0.0)
            w = tl.load(w_at, mask=in_columns[None, :], other=0.0)
        else:
            inside = start + k < last
            x = tl.load(x_at, mask=in_rows[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_at, mask=in_columns[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        if GATED:
            if EVEN:
                up = tl.load(up_at, mask=in_columns[None, :], other=0.0)
            else:
                up = tl.load(up_at, mask=in_columns[None, :] & (start + k < last)[:, None], other=0.0)
            up_acc = tl.dot(x, up, up_acc, input_precision="ieee")
            up_at += INNER
        x_at += INNER
        w_at += INNER
    dtype = out_ptr.dtype.element_ty
    if GATED:
        gate = acc.to(x_ptr.dtype.element_ty).to(tl.float32)
        up_sum = up_acc.to(x_ptr.dtype.element_ty).to(tl.float32)
        acc = (gate / (1 + tl.exp(-gate))).to(x_ptr.dtype.element_ty).to(tl.float32) * up_sum
    at = m[:, None].to(tl.int64) * columns + n[None, :]
    if SPLIT:
        at += split.to(tl.int64) * rows * columns
    tl.store(out_ptr + at, acc.to(dtype), mask=in_rows[:, None] & in_columns[None, :])


def _launch(x: Tensor, weight: Tensor, out: Tensor, columns: int, tiles: Tiles, gated: bool) -> None:
    rows, inner = x.shape
    span = triton.cdiv(triton.cdiv(inner, tiles.splits), tiles.inner) * tiles.inner
    grid = triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns), tiles.splits
    _product[grid](
        x, weight, out, rows, columns, inner, span,
        ROWS=tiles.rows, COLUMNS=tiles.columns, INNER=tiles.inner, SPLIT=out.dim() == 3, GATED=gated,
        EVEN=inner % tiles.inner == 0, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def gated_product(x: Tensor, weight: Tensor, tiles: Tiles) -> Tensor:
    """Return ``silu(gate) * up``. Twin: a linear layer, then `layer_kernels.swiglu`.

    Args:
        x: (n, H) contiguous.
        weight: (2 I, H) contiguous: gate, then up.
        tiles: How to cut; `splits` must be 1.

    Returns:
        (n, I) of x's dtype, rounded where transformers rounds.
    """
    out = x.new_empty(len(x), len(weight) // 2)
    _launch(x, weight, out, out.shape[1], tiles, True)
    return out


def product_parts(x: Tensor, weight: Tensor, tiles: Tiles) -> Tensor:
    """Return ``x @ weight.T`` in parts that are still to be added. Twin: a linear layer.

    Args:
        x: (n, K) contiguous.
        weight: (N, K) contiguous.
        tiles: How to cut.

    Returns:
        (splits, n, N) float32.
    """
    out = torch.empty(tiles.splits, len(x), len(weight), dtype=torch.float32, device=x.device)
    _launch(x, weight, out, len(weight), tiles, False)
    return out


@triton.jit
def _add_parts_norm(
    part_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    real = d < WIDTH
    dtype = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + d, mask=real, other=0.0).to(tl.float32)
    x = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        x += tl.load(part_ptr + (part * rows + row) * WIDTH + d, mask=real, other=0.0)
    x = x.to(dtype).to(tl.float32) + tl.load(residual_ptr + row * WIDTH + d, mask=real, other=0.0).to(tl.float32)
    total = x.to(dtype)
    tl.store(residual_ptr + row * WIDTH + d, total, mask=real)
    x = total.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    tl.store(out_ptr + row * WIDTH + d, (x.to(dtype).to(tl.float32) * weight).to(dtype), mask=real)


def add_parts_norm(parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add up the parts of a product, then do as `layer_kernels.add_norm`, which is the twin.

    Args:
        parts: (splits, n, H) float32 contiguous.
        residual: (n, H) contiguous, updated.
        weight: (H,).
        eps: Of the norm.

    Returns:
        (n, H) of residual's dtype.
    """
    out = torch.empty_like(residual)
    rows, width = residual.shape
    block = next_power(width)
    _add_parts_norm[(rows,)](
        parts, residual, weight, out, rows, eps, WIDTH=width, BLOCK=block, PARTS=len(parts),
        num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return out


MOST_ROWS, LARGEST_WEIGHT = 256, 2**25
"""Rows, and elements of a weight, up to which these kernels were measured beside PyTorch's products."""


@functools.cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def _served(x: Tensor, weight: Tensor | None) -> bool:
    few = len(x) <= MOST_ROWS and x.dtype.itemsize == 2
    return few and weight is not None and weight.numel() <= LARGEST_WEIGHT and _hopper(x.device)


def tiles_of_gated(x: Tensor, weight: Tensor | None) -> Tiles | None:
    """Return how to cut `gated_product`, or None where a linear layer and then SwiGLU is faster.

    From `benchmarks/rollout_products.py` on an H200; the same on every run, so that a resumed run samples the same.
    """
    if not _served(x, weight):
        return None
    if len(x) <= 16:
        return Tiles(16, 32, 128, 1, 4, 3)
    if len(x) <= 64:
        return Tiles(64, 32, 64, 1, 4, 4)
    return Tiles(64, 64, 64, 1, 4, 3) if x.shape[1] <= 1024 else None


def tiles_of_parts(x: Tensor, weight: Tensor | None) -> Tiles | None:
    """Return how to cut `product_parts`, or None where a linear layer is faster; as `tiles_of_gated`."""
    if not _served(x, weight):
        return None
    splits = 2 if x.shape[1] <= 2048 else 8
    if len(x) <= 16:
        return Tiles(16, 32, 128, splits, 4, 4)
    if len(x) <= 64:
        return Tiles(64, 32, 128, splits, 4, 4 if splits == 2 else 3)
    return Tiles(64, 64, 64, 2, 4, 3) if weight is not None and weight.numel() <= 2**20 else None
