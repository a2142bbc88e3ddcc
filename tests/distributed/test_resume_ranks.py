"""A checkpoint of any number of ranks goes on at any other, as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path

import cases
import pytest
import spawn
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

WORLDS = [1, 2, 4]
KINDS = ["ddp", "fsdp2-full", "fsdp2-sharded", "fsdp1-full", "fsdp1-sharded"]
WHICH = ["full", "shared", "two dtypes"]


def runs(case: str, kind: str) -> bool:
    """Whether a case is tried: what FSDP1 does not cut matters to FSDP1, and to who goes on from it."""
    return case != "two dtypes" or kind in ("fsdp1-full", "fsdp1-sharded", "ddp")


def compatible(before: str, after: str) -> bool:
    """Full checkpoints are all the same; sharded ones are read by their own strategy, and where nothing is sharded."""
    if not before.endswith("sharded"):
        return not after.endswith("sharded")
    return after in (before, "ddp")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of checkpoints of every strategy and number of ranks; the runs on one device; what they sampled."""
    folder, alone = tmp_path_factory.mktemp("saved"), {}
    for case in WHICH:
        alone[case] = cases.fit(case, cases.folders(), "auto", 1, folder)
        torch.save(alone[case]["rollouts"], folder / f"{case}.rollouts")
    for world in WORLDS:
        jobs = [
            job(folder, f"{world} {kind} {case}", case, kind, save=str(folder / f"{world} {kind} {case}"))
            for kind in KINDS
            for case in WHICH
            if runs(case, kind)
        ]
        spawn.succeed(world, str(folder), json.dumps(jobs), limit=60 + 25 * world * len(jobs))
    return folder, alone


def job(folder: Path, name: str, case: str, kind: str, **options: str) -> dict[str, str]:
    replay = str(folder / f"{case}.rollouts")
    return {"name": name, "case": case, "kind": kind, "models": cases.folders(), "replay": replay} | options


@pytest.mark.parametrize("after", WORLDS)
def test_a_checkpoint_goes_on_at_any_number_of_ranks(saved, after):
    folder, alone = saved
    jobs = [
        job(
            folder,
            f"{before} {saver} to {after} {kind} {case}",
            case,
            kind,
            ckpt=str(folder / f"{before} {saver} {case}" / "step=8.ckpt"),
        )
        for before in WORLDS
        for saver in KINDS
        for kind in KINDS
        for case in WHICH
        if runs(case, saver)
        and runs(case, kind)
        and compatible(saver, kind)
        and (before == 2 or after == 2 or saver == kind)
    ]
    spawn.succeed(after, str(folder), json.dumps(jobs), limit=60 + 15 * after * len(jobs))
    for each in jobs:
        want = alone[each["case"]]
        for rank in range(after):
            got = torch.load(folder / f"{each['name']}-{rank}.pt", weights_only=False)
            assert len(got["metrics"]) == cases.ITERATIONS - 2, each["name"]
            for name, weight in want["weights"].items():
                torch.testing.assert_close(
                    got["weights"][name],
                    weight,
                    rtol=0,
                    atol=1e-4 if each["case"] == "two dtypes" else 1e-5,
                    msg=lambda m, n=name, e=each: f"{e} {n}: {m}",
                )
            if each["case"] == "two dtypes":  # whose last bits show in the metrics soon
                continue
            for mine, its in zip(got["metrics"], want["metrics"][2:], strict=True):
                for name in ("episode", "kl_coef", "lr", "objective/kl", "objective/scores", "optim/grad_norm_critic"):
                    assert mine[name] == pytest.approx(its[name], rel=1e-4, abs=1e-6), (each["name"], name)
