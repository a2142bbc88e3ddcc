"""The order of the prompts, and which rank gets which."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lit_ppo.data.encode import collate


@dataclass(eq=False)
class PromptLoader:
    """The batches of one rank: a sized iterable whose order is a function of (seed, epoch) alone.

    Each global batch is dealt to the ranks in contiguous, near-equal shares, so that every rank has the same number of
    batches; a share may be empty. `Prompts.index` is the position in the global batch.

    Iterating goes through one epoch and moves on to the next. `state_dict` says where it stands, the same on every
    rank and for any number of ranks. Under a Trainer, Lightning's own counters decide which batch comes next
    (`progress`), so data and `batch_idx` agree even after a checkpoint that was written in the middle of a step.

    Example::

        for prompts in trainer.datamodule.train_dataloader(): ...
    """

    prompts: Sequence[Any]
    """The whole tokenized set."""
    batch_size: int
    """Prompts in a global batch."""
    pad: int = 0
    """Id under the padding."""
    make: Callable[[list[Any], Any, int], Any] = collate
    """Makes a batch of items, their numbers in the iteration, and `pad`."""
    shuffle: bool = False
    """A new permutation each epoch."""
    seed: int = 0
    """Of the permutations."""
    drop_last: bool = False
    """Leave out a last batch that is not full."""
    rank: int = 0
    """Whose shares these are."""
    world_size: int = 1
    """Among how many ranks each batch is shared."""
    progress: Callable[[], tuple[int, int] | None] = lambda: None
    """Asked for (epoch, next batch) when the first batch of a pass is drawn. None: the loader counts itself."""
    epoch: int = field(default=0, init=False)
    batch: int = field(default=0, init=False)
    _resume: int = field(default=0, init=False, repr=False)
    _saved: dict[str, Any] | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        count = len(self.prompts) / self.batch_size
        return math.floor(count) if self.drop_last else math.ceil(count)

    def order(self, epoch: int) -> list[int]:
        """Return the order of the whole set in an epoch."""
        rows = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(f"{self.seed} {epoch}").shuffle(rows)
        return rows

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one epoch, or what is left of it after `load_state_dict`."""
        # A generator starts at its first `next`. Lightning makes iterators, some only to see if it can, before it
        # has set its counters.
        self.epoch, start = self.progress() or (self.epoch, self._resume)
        saved, self._saved, self._resume = self._saved, None, 0
        if start and saved is not None and saved != self._arrangement():
            raise ValueError(
                f"This checkpoint is within an epoch of {saved}, which {self._arrangement()} cannot continue. "
                "Resume with the same prompts and options, or from a checkpoint of the end of an epoch."
            )
        rows = self.order(self.epoch)
        for number in range(start, len(self)):
            self.batch = number + 1
            yield self._share(rows[number * self.batch_size : (number + 1) * self.batch_size])
        self.epoch, self.batch = self.epoch + 1, 0

    def _share(self, rows: list[int]) -> Any:
        first, last = (len(rows) * r // self.world_size for r in (self.rank, self.rank + 1))
        return self.make([self.prompts[i] for i in rows[first:last]], torch.arange(first, last), self.pad)

    def _arrangement(self) -> dict[str, Any]:
        names = ("batch_size", "shuffle", "seed", "drop_last")
        return {"prompts": len(self.prompts)} | {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the batches of it that were drawn, and what its order was made from."""
        return {"epoch": self.epoch, "batch": self.batch, "arrangement": self._arrangement()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass start where the state was taken; it raises ValueError if its order would be another."""
        self.epoch, self.batch = state_dict["epoch"], state_dict["batch"]
        self._resume, self._saved = self.batch, state_dict["arrangement"]
