"""Live bytes of tensors that do not exist: weights and activations are fake, integers are real."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

ROUND = 512
"""The allocator hands out multiples of this."""

SMALL = 2**20
"""Elements of an integer tensor that is made for real: token ids, lengths and masks, which decide shapes."""

aten: Any = torch.ops.aten


class Tracker(TorchDispatchMode):
    """Counts the bytes of every storage from its creation to its end, without creating those of floats.

    Enter it inside a `FakeTensorMode` that takes real inputs (`tracing` does both). What is computed from real tensors
    alone stays real, so that code may look at lengths and masks; what involves a fake tensor is fake.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.segments: dict[str, int] = {}
        """The peak of each marked stretch."""
        self.kept: dict[str, int] = {}
        """Bytes alive at each mark."""
        self._name = "start"
        self._refs: dict[int, Any] = {}

    def ignore(self, module: Any) -> None:
        """Do not count the tensors that a module holds."""
        for tensor in (*module.parameters(), *module.buffers()):
            storage = tensor.untyped_storage()
            key = storage._cdata
            self._refs[key] = weakref.ref(storage, partial(self._release, key, 0))

    def mark(self, name: str) -> None:
        """End a stretch, begin the next. A name that comes again goes on with its peak."""
        self._close()
        self._name, self.peak = name, self.live
        self.kept[name] = self.live

    def _close(self) -> None:
        self.segments[self._name] = max(self.segments.get(self._name, 0), self.peak)

    def finish(self) -> dict[str, int]:
        """Return the peaks by stretch."""
        self._close()
        return self.segments

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, really or not, and count what it allocates."""
        kwargs = kwargs or {}
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if any(isinstance(x, FakeTensor) for x in inputs):
            result = self._faked(func, args, kwargs)
        elif inputs or _is_small_integer(func, kwargs):
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return result

    def _faked(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on fake tensors; where its shape hangs on a mask, that one is real."""
        if func is aten._local_scalar_dense.default:
            return 1
        if func is aten.masked_select.default:
            return args[0].new_empty(int(args[1].sum()))
        if func in _INDEXED:
            args = (args[0], [i for x in args[1] for i in _places(x)], *args[2:])
        return func(*args, **kwargs)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._refs:
            return
        size = -(-storage.nbytes() // ROUND) * ROUND
        self._refs[key] = weakref.ref(storage, partial(self._release, key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _release(self, key: int, size: int, _: Any) -> None:
        del self._refs[key]
        self.live -= size


_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default,
            aten._index_put_impl_.default, aten._unsafe_index.Tensor}  # fmt: skip


def _places(index: Any) -> list[Any]:
    """Turn a mask into the indices that it stands for."""
    if isinstance(index, Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor):
        with unset_fake_temporarily():
            return list(index.nonzero().unbind(1))
    return [index]


def _is_small_integer(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a factory makes numbers that shapes may hang on."""
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return not dtype.is_floating_point
    return func.overloadpacket in (aten.arange, aten.scalar_tensor, aten.lift_fresh)


@contextmanager
def tracing() -> Iterator[Tracker]:
    """Enter both modes."""
    with faking(), Tracker() as tracker:
        yield tracker


@contextmanager
def faking() -> Iterator[FakeTensorMode]:
    """Make what is created in here fake: shapes and dtypes without memory."""
    with _MODE:
        yield _MODE


_MODE = FakeTensorMode(allow_non_fake_inputs=True)


def nbytes(tensors: Any) -> int:
    """Return the bytes of tensors, as the allocator counts them."""
    total = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal total
        total += -(-tensor.numel() * tensor.element_size() // ROUND) * ROUND
        return tensor

    tree_map_only(Tensor, add, list(tensors))
    return total
