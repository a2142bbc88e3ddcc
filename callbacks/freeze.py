"""Freezing parameters by name, for ever or for a while, so that a resumed run goes on exactly."""

from __future__ import annotations

import operator
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from typing_extensions import override

from lit_ppo.callbacks._common import (
    as_list,
    check_flags,
    clean_name,
    nearest,
    warn_of_finders,
)
from lit_ppo.callbacks._parameters import check_pattern, match, parameters, parents, tied
from lit_ppo.hooks import after_configure_model, withdraw

_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


class FreezeParameters(Callback):
    r"""Freeze parameters by name, with an optional start and end.

    Without a schedule the parameters are frozen before ``configure_optimizers`` and before the strategy wraps the
    module, so they cost neither gradients nor optimizer state.

    With a schedule (`start`, `until`) they are in the optimizer from the start, and whether they are frozen depends
    on the step alone (for a metric: on the step at which it was reached, which is in the checkpoint). A resumed run
    therefore goes on exactly, with the same parameter groups. While frozen they have no gradient, so optimizers skip
    them: no update, no weight decay, no state. On one device ``requires_grad`` is switched, which saves the memory of
    their gradients, and of activations that only they needed. DDP and FSDP fix what requires a gradient when they
    wrap the module, so there the gradients of scheduled parameters are computed and reduced, then dropped after each
    backward: the same numbers, but **a scheduled thaw costs the memory of an unfrozen run there, except for the
    optimizer state**.

    Conditions are tested at the start of a training batch: ``"step 1000"`` (``trainer.global_step``, i.e. optimizer
    steps), ``"epoch 2"``, or a logged metric, ``"val/loss < 0.5"`` (read after every training batch, validation and
    epoch; true on any rank is true on all; it stays true). Several callbacks add up: a parameter trains when none of
    them freezes it. After the fit everything is as it was before.

    Args:
        freeze: One or several of: a glob on parameter names or on the submodules they lie in (``"encoder"``,
            ``"*.bias"``); a regular expression to be found in the name (``"re:layers\\.[0-3]\\."``); a preset:
            ``"embeddings"``, ``"norms"``, ``"all-but-head"``, ``"first:N"``, ``"last:N"`` (layers of every stack: a
            list of modules of one class).
        keep: Globs or regular expressions on names that stay trainable all the same.
        start: When to freeze; None: from the start.
        until: When to thaw; None: never.
        eval_mode: Put submodules of which every parameter is frozen in eval mode while they are, so that batch-norm
            statistics stand still and dropout is off. (Not the layers that carry a transformers model's checkpointing
            switch, which works in train mode only; what is inside them is.)

    Raises:
        ValueError: A pattern or `keep` that matches nothing, a preset that does not apply, a condition that cannot be
            read, a schedule that contradicts itself, nothing left to train, or a scheduled parameter that no optimizer
            has.
        RuntimeError: `until` was reached before `start`, or its metric is never logged.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> from lit_ppo.callbacks import FreezeParameters
        >>> frozen = FreezeParameters(["embeddings", "first:8"])
        >>> warm_up = FreezeParameters("all-but-head", until="step 500")
        >>> trainer = Trainer(callbacks=[frozen, warm_up], logger=False)
    """

    def __init__(
        self,
        freeze: str | list[str],
        keep: str | list[str] | None = None,
        start: str | None = None,
        until: str | None = None,
        eval_mode: bool = True,
    ) -> None:
        super().__init__()
        self.freeze = as_list("FreezeParameters", "freeze", freeze)
        self.keep = [] if keep is None else as_list("FreezeParameters", "keep", keep)
        for pattern in (*self.freeze, *self.keep):
            check_pattern(pattern)
        self.start = None if start is None else _Condition.parse("start", start)
        self.until = None if until is None else _Condition.parse("until", until)
        _check_schedule(self.start, self.until)
        check_flags("FreezeParameters", eval_mode=eval_mode)
        self.eval_mode = eval_mode
        self._names: set[str] = set()
        self._frozen = False
        self._drops_gradients = False
        self._started: bool | None = None
        self._modes: dict[nn.Module, bool] = {}
        self._validated = False

    @property
    def scheduled(self) -> bool:
        """Whether anything changes during the fit."""
        return self.start is not None or self.until is not None

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(
            freeze=self.freeze, keep=self.keep, start=str(self.start), until=str(self.until)
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {name: c.reached_at for name, c in (("start", self.start), ("until", self.until)) if c is not None}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, condition in (("start", self.start), ("until", self.until)):
            if condition is not None:
                condition.reached_at = state_dict.get(name)

    # ------------------------------------------------------------------------------------------------------- set-up

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the parameters as soon as all layers exist."""
        if stage != "fit":
            return
        if self.scheduled and isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                "`FreezeParameters(start=..., until=...)` cannot run under DeepSpeed, which partitions gradients for "
                "good at the start. Freeze without a schedule, or use another strategy."
            )
        if self.scheduled:
            warn_of_finders(trainer, "FreezeParameters", "what they find is for a run in which all can train")
        if trainer.global_step == 0:  # else a fit that goes on; a resumed one gets its state later
            for condition in (self.start, self.until):
                if condition is not None:
                    condition.reached_at = None
        after_configure_model(trainer, pl_module, self, lambda: self._resolve(trainer, pl_module), first=True)

    def _resolve(self, trainer: Trainer, pl_module: LightningModule) -> None:
        matched: set[str] = set().union(*(match(pl_module, p, "freeze") for p in self.freeze))
        kept: set[str] = set().union(*(match(pl_module, p, "keep") for p in self.keep))
        trainable = {n for n, p in parameters(pl_module).items() if p.requires_grad}
        self._names = (matched - tied(pl_module, kept)) & trainable
        self._drops_gradients = self.scheduled and not isinstance(trainer.strategy, SingleDeviceStrategy)
        if not self.scheduled:
            self._set(trainer, pl_module, frozen=True)
        if not trainable - tied(pl_module, self._names):
            raise ValueError(
                f"`FreezeParameters({self.freeze!r})` leaves {type(pl_module).__name__} nothing to train. "
                "Freeze less, or name what to `keep`."
            )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that what will thaw is in an optimizer."""
        if not self.scheduled:
            return
        held = {id(p) for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]}
        missing = sorted(n for n, p in self._mine(pl_module).items() if id(p) not in held)
        if missing:
            raise ValueError(
                f"`FreezeParameters` has a schedule for {len(missing)} parameters that no optimizer of "
                f"{type(pl_module).__name__} holds (`{missing[0]}`, ...), so they would never train. Give them to an "
                "optimizer in `configure_optimizers` (they require gradients at that time)."
            )

    # ------------------------------------------------------------------------------------------------------ schedule

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the state at this step, resumed or not."""
        self._started = None
        self._update(trainer, pl_module)
        if self._frozen and self.eval_mode:
            self._find_modes(trainer, pl_module)
        if self._frozen and trainer.global_step == 0:  # a callback before this one may have allocated it in advance
            for optimizer in trainer.optimizers:
                for parameter in self._mine(pl_module).values():
                    optimizer.state.pop(parameter, None)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Freeze or thaw if it is time, and keep frozen submodules in eval mode."""
        self._update(trainer, pl_module)
        for module in self._modes:
            if module.training:
                self._modes[module] = True
                module.training = False

    def _update(self, trainer: Trainer, pl_module: LightningModule) -> None:
        started = self.start is None or self.start.reached(trainer)
        ended = self.until is not None and self.until.reached(trainer)
        if ended and (not started or self._started is False):
            raise RuntimeError(
                f"`FreezeParameters(start='{self.start}', until='{self.until}')` contradicts itself: the end came no "
                f"later than the start (step {trainer.global_step}, epoch {trainer.current_epoch}): nothing ever froze."
            )
        self._started = started
        if (started and not ended) == self._frozen:
            return
        self._set(trainer, pl_module, frozen=not self._frozen)
        mine = self._mine(pl_module).values()
        rank_zero_info(
            f"FreezeParameters: {'froze' if self._frozen else 'thawed'} {len(mine)} tensors "
            f"({sum(p.numel() for p in mine):,} parameters) at step {trainer.global_step}."
        )

    def _set(self, trainer: Trainer, pl_module: LightningModule, *, frozen: bool) -> None:
        self._frozen = frozen
        others = self._frozen_by_others(trainer)
        for name, parameter in self._mine(pl_module).items():
            if not self._drops_gradients and (frozen or name not in others):
                parameter.requires_grad_(not frozen)
            if frozen:
                parameter.grad = None
        for module, trained in self._modes.items():
            module.training = module.training or trained
        self._modes = {}
        if frozen and self.eval_mode and self.scheduled:
            self._find_modes(trainer, pl_module)

    def _frozen_by_others(self, trainer: Trainer) -> set[str]:
        peers = [c for c in trainer.callbacks if isinstance(c, FreezeParameters) and c is not self]  # type: ignore[attr-defined]
        return set().union(*(c._names for c in peers if c._frozen))

    def _mine(self, pl_module: nn.Module) -> dict[str, nn.Parameter]:
        return {n: p for n, p in parameters(pl_module).items() if n in self._names}

    def _find_modes(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the submodules that are frozen whole: they are kept in eval mode."""
        named = parameters(pl_module)
        frozen = {n for n, p in named.items() if not p.requires_grad} | self._names | self._frozen_by_others(trainer)
        total = Counter(parent for name in named for parent in parents(name))
        still = Counter(parent for name in frozen for parent in parents(name))
        whole = {parent for name in self._names for parent in parents(name) if total[parent] == still[parent]}
        for name, module in pl_module.named_modules():
            within = any(parent in whole for parent in (clean_name(name), *parents(clean_name(name))))
            if within and not hasattr(module, "gradient_checkpointing"):
                self._modes.setdefault(module, False)

    # ----------------------------------------------------------------------------- where `requires_grad` must not move

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the gradients that a wrapped module had to compute."""
        self._drop(pl_module)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Drop the gradients of a backward that did not go through Lightning."""
        self._drop(pl_module)

    def _drop(self, pl_module: LightningModule) -> None:
        if self._frozen and self._drops_gradients:
            for parameter in self._mine(pl_module).values():
                parameter.grad = None

    # ------------------------------------------------------------------------------------------------------- metrics

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the metric, before any checkpoint is written."""
        self._observe(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the metric, before any checkpoint is written."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._validated = True
            self._observe(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the metric; by now it must exist."""
        self._observe(trainer)
        for condition in (self.start, self.until):
            if condition is None or condition.metric is None or condition.seen or condition.reached_at is not None:
                continue
            if self._validated or not trainer.enable_validation:
                raise RuntimeError(
                    f"`FreezeParameters` waits for '{condition}', but no metric of that name was logged by the end of "
                    "the epoch. (Lightning runs the module's own `on_train_epoch_end` after callbacks, and clears what "
                    "it logs: log the metric in a step, in validation, or in an earlier callback.)"
                    f"{nearest(condition.metric, trainer.callback_metrics)}"
                )

    def _observe(self, trainer: Trainer) -> None:
        for condition in (self.start, self.until):
            ready = condition is not self.until or self.start is None or self.start.reached(trainer)
            if condition is not None and condition.metric is not None and condition.reached_at is None and ready:
                fires = condition.fires(trainer.callback_metrics)
                if trainer.world_size > 1:
                    fires = trainer.strategy.reduce_boolean_decision(fires, all=False)
                if fires:
                    condition.reached_at = trainer.global_step

    # ------------------------------------------------------------------------------------------------------ clean-up

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the module as it was found."""
        self._restore(trainer, pl_module)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the module as it was found."""
        self._restore(trainer, pl_module)

    def _restore(self, trainer: Trainer, pl_module: LightningModule) -> None:
        withdraw(pl_module)
        if self._frozen:
            self._set(trainer, pl_module, frozen=False)
        self._names = set()


@dataclass
class _Condition:
    """A step, an epoch, or a metric beyond a threshold; a metric's first time is remembered."""

    text: str
    kind: str
    value: float
    metric: str | None = None
    reached_at: int | None = None
    seen: bool = False

    @classmethod
    def parse(cls, option: str, text: str) -> _Condition:
        if isinstance(text, str):
            if found := re.fullmatch(r"\s*(step|epoch)\s+(\d+)\s*", text):
                return cls(text, found[1], int(found[2]))
            if found := re.fullmatch(r"\s*(\S+)\s*(<=|>=|<|>)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*", text):
                return cls(text, found[2], float(found[3]), metric=found[1])
        raise ValueError(
            f"`FreezeParameters({option}={text!r})` must read like 'step 1000', 'epoch 2' or 'val/loss < 0.5' "
            "(a logged metric, one of < <= > >=, a number)."
        )

    def reached(self, trainer: Trainer) -> bool:
        if self.metric is not None:
            return self.reached_at is not None
        return (trainer.global_step if self.kind == "step" else trainer.current_epoch) >= self.value

    def fires(self, metrics: dict[str, Any]) -> bool:
        assert self.metric is not None
        if self.metric not in metrics:
            return False
        self.seen = True
        return bool(_COMPARE[self.kind](float(metrics[self.metric]), self.value))

    def __str__(self) -> str:
        return self.text


def _check_schedule(start: _Condition | None, until: _Condition | None) -> None:
    what = f"`FreezeParameters(start={str(start) if start else None!r}, until={str(until) if until else None!r})`"
    if until is None:
        return
    if until.metric is None and until.value == 0:
        raise ValueError(f"{what} contradicts itself: the end is the beginning of the fit, so it never freezes.")
    if start is None or start.metric != until.metric:
        return
    if until.metric is None:
        clash = start.kind == until.kind and until.value <= start.value
    elif "<" in start.kind and "<" in until.kind:
        clash = until.value >= start.value
    else:
        clash = ">" in start.kind and ">" in until.kind and until.value <= start.value
    if clash:
        raise ValueError(f"{what} contradicts itself: `until` is reached no later than `start`. Swap or change them.")
