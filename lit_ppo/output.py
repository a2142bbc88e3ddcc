"""Where a run writes: what could not be written, or never would be, is said before it starts."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from lit_ppo.config import PPOConfig


def check_output(trainer: Any, ppo: PPOConfig) -> None:
    """Check when checkpoints are written, and that they and the logs can be.

    Loggers need no check: the trainer has them make their folders before anything else.

    Args:
        trainer: About to fit.
        ppo: Says how many optimizer steps an iteration has.

    Raises:
        ValueError: A trigger that would never, or not as meant, fire.
        OSError: A folder that cannot be written.
    """
    check_checkpoints(trainer, ppo)
    check_writable("default_root_dir", trainer.default_root_dir)
    for callback in trainer.checkpoint_callbacks:
        check_writable("ModelCheckpoint(dirpath=...)", getattr(callback, "dirpath", None))


def check_checkpoints(trainer: Any, ppo: PPOConfig) -> None:
    """Refuse ModelCheckpoint triggers that would never, or not as meant, fire under manual optimization.

    Lightning looks at them once a training_step, after all optimizer steps of the iteration.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    updates = ppo.epochs * ppo.minibatches
    for callback in trainer.callbacks:
        if isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False):
            raise ValueError(
                f"`{type(callback).__name__}` would save on an exception, in the middle of an iteration: with part of "
                "its optimizer steps taken, such a run cannot be continued. Use `ModelCheckpoint("
                f"every_n_train_steps={updates}, save_last=True)`, which saves after every iteration."
            )
        if not isinstance(callback, ModelCheckpoint):
            continue
        every = callback._every_n_train_steps
        if callback.monitor is not None and callback.save_last and callback.save_top_k != -1:
            raise ValueError(
                f"`ModelCheckpoint(monitor={callback.monitor!r}, save_last={callback.save_last!r})`: with a `monitor` "
                "Lightning writes `last` only when the metric is among the best, so what you resume from would be old. "
                "Use two: one with `monitor`, and `ModelCheckpoint(save_last=True)` without."
            )
        if callback._train_time_interval is not None:
            raise ValueError(
                "`ModelCheckpoint(train_time_interval=...)` never fires under manual optimization. Use "
                f"`every_n_train_steps` (a multiple of {updates}, an iteration's optimizer steps) or `every_n_epochs`."
            )
        if every >= 1 and every % updates:
            raise ValueError(
                f"`ModelCheckpoint(every_n_train_steps={every})` is tested once an iteration, when `global_step` has "
                f"moved by {updates} (`ppo.epochs` x `ppo.minibatches`): use a multiple of {updates}."
            )
        if every >= 1 and updates > 1 and ppo.target_kl is not None:
            raise ValueError(
                "`ppo.target_kl` makes the number of optimizer steps of an iteration vary, so that "
                f"`ModelCheckpoint(every_n_train_steps={every})` would miss most of its turns. Use `every_n_epochs`, "
                "or `monitor` a metric."
            )
        if every >= 1:  # Lightning advises to save weights from before the optimizer's step: here its result is meant
            warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual optimization")


def check_writable(option: str, folder: Any) -> None:
    """Check that checkpoints and logs can be written, before hours of training.

    Args:
        option: Where the folder comes from, for the error.
        folder: A local path, which is made; or None or a URL, which are let through.

    Raises:
        OSError: It cannot be written.
    """
    if folder is None or "://" in str(folder):
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"0" * 65536)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(
            error.errno,
            f"`{option}`, {str(folder)!r}, cannot be written: {error.strerror}. Checkpoints and logs would be lost; "
            "choose another folder.",
        ) from error
