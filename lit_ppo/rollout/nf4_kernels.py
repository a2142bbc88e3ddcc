# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Products of a few rows with 4-bit weights, read as they are: half a byte a weight, never a 16-bit copy of them.

bitsandbytes has one kernel for a single row; for more it writes the whole weight out in 16 bits first, which costs
several times what reading it does.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_ppo.rollout.layer_kernels import next_power

BLOCK, NESTED_BLOCK = 64, 256
"""Weights with a common scale, and scales with a common scale: what bitsandbytes uses by default."""

COLUMNS, PROGRAMS = 32, 528
"""Columns of a program; the inner dimension is split while there are no more programs than these."""


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
    NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
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
    k = tl.arange(0, BLOCK)
    byte = tl.arange(0, BLOCK // 2)
    low = split * span
    high = tl.minimum(low + span, inner)
    dtype = x_ptr.dtype.element_ty
    offset = 0.0
    if NESTED:
        offset = tl.load(offset_ptr)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(low, high, BLOCK):
        x = tl.load(x_ptr + m[:, None] * inner + at + k[None, :], mask=(m < rows)[:, None], other=0.0)
        even, odd = tl.split(tl.reshape(x, (ROWS, BLOCK // 2, 2)))
        packed = tl.load(w_ptr + (n[None, :] * inner + at) // 2 + byte[:, None]).to(tl.int32)
        upper = tl.load(code_ptr + (packed >> 4)).to(dtype)  # the first of two weights is in the upper half
        lower = tl.load(code_ptr + (packed & 15)).to(dtype)
        block = (n * inner + at) // BLOCK
        scale = tl.load(scale_ptr + block)
        if NESTED:
            common = tl.load(nested_ptr + block // NESTED_BLOCK)
            scale = tl.load(nested_code_ptr + scale.to(tl.int32)) * common + offset
        part = tl.dot(even, upper, input_precision="ieee")
        part = tl.dot(odd, lower, part, input_precision="ieee")
        acc += part * scale[None, :]
    place = split.to(tl.int64) * rows * columns + m[:, None] * columns + start + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + place, acc, mask=(m < rows)[:, None])


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
    return columns % COLUMNS == 0 and inner % BLOCK == 0


def product(x: Tensor, modules: list[Any], bias: Tensor | None = None) -> Tensor:
    """Multiply with up to three 4-bit layers at once. Twin: the layers, one by one.

    Args:
        x: (n, K), contiguous.
        modules: Layers for which `readable` is true, all nested or none, with the same K.
        bias: (sum of outputs,), or None.

    Returns:
        (n, sum of outputs) of x's dtype. The codes are rounded to it, the scales are float32.
    """
    states = [m.weight.quant_state for m in modules]
    nested = bool(states[0].nested)
    widths = [s.shape[0] for s in states]
    columns, (rows, inner) = sum(widths), x.shape
    programs = columns // COLUMNS
    splits = 1
    while 2 * splits * programs <= PROGRAMS and inner // (2 * splits) >= 8 * BLOCK:
        splits *= 2
    span = triton.cdiv(triton.cdiv(inner, splits), BLOCK) * BLOCK
    parts = torch.empty(splits, rows, columns, dtype=torch.float32, device=x.device)

    def three(of: Any) -> list[Any]:
        found = [of(m, s) for m, s in zip(modules, states, strict=True)]
        return found + found[:1] * (3 - len(found))

    second = widths[1] if len(widths) > 1 else columns
    scales = three(lambda _, s: s.absmax)
    _product[(programs, splits)](
        x, *three(lambda m, _: m.weight.data), *scales,
        *(three(lambda _, s: s.state2.absmax) if nested else scales),
        *(three(lambda _, s: s.offset) if nested else scales),
        states[0].code, states[0].state2.code if nested else scales[0], parts,
        rows, inner, widths[0], second, columns, span,
        ROWS=max(16, next_power(rows)), COLUMNS=COLUMNS, NESTED=nested, BLOCK=BLOCK, NESTED_BLOCK=NESTED_BLOCK,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    out = x.new_empty(rows, columns)
    _add_parts[(triton.cdiv(out.numel(), 1024),)](
        parts, parts if bias is None else bias, out, out.numel(), columns, PARTS=splits, BIAS=bias is not None,
        BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out
