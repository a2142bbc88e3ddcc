"""Quantized frozen modules: bitsandbytes layers in place of linear ones, in models of any kind."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import BitsandbytesPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from typing_extensions import override

from lit_ppo.callbacks._bitsandbytes import (
    MODES,
    SKIP,
    QuantizationReport,
    fingerprint,
    keep_out_of_checkpoints,
    linear_layers,
    loading_config,
    prepare,
    quantize_,
    quantized_layers,
    report_loaded,
)
from lit_ppo.callbacks._common import (
    as_list,
    check_flags,
    clean_name,
    log_metrics,
    matches,
    nearest,
    outermost,
)
from lit_ppo.hooks import after_configure_model, withdraw


class QuantizeModules(Callback):
    r"""Keep frozen submodules in 4 or 8 bits: a teacher, a perceptual loss, a reward model.

    The linear layers of each module are replaced by those of bitsandbytes, once, when all layers exist and before the
    strategy wraps or moves anything. It stays usable on the CPU and on CUDA, gives gradients to its inputs, and stays
    quantized after the fit. The bytes freed and the error are logged.

    What is quantized stays out of checkpoints (its layers could not be loaded again): on resume it comes from where
    it came from before, and a warning says so if its weights differ from those that the run started with. Loading
    such a checkpoint without the callback needs ``strict=False``. FSDP leaves the module whole on every rank.

    Models that the LightningModule loads itself, and whose loading it opens through ``role_load_kwargs`` (a dict of
    keyword arguments for ``from_pretrained`` by role), are quantized while they are loaded: the whole model is never
    in memory at full precision, and the error cannot be measured.

    Args:
        modules: What to quantize: names of submodules, globs on them, of modules held as plain attributes, or of roles
            (a dict of modules called ``roles``, if the LightningModule has one).
        mode: ``"nf4"``, ``"fp4"`` or ``"int8"`` (LLM.int8).
        double_quant: In 4 bits, quantize the blocks' constants too (0.4 bits a parameter less).
        skip: Names of submodules to leave at full precision; None: heads and adapters (``score``, ``classifier``,
            ``lm_head``, ``head``, ``v_head``, ``value_head``, ``lora_A``, ``lora_B``); an empty list quantizes all. A
            weight shared with another module (a tied head) is always left.
        compute_dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"`` for 4-bit layers; None: the dtype of their input
            (while loading: bfloat16 on CUDA, else float32).
        while_loading: Use ``role_load_kwargs`` where the LightningModule has it.
        probe: Measure the error: of each layer's output on random inputs, and for transformers models of the whole
            output on random tokens.

    Attributes:
        reports: What was done, by name: layers, bytes before and after, errors.

    Raises:
        ValueError: A name that matches nothing, a module with trainable parameters or without linear layers, an
            unknown mode or dtype, or a plugin or strategy that cannot hold it.
        ModuleNotFoundError: bitsandbytes is missing.

    Logs, once, at the start of a fit: ``quantization/<name>/freed_gib``, ``quantization/<name>/layer_error``,
    ``quantization/<name>/output_error``.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> from lit_ppo.callbacks import QuantizeModules
        >>> trainer = Trainer(callbacks=[QuantizeModules("teacher", mode="int8")], logger=False)
    """

    def __init__(
        self,
        modules: str | list[str],
        mode: str = "nf4",
        double_quant: bool = True,
        skip: list[str] | None = None,
        compute_dtype: str | None = None,
        while_loading: bool = True,
        probe: bool = True,
    ) -> None:
        super().__init__()
        me = type(self).__name__
        if mode not in MODES:
            raise ValueError(f"`{me}(mode={mode!r})` must be one of {', '.join(map(repr, MODES))}.")
        if compute_dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(
                f"`{me}(compute_dtype={compute_dtype!r})` must be 'float32', 'bfloat16', 'float16' or None."
            )
        if mode == "int8" and compute_dtype is not None:
            raise ValueError(f"`{me}(compute_dtype={compute_dtype!r})` is for 4-bit layers: leave it out with 'int8'.")
        check_flags(me, double_quant=double_quant, while_loading=while_loading, probe=probe)
        self.modules = as_list(me, "modules", modules)
        self.mode = mode
        self.double_quant = double_quant
        self.skip = list(SKIP) if skip is None else [] if skip == [] else as_list(me, "skip", skip)
        self.compute_dtype = None if compute_dtype is None else getattr(torch, compute_dtype)
        self.while_loading = while_loading
        self.probe = probe
        self.reports: dict[str, QuantizationReport] = {}
        self._fingerprints: dict[str, int] = {}
        self._expected: dict[str, int] = {}
        self._undo: list[Any] = []
        self._late: list[str] = []
        self._quantize_role: Any = None

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(modules=self.modules)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"fingerprints": dict(self._fingerprints)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._expected = dict(state_dict.get("fingerprints", {}))

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ask for the quantization; it happens as soon as all layers exist."""
        me = type(self).__name__
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ModuleNotFoundError(f"`{me}` needs bitsandbytes: `pip install 'lit-ppo[quantize]'`.")
        if isinstance(trainer.precision_plugin, BitsandbytesPrecision):
            raise ValueError(f"`{me}` and `BitsandbytesPrecision` both replace linear layers. Remove one of the two.")
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                f"`{me}` cannot run under DeepSpeed, which flattens every parameter. Use another strategy."
            )
        device = trainer.strategy.root_device
        quantize = partial(self._quantize, device=device if device.type == "cuda" else None)
        transforms = getattr(pl_module, "role_transforms", None)
        if transforms is not None:

            def transform(role: str, module: nn.Module) -> nn.Module:
                return quantize(role, module) if any(_means(role, p) for p in self.modules) else module

            transforms.append(transform)
            self._undo.append(partial(transforms.remove, transform))
        options = getattr(pl_module, "role_load_kwargs", None)
        if options is not None and self.while_loading:
            for role in self.modules:
                before = dict(options.get(role, {}))
                # By itself transformers would take the first GPU, even for a run on the CPU.
                options[role] = {
                    "device_map": {"": device},
                    **before,
                    "quantization_config": loading_config(
                        self.mode, device, self.double_quant, self.skip, self.compute_dtype
                    ),
                }
                self._undo.append(partial(options.__setitem__, role, before))
        self._quantize_role = quantize

        def act() -> None:
            # A LightningModule with roles of its own may load some of them later.
            self._late = self._apply(trainer, pl_module, self.modules, required=transforms is None)

        after_configure_model(trainer, pl_module, self, act)

    def _apply_late(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._late = self._apply(trainer, pl_module, self._late, required=True)

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Quantize what was loaded late."""
        self._apply_late(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Quantize what was loaded late."""
        self._apply_late(trainer, pl_module)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Quantize what was loaded late."""
        self._apply_late(trainer, pl_module)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Quantize what was loaded late."""
        self._apply_late(trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the reports, and compare the weights with those that a resumed run had."""
        self._apply_late(trainer, pl_module)
        for name, report in self.reports.items():
            values = {
                "freed_gib": report.bytes_freed / 2**30,
                "layer_error": report.layer_error,
                "output_error": report.output_error,
            }
            log_metrics(trainer, {f"quantization/{name}/{k}": v for k, v in values.items() if v is not None})
        for name, expected in self._expected.items():
            if self._fingerprints.get(name, expected) != expected:
                rank_zero_warn(
                    f"The quantized weights of `{name}` are not those that this checkpoint was trained with: they are "
                    "not in checkpoints, so load them from the same source and quantize them on the same kind of "
                    "device as before."
                )
        self._expected = {}

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Withdraw what was asked of the LightningModule; what is quantized stays so."""
        self._withdraw(pl_module)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Withdraw what was asked of the LightningModule."""
        self._withdraw(pl_module)

    def _withdraw(self, pl_module: LightningModule) -> None:
        withdraw(pl_module)
        while self._undo:
            self._undo.pop()()

    # ------------------------------------------------------------------------------------------------------ the work

    def _apply(self, trainer: Trainer, pl_module: LightningModule, patterns: list[str], *, required: bool) -> list[str]:
        """Quantize what `patterns` mean; return those that mean nothing yet, unless it is `required`."""
        targets, missing = self._targets(pl_module, patterns, required=required)
        for name, module in targets.items():
            self._refuse_trainable(pl_module, name, module)
            registered = module in set(pl_module.modules())
            is_role = name in _roles(pl_module)
            if registered and not is_role:
                self._refuse_averaging(trainer, name)
            if name not in self.reports or not quantized_layers(module):
                new = self._quantize_role(name, module)
                if new is not module:
                    _replace(pl_module, name, new)
                    module = new
            self._fingerprints[name] = fingerprint(module)
            if registered and not is_role:
                keep_out_of_checkpoints(pl_module, name, module)
            if registered and isinstance(trainer.strategy, FSDPStrategy):
                ignored = [*(trainer.strategy.kwargs.get("ignored_modules") or ()), module]
                trainer.strategy.kwargs["ignored_modules"] = ignored
                module.to(trainer.strategy.root_device)
        return missing

    def _targets(
        self, pl_module: LightningModule, patterns: list[str], *, required: bool
    ) -> tuple[dict[str, nn.Module], list[str]]:
        """The modules to quantize, by the name they are known by; and the patterns that match none."""
        known: dict[str, nn.Module] = _roles(pl_module)
        held = {n: m for n, m in vars(pl_module).items() if isinstance(m, nn.Module)}  # not registered
        submodules = {clean_name(n): m for n, m in pl_module.named_modules() if n}
        found: dict[str, nn.Module] = {}
        missing: list[str] = []
        for pattern in patterns:
            pools = ({n: m for n, m in pool.items() if _means(n, pattern)} for pool in (known, held, submodules))
            chosen = next((pool for pool in pools if pool), {})
            if not chosen and not required:
                missing.append(pattern)
            elif not chosen:
                names = {*known, *held, *submodules}
                raise ValueError(
                    f"`{type(self).__name__}(modules={pattern!r})` is no role, submodule or attribute of "
                    f"{type(pl_module).__name__}.{nearest(pattern, names)}"
                )
            found |= chosen
        return outermost(found), missing

    def _refuse_trainable(self, pl_module: LightningModule, name: str, module: nn.Module) -> None:
        adapters = name in _roles(pl_module)  # of a role: its adapters and heads may train on a quantized base
        trained = [
            n
            for n, p in module.named_parameters()
            if p.requires_grad and not (adapters and any(f".{s}." in f".{n}." for s in self.skip))
        ]
        if trained:
            raise ValueError(
                f"`{type(self).__name__}`: `{name}` has {len(trained)} trainable parameters (`{trained[0]}`, ...), and "
                f"quantized weights cannot train. Freeze it: `{name}.requires_grad_(False)`, or add "
                f"`FreezeParameters({name!r})`."
            )

    def _refuse_averaging(self, trainer: Trainer, name: str) -> None:
        kinds = (WeightAveraging, StochasticWeightAveraging)
        averaging = [type(c).__name__ for c in trainer.callbacks if isinstance(c, kinds)]  # type: ignore[attr-defined]
        if averaging and trainer.state.fn == "fit":
            raise ValueError(
                f"`{type(self).__name__}`: `{averaging[0]}` averages every registered parameter, and the average of "
                f"packed weights of `{name}` means nothing. Hold the module without registering it "
                f"(`object.__setattr__(self, {name!r}, module)`, moved to the device by yourself), or leave one of the "
                "two callbacks out."
            )

    def _quantize(self, name: str, module: nn.Module, *, device: torch.device | None) -> nn.Module:
        if quantized_layers(module):
            prepare(module)
            self.reports[name] = report_loaded(module)
        else:
            layers = linear_layers(module, self.skip)
            if not layers:
                raise ValueError(
                    f"`{type(self).__name__}`: `{name}` ({type(module).__name__}) has no linear layer to quantize "
                    f"(skipped: {', '.join(self.skip) or 'none'})."
                )
            if any(p.is_meta for p in module.parameters()):
                raise ValueError(
                    f"`{type(self).__name__}`: `{name}` has no weights yet (it is on the meta device). Load them in "
                    "`__init__`, `setup` or `configure_model`."
                )
            module, self.reports[name] = quantize_(
                module,
                layers,
                mode=self.mode,
                double_quant=self.double_quant,
                compute_dtype=self.compute_dtype,
                device=device,
                probe=self.probe,
            )
        rank_zero_info(f"{type(self).__name__}: {name} in {self.mode}: {self.reports[name]}.")
        return module


class QuantizeRewardModel(QuantizeModules):
    r"""Keep a frozen reward model in 4 bits (NF4, double quantization), or in 8: `QuantizeModules` with its defaults.

    Args:
        modules: The role, submodule or attribute that is the reward model.
        mode, double_quant, skip, compute_dtype, while_loading, probe: As in `QuantizeModules`; by default the head
            (``score``, ``classifier``, ``lm_head``) stays at full precision.

    Raises:
        ValueError: As `QuantizeModules`.
        ModuleNotFoundError: bitsandbytes is missing.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> from lit_ppo.callbacks import QuantizeRewardModel
        >>> trainer = Trainer(callbacks=[QuantizeRewardModel()], logger=False)
        >>> trainer = Trainer(callbacks=[QuantizeRewardModel("reward_model", mode="int8")], logger=False)
    """

    def __init__(
        self,
        modules: str | list[str] = "reward",
        mode: str = "nf4",
        double_quant: bool = True,
        skip: list[str] | None = None,
        compute_dtype: str | None = None,
        while_loading: bool = True,
        probe: bool = True,
    ) -> None:
        super().__init__(modules, mode, double_quant, skip, compute_dtype, while_loading, probe)


def _roles(pl_module: LightningModule) -> dict[str, nn.Module]:
    roles = getattr(pl_module, "roles", None)
    return dict(roles) if isinstance(roles, Mapping) else {}


def _means(name: str, pattern: str) -> bool:
    return name == pattern or ("*" in pattern and matches(name, pattern))


def _replace(pl_module: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    owner = pl_module.get_submodule(parent)
    if attribute in vars(owner):  # held without being registered
        object.__setattr__(owner, attribute, new)
    else:
        setattr(owner, attribute, new)
