"""What the callbacks share: names of submodules, patterns on them, and the moment after `configure_model`."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from types import CodeType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def clean_name(name: str) -> str:
    """Return a parameter's or submodule's name without what FSDP, torch.compile and checkpoint wrappers put in it."""
    for wrapper in _WRAPPERS:
        name = f"{name}.".replace(wrapper, "").rstrip(".")
    return name


def as_list(owner: str, option: str, value: str | Iterable[str]) -> list[str]:
    """Return one pattern or several as a list.

    Raises:
        ValueError: There is none, or one that is empty or not a string.
    """
    patterns = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else []
    if not patterns or not all(isinstance(p, str) and p.strip() for p in patterns):
        raise ValueError(f"`{owner}({option}={value!r})` must be a name or pattern, or a list of them, none empty.")
    return patterns


def check_flags(owner: str, **flags: bool) -> None:
    """Check options that are on or off.

    Raises:
        ValueError: One is neither True nor False.
    """
    for option, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"`{owner}({option}={value!r})` must be True or False.")


def matches(name: str, pattern: str) -> bool:
    """Whether a glob matches a dotted name, or the name of something that contains it (case-sensitive)."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def nearest(pattern: str, names: Iterable[str]) -> str:
    """Return the end of an error message: the known names that look most like `pattern`."""
    known = sorted({n for n in names if n})
    if not known:
        return " There are no names to match."
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5)
    shown = near or known[:8]
    rest = "" if near or len(known) <= 8 else ", ..."
    return f" {'Nearest' if near else 'Known'} names: {', '.join(f'`{n}`' for n in shown)}{rest}."


def prefixes(names: Iterable[str]) -> set[str]:
    """Return dotted names and the names of everything that contains them."""
    return {".".join(parts[:i]) for parts in (n.split(".") for n in names) for i in range(1, len(parts) + 1)}


def outermost(chosen: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Drop every module that lies inside another of the chosen ones."""
    return {n: m for n, m in chosen.items() if not any(o != n and (not o or n.startswith(f"{o}.")) for o in chosen)}


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


def warn_of_finders(trainer: Trainer, owner: str, consequence: str) -> None:
    """Say that Lightning's batch size and learning rate finders run before a callback starts."""
    finders = [type(c).__name__ for c in trainer.callbacks if isinstance(c, (BatchSizeFinder, LearningRateFinder))]  # type: ignore[attr-defined]
    if finders and trainer.state.fn == "fit":
        rank_zero_warn(f"`{', '.join(finders)}` runs before `{owner}` starts, so {consequence}.")


def log_metrics(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Send metrics to every logger, at the x axis that Lightning uses for training steps."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
