"""Under FSDP a frozen reference is cut, whole, quantized, or elsewhere, as its own configuration says."""

from __future__ import annotations

import json

import cases
import pytest
import spawn
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PLACES = {
    "cut": {},
    "whole": {"sharded": False},
    "quantized": {"quantize": "nf4"},
    "on the host": {"device": "cpu"},
}


def test_a_reference_is_where_its_configuration_says(tmp_path):
    pytest.importorskip("bitsandbytes")
    folders = cases.folders()
    jobs, alone = [], {}
    for place, options in PLACES.items():
        models = folders | {"reference": {"source": folders["actor"], **options}}
        alone[place] = cases.fit("full", models, "auto", 1, tmp_path)
        torch.save(alone[place]["rollouts"], tmp_path / f"{place}.rollouts")
        for kind in ("fsdp2", "fsdp1"):
            job = {"name": f"{kind} {place}", "case": "full", "kind": kind, "models": models}
            jobs.append(job | {"replay": str(tmp_path / f"{place}.rollouts")})
    spawn.succeed(2, str(tmp_path), json.dumps(jobs), limit=60 + 40 * len(jobs))
    for job in jobs:
        place = job["name"].split(" ", 1)[1]
        want = alone[place]
        for rank in range(2):
            got = torch.load(tmp_path / f"{job['name']}-{rank}.pt", weights_only=False)
            assert got["metrics"][0]["objective/kl"] == pytest.approx(want["metrics"][0]["objective/kl"], rel=1e-3)
            share = got["reference"] / want["reference"]
            assert share == (1.0 if place != "cut" else pytest.approx(0.5, abs=0.05)), job["name"]
            for name, weight in want["weights"].items():
                torch.testing.assert_close(got["weights"][name], weight, rtol=0, atol=1e-5)
