"""AdamW in less memory: 8-bit moments, bfloat16 weights without a master copy, state that waits in host memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from lit_ppo.optim.codes import (
    MOMENTS,
    decoded,
    encode_first,
    encode_second,
    local,
    noise_bits,
    noise_key,
    round_stochastically,
    scale_shape,
)
from lit_ppo.optim.master import MasterAdamW, is_low_precision
from lit_ppo.optim.paging import Piece, through_device

SMALLEST = 4096
"""Weights of fewer elements, and vectors, keep float32 moments: they are nothing in size, and norms matter."""
PIECE = 2**24
"""Elements of a weight that are updated at once where each costs temporaries or staging."""


class LeanAdamW(MasterAdamW):
    """AdamW whose state takes 2 bytes a bfloat16 parameter instead of 12, or none of the GPU's between steps.

    All arithmetic is in float32; what is stored between steps is smaller. The noise of 8-bit codes and of stochastic
    rounding is a function of seed, step, weight and element, so a resumed run goes on bit by bit.

    On CUDA with Triton each weight is updated by one kernel, without temporaries; elsewhere by plain PyTorch.

    Args:
        params: Parameters or parameter groups, as for `torch.optim.AdamW`: bfloat16, float16 or float32.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        state: "8bit": both moments of every matrix of at least 4096 elements in 8 bits a value and one float32 scale
            for 256 values (`lit_ppo.optim.codes`). "float32": as they are.
        rounding: "stochastic": a bfloat16 weight has no master; it is written rounded up or down by chance, in
            proportion, so that small updates count in the mean. "master": a float32 copy of each low-precision weight.
        paged: Keep the state in pinned host memory, and pass it through the GPU in each step.
        seed: Of the noise.

    Raises:
        ValueError: A value out of its range, or a parameter's dtype that cannot be had so.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state: str = "8bit",
        rounding: str = "stochastic",
        paged: bool = False,
        seed: int = 0,
    ) -> None:
        for name, value, known in (
            ("state", state, ("8bit", "float32")),
            ("rounding", rounding, ("stochastic", "master")),
        ):
            if value not in known:
                raise ValueError(f"`{name}={value!r}` must be one of {', '.join(map(repr, known))}.")
        self.kinds: dict[str, Any] = {"state": state, "rounding": rounding, "paged": paged, "seed": seed}
        self._numbers: dict[Tensor, int] = {}
        self._waiting: dict[Tensor, dict[str, Any]] = {}
        super().__init__(params, lr, betas, eps, weight_decay)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dtype not in (torch.bfloat16, torch.float16, torch.float32):
                raise ValueError(f"LeanAdamW computes in float32, and a parameter is {p.dtype}: use MasterAdamW.")
            if p.dtype == torch.float16 and self.kinds["rounding"] == "stochastic":
                raise ValueError(
                    "`rounding='stochastic'` is for bfloat16 weights, and a parameter is float16: use 'master'."
                )
            if isinstance(p, DTensor) and any(isinstance(x, Shard) and x.dim != 0 for x in p.placements):
                raise ValueError(f"A parameter is sharded as {p.placements}: only the first dimension may be cut.")
            self._numbers[p] = len(self._numbers)

    @torch.no_grad()
    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also of `MasterAdamW` or with other options: it is converted, a master excepted.

        Where weights have no master here, one that was saved is left out; where they have, it starts from the weight.

        Args:
            state_dict: What `state_dict` returned. Its tensors are not shared with this optimizer.
        """
        # Its groups alone: torch would round the state, and put it on the GPU.
        torch.optim.Optimizer.load_state_dict(self, {**state_dict, "state": {}})
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, p in zip(saved, ours, strict=True):
            self.state.pop(p, None)
            self._waiting.pop(p, None)
            if given := state_dict["state"].get(key):
                state = self._allocate(p)
                state["step"].fill_(float(given["step"]))
                if "master" in state and "master" in given:
                    local(state["master"]).copy_(local(given["master"]))
                self._adopt(p, state, given)
                # Out of the sight of a trainer, which moves what it finds to the GPU; those that shard do not.
                if self.kinds["paged"] and not isinstance(p, DTensor):
                    self._waiting[p] = self.state.pop(p)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state, also what was loaded and not yet used."""
        self.state.update(self._waiting)
        self._waiting.clear()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle needs, which torch's own leaves out."""
        ours = {"kinds": self.kinds, "_numbers": self._numbers, "_waiting": self._waiting}
        return {**super().__getstate__(), **ours}

    def _adopt(self, p: Tensor, state: dict[str, Any], given: dict[str, Any]) -> None:
        """Copy moments, or convert them."""
        if ("exp_avg_scale" in state) == ("exp_avg_scale" in given):
            for name in state.keys() & given.keys() - {"step", "master"}:
                local(state[name]).copy_(local(given[name]))
            return
        plain = {name: value.to(p.device, copy=True) for name, value in decoded(given).items()}
        if "exp_avg_scale" in state:
            half = torch.full_like(plain["exp_avg"], 0.5)
            plain["exp_avg"], plain["exp_avg_scale"] = encode_first(plain["exp_avg"], half)
            plain["exp_avg_sq"], plain["exp_avg_sq_scale"] = encode_second(plain["exp_avg_sq"], half)
        for name, value in plain.items():
            local(state[name]).copy_(value)

    @override
    def _allocate(self, p: Tensor) -> dict[str, Any]:
        if p in self._waiting:
            self.state[p] = self._waiting.pop(p)
        state = self.state[p]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # on the CPU, where reading it costs nothing
            if self.kinds["state"] == "8bit" and in_eight_bits(p):
                for name, dtype in zip(MOMENTS, (torch.int8, torch.uint8), strict=True):
                    state[name] = self._zeros(p, p.shape, dtype)
                    state[f"{name}_scale"] = self._zeros(p, scale_shape(p.shape), torch.float32)
            else:
                for name in MOMENTS:
                    state[name] = self._zeros(p, p.shape, torch.float32)
        if is_low_precision(p) and self.kinds["rounding"] == "master" and "master" not in state:
            state["master"] = self._zeros(p, p.shape, torch.float32)
            local(state["master"]).copy_(local(p))
        if self.kinds["paged"]:
            for name, value in state.items():  # someone may have put it on the GPU
                if name != "step" and local(value).is_cuda:
                    state[name] = self._zeros(p, value.shape, value.dtype)
                    local(state[name]).copy_(local(value))
        return state

    def _zeros(self, p: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
        """Return zeros where the state lives, sharded as the parameter is."""
        mine = local(p)
        rows = mine.shape[:1] if mine.dim() else ()
        size = (*rows, *tuple(shape)[len(rows) :])
        paged = self.kinds["paged"] and mine.is_cuda
        zeros = torch.zeros(size, dtype=dtype, device="cpu" if paged else mine.device, pin_memory=paged)
        if not isinstance(p, DTensor):
            return zeros
        meta = TensorMeta(torch.Size(shape), torch.empty(tuple(shape), device="meta").stride(), dtype)
        # As FSDP2 makes its own of shards on the CPU: `from_local` would put it on the mesh's devices.
        made: Tensor = DTensor(zeros, DTensorSpec(p.device_mesh, p.placements, meta), requires_grad=False)
        return made

    @override
    def _step_group(self, params: list[Tensor], group: dict[str, Any]) -> None:
        pieces = chain.from_iterable(self._pieces(p, group) for p in params)
        for piece in through_device(list(pieces)) if self.kinds["paged"] else pieces:
            piece.run()

    def _pieces(self, p: Tensor, group: dict[str, Any]) -> Iterator[Piece]:
        """Cut the update of a weight by rows."""
        state = self._allocate(p)
        assert p.grad is not None
        if p.grad.is_sparse:
            raise RuntimeError("LeanAdamW takes no sparse gradients: use an embedding with `sparse=False`.")
        state["step"] += 1
        step = int(state["step"])
        weight, grad = local(p.detach()), local(p.grad)
        if not weight.numel():
            return
        kept = {name: local(value) for name, value in state.items() if name != "step"}
        kernel = _kernel(weight)
        betas = group["betas"]
        options = {
            "keep": 1 - group["lr"] * group["weight_decay"],
            "betas": betas,
            "step_size": group["lr"] / (1 - betas[0] ** step),
            "root": math.sqrt(1 - betas[1] ** step),
            "eps": group["eps"],
            "stochastic": self.kinds["rounding"] == "stochastic" and p.dtype == torch.bfloat16,
        }
        key = noise_key(self.kinds["seed"], step, self._numbers[p])
        rows = len(weight) if weight.dim() else 1
        at_once = rows
        if kernel is update or self.kinds["paged"]:
            at_once = max(1, PIECE // (weight.numel() // rows))
        for first in range(0, rows, at_once):
            cut = slice(first, first + at_once) if weight.dim() else ...
            start = (first_row(p) + first) * (weight.numel() // rows)
            yield Piece(
                kernel, weight[cut], grad[cut], {n: v[cut] for n, v in kept.items()}, key=key, start=start, **options
            )


def in_eight_bits(p: Tensor) -> bool:
    """Whether the moments of a weight are stored in 8 bits where that is asked for."""
    return p.dim() > 1 and p.numel() >= SMALLEST


def update(
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
    """Update a weight and its state in place, in plain PyTorch: what the kernel does.

    Args:
        param: (..., C) bfloat16, float16 or float32.
        grad: The same shape.
        state: Moments, with their scales if in 8 bits, and perhaps a master; see `LeanAdamW`.
        key: Of the noise.
        start: Place of the first element in its weight.
        keep: What weight decay leaves of the weight.
        betas: Decay rates of the moments.
        step_size: Learning rate over the first moment's bias correction.
        root: Square root of the second moment's bias correction.
        eps: Added to the denominator.
        stochastic: Round a bfloat16 weight by chance.
    """
    weight = state.get("master", param)
    new, grad = weight.float(), grad.float()
    moments = decoded(state)
    first = moments["exp_avg"] * betas[0] + grad * (1 - betas[0])
    second = moments["exp_avg_sq"] * betas[1] + grad.square() * (1 - betas[1])
    new = new * keep - step_size * first / (second.sqrt() / root + eps)
    eight = "exp_avg_scale" in state
    if eight or stochastic:
        bits, others = noise_bits(key, start, new.shape, new.device)
    param.copy_(round_stochastically(new, bits) if stochastic else new)
    if weight is not param:
        weight.copy_(new)
    stored = {"exp_avg": first, "exp_avg_sq": second}
    if eight:
        stored["exp_avg"], stored["exp_avg_scale"] = encode_first(first, (bits >> 16).float() / 2**16)
        stored["exp_avg_sq"], stored["exp_avg_sq_scale"] = encode_second(second, (others >> 8).float() / 2**24)
    for name, value in stored.items():
        state[name].copy_(value)


def first_row(p: Tensor) -> int:
    """Return which row of a parameter this rank's part starts with: its noise does not depend on how it is cut."""
    first = 0
    if isinstance(p, DTensor):
        rows, place = p.shape[0], p.device_mesh.get_coordinate()
        assert place is not None
        for placement, ranks, rank in zip(p.placements, p.device_mesh.shape, place, strict=True):
            if isinstance(placement, Shard):  # as torch.chunk cuts
                each = -(-rows // ranks)
                first += min(rank * each, rows)
                rows = max(0, min(each, rows - rank * each))
    return first


def _kernel(weight: Tensor) -> Any:
    """Return how a weight is updated: by Triton where it can be, else by `update`."""
    if not weight.is_cuda or not weight.is_contiguous():
        return update
    from importlib.util import find_spec

    if find_spec("triton") is None:
        return update
    from lit_ppo.optim.kernels import step

    return step
