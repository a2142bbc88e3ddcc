"""Data-parallel ranks that agree on each step before they share its gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Ranks:
    """What a policy needs of DDP: agreement on a group of its own, and gradients averaged afterwards, by hand.

    The group uses gloo where torch has it, so that agreeing needs no device memory and meets no collective of the
    model.

    Args:
        module: What DDP wraps.
        ddp: The wrapper; None outside of training.
        timeout: Seconds to wait for the other ranks.
        accumulating: Whether gradients of this step are not to be averaged yet.
    """

    def __init__(
        self,
        module: nn.Module,
        ddp: DistributedDataParallel | None,
        timeout: float,
        accumulating: Callable[[], bool],
    ) -> None:
        self.module = module
        self.ddp = ddp
        self.timeout = timeout
        self.accumulating = accumulating
        self.group: Any = dist.new_group(
            backend="gloo" if dist.is_gloo_available() else None, timeout=timedelta(seconds=timeout)
        )

    def check(self, comm_hook: object) -> None:
        """Refuse what bypasses or is bypassed by averaging by hand.

        Raises:
            MisconfigurationException: A setting of DDP, or a layer, under which a step cannot be undone by itself.
        """
        if self.ddp is None:
            return
        problems = {
            "`static_graph=True`": self.ddp.static_graph,
            "`ddp_comm_hook`": comm_hook is not None,
            "parameters that DDP ignores": bool(getattr(self.module, "_ddp_params_and_buffers_to_ignore", None)),
            "`SyncBatchNorm`": any(isinstance(m, nn.SyncBatchNorm) for m in self.module.modules()),
        }
        for name, present in problems.items():
            if present:
                raise MisconfigurationException(
                    f"`OOMGuard` averages gradients after the backward and must be able to undo a step on each rank by "
                    f"itself, which {name} does not allow. Leave one of the two out."
                )

    def agree(self, value: int, patience: float | None = None) -> int:
        """Return the maximum of `value` over all ranks.

        Args:
            value: 0 or more.
            patience: Seconds to wait with a value that is not 0; None: as with any.

        Raises:
            RuntimeError: The others did not answer in time.
        """
        wait = self.timeout if patience is None or value == 0 else min(patience, self.timeout)
        shared = torch.tensor(value, dtype=torch.int64)
        if not dist.is_gloo_available():
            shared = shared.cuda()
        try:
            work: Any = dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
            work.wait(timedelta(seconds=wait))
        except RuntimeError as error:
            raise RuntimeError(
                "The ranks could not agree on a step: one has stopped, did not come within "
                f"{wait:g} seconds (`timeout`), or does not run the same steps."
            ) from error
        return int(shared)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Keep DDP's own reduction out."""
        return self.ddp.no_sync() if self.ddp is not None else nullcontext()

    def sync_buffers(self) -> None:
        """Do what DDP does before a forward, here where all ranks meet, and let it not do so in the forward."""
        if self.ddp is None:
            return
        self.ddp.require_forward_param_sync = True
        if self.ddp.will_sync_module_buffers():
            self.ddp._sync_buffers()
        self.ddp.require_forward_param_sync = False

    @torch.no_grad()
    def average(self, parameters: list[nn.Parameter]) -> None:
        """Average gradients in place, with no memory of its own; one that only other ranks have counts as 0 here."""
        if self.ddp is None or self.accumulating():
            return
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
        if not dist.is_gloo_available():
            present = present.cuda()
        dist.all_reduce(present, op=dist.ReduceOp.MAX, group=self.group)
        world, works = dist.get_world_size(), []
        for parameter, anywhere in zip(parameters, present.tolist(), strict=True):
            if not anywhere:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            works.append(dist.all_reduce(parameter.grad.div_(world), async_op=True))
        for work in works:
            work.wait()
        self.ddp.require_forward_param_sync = True  # a validation forward shares rank 0's buffers, as ever

    def close(self) -> None:
        """Give the group back."""
        if dist.is_initialized():
            dist.destroy_process_group(self.group)


def accumulates(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Whether the gradients of this batch wait for those of the next, so that there is nothing to average yet."""
    return pl_module.automatic_optimization and trainer.fit_loop._should_accumulate()
