"""Undoing a `training_step` of manual optimization that knows nothing of being undone."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn, optim

from lit_ppo.memory.report import memory_report
from lit_ppo.memory.undo import OutOfMemoryReport


class StepUndo:
    """What one `training_step` changes besides buffers and random states, to be put back.

    Weights and optimizer state that a step overwrites are copied to the host before it, except before the last step of
    a `training_step` in which all optimizers step, after which little can fail.

    Args:
        trainer: Its progress, schedulers and the options of its optimizers are put back.
        module: Its gradients and `requires_grad` flags are put back.
        expected: Optimizer steps that a `training_step` makes, as seen so far; None: not known.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, expected: int | None) -> None:
        self.steps = 0
        self._module = module
        self._expected = expected
        self._flags = [(p, p.requires_grad) for p in module.parameters()]
        self._gradients = [(p, weakref.ref(p.grad), p.grad._version) for p, _ in self._flags if p.grad is not None]
        self._progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        self._progress_state = copy.deepcopy(self._progress.state_dict())
        self._schedulers = [
            (c.scheduler, copy.deepcopy(c.scheduler.state_dict())) for c in trainer.lr_scheduler_configs
        ]
        self._options = [
            (g, {k: _to_host(v) for k, v in g.items() if k != "params"})
            for o in trainer.optimizers
            for g in o.param_groups
        ]
        self._copies: dict[int, tuple[optim.Optimizer, list[tuple[Tensor, Tensor, dict[str, Any]]]]] = {}
        self._optimizers = {id(o) for o in trainer.optimizers}
        self._stepped: set[int] = set()
        self._missed = False

    @torch.no_grad()
    def before_step(self, optimizer: optim.Optimizer) -> None:
        """Copy what the step of `optimizer` will overwrite, unless it was copied already or this is the last step."""
        self.steps += 1
        self._stepped.add(id(optimizer))
        # an optimizer that has not stepped may be one that steps every few batches: then this step is not the last
        if self._expected is not None and self.steps >= self._expected and self._stepped >= self._optimizers:
            self._missed = self._missed or id(optimizer) not in self._copies
            return
        if id(optimizer) in self._copies:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._copies[id(optimizer)] = (
            optimizer,
            [(p, _to_host(p), {k: _to_host(v) for k, v in optimizer.state.get(p, {}).items()}) for p in parameters],
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back.

        Raises:
            OutOfMemoryReport: The last optimizer step is done, or gradients of an earlier step were added to.
        """
        if self._missed:
            self._give_up("The last optimizer step of this `training_step` may be done already.")
        for optimizer, copies in self._copies.values():
            for parameter, value, state in copies:
                parameter.copy_(value)
                for key, kept in state.items():
                    now = optimizer.state[parameter].get(key)
                    if isinstance(now, Tensor) and isinstance(kept, Tensor):
                        now.copy_(kept)
                    else:
                        optimizer.state[parameter][key] = kept
                for key in set(optimizer.state.get(parameter, {})) - set(state):
                    del optimizer.state[parameter][key]
                if not state:
                    optimizer.state.pop(parameter, None)
        self._copies.clear()
        kept_gradients = {}
        for parameter, reference, version in self._gradients:
            gradient = reference()
            if gradient is not None and gradient is parameter.grad:
                if gradient._version != version:
                    self._give_up("It added to gradients of an earlier `training_step`, which are lost.")
                kept_gradients[parameter] = gradient
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)
            parameter.grad = kept_gradients.get(parameter)
        self._module._param_requires_grad_state = {}
        self._progress.load_state_dict(self._progress_state)
        for scheduler, saved in self._schedulers:
            scheduler.load_state_dict(copy.deepcopy(saved))
        for group, options in self._options:  # a scheduler's step changes the learning rate
            for key, kept in options.items():
                if isinstance(group[key], Tensor):
                    group[key].copy_(kept)
                else:
                    group[key] = kept
        self.steps = 0
        self._stepped.clear()

    def _give_up(self, reason: str) -> None:
        raise OutOfMemoryReport(
            memory_report(self._module, phase="training_step", reason=f"Cannot be undone: {reason}")
        )


def _to_host(value: Any) -> Any:
    """Copy a tensor to host memory; other values are immutable."""
    return value.detach().to("cpu", copy=True) if isinstance(value, (Tensor, nn.Parameter)) else value
