"""`strategy="fsdp"` and `FSDPStrategy`: FSDP1, the parameters of a unit flattened into one and cut evenly.

A flat parameter has one dtype. Adapters and heads of another one than their trunk stay as they are, whole on every
rank, and are trained as under DDP.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
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
        ValueError: `use_orig_params=False`, or parameters that are to be left out.
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
        for name in ("ignored_modules", "ignored_states"):
            if strategy.kwargs.get(name):
                raise ValueError(
                    f"`FSDPStrategy({name}=...)`: what is left out would train apart on each rank. Leave it out: "
                    "parameters of another dtype than their trunk stay whole, and are averaged."
                )
        self.policy = strategy.kwargs.get("auto_wrap_policy")
        with warnings.catch_warnings():  # of a full-precision copy, which only weights loaded in full precision keep
            warnings.filterwarnings("ignore", "FSDP with `.*-true` enables computation in lower precision")
            mixed = strategy.mixed_precision_config
        if strategy.precision_plugin.precision == "32-true":
            # Every other strategy leaves the dtypes of the roles alone then; this one would make float32 of them.
            strategy.precision_plugin.convert_module = lambda module: module
            mixed = strategy.mixed_precision or MixedPrecision()
        if mixed is not None:  # rotary frequencies rounded to bfloat16 would lose their place after some hundred tokens
            strategy.mixed_precision = replace(mixed, buffer_dtype=None)
        self._whole: set[nn.Parameter] = set()
        self._plain: list[Any] = []
        self._sums: dict[nn.Parameter, Tensor] = {}

    def place(self, store: nn.Module, source: Source) -> nn.Module:
        """Wrap layer by layer, or by the policy that the strategy was given."""
        if isinstance(store, FullyShardedDataParallel):
            return store
        check_floats(store, "FSDP1")
        trained = any(p.requires_grad for p in store.parameters())
        if trained:  # as Lightning would later: `bf16-true` leaves one dtype
            self.strategy.precision_plugin.convert_module(store)
        if self.strategy.precision_plugin.precision == "16-mixed":
            unscalable_to_float32(store)
        dtype = max(store.parameters(), key=lambda p: p.numel()).dtype
        done = set()
        if self.policy is None:
            for parent, name, layer in layers(store):
                fill(layer, source)
                unit = wrap(layer, ignored_states=self._keep_whole(layer, dtype))
                setattr(parent, name, unit)
                done.add(unit)
        fill(store, source, skip=done)
        options = {} if self.policy is None else {"auto_wrap_policy": self.policy}
        wrapped = wrap(store, ignored_states=self._keep_whole(store, dtype), **options)
        for unit in units_of(wrapped):
            if not unit._handle.flat_param.requires_grad:
                # Without a gradient, and on one rank, FSDP leaves a unit's weights as plain tensors after a backward,
                # and would then take these for weights that somebody had put in place of its parameters.
                unit._handle._skip_writeback_check = True
                if trained and not unit._handle.uses_sharded_strategy:
                    self._plain.append(unit._handle)
        self.strategy.kwargs.pop("auto_wrap_policy", None)  # applied: Lightning need not warn that it is not
        return wrapped

    def _keep_whole(self, module: nn.Module, dtype: torch.dtype) -> list[nn.Parameter]:
        """Return the parameters that do not go into a flat one of this dtype."""
        odd = [p for p in module.parameters() if p.dtype != dtype]
        self._whole.update(odd)
        return odd

    @contextmanager
    def gathered(self, store: nn.Module) -> Iterator[None]:
        """Gather every unit once, keep them over any number of forwards, then give the memory back.

        `summon_full_params` would neither keep them nor compute in the precision that is trained in.
        """
        self.tell(store, whole=False)
        _lazy_init(store, store)
        held = [(unit, unit._handle) for unit in units_of(store)]
        before = [handle._sharding_strategy for _, handle in held]
        for unit, handle in held:
            if handle.uses_sharded_strategy:
                handle._sharding_strategy = HandleShardingStrategy.SHARD_GRAD_OP  # not resharded after a forward
            _unshard(unit, handle, unit._unshard_stream, unit._pre_unshard_stream)
        if self.device.type == "cuda":
            torch.cuda.current_stream().wait_stream(held[0][0]._unshard_stream)
        self.tell(store, whole=True)
        try:
            yield
        finally:
            self.tell(store, whole=False)  # before: the views of a shard are made anew when it takes its place
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
        """Add gradients on the CPU up, of which FSDP with `cpu_offload` keeps those of the last backward alone.

        And make parameters again of what FSDP left as plain tensors: a checkpoint would miss them.
        """
        for handle in self._plain:
            handle._use_unsharded_views(as_params=True)
        if self.device.type == "cpu" or not self.strategy.cpu_offload.offload_params:
            return
        for parameter in self.strategy.model.parameters():
            if parameter.grad is None or parameter in self._whole:
                continue
            if parameter in self._sums:
                parameter.grad.copy_(self._sums[parameter].add_(parameter.grad))
            else:
                self._sums[parameter] = parameter.grad.clone()

    def average(self, parameters: list[nn.Parameter]) -> None:
        """Average what is whole on every rank; for the shards the backwards have done it."""
        whole = [p for p in parameters if p in self._whole]
        if whole:
            super().average(whole)

    @torch.no_grad()
    def clip(self, parameters: list[nn.Parameter], limit: float) -> Tensor | None:
        """Clip by the norm over all shards, of which a rank may hold none, and of what is whole."""
        grads = [p.grad for p in parameters if p.grad is not None and p not in self._whole]
        whole = [p.grad for p in parameters if p.grad is not None and p in self._whole]
        squares = sum((g.float().square().sum() for g in grads), torch.zeros((), device=self.device)).float()
        found = torch.stack([squares, torch.full_like(squares, len(grads))])
        if self.strategy.sharding_strategy != ShardingStrategy.NO_SHARD:
            dist.all_reduce(found, group=self._group())
        norm = nn.utils.get_total_norm(whole)  # to the bit that of other strategies, where that is all
        if found[1]:
            norm = (found[0] + norm.float().square()).sqrt()
        elif not whole:
            return None
        if limit != float("inf"):
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
            for grad in grads + whole:
                grad.mul_(scale.to(grad))
        return norm

    def _group(self) -> Any:
        """The ranks that one copy of the weights is cut over: all, or with HYBRID_SHARD those of a node."""
        root = next(m for m in self.strategy.model.modules() if isinstance(m, FullyShardedDataParallel))
        return root.process_group


def units_of(store: nn.Module) -> list[Any]:
    """Return the FSDP modules of a store that have parameters of their own."""
    return [m for m in store.modules() if isinstance(m, FullyShardedDataParallel) and m._handle is not None]


def unscalable_to_float32(store: nn.Module) -> None:
    """Make float32 weights of a trunk that is trained with scaled gradients (16-mixed): a scaler takes no others."""
    if not hasattr(store.model, "peft_config") and any(p.requires_grad for p in store.parameters()):
        store.to(torch.float32)
