"""What the callbacks share: names of submodules, patterns on them, warnings and metrics."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from lightning.pytorch import Trainer
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


def warn_of_finders(trainer: Trainer, owner: str, consequence: str) -> None:
    """Say that Lightning's batch size and learning rate finders run before a callback starts."""
    finders = [type(c).__name__ for c in trainer.callbacks if isinstance(c, (BatchSizeFinder, LearningRateFinder))]  # type: ignore[attr-defined]
    if finders and trainer.state.fn == "fit":
        rank_zero_warn(f"`{', '.join(finders)}` runs before `{owner}` starts, so {consequence}.")


def log_metrics(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Send metrics to every logger, at the x axis that Lightning uses for training steps."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
