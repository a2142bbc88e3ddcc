"""PPO for language models as a PyTorch Lightning module and a handful of callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_ppo.config import LoRAConfig, OptimConfig, PPOConfig, RoleConfig, SamplingConfig
    from lit_ppo.data import PreferenceDataModule, PromptDataModule, SFTDataModule
    from lit_ppo.module import PPOLightningModule
    from lit_ppo.rewards import RewardConfig
    from lit_ppo.stages import RankingConfig, RewardModule, SFTConfig, SFTModule, StageOptimConfig

__version__ = "0.1.0"

_HOMES = {
    "PPOLightningModule": "lit_ppo.module",
    "RewardConfig": "lit_ppo.rewards",
    **dict.fromkeys(("PromptDataModule", "SFTDataModule", "PreferenceDataModule"), "lit_ppo.data"),
    **dict.fromkeys(("SFTModule", "RewardModule", "SFTConfig", "RankingConfig", "StageOptimConfig"), "lit_ppo.stages"),
    **dict.fromkeys(("LoRAConfig", "OptimConfig", "PPOConfig", "RoleConfig", "SamplingConfig"), "lit_ppo.config"),
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
    "SFTModule",
    "SFTDataModule",
    "SFTConfig",
    "RewardModule",
    "PreferenceDataModule",
    "RankingConfig",
    "StageOptimConfig",
]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: `import lit_ppo` itself costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lit_ppo' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
