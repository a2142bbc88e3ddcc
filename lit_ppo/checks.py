"""Parts of the checks before a run that need nothing but its options and the columns of its prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lit_ppo.config import PPOConfig, RoleConfig, from_dict
from lit_ppo.data import PromptDataModule
from lit_ppo.rewards import FunctionReward

if TYPE_CHECKING:
    from lit_ppo.harness import PPOHarness

PREDICTED = frozenset({"prompt", "response", "stopped"})
"""What a prediction says beside the prompt's other columns."""


def check_effect(module: PPOHarness) -> None:
    """Warn of numbers of the critic's that are set for an estimator that has none.

    Args:
        module: Has the options.
    """
    ppo, default = module.ppo, PPOConfig()
    if ppo.has_critic:
        return
    names = [f"ppo.{n}" for n in ("lam", "vf_coef", "value_clip") if getattr(ppo, n) != getattr(default, n)]
    names += ["optim.critic_lr"] * (module.optim.critic_lr is not None)
    if names:
        rank_zero_warn(
            f"{', '.join(f'`{n}`' for n in names)}: no effect, as `ppo.advantage={ppo.advantage!r}` has no critic."
        )


def check_columns(module: PPOHarness, data: PromptDataModule, stage: str) -> None:
    """Check the columns of the prompts against what reward functions ask for and what predictions are called.

    Args:
        module: Has the rewards.
        data: After its `setup`.
        stage: fit, validate, test or predict.

    Raises:
        RewardError: A function's argument is no column of a set.
    """
    if stage != "predict":
        for reward in module.rewards.rewards:
            if isinstance(reward, FunctionReward):
                for columns in data.columns.values():
                    reward.check_columns(columns)
        return
    for name in sorted(PREDICTED & data.columns["predict"]):
        rank_zero_warn(f"The prompts have a column `{name}`, as predictions do: theirs is written as `data/{name}`.")


def check_devices(module: PPOHarness) -> None:
    """Check that the devices of the frozen roles exist.

    Raises:
        ValueError: One does not.
    """
    reference = module.sources["reference"]
    config = from_dict(RoleConfig, reference) if isinstance(reference, dict) else reference
    rewards = [] if module.rewards is None else module.rewards.rewards
    placed = [("reference", getattr(config, "device", None)), *(("reward", reward.config.device) for reward in rewards)]
    for role, name in placed:
        if isinstance(name, str):
            check_device_exists(f"{role}.device", name)


def check_device_exists(option: str, name: str) -> None:
    """Check that a device exists.

    Args:
        option: What names it, for the error.
        name: Such as "cuda:1".

    Raises:
        ValueError: It does not.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"`{option}={name!r}` is no device. Write one such as 'cpu' or 'cuda:1'.") from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"`{option}={name!r}` does not exist: this machine has {count} CUDA devices.")
