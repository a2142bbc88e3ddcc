"""Who holds the memory, as text: the message of every out-of-memory error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

GIB = 1 << 30


@dataclass
class Holding:
    """Bytes that one role (or child module) holds on one device."""

    name: str
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    frozen: int = 0
    """The part of `weights` that is not trained."""

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.weights + self.gradients + self.optimizer


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
        for tensor in (*part.parameters(), *part.buffers()):
            size = sum(_storage_bytes(tensor, device, seen))
            row.weights += size
            if not tensor.requires_grad:
                row.frozen += size
            if tensor.grad is not None:
                row.gradients += sum(_storage_bytes(tensor.grad, device, seen))
            row.optimizer += sum(b for v in _tensors(state.get(tensor)) for b in _storage_bytes(v, device, seen))
        rows.append(row)
    return sorted((r for r in rows if r.total), key=lambda r: -r.total)


def memory_report(
    module: nn.Module | None,
    *,
    phase: str,
    size: int | None = None,
    reason: str = "",
    error: BaseException | None = None,
) -> str:
    """Write who holds what, and what can be done about it.

    Args:
        module: Whom the report is about. None: the device alone.
        phase: What was being done.
        size: Micro-batch size at which it failed.
        reason: Why there is no further try.
        error: The original error.
    """
    device = _device(module)
    trainer = getattr(module, "_trainer", None)
    rows = holdings(module, device, getattr(trainer, "optimizers", ())) if module is not None else []
    where = f"{phase}, size {size}" if size is not None else phase
    lines = [f"Out of memory on {device} in {where}.", *([reason] if reason else []), ""]
    if error is not None:
        lines[0] += f" {str(error).splitlines()[0] if str(error) else type(error).__name__}"

    if rows:
        width = max(len(r.name) for r in rows)
        lines.append(f"{'GiB':<{width}} {'weights':>10} {'gradients':>10} {'optimizer':>10} {'total':>10}")
        for r in rows:
            cells = "".join(f" {n / GIB:>10.3f}" for n in (r.weights, r.gradients, r.optimizer, r.total))
            lines.append(f"{r.name:<{width}}{cells}")
    use = _device_use(device)
    rest = max(0, use.get("allocated", 0) - sum(r.total for r in rows))
    lines.append(f"The rest (activations, caches, temporary tensors): {rest / GIB:.3f} GiB")
    lines += [f"GiB {name}: {n / GIB:.3f}" for name, n in use.items()]

    ranked = _levers(module, rows, phase=phase, size=size, rest=rest, use=use)
    if ranked:
        lines += ["", "What helps, most first:"]
        lines += [f"{i}. {text} ({n / GIB:.3f} GiB at stake)" for i, (n, text) in enumerate(ranked, 1)]
    return "\n".join(lines)


def _levers(
    module: nn.Module | None, rows: list[Holding], *, phase: str, size: int | None, rest: int, use: dict[str, int]
) -> list[tuple[int, str]]:
    """Rank the ways out by the bytes they act on, leaving out what is in use already."""
    used = _in_use(module)
    trained = sum(r.weights - r.frozen for r in rows)
    frozen = sum(r.frozen for r in rows)
    found: list[tuple[int, str]] = []
    if phase == "rollout":
        if size is None or size > 1:
            found.append((rest // 2, "generate fewer sequences at once: `ppo.rollout_batch_size`"))
        found.append((rest // 2, "shorter responses: `sampling.max_new_tokens`"))
    elif phase == "score":
        if size is None or size > 1:
            found.append((rest // 2, "score fewer sequences at once: `ppo.score_batch_size`"))
        found.append((rest // 2, "shorter sequences: prompt length or `sampling.max_new_tokens`"))
    else:
        if size is None or size > 1:
            found.append((rest // 2, "a smaller micro-batch (`ppo.micro_batch_size`; elsewhere the batch size)"))
        if "checkpointing" not in used:
            found.append((rest * 2 // 3, "recompute activations: `GradientCheckpointing`"))
        found.append((rest // 3, "shorter sequences (`sampling.max_new_tokens`) or smaller inputs"))
    if frozen and "quantized" not in used:
        found.append((frozen * 2 // 3, "quantize frozen weights: `QuantizeRewardModel`, or load them in bfloat16"))
    if trained and "lora" not in used:
        state = sum(r.gradients + r.optimizer for r in rows)
        found.append((max(state, trained), "train adapters instead of all weights (LoRA), or an 8-bit optimizer"))
    if "sharded" not in used and trained and torch.cuda.device_count() > 1:
        found.append((sum(r.total for r in rows) // 2, 'shard weights and optimizer: `strategy="fsdp"`'))
    if (gap := use.get("reserved but unallocated (fragmentation)", 0)) > max(GIB // 4, use["allocated"] // 10):
        advice = (
            "set PYTORCH_ALLOC_CONF=expandable_segments:True (older name: PYTORCH_CUDA_ALLOC_CONF) before the start"
        )
        found.append((gap, f"fragmentation: {advice}"))
    own = use.get("limit of this process", use.get("device", 0)) - use.get("reserved", 0)
    if (others := use.get("other processes and contexts", 0)) > GIB and own >= use.get("free", 0):
        found.append((others, "other processes hold memory on this device: stop them or use another device"))
    return sorted(found, key=lambda lever: -lever[0])


def _in_use(module: nn.Module | None) -> set[str]:
    """Name the levers that are pulled already."""
    used: set[str] = set()
    if module is None:
        return used
    trainer = getattr(module, "_trainer", None)
    callbacks = {type(c).__name__ for c in getattr(trainer, "callbacks", ())}
    if "GradientCheckpointing" in callbacks:
        used.add("checkpointing")
    if "FSDP" in type(getattr(trainer, "strategy", None)).__name__ or any(
        hasattr(p, "device_mesh") for p in module.parameters()
    ):
        used.add("sharded")
    roles = getattr(module, "roles", None)
    for part in (module, *(roles.values() if isinstance(roles, dict) else ())):
        for layer in part.modules():
            if getattr(layer, "gradient_checkpointing", False) is True:
                used.add("checkpointing")
            if hasattr(layer, "lora_A"):
                used.add("lora")
            if type(layer).__name__ in ("Linear4bit", "LinearNF4", "LinearFP4", "Linear8bitLt"):
                used.add("quantized")
    return used


def _device(module: nn.Module | None) -> torch.device:
    parameter = next(module.parameters(), None) if module is not None else None
    if parameter is not None:
        return parameter.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def _device_use(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return _process_use()
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    limit = {"limit of this process": int(share * total)} if share < 1 else {}
    return limit | {
        "allocated": allocated,
        "reserved": reserved,
        "reserved but unallocated (fragmentation)": reserved - allocated,
        "other processes and contexts": max(0, total - free - reserved),
        "free": free,
        "device": total,
    }


def _process_use() -> dict[str, int]:
    """Resident bytes of this process, now and at most; empty where the system does not say."""
    names = {"VmRSS:": "allocated", "VmHWM:": "peak of this process"}
    try:
        with open("/proc/self/status") as file:
            fields = [line.split() for line in file]
    except OSError:
        return {}
    return {names[f[0]]: int(f[1]) * 1024 for f in fields if f[0] in names}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


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
