"""Parts of the checks before a run that need nothing but its options and the columns of its prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lit_ppo.config import PPOConfig, RoleConfig, from_dict
from lit_ppo.data import PromptDataModule
from lit_ppo.rewards import FunctionReward
from lit_ppo.roles.build import RolePlan
from lit_ppo.roles.loading import resolve_dtype
from lit_ppo.roles.spread import named_devices

if TYPE_CHECKING:
    from lit_ppo.base import Harness
    from lit_ppo.harness import PPOHarness

PREDICTED = frozenset({"prompt", "response", "stopped"})
"""What a prediction says beside the prompt's other columns."""


def check_effect(module: PPOHarness) -> None:
    """Warn of options that are set for an estimator that makes no use of them.

    Args:
        module: Has the options.
    """
    ppo, default = module.ppo, PPOConfig()
    if ppo.has_critic:
        return
    unused = {
        "has no critic": ["lam", "vf_coef", "value_clip"],
        "scores whole responses": ["gamma"] if ppo.advantage in ("grpo", "rloo") else [],
        "always whitens": ["whiten_advantages"] if ppo.advantage == "reinforce_pp" else [],
    }
    for why, options in unused.items():
        names = [f"ppo.{n}" for n in options if getattr(ppo, n) != getattr(default, n)]
        names += ["optim.critic_lr"] * ("lam" in options and module.optim.critic_lr is not None)
        if names:
            rank_zero_warn(
                f"{', '.join(f'`{n}`' for n in names)}: no effect, as `ppo.advantage={ppo.advantage!r}` {why}."
            )


def check_optimizer(module: Harness, dtypes: set[torch.dtype]) -> None:
    """Check that the optimizer's state can be held as configured, by the kind of weights and by the strategy.

    Args:
        module: Has the options; its sharding is known.
        dtypes: Of the weights that are trained.

    Raises:
        ValueError: It cannot, or an option would have no effect.
    """
    optim, sharding, device = module.optim, module.sharding, module.target_device
    if optim.rounding == "stochastic" and (torch.bfloat16 not in dtypes or torch.float16 in dtypes):
        found = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise ValueError(
            f"`optim.rounding='stochastic'` is for bfloat16 weights, and what is trained is {found}. Leave it out, "
            'or train in bfloat16: `Trainer(precision="bf16-true")`.'
        )
    if torch.float64 in dtypes and (optim.state == "8bit" or optim.paged):
        option = "state='8bit'" if optim.state == "8bit" else "paged=True"
        raise ValueError(
            f"`optim.{option}` computes in float32, and what is trained is float64. Leave it out, or train in another "
            "precision."
        )
    if optim.state == "8bit" and sharding.flat:
        raise ValueError(
            "`optim.state='8bit'` scales the blocks of a matrix's rows, and FSDP1 flattens the matrices: such a state "
            "could not be read by another number of ranks. Use `ModelParallelStrategy(data_parallel_size=N, "
            "tensor_parallel_size=1)`, or `optim.state='float32'`."
        )
    if optim.paged and (sharding.flat or device.type != "cuda"):
        why = "it pages to and from a GPU. Leave it out."
        if sharding.flat:
            why = (
                "FSDP1 gathers the state of its flat parameters where they are. Use `ModelParallelStrategy("
                "data_parallel_size=N, tensor_parallel_size=1)`, or leave it out."
            )
        raise ValueError(
            f"`optim.paged=True` cannot be used here ({type(module.trainer.strategy).__name__} on {device}): {why}"
        )


def trained_dtypes(plan: RolePlan, device: torch.device) -> set[torch.dtype]:
    """Return the dtypes of the weights that will be trained, before any is loaded.

    Args:
        plan: What will be loaded.
        device: Where the trained weights will be.
    """
    if plan.true_dtype is not None:
        return {plan.true_dtype}
    if plan.lora is not None:
        return {torch.float32}  # the adapters'
    sources = [plan.actor, plan.critic or plan.actor] if plan.has_critic else [plan.actor]
    return {
        resolve_dtype(s.dtype, trained=True, device=device) if isinstance(s, RoleConfig) else next(s.parameters()).dtype
        for s in sources
    }


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
    for role, held in (("reference", config), *(("reward", reward.config) for reward in rewards)):
        if isinstance(getattr(held, "device", None), str):
            check_device_exists(f"{role}.device", held.device)
        for name in named_devices(getattr(held, "device_map", None)):
            check_device_exists(f"{role}.device_map", name)


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
