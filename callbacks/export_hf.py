"""The best model so far, in a folder that plain transformers or PEFT load."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from typing_extensions import override

from lit_ppo.callbacks._common import clean_name, nearest, outermost
from lit_ppo.hf_folder import check_target, no_bars, save_adapter, write_folder


class ExportHF(Callback):
    """Writes a Hugging Face folder whenever a metric is better than ever: model, tokenizer, generation config.

    Works on any LightningModule that holds a transformers or PEFT model, and with any strategy: where the weights are
    sharded, all ranks take part in gathering them, in host memory of rank 0. The folder is replaced as a whole, so that
    it never holds half an export. A PEFT model is written as its adapter alone.

    Args:
        directory: The folder; an earlier export there is replaced.
        monitor: The metric, as it is logged in validation. None: export once, at the end of the fit.
        mode: Whether `max` or `min` is better.
        model: Name of the submodule to export, such as `model` or `actor`. None: the only one that can be exported, or
            that of `actor`.
        adapter: Name of the PEFT adapter. None: the only one, or `policy`.

    Raises:
        ValueError: A bad argument, no model or several, a metric that is not logged, or a fit without validation.
        FileExistsError: The folder holds something else than an export.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> from lit_ppo.callbacks import ExportHF
        >>> trainer = Trainer(callbacks=[ExportHF("best-model")], logger=False)
    """

    def __init__(
        self,
        directory: str,
        monitor: str | None = "val/reward",
        mode: str = "max",
        model: str | None = None,
        adapter: str | None = None,
    ) -> None:
        super().__init__()
        if not str(directory).strip():
            raise ValueError(f"`ExportHF(directory={directory!r})` must be the name of a folder.")
        if mode not in ("max", "min"):
            raise ValueError(f"`ExportHF(mode={mode!r})` must be 'max' or 'min'.")
        self.directory, self.monitor, self.mode = Path(directory), monitor, mode
        self.model, self.adapter = model, adapter
        self.best: float | None = None
        """The metric of the export, if there is one."""

    @property
    @override
    def state_key(self) -> str:
        return f"ExportHF[{self.directory}, {self.monitor}]"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the folder before anything is loaded."""
        if stage == "fit":
            check_target(self.directory, overwrite=True)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the model, and say whether an export will ever come."""
        _, model = self.find(pl_module)
        check_target(self.directory, str(getattr(base_of(model), "name_or_path", "")), overwrite=True)
        if self.monitor is not None and not trainer.enable_validation:
            raise ValueError(
                f"`ExportHF(monitor={self.monitor!r})` exports after validations, and this fit has none. Give "
                "validation data, or monitor=None to export at the end."
            )

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Export if the metric is the best so far."""
        if self.monitor is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self.monitor not in trainer.callback_metrics:
            raise ValueError(
                f"`ExportHF(monitor={self.monitor!r})`: validation logs no such metric."
                + nearest(self.monitor, trainer.callback_metrics)
            )
        value = float(trainer.callback_metrics[self.monitor])
        better = self.best is None or (value > self.best if self.mode == "max" else value < self.best)
        if trainer.strategy.broadcast(better and value == value):
            self.export(trainer, pl_module)
            self.best = value
            rank_zero_info(f"`{self.monitor}` is {value:.4g}, the best so far: exported to {self.directory}.")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Export at the end, where no metric decides."""
        if self.monitor is None:
            self.export(trainer, pl_module)

    def find(self, pl_module: LightningModule) -> tuple[str, Any]:
        """Return the name and the model that is exported."""
        able = {clean_name(n): m for n, m in pl_module.named_modules() if n and hasattr(m, "save_pretrained")}
        able = outermost(able)
        chosen = able
        if self.model is not None or len(able) > 1:
            wanted = "actor" if self.model is None else self.model
            chosen = {n: m for n, m in able.items() if n == wanted or n.startswith(f"{wanted}.")}
        if len(chosen) != 1:
            there = ", ".join(f"`{n}`" for n in able) or "none"
            fix = "Name one of them." if able else "Hold one as a submodule (an attribute such as `self.model`)."
            raise ValueError(
                f"`ExportHF(model={self.model!r})` fits {len(chosen)} of the models of {type(pl_module).__name__} that "
                f"transformers can save: {there}. {fix}"
            )
        ((name, model),) = chosen.items()
        return name, model

    def export(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the folder; to be called on all ranks.

        Args:
            trainer: Its strategy knows how the weights lie.
            pl_module: Has the model.
        """
        name, model = self.find(pl_module)
        before: Any = getattr(pl_module, "before_export", None)
        if callable(before):
            before()
        finished = getattr(pl_module, "finished", None)  # lit-ppo's reward models are normalised when they are written
        with finished(model) if callable(finished) else nullcontext():
            state = gathered_state(trainer, pl_module, name)
            problem: str | None = None
            if trainer.is_global_zero:
                try:
                    self._write(pl_module, model, state)
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                    if trainer.world_size == 1:
                        raise
        problem = trainer.strategy.broadcast(problem)
        if problem is not None:
            raise RuntimeError(f"`ExportHF(directory={str(self.directory)!r})` could not write. {problem}")

    def _write(self, pl_module: LightningModule, model: Any, state: dict[str, Any] | None) -> None:
        tokenizer: Any = getattr(pl_module, "tokenizer", None)

        def write(folder: Path) -> None:
            if hasattr(model, "peft_config"):
                save_adapter(model, self._adapter(model), folder, state)
            else:
                model.save_pretrained(folder, **({} if state is None else {"state_dict": state}))
            if hasattr(tokenizer, "save_pretrained"):
                tokenizer.save_pretrained(folder)

        with no_bars():
            write_folder(self.directory, write)

    def _adapter(self, model: Any) -> str:
        names = list(model.peft_config)
        name = self.adapter or (names[0] if len(names) == 1 else "policy")
        if name not in names:
            raise ValueError(
                f"`ExportHF(adapter={self.adapter!r})`: the model has the adapters {', '.join(map(repr, names))}. "
                "Name one of them."
            )
        return name


def base_of(model: Any) -> Any:
    """Return the transformers model under PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def gathered_state(trainer: Trainer, pl_module: LightningModule, name: str) -> dict[str, Any] | None:
    """Return the whole weights of a submodule on the CPU of rank 0, or None where each rank has them anyway.

    Args:
        trainer: Its strategy may have wrapped the module.
        pl_module: Has the submodule.
        name: Of the submodule, without what wrappers put in it.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    root: nn.Module = trainer.strategy.model or pl_module
    if not any(isinstance(m, FSDPModule | FullyShardedDataParallel) for m in root.modules()):
        return None
    away = trainer.strategy.root_device.type != "cpu"  # FSDP1 fails to move to where it is
    with torch.no_grad():
        whole = get_model_state_dict(root, options=StateDictOptions(full_state_dict=True, cpu_offload=away))
    start = f"{name}."
    return {key.removeprefix(start): tensor for key, tensor in whole.items() if key.startswith(start)}
