"""Runs that outlive an out-of-memory error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lit_ppo.memory.automatic import Batch, UndoableSteps
from lit_ppo.memory.dry_run import largest_that_fits, unoptimized
from lit_ppo.memory.evaluation import cut_step
from lit_ppo.memory.fsdp2 import settle_all
from lit_ppo.memory.logs import LogRecorder
from lit_ppo.memory.manual import StepUndo
from lit_ppo.memory.optimizers import allocate_state
from lit_ppo.memory.ranks import Ranks, accumulates
from lit_ppo.memory.report import memory_report
from lit_ppo.memory.retry import OOMPolicy
from lit_ppo.memory.split import Splitter
from lit_ppo.memory.undo import Snapshot, is_out_of_memory
from lit_ppo.memory.wrapped import Wrapped

_PATIENCE = 60.0
"""Seconds that a rank waits for the others under FSDP2 after it has run out of memory."""

_UNCUT = "This work cannot be cut from outside. Write it with `lit_ppo.memory.retry.retry` to have it cut."

_EVALUATION = {"validation_step": "validation", "test_step": "test", "predict_step": "predict"}


class OOMGuard(Callback):
    r"""Recovers from out-of-memory errors with the same gradient, or stops with a report of who holds the memory.

    **Before** training the optimizer's state is allocated and, on CUDA, a dry run finds the largest micro-batch that
    fits with some headroom; all ranks take the smallest. **During** training an out-of-memory error in forward,
    backward or clipping restarts that optimizer step: gradients are dropped, buffers, metrics and random states put
    back, cached memory is released, and the batch is cut into micro-batches of half the size. What the step logs is
    logged once, for the whole batch. **After**, the size is kept, also in the checkpoint.

    Works with automatic optimization as it is: the loss of `training_step` must be a mean over the rows of the batch,
    or over whatever `weight` counts. With manual optimization, write what may be cut with
    `lit_ppo.memory.retry.retry`; a `training_step` without it is put back and tried once more uncut, on one process.
    Validation, test and prediction steps are cut likewise.

    Recovers on one device and under DDP, where gradients are then averaged after the backward instead of during it,
    once all ranks agree that it succeeded. Under FSDP2 (``ModelParallelStrategy``) a module of manual optimization that
    cuts its work with ``lit_ppo.memory.retry`` recovers where all ranks run out at the same point; a rank that does so
    alone stops the run with its report. Under other strategies it reports and does not recover.

    Args:
        headroom: Part of the device's available memory that the dry run leaves free, at least 0 and below 1.
        dry_run: Look for the largest micro-batch before the first step. `training_step` is run more often for it; what
            it changes of buffers, random states and parameters is put back, Python counters and lists are not.
        worst_case: Returns, given the module, the largest batch that training will meet. None: the module's own
            `worst_case_batch()`, or else the first batch. For automatic optimization.
        split_batch: Cuts a batch into pieces: (batch, size) -> list. None: tensors along dimension 0.
        weight: What the loss of a piece is a mean over, e.g. the number of its target tokens. None: rows.
        on_batch_dependent: Where layers depend on how a batch is cut (batch statistics, active dropout): "refuse" tries
            once more uncut and then stops; "warn" cuts and says so.
        grow_after: Double a size that was cut after this many steps in a row that fitted. None: never.
        timeout: Seconds after which a rank stops waiting for the others to agree.

    Raises:
        ValueError: A bad argument.
        MisconfigurationException: A strategy option under which steps cannot be undone.

    Metrics:
        - `oom/events`: errors recovered from, so far.
        - `oom/micro_batch`: rows in one forward of the last step (tokens, if the module cuts its batches by tokens); on
          several ranks, the most of any.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> from lit_ppo.callbacks import OOMGuard
        >>> trainer = Trainer(callbacks=[OOMGuard(headroom=0.1, grow_after=1000)])
    """

    def __init__(
        self,
        headroom: float = 0.1,
        dry_run: bool = True,
        worst_case: Callable[[Any], Any] | None = None,
        split_batch: Callable[[Any, int], list[Any]] | None = None,
        weight: Callable[[Any], float] | None = None,
        on_batch_dependent: Literal["refuse", "warn"] = "refuse",
        grow_after: int | None = None,
        timeout: float = 600.0,
    ) -> None:
        super().__init__()
        if not _is_number(headroom) or not 0 <= headroom < 1:
            raise ValueError(f"`headroom={headroom!r}` must be at least 0 and below 1: a part of the memory.")
        if not _is_number(timeout) or not 0 < timeout < float("inf"):
            raise ValueError(f"`timeout={timeout!r}` must be > 0 seconds, and finite.")
        if not isinstance(dry_run, bool):
            raise ValueError(f"`dry_run={dry_run!r}` must be True or False.")
        for name, value in (("worst_case", worst_case), ("split_batch", split_batch), ("weight", weight)):
            if value is not None and not callable(value):
                raise ValueError(f"`{name}={value!r}` must be a function.")
        if worst_case is not None and not dry_run:
            raise ValueError("`worst_case` is what the dry run runs, and `dry_run=False` switches that off.")
        self.headroom = headroom
        self.dry_run = dry_run
        self.worst_case = worst_case
        self._splitter = Splitter(split_batch, weight)
        self.timeout = timeout
        self.policy = OOMPolicy(on_batch_dependent=on_batch_dependent, grow_after=grow_after)
        self._wrapped: list[Wrapped] = []
        self._steps: UndoableSteps | None = None
        self._ranks: Ranks | None = None
        self._step_undo: StepUndo | None = None
        self._manual_steps: int | None = None
        self._module_retries = False
        self._gave_policy = False

    # Attach and detach

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take over the module's policy, or give it one, and wrap its steps."""
        others = [c for c in trainer.callbacks if isinstance(c, OOMGuard)]  # type: ignore[attr-defined]
        if len(others) > 1:
            raise MisconfigurationException(f"The trainer has {len(others)} `OOMGuard` callbacks. Keep one of them.")
        own = getattr(pl_module, "oom_policy", None)
        self._module_retries = own is not None and not pl_module.automatic_optimization
        if own is not None and own is not self.policy:
            own.on_batch_dependent, own.grow_after = self.policy.on_batch_dependent, self.policy.grow_after
            own.load_state_dict(self.policy.state_dict())
            self.policy = own
        self._gave_policy = self._gave_policy or own is None
        pl_module.oom_policy = self.policy  # type: ignore[assignment]
        if not pl_module.automatic_optimization:
            self._check_manual(own is not None)
        if stage == "fit" and pl_module.automatic_optimization:
            self._wrap_automatic(trainer, pl_module)
        if own is not None:
            return  # a module with a policy uses it by itself
        if stage == "fit" and not pl_module.automatic_optimization:
            self._wrap(pl_module, "training_step", self._manual_step(trainer, pl_module))
        for name, phase in _EVALUATION.items():
            step = getattr(pl_module, name)
            if is_overridden(name, pl_module) and not is_param_in_hook_signature(
                step, "dataloader_iter", explicit=True
            ):
                self._wrap(pl_module, name, cut_step(self.policy, self._splitter, pl_module, step, phase))

    def _check_manual(self, retries: bool) -> None:
        """Refuse, or say, what manual optimization makes no use of."""
        if self.worst_case is not None:
            raise MisconfigurationException(
                "`worst_case` is for automatic optimization. A module of manual optimization says what to try by a "
                "method `dry_runs()`, which returns {phase: (rows, function of a size)}, or leave it out."
            )
        options = {"split_batch": self._splitter.split, "weight": self._splitter.weight}
        given = [f"`{name}`" for name, option in options.items() if option is not None]
        if given and retries:
            raise MisconfigurationException(
                f"{' and '.join(given)} of `OOMGuard` would not be used: this module cuts its own work. Leave it out."
            )
        if given:
            rank_zero_info(f"OOMGuard: {' and '.join(given)} cut evaluation only; a manual `training_step` is not cut.")

    def _wrap(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._wrapped.append(Wrapped(owner, name, function))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Unwrap everything."""
        while self._wrapped:
            self._wrapped.pop().undo()
        if self._gave_policy:
            vars(pl_module).pop("oom_policy", None)
            self._gave_policy = False
        self._steps = self._step_undo = None
        policy = self.policy
        policy.recover = False
        defaults = OOMPolicy()
        policy.agree, policy.no_sync, policy.average = defaults.agree, defaults.no_sync, defaults.average
        policy.agree_soon, policy.settle = defaults.agree_soon, defaults.settle
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Add the report to an out-of-memory error that nothing could recover."""
        if is_out_of_memory(exception):
            phase = getattr(pl_module, "phase", None) or "a place that no retry covers"
            exception.add_note(memory_report(pl_module, phase=phase, error=exception))
        self.teardown(trainer, pl_module, "")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out whether this strategy can recover."""
        self._connect(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out whether this strategy can recover."""
        self._connect(trainer, pl_module)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out whether this strategy can recover."""
        self._connect(trainer, pl_module)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out whether this strategy can recover."""
        self._connect(trainer, pl_module)

    def _connect(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Connect the policy to the strategy, once it has been set up."""
        if self._ranks is not None or self.policy.recover:
            return
        strategy = trainer.strategy
        data_parallel = isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
        sharded = isinstance(strategy, ModelParallelStrategy) and self._module_retries
        if (
            not data_parallel
            and not sharded
            and not (isinstance(strategy, SingleDeviceStrategy) and trainer.world_size == 1)
        ):
            rank_zero_info(
                f"OOMGuard: steps cannot be undone under {type(strategy).__name__}; an out-of-memory error ends the "
                "run with a report."
            )
            return
        self.policy.recover = True
        if sharded:
            self._ranks = Ranks(pl_module, None, self.timeout, accumulating=partial(accumulates, trainer, pl_module))
            self.policy.agree = self._ranks.agree
            self.policy.agree_soon = partial(self._ranks.agree, patience=_PATIENCE)
            self.policy.settle = partial(settle_all, pl_module)
        if data_parallel:
            ddp = strategy.model if isinstance(strategy.model, DistributedDataParallel) else None
            self._ranks = Ranks(pl_module, ddp, self.timeout, accumulating=partial(accumulates, trainer, pl_module))
            self._ranks.check(getattr(strategy, "_ddp_comm_hook", None))
            self.policy.agree, self.policy.average = self._ranks.agree, self._ranks.average
            self.policy.no_sync = self._ranks.no_sync
            if self._steps is not None:
                self._steps.ranks = self._ranks

    # Training

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Allocate the optimizers' state, and try the sizes of a manual module's dry runs."""
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer) and not allocate_state(optimizer):
                rank_zero_info(
                    f"OOMGuard: the state of {type(optimizer).__name__} cannot be allocated ahead; its first step "
                    "could run out of memory."
                )
        runs: Any = getattr(pl_module, "dry_runs", None)
        if self.dry_run and self.policy.recover and callable(runs) and not pl_module.automatic_optimization:
            with self.policy.no_sync():  # DDP would wait for parameters that a trial does not use
                for phase, (rows, body) in runs().items():
                    self._try_sizes(pl_module, phase, rows, body)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the number of events and the micro-batch size: of the rank where they are largest."""
        if self._steps is not None and not trainer.fit_loop._should_accumulate():
            self._steps.forget()
        values = {"oom/events": float(self.policy.agree(sum(self.policy.events.values())))}
        if rows := self.policy.agree(self.policy.micro_batch or 0):
            values["oom/micro_batch"] = float(rows)
        logger = trainer.logger is not None
        pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1, logger=logger)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Keep what a manual step is about to overwrite."""
        if self._step_undo is not None:
            self._step_undo.before_step(optimizer)

    def _wrap_automatic(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
            raise MisconfigurationException(
                "`training_step(dataloader_iter)` fetches its own batches, which `OOMGuard` cannot cut. Take `batch`."
            )
        self._steps = steps = UndoableSteps(self.policy, self._splitter, trainer, pl_module)
        if self.dry_run:
            steps.before_first = partial(self._dry_run, trainer, pl_module)
        self._wrap(trainer.fit_loop.epoch_loop.automatic_optimization, "_make_closure", steps.make_closure)
        if trainer.gradient_clip_val is not None or is_overridden("configure_gradient_clipping", pl_module):
            clip = pl_module.configure_gradient_clipping
            self._wrap(pl_module, "configure_gradient_clipping", partial(steps.clip, clip))

    # Dry run

    def _counts_memory(self, pl_module: LightningModule) -> bool:
        """Whether `headroom` has a meaning, without which a dry run of unknown code would do more harm than good."""
        return pl_module.device.type == "cuda"

    def _dry_run(self, trainer: Trainer, pl_module: LightningModule, batch: Batch) -> None:
        """Try forward and backward at the worst case before the first step, where memory is counted."""
        if not self._counts_memory(pl_module):
            return
        assert self._steps is not None
        own: Any = getattr(pl_module, "worst_case_batch", None)
        worst = self.worst_case(pl_module) if self.worst_case is not None else own() if callable(own) else None
        whole = batch.kwargs["batch"]
        if worst is not None:
            whole = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(worst))
        gradients = [(p, p.grad) for p in pl_module.parameters()]
        others, few = unoptimized(pl_module, trainer.optimizers)
        versions = {name: p._version for name, p in others.items()}
        snapshot = Snapshot(pl_module, evaluating=True, temporary=True, weights=others.values() if few else ())
        try:
            with LogRecorder(pl_module), self.policy.no_sync():
                rehearse = partial(self._steps.rehearse, batch, whole)
                self._try_sizes(pl_module, "train", self._splitter.rows(whole), rehearse, snapshot)
            changed = [name for name, p in others.items() if p._version != versions[name]]
            if changed and not few:
                rank_zero_warn(
                    f"OOMGuard: `training_step` changes `{changed[0]}`, which no optimizer has and which is too large "
                    "to copy, so that the dry run changed it, too. Use `dry_run=False` if that matters."
                )
        finally:
            for p, gradient in gradients:
                p.grad = gradient

    def _try_sizes(
        self,
        pl_module: LightningModule,
        phase: str,
        rows: int,
        body: Callable[[int], object],
        snapshot: Snapshot | None = None,
    ) -> None:
        """Find the largest size of `body` that fits on every rank with the headroom, and keep it for the phase."""
        hook = pl_module._current_fx_name
        uncut = snapshot is not None and self.policy.may_not_cut(pl_module)
        fits = largest_that_fits(
            body,
            rows,
            module=pl_module,
            headroom=self.headroom,
            agree=self.policy.agree_soon or self.policy.agree,
            device=pl_module.device,
            settle=self.policy.settle,
            snapshot=snapshot,
            whole=bool(uncut),
        )
        pl_module._current_fx_name = hook
        if uncut and fits == 0:
            rank_zero_warn(
                f"OOMGuard: a batch of {rows} rows does not fit with {self.headroom:.0%} of the memory left free, and "
                f"it is not cut, since `{uncut[0]}` depends on the cut. Training goes on, close to the limit. "
                "Use smaller batches, or accept the difference with `on_batch_dependent='warn'`."
            )
        elif fits is not None:
            self.policy.sizes[phase] = min(fits, self.policy.sizes.get(phase, fits))
            rank_zero_info(f"OOMGuard: {phase} fits {fits} of {rows} rows at once with {self.headroom:.0%} headroom.")

    # Steps that are not automatic optimization

    def _manual_step(self, trainer: Trainer, pl_module: LightningModule) -> Callable[..., Any]:
        step = pl_module.training_step

        def guarded(*args: Any, **kwargs: Any) -> Any:
            scaler = getattr(trainer.precision_plugin, "scaler", None)  # its scale cannot be put back
            if trainer.world_size > 1 or not self.policy.recover or scaler is not None:
                return step(*args, **kwargs)
            self._step_undo = undo = StepUndo(trainer, pl_module, expected=self._manual_steps)
            recorder = LogRecorder(pl_module)

            def body(_: int) -> Any:
                recorder.clear()
                return step(*args, **kwargs)

            try:
                with recorder:
                    output = self.policy.run(
                        "train", 1, body, module=pl_module, undo=undo.restore, uncut=_UNCUT, local=True
                    )
            finally:
                self._step_undo = None
            recorder.replay()
            self._manual_steps = max(self._manual_steps or 0, undo.steps)
            return output

        return guarded

    # Checkpoint

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the learned sizes and counts."""
        return self.policy.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back the learned sizes and counts."""
        self.policy.load_state_dict(state_dict)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
