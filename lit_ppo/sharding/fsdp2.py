"""`ModelParallelStrategy`: FSDP2, every parameter a DTensor split along its first dimension."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lit_ppo.memory.fsdp2 import settle
from lit_ppo.sharding.materialize import Source, fill
from lit_ppo.sharding.replicated import Replicated
from lit_ppo.sharding.units import check_floats, layers


class FSDP2(Replicated):
    """Shards each parameter store by itself: its decoder layers, then what is left of it.

    Args:
        strategy: Lightning's, with its device mesh.

    Raises:
        ValueError: The mesh has tensor parallelism in it.
    """

    sharded = True

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        tensor = strategy.device_mesh["tensor_parallel"].size()
        if tensor > 1:
            world = strategy.world_size
            raise ValueError(
                f"`ModelParallelStrategy(tensor_parallel_size={tensor})`: tensor parallelism is not used here, and "
                "what is not sharded over the data-parallel ranks would train apart on each without an error. "
                "(`ModelParallelStrategy()` alone means tensor parallelism over the node.) Write "
                f"`ModelParallelStrategy(data_parallel_size={world}, tensor_parallel_size=1)`."
            )
        self.mesh = strategy.device_mesh["data_parallel"]
        self._whole: nn.Module | None = None

    def place(self, store: nn.Module, source: Source) -> nn.Module:
        """Shard layer by layer, so that no rank ever holds more than its shards and one layer."""
        if isinstance(store, FSDPModule):
            return store
        check_floats(store, "FSDP2")
        done = set()
        for _, _, layer in layers(store):
            fill(layer, source)
            fully_shard(layer, mesh=self.mesh)
            done.add(layer)
        fill(store, source, skip=done)
        fully_shard(store, mesh=self.mesh)
        store.register_forward_hook(self._after_forward)
        return store

    def _after_forward(self, store: Any, *_: Any) -> None:
        """Give back what FSDP2 keeps of a root (embedding, head) for the backward, if none follows."""
        if not torch.is_grad_enabled() and store is not self._whole:
            store.reshard()

    @contextmanager
    def gathered(self, store: nn.Module) -> Iterator[None]:
        """Gather every unit once, keep them over any number of forwards, then give the memory back."""
        self.tell(store, whole=False)
        units = [m for m in store.modules() if isinstance(m, FSDPModule)]
        root: Any = store
        root._get_fsdp_state()._lazy_init()  # the store is the root, although its layers are the first to run
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        self._whole = store
        self.tell(store, whole=True)
        try:
            yield
        finally:
            self._whole = None
            for unit in units:
                unit.set_reshard_after_forward(unit is not store, recurse=False)
                unit.reshard()
            settle(root)  # a forward may have been cut off, and done again in smaller pieces
            self.tell(store, whole=False)

    def unsynced(self) -> AbstractContextManager[Any]:
        """Each backward reduces its gradients to shards: a whole gradient would not fit."""
        return nullcontext()

    def average(self, parameters: list[nn.Parameter]) -> None:
        """The backwards have done it."""

    def clip(self, parameters: list[nn.Parameter], limit: float) -> Tensor | None:
        """Clip by the norm over all shards."""
        norm = super().clip(parameters, limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
