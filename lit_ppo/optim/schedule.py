"""The learning rate over the iterations of a run, and the options of a run that goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from lit_ppo.config import AdamConfig


def schedule(optimizer: torch.optim.Optimizer, config: AdamConfig, total: int | Callable[[], int]) -> LambdaLR:
    """Scale every group's learning rate by iteration: a linear warm-up, then down to 0 at iteration `total`.

    Args:
        optimizer: Whose groups hold the full learning rates.
        config: `schedule` and `warmup_iterations`.
        total: Iterations of the run, or a function that knows them by the time the warm-up is over (a trainer learns
            the number of its batches late); `step` the scheduler once after each iteration.

    Raises:
        ValueError: A warm-up as long as the run; when it is found out.
    """
    warmup = config.warmup_iterations

    def factor(iteration: int) -> float:
        if iteration < warmup:
            return (iteration + 1) / (warmup + 1)
        if config.schedule == "constant" or iteration == 0:
            return 1.0
        length = total if isinstance(total, int) else total()
        if warmup >= length:
            raise ValueError(
                f"`optim.warmup_iterations={warmup}` leaves nothing of the run's {length} iterations: "
                "shorten it, or raise `optim.total_iterations`."
            )
        left = max(length - iteration, 0) / (length - warmup)
        return left if config.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2

    return LambdaLR(optimizer, factor)


def apply_options(optimizer: Any, scheduler: Any, options: list[dict[str, Any]]) -> list[str]:
    """Give the groups of a resumed optimizer the options of the running configuration, and say which have changed.

    A checkpoint brings the options that it was written with; the learning rates follow the schedule of this run from
    the scheduler's iteration on. Where nothing has changed nothing does.

    Args:
        optimizer: The optimizer, perhaps wrapped.
        scheduler: Its LambdaLR from `schedule`.
        options: Of each group: `name`, `lr` and other options.

    Returns:
        A text for each option that differs from the checkpoint's.
    """
    changed = []
    for i, (group, new) in enumerate(zip(optimizer.param_groups, options, strict=True)):
        factor = scheduler.lr_lambdas[i](scheduler.last_epoch)
        before = {**{k: group[k] for k in new}, "lr": group["initial_lr"]}
        before["betas"] = tuple(before["betas"])
        changed += [f"{new['name']} {k} {before[k]} -> {new[k]}" for k in new if before[k] != new[k]]
        group.update(new)
        group["initial_lr"] = scheduler.base_lrs[i] = new["lr"]
        group["lr"] = new["lr"] * factor
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
    return changed
