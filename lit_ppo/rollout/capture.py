"""CUDA graphs of one function, captured when they are first needed and replayed from then on."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import torch


class CaptureFailed(RuntimeError):
    """A function that cannot be captured: it waits for the device, say. The message is the cause, in a line."""


class Captures:
    """Graphs by key, in one pool of memory.

    Attributes:
        count: Graphs captured so far, forgotten ones among them.
        bytes: What those that are held took on the device.
    """

    def __init__(self) -> None:
        self.count = self.bytes = 0
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        """Return the number of graphs that are held."""
        return len(self._graphs)

    def forget(self) -> None:
        """Drop all graphs: what they read has moved."""
        self._graphs.clear()
        self._pool = None  # a pool does not outlive its last graph
        self.bytes = 0

    def run(self, key: Hashable, work: Callable[[], None], device: torch.device) -> None:
        """Replay a graph; the first time, do the work itself and then capture it for the next.

        Args:
            key: What the graph depends on.
            work: Reads and writes tensors that stay where they are.
            device: Of all of them.

        Raises:
            CaptureFailed: The work cannot be captured. It has been done.
        """
        if key in self._graphs:
            self._graphs[key].replay()
            return
        work()  # this time, and what the capture must find warm
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, reserved = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved(device)
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream(device)),  # back to it, even if the capture breaks off
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as cause:
            _broken.append(graph)
            with suppress(AttributeError, RuntimeError):  # what the end of a capture does, and a broken one does not
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            self.forget()
            first = cause.__context__ or cause  # the end of a broken capture is an error too
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            raise CaptureFailed(in_a_line(first)) from cause
        self._graphs[key] = graph
        self.bytes += max(0, torch.cuda.memory_reserved(device) - reserved)
        self.count += 1


_broken: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture broke off: PyTorch's allocators go on asking them whose memory is whose."""


def in_a_line(cause: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(cause).__name__}: {cause}".splitlines()[0]
