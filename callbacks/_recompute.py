"""A checkpointed call: its forward, its recomputation, and the bytes that it does not keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


@dataclass
class Engine:
    """Runs checkpointed functions and counts what they would have kept. Copies of a model share it."""

    module: nn.Module | None
    """Whose parameters are not activations."""
    wanted: Callable[[], bool]
    """Whether a backward will follow."""
    measuring: bool = True
    calls: int = 0
    live: int = 0
    peak: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        return self

    @property
    def active(self) -> bool:
        """Whether to checkpoint now."""
        return torch.is_grad_enabled() and self.wanted()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function`; keep its inputs instead of its activations."""
        self.calls += 1
        if torch.compiler.is_compiling():  # which allows no contexts of ours
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        module = _module_of(function)
        contexts = partial(self._contexts, module, [args, kwargs, _bound(function)])
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def _contexts(
        self, module: nn.Module | None, inputs: list[Any]
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        region = _Region(self, module, torch.get_default_dtype())
        return region.forward(inputs), region


@dataclass
class _Region:
    """One checkpointed call. As a context manager (entered at every recomputation) it is the recomputation's."""

    engine: Engine
    module: nn.Module | None
    dtype: torch.dtype
    nbytes: int = 0
    buffers: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)
    outer_dtype: torch.dtype = torch.float32

    @contextmanager
    def forward(self, inputs: list[Any]) -> Iterator[None]:
        """Count the storages that autograd saves: neither weights nor inputs, which are kept anyway."""
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        if not self.engine.measuring or top is None:
            yield
            return
        pack, unpack = top(False)  # those of torch's checkpoint, which drop the tensor
        seen: dict[int, torch.UntypedStorage] = {}

        def count(tensor: Tensor) -> Any:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            seen[storage.data_ptr()] = storage
            return pack(tensor)

        with saved_tensors_hooks(count, unpack):
            yield
        modules = [m for m in (self.engine.module, self.module) if m is not None]
        kept = {id(p): p for m in modules for p in (*m.parameters(), *m.buffers())}
        tensors = [*kept.values(), *_tensors(inputs)]
        known = {getattr(t, "_local_tensor", t).untyped_storage().data_ptr() for t in tensors}
        self.nbytes = sum(s.nbytes() for pointer, s in seen.items() if pointer not in known)
        seen.clear()  # the graph keeps the hooks, and they would keep every activation of the first batch
        self.engine.live += self.nbytes
        self.engine.peak = max(self.engine.peak, self.engine.live)

    def __enter__(self) -> None:
        """Recompute under the default dtype of the forward, without moving running statistics a second time."""
        self.engine.live -= self.nbytes
        self.nbytes = 0
        norms = [] if self.module is None else [m for m in self.module.modules() if _tracks(m)]
        self.buffers = [(m, name, b) for m in norms for name, b in m.named_buffers(recurse=False)]
        for module, name, buffer in self.buffers:
            setattr(module, name, buffer.clone())
        self.outer_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *error: object) -> None:
        """Put back what was there."""
        torch.set_default_dtype(self.outer_dtype)
        for module, name, buffer in self.buffers:
            setattr(module, name, buffer)


def _tracks(module: nn.Module) -> bool:
    return module.training and getattr(module, "running_mean", None) is not None


def _module_of(function: Any) -> nn.Module | None:
    if isinstance(function, partial):
        return _module_of(function.func) if not function.args else _as_module(function.args[0])
    return _as_module(getattr(function, "__self__", function))


def _bound(function: Any) -> list[Any]:
    return [function.args, function.keywords, *_bound(function.func)] if isinstance(function, partial) else []


def _as_module(value: Any) -> nn.Module | None:
    return value if isinstance(value, nn.Module) else None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for item in items for t in _tensors(item)]
