"""The moment after `configure_model`, for which Lightning has no hook; for any LightningModule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import CodeType
from typing import Any

from lightning.pytorch import LightningModule, Trainer


class _Pending:
    """Stands in for an instance's `configure_model` until that is called, and then calls what waits for it.

    A copy of the module gets the original instead: it shares neither the trainer nor what is to be done.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trainer = trainer
        self.module = pl_module
        self.own = vars(pl_module).get("configure_model")
        self.original = pl_module.configure_model
        self.acts: dict[object, tuple[bool, Callable[[], None]]] = {}
        object.__setattr__(pl_module, "configure_model", self)

    @property
    def __code__(self) -> CodeType:
        """What tells Lightning that the hook is overridden, so that it calls it."""
        return type(self).__call__.__code__

    def withdraw(self) -> None:
        vars(self.module).pop("configure_model")
        if self.own is not None:
            object.__setattr__(self.module, "configure_model", self.own)

    def __call__(self) -> None:
        self.withdraw()
        self.original()
        for _, act in sorted(self.acts.values(), key=lambda entry: entry[0]):
            act()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)


def after_configure_model(
    trainer: Trainer, pl_module: LightningModule, owner: object, act: Callable[[], None], *, first: bool = False
) -> None:
    """Call `act` once, when all layers exist and none is wrapped by the strategy yet.

    Lightning has no callback hook between a module's `setup` and `configure_model`, where layers may be created, and
    the strategy's wrapping. So the instance's `configure_model` is replaced until it is called.

    Args:
        trainer: The one that is setting up.
        pl_module: Whose `configure_model` is followed.
        owner: A second call for the same callback (or module) replaces the first.
        act: Called without arguments.
        first: Before those of other callbacks, whatever their order in the list.
    """
    pending = vars(pl_module).get("configure_model")
    if isinstance(pending, _Pending) and pending.trainer is not trainer:  # of a run that failed before it got there
        pending.withdraw()
        pending = None
    if not isinstance(pending, _Pending):
        pending = _Pending(trainer, pl_module)
    pending.acts.pop(owner, None)
    pending.acts[owner] = (not first, act)


def withdraw(pl_module: LightningModule) -> None:
    """Forget what still waits for `configure_model`: the run ends without it."""
    pending = vars(pl_module).get("configure_model")
    if isinstance(pending, _Pending):
        pending.withdraw()
