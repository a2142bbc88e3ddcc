"""Optimizer state that waits in pinned host memory, and passes through the GPU in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_ALIGN = 512


class Piece:
    """The update of some rows of a weight, with what it needs.

    Args:
        function: Called with the tensors and options.
        weight: Rows of a weight.
        grad: Theirs.
        state: Theirs, by name; perhaps in host memory.
        options: Of the function.
    """

    def __init__(
        self, function: Callable[..., None], weight: Tensor, grad: Tensor, state: dict[str, Tensor], **options: Any
    ) -> None:
        self.function, self.weight, self.grad, self.state, self.options = function, weight, grad, state, options

    def run(self) -> None:
        """Update the rows."""
        self.function(self.weight, self.grad.contiguous(), self.state, **self.options)

    @property
    def bytes(self) -> int:
        """What the state takes, laid out one after the other."""
        return sum(_aligned(value.nbytes) for value in self.state.values())


def through_device(pieces: list[Piece]) -> Iterator[Piece]:
    """Yield each piece with its state on the weight's device; afterwards it is copied back.

    Two staging buffers of the largest piece's size alternate: while one piece is updated the next is on its way in and
    the last on its way out, each on a stream of its own.

    Args:
        pieces: On one device. Where the state is on it already they are yielded as they are.
    """
    if not pieces or all(value.device == piece.weight.device for piece in pieces for value in piece.state.values()):
        yield from pieces
        return
    device = pieces[0].weight.device
    size = max(piece.bytes for piece in pieces)
    slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(min(2, len(pieces)))]
    main = torch.cuda.current_stream(device)
    inward, outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
    inward.wait_stream(main)
    emptied: list[torch.cuda.Event | None] = [None] * len(slots)
    staged: dict[int, tuple[dict[str, Tensor], torch.cuda.Event]] = {}

    def fetch(number: int) -> None:
        slot = number % len(slots)
        free, offset, views = emptied[slot], 0, {}
        if free is not None:
            inward.wait_event(free)
        with torch.cuda.stream(inward):
            for name, value in pieces[number].state.items():
                view = slots[slot][offset : offset + value.nbytes].view(value.dtype).view(value.shape)
                views[name] = view.copy_(value, non_blocking=True)
                offset += _aligned(value.nbytes)
            staged[number] = views, inward.record_event()

    fetch(0)
    for number, piece in enumerate(pieces):
        home = piece.state
        piece.state, arrived = staged.pop(number)
        main.wait_event(arrived)
        if number + 1 < len(pieces) and len(slots) > 1:
            fetch(number + 1)
        yield piece
        outward.wait_event(main.record_event())
        with torch.cuda.stream(outward):
            for name, value in home.items():
                value.copy_(piece.state[name], non_blocking=True)
            emptied[number % len(slots)] = outward.record_event()
        piece.state = home
    main.wait_stream(outward)  # before the buffers are used for anything else
    outward.synchronize()  # the state may be read on the host from here on


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
