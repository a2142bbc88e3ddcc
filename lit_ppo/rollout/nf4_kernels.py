# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Products of a few rows with 4-bit weights, read as they are: half a byte a weight, never a 16-bit copy of them.

A 32-bit word holds eight consecutive weights of an output. Eight products of a tile are made of it, each of every
eighth inner element: so the words are never rearranged, only decoded. In bfloat16 a word is decoded by byte permutation
(PRMT), which looks four codes up at once in a table that lives in registers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_ppo.rollout.layer_kernels import next_power

BLOCK, NESTED_BLOCK = 64, 256
"""Weights with a common scale, and scales with a common scale: what bitsandbytes uses by default."""

PROGRAMS = 528
"""The inner dimension is split while there are no more programs than these."""


class Tiles(NamedTuple):
    """How a product is cut: outputs and inner elements of a tile, warps, stages."""

    columns: int
    inner: int
    warps: int
    stages: int


@triton.jit
def _product(
    x_ptr,
    w0_ptr,
    w1_ptr,
    w2_ptr,
    scale0_ptr,
    scale1_ptr,
    scale2_ptr,
    nested0_ptr,
    nested1_ptr,
    nested2_ptr,
    offset0_ptr,
    offset1_ptr,
    offset2_ptr,
    code_ptr,
    nested_code_ptr,
    out_ptr,
    rows,
    inner,
    first_columns,
    second_columns,
    columns,
    span,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
    DECODE: tl.constexpr,
):
    # One program: COLUMNS outputs of one of three weights with the same input, over `span` inner elements.
    start = tl.program_id(0) * COLUMNS
    split = tl.program_id(1)
    w_ptr = w0_ptr
    scale_ptr = scale0_ptr
    nested_ptr = nested0_ptr
    offset_ptr = offset0_ptr
    begin = 0
    if start >= first_columns:
        w_ptr = w1_ptr
        scale_ptr = scale1_ptr
        nested_ptr = nested1_ptr
        offset_ptr = offset1_ptr
        begin = first_columns
    if start >= first_columns + second_columns:
        w_ptr = w2_ptr
        scale_ptr = scale2_ptr
        nested_ptr = nested2_ptr
        offset_ptr = offset2_ptr
        begin = first_columns + second_columns
    m = tl.arange(0, ROWS)
    n = (start - begin + tl.arange(0, COLUMNS)).to(tl.int64)
    word = tl.arange(0, INNER // 8)
    place = tl.arange(0, 8)
    low = split * span
    high = tl.minimum(low + span, inner)
    dtype = x_ptr.dtype.element_ty
    offset = 0.0
    if NESTED:
        offset = tl.load(offset_ptr)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(low, high, INNER):
        real = (at + word * 8 < high)[None, :]
        words = tl.load(w_ptr + n[:, None] * (inner // 8) + (at // 8 + word)[None, :], mask=real, other=0)
        block = (n[:, None] * inner + (at + word * 8)[None, :]) // BLOCK
        scale = tl.load(scale_ptr + block, mask=real, other=0)
        if NESTED:
            common = tl.load(nested_ptr + block // NESTED_BLOCK, mask=real, other=0.0)
            scale = tl.load(nested_code_ptr + scale.to(tl.int32)) * common + offset
        inside = (m < rows)[:, None, None] & (at + word * 8 < high)[None, :, None]
        where = m[:, None, None] * inner + (at + word * 8)[None, :, None] + place[None, None, :]
        x = tl.load(x_ptr + where, mask=inside, other=0.0)  # beyond the end 0: then the scale there does not matter
        even, odd = tl.split(tl.reshape(x, (ROWS, INNER // 8, 4, 2)))
        x04, x26 = tl.split(tl.reshape(even, (ROWS, INNER // 8, 2, 2)))
        x15, x37 = tl.split(tl.reshape(odd, (ROWS, INNER // 8, 2, 2)))
        x0, x4 = tl.split(x04)
        x2, x6 = tl.split(x26)
        x1, x5 = tl.split(x15)
        x3, x7 = tl.split(x37)
        # The first of two weights is in the upper half of their byte.
        if DECODE is not None:
            p10, p32, p54, p76 = tl.inline_asm_elementwise(
                DECODE, "=r,=r,=r,=r,r", [words], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
            )
            acc = _two(x0, x1, p10, scale, acc, dtype)
            acc = _two(x2, x3, p32, scale, acc, dtype)
            acc = _two(x4, x5, p54, scale, acc, dtype)
            acc = _two(x6, x7, p76, scale, acc, dtype)
        else:
            acc = _one(x0, words >> 4, scale, acc, code_ptr, dtype)
            acc = _one(x1, words, scale, acc, code_ptr, dtype)
            acc = _one(x2, words >> 12, scale, acc, code_ptr, dtype)
            acc = _one(x3, words >> 8, scale, acc, code_ptr, dtype)
            acc = _one(x4, words >> 20, scale, acc, code_ptr, dtype)
            acc = _one(x5, words >> 16, scale, acc, code_ptr, dtype)
            acc = _one(x6, words >> 28, scale, acc, code_ptr, dtype)
            acc = _one(x7, words >> 24, scale, acc, code_ptr, dtype)
    to = split.to(tl.int64) * rows * columns + m[:, None] * columns + start + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + to, acc, mask=(m < rows)[:, None])


@triton.jit
def _one(x, words, scale, acc, code_ptr, dtype: tl.constexpr):
    # Adds the product of x with the weights whose codes are the lowest four bits.
    weight = (tl.load(code_ptr + (words & 15)) * scale).to(dtype)
    return tl.dot(x, tl.trans(weight), acc, input_precision="ieee")


@triton.jit
def _two(first, second, pair, scale, acc, dtype: tl.constexpr):
    # The same with two codes in bfloat16: of `first` in the upper half of `pair`, of `second` in the lower.
    upper = (((pair >> 16) << 16).to(tl.float32, bitcast=True) * scale).to(dtype)
    lower = ((pair << 16).to(tl.float32, bitcast=True) * scale).to(dtype)
    acc = tl.dot(first, tl.trans(upper), acc)
    return tl.dot(second, tl.trans(lower), acc)


@lru_cache
def decoder(kind: str) -> str:
    """Return PTX that turns a word of eight 4-bit codes into four pairs of bfloat16.

    A code's lowest three bits select a byte of the lower and one of the upper half of the table, its highest bit one of
    the two; once for the lower bytes of the values, once for the upper.

    Args:
        kind: nf4 or fp4.
    """
    from bitsandbytes.functional import get_4bit_type

    values = get_4bit_type(kind, device="cpu", blocksize=BLOCK).to(torch.bfloat16).view(torch.uint8).tolist()
    planes = [values[0::2], values[1::2]]
    tables = [[int.from_bytes(bytes(plane[i : i + 4]), "little") for i in (0, 4, 8, 12)] for plane in planes]
    lines = [".reg .b32 sel, half, a, b, low, high, rest;", "mov.b32 rest, $4;"]
    for outs in ((0, 1), (2, 3)):
        lines += ["and.b32 sel, rest, 0x7777;", "and.b32 half, rest, 0x8888;"]
        lines += ["shr.b32 half, half, 1;", "or.b32 half, half, 0x3210;"]
        for name, table in zip(("low", "high"), tables, strict=True):
            for register, (first, second) in (("a", table[:2]), ("b", table[2:])):
                lines += [f"mov.b32 {register}, {first:#x};", f"prmt.b32 {register}, {register}, {second:#x}, sel;"]
            lines.append(f"prmt.b32 {name}, a, b, half;")
        lines += [f"prmt.b32 ${outs[0]}, low, high, 0x5140;", f"prmt.b32 ${outs[1]}, low, high, 0x7362;"]
        lines.append("shr.b32 rest, rest, 16;")
    return "{ " + " ".join(lines) + " }"


@triton.jit
def _add_parts(
    part_ptr, bias_ptr, out_ptr, size, columns, PARTS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    x = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        x += tl.load(part_ptr + part * size + at, mask=real, other=0.0)
    if BIAS:
        x += tl.load(bias_ptr + at % columns, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=real)


def readable(module: Any) -> bool:
    """Whether a layer is a 4-bit linear layer of bitsandbytes in the layout that is read here."""
    state = getattr(module.weight, "quant_state", None)
    if type(module).__name__ != "Linear4bit" or state is None or state.blocksize != BLOCK:
        return False
    if module.weight.data.dtype != torch.uint8 or getattr(state, "packing_format_for_cpu", False):
        return False
    if state.nested and state.state2.blocksize != NESTED_BLOCK:
        return False
    columns, inner = state.shape
    return columns % 32 == 0 and inner % BLOCK == 0


def tiles_of(rows: int, widths: list[int]) -> Tiles:
    """Choose how to cut a product of so many rows with weights of so many outputs, which begin at a tile's start."""
    columns = 64 if all(width % 64 == 0 for width in widths) else 32
    return Tiles(columns, 128, 4, 4 if rows <= 32 else 3)


def product(x: Tensor, modules: list[Any], bias: Tensor | None = None, tiles: Tiles | None = None) -> Tensor:
    """Multiply with up to three 4-bit layers at once. Twin: the layers, one by one.

    Args:
        x: (n, K), contiguous.
        modules: Layers for which `readable` is true, all of one type, nested or none, with the same K.
        bias: (sum of outputs,), or None.
        tiles: How to cut it; None chooses.

    Returns:
        (n, sum of outputs) of x's dtype. The weights, code times scale, are rounded to it, as bitsandbytes does when it
        writes them out; codes are bfloat16 before if it is bfloat16 on CUDA.
    """
    states = [m.weight.quant_state for m in modules]
    nested = bool(states[0].nested)
    widths = [s.shape[0] for s in states]
    columns, (rows, inner) = sum(widths), x.shape
    tiles = tiles or tiles_of(rows, widths)
    programs = columns // tiles.columns
    splits = 1
    while 2 * splits * programs <= PROGRAMS and inner // (2 * splits) >= 4 * tiles.inner:
        splits *= 2
    span = triton.cdiv(triton.cdiv(inner, splits), tiles.inner) * tiles.inner
    parts = torch.empty(splits, rows, columns, dtype=torch.float32, device=x.device)

    def three(of: Any) -> list[Any]:
        found = [of(m, s) for m, s in zip(modules, states, strict=True)]
        return found + found[:1] * (3 - len(found))

    second = widths[1] if len(widths) > 1 else columns
    scales = three(lambda _, s: s.absmax)
    _product[(programs, splits)](
        x, *three(lambda m, _: m.weight.data.view(-1).view(torch.int32)), *scales,
        *(three(lambda _, s: s.state2.absmax) if nested else scales),
        *(three(lambda _, s: s.offset) if nested else scales),
        states[0].code, states[0].state2.code if nested else scales[0], parts,
        rows, inner, widths[0], second, columns, span,
        ROWS=max(16, next_power(rows)), COLUMNS=tiles.columns, INNER=tiles.inner, NESTED=nested, BLOCK=BLOCK,
        NESTED_BLOCK=NESTED_BLOCK,
        DECODE=decoder(states[0].quant_type) if x.is_cuda and x.dtype == torch.bfloat16 else None,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    out = x.new_empty(rows, columns)
    _add_parts[(triton.cdiv(out.numel(), 1024),)](
        parts, parts if bias is None else bias, out, out.numel(), columns, PARTS=splits, BIAS=bias is not None,
        BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out
