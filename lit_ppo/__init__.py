"""PPO for language models as a PyTorch Lightning module and a handful of callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_ppo.config import LoRAConfig, OptimConfig, PPOConfig, RewardConfig, RoleConfig, SamplingConfig
    from lit_ppo.data import PromptDataModule
    from lit_ppo.module import PPOLightningModule

__version__ = "0.1.0"

_HOMES = {
    "PPOLightningModule": "lit_ppo.module",
    "PromptDataModule": "lit_ppo.data",
    **dict.fromkeys(
        ("LoRAConfig", "OptimConfig", "PPOConfig", "RewardConfig", "RoleConfig", "SamplingConfig"), "lit_ppo.config"
    ),
}
__all__ = [  # noqa: RUF022 (in the order of use)
    "PPOLightningModule",
    "PromptDataModule",
    "PPOConfig",
    "SamplingConfig",
    "OptimConfig",
    "RoleConfig",
    "LoRAConfig",
    "RewardConfig",
]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: `import lit_ppo` itself costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lit_ppo' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
