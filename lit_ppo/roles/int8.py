"""Frozen embeddings and heads in 8 bits: a row of int8 numbers and one float32 scale for each token.

A row is divided by its largest magnitude and rounded to one of 255 numbers, so each weight is off by at most half a
step, 1/254 of the largest in its row. These integers are exact in bfloat16: products multiply them as they are and
apply the scales to the result. They are widened a block of the vocabulary at a time, never the whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

BLOCK = 2**25
"""Elements that are widened at once: 64 MiB in half precision."""


class Int8Rows(nn.Module):
    """A matrix of V rows of H numbers, and what it computes in.

    Args:
        weight: (V, H) int8, frozen; two modules may share it.
        scale: (V,) float32.
        dtype: Of what comes out.
    """

    scale: Tensor

    def __init__(self, weight: nn.Parameter, scale: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("scale", scale)
        self.dtype = dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the weights; a conversion is of what comes out: the scales stay float32."""
        scale = self.scale
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=scale.device)).dtype
        self.scale = scale.to(self.scale.device) if self.scale.dtype != scale.dtype else self.scale
        return self

    def extra_repr(self) -> str:
        """Return the shape."""
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}, dtype={self.dtype}"


class Int8Embedding(Int8Rows):
    """Rows of the matrix."""

    @property
    def num_embeddings(self) -> int:
        """V."""
        return self.weight.shape[0]

    @property
    def embedding_dim(self) -> int:
        """H."""
        return self.weight.shape[1]

    def forward(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (..., H)."""
        flat = ids.flatten()
        rows = self.weight.index_select(0, flat).float() * self.scale.index_select(0, flat)[:, None]
        return rows.to(self.dtype).view(*ids.shape, -1)


class Int8Head(Int8Rows):
    """Products with the rows of the matrix.

    Args:
        weight: (V, H) int8, frozen.
        scale: (V,) float32.
        dtype: Of what comes out.
        bias: (V,), or None.
    """

    def __init__(self, weight: nn.Parameter, scale: Tensor, dtype: torch.dtype, bias: nn.Parameter | None) -> None:
        super().__init__(weight, scale, dtype)
        self.bias = bias

    @property
    def out_features(self) -> int:
        """V."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """H."""
        return self.weight.shape[1]

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., H) -> (..., V)."""
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        flat = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
        logits: Tensor = _Product.apply(flat, self.weight, self.scale)
        if self.bias is not None:
            logits = logits + self.bias.to(dtype)
        return logits.view(*hidden.shape[:-1], -1)


def product(hidden: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """(n, H) hidden states, (V, H) int8, (V,) scales -> (n, V), in the dtype of the states."""
    out = hidden.new_empty(len(hidden), len(weight))
    for start, stop in _blocks(weight):
        part = hidden @ weight[start:stop].to(hidden.dtype).t()
        torch.mul(part, scale[start:stop], out=out[:, start:stop])
    return out


def transposed(grad: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """(n, V), (V, H) int8, (V,) scales -> (n, H): the gradient of the hidden states of `product`, summed in float32."""
    out = torch.zeros(
        len(grad), weight.shape[1], dtype=torch.promote_types(grad.dtype, torch.float32), device=grad.device
    )
    for start, stop in _blocks(weight):
        part = (grad[:, start:stop] * scale[start:stop]).to(grad.dtype)
        out += part @ weight[start:stop].to(grad.dtype)
    return out


def _blocks(weight: Tensor) -> list[tuple[int, int]]:
    rows = max(1, BLOCK // weight.shape[1])
    return [(start, min(start + rows, len(weight))) for start in range(0, len(weight), rows)]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.dtype = hidden.dtype
        return product(hidden, weight, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        return transposed(grads[0], weight, scale).to(ctx.dtype), None, None


@torch.no_grad()
def rounded(weight: Tensor) -> tuple[nn.Parameter, Tensor]:
    """Return a matrix as int8 rows and their (V,) float32 scales, made a block at a time.

    Args:
        weight: (V, H) of any float dtype, on any device.
    """
    found = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    for start, stop in _blocks(weight):
        part = weight[start:stop].float()
        scale = part.abs().amax(1) / 127
        scales[start:stop] = scale
        step = torch.where(scale > 0, scale, torch.ones_like(scale))  # a row of zeros
        found[start:stop] = (part / step[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return nn.Parameter(found, requires_grad=False), scales


def quantize_embeddings_(model: Any, option: str) -> None:
    """Put the embeddings of a frozen transformers model into 8 bits: of the input, and of the output if there is one.

    Args:
        model: Changed in place. Tied embeddings stay tied.
        option: What asks for it, for the error.

    Raises:
        ValueError: They are of a kind that computes something else.
    """
    inputs, head = model.get_input_embeddings(), model.get_output_embeddings()
    for part, plain in ((inputs, nn.Embedding), (head, nn.Linear)):
        if part is not None and type(part) is not plain:
            raise ValueError(
                f"`{option}`: {type(model).__name__} has a {type(part).__name__} where a plain {plain.__name__} can be "
                "held in 8 bits. Leave it out."
            )
    weight, scale = rounded(inputs.weight)
    if head is not None:
        tied = head.weight is inputs.weight
        matrix = (weight, scale.clone()) if tied else rounded(head.weight)
        bias = None if head.bias is None else head.bias.requires_grad_(False)
        model.set_output_embeddings(Int8Head(*matrix, head.weight.dtype, bias))
    model.set_input_embeddings(Int8Embedding(weight, scale, inputs.weight.dtype))


def dtype_of(embedding: Any) -> torch.dtype:
    """Return the dtype that comes out of an embedding."""
    dtype: torch.dtype = embedding.dtype if isinstance(embedding, Int8Rows) else embedding.weight.dtype
    return dtype
