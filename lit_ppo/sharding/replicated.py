"""One device and DDP: every rank holds the whole of every model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lit_ppo.sharding.materialize import Source, fill


class Replicated:
    """What PPO needs of a strategy; the base class of those that shard.

    Args:
        strategy: Lightning's.
    """

    sharded = False
    """Whether forwards and backwards of the trained models are collective, so that ranks must run equally many."""

    flat = False
    """Whether this rank's parameters are pieces of a flat one, whose shapes say nothing."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.listeners: list[Callable[[nn.Module, bool], None]] = []
        """Called with a store and True once `gathered` has all its weights; with False before, and when it is over."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.strategy.root_device

    def place(self, store: nn.Module, source: Source) -> nn.Module:
        """Give a parameter store its weights and its shape under this strategy.

        Args:
            store: Rank 0's holds the weights; the others' may be on the meta device.
            source: How the weights get there.

        Returns:
            The store, or what wraps it from now on.
        """
        fill(store, source)
        return store

    @contextmanager
    def gathered(self, store: nn.Module) -> Iterator[None]:
        """Have all weights of a store at hand, for any number of forwards that no other rank waits for."""
        yield

    def tell(self, store: nn.Module, *, whole: bool) -> None:
        """Say to whom it concerns whether the whole weights are at hand, or the shards count."""
        for listener in self.listeners:
            listener(store, whole)

    def unsynced(self) -> AbstractContextManager[Any]:
        """Keep the strategy's own averaging out of the backwards of a step."""
        ddp = getattr(self.strategy, "model", None)
        return ddp.no_sync() if isinstance(ddp, DistributedDataParallel) else nullcontext()

    def after_backward(self) -> None:
        """Do what is due after each backward of a step, within `unsynced`."""

    @torch.no_grad()
    def average(self, parameters: list[nn.Parameter]) -> None:
        """Average gradients over ranks, once a step, whatever each rank's backwards were.

        DDP's own reduction waits for a backward of every parameter on every rank, in one order, once. A critic's
        warm-up, experts without a token and ranks with fewer micro-batches are none of this. All that is lost is the
        overlap with the last of the micro-batches.

        Args:
            parameters: The same on every rank; a gradient that only other ranks have counts as 0 here.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=self.device)
        dist.all_reduce(present, op=dist.ReduceOp.MAX)
        works = []
        for parameter, anywhere in zip(parameters, present.tolist(), strict=True):
            if not anywhere:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            works.append(dist.all_reduce(parameter.grad.div_(dist.get_world_size()), async_op=True))
        for work in works:
            if work is not None:
                work.wait()

    def clip(self, parameters: list[nn.Parameter], limit: float) -> Tensor | None:
        """Clip gradients by their global norm.

        Args:
            parameters: Of one role.
            limit: The largest norm; inf only measures.

        Returns:
            The norm before, over all ranks; None if there is no gradient on any.
        """
        with_grad = [p for p in parameters if p.grad is not None]
        return nn.utils.clip_grad_norm_(with_grad, limit) if with_grad else None
