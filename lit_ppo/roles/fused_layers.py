"""What surrounds the matrix products of a transformers model in one kernel each: RMS norm, SwiGLU, rotary embedding.

`fuse` gives instances of such modules a forward of ours. Nothing is replaced in a class or a module of transformers,
and no weight, so state dicts, adapters, quantized and sharded layers are as before. Which modules it may serve is found
out by trying: a module's own code is run on a few numbers in bfloat16, and must give the bits of a formula below. What
computes otherwise is left alone.

On CUDA, in 16 bits or under autocast, the fused forwards use the kernels of `layer_kernels`; everywhere else they do
what the modules did before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

ROTATION = "apply_rotary_pos_emb"
"""The name by which attention layers call the rotary embedding."""

WIDEST = 32_768
"""A row of a norm stands in one program."""

HALVES = (torch.bfloat16, torch.float16)

# ----------------------------------------------------------------------------------------------------- the formulas


@dataclass(frozen=True)
class NormKind:
    """How an RMS norm applies its weight."""

    offset: float
    """Added to the weight."""
    rounds: bool
    """To the input's dtype before the weight, else after it."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """(..., H), (H,) -> (..., H)."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
        return weight * y.to(x.dtype) if self.rounds else ((self.offset + weight.float()) * y).to(x.dtype)

    def out_dtype(self, x: Tensor, weight: Tensor) -> torch.dtype:
        """Return the dtype of the result."""
        return torch.promote_types(x.dtype, weight.dtype) if self.rounds else x.dtype


KINDS = (NormKind(0.0, True), NormKind(1.0, False), NormKind(0.0, False))
"""Those of Llama and most others, of Gemma, and of OLMo 2."""


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate (B, H, T, D) queries and (B, HK, T, D) keys by (B, T, D) cosines and sines."""

    def turn(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]

    return turn(q), turn(k)


# ------------------------------------------------------------------------------------------------------ the kernels


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        from lit_ppo.roles import layer_kernels
    except ImportError:  # no Triton
        return None
    return layer_kernels


def kernels_for(x: Tensor) -> ModuleType | None:
    """Return the kernels where they can run, else None."""
    return _kernels() if x.is_cuda else None


def _serving(x: Tensor) -> Any:
    """Return the kernels where they are wanted: float32 outside autocast stays exact."""
    kernels = kernels_for(x)
    if kernels is None or not x.numel():
        return None
    mixed = x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type)
    return kernels if mixed or x.dtype in HALVES else None


class _Norm(torch.autograd.Function):
    """(..., H) input, (H,) weight -> (..., H). Keeps the input and a number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kind: NormKind, kernels: Any) -> Tensor:
        x = x.contiguous()
        out, rstd = kernels.norm(x, weight, eps, kind)
        ctx.save_for_backward(x, weight, rstd)
        ctx.kind, ctx.kernels = kind, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        weighs = ctx.needs_input_grad[1]
        grads = ctx.kernels.norm_backward(grad.contiguous(), x, weight, rstd, ctx.kind, weighs)
        return *grads, None, None, None


class _SwiGLU(torch.autograd.Function):
    """Gate and up of one shape -> silu(gate) * up. Keeps the two."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: Any) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return kernels.swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *ctx.kernels.swiglu_backward(grad.contiguous(), *ctx.saved_tensors), None


class _Rotary(torch.autograd.Function):
    """As `rotary`. Keeps cosines and sines."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, kernels: Any) -> tuple[Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.kernels, ctx.dtype = kernels, q.dtype
        return kernels.rotate(q, k, cos, sin, torch.promote_types(q.dtype, cos.dtype), False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> Any:
        return *ctx.kernels.rotate(grad_q, grad_k, *ctx.saved_tensors, ctx.dtype, True), None, None, None


# ----------------------------------------------------------------------------------------------------- the forwards


@dataclass(frozen=True)
class _NormForward:
    """The forward of a norm."""

    kind: NormKind
    eps: float
    lit_ppo_fused = True
    __name__ = "forward"  # by which a bound method is pickled

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        kernels = _serving(args[0]) if len(args) == 1 and not kwargs else None
        if kernels is None or args[0].shape[-1] > WIDEST:
            return type(module).forward(module, *args, **kwargs)
        return _Norm.apply(args[0], module.weight, self.eps, self.kind, kernels)


@dataclass(frozen=True)
class _GatedForward:
    """The forward of an MLP with projections gate, up and down."""

    lit_ppo_fused = True
    __name__ = "forward"

    def __call__(self, module: Any, x: Tensor) -> Any:
        gate, up = module.gate_proj(x), module.up_proj(x)
        kernels = _serving(gate)
        if kernels is None or gate.dtype != up.dtype:
            return module.down_proj(module.act_fn(gate) * up)
        return module.down_proj(_SwiGLU.apply(gate, up, kernels))


def _rotate(own: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What attention layers call instead of their module's `apply_rotary_pos_emb`."""
    kernels = None if args or kwargs else _serving(q)
    if kernels is None or q.dtype != k.dtype or cos.dtype != sin.dtype or cos.shape != sin.shape:
        return own(q, k, cos, sin, *args, **kwargs)
    batch, _, length, dim = q.shape
    if cos.shape not in ((batch, length, dim), (1, length, dim)) or k.shape[-1] != dim or dim % 2:
        return own(q, k, cos, sin)
    return _Rotary.apply(q, k, cos, sin, kernels)


@functools.cache
def _rotating(forward: Any) -> Any:
    """Return the forward of an attention class with our rotary embedding in its place, or None.

    It is the class's own code, for which one global name means something else.
    """
    while "deprecation" in getattr(forward, "__globals__", {}).get("__name__", "") and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__  # it renames arguments that layers do not give
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    if code is None or ROTATION not in code.co_names or ROTATION not in names:
        return None
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 2, 3, 8), (2, 1, 3, 8), (2, 3, 8), (2, 3, 8)]
    if not _same(names[ROTATION], rotary, *(_random(shape, draw) for shape in shapes)):
        return None
    names = {**names, ROTATION: functools.partial(_rotate, names[ROTATION])}
    made: Any = FunctionType(code, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    made.lit_ppo_fused = True
    return functools.update_wrapper(made, forward)


# ------------------------------------------------------------------------------------------------- where they apply


def fuse(*models: nn.Module) -> dict[str, int]:
    """Give the modules of models that are of a known kind a fused forward; a second time changes nothing.

    A module whose forward somebody else has replaced is left alone.

    Args:
        models: Transformers models, or modules around such.

    Returns:
        How many modules have one, by kind: norms, gated, rotary.
    """
    counts = dict.fromkeys(("norms", "gated", "rotary"), 0)
    kinds: dict[Any, Any] = {}
    if _kernels() is None:
        return counts
    for module in (m for model in models for m in model.modules()):
        own: Any = vars(module).get("forward")
        if own is not None and not hasattr(own, "lit_ppo_fused"):
            continue
        with torch.device("cpu"):  # where modules are tried out, also while models are made elsewhere
            name, forward = _forward_for(module, kinds)
        if forward is not None:
            counts[name] += 1
            module.forward = MethodType(forward, module)
    return counts


def unfuse(*models: nn.Module) -> None:
    """Take the forwards away again that `fuse` gave."""
    for module in (m for model in models for m in model.modules()):
        if hasattr(vars(module).get("forward"), "lit_ppo_fused"):
            del module.forward


def fuse_if(wanted: bool, models: Iterable[nn.Module]) -> None:
    """Fuse models, or have them as transformers made them: a model that is given may come from another run.

    Args:
        wanted: Which of the two.
        models: Transformers models, or modules around such.
    """
    (fuse if wanted else unfuse)(*models)


def _forward_for(module: nn.Module, kinds: dict[Any, Any]) -> tuple[str, Any]:
    """Return a kind, and a fused forward for a module or None; what was found out about norms is kept in `kinds`."""
    children, tensors = set(module._modules), set(module._parameters) | set(module._buffers)
    if not children and tensors == {"weight"} and module._parameters["weight"].dim() == 1:  # type: ignore[union-attr]
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if isinstance(eps, float):
            key = type(module), eps
            if key not in kinds:
                kinds[key] = _kind_of(module, eps)
            return "norms", None if kinds[key] is None else _NormForward(kinds[key], eps)
    if children == {"gate_proj", "up_proj", "down_proj", "act_fn"} and not tensors:
        return "gated", _GatedForward() if _is_gated(module) else None
    return "rotary", _rotating(type(module).forward)


def _kind_of(module: nn.Module, eps: float) -> NormKind | None:
    """Return the kind of a norm, or None; its class is asked about rows on both sides of epsilon."""
    draw = torch.Generator().manual_seed(0)
    weight = _random((7,), draw)
    x = _random((64, 7), draw) * torch.tensor([1.0, 2 * eps**0.5]).repeat(32)[:, None].bfloat16()
    trial = _trial(module, _parameters={"weight": nn.Parameter(weight)})
    same = (kind for kind in KINDS if _same(trial, lambda y, kind=kind: kind(y, weight, eps), x))
    return next(same, None)


def _is_gated(module: nn.Module) -> bool:
    """Whether an MLP is down(silu(gate(x)) * up(x))."""
    draw = torch.Generator().manual_seed(0)
    gate, up, down = (_random(shape, draw) for shape in ((6, 4), (6, 4), (4, 6)))
    linear = {name: _linear(weight) for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down))}
    trial = _trial(module, _modules={**module._modules, **linear})
    return _same(trial, lambda x: (silu(x @ gate.t()) * (x @ up.t())) @ down.t(), _random((32, 4), draw))


def _trial(module: nn.Module, **changes: Any) -> Callable[..., Any]:
    """Return a class's own forward, of a module that is like another one but for what it holds."""
    made = object.__new__(type(module))
    vars(made).update(vars(module) | changes)
    return functools.partial(type(module).forward, made)


def _linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(1, 1, bias=False, device="meta")
    made.weight = nn.Parameter(weight)
    return made


def _random(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=draw, device="cpu", dtype=torch.float32).bfloat16()


@torch.no_grad()
def _same(theirs: Callable[..., Any], ours: Callable[..., Any], *tensors: Tensor) -> bool:
    """Whether two functions give the same bits."""
    with torch.autocast("cpu", enabled=False):
        try:
            found = theirs(*tensors)
        except Exception:  # code that asks for something else, and so is something else
            return False
        expected = ours(*tensors)
    pairs = [(found, expected)] if isinstance(expected, Tensor) else list(zip(found, expected, strict=True))
    return all(isinstance(a, Tensor) and a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
