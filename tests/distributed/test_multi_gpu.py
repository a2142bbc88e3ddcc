"""Two GPUs or more of one host, over NCCL: the same numbers on any of them, and nobody left hanging."""

from __future__ import annotations

import json

import cases
import pytest
import spawn
import tiny
import torch

from lit_ppo import RewardConfig

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(900)]

KINDS = ["ddp", "fsdp2", "fsdp1"]
WHICH = ["full", "shared", "two dtypes", "scarce", "no critic"]
ATOL = {"two dtypes": 1e-4}
"""Of weights: a bfloat16 trunk makes a large step of the last bit of a sum over ranks, and metrics show it soon."""


@pytest.fixture(autouse=True)
def two_gpus():
    """Skip what this host has too few GPUs for."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def models() -> dict[str, str]:
    """What the cases load; float32, where `auto` would be bfloat16 under adapters."""
    return {**cases.folders(), "dtype": "float32"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Each case on one GPU, and a file of what it sampled."""
    folder, done = tmp_path_factory.mktemp("alone"), {}

    def run(case: str):
        if case not in done:
            result = cases.fit(case, models(), "auto", 1, folder, accelerator="gpu")
            torch.save(result["rollouts"], folder / f"{case}.rollouts")
            done[case] = cases.forgettable(result) | {"file": str(folder / f"{case}.rollouts")}
        return done[case]

    return run


def job(name: str, case: str, kind: str, **options) -> dict:
    return {"name": name, "case": case, "kind": kind, "models": models(), "accelerator": "gpu"} | options


def load(path):
    return torch.load(path, weights_only=False, map_location="cpu")


def needs(gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_number_of_gpus_trains_as_one(tmp_path, alone, world):
    needs(world)
    jobs = [job(f"{kind} {case}", case, kind, replay=alone(case)["file"]) for kind in KINDS for case in WHICH]
    spawn.succeed(world, str(tmp_path), json.dumps(jobs), limit=60 + 25 * len(jobs))
    wrong = []
    for each in jobs:
        want, atol = alone(each["case"]), ATOL.get(each["case"], 1e-5)
        for rank in range(world):
            got = load(tmp_path / f"{each['name']}-{rank}.pt")
            assert got["weights"].keys() == want["weights"].keys()
            off = max(float((got["weights"][n] - w).abs().max()) for n, w in want["weights"].items())
            if off > atol:
                wrong.append(f"{each['name']}, rank {rank}: weights differ by {off:.1e}")
            for number, (mine, its) in enumerate(zip(got["metrics"], want["metrics"], strict=True)):
                if number and each["case"] in ATOL:
                    break
                for name in ("objective/kl", "loss/policy_avg", "optim/grad_norm_actor", "objective/scores"):
                    if name in its and mine[name] != pytest.approx(its[name], rel=1e-3, abs=1e-5):
                        wrong.append(
                            f"{each['name']}, rank {rank}, iteration {number}: {name} {mine[name]}, {its[name]}"
                        )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", ["fsdp1-sharded", "fsdp2-sharded", "fsdp1-full"])
def test_a_checkpoint_of_two_gpus_goes_on_at_one_and_at_two(tmp_path, alone, kind):
    case = "two dtypes"
    replay = alone(case)["file"]
    spawn.succeed(2, str(tmp_path), json.dumps([job("saved", case, kind, replay=replay, save=str(tmp_path / "ckpt"))]))
    again = job("again", case, kind, replay=replay, ckpt=str(tmp_path / "ckpt" / "step=8.ckpt"))
    for world in (1, 2):
        spawn.succeed(world, str(tmp_path), json.dumps([again]))
        got = load(tmp_path / f"again-{world - 1}.pt")
        assert len(got["metrics"]) == cases.ITERATIONS - 2
        for name, weight in alone(case)["weights"].items():
            torch.testing.assert_close(
                got["weights"][name], weight, rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.filterwarnings("ignore:You passed `num_labels=1`")
@pytest.mark.parametrize("where", [{"device": "cuda:1"}, {"device_map": "balanced"}, {"device_map": {"": 1}}])
def test_a_frozen_reward_model_has_a_gpu_of_its_own(tmp_path, where):
    """As many tokens, the same scores, and nothing of the reward model on the first GPU."""
    if "device_map" in where:
        pytest.importorskip("accelerate")
    seen = []
    for options in ({}, where):
        watch = cases.Watch(None)
        reward = RewardConfig(source=models()["reward"], dtype="float32", name="model", **options)
        module = cases.module("full", **models(), reward=reward)
        trainer = tiny.trainer(tmp_path, accelerator="gpu", callbacks=[watch], limit_train_batches=2)
        trainer.fit(module, cases.data("full"))
        on = {p.device for p in module.rewards.rewards[0].model.parameters()}
        seen.append(([m["objective/scores"] for m in watch.metrics], on))
    (here, one), (there, other) = seen
    assert there == pytest.approx(here, rel=1e-4, abs=1e-5)
    assert one == {torch.device("cuda", 0)}
    assert torch.device("cuda", 1) in other
    if where != {"device_map": "balanced"}:
        assert other == {torch.device("cuda", 1)}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1-sharded"])
def test_a_killed_rank_ends_the_others(tmp_path, kind):
    """Under torchrun, which sees it: NCCL alone would have the others wait for its time limit."""
    given = {"models": models(), "kind": kind, "moment": "update", "accelerator": "gpu"}
    (end,) = spawn.torchrun(1, str(tmp_path), json.dumps(given), ranks=2, script="chaos.py", limit=240)
    assert end.code != 0
    assert "SIGKILL" in end.output
    assert (tmp_path / "last.ckpt").exists()


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_a_rank_that_runs_out_of_memory_alone_ends_the_run_with_its_report(tmp_path, kind):
    given = job("x", "full", kind, short="update forward", ranks=[1], timeout=20)
    (end,) = spawn.torchrun(1, str(tmp_path), json.dumps([given]), ranks=2, limit=240)
    assert end.code != 0
    assert "Out of memory" in end.output


@pytest.mark.parametrize(
    ("kind", "moment", "ranks"),
    [("fsdp2", "update forward", [0, 1]), ("fsdp2", "rollout", [1]), ("ddp", "update backward", [1])],
)
def test_ranks_that_run_out_of_memory_go_on_where_they_can(tmp_path, alone, kind, moment, ranks):
    given = job("x", "full", kind, short=moment, ranks=ranks, replay=alone("full")["file"])
    spawn.succeed(2, str(tmp_path), json.dumps([given]))
    for rank in range(2):
        got = load(tmp_path / f"x-{rank}.pt")
        assert got["metrics"][-1]["oom/events"] == 1
        for name, weight in alone("full")["weights"].items():
            torch.testing.assert_close(
                got["weights"][name], weight, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
