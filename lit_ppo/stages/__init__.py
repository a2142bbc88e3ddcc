"""The stages before PPO, on the same roles, data, optimizer and checkpoints."""

from lit_ppo.stages.config import RankingConfig, SFTConfig, StageOptimConfig
from lit_ppo.stages.reward_model import RewardModule
from lit_ppo.stages.sft import SFTModule

__all__ = ["RankingConfig", "RewardModule", "SFTConfig", "SFTModule", "StageOptimConfig"]
