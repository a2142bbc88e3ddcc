"""How the batches of an iteration are cut into micro-batches: by sequences or by tokens, alike on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lit_ppo.algo.cut import least_budget
from lit_ppo.experience import Rollout

if TYPE_CHECKING:
    from lit_ppo.harness import PPOHarness


def unit(module: PPOHarness, phase: str) -> str:
    """Return the name under which sizes are learned from out-of-memory errors; it says what they count."""
    return phase if module.ppo.micro_batch_tokens is None else f"{phase} (tokens)"


def update_size(module: PPOHarness, rows: int) -> int:
    """Return what a micro-batch of the update may hold: sequences, or with `ppo.micro_batch_tokens` tokens.

    Args:
        module: Has the options.
        rows: Of the minibatch.
    """
    return module.ppo.micro_batch_tokens or module.ppo.micro_batch_size or max(1, rows)


def score_size(module: PPOHarness, rows: int) -> int:
    """Return what a forward of the score phase may hold: as much as one of the update, unless it is said.

    Args:
        module: Has the options, and what the update has learned.
        rows: Of the largest minibatch: a smaller one is not cut either where the update does not cut it.
    """
    learned = module.oom_policy.size(unit(module, "update"), update_size(module, rows))
    size = module.ppo.score_batch_size or learned
    return size if module.ppo.micro_batch_tokens is not None else max(1, min(size, rows))


def least(module: PPOHarness, batch: Rollout) -> int:
    """Return the size at which each row of a batch is alone, so that nothing is left to split.

    Args:
        module: Has the options.
        batch: What is cut.
    """
    return 1 if module.ppo.micro_batch_tokens is None else least_budget([sum(sizes) for sizes in batch.on_host()])


def cuts(module: PPOHarness, batch: Rollout, rows: Tensor, size: int) -> list[Tensor]:
    """Cut rows of a batch into parts: one or more, and as many on every rank where forwards are collective.

    Those beyond a rank's own rows are empty, which `Rollout.part` makes a ghost of.

    Args:
        module: Has the options and the ranks.
        batch: Has the rows.
        rows: (b,) int64 row numbers, on the CPU.
        size: Sequences, or with `ppo.micro_batch_tokens` tokens, of a part.
    """
    if module.ppo.micro_batch_tokens is None:
        return module.cuts(rows, size)
    sizes = batch.on_host()
    return module.cuts(rows, size, [sum(sizes[row]) for row in rows.tolist()])
