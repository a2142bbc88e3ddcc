"""From configuration to the roles: which models are loaded, and which are views of another's weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from lit_ppo.config import LAYOUTS, LoRAConfig, RoleConfig, choice, from_dict
from lit_ppo.roles.adapters import POLICY, VALUE, FrozenAdapter, add_adapters
from lit_ppo.roles.int8 import quantize_embeddings_
from lit_ppo.roles.loading import (
    critic_from,
    disable_dropout,
    empty_model,
    freeze,
    load_causal_lm,
    load_critic,
    resolve_dtype,
)
from lit_ppo.roles.model import RoleModel, RoleView
from lit_ppo.roles.names import trained_parameters
from lit_ppo.roles.quantized import check_frozen, check_quantize, loading_options, make_movable
from lit_ppo.roles.sources import check_architecture, first_line, model_config
from lit_ppo.roles.spread import check_map, home_of

SCORERS = ("critic", "reward")
"""Roles with a scalar head."""

Source = str | os.PathLike[str] | RoleConfig | dict[str, Any] | nn.Module | None


@dataclass
class RolePlan:
    """What will be loaded. Built and checked without touching a weight."""

    actor: RoleConfig | nn.Module
    critic: RoleConfig | nn.Module | None
    """None: built from the actor, or not needed."""
    reference: RoleConfig | nn.Module | None
    """None: a copy of the actor's start, its trunk with adapters off, or not needed."""
    layout: str
    lora: LoRAConfig | None
    has_critic: bool
    has_reference: bool
    config: Any
    """The actor's transformers configuration."""
    seed: int
    transforms: list[Callable[[str, nn.Module], nn.Module]] = field(default_factory=list)
    """Called with (role, model) right after each is created: freezing, quantizing, checkpointing."""
    load_kwargs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Extra arguments of `from_pretrained` by role, such as a quantization config."""
    empty: bool = False
    """Build on the meta device what comes from a source: another rank loads it."""
    true_dtype: torch.dtype | None = None
    """What `Trainer(precision="bf16-true")` and its like make of every trained weight; `auto` then means it."""
    frozen: list[FrozenAdapter] = field(default_factory=list)
    """Further adapters of the actor's trunk, which are not trained."""


@dataclass
class Roles:
    """The models of one run."""

    actor: RoleView
    critic: RoleView | None
    reference: RoleView | None

    def all(self) -> dict[str, RoleView]:
        """Return the roles that there are, by name."""
        views = {"actor": self.actor, "critic": self.critic, "reference": self.reference}
        return {role: view for role, view in views.items() if view is not None}

    def saved(self) -> dict[str, RoleView]:
        """Return those that are trained, and kept in checkpoints."""
        return {role: view for role, view in self.all().items() if role != "reference"}

    def trained(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Return the named parameters that each role's optimizer group holds."""
        return {role: trained_parameters(view) for role, view in self.saved().items()}

    def pack(self) -> str | None:
        """Have all models run without padding, or none: return which cannot, and why."""
        for name, view in vars(self).items():
            reason = None if view is None else view.store.pack()
            if reason is not None:
                self.pad()
                return f"`{name}` cannot run packed, as {reason}"
        return None

    def pad(self) -> None:
        """Have all models run padded."""
        for view in vars(self).values():
            if view is not None:
                view.store.pad()


def plan_roles(
    *,
    actor: Source,
    critic: Source,
    reference: Source,
    critic_start: RoleConfig | None,
    layout: str,
    lora: LoRAConfig | None,
    has_critic: bool,
    has_reference: bool,
    seed: int,
) -> RolePlan:
    """Check sources and their combination; read configurations only.

    Args:
        actor: Folder, hub id, RoleConfig or transformers model.
        critic: The same, or None.
        reference: The same, or None.
        critic_start: A reward model that the critic may start from, or None.
        layout: "separate" or "shared".
        lora: Adapters, or None for full fine-tuning.
        has_critic: Whether the algorithm uses one.
        has_reference: Whether the algorithm uses one.
        seed: Of adapters and heads.

    Raises:
        ValueError: A source that does not exist, or options that contradict each other.
    """
    choice("", "layout", layout, LAYOUTS)
    if abs(seed) >= 2**63:
        raise ValueError(f"`seed={seed}` does not fit into 63 bits, as torch's generators need.")
    sources: dict[str, Any] = {
        name: check_source(name, value)
        for name, value in (("actor", actor), ("critic", critic), ("reference", reference))
    }
    if sources["actor"] is None or sourceless(sources["actor"]):
        raise ValueError("`actor` is missing: give a folder, a Hugging Face id, or a transformers model.")
    for name in ("critic", "reference"):
        if sourceless(sources[name]):  # options alone: the same weights as the actor's, held differently
            if not isinstance(sources["actor"], RoleConfig):
                raise ValueError(
                    f"`{name}` sets options but no `source`, and the actor is not a folder or id to share."
                )
            sources[name] = replace(sources[name], source=sources["actor"].source)
    for name, needed, why in (
        ("critic", has_critic, "`ppo.advantage` has no critic"),
        ("reference", has_reference, "no KL is measured (`ppo.kl_coef`, `kl_loss_coef` and `log_kl` are off)"),
    ):
        if sources[name] is not None and not needed:
            raise ValueError(f"`{name}` has no effect: {why}. Leave it out.")
    if layout == "shared":
        if lora is None:
            raise ValueError('`layout="shared"` keeps policy and value as adapters on one trunk: give `lora` too.')
        for name in ("critic", "reference"):
            if sources[name] is not None:
                raise ValueError(
                    f'`{name}` has a source of its own, but with `layout="shared"` it is a view of the actor\'s trunk. '
                    f'Leave `{name}` out, or use `layout="separate"`.'
                )
    loads = {"actor": True, "critic": has_critic, "reference": has_reference}
    configs = {n: read_config(n, s) for n, s in sources.items() if s is not None and loads[n]}
    for name, source in sources.items():
        if name in configs and isinstance(source, RoleConfig):
            check_architecture(name, configs[name], critic=name == "critic")
            check_quantize(f"{name}.quantize", source.quantize, configs[name])
            check_frozen(name, source, lora)
    config = configs["actor"]
    for name, other in configs.items():
        ours, theirs = config.get_text_config().vocab_size, other.get_text_config().vocab_size
        if ours != theirs:
            raise ValueError(
                f"`{name}` has a vocabulary of {theirs} tokens and the actor one of {ours}: "
                "they read the same token ids, so they must share a tokenizer."
            )
    if sources["critic"] is None and has_critic and layout == "separate" and critic_start is not None:
        start = critic_start
        if isinstance(sources["actor"], RoleConfig):
            held = sources["actor"]
            start = replace(start, quantize=held.quantize, quantize_embeddings=held.quantize_embeddings)
        if _same_backbone(config, read_config("critic", start)):
            sources["critic"] = start
    if sources["critic"] is None and has_critic and layout == "separate":
        check_architecture("actor", config, critic=True)  # which a critic is made from
    return RolePlan(
        actor=sources["actor"],
        critic=sources["critic"],
        reference=sources["reference"],
        layout=layout,
        lora=lora,
        has_critic=has_critic,
        has_reference=has_reference,
        config=config,
        seed=seed,
    )


def build_roles(plan: RolePlan, device: torch.device) -> Roles:
    """Load the models on the CPU and return the roles as views of them.

    Args:
        plan: What to load.
        device: Where they will compute; decides the dtypes that are left to `auto`.
    """
    full = plan.lora is None
    actor_model = load_role("actor", plan.actor, plan, device, trained=full)
    reference: RoleView | None = None
    if plan.has_reference and (plan.reference is not None or full):
        if plan.reference is not None:
            model = load_role("reference", plan.reference, plan, device, trained=False)
        elif isinstance(plan.actor, RoleConfig):
            # The actor's own dtype: the KL of an untouched policy is then exactly 0.
            model = load_role(
                "reference", replace(plan.actor, dtype=_name(actor_model.dtype)), plan, device, trained=False
            )
        else:
            model = _transform("reference", copy.deepcopy(actor_model), plan)
        spread = isinstance(plan.reference, RoleConfig) and plan.reference.device_map is not None and not plan.empty
        store = RoleModel(freeze(model), home=home_of(model) if spread else None)
        reference = RoleView(store.eval(), "logprobs", computes_on=store.home)

    critic_model: Any = None
    if plan.has_critic and plan.layout == "separate":
        if plan.critic is not None:
            critic_model = load_role("critic", plan.critic, plan, device, trained=full)
        elif isinstance(plan.actor, RoleConfig):
            critic_model = load_role("critic", plan.actor, plan, device, trained=full)
        else:
            critic_model = _transform("critic", critic_from(actor_model), plan)

    if not full:
        actor_model.requires_grad_(False)
    actor_model = _transform("actor", actor_model, plan)
    if plan.lora is None:
        actor_model.requires_grad_(True)
        store = RoleModel(actor_model)
        critic = None if critic_model is None else RoleView(RoleModel(critic_model.requires_grad_(True)), "values")
        return Roles(RoleView(store, "logprobs"), critic, reference)

    shared = plan.layout == "shared" and plan.has_critic
    head = None
    if shared:
        head = nn.Linear(actor_model.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(head.weight)
    names = [POLICY, VALUE] if shared else [POLICY]
    adapted = add_adapters(actor_model, plan.lora, names, plan.seed, plan.frozen)
    store = RoleModel(adapted, head, frozen=tuple(adapter.name for adapter in plan.frozen))
    if reference is None and plan.has_reference:
        reference = RoleView(store, "logprobs", None)
    critic = None
    if shared:
        critic = RoleView(store, "values", VALUE)
    elif critic_model is not None:
        critic_model.score.float()
        wrapped = add_adapters(critic_model, plan.lora, [VALUE], plan.seed + 1)
        wrapped.get_base_model().score.requires_grad_(True)
        critic = RoleView(RoleModel(wrapped), "values", VALUE)
    return Roles(RoleView(store, "logprobs", POLICY), critic, reference)


def check_source(name: str, value: Source) -> RoleConfig | nn.Module | None:
    """Return a source as a `RoleConfig`, a module, or None where nothing is given.

    Args:
        name: Of the role.
        value: As the user gave it.

    Raises:
        TypeError: It is none of what a source can be.
        ValueError: An option that has no effect on this role.
    """
    if value is None or isinstance(value, nn.Module):
        return value
    if isinstance(value, str | os.PathLike):
        return RoleConfig(source=os.fspath(value))
    if not isinstance(value, RoleConfig | dict):
        raise TypeError(
            f"`{name}` must be a folder, a Hugging Face id, a RoleConfig or a transformers model, got {value!r}."
        )
    config = from_dict(RoleConfig, value)
    if config.device is not None and name != "reference":
        raise ValueError(
            f"`{name}.device={config.device!r}`: only frozen roles are placed by hand. A trained role lives on the "
            "rank's own device; choose it with `Trainer(devices=...)`."
        )
    if config.sharded is not None and name != "reference":
        raise ValueError(
            f"`{name}.sharded={config.sharded!r}`: a trained role is cut over the ranks or whole on each as the "
            "strategy says. Choose it with `Trainer(strategy=...)`."
        )
    check_map(name, config)
    if config.sharded and config.device is not None:
        raise ValueError(
            f"`{name}.sharded` cuts the role over the ranks' own devices, and `{name}.device={config.device!r}` puts "
            "it on another. Leave one of the two out."
        )
    return None if config == RoleConfig() else config


def sourceless(source: Any) -> bool:
    """Whether a source is options alone."""
    return isinstance(source, RoleConfig) and source.source is None


def read_config(name: str, source: RoleConfig | nn.Module) -> Any:
    """Return the transformers configuration of a role's source."""
    """Return the transformers configuration of a role's source."""
    if isinstance(source, RoleConfig):
        return model_config(name, source)
    config = getattr(source, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise ValueError(f"`{name}` is a {type(source).__name__} without a transformers `config`.")
    return config


def _same_backbone(a: Any, b: Any) -> bool:
    keys = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    return all(getattr(a, key, None) == getattr(b, key, None) for key in keys)


def load_role(role: str, source: RoleConfig | nn.Module, plan: RolePlan, device: torch.device, *, trained: bool) -> Any:
    """Load a model on the CPU, perhaps frozen; all but an actor as the callbacks want it.

    Args:
        role: Its name, for errors, and for what callbacks ask for.
        source: Where it is from.
        plan: What is asked for.
        device: Where it will compute.
        trained: Whether its own weights are.

    Raises:
        ValueError: It cannot be loaded so.
    """
    if isinstance(source, nn.Module):  # used as it is, but without dropout
        disable_dropout(source)
        model: Any = source.eval()
        return model if role == "actor" else _transform(role, model, plan)
    dtype = resolve_dtype(source.dtype, trained=trained, device=device, true_dtype=plan.true_dtype)
    if trained and plan.true_dtype not in (None, dtype):
        raise ValueError(
            f"`{role}.dtype={source.dtype!r}` contradicts the trainer's precision, which makes every trained weight "
            f"{_name(plan.true_dtype)}. Leave one of the two out."
        )
    embeddings = f"{role}.quantize_embeddings={source.quantize_embeddings!r}"
    if plan.empty:  # then there are no transforms
        model = empty_model(source, dtype, critic=role in SCORERS)
        if source.quantize_embeddings != "none":
            quantize_embeddings_(model, embeddings)
        return model
    extra = plan.load_kwargs.get(role, {})
    if source.quantize != "none":
        if "quantization_config" in extra:
            raise ValueError(f"`{role}.quantize` and a callback quantize the same weights. Leave one of the two out.")
        home = device if source.device is None else torch.device(source.device)
        extra = {**extra, **loading_options(source.quantize, home)}
    if source.device_map is not None:
        extra = {**extra, "device_map": source.device_map}
    from safetensors import SafetensorError

    try:
        if role in SCORERS:
            model = load_critic(source, dtype, plan.seed, **extra)
        else:
            model = load_causal_lm(source, dtype, **extra)
    except (OSError, EOFError, UnpicklingError, SafetensorError) as error:
        raise ValueError(
            f"`{role}={source.source!r}`: its weights could not be loaded: {first_line(error)} Are they all there?"
        ) from error
    except (ImportError, ValueError) as error:
        if source.attn_implementation is None or "attention" not in f"{error}{source.attn_implementation}".lower():
            raise
        raise ValueError(
            f"`{role}.attn_implementation={source.attn_implementation!r}` cannot be used: {first_line(error)} "
            "Install what it needs, or leave it out."
        ) from error
    if source.quantize != "none":
        make_movable(model)
    if source.quantize_embeddings != "none":
        quantize_embeddings_(model, embeddings)
    if not trained:
        model.requires_grad_(False)  # before the transforms: only what is frozen may be quantized
    return model if role == "actor" else _transform(role, model, plan)


def _transform(role: str, model: Any, plan: RolePlan) -> Any:
    for transform in plan.transforms:
        model = transform(role, model)
    return model


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
