"""What sharded runs have saved is exported as what one device has: the same files, the same weights."""

from __future__ import annotations

import json

import cases
import pytest
import spawn
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lit_ppo.export import export, load_module

KINDS = ["fsdp2-sharded", "fsdp1-sharded"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["full", "scarce"])  # whole models with tied embeddings; adapters
def test_an_export_does_not_tell_how_the_run_was_sharded(tmp_path, case):
    models = cases.folders()
    options = {"enable_checkpointing": True, "callbacks": [cases.saver(str(tmp_path / "alone"))]}
    alone = cases.fit(case, models, "auto", 1, tmp_path, **options)
    torch.save(alone["rollouts"], tmp_path / "rollouts")
    base = {"case": case, "models": models, "replay": str(tmp_path / "rollouts")}
    jobs = [base | {"name": kind, "kind": kind, "save": str(tmp_path / kind)} for kind in KINDS]
    spawn.succeed(2, str(tmp_path), json.dumps(jobs), limit=300)
    for role in ["actor", "critic"]:
        merge = case == "scarce" and role == "critic"
        folders = {}
        for kind in ["alone", *KINDS]:
            [ckpt] = (tmp_path / kind).glob("last.ckpt")
            assert ckpt.is_dir() == (kind != "alone")
            folders[kind] = export(load_module(ckpt), tmp_path / f"{kind}-{role}", role, merge=merge)
        want = {path.name: path for path in folders["alone"].iterdir()}
        for kind in KINDS:
            got = {path.name: path for path in folders[kind].iterdir()}
            assert got.keys() == want.keys()
            for name, path in want.items():
                if not name.endswith(".safetensors"):
                    assert got[name].read_text() == path.read_text(), name
                    continue
                theirs = load_file(path)
                assert load_file(got[name]).keys() == theirs.keys()
                for key, tensor in load_file(got[name]).items():
                    assert tensor.dtype == theirs[key].dtype
                    torch.testing.assert_close(tensor, theirs[key], rtol=0, atol=1e-5)
    if case == "full":
        whole, spread = (
            AutoModelForCausalLM.from_pretrained(tmp_path / f"{kind}-actor") for kind in ("alone", KINDS[0])
        )
        ids = torch.arange(3, 12)[None]
        torch.testing.assert_close(spread(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-4)
