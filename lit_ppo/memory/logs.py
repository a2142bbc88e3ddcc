"""Holding back what a step logs until it is known to have succeeded, and in how many pieces."""

from __future__ import annotations

import inspect
from collections import Counter
from types import TracebackType
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lit_ppo.memory.split import weighted_mean


class LogRecorder:
    """Stands in for `module.log` inside `with`; `replay` then logs once for the whole step.

    A value logged by several pieces of a batch becomes their mean, or what its `reduce_fx` says: sum, max, min. So does
    the step value of a torchmetrics object; its epoch value is exact, since its state has seen every row.

    Args:
        module: Whose logging to hold back.
        by_share: Means are by the shares of the pieces, even where a `batch_size` was logged along.
    """

    def __init__(self, module: LightningModule, *, by_share: bool = False) -> None:
        self._module = module
        self._by_share = by_share
        self._signature = inspect.signature(type(module).log)
        self._calls: dict[tuple[str | None, str, int], list[tuple[float, dict[str, Any], Any]]] = {}
        self._new: list[tuple[str | None, str, int]] = []
        self._share = 1.0
        self._seen: Counter[tuple[str | None, str]] = Counter()

    def __enter__(self) -> LogRecorder:
        self._own = vars(self._module).get("log")
        # Lightning gives callbacks the module's method, as `self.log`
        callbacks: list[Any] = self._module.trainer.callbacks  # type: ignore[attr-defined]
        self._callbacks = [(c, c.log) for c in callbacks if getattr(c, "log", None) == self._module.log]
        for callback, _ in self._callbacks:
            callback.log = self._record
        self._module.log = self._record  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for callback, log in self._callbacks:
            callback.log = log
        if self._own is None:
            del self._module.log
        else:
            self._module.log = self._own  # type: ignore[method-assign]

    def clear(self) -> None:
        """Forget everything since `keep`."""
        for key in reversed(self._new):
            self._calls[key].pop()
            if not self._calls[key]:
                del self._calls[key]
        self._new.clear()

    def keep(self) -> None:
        """Keep what was logged so far, whatever is forgotten later."""
        self._new.clear()

    def piece(self, share: float) -> None:
        """Begin a piece of the batch that has this share in the whole."""
        self._share = share
        self._seen.clear()

    def replay(self) -> None:
        """Log everything, once. To be called outside `with`."""
        hook = self._module._current_fx_name
        for (fx, name, _), pieces in self._calls.items():
            arguments = dict(pieces[-1][1])
            if len(pieces) > 1:
                _merge(arguments, pieces, self._by_share)
            self._module._current_fx_name = fx
            kwargs = arguments.pop("kwargs", {})
            self._module.log(name, arguments.pop("value"), **arguments, **kwargs)
        self._module._current_fx_name = hook

    def _record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        arguments = dict(self._signature.bind(self._module, name, value, *args, **kwargs).arguments)
        del arguments["self"], arguments["name"]
        if isinstance(value, Tensor) and not arguments.get("enable_graph", False):
            arguments["value"] = value.detach().clone()
        fx = self._module._current_fx_name
        key = (fx, name, self._seen[fx, name])
        self._seen[fx, name] += 1
        self._new.append(key)
        self._calls.setdefault(key, []).append((self._share, arguments, getattr(value, "_forward_cache", None)))


def _merge(arguments: dict[str, Any], pieces: list[tuple[float, dict[str, Any], Any]], by_share: bool) -> None:
    """Set `value` and `batch_size` to those of the whole step."""
    sizes = [a.get("batch_size") for _, a, _ in pieces]
    known = [s for s in sizes if s is not None]
    shares = [share for share, _, _ in pieces]
    if len(known) == len(sizes):
        arguments["batch_size"] = sum(known)
        shares = shares if by_share else [float(s) for s in known]
    value = arguments["value"]
    if hasattr(value, "_forward_cache"):
        caches = [cache for _, _, cache in pieces]
        if all(isinstance(c, (float, Tensor)) for c in caches):
            value._forward_cache = weighted_mean(caches, shares)
        return
    values = [a["value"] for _, a, _ in pieces]
    reduce_fx = arguments.get("reduce_fx", "mean")
    how = str(getattr(reduce_fx, "__name__", reduce_fx)).lower()
    if how == "sum":
        arguments["value"] = sum(values[1:], values[0])
    elif how in ("max", "min"):
        arguments["value"] = (max if how == "max" else min)(values)
    else:
        arguments["value"] = weighted_mean(values, shares)
