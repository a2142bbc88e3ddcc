"""FSDP2 runs out of memory at the same point on all ranks, here the only one, and takes the step again."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from lit_ppo.callbacks import OOMGuard

SLOW = [pytest.param(moment, marks=pytest.mark.slow) for moment in ("rollout forward", "score forward")]

DONE: dict[str, dict[str, Any]] = {}


def undisturbed(device, folder):
    """What the run does on one device."""
    if device not in DONE:
        options = {"accelerator": device, "limit_train_batches": 2}
        DONE[device] = cases.fit("full", cases.folders(), "auto", 1, folder, **options)
    return DONE[device]


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("public", [True, False], ids=["reset_iter_state", "without it"])
@pytest.mark.parametrize("moment", ["update forward", "update backward", "update attention backward", *SLOW])
def test_a_step_that_was_cut_off_is_taken_again(tmp_path, monkeypatch, device, public, moment):
    """torch 2.11 has no way to forget a step, so the private one is tested on every version."""
    if public and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("this torch has no FSDPModule.reset_iter_state")
    if not public:
        monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    if device == "gpu":
        torch.backends.cuda.matmul.allow_tf32 = False
    want = undisturbed(device, tmp_path)
    options = {"accelerator": device, "limit_train_batches": 2}
    shortage = cases.Shortage(moment, [0])
    kind = cases.strategy("fsdp2", 1) if device == "cpu" else cases.ModelParallelStrategy(1, 1)
    monkeypatch.setattr(cases, "strategy", lambda *_: kind)
    options["callbacks"] = [OOMGuard(dry_run=False), shortage]
    got = cases.fit("full", cases.folders(), "fsdp2", 1, tmp_path, want["rollouts"], **options)
    assert shortage.times == 1
    assert sum(got["trainer"].callbacks[1].policy.events.values()) == 1
    for name, weight in want["weights"].items():
        torch.testing.assert_close(got["weights"][name].cpu(), weight.cpu(), rtol=0, atol=1e-5)
