"""Who decodes where: the state of a rollout that stays on the device, and moves on by itself after every step.

Requests (one a response) wait in a queue, in order; rows decode them. A row whose request ends takes the next request
that has been prefilled, in the same step, without the host: the host only keeps the queue filled and reads the board
every few steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_ppo.rollout.stop import StopStrings

REQUEST, TOKEN, LENGTH, SLOT, STEP, INDEX = range(6)
"""Row fields: request (-1: idle), next input token, tokens stored, slot, response tokens so far, noise index."""


class Board:
    """Static tensors, so that a captured graph finds them again.

    Args:
        rows: Sequences decoded at once.
        requests: Most requests of one rollout.
        tokens: Longest response.
        trash: The slot of idle rows.
        device: Where it lives.

    Attributes:
        rows: (6, rows) int64, the fields above.
        queue: (4, requests) int64: first input token, tokens stored, slot, noise index of each request.
        scalars: (4,) int64: head and tail of the queue, longest response, noise key of the rollout.
        ids: (requests + 1, tokens) int64 responses.
        logprobs: (requests + 1, tokens) float32.
        entropy: (requests + 1, tokens) float32, once a rollout has asked for it.
        lengths: (requests + 1,) int64, 0 until a request has ended.
        stopped: (requests + 1,) bool.
    """

    def __init__(self, rows: int, requests: int, tokens: int, trash: int, device: torch.device) -> None:
        self.rows = torch.zeros(6, rows, dtype=torch.int64, device=device)
        self.queue = torch.zeros(4, requests, dtype=torch.int64, device=device)
        self.scalars = torch.zeros(4, dtype=torch.int64, device=device)
        self.nobody = requests  # idle rows write into one more response
        self.ids = torch.zeros(requests + 1, tokens, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(requests + 1, tokens, dtype=torch.float32, device=device)
        self.entropy: Tensor | None = None
        self.lengths = torch.zeros(requests + 1, dtype=torch.int64, device=device)
        self.stopped = torch.zeros(requests + 1, dtype=torch.bool, device=device)
        self.trash = trash

    @property
    def base(self) -> Tensor:
        """() int64, the noise key."""
        return self.scalars[3]

    def start(self, limit: int, base: int, pad: int, entropy: bool = False) -> None:
        """Begin a rollout: all rows idle, the queue empty.

        Args:
            limit: Longest response.
            base: Noise key, from `lit_ppo.algo.noise.base_key`.
            pad: Fills what no response reaches.
            entropy: Whether entropies will be recorded.
        """
        self.rows.zero_()
        self.rows[REQUEST] = -1
        self.rows[SLOT] = self.trash
        self.scalars.copy_(torch.tensor([0, 0, limit, base]))
        self.ids.fill_(pad)
        self.logprobs.zero_()
        if entropy:
            self.entropy = torch.zeros_like(self.logprobs) if self.entropy is None else self.entropy.zero_()
        self.lengths.zero_()
        self.stopped.zero_()

    def enqueue(self, first: int, entries: Tensor) -> None:
        """Make requests ready for rows to take.

        Args:
            first: Number of the first; all before it are in the queue already.
            entries: (4, m) int64 columns of `queue`.
        """
        count = entries.shape[1]
        self.queue[:, first : first + count] = entries
        self.scalars[1] = first + count

    def advance(
        self,
        rows: int,
        token: Tensor,
        logprob: Tensor,
        stop_table: Tensor,
        kernels: Any = None,
        entropy: Tensor | None = None,
    ) -> None:
        """Record a sampled token a row, end what has ended, and give free rows the next requests.

        Args:
            rows: The first so many rows have decoded.
            token: (rows,) int64.
            logprob: (rows,) float32.
            stop_table: (V,) bool, True for stop tokens.
            kernels: `lit_ppo.rollout.kernels`, or None for plain PyTorch.
            entropy: (rows,) float32, if `start` was told to record it.
        """
        if kernels is not None:
            kernels.advance(self, rows, token, logprob, stop_table, entropy)
            return
        request, _, length, slot, step, index = self.rows[:, :rows].unbind(0)
        busy = request >= 0
        at = torch.where(busy, request, self.nobody)
        self.ids[at, step] = token
        self.logprobs[at, step] = logprob
        if entropy is not None:
            assert self.entropy is not None
            self.entropy[at, step] = entropy
        stop = stop_table[token]
        step = step + 1
        ended = busy & (stop | (step >= self.scalars[2]))
        at = torch.where(ended, request, self.nobody)
        self.lengths[at] = step
        self.stopped[at] = stop
        going = busy & ~ended
        self.rows[:, :rows] = torch.stack(
            [
                torch.where(going, request, -1),
                torch.where(going, token, 0),
                torch.where(going, length + 1, 0),
                torch.where(going, slot, self.trash),
                torch.where(going, step, 0),
                index,
            ]
        )
        self.fill(rows)

    def fill(self, rows: int) -> None:
        """Give idle rows the next requests of the queue, in order.

        Args:
            rows: Of the first so many rows.
        """
        state = self.rows[:, :rows]
        idle = state[REQUEST] < 0
        head, tail = self.scalars[0], self.scalars[1]
        candidate = head + idle.long().cumsum(0) - 1
        take = idle & (candidate < tail)
        token, length, slot, index = self.queue[:, torch.where(take, candidate, 0)]
        fresh = torch.stack([candidate, token, length, slot, torch.zeros_like(token), index])
        self.rows[:, :rows] = torch.where(take, fresh, state)
        self.scalars[0] += take.sum()

    def end(self, requests: list[int], lengths: list[int], rows: int) -> None:
        """End requests from outside, at a stop string that the device does not see; their rows take the next.

        Args:
            requests: One or more, still going or ended by the device later than they should have.
            lengths: Their lengths.
            rows: The first so many rows decode.
        """
        which, length = torch.tensor([requests, lengths]).to(self.rows.device)
        self.lengths[which], self.stopped[which] = length, True
        gone = torch.isin(self.rows[REQUEST], which)
        for field, idle in ((REQUEST, -1), (TOKEN, 0), (LENGTH, 0), (SLOT, self.trash), (STEP, 0)):
            self.rows[field].masked_fill_(gone, idle)
        self.fill(rows)

    def gather(self, order: Tensor) -> None:
        """Move rows to the front, so that fewer rows need to be decoded.

        Args:
            order: (m,) int64 rows to keep, all others being idle.
        """
        kept = self.rows[:, order]
        self.rows[REQUEST] = -1
        self.rows[SLOT] = self.trash
        self.rows[TOKEN] = self.rows[LENGTH] = self.rows[STEP] = 0
        self.rows[:, : len(order)] = kept


class Cutter:
    """Ends responses on a board at their stop strings, which the host finds some steps late.

    Args:
        board: Of the rollout.
        strings: What ends a response, or None.
        total: Requests of the rollout.

    Attributes:
        lengths: Of the responses ended so, by request.
    """

    def __init__(self, board: Board, strings: StopStrings | None, total: int) -> None:
        self.board, self.strings = board, strings
        self.lengths: dict[int, int] = {}
        self.known = [0] * total

    def cut(self, ids: Tensor, request: list[int], step: list[int], lengths: list[int], rows: int) -> None:
        """End what contains a stop string.

        Args:
            ids: (requests, tokens) int64 on the host.
            request: Request of each row, -1 for none.
            step: Response tokens of each row.
            lengths: Of the responses that have ended, else 0; updated.
            rows: The first so many rows decode.
        """
        assert self.strings is not None
        reached = {number: n for number, n in zip(request, step, strict=True) if number >= 0}
        reached |= {number: n for number, n in enumerate(lengths) if n}
        found = {}
        for number, n in reached.items():
            if number not in self.lengths and n > self.known[number]:
                end = self.strings.end(ids[number, :n].tolist(), self.known[number])
                self.known[number] = n
                if end is not None:
                    found[number] = end
        if found:
            self.board.end(list(found), list(found.values()), rows)
            self.lengths |= found
        for number, end in self.lengths.items():
            lengths[number] = end


@dataclass
class Look:
    """What a board showed after some decode steps, on its way to the host.

    Attributes:
        steps: Decode steps before it.
        seen: Request and step of each row, length of each ended response, head of the queue: one after the other.
        arrived: Set once `seen` may be read; None: now.
        ids: (requests, tokens) int64 responses, where the host looks for stop strings.
    """

    steps: int
    seen: Tensor
    arrived: Any
    ids: Tensor | None = None

    @classmethod
    def at(cls, board: Board, total: int, steps: int, with_ids: bool) -> Look:
        """Send what a board shows to the host, without waiting for it.

        Args:
            board: Now.
            total: Requests of the rollout.
            steps: Decode steps so far.
            with_ids: Send the responses too.
        """
        seen = torch.cat([board.rows[REQUEST], board.rows[STEP], board.lengths[:total], board.scalars[:1]])
        ids = board.ids[:total] if with_ids else None
        if not seen.is_cuda:
            return cls(steps, seen, None, ids)
        arrived = torch.cuda.Event()
        look = cls(steps, _to_host(seen), arrived, None if ids is None else _to_host(ids))
        arrived.record()
        return look

    def read(self, rows: int) -> tuple[list[int], list[int], list[int], int]:
        """Wait for it and return its four parts.

        Args:
            rows: Of the board.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        seen = self.seen.tolist()
        return seen[:rows], seen[rows : 2 * rows], seen[2 * rows : -1], seen[-1]


def _to_host(x: Tensor) -> Tensor:
    """Start a copy to pinned memory."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
