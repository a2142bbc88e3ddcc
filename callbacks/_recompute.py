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
    """Not counted where torch.compile traces: a counter would become a guard and recompile at every call."""
    compiled: bool = False
    live: int = 0
    """Bytes not kept of the calls whose backward is still to come."""
    peak: int = 0
    """The most that a backward found."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        return self

    @property
    def active(self) -> bool:
        """Whether to checkpoint now."""
        return torch.is_grad_enabled() and self.wanted()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function`; keep its inputs instead of its activations."""
        if torch.compiler.is_compiling():  # which allows no contexts of ours
            self.compiled = True
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        self.calls += 1
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
    moved: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)
    """Buffers that the forward changed, as they were before it: power iterations, running statistics."""
    now: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)
    outer_dtype: torch.dtype = torch.float32

    def __del__(self) -> None:
        """The graph is gone, with or without a backward."""
        self.engine.live -= self.nbytes

    @contextmanager
    def forward(self, inputs: list[Any]) -> Iterator[None]:
        """Note which buffers move, and count the storages that autograd saves."""
        before = [(m, n, b, b._version, b.clone()) for m, n, b in _buffers(self.module) if not b.is_inference()]
        with self._counting(inputs):
            yield
        for module, name, buffer, version, copy in before:
            if buffer._version != version or _tracks(module):  # batch-norm kernels do not raise the version
                self.moved.append((module, name, copy))
            elif module._buffers.get(name) is not buffer:
                self.moved.append((module, name, buffer))

    @contextmanager
    def _counting(self, inputs: list[Any]) -> Iterator[None]:
        """Count neither weights nor inputs, which are kept anyway."""
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

    def __enter__(self) -> None:
        """Recompute under the default dtype of the forward, from its buffers, without moving them a second time."""
        engine = self.engine
        engine.peak = max(engine.peak, engine.live)
        engine.live -= self.nbytes
        self.nbytes = 0
        self.now = [(module, name, module._buffers[name]) for module, name, _ in self.moved]  # type: ignore[misc]
        for module, name, buffer in self.moved:
            module._buffers[name] = buffer.clone()
        self.outer_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *error: object) -> None:
        """Put back what was there."""
        torch.set_default_dtype(self.outer_dtype)
        for module, name, buffer in self.now:
            module._buffers[name] = buffer
        self.now = []


def _buffers(module: nn.Module | None) -> list[tuple[nn.Module, str, Tensor]]:
    owners = [] if module is None else module.modules()
    return [(m, name, b) for m in owners for name, b in m._buffers.items() if b is not None]


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
