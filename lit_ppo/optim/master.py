"""AdamW that does not round small updates away: float32 masters and moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from lit_ppo.optim.codes import decoded

_CHUNK = 2**26
"""Elements updated at once: bounds the float32 temporaries of a step to a few times 256 MiB, whatever the model."""


def is_low_precision(p: Tensor) -> bool:
    """Whether a parameter has fewer than 32 bits."""
    return p.is_floating_point() and p.dtype.itemsize < 4


class MasterAdamW(torch.optim.Optimizer):
    """AdamW with a float32 master copy and float32 moments for every bfloat16 or float16 parameter.

    bfloat16 keeps 8 bits of a weight, so an update below about 0.2 % of it is lost, which at RLHF's learning rates is
    nearly every update. Here updates add up in the master, held in the optimizer's state under `master`, and the
    parameter is its rounding. Parameters in float32 are updated exactly as `torch.optim.AdamW` does, with no copy.

    From the first step (or `allocate_state`) on the master is the weight: a parameter that something else overwrites
    is set back by the next step.

    Args:
        params: Parameters or parameter groups, as for `torch.optim.AdamW`.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay (https://arxiv.org/abs/1711.05101).

    Raises:
        ValueError: A value out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with its own values for any of the options.

        Args:
            param_group: `params` and options.

        Raises:
            ValueError: A value out of its range.
        """
        values = {**self.defaults, **param_group}
        for name in ("lr", "eps", "weight_decay"):
            if not values[name] >= 0:
                raise ValueError(f"`{name}={values[name]!r}` must be >= 0.")
        if not all(0 <= beta < 1 for beta in values["betas"]):
            raise ValueError(f"`betas={values['betas']!r}` must be at least 0 and below 1.")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: Computes the loss anew and returns it.

        Returns:
            What `closure` returned.

        Raises:
            RuntimeError: A sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group([p for p in group["params"] if p.grad is not None], group)
        return loss

    @torch.no_grad()
    def allocate_state(self) -> None:
        """Create the state of every trainable parameter now, changing no weight, so that no later step needs memory."""
        for p in chain.from_iterable(group["params"] for group in self.param_groups):
            if p.requires_grad:
                self._allocate(p)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; masters and moments stay float32, which `Optimizer.load_state_dict` rounds to the parameter's.

        The state of a `torch.optim.AdamW` loads too; masters then start from the parameters. 8-bit moments are decoded.

        Args:
            state_dict: What `state_dict` returned. Its tensors are not shared with this optimizer.
        """
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, p in zip(saved, ours, strict=True):
            given = state_dict["state"].get(key, {})
            if "exp_avg_scale" in given:  # 8-bit moments
                self.state[p] = {}
                given = {name: given[name] for name in ("step", "master") if name in given} | decoded(given)
            for name, value in given.items():
                if isinstance(value, Tensor):
                    kind = {"device": p.device, "dtype": torch.float32 if is_low_precision(p) else p.dtype}
                    self.state[p][name] = value.clone() if name == "step" else value.to(**kind, copy=True)

    def _allocate(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        kept = torch.float32 if is_low_precision(p) else p.dtype
        if "step" not in state:
            state["step"] = torch.zeros(
                (), dtype=torch.float32
            )  # on the CPU, where reading it costs no synchronisation
            state["exp_avg"] = torch.zeros_like(p, dtype=kept)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=kept)
        if kept != p.dtype and "master" not in state:
            state["master"] = p.detach().to(kept)
        return state

    def _step_group(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for chunk in _chunks(params):
            self._step(chunk, group)

    def _step(self, params: list[Tensor], group: dict[str, Any]) -> None:
        states = [self._allocate(p) for p in params]
        weights = [state.get("master", p) for p, state in zip(params, states, strict=True)]
        grads = []
        for p, weight in zip(params, weights, strict=True):
            assert p.grad is not None
            if p.grad.is_sparse:
                raise RuntimeError("MasterAdamW takes no sparse gradients: use an embedding with `sparse=False`.")
            grads.append(p.grad.to(weight.dtype))
        adamw(
            weights,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for p, weight in zip(params, weights, strict=True):
            if weight is not p:
                p.copy_(weight)


def _chunks(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Cut into runs of at most `_CHUNK` elements, or of one parameter that is larger."""
    chunk: list[Tensor] = []
    size = 0
    for p in params:
        if chunk and size + p.numel() > _CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(p)
        size += p.numel()
    if chunk:
        yield chunk
