"""Rewards: models, functions and rules that turn text into numbers, and their weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_ppo.config import from_dict
from lit_ppo.experience import Rollout
from lit_ppo.rewards.base import Reward, RewardError, Samples
from lit_ppo.rewards.config import RewardConfig
from lit_ppo.rewards.function import FunctionReward
from lit_ppo.rewards.model import ModelReward
from lit_ppo.rewards.resolve import resolve
from lit_ppo.rewards.trunk import TrunkReward

__all__ = [
    "FunctionReward",
    "ModelReward",
    "Reward",
    "RewardConfig",
    "RewardError",
    "RewardSum",
    "Samples",
    "Scores",
    "TrunkReward",
    "build_rewards",
]

RewardSpec = str | RewardConfig | dict[str, Any] | Callable[..., Any] | nn.Module | tuple[nn.Module, Any] | Reward


Guard = Callable[[int, Callable[[int], Tensor]], Tensor]


@dataclass
class Scores:
    """What the rewards say of B samples."""

    total: Tensor
    """(B,) float32, the weighted sum; 0 where `keep` is False."""
    parts: dict[str, Tensor]
    """Each reward's own scores, (B,) float32, unweighted; 0 where that reward asked to skip the sample."""
    keep: Tensor
    """(B,) bool; False: a reward's score is not finite and its `on_error` is `skip`."""
    truncated: dict[str, int]
    """For each reward model, how many samples were longer than its context."""


class RewardSum:
    """Several rewards, added up with their weights.

    Reward models are plain attributes: frozen, in eval mode, and never part of a module's parameters or checkpoints.

    Args:
        rewards: The terms; their names must differ.
        default_device: Where `load` puts models unless told.

    Raises:
        ValueError: No rewards, or two of one name.
    """

    def __init__(self, rewards: Sequence[Reward], default_device: torch.device | str | None = None) -> None:
        if not rewards:
            raise ValueError("`reward` is empty: PPO needs at least one source of reward.")
        names = [reward.name for reward in rewards]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"Two rewards are called {name!r}. Give each its own `name`; they are logged apart.")
        self.rewards = list(rewards)
        for number, reward in enumerate(self.on_trunk):
            reward.adapter = f"reward{number}"
        self.default_device = default_device

    @property
    def names(self) -> list[str]:
        """The names of the rewards, in order."""
        return [reward.name for reward in self.rewards]

    @property
    def models(self) -> dict[str, nn.Module]:
        """The loaded models by the names of their rewards."""
        return {reward.name: reward.model for reward in self.rewards if reward.model is not None}

    @property
    def on_trunk(self) -> list[TrunkReward]:
        """Those that are adapters of the actor's trunk."""
        return [reward for reward in self.rewards if isinstance(reward, TrunkReward)]

    def check(self) -> None:
        """Find mistakes without loading weights.

        Raises:
            RewardError: What is wrong, and what to do.
        """
        for reward in self.rewards:
            reward.check()

    def load(
        self,
        device: torch.device | str | None = None,
        load_kwargs: dict[str, dict[str, Any]] | None = None,
        transforms: Sequence[Callable[[str, nn.Module], nn.Module]] = (),
    ) -> None:
        """Load the models, frozen and in eval mode; a second call only moves them.

        Args:
            device: Where those without a `device` of their own go. None: `default_device`, or the CPU.
            load_kwargs: Further arguments of `from_pretrained` under the role's name, or under `reward` for all.
            transforms: Called with the role's name and each model once it is loaded; return what takes its place.

        Raises:
            RewardError: What is wrong, and what to do.
        """
        asked = load_kwargs or {}
        for reward in self.rewards:
            role = self.role(reward)
            kwargs = asked.get(role, asked.get("reward", {}))
            reward.load(device or self.default_device or "cpu", kwargs, [partial(t, role) for t in transforms])

    def role(self, reward: Reward) -> str:
        """Return the name of a reward model among the roles: `reward`, or `reward/<name>` where there are several."""
        several = sum(isinstance(r, ModelReward) for r in self.rewards) > 1
        return f"reward/{reward.name}" if several else "reward"

    def score(self, rollout: Rollout, tokenizer: Any, guard: Guard | None = None) -> Scores:
        """Score the responses.

        Args:
            rollout: B prompts with responses, on any device.
            tokenizer: The policy's.
            guard: Called with the batch size of a reward model and a function that scores with the size it is given;
                returns that function's result. It may try again with a smaller one when memory runs out. Reward
                functions are called once, whatever happens.

        Returns:
            The scores, on the rollout's device.

        Raises:
            RewardError: A reward fails, or its score is not finite and its `on_error` is `raise`.
        """
        samples = Samples.from_rollout(rollout, tokenizer)
        total = torch.zeros(len(samples), dtype=torch.float32)
        keep = torch.ones(len(samples), dtype=torch.bool)
        parts: dict[str, Tensor] = {}
        for reward in self.rewards:
            score = partial(reward.score, samples) if len(samples) else _nothing
            with torch.autocast(rollout.ids.device.type, enabled=False), float32_by_default():
                if guard is not None and reward.model is not None:
                    scores = guard(min(reward.config.batch_size, max(1, len(samples))), score)
                else:
                    scores = score()
            finite = scores.isfinite()
            if not finite.all():
                bad = int(finite.logical_not().nonzero()[0])
                what = f"it scored {samples.describe(bad)} {scores[bad].item()}"
                if reward.config.on_error == "raise":
                    raise reward.fail(
                        f"{what}. Scores must be finite; `reward.on_error: skip` leaves such samples out."
                    )
                reward.warn_once(
                    "skipped", f"{what}; samples whose score is not finite are left out of the update. Said once."
                )
            keep &= finite
            parts[reward.name] = scores.where(finite, 0.0)
            total += reward.config.weight * parts[reward.name]
        device = rollout.ids.device
        return Scores(
            total=total.where(keep, 0.0).to(device),
            parts={name: part.to(device) for name, part in parts.items()},
            keep=keep.to(device),
            truncated={r.name: r.truncated if len(samples) else 0 for r in self.rewards if r.model is not None},
        )


def build_rewards(
    spec: RewardSpec | Sequence[RewardSpec], *, default_device: torch.device | str | None = None
) -> RewardSum:
    """Make the rewards that a configuration or a Python user describes. No weights are loaded.

    Args:
        spec: One of the following, or a list of them: a string (an existing folder, the import path of a callable, or
            a hub id), a `RewardConfig` or the dict of its fields, a callable, a transformers sequence-classification
            module with a `tokenizer` attribute, a pair of such a module and its tokenizer, a `FunctionReward` or a
            `ModelReward`. A module is put in eval mode and frozen when it is loaded.
        default_device: Where models go unless told otherwise.

    Raises:
        RewardError: A source that cannot be found or imported.
        TypeError: Something that is none of these.
        ValueError: A bad option, or two rewards of one name.
    """
    items = list(spec) if isinstance(spec, Sequence) and not isinstance(spec, str) else [spec]
    if len(items) == 2 and hasattr(items[1], "decode"):  # a module and its tokenizer
        items = [spec]
    return RewardSum([_build(item) for item in items], default_device)


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Have tensors made without a dtype be float32: a training step in `bf16-true` has them be bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _nothing(size: int | None = None) -> Tensor:
    """The scores of no samples."""
    return torch.zeros(0, dtype=torch.float32)


def _build(spec: Any) -> Reward:
    if isinstance(spec, Reward):
        return spec
    if isinstance(spec, Sequence) and not isinstance(spec, str) and len(spec) == 2 and isinstance(spec[0], nn.Module):
        return ModelReward(spec[0], spec[1])
    if isinstance(spec, (str, dict, RewardConfig)):
        config = RewardConfig(source=spec) if isinstance(spec, str) else from_dict(RewardConfig, spec)
        if not isinstance(config.source, str):
            raise TypeError(
                f"`reward.source` must be a string, got {type(config.source).__name__}. For a Python object with "
                "options use `FunctionReward(function, weight=...)` or `ModelReward(module, tokenizer, weight=...)`."
            )
        options = asdict(config)
        if config.trunk == "actor":
            return TrunkReward(**options)
        found = resolve(config.source, config.options)
        if isinstance(found, Reward):
            raise TypeError(f"`reward.source={config.source!r}` is a {type(found).__name__}: pass it from Python.")
        if isinstance(found, (str, nn.Module)):
            return ModelReward(**{**options, "source": found})
        if not callable(found):
            raise TypeError(f"`reward.source={config.source!r}` is a {type(found).__name__}, which cannot be called.")
        return FunctionReward(found, **{**options, "options": None})  # it has them by now
    if isinstance(spec, nn.Module):
        return ModelReward(spec)
    if callable(spec):
        return FunctionReward(spec)
    raise TypeError(
        f"A reward is a folder, an import path, a hub id, a RewardConfig or its dict, a callable or a model; "
        f"got {type(spec).__name__}: {spec!r}."
    )
