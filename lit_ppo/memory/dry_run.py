"""Finding the largest size that fits, by trying."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lit_ppo.memory.report import memory_report
from lit_ppo.memory.undo import OutOfMemoryReport, Snapshot, is_out_of_memory, release_memory


def largest_that_fits(
    body: Callable[[int], object],
    rows: int,
    *,
    module: nn.Module,
    headroom: float,
    agree: Callable[[int], int],
    device: torch.device,
    settle: Callable[[], None] = lambda: None,
    snapshot: Snapshot | None = None,
    whole: bool = False,
) -> int | None:
    """Return the largest size at which `body(size)` does not run out of memory on any rank.

    None if all rows fit; 0 if they do not and only `whole` was asked for.

    Random states, buffers and metrics are put back and gradients dropped after every try. Sizes are halved until one
    fits, then the gap is bisected. Every rank tries the same sizes.

    Args:
        body: Does the work, without stepping an optimizer. A size above its own rows means all of them.
        rows: The largest size on this rank, >= 1.
        module: Whose state is put back.
        headroom: Part of the memory available to this process to leave free; it has an effect on CUDA alone.
        agree: Maximum of an integer over all ranks.
        device: Where memory is short.
        settle: Called after a try that ran out of memory.
        snapshot: The state to put back; None: the module's state now.
        whole: Smaller sizes are not tried.

    Raises:
        OutOfMemoryReport: One row does not fit, and it was tried.
    """
    snapshot = Snapshot(module) if snapshot is None else snapshot
    report: str | None = None

    def fits(size: int) -> bool:
        nonlocal report
        failed = False
        try:
            with _leaving(headroom, device, agree):
                body(size)
        except (RuntimeError, MemoryError) as problem:
            if not is_out_of_memory(problem):
                raise
            failed = True
            if size == 1:  # now, while it holds what it holds
                reason = f"One row does not fit with {headroom:.0%} of the memory left free."
                report = memory_report(module, phase="the dry run", size=1, reason=reason, error=problem)
        for parameter in module.parameters():
            parameter.grad = None
        if failed:
            settle()
            for parameter in module.parameters():
                parameter.grad = None
        snapshot.restore()
        release_memory()
        return agree(int(failed)) == 0

    most = agree(rows)  # uneven ranks try the same sizes
    low, high = most, most + 1
    while not fits(low):
        if whole:
            return 0
        if low == 1:
            raise OutOfMemoryReport(report or "Another rank cannot fit one row in the dry run; all ranks stop here.")
        low, high = low // 2, low
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low if low < most else None


def unoptimized(module: nn.Module, optimizers: Iterable[Any]) -> tuple[dict[str, nn.Parameter], bool]:
    """Return the parameters that no optimizer has, and whether they are few enough to copy.

    A teacher that a step moves is about as large as what is trained; a frozen backbone is larger, and nothing moves it.
    """
    optimized = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    others = {name: p for name, p in module.named_parameters() if id(p) not in optimized}
    return others, 2 * sum(p.nbytes for p in others.values()) <= sum(p.nbytes for p in module.parameters())


@contextmanager
def _leaving(headroom: float, device: torch.device, agree: Callable[[int], int]) -> Iterator[None]:
    """Let this process take what every rank could take now, less the headroom: what fails, fails on all alike."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction(device)
    free, total = torch.cuda.mem_get_info(device)
    allowed = min(free + torch.cuda.memory_reserved(device), before * total) * (1 - headroom)
    held = torch.cuda.memory_allocated(device)
    allowed = held + total - agree(max(0, int(total - (allowed - held))))  # the least room of all
    torch.cuda.set_per_process_memory_fraction(allowed / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
