"""Activations in pinned host memory between forward and backward."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from lit_ppo.callbacks._common import log_metrics

AHEAD = 2**28
"""Bytes that are on their way at most: out in the forward, in ahead of the backward."""

Leaving = deque[tuple[torch.cuda.Event, Tensor]]


class OffloadActivations(Callback):
    r"""Copy what the backward will need to pinned host memory in the forward, and bring it back in time.

    Together with `GradientCheckpointing` only the inputs of the checkpointed blocks are kept at all, and these are what
    moves: with one block's recomputation the device holds the activations of one block, whatever the depth. Alone,
    every activation moves, which pays where the bus is fast and the forward slow.

    Copies run on streams of their own, beside the computation; in the backward the next ones are fetched ahead, in the
    reverse order of the forward. Weights are left alone. Gradients are the same to the bit.

    It acts in the phase ``"update"`` of a LightningModule that has ``phase_listeners`` (a list of functions called with
    the name of the phase that starts, or None), in any other in the whole training step.

    Args:
        min_mib: Tensors below so many MiB stay.

    Attributes:
        bytes_moved: Bytes copied to the host in the first training batch; None before it has ended.

    Raises:
        ValueError: `min_mib` below 0, or a strategy that shards: what it gathers would be copied as well.

    Logs ``memory/activations_offloaded_gib``, once, for rank 0.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> from lit_ppo.callbacks import GradientCheckpointing, OffloadActivations
        >>> trainer = Trainer(callbacks=[GradientCheckpointing(), OffloadActivations()], logger=False)
    """

    def __init__(self, min_mib: float = 1.0) -> None:
        super().__init__()
        if not isinstance(min_mib, (int, float)) or isinstance(min_mib, bool) or not min_mib >= 0:
            raise ValueError(f"`OffloadActivations(min_mib={min_mib!r})` must be a number of MiB >= 0.")
        self.min_mib = min_mib
        self.bytes_moved: int | None = None
        self._mover: Mover | None = None
        self._hooks: saved_tensors_hooks | None = None
        self._undo: list[Callable[[], Any]] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies that gather weights for a forward."""
        if isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy)):
            raise ValueError(
                f"`OffloadActivations` would copy the weights that {type(trainer.strategy).__name__} gathers for each "
                "layer, too. Use `GradientCheckpointing` there."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to the phases, if there are some."""
        self._end()
        self.bytes_moved = None
        self._mover = Mover(int(self.min_mib * 2**20))
        listeners: Any = getattr(pl_module, "phase_listeners", None)
        if listeners is not None:

            def on_phase(phase: str | None) -> None:
                self._leave()
                if phase == "update":
                    self._enter(pl_module)

            listeners.append(on_phase)
            self._undo.append(lambda: listeners.remove(on_phase))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin, in a module without phases."""
        if not self._undo:
            self._enter(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End; after the first batch, say what was moved."""
        if not self._undo:
            self._leave()
        if self.bytes_moved is None and self._mover is not None:
            self.bytes_moved = self._mover.moved
            log_metrics(trainer, {"memory/activations_offloaded_gib": self.bytes_moved / 2**30})
            rank_zero_info(
                f"OffloadActivations: {self.bytes_moved / 2**20:,.1f} MiB moved to the host in the first batch."
            )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop listening."""
        self._end()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop listening."""
        self._end()

    def _enter(self, pl_module: LightningModule) -> None:
        assert self._mover is not None
        self._mover.stay = {p.untyped_storage()._cdata for p in pl_module.parameters()}
        self._hooks = saved_tensors_hooks(self._mover.pack, unpack)
        self._hooks.__enter__()

    def _leave(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def _end(self) -> None:
        self._leave()
        while self._undo:
            self._undo.pop()()
        self._mover = None


class Mover:
    """Packs what autograd saves.

    Args:
        smallest: Bytes of a tensor below which it stays.
    """

    def __init__(self, smallest: int) -> None:
        self.smallest = smallest
        self.stay: set[int] = set()
        self.moved = 0
        self._leaving: Leaving = deque()
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[Away]]] = {}
        self._last: weakref.ref[Away] | None = None
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps instead of a tensor: where it went, or the tensor itself."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.nbytes < max(self.smallest, 1):
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self.stay or (tensor.is_leaf and tensor.requires_grad):
            return tensor
        if storage.nbytes() < tensor.nbytes:
            return tensor  # expanded: larger once it is copied
        key = (storage._cdata, tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        alive, found = self._known.get(key, (None, None))
        away = found() if alive is not None and found is not None and not alive.expired() else None
        if away is None:  # else another operation has saved it already
            away = self._send(tensor.detach())
            if len(self._known) > 1024:
                self._known = {k: v for k, v in self._known.items() if not v[0].expired()}
            self._known[key] = StorageWeakRef(storage), weakref.ref(away)
        return away

    def _send(self, tensor: Tensor) -> Away:
        away = Away(tensor, self._last)
        self._last = weakref.ref(away)
        self.moved += tensor.nbytes
        if not tensor.is_cuda:
            away.host.copy_(tensor)
            return away
        main = torch.cuda.current_stream(tensor.device)
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device), torch.cuda.Stream(tensor.device)
        out, away.inward = self._streams[tensor.device]
        out.wait_stream(main)
        with torch.cuda.stream(out):
            away.host.copy_(tensor, non_blocking=True)
        away.sent = out.record_event()
        self._leaving.append((away.sent, tensor))
        away.leaving = self._leaving
        let_go(self._leaving, AHEAD)
        return away


def let_go(leaving: Leaving, most: int) -> None:
    """Drop tensors that were sent until at most so many bytes are left; their memory is used anew only after the copy.

    Args:
        leaving: Changed in place, the oldest first.
        most: Bytes.
    """
    held = sum(tensor.nbytes for _, tensor in leaving)
    while leaving and held > most:
        sent, tensor = leaving.popleft()
        torch.cuda.current_stream(tensor.device).wait_event(sent)
        held -= tensor.nbytes


class Away:
    """A tensor in host memory.

    Args:
        tensor: To be copied.
        before: What was sent before it, which the backward will need after it.
    """

    def __init__(self, tensor: Tensor, before: weakref.ref[Away] | None) -> None:
        cuda = tensor.is_cuda
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=cuda)
        self.device = tensor.device
        self.before = before
        self.sent: torch.cuda.Event | None = None
        self.inward: Any = None
        self.leaving: Leaving = deque()
        self._coming: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._there: weakref.ref[Tensor] | None = None

    def fetch(self) -> int:
        """Start to bring it back; return the bytes that are on their way."""
        if self._coming is None and (self._there is None or self._there() is None):
            tensor = torch.empty_like(self.host, device=self.device)
            arrived = None
            if self.inward is None:
                tensor.copy_(self.host)
            else:
                self.inward.wait_stream(torch.cuda.current_stream(self.device))  # whose memory this was
                self.inward.wait_event(self.sent)
                with torch.cuda.stream(self.inward):
                    tensor.copy_(self.host, non_blocking=True)
                arrived = self.inward.record_event()
            self._coming = tensor, arrived
        return self.host.nbytes if self._coming is not None else 0

    def __del__(self) -> None:
        """What was fetched and not taken gives its memory back, for use after the copy."""
        if self._coming is not None and self._coming[1] is not None:
            torch.cuda.current_stream(self.device).wait_event(self._coming[1])

    def take(self) -> Tensor:
        """Return it, on its device; the next ones are fetched ahead."""
        let_go(self.leaving, 0)
        there = None if self._there is None else self._there()
        if there is None:
            self.fetch()
            assert self._coming is not None
            there, arrived = self._coming
            if arrived is not None:
                torch.cuda.current_stream(self.device).wait_event(arrived)
            self._coming, self._there = None, weakref.ref(there)
        ahead, place = 0, self
        while ahead < AHEAD and place.before is not None and (previous := place.before()) is not None:
            ahead, place = ahead + previous.fetch(), previous
        return there


def unpack(packed: Any) -> Tensor:
    """Return the tensor that `Mover.pack` was given."""
    return packed.take() if isinstance(packed, Away) else packed
