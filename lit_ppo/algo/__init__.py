"""The mathematics of PPO as pure functions: no model, no trainer, no process group.

Shapes: B sequences, R response width (right-padded), V vocabulary. `mask` is (B, R), bool or 0/1, and decided by the
caller. What lies off the mask may be anything, NaN and infinity included: it is replaced by 0 before it is used, so it
reaches neither a value nor a gradient. float16 and bfloat16 are computed in float32; float64 stays float64.

`reduce`, where a function takes it, sums a tensor over all ranks and returns the sum; None is one rank.
"""

from lit_ppo.algo.advantages import estimate, gae, grpo, reinforce_pp, rloo, spread
from lit_ppo.algo.controllers import AdaptiveKL, FixedKL, RunningStd
from lit_ppo.algo.kl import kl_estimate
from lit_ppo.algo.losses import aggregate, entropy, policy_loss, value_loss
from lit_ppo.algo.masked import explained_variance, masked_mean, masked_sum, masked_var, whiten
from lit_ppo.algo.noise import gumbel

__all__ = [
    "AdaptiveKL",
    "FixedKL",
    "RunningStd",
    "aggregate",
    "entropy",
    "estimate",
    "explained_variance",
    "gae",
    "grpo",
    "gumbel",
    "kl_estimate",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "policy_loss",
    "reinforce_pp",
    "rloo",
    "spread",
    "value_loss",
    "whiten",
]
