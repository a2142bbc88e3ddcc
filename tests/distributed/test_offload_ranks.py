"""OffloadRoles and paged optimizer state under FSDP: shards come and go, and the weights are those of a run without."""

from __future__ import annotations

import gc
import json

import cases
import offload_ranks
import pytest
import spawn
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lit_ppo import OptimConfig
from lit_ppo.callbacks import OffloadRoles, _paging

AWAY_IN_A_ROLLOUT = [("rollout", ["shards"]), ("shards", ["shards"]), ("whole", []), ("shards", ["shards"])]
ITERATION = [
    *AWAY_IN_A_ROLLOUT,
    ("score", ["critic", "reference", "reward", "shards"]),
    ("update", ["critic", "optimizer", "shards"]),
]


@pytest.fixture(autouse=True)
def tiny_storages_count(monkeypatch):
    monkeypatch.setattr(_paging, "SMALLEST", 256)


def iterations(seen):
    """What was seen in each iteration of training; a validation has no update."""
    starts = [i for i, (moment, _) in enumerate(seen) if moment == "rollout"]
    cut = [seen[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    return [part[: len(ITERATION)] for part in cut if "update" in dict(part)]


def check(seen):
    """From the second iteration on everything is where it computes, and only then."""
    first, *others = iterations(seen)
    assert first[:4] == AWAY_IN_A_ROLLOUT
    assert len(others) == cases.ITERATIONS - 1
    assert all(other == ITERATION for other in others), others


def test_one_rank(tmp_path):
    look, roles = offload_ranks.Look(), OffloadRoles(offload_ranks.ROLES, optimizer=True)
    plain = offload_ranks.train("paged", "fsdp2", 1, tmp_path, cases.folders())
    torch.distributed.destroy_process_group()
    ours = offload_ranks.train("paged", "fsdp2", 1, tmp_path, cases.folders(), callbacks=[roles, look])
    for name, weight in plain["weights"].items():
        assert torch.equal(weight, ours["weights"][name]), name
    check(look.seen)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_several_ranks_and_checkpoints(tmp_path, world):
    kinds = ["fsdp2-sharded", "fsdp2-full", "fsdp1-sharded", "fsdp1-full"]
    jobs = [{"kind": kind, "models": cases.folders(), "save": str(tmp_path / kind)} for kind in kinds]
    spawn.succeed(world, str(tmp_path), json.dumps(jobs), limit=150 * world, script="offload_ranks.py")
    for kind in kinds:
        for rank in range(world):
            check(torch.load(tmp_path / f"{kind}-{rank}.pt")["seen"])


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
def test_an_actor_whose_weights_nobody_gathers_cannot_leave(tmp_path):
    with pytest.raises(ValueError, match=r"computes in every phase\. Leave it out; only where a rollout"):
        offload_ranks.train("paged", "auto", 1, tmp_path, cases.folders(), callbacks=[OffloadRoles("actor")])
    with pytest.raises(ValueError, match="`actor` is whole on each rank here"):  # FSDP1 on one rank cuts nothing
        offload_ranks.train("paged", "fsdp1", 1, tmp_path, cases.folders(), callbacks=[OffloadRoles("actor")])


class Held(Callback):
    """Bytes on the GPU once a rollout has its weights gathered, and where the optimizer's state is after an update."""

    def on_train_start(self, trainer, pl_module):
        self.bytes, self.state = [], set()
        pl_module.gather_listeners.append(lambda _, whole: whole and self.bytes.append(torch.cuda.memory_allocated()))

    def on_train_batch_end(self, trainer, *_):
        states = [v for s in trainer.optimizers[0].state.values() for k, v in s.items() if k != "step"]
        self.state |= {cases.local(v).device.type for v in states}


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["8bit", "float32"])
def test_on_cuda_a_rollout_has_the_memory_of_what_is_away(tmp_path, state):
    """One rank, NCCL: shards and optimizer state wait in pinned memory; the weights come out as without."""
    found, memory, replay = [], [], None
    for paged in (False, True):
        held, roles = Held(), OffloadRoles(offload_ranks.ROLES)
        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
        optim = OptimConfig(actor_lr=1e-3, critic_lr=2e-3, state=state, paged=paged or state == "float32")
        result = offload_ranks.train(
            "paged", "fsdp2", 1, tmp_path, cases.folders(), optim=optim, replay=replay, accelerator="gpu",
            strategy=strategy, limit_train_batches=3, callbacks=[*([roles] if paged else []), held],
        )  # fmt: skip
        replay = result["rollouts"] or replay
        found.append(result["weights"])
        memory.append(held.bytes)
        assert held.state == {"cpu" if optim.paged else "cuda"}
        del result
        gc.collect()  # the first run is not to be held beside the second
        torch.distributed.destroy_process_group()
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert roles.bytes.keys() == set(offload_ranks.ROLES)
    away = sum(roles.bytes.values())
    assert away > 4 * 60_000
    for plain, paged in zip(memory[0][1:], memory[1][1:], strict=True):  # the first one learns
        assert plain - paged >= 0.9 * away


@pytest.mark.gpu
def test_paged_state_under_ddp_is_the_same(tmp_path):
    """One rank, NCCL; the two runs sample alike, so a difference would show."""
    found = []
    for paged in (False, True):
        optim = OptimConfig(actor_lr=1e-3, critic_lr=2e-3, state="8bit", paged=paged)
        result = offload_ranks.train(
            "paged", "ddp", 1, tmp_path, cases.folders(), optim=optim, accelerator="gpu", strategy=DDPStrategy(),
            limit_train_batches=3, callbacks=[OffloadRoles(["critic", "reference", "reward"])] if paged else [],
            replay=found[0]["rollouts"] if paged else None,
        )  # fmt: skip
        found.append({"weights": result["weights"], "rollouts": result["rollouts"]})
        torch.distributed.destroy_process_group()
    for name, weight in found[0]["weights"].items():
        torch.testing.assert_close(found[1]["weights"][name], weight, rtol=0, atol=1e-5, msg=name)
