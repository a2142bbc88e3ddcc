"""What an attempt needs to be undone, and what cannot be cut: random states, buffers, batch-dependent layers."""

from __future__ import annotations

import gc
import random
import re
import sys
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn

# MPS, NCCL and drivers say the first, cuBLAS, cuDNN, cuSOLVER and cuFFT the second, the host's allocator the third.
_FAILED_ALLOCATION = re.compile(r"out of memory|CU[A-Z]+_(STATUS_)?ALLOC_FAILED|DefaultCPUAllocator", re.IGNORECASE)

_METRIC_CACHE = ("_update_count", "_computed", "_forward_cache")


class OutOfMemoryReport(torch.OutOfMemoryError):
    """Out of memory for good. The message is the report; the original error is the cause."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error` is an allocation that failed, of a device, a library or the host, and no report of one."""
    if error is None or isinstance(error, OutOfMemoryReport):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or is_oom_error(error):
        return True
    return isinstance(error, RuntimeError) and _FAILED_ALLOCATION.search(str(error)) is not None


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


class RandomStates:
    """The states of the global random number generators, and of those that a module holds as attributes.

    Args:
        module: Whose `torch.Generator` attributes to keep, in any of its submodules; None: none.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = numpy.random.get_state() if numpy is not None else None
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._module = module
        self._own = [
            (value, value.get_state())
            for layer in (module.modules() if module is not None else ())
            for value in vars(layer).values()
            if isinstance(value, torch.Generator)
        ]

    def restore(self) -> None:
        """Put them back."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for generator, state in self._own:
            generator.set_state(state)

    def moved(self) -> bool:
        """Whether numbers were drawn from torch's, or the module's, generators since."""
        now = RandomStates(self._module)
        before = [self._cpu, *self._cuda, *(state for _, state in self._own)]
        after = [now._cpu, *now._cuda, *(state for _, state in now._own)]
        return len(before) != len(after) or not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class Snapshot:
    """What a step changes and a second one must not find changed: random states, buffers, metrics.

    Kept are the persistent buffers of layers in training mode, copied on their device, and the state of torchmetrics
    objects (submodules, or in lists and dicts that are attributes of one).

    Args:
        module: Whose buffers and metrics to keep; None keeps the global random states alone.
        evaluating: Keep the persistent buffers of layers in eval mode too: evaluation counts in them.
        temporary: Keep the buffers outside the state dict too (masks and rotary tables are among them).
        weights: Parameters to keep, on the host.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        evaluating: bool = False,
        temporary: bool = False,
        weights: Iterable[nn.Parameter] = (),
    ) -> None:
        self._arguments: dict[str, Any] = {"module": module, "evaluating": evaluating, "temporary": temporary}
        self._weights = [(p, p.detach().to("cpu", copy=True)) for p in weights]
        self.random = RandomStates(module)
        layers = list(module.named_modules()) if module is not None else []
        self._buffers = [
            (layer, name, f"{path}.{name}".lstrip("."), buffer, buffer.detach().clone())
            for path, layer in layers
            if layer.training or evaluating
            for name, buffer in layer.named_buffers(recurse=False)
            if temporary or name not in layer._non_persistent_buffers_set
        ]
        self._metrics: list[tuple[Any, dict[str, Any]]] = []
        for metric in (m for _, layer in layers for m in _metrics(layer)):
            names = (*metric._defaults, *_METRIC_CACHE)
            self._metrics.append((metric, {n: _copied(vars(metric)[n]) for n in names if n in vars(metric)}))

    def renewed(self) -> Snapshot:
        """Return a snapshot of the same things as they are now."""
        return Snapshot(**self._arguments, weights=[p for p, _ in self._weights])

    def changed_buffers(self) -> list[str]:
        """Name the buffers that have other values now, those of metrics aside."""
        kept = [entry for entry in self._buffers if not _is_metric(entry[0])]
        now = [(name, layer._buffers.get(key), value) for layer, key, name, _, value in kept]
        return [name for name, buffer, value in now if buffer is not None and not torch.equal(buffer, value)]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, also buffers that were replaced by another tensor."""
        self.random.restore()
        for parameter, weight in self._weights:
            parameter.copy_(weight)
        for layer, key, _, buffer, value in self._buffers:
            if buffer.is_inference():  # made by an evaluation; it cannot be written to outside
                layer._buffers[key] = value.clone()
            else:
                layer._buffers[key] = buffer.copy_(value)
        for metric, state in self._metrics:
            vars(metric).update({name: _copied(value) for name, value in state.items()})


def _is_metric(value: Any) -> bool:
    return isinstance(value, nn.Module) and hasattr(value, "_defaults") and hasattr(value, "_update_count")


def _metrics(layer: nn.Module) -> list[Any]:
    """Return the layer itself, if it is a torchmetrics object, and those in its plain lists and dicts."""
    held = [layer]
    for value in vars(layer).values():
        if isinstance(value, (list, tuple, dict)) and value is not layer._modules:
            values = value.values() if isinstance(value, dict) else value
            held += [m for v in values if isinstance(v, nn.Module) for m in v.modules()]
    return [m for m in held if _is_metric(m)]


def _copied(value: Any) -> Any:
    """Copy a metric's state: tensors are added to in place, lists are appended to."""
    return value.detach().clone() if isinstance(value, Tensor) else list(value) if isinstance(value, list) else value
