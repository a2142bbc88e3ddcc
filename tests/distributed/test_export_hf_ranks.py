"""ExportHF under every strategy: what plain transformers and PEFT load is what the ranks have trained together."""

from __future__ import annotations

import json

import cases
import pytest
import spawn
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

JOBS = [(kind, case) for kind in ("ddp", "fsdp1", "fsdp2") for case in ("full", "shared")]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    jobs = [{"kind": kind, "case": case, "models": cases.folders()} for kind, case in JOBS]
    spawn.succeed(2, str(folder), json.dumps(jobs), limit=400, script="export_hf_ranks.py")
    return folder


@pytest.mark.slow  # two ranks, seven fits
def test_what_is_exported_is_what_was_trained(exported):
    for kind, case in JOBS:
        folder = exported / f"{kind} {case}"
        ours = torch.load(exported / f"{kind} {case}.pt")
        assert len(AutoTokenizer.from_pretrained(folder)) == 64
        if case == "full":
            plain = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
            prefix = "actor.model."
            assert plain.keys() == {n.removeprefix(prefix) for n in ours if n.startswith(prefix)}
            for name, p in plain.items():
                assert torch.equal(p, ours[prefix + name].float()), f"{kind} {name}"
            continue
        from peft import PeftModel

        base = AutoModelForCausalLM.from_pretrained(cases.folders()["actor"])
        plain = dict(PeftModel.from_pretrained(base, folder).named_parameters())
        adapters = {n: p for n, p in ours.items() if n.startswith("actor.") and ".policy." in n}
        assert adapters
        for name, p in adapters.items():
            theirs = plain[name.removeprefix("actor.model.").replace(".policy.", ".default.")]
            assert torch.equal(theirs, p.float()), f"{kind} {name}"


@pytest.mark.slow
def test_an_export_that_fails_on_one_rank_stops_all(exported):
    for rank in (0, 1):
        text = (exported / f"error-{rank}.txt").read_text()
        assert text.startswith("`ExportHF(directory=")
        assert "could not write. FileNotFoundError" in text
