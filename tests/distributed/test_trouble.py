"""What goes wrong on one rank ends the run on all of them, soon, with a reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import cases
import pytest
import spawn
import torch

from lit_ppo.ranks import check_device
from lit_ppo.sharding.folders import is_folder, read_folder, recover

SAID = {  # by mistake, what the ranks read; one text for both unless one of them is told of the other's
    "another seed": "`seed` differs between ranks: 0 on rank 0, 1 on rank 1",
    "another batch size": "`PromptDataModule.batch_size` differs between ranks: 8 on rank 0, 4 on rank 1",
    "other prompts": "`PromptDataModule.train` differs between ranks",
    "no such folder on one rank": (
        "Rank 1 failed in the checks before the run, so all ranks stop. ValueError",
        "'/nowhere'",
    ),
    "tensor parallel": "`ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)`",
    "flat parameters": "`FSDPStrategy(use_orig_params=False)` leaves no parameters to tell roles",
    "four devices, two processes": "does not match the world size (2)",
    "16-mixed": "does not support `Fabric(..., precision='16-mixed')`",
    "a quantized trunk": "FSDP2 shards floating-point weights only",
    "a damaged file": ("could not be loaded", "Rank 0 failed in loading the models, so all ranks stop. ValueError"),
    "two runs in one": "`reference` differs between ranks: None on rank 0",
}


@pytest.mark.slow
def test_mistakes_are_told_on_every_rank_within_seconds(tmp_path):
    pytest.importorskip("bitsandbytes")
    models = cases.folders()
    shutil.copytree(models["actor"], tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"0" * 100)
    spawn.succeed(2, str(tmp_path), json.dumps(models), script="mistakes.py", limit=200)
    seen = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for rank in range(2):
        assert seen[rank].keys() == SAID.keys()
        for mistake, said in SAID.items():
            expected = said if isinstance(said, str) else said[rank]
            assert expected in seen[rank][mistake]["text"], mistake
            assert seen[rank][mistake]["seconds"] < 20, mistake


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        ("fsdp2-sharded", "rollout"),
        ("fsdp2-sharded", "score"),
        ("ddp", "update"),
        ("fsdp1-sharded", "step"),
        ("fsdp2-sharded", "save"),
        ("ddp", "validation"),
    ],
)
def test_a_killed_rank_ends_the_others_and_costs_no_checkpoint(tmp_path, kind, moment):
    job = {"models": cases.folders(), "kind": kind, "moment": moment}
    left, killed = spawn.run(2, str(tmp_path), json.dumps(job), script="chaos.py", limit=180)
    assert killed.code == -9, killed.output[-3000:]
    assert left.code not in (0, -9)
    assert left.seconds - killed.seconds < 30
    assert "Connection closed by peer" in left.output or "Connection reset by peer" in left.output
    for name in ("step=8.ckpt", "last.ckpt"):
        path = tmp_path / name
        ckpt = read_folder(path) if is_folder(path) else torch.load(path, weights_only=True)
        assert ckpt["lit_ppo"]["iteration"] == 2
        assert {"actor.model.lm_head.weight", "critic.model.score.weight"} <= ckpt["state_dict"].keys()
    if moment == "save":
        assert (tmp_path / "step=16.ckpt.part").exists()
        assert not (tmp_path / "step=16.ckpt").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_that_run_out_of_memory_together_go_on_as_if_they_had_not(tmp_path):
    models = cases.folders()
    alone = cases.fit("full", models, "auto", 1, tmp_path)
    torch.save(alone["rollouts"], tmp_path / "full.rollouts")
    base = {"case": "full", "models": models, "replay": str(tmp_path / "full.rollouts")}
    jobs = [
        base | {"name": f"{kind} {moment} {ranks}", "kind": kind, "short": moment, "ranks": ranks}
        for kind, moment, ranks in [
            ("fsdp2", "update forward", [0, 1]),
            ("fsdp2", "update backward", [0, 1]),
            ("fsdp2", "score forward", [0, 1]),
            ("fsdp2", "rollout", [1]),  # each rank samples by itself
            ("ddp", "update backward", [1]),
        ]
    ]
    spawn.succeed(2, str(tmp_path), json.dumps(jobs), limit=240)
    for job in jobs:
        for rank in range(2):
            got = torch.load(tmp_path / f"{job['name']}-{rank}.pt", weights_only=False)
            assert got["metrics"][-1]["oom/events"] == 1, job["name"]
            for name, weight in alone["weights"].items():
                torch.testing.assert_close(
                    got["weights"][name],
                    weight,
                    rtol=0,
                    atol=1e-5,
                    msg=lambda m, n=name, j=job: f"{j['name']} {n}: {m}",
                )


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_a_rank_that_runs_out_of_memory_alone_stops_the_run_with_its_report(tmp_path, kind):
    models = cases.folders()
    job = {"name": "x", "case": "full", "kind": kind, "models": models, "short": "update forward", "ranks": [1]}
    left, short = spawn.run(2, str(tmp_path), json.dumps([job | {"timeout": 20}]), limit=150)
    assert short.code not in (0, -9)
    assert "Out of memory" in short.output
    if kind == "fsdp2":
        assert "the other ranks are not at the same point" in short.output
    assert left.code not in (0, -9)
    assert left.seconds - short.seconds < 30


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_nodes_train_as_one_device(tmp_path):
    """Two launchers that know each other by an address and their node's number, as on two machines."""
    models = cases.folders()
    alone = cases.fit("full", models, "auto", 1, tmp_path)
    torch.save(alone["rollouts"], tmp_path / "full.rollouts")
    jobs = [
        {"name": kind, "case": "full", "kind": kind, "models": models, "replay": str(tmp_path / "full.rollouts")}
        for kind in ("ddp", "fsdp2-full")
    ]
    for node, end in enumerate(spawn.torchrun(2, str(tmp_path), json.dumps(jobs), limit=240)):
        assert end.code == 0, f"node {node}: {end.output[-4000:]}"
    for kind in ("ddp", "fsdp2-full"):
        for rank in range(2):
            got = torch.load(tmp_path / f"{kind}-{rank}.pt", weights_only=False)
            for name, weight in alone["weights"].items():
                torch.testing.assert_close(got["weights"][name], weight, rtol=0, atol=1e-5)


def test_a_folder_whose_replacement_was_cut_off_is_put_back(tmp_path):
    path = tmp_path / "last.ckpt"

    def make(name: str, content: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "meta.pt").write_text(content)
        return folder

    make("last.ckpt.old", "old")
    make("last.ckpt.part", "new")  # whole: the old one was moved away only then
    recover(path)
    assert (path / "meta.pt").read_text() == "new"
    shutil.rmtree(path)
    recover(path)
    assert (path / "meta.pt").read_text() == "old"
    (tmp_path / "last.ckpt.part").mkdir()  # a write that was cut off: not taken for anything
    shutil.rmtree(path)
    recover(path)
    assert not path.exists()
    recover(None)


def test_a_role_on_the_device_of_another_rank():
    cuda = [torch.device("cuda", i) for i in range(2)]
    with pytest.raises(ValueError, match=r"`reference.device='cuda:1'` is where rank 1 of this node computes"):
        check_device("reference.device", "cuda:1", cuda)
    with pytest.raises(ValueError, match="is where rank 0 of this node computes"):
        check_device("reference.device", "cuda", cuda)
    for device in (None, "cpu", "cuda:2"):
        check_device("reference.device", device, cuda)
    check_device("reference.device", "cuda:0", cuda[:1])  # alone on the node: its own
