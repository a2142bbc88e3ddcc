"""Gradient checkpointing for any model: keep a block's inputs, recompute its activations in the backward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lit_ppo.callbacks._common import (
    as_list,
    clean_name,
    log_metrics,
    matches,
    nearest,
    outermost,
    prefixes,
    warn_of_finders,
)
from lit_ppo.callbacks._recompute import Engine

_METRIC = "memory/activations_saved_gib"
_MARK = "_lit_ppo_checkpointed"


class GradientCheckpointing(Callback):
    r"""Trade compute for memory: recompute activations in the backward instead of keeping them.

    Transformers models are switched on through their own switch (non-reentrant); any other module through
    :func:`torch.utils.checkpoint.checkpoint` around its ``forward``. Names, classes, hooks and checkpoints of the
    module stay as they were. Gradients, random numbers (dropout) and the running statistics of normalisation layers
    are those of a run without it.

    It acts only where a backward will follow: while training, with gradients enabled. Validation, test, predict
    and ``generate`` run as if it were not there. A LightningModule that has ``phase_listeners`` (a list of functions
    called with the name of the phase that starts, or None) gets it in its phase ``"update"`` alone.

    The bytes that would have been kept are counted in the first training batch (the most that a backward found, in a
    trial of `OOMGuard` too) and sent to the loggers once.

    Args:
        modules: What to checkpoint: class names (``"Block"``) or globs on submodule names (``"encoder.layers.*"``).
            A match inside another match is not checkpointed a second time. The name or class of a transformers model
            stands for its layers. None: the layers of every transformers model in the LightningModule.
        every_n: Checkpoint the first of every `n` modules with the same parent; 2 keeps half of the activations and
            recomputes half.

    Attributes:
        bytes_saved: Activation bytes not kept, on this rank; None before the first training batch has ended, and where
            all that is checkpointed runs inside code compiled by torch.compile.

    Raises:
        ValueError: `every_n` no integer or below 1, an empty pattern, one that matches nothing, a module checkpointed
            already, or a strategy with a checkpointing policy of its own.

    Logs ``memory/activations_saved_gib``, once, for rank 0.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> from lit_ppo.callbacks import GradientCheckpointing
        >>> trainer = Trainer(callbacks=[GradientCheckpointing()], logger=False)  # transformers models
        >>> trainer = Trainer(callbacks=[GradientCheckpointing(modules="Block", every_n=2)], logger=False)
    """

    def __init__(self, modules: str | list[str] | None = None, every_n: int = 1) -> None:
        super().__init__()
        if type(every_n) is not int or every_n < 1:
            raise ValueError(
                f"`GradientCheckpointing(every_n={every_n!r})` must be an integer >= 1; 1 checkpoints every module."
            )
        self.modules = None if modules is None else as_list("GradientCheckpointing", "modules", modules)
        self.every_n = every_n
        self.bytes_saved: int | None = None
        self._engine = Engine(None, _never)
        self._updating = False
        self._undo: list[Callable[[], None]] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy that checkpoints by itself."""
        warn_of_finders(trainer, "GradientCheckpointing", "what they find is for a run without it")
        if getattr(trainer.strategy, "_activation_checkpointing_kwargs", None):
            raise ValueError(
                "`GradientCheckpointing` and the `activation_checkpointing_policy` of "
                f"{type(trainer.strategy).__name__} would checkpoint the same layers twice. Remove one of the two."
            )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Switch it on: here all layers exist, sharded or not."""
        self._restore()
        self.bytes_saved = None
        listeners = getattr(pl_module, "phase_listeners", None)
        if listeners is not None:
            listeners.append(self._on_phase)
            self._undo.append(lambda: listeners.remove(self._on_phase))
        self._updating = False
        self._engine = Engine(pl_module, lambda: trainer.training if listeners is None else self._updating)
        plain, switched = self._select(pl_module)
        for module in plain:
            self._wrap(module)
        for model, layers in switched:
            self._switch_on(pl_module, model, layers)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count from here: what came before was a trial of another callback."""
        if self._engine.measuring:
            self._engine.calls = self._engine.peak = 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After the first batch, report what was saved."""
        engine = self._engine
        if not engine.measuring:
            return
        engine.measuring = False
        if engine.compiled and not engine.calls:
            return  # what compiled code keeps is not seen from here
        self.bytes_saved = engine.peak
        if not engine.calls:
            rank_zero_warn(
                "`GradientCheckpointing` is on, but nothing was recomputed in the first training step: no forward of "
                "the chosen modules ran with gradients, or a transformers model is in eval mode, where its own switch "
                "does nothing (`from_pretrained` returns it so). Call `.train()` on it, or remove the callback."
            )
            return
        saved = engine.peak / 2**30
        rank_zero_info(f"GradientCheckpointing: {engine.peak / 2**20:,.1f} MiB of activations not kept.")
        log_metrics(trainer, {_METRIC: saved})

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the modules as they were found."""
        self._restore()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the modules as they were found."""
        self._restore()

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._engine.module, self._engine.wanted = None, _never  # they hold the model and the trainer

    def _on_phase(self, phase: str | None) -> None:
        self._updating = phase == "update"

    # ------------------------------------------------------------------------------------------------- what is chosen

    def _select(self, pl_module: LightningModule) -> tuple[list[nn.Module], list[tuple[nn.Module, list[nn.Module]]]]:
        """Return the plain modules, and the transformers models with the layers to checkpoint in each."""
        named = {clean_name(n): m for n, m in pl_module.named_modules() if n and not isinstance(m, CheckpointWrapper)}
        models = outermost({n: m for n, m in named.items() if _has_switch(m)})
        switched_by_model = {m for model in models.values() for m in model.modules()}
        if self.modules is None:
            chosen = dict(models)
            if not chosen:
                raise ValueError(
                    "`GradientCheckpointing()` checkpoints the layers of transformers models, and "
                    f"{type(pl_module).__name__} has none with that switch. Name what to checkpoint, by class or by "
                    f"submodule: `GradientCheckpointing(modules=...)`.{nearest('', _repeated(pl_module))}"
                )
        else:
            chosen = {}
            for pattern in self.modules:
                found = {n: m for n, m in named.items() if pattern == type(m).__name__ or _glob(n, pattern)}
                if not found:
                    known = prefixes(named) | {type(m).__name__ for m in named.values()}
                    raise ValueError(
                        f"`GradientCheckpointing(modules={pattern!r})` is neither the class nor the name of a "
                        f"submodule of {type(pl_module).__name__}.{nearest(pattern, known)}"
                    )
                chosen.update(found)
        chosen = outermost(chosen)
        plain: dict[str, nn.Module] = {}
        layers: dict[str, nn.Module] = {}
        for name, module in chosen.items():
            unwrap: Any = getattr(module, "get_base_model", None)  # PEFT's wrapper
            base = module if unwrap is None else unwrap()
            inside = switched_by_model & (set(base.modules()) if _has_switch(base) else {module})
            found = {n: m for n, m in named.items() if m in inside and _is_layer(m)}
            if _has_switch(base) and not found:
                raise ValueError(
                    f"`GradientCheckpointing` found no layer that carries the switch of `{name}` "
                    f"({type(base).__name__}). Name its blocks: `modules=...`.{nearest('', _repeated(base))}"
                )
            _refuse_doubling(pl_module, name, module, plain=not found)
            if found:
                layers |= found
            else:
                plain[name] = module
        picked = set(_every_n(layers, self.every_n).values())
        switched = [(model, [m for m in model.modules() if m in picked]) for model in models.values()]
        return list(_every_n(plain, self.every_n).values()), [(m, found) for m, found in switched if found]

    # --------------------------------------------------------------------------------------------- how it is applied

    def _wrap(self, module: nn.Module) -> None:
        """Replace the instance's `forward`, inside its hooks: sharding hooks must not run again in a recomputation."""
        own = vars(module).get("forward")
        object.__setattr__(module, _MARK, (self._engine, module.forward))
        object.__setattr__(module, "forward", MethodType(_forward, module))

        def undo() -> None:
            for name in ("forward", _MARK):
                vars(module).pop(name)
            if own is not None:
                object.__setattr__(module, "forward", own)

        self._undo.append(undo)

    def _switch_on(self, pl_module: LightningModule, model: Any, layers: list[nn.Module]) -> None:
        flagged = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
        for m in flagged:
            before = {k: vars(m)[k] for k in ("gradient_checkpointing", "_gradient_checkpointing_func") if k in vars(m)}
            self._undo.append(partial(_put_back, m, before))
        hooks_before = _embedding_hooks(model)
        # The old name warns where the new one exists.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        if _embedding_hooks(model) and not hooks_before:
            # Non-reentrant checkpointing needs no input that requires gradients; with them, the backward would run
            # through frozen layers for nothing.
            model.disable_input_require_grads()
        run: Any = self._engine.run
        hook = _nearest_hook(pl_module, model)
        run = run if hook is None else hook(run)
        switch = _Switch(self._engine, [m for m in flagged if not _is_layer(m) or m in layers])
        for m in flagged:
            m._gradient_checkpointing_func = run
            m.gradient_checkpointing = False  # until a forward with gradients
        for m in (model, *layers):
            object.__setattr__(m, _MARK, True)
            self._undo.append(partial(vars(m).pop, _MARK))
        for m in model.modules():
            if _has_switch(m):
                handle: RemovableHandle = m.register_forward_pre_hook(switch)
                self._undo.append(handle.remove)


@dataclass
class _Switch:
    """Forward pre-hook of a transformers model: its flags follow what is being done with it."""

    engine: Engine
    modules: list[Any]
    on: bool = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Set the flags before the forward reads them; without gradients (`generate`) the cache must work."""
        on = self.engine.active
        if on != self.on:
            self.on = on
            for m in self.modules:
                m.gradient_checkpointing = on


def _never() -> bool:
    return False


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    engine, forward = vars(self)[_MARK]
    if engine.active:
        return engine.run(forward, *args, **kwargs)
    return forward(*args, **kwargs)


def _glob(name: str, pattern: str) -> bool:
    return name == pattern or ("*" in pattern and matches(name, pattern))


def _has_switch(module: Any) -> bool:
    transformers = sys.modules.get("transformers")  # not imported: no such model
    return (
        transformers is not None
        and isinstance(module, transformers.PreTrainedModel)
        and bool(module.supports_gradient_checkpointing)
    )


def _is_layer(module: Any) -> bool:
    return hasattr(module, "gradient_checkpointing") and not _has_switch(module) and not hasattr(module, "config_class")


def _every_n(named: dict[str, nn.Module], n: int) -> dict[str, nn.Module]:
    count: dict[str, int] = {}
    picked = {}
    for name, module in named.items():
        parent = name.rpartition(".")[0]
        if count.get(parent, 0) % n == 0:
            picked[name] = module
        count[parent] = count.get(parent, 0) + 1
    return picked


def _refuse_doubling(pl_module: nn.Module, name: str, module: nn.Module, *, plain: bool) -> None:
    around = [m for n, m in pl_module.named_modules() if n and f"{name}.".startswith(f"{clean_name(n)}.")]
    marked = any(isinstance(m, CheckpointWrapper) or _MARK in vars(m) for m in (*around, *module.modules()))
    if marked or (plain and any(vars(m).get("gradient_checkpointing") for m in (*around, *module.modules()))):
        raise ValueError(
            f"`{name}` ({type(module).__name__}) is checkpointed already: it, something around it or something inside "
            "it. Doubling would recompute it twice, so leave one of the two out. (Several parts of one transformers "
            "model, which has one switch, go to one callback: `GradientCheckpointing(modules=[...])`.)"
        )


def _nearest_hook(pl_module: nn.Module, model: nn.Module) -> Any:
    """The `checkpoint_wrapper_hook` of the innermost module around a model, which adapts a checkpoint function."""
    name = next(n for n, m in pl_module.named_modules() if m is model)
    parts = name.split(".")
    for i in range(len(parts), -1, -1):
        hook = getattr(pl_module.get_submodule(".".join(parts[:i])), "checkpoint_wrapper_hook", None)
        if hook is not None:
            return hook
    return None


def _embedding_hooks(model: Any) -> bool:
    return bool(getattr(model, "_require_grads_hooks", None) or getattr(model, "_require_grads_hook", None))


def _put_back(module: nn.Module, before: dict[str, Any]) -> None:
    for name in ("gradient_checkpointing", "_gradient_checkpointing_func"):
        vars(module).pop(name, None)
    for name, value in before.items():
        setattr(module, name, value)


def _repeated(pl_module: nn.Module) -> set[str]:
    """Class names that occur twice or more in one list of layers: what one would want to checkpoint."""
    lists = [m for m in pl_module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    names = [[type(child).__name__ for child in m if list(child.parameters())] for m in lists]
    return {n for group in names for n in group if group.count(n) > 1}
