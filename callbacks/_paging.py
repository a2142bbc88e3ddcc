"""Device memory that is given back while its contents wait in pinned host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import DTensor

from lit_ppo.callbacks._bitsandbytes import constants, quantized_layers

SMALLEST = 2**16
"""Bytes of a storage below which it stays: many of them are shared constants, and together they are next to nothing."""


def storages_of(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return one tensor of each storage, by the storage's identity; of a DTensor, this rank's part."""
    return {t.untyped_storage()._cdata: t for t in map(_local, tensors)}


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP gathers a module's weights from the shards of all ranks."""
    return any(isinstance(m, FSDPModule) or _is_flat(m) for m in module.modules())


def reshard(module: nn.Module) -> None:
    """Have the shards be the parameters: FSDP keeps a root's gathered after a forward that no backward follows.

    Args:
        module: Between forwards.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
        elif _is_flat(part):
            handle: Any = part._handle
            if not handle.is_sharded(handle.flat_param):
                _reshard(part, handle, True)


def _is_flat(module: nn.Module) -> bool:
    """Whether a module is an FSDP1 unit whose weights are cut: with NO_SHARD, and on one rank, they are not."""
    handle = module._handle if isinstance(module, FullyShardedDataParallel) else None
    return handle is not None and handle.uses_sharded_strategy


def _parameters(module: nn.Module) -> list[tuple[Tensor, bool]]:
    """Return this rank's part of the parameters, and whether each is frozen."""
    reshard(module)
    return [(_local(p), not p.requires_grad) for p in module.parameters()]


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


class Unit:
    """Storages that come and go together. The tensors stay what they are: same object, same device, no memory behind.

    Args:
        find: Returns the tensors, and for each whether its host copy stays valid while it is on the device. Called
            before the unit leaves, since an optimizer makes its state late, and a gathered model has other parameters.
    """

    def __init__(self, find: Callable[[], list[tuple[Tensor, bool]]]) -> None:
        self._find = find
        self._held: dict[int, _Storage] = {}
        self._away = False
        self._arrival: list[tuple[torch.device, torch.cuda.Event]] = []
        self._timers: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._moved = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @classmethod
    def of_module(cls, module: nn.Module) -> Unit:
        """A model: parameters, buffers and quantization constants; under FSDP this rank's shards."""

        def find() -> list[tuple[Tensor, bool]]:
            fixed = _parameters(module) + [(b, False) for b in module.buffers()]
            return fixed + [(t, True) for layer in quantized_layers(module).values() for t in constants(layer)]

        return cls(find)

    @classmethod
    def of_shards(cls, module: nn.Module) -> Unit:
        """What a model can do without while its weights are gathered: this rank's shards, and nothing that is whole."""

        def find() -> list[tuple[Tensor, bool]]:
            handles = [m._handle for m in module.modules() if isinstance(m, FullyShardedDataParallel) and _is_flat(m)]
            flat = {id(p) for handle in handles if handle for p in handle.flat_param._params or ()}
            named = zip(module.parameters(), _parameters(module), strict=True)
            return [entry for p, entry in named if isinstance(p, DTensor) or id(p) in flat]

        return cls(find)

    @classmethod
    def of_optimizer(cls, optimizer: torch.optim.Optimizer) -> Unit:
        """The tensors of an optimizer's state."""

        def find() -> list[tuple[Tensor, bool]]:
            values = [(p, v) for p, state in optimizer.state.items() for k, v in state.items() if k != "step"]
            local = [(p, _local(v)) for p, v in values if isinstance(v, Tensor)]
            return [(v, False) for p, v in local if v.device == p.device]  # others are on the host already

        return cls(find)

    @property
    def bytes(self) -> int:
        """What it gives back when it leaves."""
        return sum(storage.bytes for storage in self._held.values())

    @torch.no_grad()
    def leave(self, collect: bool = True) -> int | None:
        """Give the device memory back; return the bytes that came free on CUDA, None if it was away or is elsewhere.

        Args:
            collect: Look again for what belongs to it; else what the last `collect` has found leaves.
        """
        if self._away:
            return None
        self.wait()
        if collect:
            self.collect()
        devices = {s.device for s in self._held.values() if s.device.type == "cuda"}
        before = sum(torch.cuda.memory_allocated(d) for d in devices)
        stale = [s for s in self._held.values() if not s.valid]
        self._copy(stale, _Storage.save)
        for device in devices:
            torch.cuda.current_stream(device).wait_stream(self._stream(device))  # the memory is used anew only then
        for storage in self._held.values():
            storage.drop()
        self._away = True
        return before - sum(torch.cuda.memory_allocated(d) for d in devices) if devices else None

    @torch.no_grad()
    def fetch(self) -> None:
        """Start to bring it back; `wait` before use."""
        if not self._away:
            return
        for storage in self._held.values():
            storage.allocate()
        self._copy(list(self._held.values()), _Storage.load)
        self._away = False

    def wait(self) -> None:
        """Have everything that is queued from now on wait until it is there."""
        self.fetch()
        while self._arrival:
            device, event = self._arrival.pop()
            torch.cuda.current_stream(device).wait_event(event)

    def release(self) -> None:
        """Bring it back for good and drop the host copies; if the device has no room, the tensors move to the host."""
        try:
            self.wait()
        except torch.OutOfMemoryError:
            for storage in self._held.values():
                storage.settle_on_host()
        for device in self._streams:
            torch.cuda.synchronize(device)
        self._held = {}

    def measured(self) -> tuple[int, float]:
        """Return the bytes copied so far, and the seconds that the copies took, and start anew."""
        seconds = 0.0
        for start, end in self._timers:
            end.synchronize()
            seconds += start.elapsed_time(end) / 1e3
        moved, self._moved, self._timers = self._moved, 0, []
        return moved, seconds

    def collect(self) -> None:
        """Find out what belongs to it, while it is there."""
        found: dict[int, tuple[Tensor, bool]] = {}
        for tensor, fixed in self._find():
            storage = tensor.untyped_storage()
            if storage.nbytes() and not storage.resizable():  # mapped from a file, say
                tensor.data = tensor.data.clone()
                storage = tensor.untyped_storage()
            if storage.nbytes() >= SMALLEST:
                found[storage._cdata] = tensor, fixed and found.get(storage._cdata, (tensor, True))[1]
        kept = {key: s for key, s in self._held.items() if key in found}
        self._held = {k: kept.get(k) or _Storage(t) for k, (t, _) in found.items()}
        for key, (_, fixed) in found.items():
            self._held[key].valid &= fixed and self._held[key].version == _version(self._held[key].tensor)

    def _copy(self, storages: list[_Storage], act: Callable[[_Storage], None]) -> None:
        """Copy on a stream of its own for each device, after what is queued already."""
        for device in {s.device for s in storages}:
            here = [s for s in storages if s.device == device]
            self._moved += sum(s.bytes for s in here)
            if device.type != "cuda":
                for storage in here:
                    act(storage)
                continue
            stream = self._stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                start.record(stream)
                for storage in here:
                    act(storage)
                end.record(stream)
            self._timers = [*self._timers[-99:], (start, end)]
            self._arrival.append((device, end))

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _Storage:
    """One storage and its host copy."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.storage: Any = tensor.untyped_storage()
        self.bytes: int = self.storage.nbytes()
        self.device = tensor.device
        self.valid, self.version = False, -1
        self._size = self.bytes
        self.host = torch.empty(self.bytes, dtype=torch.uint8, device="cpu", pin_memory=self.device.type == "cuda")

    def save(self) -> None:
        """Copy to the host."""
        self.host.copy_(self._flat(), non_blocking=True)
        self.valid, self.version = True, _version(self.tensor)

    def load(self) -> None:
        """Copy from the host."""
        self._flat().copy_(self.host, non_blocking=True)

    def drop(self) -> None:
        """Give the memory back."""
        self.storage.resize_(0)

    def allocate(self) -> None:
        """Take memory again."""
        self.storage.resize_(self._size)

    def settle_on_host(self) -> None:
        """Make the tensor one in host memory."""
        self.storage.resize_(0)
        offset, size, stride = self.tensor.storage_offset(), self.tensor.size(), self.tensor.stride()
        plain = torch.empty(0, dtype=self.tensor.dtype, device="cpu")
        self.tensor.data = plain.set_(self.host.untyped_storage(), offset, size, stride)

    def _flat(self) -> Tensor:
        flat = torch.empty(0, dtype=torch.uint8, device=self.device)
        return flat.set_(self.storage, 0, (self.bytes,), (1,))


def _version(tensor: Tensor) -> int:
    """What changes when a tensor is written to; loading into frozen weights does."""
    return 0 if tensor.is_inference() else tensor._version
