"""FSDP2 after an out-of-memory error in the middle of a forward or backward, at the same point on all ranks."""

from __future__ import annotations

from typing import Any

from torch import nn


def settle(root: Any) -> None:
    """Have a sharding root forget a forward or backward that an exception cut off; gradients must be dropped after.

    Otherwise the next backward would be silently wrong.

    Args:
        root: What `fully_shard` was applied to last, and what is called.
    """
    reset = getattr(root, "reset_iter_state", None)
    if reset is not None:  # torch 2.13
        _drop_gathered_gradients(root)
        reset()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = root._get_fsdp_state()
    if state._state_ctx.post_backward_final_callback_queued:
        state._root_post_backward_final_callback()
    for each in state._state_ctx.all_states:
        each._training_state = TrainingState.IDLE
    state._state_ctx.iter_forward_root = None


def _drop_gathered_gradients(root: Any) -> None:
    """Drop what a backward has made of gathered weights and not yet reduced; `reset_iter_state` leaves it."""
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for param in (p for group in state._fsdp_param_groups for p in group.fsdp_params):
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):  # it has been gathered before
                param._unsharded_param.grad = None


def settle_all(module: nn.Module) -> None:
    """Settle every sharding root in a module, and in the `roles` that it may keep outside of its submodules."""
    from torch.distributed.fsdp import FSDPModule

    roles: dict[str, nn.Module] = getattr(module, "roles", {})
    roots = {
        id(m): m
        for owner in (module, *roles.values())
        for m in owner.modules()
        if isinstance(m, FSDPModule) and m._get_fsdp_state()._is_root
    }
    for root in roots.values():
        settle(root)
