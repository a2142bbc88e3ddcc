"""AdamW that does not round small updates away, in as much memory as there is, and its schedule."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from lit_ppo.config import AdamConfig
from lit_ppo.optim.codes import scale_shape
from lit_ppo.optim.lean import LeanAdamW, in_eight_bits
from lit_ppo.optim.master import MasterAdamW, is_low_precision
from lit_ppo.optim.schedule import apply_options, schedule

__all__ = ["LeanAdamW", "MasterAdamW", "apply_options", "build_optimizer", "schedule", "state_bytes"]


def build_optimizer(groups: list[dict[str, Any]], config: AdamConfig, seed: int = 0) -> MasterAdamW:
    """Return the AdamW that a configuration asks for.

    Args:
        groups: Parameter groups with their options.
        config: `state`, `rounding` and `paged` count.
        seed: Of the noise of 8-bit state and stochastic rounding.
    """
    if config.state == "float32" and config.rounding == "master" and not config.paged:
        return MasterAdamW(groups)
    return LeanAdamW(groups, state=config.state, rounding=config.rounding, paged=config.paged, seed=seed)


def state_bytes(p: Tensor, config: AdamConfig) -> int:
    """Return what the state of a weight takes, on the GPU or, where it is paged, in host memory.

    Args:
        p: The weight; the meta device will do.
        config: `state` and `rounding` count.
    """
    moments = 8 * p.numel()
    if config.state == "8bit" and in_eight_bits(p):
        moments = 2 * p.numel() + 8 * prod(scale_shape(p.shape))
    return moments + 4 * p.numel() * (is_low_precision(p) and config.rounding == "master")
