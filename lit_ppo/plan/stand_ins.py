"""What a trace puts in place of kernels that exist on a GPU alone: they allocate what the kernels allocate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


class _Flash(torch.autograd.Function):
    """Flash attention: keeps its inputs, its output and a log-sum a query; never the scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, length, dim = q.shape
        out = q.new_empty(batch, length, heads, dim)
        ctx.save_for_backward(q, k, v, out, q.new_empty(batch, heads, length, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _, lse = ctx.saved_tensors
        shape = q.shape
        rounded = -(-shape[2] // 128) * 128
        scratch = [torch.empty_like(lse), lse.new_empty(shape[0], shape[1], rounded, shape[3])]  # float32 sums of dq
        grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
        if k.shape[1] != shape[1]:  # one gradient a query head, added up afterwards
            scratch += [k.new_empty(shape), v.new_empty(shape)]
        del scratch
        return grad_q, grad_k, grad_v


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Stand in for attention, by transformers' interface: (B, H, T, D) -> (B, T, H, D)."""
    out: Any = _Flash.apply(query, key, value)
    return out, None


@contextmanager
def kernels() -> Iterator[None]:
    """Compute, for as long as this lasts, as on a GPU: attention by tiles, and the fused head and layers."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from lit_ppo.roles import fused_head, fused_layers, packed

    changes: list[tuple[Any, str, Any]] = [
        (fused_head, "kernels_for", lambda logits: _Head),
        (fused_layers, "kernels_for", lambda x: _Layers),
        (packed, "_flash_serves", lambda *args: True),
        (packed, "_flash", _flash_packed),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain
        for owner, name, value in before:
            setattr(owner, name, value)


def _flash_packed(q: Tensor, k: Tensor, v: Tensor, packing: Any, *_: Any) -> Tensor:
    """(T, H, D) -> (T, H, D); in float32 a call a sequence, with a key and a value for every query head."""
    if q.dtype != torch.float32:
        return _attend(q, k, v)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    parts = zip(*(x.split(packing.lengths) for x in (q, k, v)), strict=True)
    return torch.cat([_attend(*part) for part in parts])


def _attend(*parts: Tensor) -> Tensor:
    out: Any = _Flash.apply(*(x.transpose(0, 1)[None] for x in parts))
    return out[0]


class _Head:
    """The kernels of the fused head: nothing but a few numbers a row, and gradients in place of the logits."""

    @staticmethod
    def forward(logits: Tensor, targets: Tensor, tempering: Any, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
        one, two, three = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3))
        return one, two, three

    @staticmethod
    def backward_(logits: Tensor, *_: Any) -> Tensor:
        return logits


class _Layers:
    """The kernels of the fused layers: their results, a number a row of a norm, and partial sums of its gradient."""

    @staticmethod
    def norm(x: Tensor, weight: Tensor, eps: float, kind: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x, dtype=kind.out_dtype(x, weight)), x.new_empty(x.shape[:-1], dtype=torch.float32)

    @staticmethod
    def norm_backward(
        grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, kind: Any, weighs: bool
    ) -> tuple[Tensor, Tensor | None]:
        grad_x = torch.empty_like(x)
        parts = weight.new_empty(min(512, rstd.numel()), len(weight), dtype=torch.float32) if weighs else None
        return grad_x, None if parts is None else torch.empty_like(weight)

    @staticmethod
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return torch.empty_like(gate)

    @staticmethod
    def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(gate), torch.empty_like(up)

    @staticmethod
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, back: bool) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype)


class _Dequantized(torch.autograd.Function):
    """A product with a 4-bit weight, which is whole for as long as the product takes, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        whole = torch.empty_like(weight, dtype=x.dtype)
        return x @ whole.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = torch.empty_like(ctx.weight, dtype=grads[0].dtype)
        return grads[0] @ whole, None


def quantize(model: nn.Module, skip: tuple[str, ...]) -> list[nn.Linear]:
    """Have the linear layers of a model compute as 4-bit ones do; return them.

    Args:
        model: Frozen; its weights stay as they are.
        skip: Parts of names that stay at full precision.
    """
    done = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and not any(part in skip for part in name.split(".")):
            layer.forward = MethodType(_dequantized, layer)  # type: ignore[method-assign]
            done.append(layer)
    return done


def _dequantized(layer: Any, x: Tensor) -> Tensor:
    out: Any = _Dequantized.apply(x, layer.weight)
    return out if layer.bias is None else out + layer.bias
