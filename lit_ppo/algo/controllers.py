"""What adapts from iteration to iteration and goes to the checkpoint: the KL coefficient, the scale of the scores."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lit_ppo.algo.masked import Reduce


class FixedKL:
    """A KL coefficient that stays as configured.

    Args:
        coef: The coefficient.
    """

    def __init__(self, coef: float) -> None:
        self.value = coef
        """The coefficient of the coming iteration."""

    def update(self, kl: Tensor | float, n: int) -> None:
        """Do nothing: the coefficient is fixed."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a resumed run takes the coefficient from its configuration."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state of an adaptive controller: the configuration now asks for a fixed coefficient."""


class AdaptiveKL:
    """A KL coefficient that steers towards a target (Ziegler 2019, https://arxiv.org/abs/1909.08593, section 2.2).

    ``e = clip(kl / target - 1, -0.2, 0.2)``, then ``value *= 1 + e * n / horizon``.

    Args:
        init: The first coefficient, above 0.
        target: The KL to hold, above 0, in the unit of what `update` is given.
        horizon: Episodes over which the coefficient reacts.

    Raises:
        ValueError: One of them is not above 0.
    """

    def __init__(self, init: float, target: float, horizon: float) -> None:
        for name, value in (("init", init), ("target", target), ("horizon", horizon)):
            if not value > 0:
                raise ValueError(f"`{name}={value!r}` of the adaptive KL controller must be above 0.")
        self.value = init
        """The coefficient of the coming iteration."""
        self.target = target
        self.horizon = horizon

    def update(self, kl: Tensor | float, n: int) -> None:
        """Move the coefficient after an iteration.

        Args:
            kl: Measured KL, the same on all ranks: the per-sequence sum averaged over the global batch, if that is
                what `target` means.
            n: Sequences of the global batch.

        Raises:
            ValueError: `kl` is not finite, which would spoil the coefficient for good.
        """
        kl = float(kl)
        if not math.isfinite(kl):
            raise ValueError(f"`kl={kl}` is not finite: the policy or the reference produced NaN or infinity.")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n / self.horizon

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a saved coefficient; the state of a fixed controller holds none, then start from `init`."""
        self.value = state.get("value", self.value)


class RunningStd:
    """Standard deviation of everything seen so far, over all ranks, merged batch by batch.

    The sums are around each batch's own mean and merged by the rule of Chan, Golub and LeVeque (1983), so a large mean
    does not cancel the variance away.
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self.squares = 0.0
        """Sum of squares around the mean."""

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 1 as long as no two different values were seen."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 and self.squares > 0 else 1.0

    def update(self, x: Tensor, reduce: Reduce | None = None) -> None:
        """Add values.

        Args:
            x: Any shape, finite, may be empty.
            reduce: Sums over ranks; called by every rank, twice.

        Raises:
            ValueError: A value is not finite, which would spoil the statistics for good. Every rank raises.
        """
        sums = reduce or (lambda t: t)
        x = x.flatten().to(torch.float32 if x.device.type == "mps" else torch.float64)
        count, total = sums(torch.stack([x.new_tensor(x.numel()), x.sum()])).tolist()
        if not math.isfinite(total):
            raise ValueError("`x` holds NaN or infinity: leave out the samples whose score is not finite.")
        mean = total / max(count, 1)
        squares = sums((x - mean).square().sum()).item()
        if count == 0:
            return
        delta, both = mean - self.mean, self.count + count
        self.mean += delta * count / both
        self.squares += squares + delta * delta * self.count * count / both
        self.count = both

    def state_dict(self) -> dict[str, Any]:
        """Return count, mean and sum of squares."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved statistics."""
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]
