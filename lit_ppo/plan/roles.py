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


def shallow(config: Any, depth: int, **changes: Any) -> Any:
    """Return a configuration with another number of layers."""
    config = copy.deepcopy(config)
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
        return kind.from_config(config, dtype=model.dtype, attn_implementation="sdpa").eval()


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


def fake_roles(setup: Setup, depth: int) -> Roles:
    """Build actor, critic and reference by the code that builds the real ones, from fake models.

    Args:
        setup: What to build.
        depth: Layers of each.
    """
    separate = setup.critic is not None and not setup.shared
    models: dict[str, Any] = {
        "actor": fake_model(setup.actor, depth),
        "critic": fake_model(setup.critic, depth, classifier=True) if separate and setup.critic is not None else None,
        "reference": None if setup.reference is None else fake_model(setup.reference, depth),
    }
    plan = RolePlan(
        **models,
        layout="shared" if setup.shared else "separate",
        lora=setup.lora,
        has_critic=setup.critic is not None,
        has_reference=setup.reference is not None,
        config=setup.actor.config,
        seed=0,
        frozen=[adapter for adapter, _ in setup.frozen],
    )
    roles = build_roles(plan, torch.device("meta"))
    true = TRUE.get(setup.precision)
    stores = {id(v.store): v.store for v in (roles.reference, roles.critic, roles.actor) if v is not None}
    for store in stores.values():
        if true is not None and (roles.reference is None or store is not roles.reference.store):
            store.to(true)
        pretend(store)
    for view, model in ((roles.actor, setup.actor), (roles.critic, setup.critic), (roles.reference, setup.reference)):
        if view is not None and model is not None and model.quantize != "none" and not hasattr(view.store, "packed"):
            view.store.packed = {id(layer.weight) for layer in quantize(view.store, HEADS)}
            view.store.mode = model.quantize
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
