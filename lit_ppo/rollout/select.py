"""Which engine samples: `hf` anywhere, `graph` on CUDA, and `auto`, which takes the fastest that works."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lit_ppo.config import ENGINES, choice
from lit_ppo.experience import Prompts, Rollout
from lit_ppo.roles.model import RoleView
from lit_ppo.rollout.base import Draw, RolloutEngine, Sampling
from lit_ppo.rollout.graph import GraphEngine, Unservable
from lit_ppo.rollout.hf import HFEngine


class AutoEngine(RolloutEngine):
    """`graph` on CUDA, if it can serve the model; else `hf`, with one line that says why.

    Args:
        policy: The actor.
        options: Further arguments of `GraphEngine`.
    """

    def __init__(self, policy: RoleView, **options: Any) -> None:
        self.policy, self.options = policy, options
        self.engine: RolloutEngine | None = None

    def generate(self, prompts: Prompts, sampling: Sampling, draw: Draw) -> Rollout:
        """Sample one response for each row; see `RolloutEngine`."""
        if self.engine is None:
            graph = self.policy.device.type == "cuda"
            self.engine = GraphEngine(self.policy, **self.options) if graph else HFEngine(self.policy)
        try:
            return self.engine.generate(prompts, sampling, draw)
        except Unservable as reason:
            rank_zero_info(f"{reason} Rollouts use transformers' `generate`.")
            self.engine = HFEngine(self.policy)
            return self.engine.generate(prompts, sampling, draw)

    def sleep(self) -> None:
        """Give memory back before the update."""
        if self.engine is not None:
            self.engine.sleep()

    def wake(self) -> None:
        """Take it again before a rollout."""
        if self.engine is not None:
            self.engine.wake()

    def memory_bytes(self) -> dict[str, int]:
        """Return what it holds between rollouts."""
        return {} if self.engine is None else self.engine.memory_bytes()

    def rows_at_once(self, total: int) -> int:
        """Return how many of `total` sequences are decoded together."""
        return total if self.engine is None else self.engine.rows_at_once(total)


def build_engine(kind: str, policy: RoleView, **options: Any) -> RolloutEngine:
    """Return the engine of that name.

    Args:
        kind: auto, hf, graph.
        policy: The actor.
        options: Further arguments of `GraphEngine`, where it is used.

    Raises:
        ValueError: Another name.
    """
    choice("ppo", "rollout_engine", kind, ENGINES)
    if kind == "auto":
        return AutoEngine(policy, **options)
    return HFEngine(policy) if kind == "hf" else GraphEngine(policy, **options)
