"""Rank 0 of many on one device: a strategy whose collectives do nothing but leave plausible numbers behind.

What rank 0 allocates is what it would allocate among real ranks, but for the buffers of the communication library.
What it computes means nothing: the other ranks' shares of the weights and of the batch are copies of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy


class OneOf(LightningEnvironment):
    """Claims to be the first of `world` processes that somebody else has started."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world = world

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self.world

    def set_world_size(self, size: int) -> None:
        """Keep what was claimed."""


class FakeRanks(ModelParallelStrategy):
    """FSDP2 as rank 0 of `data_parallel_size`, alone.

    Args:
        data_parallel_size: How many ranks there seem to be.
        tensor_parallel_size: 1.
    """

    def __init__(self, data_parallel_size: int = 4, tensor_parallel_size: int = 1) -> None:
        super().__init__(data_parallel_size, tensor_parallel_size)
        self.pretended = data_parallel_size

    def _setup_distributed(self) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        self.cluster_environment = OneOf(self.pretended)
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.pretended)
            _leave_numbers(self.pretended)

    @property
    def world_size(self) -> int:
        return self.pretended

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    def barrier(self, name: str | None = None) -> None:
        """Nobody to wait for."""


def _leave_numbers(world: int) -> None:
    """Have sums be `world` times one's own, and scattered sums one's own first share: finite, where memory is not."""

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op == dist.ReduceOp.SUM:
            tensor.mul_(world)
        return _Done() if async_op else None

    def reduce_scatter_tensor(output: torch.Tensor, input: torch.Tensor, *args: Any, **options: Any) -> Any:
        output.copy_(input.view(-1)[: output.numel()].view_as(output))
        return _Done() if options.get("async_op") else None

    dist.all_reduce = all_reduce
    dist.reduce_scatter_tensor = reduce_scatter_tensor


class _Done:
    def wait(self, *args: Any) -> bool:
        return True
