"""What the forecast adds under FSDP2 is what rank 0 of 4 allocates: counted on the CPU, by torch's profiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("sequential", ["true", "false"])
def test_gathered_weights_and_reduced_gradients_are_forecast(sequential):
    places = {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(TESTS / "distributed" / "fsdp2_memory.py"), sequential]
    done = subprocess.run(command, env=os.environ | places, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for phase, measured in found["measured"].items():
        assert measured == pytest.approx(found["forecast"][phase], rel=0.1), phase
    assert found["measured"].keys() == {"rollout", "score", "update"}
