"""Which engine samples: `hf` anywhere, `graph` on CUDA, and `auto`, which takes the fastest that works."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_info

from lit_ppo.config import ENGINES, choice
from lit_ppo.experience import Prompts, Rollout
from lit_ppo.roles.model import RoleView
from lit_ppo.rollout.base import Draw, RolloutEngine, Sampling
from lit_ppo.rollout.graph import GraphEngine, Unservable
from lit_ppo.rollout.hf import HFEngine


class AutoEngine:
    """`graph` on CUDA, if it can serve the model; else `hf`, with one line that says why.

    Args:
        policy: The actor.
    """

    def __init__(self, policy: RoleView) -> None:
        self.policy = policy
        self.engine: RolloutEngine | None = None

    def generate(self, prompts: Prompts, sampling: Sampling, draw: Draw) -> Rollout:
        """Sample one response for each row; see `RolloutEngine`."""
        if self.engine is None:
            graph = self.policy.device.type == "cuda"
            self.engine = GraphEngine(self.policy) if graph else HFEngine(self.policy)
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


def build_engine(kind: str, policy: RoleView) -> RolloutEngine:
    """Return the engine of that name.

    Args:
        kind: auto, hf, graph.
        policy: The actor.

    Raises:
        ValueError: Another name.
    """
    choice("ppo", "rollout_engine", kind, ENGINES)
    if kind == "auto":
        return AutoEngine(policy)
    return HFEngine(policy) if kind == "hf" else GraphEngine(policy)
