"""Who holds the memory of a device: bytes by role and kind, what the allocator has, and what other processes have.

Of a LightningModule the ledger reads a small protocol, every part of which may be missing:

- ``roles``: a dict of modules by name; without it the child modules are the rows;
- ``memory_bytes()``: a dict of bytes by name that are neither parameters nor buffers, such as a KV cache. What is in
  ``UNCOUNTED`` is reserved on the device without being allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

GIB = 1 << 30
KINDS = ("weights", "adapters", "gradients", "optimizer")
UNCOUNTED = frozenset({"CUDA graphs"})
"""A graph's private pool: its tensors are freed when the capture ends, its memory is not."""


@dataclass
class Holding:
    """Bytes that one role (or child module) holds on one device."""

    name: str
    weights: int = 0
    """Without the adapters'."""
    adapters: int = 0
    gradients: int = 0
    optimizer: int = 0
    frozen: int = 0
    """The part of `weights` and `adapters` that is not trained."""

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(getattr(self, kind) for kind in KINDS)


@dataclass(frozen=True)
class Use:
    """Bytes of a device, or of a process on the CPU; 0 where the system does not say."""

    allocated: int = 0
    """In tensors; on the CPU the resident memory of the process."""
    reserved: int = 0
    """Taken from the device by this process's allocator. 0 on the CPU, where nothing is kept apart."""
    peak: int = 0
    """Most allocated since the last reset; on the CPU since the start of the process."""
    peak_reserved: int = 0
    others: int = 0
    """Of other processes, and of contexts and libraries outside the allocator."""
    free: int = 0
    device: int = 0
    """The whole device."""
    limit: int = 0
    """What this process may reserve, where `torch.cuda.set_per_process_memory_fraction` has set it."""

    def named(self) -> dict[str, int]:
        """Return what is known, by the names that reports use."""
        if not self.device:
            return {k: n for k, n in (("allocated", self.allocated), ("peak of this process", self.peak)) if n}
        limit = {"limit of this process": self.limit} if self.limit else {}
        return limit | {
            "allocated": self.allocated,
            "reserved": self.reserved,
            "reserved but unallocated (fragmentation)": self.reserved - self.allocated,
            "other processes and contexts": self.others,
            "free": self.free,
            "device": self.device,
        }


@dataclass
class Ledger:
    """What is on one device at one moment."""

    device: torch.device
    rows: list[Holding]
    """Largest first."""
    caches: dict[str, int] = field(default_factory=dict)
    """What the module's `memory_bytes` says."""
    use: Use = field(default_factory=Use)

    @property
    def rest(self) -> int:
        """Allocated bytes that nobody has claimed: activations and temporary tensors."""
        claimed = sum(r.total for r in self.rows) + sum(n for k, n in self.caches.items() if k not in UNCOUNTED)
        return max(0, self.use.allocated - claimed)

    @property
    def fragmentation(self) -> int:
        """Bytes that are reserved and neither allocated nor in a CUDA graph."""
        graphs = sum(n for k, n in self.caches.items() if k in UNCOUNTED)
        return max(0, self.use.reserved - self.use.allocated - graphs)


def take(
    module: nn.Module | None,
    device: torch.device | None = None,
    optimizers: Iterable[torch.optim.Optimizer] | None = None,
) -> Ledger:
    """Count what is on a device now.

    Args:
        module: Whose roles are counted. None: the device alone.
        device: Where to count. None: where the module's first parameter is.
        optimizers: Whose state to count. None: those of the module's trainer.
    """
    device = device_of(module) if device is None else device
    if module is None:
        return Ledger(device, [], {}, device_use(device))
    if optimizers is None:
        optimizers = getattr(getattr(module, "_trainer", None), "optimizers", ())
    return Ledger(device, holdings(module, device, optimizers), caches_of(module), device_use(device))


def caches_of(module: nn.Module) -> dict[str, int]:
    """Return what a module's `memory_bytes` says, without what is empty."""
    extra: Any = getattr(module, "memory_bytes", None)
    return {name: n for name, n in extra().items() if n} if callable(extra) else {}


def holdings(
    module: nn.Module, device: torch.device, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> list[Holding]:
    """Count what the roles of `module` hold on `device`, largest first; shared tensors count once.

    Args:
        module: Its `roles` (name -> module) name the rows; without that its children do.
        device: Where to count.
        optimizers: Whose state to count.
    """
    roles = getattr(module, "roles", None)
    parts = dict(roles) if isinstance(roles, dict) and roles else dict(module.named_children())
    parts["(module itself)"] = module  # whatever no part has claimed
    state = {p: values for o in optimizers for p, values in o.state.items()}
    seen: set[tuple[torch.device, int]] = set()
    rows = []
    for name, part in parts.items():
        row = Holding(name)
        for path, tensor in (*part.named_parameters(), *part.named_buffers()):
            held = (tensor, *_tensors(getattr(tensor, "quant_state", None)))
            size = sum(b for t in held for b in _storage_bytes(t, device, seen))
            if "lora_" in path:
                row.adapters += size
            else:
                row.weights += size
            if not tensor.requires_grad:
                row.frozen += size
            if tensor.grad is not None:
                row.gradients += sum(_storage_bytes(tensor.grad, device, seen))
            row.optimizer += sum(b for v in _tensors(state.get(tensor)) for b in _storage_bytes(v, device, seen))
        rows.append(row)
    return sorted((r for r in rows if r.total), key=lambda r: -r.total)


def device_of(module: nn.Module | None) -> torch.device:
    """Return where a module is: its first parameter's device, else the current one."""
    parameter = next(module.parameters(), None) if module is not None else None
    if parameter is not None:
        return parameter.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def device_use(device: torch.device) -> Use:
    """Ask allocator and driver, or on the CPU the system, how much is in use."""
    if device.type != "cuda":
        resident, peak = process_use()
        return Use(allocated=resident, peak=peak)
    reserved = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return Use(
        allocated=torch.cuda.memory_allocated(device),
        reserved=reserved,
        peak=torch.cuda.max_memory_allocated(device),
        peak_reserved=torch.cuda.max_memory_reserved(device),
        others=max(0, total - free - reserved),
        free=free,
        device=total,
        limit=int(share * total) if share < 1 else 0,
    )


def available(use: Use) -> int:
    """Return the bytes that this process can still allocate, its own limit considered.

    Args:
        use: Of a CUDA device.
    """
    free = use.free + use.reserved - use.allocated
    return min(free, use.limit - use.allocated) if use.limit else free


def process_use() -> tuple[int, int]:
    """Return the resident bytes of this process, now and at most; 0 where the system does not say."""
    try:
        with open("/proc/self/status") as file:
            found = dict(line.split(":", 1) for line in file)
    except (OSError, ValueError):
        return 0, 0
    now, peak = (int(found.get(name, "0").split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state or of a bitsandbytes `QuantState`, which nests once."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif type(value).__name__ == "QuantState":
        yield from _tensors(vars(value))


def _storage_bytes(tensor: Tensor, device: torch.device, seen: set[tuple[torch.device, int]]) -> Iterator[int]:
    """Yield the bytes of a tensor's storage (its local shard's), once for each storage, if it lies on `device`."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.device != device:
        return
    storage = local.untyped_storage()
    key = (local.device, storage.data_ptr())
    if key not in seen:
        seen.add(key)
        yield storage.nbytes()
