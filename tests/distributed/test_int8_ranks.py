"""Embeddings in 8 bits on several ranks: rank 0 loads and rounds them, the others get what it has."""

from __future__ import annotations

import json

import cases
import pytest
import spawn
import torch


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_train_on_int8_embeddings_as_one_device(tmp_path):
    models = cases.folders() | {"embeddings": "int8"}
    alone = cases.fit("shared", models, "auto", 1, tmp_path)
    torch.save(alone["rollouts"], tmp_path / "rollouts")
    job = {"name": "ddp", "case": "shared", "kind": "ddp", "models": models, "replay": str(tmp_path / "rollouts")}
    spawn.succeed(2, str(tmp_path), json.dumps([job]), limit=300)
    for rank in (0, 1):
        got = torch.load(tmp_path / f"ddp-{rank}.pt", weights_only=False)
        assert "torch.int8" in got["dtypes"]
        assert all(got["alike"])
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(got["weights"][name], weight, rtol=0, atol=1e-5, msg=name)
