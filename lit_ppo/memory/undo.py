"""What an attempt needs to be undone, and what cannot be cut: random states, buffers, batch-dependent layers."""

from __future__ import annotations

import gc
import random
import sys
from typing import Any

import torch
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn

_METRIC_CACHE = ("_update_count", "_computed", "_forward_cache")


class OutOfMemoryReport(torch.OutOfMemoryError):
    """Out of memory for good. The message is the report; the original error is the cause."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error` is an allocation that failed (CUDA, cuBLAS, CPU), and not already a report of one."""
    if error is None or isinstance(error, OutOfMemoryReport):
        return False
    return (
        isinstance(error, torch.OutOfMemoryError) or is_oom_error(error) or "CUBLAS_STATUS_ALLOC_FAILED" in str(error)
    )


def release_memory() -> None:
    """Give cached blocks back to the device, after the garbage that still holds some."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def batch_dependent_layers(module: nn.Module) -> list[str]:
    """Name the layers whose result depends on how a batch is cut: batch statistics and active dropout.

    Only layers in training mode count. Besides `nn.Dropout`, a positive number in any attribute with `drop` in its
    name counts (attention dropout, recurrent layers, stochastic depth).
    """
    found = []
    for name, layer in module.named_modules():
        if not layer.training:
            continue
        statistics = isinstance(layer, nn.modules.batchnorm._NormBase) and (
            isinstance(layer, nn.modules.batchnorm._BatchNorm) or layer.track_running_stats
        )
        drops = isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
        for key, value in vars(layer).items():
            drops |= "drop" in key and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        if statistics or drops:
            found.append(name or type(layer).__name__)
    return found


class Snapshot:
    """What a forward changes and a second forward must not find changed: random states, buffers, metrics.

    Kept are the persistent buffers of layers in training mode, copied on their device, and the state of torchmetrics
    objects. Layers in eval mode and buffers outside the state dict (masks, rotary tables) do not change in a forward.

    Args:
        module: Whose buffers and metrics to keep; None keeps the random states alone.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = numpy.random.get_state() if numpy is not None else None
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = [
            (layer, name, buffer, buffer.detach().clone())
            for layer in (module.modules() if module is not None else ())
            if layer.training
            for name, buffer in layer.named_buffers(recurse=False)
            if name not in layer._non_persistent_buffers_set
        ]
        self._metrics: list[tuple[Any, dict[str, Any]]] = []
        for layer in module.modules() if module is not None else ():
            metric: Any = layer
            if hasattr(metric, "_defaults") and hasattr(metric, "_update_count"):
                names = (*metric._defaults, *_METRIC_CACHE)
                self._metrics.append((metric, {n: _copied(vars(metric)[n]) for n in names if n in vars(metric)}))

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, also buffers that were replaced by another tensor."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for layer, name, buffer, value in self._buffers:
            layer._buffers[name] = buffer.copy_(value)
        for metric, state in self._metrics:
            vars(metric).update({name: _copied(value) for name, value in state.items()})


def _copied(value: Any) -> Any:
    """Copy a metric's state: tensors are added to in place, lists are appended to."""
    return value.detach().clone() if isinstance(value, Tensor) else list(value) if isinstance(value, list) else value
