"""Who holds the memory, as text: the message of every out-of-memory error."""

from __future__ import annotations

import torch
from torch import nn

from lit_ppo.memory.ledger import GIB, KINDS, Ledger, take


def memory_report(
    module: nn.Module | None,
    *,
    phase: str,
    size: int | None = None,
    reason: str = "",
    error: BaseException | None = None,
    least: int = 1,
) -> str:
    """Write who holds what, and what can be done about it.

    Args:
        module: Whom the report is about. None: the device alone.
        phase: What was being done.
        size: Micro-batch size at which it failed.
        reason: Why there is no further try.
        error: The original error.
        least: Size at which nothing is left to split.
    """
    ledger = take(module)
    where = f"{phase}, size {size}" if size is not None else phase
    lines = [f"Out of memory on {ledger.device} in {where}.", *([reason] if reason else []), ""]
    if error is not None:
        lines[0] += f" {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    if ledger.rows:
        width = max(len(r.name) for r in ledger.rows)
        kinds = [kind for kind in KINDS if kind != "adapters" or any(r.adapters for r in ledger.rows)]
        lines.append(f"{'GiB':<{width}}" + "".join(f" {kind:>10}" for kind in (*kinds, "total")))
        for r in ledger.rows:
            cells = "".join(f" {getattr(r, kind) / GIB:>10.3f}" for kind in (*kinds, "total"))
            lines.append(f"{r.name:<{width}}{cells}")
    lines += [f"{name}: {n / GIB:.3f} GiB" for name, n in ledger.caches.items()]
    lines.append(f"The rest (activations, caches, temporary tensors): {ledger.rest / GIB:.3f} GiB")
    lines += [f"GiB {name}: {n / GIB:.3f}" for name, n in ledger.use.named().items()]

    ranked = _levers(module, ledger, phase=phase, divisible=size is None or size > least)
    if ranked:
        lines += ["", "What helps, most first:"]
        lines += [f"{i}. {text} ({n / GIB:.3f} GiB at stake)" for i, (n, text) in enumerate(ranked, 1)]
    return "\n".join(lines)


def _levers(module: nn.Module | None, ledger: Ledger, *, phase: str, divisible: bool) -> list[tuple[int, str]]:
    """Rank the ways out by the bytes they act on, leaving out what is in use already."""
    used, rows, rest, use = _in_use(module), ledger.rows, ledger.rest, ledger.use
    trained = sum(r.weights + r.adapters - r.frozen for r in rows)
    frozen = sum(r.frozen for r in rows)
    found: list[tuple[int, str]] = []
    if phase == "rollout":
        rest += sum(ledger.caches.values())
        if divisible:
            found.append((rest // 2, "generate fewer sequences at once: `ppo.rollout_batch_size`"))
        found.append((rest // 2, "shorter responses: `sampling.max_new_tokens`"))
    elif phase.startswith("score"):
        if divisible:
            found.append(
                (rest // 2, "score fewer sequences at once: `ppo.score_batch_size` or `ppo.micro_batch_tokens`")
            )
        found.append((rest // 2, "shorter sequences: prompt length or `sampling.max_new_tokens`"))
    else:
        if divisible:
            found.append(
                (rest // 2, "a smaller micro-batch (`ppo.micro_batch_size` or `_tokens`; elsewhere the batch size)")
            )
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
    if (gap := ledger.fragmentation) > max(GIB // 4, use.allocated // 10):
        advice = (
            "set PYTORCH_ALLOC_CONF=expandable_segments:True (older name: PYTORCH_CUDA_ALLOC_CONF) before the start"
        )
        found.append((gap, f"fragmentation: {advice}"))
    own = (use.limit or use.device) - use.reserved
    if use.others > GIB and own >= use.free:
        found.append((use.others, "other processes hold memory on this device: stop them or use another device"))
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
