"""Which weights of a store are in its checkpoints, and which of them an optimizer updates."""

from __future__ import annotations

import torch
from torch import nn

from lit_ppo.roles.adapters import is_adapter_parameter
from lit_ppo.roles.model import RoleModel, RoleView


def named_tensors(store: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by the names of the state dict, which FSDP1 would gather for it."""
    found: dict[str, torch.Tensor] = {clean_name(n): p for n, p in store.named_parameters(remove_duplicate=False)}
    for prefix, owner in store.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                found[clean_name(f"{prefix}.{name}".lstrip("."))] = buffer
    return found


def clean_name(name: str) -> str:
    """Return a parameter's name without what FSDP1's wrappers put in it."""
    return name.replace("_fsdp_wrapped_module.", "")


def saved_names(store: RoleModel) -> set[str]:
    """Return the names in a store's state dict that belong in a checkpoint: with adapters, not the frozen trunk."""
    names = set(named_tensors(store))
    if hasattr(store.model, "peft_config"):
        names = {n for n in names if "lora_" in n or n.startswith("value_head.") or n.endswith(".score.weight")}
    return names - frozen_names(store)


def frozen_names(store: RoleModel) -> set[str]:
    """Return the names of the adapters' weights that came from a file and stay as they are."""
    return {n for n in named_tensors(store) if any(is_adapter_parameter(n, adapter) for adapter in store.frozen)}


def trunk_name(name: str, saved: set[str]) -> str:
    """Return what a weight of the trunk is called without the frozen adapters: PEFT renames what it puts one on.

    Args:
        name: In the store.
        saved: From `saved_names`.
    """
    layer, found, _ = name.partition(".base_layer.")
    adapted = not found or any(other.startswith(f"{layer}.lora_") for other in saved)
    return name if adapted else name.replace(".base_layer.", ".")


def trained_parameters(view: RoleView) -> list[tuple[str, nn.Parameter]]:
    """Return the named parameters of a role that an optimizer updates."""
    saved = saved_names(view.store)
    named = [(clean_name(n), p) for n, p in view.store.named_parameters()]
    named = [(n, p) for n, p in named if n in saved]
    if view.adapter is None:
        return named
    return [
        (n, p)
        for n, p in named
        if is_adapter_parameter(n, view.adapter) or (view.output == "values" and "lora_" not in n)
    ]
