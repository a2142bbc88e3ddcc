"""Allocating an optimizer's state before the first step, without changing any weight or what the first step does."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, optim

# Optimizers whose state after a step without gradient, zeroed, is the state that their first step starts from.
_STARTS_AT_ZERO = (optim.Adam, optim.Adamax, optim.RMSprop, optim.Adadelta, optim.SGD)


def allocate_state(optimizer: optim.Optimizer) -> bool:
    """Allocate the state of every trainable parameter that has none.

    Uses `optimizer.allocate_state()` where there is one, bitsandbytes' own initialisation, or, for the usual torch
    optimizers, a step with zero gradients and learning rate whose results are set to zero.

    Args:
        optimizer: Any; gradients must not matter yet. They are dropped.

    Returns:
        Whether the state is there now. False: no way is known that leaves the first step as it would have been.
    """
    missing = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad and not optimizer.state.get(p)]
    if not missing:
        return True
    own: Any = getattr(optimizer, "allocate_state", None)
    if callable(own):
        own()
        return True
    initialise: Any = getattr(optimizer, "init_state", None)
    if callable(initialise):  # bitsandbytes
        optimizer.check_overrides()  # type: ignore[attr-defined]
        with torch.no_grad():
            for gindex, group in enumerate(optimizer.param_groups):
                for pindex, p in enumerate(group["params"]):
                    if p.requires_grad and not optimizer.state.get(p):
                        initialise(group, p, gindex, pindex)
        return True
    if type(optimizer).__module__.split(".")[0] != "torch" or not isinstance(optimizer, _STARTS_AT_ZERO):
        return False
    if len(missing) != sum(p.requires_grad for g in optimizer.param_groups for p in g["params"]):
        return False  # some parameters have made steps, which another step would change
    if any(g.get("dampening") or g.get("eps") == 0 for g in optimizer.param_groups):
        return False  # SGD's first step ignores the dampening; without eps a zero gradient divides 0 by 0
    _zero_step(optimizer, missing)
    return True


def _zero_step(optimizer: optim.Optimizer, parameters: list[Tensor]) -> None:
    """Step with zero gradients and no learning rate, then zero what the step left in the state."""
    kept = [{k: g[k] for k in ("lr", "weight_decay")} for g in optimizer.param_groups]
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    others = [(p, p.grad) for g in optimizer.param_groups for p in g["params"]]
    try:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
            group["weight_decay"] = 0
        for p, _ in others:
            p.grad = None
        for p in parameters:
            p.grad = torch.zeros_like(p)
        type(optimizer).step(optimizer)
    finally:
        for group, values in zip(optimizer.param_groups, kept, strict=True):
            group.update(values)
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
        for p, _ in others:
            p.grad = None
    for p in parameters:
        for value in optimizer.state[p].values():
            if isinstance(value, Tensor):
                value.zero_()
