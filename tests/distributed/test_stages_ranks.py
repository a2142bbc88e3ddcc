"""SFT and the reward model train on several ranks, under any strategy, as on one device; one rank has fewer rows."""

from __future__ import annotations

import json

import pytest
import spawn
import stage_ranks
import tiny
import torch

from lit_ppo.export import read_checkpoint


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_ranks_trains_as_one_device_does(tmp_path, world):
    sources = {"sft": tiny.folder("llama-tied"), "reward": tiny.folder(labels=1)}
    kinds = [(kind, strategy) for kind in sources for strategy in ("ddp", "fsdp2", "fsdp1")]
    jobs = [(kind, strategy, sources[kind]) for kind, strategy in kinds]
    spawn.succeed(world, str(tmp_path), json.dumps(jobs), limit=120 * world, script="stage_ranks.py")
    alone = {kind: stage_ranks.fit(kind, "auto", 1, source, tmp_path) for kind, source in sources.items()}
    for kind, strategy in kinds:
        expected = read_checkpoint(alone[kind]["ckpt"])
        for rank in range(world):
            found = torch.load(tmp_path / f"{kind}-{strategy}-{rank}.pt", weights_only=False)
            assert found["step"] == alone[kind]["step"] == 4
            assert found["metrics"] == pytest.approx(alone[kind]["metrics"], rel=1e-4)
        ckpt = read_checkpoint(found["ckpt"])
        for name, weight in expected["state_dict"].items():
            torch.testing.assert_close(ckpt["state_dict"][name], weight, rtol=1e-3, atol=2e-4)
        if kind == "reward":
            for name in ("score_mean", "score_std"):
                assert ckpt["lit_ppo"][name] == pytest.approx(expected["lit_ppo"][name], rel=1e-3, abs=1e-4)
