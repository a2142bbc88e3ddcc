"""The host's part of a rollout: which requests are prefilled next, and into which slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lit_ppo.experience import Prompts

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def bucket_of(rows: int) -> int:
    """Return the batch size that decodes so many rows: few sizes, so that few graphs are captured."""
    for size in _BUCKETS:
        if rows <= size:
            return size
    return -(-rows // 128) * 128


@dataclass
class Batch:
    """Requests that are prefilled together: numbers first .. first + len(slots) - 1.

    Attributes:
        first: Number of the first request.
        slots: The slot of each request.
        leaders: The first request of each distinct prompt.
        groups: The slots that share it.
    """

    first: int
    slots: list[int]
    leaders: list[int]
    groups: list[list[int]]


class Feeder:
    """Hands out requests in order, and takes back the slots of those that ended.

    Args:
        prompts: One row a request.

    Raises:
        ValueError: A prompt without a token.
    """

    def __init__(self, prompts: Prompts) -> None:
        self.lengths: list[int] = prompts.lengths.tolist()
        empty = [i for i, n in enumerate(self.lengths) if n < 1]
        if empty:
            raise ValueError(f"Prompt {empty[0]} of the batch has no token: there is nothing to continue.")
        ids = prompts.ids.cpu()
        same = (ids[1:] == ids[:-1]).all(1).tolist()
        self.repeats = [False] + [s and a == b for s, a, b in zip(same, self.lengths[1:], self.lengths, strict=False)]
        self.total, self.longest = len(self.lengths), max(self.lengths)
        self.given = self.ended = 0
        self._free: list[int] = []
        self._slot: dict[int, int] = {}

    def open(self, slots: int) -> None:
        """Start with so many free slots."""
        self._free = list(range(slots))[::-1]

    @property
    def room(self) -> int:
        """How many requests could be prefilled now."""
        return min(len(self._free), self.total - self.given)

    def batch(self, at_least: int) -> Batch | None:
        """Return what to prefill now.

        Args:
            at_least: Wait for more room than this, unless no more requests are left or none is being decoded.
        """
        room = self.room
        if room == 0 or (room < at_least and room < self.total - self.given and self._slot):
            return None
        batch = Batch(self.given, [], [], [])
        for request in range(self.given, self.given + room):
            slot = self._slot[request] = self._free.pop()
            batch.slots.append(slot)
            if not self.repeats[request] or not batch.leaders:
                batch.leaders.append(request)
                batch.groups.append([])
            batch.groups[-1].append(slot)
        self.given += room
        return batch

    def collect(self, lengths: list[int]) -> None:
        """Take back the slots of ended requests.

        Args:
            lengths: Response length of each request, 0 while it goes on.
        """
        for request in [r for r in self._slot if lengths[r] > 0]:
            self._free.append(self._slot.pop(request))
            self.ended += 1


def chunks(lengths: list[int], size: int) -> list[list[tuple[int, int, int]]]:
    """Cut sequences into forwards of at most `size` tokens.

    A sequence that fits into a forward is never cut; a longer one fills what is left of the one before.

    Args:
        lengths: Tokens of each, all above 0.
        size: Above 0.

    Returns:
        Of each forward: number, first token and end of each piece of a sequence. They are in order.
    """
    found: list[list[tuple[int, int, int]]] = []
    room = 0
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            if room == 0 or room < length <= size:
                found.append([])
                room = size
            end = min(length, start + room)
            found[-1].append((number, start, end))
            room -= end - start
            start = end
    return found


def entries(prompts: Prompts, batch: Batch, lengths: list[int]) -> torch.Tensor:
    """Return the queue entries of a batch: (4, m) int64 on the prompts' device; see `Board.queue`."""
    device = prompts.ids.device
    last = batch.first + len(batch.slots)
    host = torch.tensor([[n - 1 for n in lengths[batch.first : last]], batch.slots]).to(device, non_blocking=True)
    rows = slice(batch.first, last)
    return torch.stack([prompts.ids[rows, -1], host[0], host[1], prompts.index[rows].to(device)])
