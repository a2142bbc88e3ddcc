"""Models and optimizer state that wait in host memory while other phases of a training step need the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from typing_extensions import override

from lit_ppo.callbacks._common import as_list, check_flags, log_metrics, nearest
from lit_ppo.callbacks._paging import Unit, is_sharded, storages_of

_IN_EVERY_PHASE = "actor"


class OffloadRoles(Callback):
    r"""Keep models in pinned host memory in the phases that do not use them.

    For a LightningModule whose training step has phases and whose models are roles: it has ``phase_listeners`` (a list
    of functions called with the name of the phase that starts, or None) and ``roles`` (a dict of modules). In which
    phases a role computes is learned: the first time, its forward waits for the weights; from then on they are on their
    way when such a phase starts, on a stream of their own, while other roles compute. When a phase starts that does not
    use them, their device memory is given back. Weights that do not train are never copied back: their host copy stays
    valid. Parameters remain the same objects on the same device: only their memory comes and goes.

    Under FSDP (``strategy="fsdp"``, ``ModelParallelStrategy``) it is this rank's shards that page. There the role
    ``"actor"`` may be named too: its shards wait in host memory while the whole of its weights is at hand, gathered for
    a rollout. The module says so by ``gather_listeners`` (a list of functions called with the model, and True once its
    whole weights are there, False before they are gathered and when they are given back).

    Checkpoints, optimizers and results are those of a run without it. At the end of the fit everything is back.

    Args:
        roles: Names of roles. None: every role without trainable weights, reward models included. The role ``"actor"``
            computes in every phase: it is refused where its weights are not gathered from shards.
        optimizer: Also the state of the optimizers: on the device only in the phases in which they step. (LeanAdamW's
            own ``paged`` goes further: on the device only within the step, piece by piece.)

    Attributes:
        bytes: Bytes that each unit gives back, by name.

    Raises:
        ValueError: No phases or roles to go by, an unknown role, one that cannot be paged (kept in host memory by FSDP
            itself, or sharing its weights with a role that stays), or nothing to do.
        RuntimeError: Paging frees no device memory: something else holds it.

    Logs, once, after the first training batch: ``offload/gib`` (host copies), ``offload/moved_gib`` and
    ``offload/seconds`` (copied in that batch, and how long the copies took beside other work).

    Example::

        >>> from lightning.pytorch import Trainer
        >>> from lit_ppo.callbacks import OffloadRoles
        >>> trainer = Trainer(callbacks=[OffloadRoles()], logger=False)  # reference and reward models
        >>> trainer = Trainer(callbacks=[OffloadRoles(["reference", "critic"], optimizer=True)], logger=False)
    """

    def __init__(self, roles: str | list[str] | None = None, optimizer: bool = False) -> None:
        super().__init__()
        check_flags("OffloadRoles", optimizer=optimizer)
        self.roles = None if roles is None else as_list("OffloadRoles", "roles", roles)
        self.optimizer = optimizer
        self.bytes: dict[str, int] = {}
        self._units: dict[str, Unit] = {}
        self._names: dict[int, str] = {}
        self._used: dict[str, set[tuple[bool, str | None]]] = {}
        self._now: tuple[bool, str | None] = (False, None)
        self._checked: set[str] = set()
        self._reported = False
        self._undo: list[Callable[[], Any]] = []
        self._trainer: Any = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that there is something to go by."""
        for name in ("phase_listeners", "roles"):
            if not hasattr(pl_module, name):
                raise ValueError(
                    f"`OffloadRoles` goes by a module's phases and roles, and {type(pl_module).__name__} has no "
                    f"`{name}`. See OffloadRoles for what these are."
                )
        gathers = isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)
        if _IN_EVERY_PHASE in (self.roles or ()) and not (gathers and hasattr(pl_module, "gather_listeners")):
            raise ValueError(
                f"`OffloadRoles(roles={self.roles!r})`: the actor samples, is scored and trains: it computes in every "
                "phase. Leave it out; only where a rollout gathers its weights from shards can these leave."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the host copies; here every model is loaded and placed."""
        self._restore()
        self._trainer, self._reported = trainer, False
        for name, module in self._chosen(pl_module).items():
            self._watch_module(name, module)
        if self.optimizer:
            for number, optimizer in enumerate(trainer.optimizers):
                self._watch_optimizer(f"optimizer {number}" if number else "optimizer", optimizer)
        for names, listener in (("phase_listeners", self._on_phase), ("gather_listeners", self._on_gather)):
            listeners: Any = getattr(pl_module, names, [])
            listeners.append(listener)
            self._undo.append(partial(listeners.remove, listener))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After the first batch, say what was moved."""
        if self._reported:
            return
        self._reported = True
        held = sum(unit.bytes for unit in self._units.values())
        moved, seconds = (sum(x) for x in zip(*(unit.measured() for unit in self._units.values()), strict=True))
        values = {"gib": held / 2**30, "moved_gib": moved / 2**30, "seconds": seconds}
        log_metrics(trainer, {f"offload/{key}": value for key, value in values.items()})
        each = ", ".join(f"{name} {unit.bytes / 2**30:.2f}" for name, unit in self._units.items())
        rank_zero_info(
            f"OffloadRoles: GiB in host memory: {each}; {moved / 2**30:.2f} GiB moved in the first batch, "
            f"{seconds:.2f} s of copies."
        )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring everything back."""
        self._restore()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Bring everything back; onto the host, if the device has no room."""
        self._restore()

    # -------------------------------------------------------------------------------------------------------- phases

    def _on_phase(self, phase: str | None) -> None:
        if phase is None:
            return
        self._now = (bool(self._trainer.validating or self._trainer.sanity_checking), phase)
        idle = (name for name in self._units if self._now not in self._used[name] and name != _IN_EVERY_PHASE)
        leaving = {name: self._units[name] for name in idle}
        for name, unit in leaving.items():
            self._page_out(name, unit)
        for name, unit in self._units.items():
            if name not in leaving:
                unit.fetch()

    def _on_gather(self, model: nn.Module, whole: bool) -> None:
        """Shards are needed before they are gathered and after; not by whoever has the whole."""
        name = self._names.get(id(model))
        if name is None:
            return
        if whole:
            if name == _IN_EVERY_PHASE:
                self._page_out(name, self._units[name], collect=False)
            return
        self._need(name)
        self._units[name].collect()

    def _page_out(self, name: str, unit: Unit, collect: bool = True) -> None:
        freed = unit.leave(collect)
        self.bytes[name] = unit.bytes
        if not freed and not unit.bytes:
            return  # an optimizer before its first step
        if freed is None or name in self._checked:
            return
        self._checked.add(name)
        if freed < 0.9 * unit.bytes:
            raise RuntimeError(
                f"`OffloadRoles` moved {unit.bytes / 2**20:,.0f} MiB of `{name}` to the host, and {freed / 2**20:,.0f} "
                "MiB of device memory came free. Does something else hold its weights, or allocate at the same time?"
            )

    def _need(self, name: str, *_: Any) -> None:
        """Called before a unit computes or steps."""
        self._used[name].add(self._now)
        self._units[name].wait()

    # ------------------------------------------------------------------------------------------------ what is watched

    def _chosen(self, pl_module: LightningModule) -> dict[str, nn.Module]:
        known = _roles(pl_module)
        if self.roles is None:
            frozen = {n: list(m.parameters()) for n, m in known.items()}
            frozen = {n: held for n, held in frozen.items() if not any(p.requires_grad for p in held)}
            chosen = {n: known[n] for n, held in frozen.items() if len({p.device for p in held}) < 2}  # not spread
            if not chosen and not self.optimizer:
                raise ValueError(
                    "`OffloadRoles()` has nothing to do: every role trains, or shares its weights with one that does. "
                    "Name roles (`roles=['critic']`), add `optimizer=True`, or leave the callback out."
                )
        else:
            for name in self.roles:
                if name not in known:
                    raise ValueError(f"`OffloadRoles(roles={name!r})` is no role.{nearest(name, known)}")
            chosen = {name: known[name] for name in self.roles}
        for name, module in chosen.items():
            sharded = is_sharded(module)
            if not sharded and len({p.device for p in module.parameters()}) > 1:
                raise ValueError(
                    f"`OffloadRoles`: `{name}` is spread over several devices (`device_map`), which is not paged. "
                    "Leave it out of `roles`."
                )
            if name == _IN_EVERY_PHASE and not sharded:
                raise ValueError(
                    f"`OffloadRoles(roles={self.roles!r})`: `{name}` is whole on each rank here, and computes in every "
                    "phase. Leave it out."
                )
            kept = {p.device.type for p in module.parameters()} - {pl_module.device.type}
            if sharded and kept:
                raise ValueError(
                    f"`OffloadRoles`: `{name}` waits on the {kept.pop()} already, by the strategy's own offload. Use "
                    "one of the two."
                )
            others = {n: m for n, m in known.items() if n not in chosen}
            mine = storages_of(module.parameters())
            for other, held in others.items():
                if mine.keys() & storages_of(held.parameters()).keys():
                    raise ValueError(f"`OffloadRoles`: `{name}` shares weights with `{other}`, which stays.")
        unique = {id(m): n for n, m in reversed(chosen.items())}  # roles that are views of one model page together
        return {n: chosen[n] for n in chosen if unique[id(chosen[n])] == n}

    def _watch_module(self, name: str, module: nn.Module) -> None:
        self._units[name] = Unit.of_shards(module) if name == _IN_EVERY_PHASE else Unit.of_module(module)
        self._used[name] = set()
        self._names[id(module)] = name
        need = partial(self._need, name)
        for part in module.modules():
            if part is module or next(part.children(), None) is not None:
                # not leaves: a hook on a head would have others take it for one that cannot be read directly
                self._undo.append(part.register_forward_pre_hook(need, prepend=True).remove)  # before FSDP's own
        back = module.register_state_dict_pre_hook(partial(_bring_back, self._units[name]))
        hooks: Any = module._state_dict_pre_hooks
        hooks.move_to_end(back.id, last=False)  # before FSDP1 gathers what is to be saved
        self._undo.append(back.remove)

    def _watch_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._units[name] = Unit.of_optimizer(optimizer)
        self._used[name] = set()
        need = partial(self._need, name)
        self._undo.append(optimizer.register_step_pre_hook(need).remove)
        back = partial(_bring_back, self._units[name])
        self._undo.append(optimizer.register_state_dict_pre_hook(back).remove)

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()
        for unit in self._units.values():
            unit.release()
        self._units, self._used, self._names, self._checked = {}, {}, {}, set()
        self._trainer = None


def _bring_back(unit: Unit, *_: Any) -> None:
    unit.wait()


def _roles(pl_module: LightningModule) -> dict[str, nn.Module]:
    roles: Any = pl_module.roles
    return dict(roles) if isinstance(roles, Mapping) else {}
