"""Frozen roles over several devices, as accelerate's `device_map` puts them there."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from lit_ppo.config import RoleConfig

AWAY = ("cpu", "disk")
"""Where parts only wait: they compute on the first of the other devices."""


def check_map(role: str, config: RoleConfig) -> None:
    """Check the `device_map` of a role.

    Args:
        role: Its name.
        config: Its options.

    Raises:
        ValueError: It contradicts another option, or the role trains.
        ModuleNotFoundError: accelerate is missing.
    """
    if config.device_map is None:
        return
    if role != "reference":
        raise ValueError(
            f"`{role}.device_map={config.device_map!r}`: only frozen roles are placed by hand. A trained role lives on "
            "the rank's own device; choose it with `Trainer(devices=...)`."
        )
    for option, off in (("device", None), ("sharded", None), ("quantize_embeddings", "none")):
        if getattr(config, option) not in (off, False):
            raise ValueError(
                f"`{role}.device_map={config.device_map!r}` cannot go with `{role}.{option}="
                f"{getattr(config, option)!r}`. Leave one of the two out."
            )
    if importlib.util.find_spec("accelerate") is None:
        raise ModuleNotFoundError(f"`{role}.device_map` needs accelerate: `pip install accelerate`.")


def named_devices(device_map: Any) -> list[str]:
    """Return the devices that a map names; none where it leaves the choice to accelerate."""
    if isinstance(device_map, str):
        return [] if device_map in ("auto", "balanced", "balanced_low_0", "sequential") else [device_map]
    places = {f"cuda:{place}" if isinstance(place, int) else str(place) for place in (device_map or {}).values()}
    return sorted(places - {"disk"})


def home_of(model: Any) -> torch.device:
    """Return where a model that was placed by a map takes its input."""
    places = list(model.hf_device_map.values()) if hasattr(model, "hf_device_map") else []
    first = next((place for place in places if str(place) not in AWAY), "cpu")
    return torch.device("cuda", first) if isinstance(first, int) else torch.device(first)
