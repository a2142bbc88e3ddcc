"""`strategy="fsdp"` and `FSDPStrategy`: FSDP1, the parameters of a unit flattened into one and cut evenly."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._flat_param import HandleShardingStrategy
from torch.distributed.fsdp._runtime_utils import _lazy_init, _reshard, _unshard
from torch.distributed.fsdp.wrap import wrap

from lit_ppo.sharding.materialize import Source, fill
from lit_ppo.sharding.replicated import Replicated
from lit_ppo.sharding.units import check_floats, layers


class FSDP1(Replicated):
    """Wraps each parameter store by itself: its decoder layers, then the store.

    Lightning leaves a module alone that is wrapped already. A root that it wraps itself cannot train with manual
    optimization: the backward would run inside the root's forward.

    Args:
        strategy: Lightning's.

    Raises:
        ValueError: `use_orig_params=False`.
    """

    sharded = True
    flat = True

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        if not strategy.kwargs.get("use_orig_params", True):
            raise ValueError(
                "`FSDPStrategy(use_orig_params=False)` leaves no parameters to tell roles, adapters and frozen weights "
                "apart. Leave it out."
            )
        self.policy = strategy.kwargs.get("auto_wrap_policy")
        with warnings.catch_warnings():  # of a full-precision copy, which only weights loaded in full precision keep
            warnings.filterwarnings("ignore", "FSDP with `.*-true` enables computation in lower precision")
            mixed = strategy.mixed_precision_config
        if mixed is not None:  # rotary frequencies rounded to bfloat16 would lose their place after some hundred tokens
            strategy.mixed_precision = replace(mixed, buffer_dtype=None)
        self._sums: dict[nn.Parameter, Tensor] = {}

    def place(self, store: nn.Module, source: Source) -> nn.Module:
        """Wrap layer by layer, or by the policy that the strategy was given."""
        if isinstance(store, FullyShardedDataParallel):
            return store
        check_floats(store, "FSDP1")
        one_dtype(store, scaled=self.strategy.precision_plugin.precision == "16-mixed")
        done = set()
        options = {} if self.policy is None else {"auto_wrap_policy": self.policy}
        if self.policy is None:
            for parent, name, layer in layers(store):
                fill(layer, source)
                unit = wrap(layer, **options)
                setattr(parent, name, unit)
                done.add(unit)
        fill(store, source, skip=done)
        wrapped = wrap(store, **options)
        for unit in units_of(wrapped):
            if not unit._handle.flat_param.requires_grad:
                # Without a gradient, and on one rank, FSDP leaves a unit's weights as plain tensors after a backward,
                # and would then take these for weights that somebody had put in place of its parameters.
                unit._handle._skip_writeback_check = True
        self.strategy.kwargs.pop("auto_wrap_policy", None)  # applied: Lightning need not warn that it is not
        return wrapped

    @contextmanager
    def gathered(self, store: nn.Module) -> Iterator[None]:
        """Gather every unit once, keep them over any number of forwards, then give the memory back.

        `summon_full_params` would neither keep them nor compute in the precision that is trained in.
        """
        _lazy_init(store, store)
        held = [(unit, unit._handle) for unit in units_of(store)]
        before = [handle._sharding_strategy for _, handle in held]
        for unit, handle in held:
            if handle.uses_sharded_strategy:
                handle._sharding_strategy = HandleShardingStrategy.SHARD_GRAD_OP  # not resharded after a forward
            _unshard(unit, handle, unit._unshard_stream, unit._pre_unshard_stream)
        if self.device.type == "cuda":
            torch.cuda.current_stream().wait_stream(held[0][0]._unshard_stream)
        try:
            yield
        finally:
            for (unit, handle), strategy in zip(held, before, strict=True):
                handle._sharding_strategy = strategy
                _reshard(unit, handle, handle.uses_sharded_strategy)

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Each backward reduces its gradients to shards: a whole gradient would not fit."""
        self._sums = {}
        yield
        self._sums = {}

    @torch.no_grad()
    def after_backward(self) -> None:
        """Add gradients on the CPU up, of which FSDP with `cpu_offload` keeps those of the last backward alone."""
        if self.device.type == "cpu" or not self.strategy.cpu_offload.offload_params:
            return
        for parameter in self.strategy.model.parameters():
            if parameter.grad is None:
                continue
            if parameter in self._sums:
                parameter.grad.copy_(self._sums[parameter].add_(parameter.grad))
            else:
                self._sums[parameter] = parameter.grad.clone()

    def average(self, parameters: list[nn.Parameter]) -> None:
        """The backwards have done it."""

    @torch.no_grad()
    def clip(self, parameters: list[nn.Parameter], limit: float) -> Tensor | None:
        """Clip by the norm over all shards; a rank may hold none of a parameter."""
        grads = [p.grad for p in parameters if p.grad is not None]
        squares = [g.float().square().sum() for g in grads]
        found = torch.stack(
            [
                sum(squares, torch.zeros((), dtype=torch.float32, device=self.device)),
                torch.tensor(float(len(grads)), dtype=torch.float32).to(self.device),
            ]
        )
        if self.strategy.sharding_strategy != ShardingStrategy.NO_SHARD:
            dist.all_reduce(found, group=self._group())
        if not found[1]:
            return None
        norm = found[0].sqrt()
        if limit != float("inf"):
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
            for grad in grads:
                grad.mul_(scale.to(grad))
        return norm

    def _group(self) -> Any:
        """The ranks that one copy of the weights is cut over: all, or with HYBRID_SHARD those of a node."""
        root = next(m for m in self.strategy.model.modules() if isinstance(m, FullyShardedDataParallel))
        return root.process_group


def units_of(store: nn.Module) -> list[Any]:
    """Return the FSDP modules of a store that have parameters of their own."""
    return [m for m in store.modules() if isinstance(m, FullyShardedDataParallel) and m._handle is not None]


def one_dtype(store: nn.Module, scaled: bool) -> None:
    """Give adapters and heads the dtype of the trunk: FSDP1 flattens a unit into one tensor.

    The optimizer keeps float32 masters of what is trained, whatever its dtype.

    Args:
        store: Of parameters.
        scaled: Gradients are scaled (16-mixed), which is for float32 gradients alone: then the trunk is float32, too.
    """
    dtype = torch.float32 if scaled else max(store.parameters(), key=lambda p: p.numel()).dtype
    odd = [n for n, p in store.named_parameters() if p.dtype != dtype]
    for parameter in store.parameters():
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    if odd:
        rank_zero_info(f"FSDP1 units have one dtype: {len(odd)} tensors ({odd[0]}, ...) are held in {dtype}.")
