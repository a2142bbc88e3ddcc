"""The same YAML under every launcher that docs/scaling.md names: none, Lightning's own, torchrun, SLURM."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cases
import pytest
import spawn
import tiny
import torch
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FSDP2 = ["--trainer.strategy=ModelParallelStrategy", "--trainer.strategy.data_parallel_size=2"]
FSDP2 += ["--trainer.strategy.tensor_parallel_size=1", "--trainer.strategy.save_distributed_checkpoint=false"]


def commands(launcher: str) -> list[tuple[list[str], dict[str, str]]]:
    """The processes that a launcher has a user start, each with what the cluster puts into its environment."""
    here = [sys.executable, "-m", "lit_ppo", "fit", "--config", "run.yaml"]
    if launcher == "one device":
        return [([*here, "--trainer.devices=1", "--trainer.strategy=auto"], {})]
    if launcher == "its own":
        return [(here, {})]
    if launcher == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        return [([*start, f"--master-port={spawn.free_port()}", *here[1:], *FSDP2], {})]
    cluster = {"SLURM_JOB_ID": str(spawn.free_port()), "SLURM_JOB_NAME": "ppo", "SLURM_NTASKS": "2"}
    cluster |= {"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NODELIST": "127.0.0.1", "SLURM_LOCALID": "0"}
    nodes = ["--trainer.devices=1", "--trainer.num_nodes=2"]
    return [([*here, *nodes], cluster | {"SLURM_PROCID": str(n), "SLURM_NODEID": str(n)}) for n in range(2)]


def test_a_yaml_trains_alike_under_every_launcher(tmp_path, monkeypatch):
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for launcher in ("one device", "its own", "torchrun", "SLURM"):
        folder = tmp_path / launcher
        folder.mkdir()
        (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in tiny.rows(16)))
        config = {
            "seed_everything": 0,
            "model": {
                "actor": cases.folders()["actor"],
                "reward": "lit_ppo.rewards.rules.length_penalty",
                "sampling": {"max_new_tokens": 4, "temperature": 1.0},
                "ppo": {"epochs": 2},
                "optim": {"actor_lr": 1e-3},
            },
            "data": {"train": "p.jsonl", "batch_size": 8},
            "trainer": {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 1},
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        monkeypatch.chdir(folder)
        for end in spawn.launch(commands(launcher), str(folder), 240):
            assert end.code == 0, f"{launcher}: {end.output[-3000:]}"
        saved = list(Path(folder).rglob("last.ckpt"))
        assert len(saved) == 1, launcher
        weights[launcher] = torch.load(saved[0], weights_only=True)["state_dict"]
    for launcher, found in weights.items():
        for name, weight in weights["one device"].items():
            torch.testing.assert_close(
                found[name], weight, rtol=0, atol=1e-5, msg=lambda m, n=name, k=launcher: f"{k}, {n}: {m}"
            )
