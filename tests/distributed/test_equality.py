"""Any number of ranks, under any strategy, trains as one device does: one spawn a number of ranks, all cases in it."""

from __future__ import annotations

import json
from pathlib import Path

import cases
import pytest
import spawn
import torch

FAST = ["full", "scarce"]
KINDS = ["ddp", "fsdp2", "fsdp1"]
OWN = {"rollout/tokens_per_s", "update/tokens_per_s", "oom/micro_batch"}
"""What depends on the machine, besides times, or on how many rows a rank has."""
ATOL = {"two dtypes": 1e-4}
"""Of weights: a bfloat16 trunk makes a large step of the last bit of a sum over ranks, and metrics show it soon."""


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """Each case on one device, and a file of what it sampled."""
    folder, done = tmp_path_factory.mktemp("alone"), {}

    def run(case: str):
        if case not in done:
            result = cases.forgettable(cases.fit(case, cases.folders(), "auto", 1, folder))
            torch.save(result["rollouts"], folder / f"{case}.rollouts")
            done[case] = result | {"file": str(folder / f"{case}.rollouts")}
        return done[case]

    return run


@pytest.fixture(scope="session")
def spread(tmp_path_factory, alone):
    """Cases under every strategy on so many ranks: what each rank saw, by (strategy, case)."""
    done = {}

    def run(world: int, which: list[str]):
        if (world, *which) not in done:
            folder = tmp_path_factory.mktemp(f"{world}-ranks")
            pairs = [(kind, case) for kind in KINDS for case in which]
            jobs = [
                {"name": f"{kind} {case}", "case": case, "kind": kind, "models": cases.folders()}
                | {"replay": alone(case)["file"]}
                for kind, case in pairs
            ]
            spawn.succeed(world, str(folder), json.dumps(jobs), limit=60 + 25 * world * len(jobs))
            done[(world, *which)] = {
                (kind, case): [load(folder / f"{kind} {case}-{rank}.pt") for rank in range(world)]
                for kind, case in pairs
            }
        return done[(world, *which)]

    return run


def load(path: Path):
    return torch.load(path, weights_only=False)


def start(case: str) -> dict[str, torch.Tensor]:
    """The weights that a case starts from."""
    run = cases.module(case, **cases.folders())
    run.configure_model()
    return cases.weights(run)


def check(got, want, case, kind, world):
    """A rank's weights, metrics and samples against those of one device."""
    moved, atol = 0.0, ATOL.get(case, 1e-5)
    for name, before in start(case).items():
        moved = max(moved, float((want["weights"][name] - before).abs().max()))
        torch.testing.assert_close(
            got["weights"][name],
            want["weights"][name],
            rtol=0,
            atol=atol,
            msg=lambda m, name=name: f"{name}: {m}",
        )
    assert moved > 1e-3
    assert got["weights"].keys() == want["weights"].keys()
    assert len(got["metrics"]) == len(want["metrics"]) == cases.ITERATIONS
    same = cases.ITERATIONS if case not in ATOL else 1
    for mine, its in zip(got["metrics"][:same], want["metrics"][:same], strict=True):
        assert mine.keys() - OWN == its.keys() - OWN
        assert mine.get("policy/ratio_first_step", 1.0) == 1.0  # scored in the update's own cut, on every rank
        for name in mine.keys() - OWN:
            assert mine[name] == pytest.approx(its[name], rel=1e-4 if case not in ATOL else 1e-3, abs=atol), name
    assert got["global_step"] == want["global_step"]
    if case not in ATOL:
        assert got["val"] == pytest.approx(want["val"], abs=1e-6)
        assert all(got["alike"])  # float32 on one kind of CPU: no kernel rounds a token differently
    assert got["dtypes"] == want["dtypes"]
    if kind.startswith("fsdp"):  # what a rank holds
        whole = got["odd"] if kind == "fsdp1" else 0
        assert got["local"] <= whole + (want["local"] - whole) / world * 1.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", FAST)
def test_two_ranks_train_as_one_device(alone, spread, kind, case):
    for got in spread(2, FAST)[kind, case]:
        check(got, alone(case), case, kind, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", list(cases.CASES))
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.timeout(2400)
def test_one_and_four_ranks_train_as_one_device(alone, spread, kind, case, world):
    ranks = spread(world, list(cases.CASES))[kind, case]
    for got in ranks:
        check(got, alone(case), case, kind, world)
    if case == "scarce" and world == 4:
        assert sorted(len(got["alike"]) for got in ranks)[0] == 0  # one had no prompt at all


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", sorted(set(cases.CASES) - set(FAST)))
def test_two_ranks_train_the_other_cases_as_one_device(alone, spread, kind, case):
    for got in spread(2, sorted(set(cases.CASES) - set(FAST)))[kind, case]:
        check(got, alone(case), case, kind, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bfloat16_trains_alike_under_every_strategy(tmp_path):
    """Rounded, so not equal; but the first ratio is exactly 1, and rotary frequencies stay float32."""
    models = cases.folders()
    base = {"case": "shared", "models": models}
    jobs = []
    for precision in ("bf16-mixed", "bf16-true"):
        alone = cases.fit("shared", models, "auto", 1, tmp_path, precision=precision)
        torch.save(cases.forgettable(alone), tmp_path / f"{precision}.pt")
        torch.save(alone["rollouts"], tmp_path / f"{precision}.rollouts")
        replay = str(tmp_path / f"{precision}.rollouts")
        jobs += [
            base | {"name": f"{kind} {precision}", "kind": kind, "precision": precision, "replay": replay}
            for kind in KINDS
        ]
    spawn.succeed(2, str(tmp_path), json.dumps(jobs), limit=400)
    for job in jobs:
        got, want = load(tmp_path / f"{job['name']}-1.pt"), load(tmp_path / f"{job['precision']}.pt")
        assert got["dtypes"] == want["dtypes"], job["name"]
        assert got["buffers"] == ["torch.float32"], job["name"]
        assert got["metrics"][0]["policy/ratio_first_step"] == 1.0, job["name"]
        for name, weight in want["weights"].items():
            # gathered, so rounded to what FSDP1 computes in; what is held and trained is in `dtypes`
            torch.testing.assert_close(got["weights"][name].float(), weight.float(), rtol=0, atol=1e-2)
