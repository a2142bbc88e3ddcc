"""One rank: python offload_ranks.py FOLDER JSON trains each kind with and without OffloadRoles; the same must come."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import cases
import torch
from lightning.pytorch import Callback

from lit_ppo import OptimConfig, PPOConfig, RewardConfig
from lit_ppo.callbacks import OffloadRoles, _paging

warnings.filterwarnings("ignore", message=".*does not have many workers")
ROLES = ["actor", "critic", "reference", "reward"]


def held(module: Any) -> int:
    """Bytes of a model's parameters that are there, of this rank's shards or of gathered weights."""
    parameters = {id(p): p for p in module.parameters()}.values()
    return sum({s.data_ptr(): s.nbytes() for s in (cases.local(p).untyped_storage() for p in parameters)}.values())


class Look(Callback):
    """What is there in a phase: once it has started, and once the rollout has gathered its weights."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[str]]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.full = {n: held(m) for n, m in pl_module.roles.items()}
        self.shards = [cases.local(p).untyped_storage() for p in pl_module.actor.parameters()]
        pl_module.phase_listeners.append(lambda phase: phase is None or self.look(phase, trainer, pl_module))
        pl_module.gather_listeners.append(
            lambda _, whole: self.look("whole" if whole else "shards", trainer, pl_module)
        )

    def look(self, moment: str, trainer: Any, pl_module: Any) -> None:
        there = {n for n, m in pl_module.roles.items() if held(m) > 0.5 * self.full[n]} - {"actor"}
        shards = sum({s._cdata: s.nbytes() for s in self.shards}.values())
        there |= {"shards"} if shards > 0.5 * self.full["actor"] else set()
        state = [v for s in trainer.optimizers[0].state.values() for k, v in s.items() if k != "step"]
        there |= {"optimizer"} if any(cases.local(v).untyped_storage().nbytes() >= 256 for v in state) else set()
        self.seen.append((moment, sorted(there)))


def train(
    case: str, kind: str, world: int, folder: Path, models: dict[str, str], optim: OptimConfig | None = None,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train a case whose reward is a model, as `cases.fit` does."""
    cases.CASES["paged"] = {
        "optim": optim or OptimConfig(actor_lr=1e-3, critic_lr=2e-3),
        "ppo": PPOConfig(epochs=2, minibatches=2, micro_batch_size=2),
        "reward": [cases.wordy, RewardConfig(source="REWARD", name="model")],
    }
    return cases.fit(case, models, kind, world, folder, **options)


def main(folder: str, argument: str) -> None:
    """Run every job."""
    _paging.SMALLEST = 256
    torch.set_num_threads(1)
    where, rank, world = Path(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for job in cases.parse(argument):
        look = Look()
        saver = cases.saver(job["save"])
        options = {"devices": world, "models": job["models"], "enable_checkpointing": True}
        roles = OffloadRoles(ROLES, optimizer=True)
        plain = train("paged", job["kind"], world, where, **options)
        paged = train("paged", job["kind"], world, where, callbacks=[roles, look, saver], **options)
        resumed = train(
            "paged", job["kind"], world, where, callbacks=[OffloadRoles(ROLES)], ckpt=f"{job['save']}/step=8.ckpt",
            **options,
        )  # fmt: skip
        for other in (paged, resumed):
            for name, weight in plain["weights"].items():
                assert torch.equal(weight, other["weights"][name]), f"{job['kind']}: {name}"
        torch.save({"seen": look.seen, "bytes": roles.bytes}, where / f"{job['kind']}-{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
