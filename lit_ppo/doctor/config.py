"""A configuration without its weights: the module, the prompts and the trainer's options, and what they add up to."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lit_ppo import preflight
from lit_ppo.doctor import Line
from lit_ppo.rewards import ModelReward
from lit_ppo.roles.sources import first_line

STAND_IN = (
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "limit_train_batches",
    "limit_val_batches",
    "overfit_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "log_every_n_steps",
    "enable_checkpointing",
    "default_root_dir",
    "callbacks",
)
"""Options that the checks before a run look at; the others would need devices or loggers."""


@dataclass(frozen=True)
class Here:
    """What of the machine matters."""

    gpus: tuple[tuple[int, int], ...] = ()
    """Compute capability of each CUDA device."""
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def now(cls) -> Here:
        """Look."""
        count = torch.cuda.device_count()
        return cls(tuple(torch.cuda.get_device_capability(i) for i in range(count)), dict(os.environ))


@dataclass
class Run:
    """What a configuration asks for."""

    module: Any
    """A module of one of the stages that has loaded nothing."""
    data: Any
    options: dict[str, Any]
    """The Trainer's, with callbacks and strategy as objects."""
    here: Here
    plan: Any = None
    """The `RolePlan`, where the sources of the models can be read."""

    @property
    def stage(self) -> str:
        """sft, reward or ppo."""
        stage: str = self.module.stage
        return stage

    @property
    def role(self) -> str:
        """What the stage calls its first model."""
        return "actor" if self.stage == "ppo" else str(self.module.role)

    @property
    def section(self) -> Any:
        """The options of how a batch is cut."""
        return self.module.ppo if self.stage == "ppo" else self.module.options

    @property
    def sources(self) -> list[tuple[str, Any]]:
        """What each role is made of, where that can be read."""
        names = {"actor": self.role, "critic": "critic", "reference": "reference"}
        return [(name, getattr(self.plan, field, None)) for field, name in names.items()]

    @property
    def reward_models(self) -> list[ModelReward]:
        """The rewards that are models."""
        rewards = getattr(self.module, "rewards", None)
        return [reward for reward in getattr(rewards, "rewards", ()) if isinstance(reward, ModelReward)]

    @property
    def callbacks(self) -> list[Any]:
        """The configured callbacks."""
        found = self.options.get("callbacks") or []
        return list(found) if isinstance(found, (list, tuple)) else [found]

    @property
    def on_cuda(self) -> bool:
        """Whether it computes on CUDA."""
        accelerator = self.options.get("accelerator", "auto")
        return accelerator in ("cuda", "gpu") or (accelerator == "auto" and bool(self.here.gpus))

    @property
    def indices(self) -> list[int] | None:
        """CUDA devices that are named one by one, or None."""
        devices = self.options.get("devices", "auto")
        if isinstance(devices, (list, tuple)):
            return [int(d) for d in devices]
        if isinstance(devices, str) and "," in devices:
            return [int(d) for d in devices.split(",") if d.strip()]
        return None

    @property
    def devices(self) -> int:
        """Devices of a node."""
        if self.indices is not None:
            return len(self.indices)
        devices = self.options.get("devices", "auto")
        if devices in ("auto", -1, "-1"):
            return max(1, len(self.here.gpus)) if self.on_cuda else 1
        return int(devices)

    @property
    def ranks(self) -> int:
        """Processes of the whole run."""
        return self.devices * int(self.options.get("num_nodes") or 1)

    @property
    def strategy(self) -> str:
        """A strategy's name, lower case."""
        given = self.options.get("strategy", "auto")
        return (given if isinstance(given, str) else type(given).__name__).lower()

    @property
    def sharded(self) -> bool:
        """Whether it cuts weights over ranks."""
        return "fsdp" in self.strategy or "modelparallel" in self.strategy.replace("_", "")

    @property
    def longest_prompt(self) -> int:
        """Tokens, where the prompts could be read; else 0."""
        return int(getattr(self.data, "longest_prompt", 0) or 0)


def examine(run: Run, said: list[str]) -> list[Line]:
    """Return what is wrong with a configuration, worst first.

    Args:
        run: The configuration.
        said: Warnings given while it was read.
    """
    from lit_ppo.doctor.mistakes import OF_EVERY_STAGE
    from lit_ppo.doctor.ppo import OF_PPO

    with contextlib.suppress(Exception):  # what stands in the way is said by what follows
        run.plan = preflight.plan(run.module) if run.stage == "ppo" else run.module.plan()
    lines = [] if (failed := _before_the_run(run, said)) is None else [failed]
    lines += [Line("warn", text, option=option_in(text)) for text in said]
    for check in (*OF_EVERY_STAGE, *(OF_PPO if run.stage == "ppo" else ())):
        try:
            lines += check(run)
        except Exception as error:  # what a check needs is what another one has complained about
            if failed is None:
                lines.append(Line("warn", f"could not be checked: {first_line(error)}"))
    order = ("error", "warn", "info")
    return sorted(dict.fromkeys(lines), key=lambda line: order.index(line.status))


def _before_the_run(run: Run, said: list[str]) -> Line | None:
    """Do what a fit does before it loads a weight, with a trainer that has no devices; return what it stops at."""
    from lightning.pytorch import Trainer

    given = {name: run.options[name] for name in STAND_IN if name in run.options}
    folders = [given.get("default_root_dir"), *(getattr(c, "dirpath", None) for c in run.callbacks)]
    try:
        with quiet(said), leaving_no_folders(folders):
            trainer = Trainer(
                **given, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
                enable_model_summary=False,
            )  # fmt: skip
            trainer.strategy.connect(run.module)
            trainer._data_connector.attach_datamodule(run.module, datamodule=run.data)
            run.module.trainer = trainer
            if run.data is not None:
                run.data.setup("fit")
            run.module.check_run("fit")
    except Exception as error:  # a fit would end with it
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        text = text or type(error).__name__
        return Line("error", text, option=option_in(text))
    return None


def option_in(text: str) -> str:
    """Return the option that a message names first, or nothing."""
    found = re.search(r"`([a-z][\w.]*)(?:=[^`]*)?`", text)
    return found[1] if found else ""


@contextmanager
def quiet(said: list[str]) -> Iterator[None]:
    """Keep loggers silent, and keep the text of warnings instead of showing them."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        ours = (w for w in caught if issubclass(w.category, UserWarning) and not _of_others(str(w.message)))
        said += [text for w in ours if (text := str(w.message)) not in said]


def _of_others(text: str) -> bool:
    """Whether a warning is about the trainer that stands in."""
    return bool(
        re.match(r"GPU available but not used|The '\w+' does not have many workers|`max_epochs` was not set", text)
    )


@contextmanager
def leaving_no_folders(folders: list[Any]) -> Iterator[None]:
    """Remove the folders that a check for writing makes."""
    paths = [Path(f).expanduser().absolute() for f in folders if f is not None and "://" not in str(f)]
    new = {p for path in paths for p in (path, *path.parents) if not p.exists()}
    try:
        yield
    finally:
        for path in sorted(new, key=lambda p: -len(p.parts)):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
