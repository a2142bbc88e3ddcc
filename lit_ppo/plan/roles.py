"""The roles of a run as fake models of a few layers, and what their weights, gradients and optimizer state take."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lit_ppo.plan.setup import TRUE, Model, Setup
from lit_ppo.plan.stand_ins import quantize
from lit_ppo.plan.track import ROUND, faking
from lit_ppo.roles.build import RolePlan, Roles, build_roles
from lit_ppo.roles.fused_layers import fuse_if
from lit_ppo.roles.int8 import quantize_embeddings_
from lit_ppo.roles.single import OneRole, build_scorer

HEADS = ("score", "classifier", "lm_head", "head", "v_head", "value_head", "lora_A", "lora_B")
"""What is never quantized."""


@dataclass(frozen=True)
class Line:
    """A number that grows by the same with every layer."""

    base: float
    slope: float

    def at(self, layers: int) -> int:
        """Return it for so many layers."""
        return round(self.base + self.slope * layers)


def layers_of(config: Any) -> int:
    """Return how many decoder layers a configuration asks for."""
    return int(config.get_text_config().num_hidden_layers)


def kv_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of a token's keys and values, in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * dim * dtype.itemsize


def shallow(config: Any, depth: int, **changes: Any) -> Any:
    """Return a configuration with another number of layers, all of them plain ones."""
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)  # of a loaded model: what is quantized is said by its role
    text = config.get_text_config()
    text.num_hidden_layers = depth
    kinds = getattr(text, "layer_types", None)
    if kinds:
        text.layer_types = [kinds[i % len(kinds)] for i in range(depth)]
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def fake_model(model: Model, depth: int, *, classifier: bool = False) -> Any:
    """Make a model of a few layers on the meta device.

    Args:
        model: What to make.
        depth: Layers.
        classifier: With a scalar head in place of the language model's.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    changes = {"num_labels": 1} if classifier else {}
    if classifier and model.config.get_text_config().pad_token_id is None:
        changes["pad_token_id"] = 0
    with torch.device("meta"):
        config = shallow(model.config, depth, **changes)
        made = kind.from_config(config, dtype=model.dtype, attn_implementation="sdpa").eval()
        if model.embeddings != "none":
            quantize_embeddings_(made, "quantize_embeddings")
        return made


def pretend(module: nn.Module) -> nn.Module:
    """Replace what is on the meta device, in place, by fake tensors that claim to be elsewhere."""
    made: dict[int, torch.Tensor] = {}
    with faking():
        for owner in module.modules():
            for held in (owner._parameters, owner._buffers):
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                        is_weight = isinstance(tensor, nn.Parameter)
                        made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
                    held[name] = made[id(tensor)]  # type: ignore[assignment]
    return module


def fake_roles(setup: Setup, depth: int) -> Roles | OneRole:
    """Build the roles of a run from fake models, by the code that builds the real ones.

    Args:
        setup: What to build.
        depth: Layers of each.
    """
    if setup.stage == "reward":
        plan = _plan(setup, actor=fake_model(setup.actor, depth, classifier=True))
        return _finished(setup, OneRole(setup.role, build_scorer(setup.role, plan, torch.device("meta"))))
    separate = setup.critic is not None and not setup.shared
    models: dict[str, Any] = {
        "actor": fake_model(setup.actor, depth),
        "critic": fake_model(setup.critic, depth, classifier=True) if separate and setup.critic is not None else None,
        "reference": None if setup.reference is None else fake_model(setup.reference, depth),
    }
    return _finished(setup, build_roles(_plan(setup, **models), torch.device("meta")))


def _plan(setup: Setup, *, actor: Any, critic: Any = None, reference: Any = None) -> RolePlan:
    return RolePlan(
        actor,
        critic,
        reference,
        layout="shared" if setup.shared else "separate",
        lora=setup.lora,
        has_critic=setup.critic is not None,
        has_reference=setup.reference is not None,
        config=setup.actor.config,
        seed=0,
        frozen=[adapter for adapter, _ in setup.frozen],
    )


def _finished(setup: Setup, roles: Any) -> Any:
    """Give roles their dtypes, and tensors without memory; quantize and pack what is to be."""
    true, views = TRUE.get(setup.precision), roles.all()
    frozen = views["reference"].store if "reference" in views else None
    for store in {id(view.store): view.store for view in views.values()}.values():
        if true is not None and store is not frozen:
            store.to(true)
        pretend(store)
    models = {setup.role: setup.actor, "critic": setup.critic, "reference": setup.reference}
    for role, view in views.items():
        model = models[role]
        if model is not None and model.quantize != "none" and not hasattr(view.store, "packed"):
            view.store.packed = {id(layer.weight) for layer in quantize(view.store, HEADS)}
            view.store.mode = model.quantize
    fuse_if(setup.ppo.fused_layers, (view.store for view in views.values()))
    if setup.ppo.packing:
        roles.pack()
    return roles


def weight_bytes(store: nn.Module, which: Callable[[nn.Parameter], bool] = lambda p: True) -> int:
    """Return the bytes of a store's parameters, of packed ones as they are packed.

    Args:
        store: A fake model, with `packed` and `mode` if some of its layers are quantized.
        which: Parameters to count.
    """
    packed: Any = getattr(store, "packed", set())
    total = 0
    for parameter in store.parameters():
        if which(parameter):
            size = parameter.numel() * parameter.element_size()
            total += _packed(parameter.numel(), getattr(store, "mode", "nf4")) if id(parameter) in packed else _up(size)
    return total


def _packed(count: int, mode: str) -> int:
    """Bytes of a quantized weight: codes, and the constants of its blocks, themselves quantized."""
    if mode == "int8":
        return _up(count) + ROUND
    blocks = -(-count // 64)
    return _up(count // 2) + _up(blocks) + _up(4 * -(-blocks // 256)) + 4 * ROUND  # two code tables, an offset


def _up(size: int) -> int:
    return -(-size // ROUND) * ROUND
