"""`benchmarks/memory.py` runs: rows of the grid, presets, rank 0 of several; on tiny models, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RUN = """
model:
  actor: meta-llama/Llama-3.1-8B-Instruct
  reward: lit_ppo.rewards.rules.length_penalty
  sampling: {max_new_tokens: 4}
  ppo: {epochs: 1, micro_batch_size: 2}
data: {train: prompts.jsonl, batch_size: 4, max_prompt_length: 8}
trainer: {precision: bf16-true, accelerator: cpu}
"""


def options(tmp_path: Path, *more: str, device: str = "cpu") -> list[str]:
    return ["--shape", "tiny", "--device", device, "--output", str(tmp_path), "--scratch", str(tmp_path), *more]


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    [path] = tmp_path.glob("memory_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_grid_writes_a_row_a_case_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.memory import main

    argv = options(tmp_path, "--grid", "--only", "8B nf4 496")
    main(argv)
    first = rows(tmp_path)
    assert [row["measured"]["iterations"] for row in first] == [2, 2]
    assert first[0]["models"]["tiny"]["hidden_size"] == 64
    assert {"rollout", "score", "update"} == first[0]["measured"]["allocated"].keys()
    main(argv)
    assert rows(tmp_path) == first


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_preset_runs_from_its_yaml(ranks, device, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN.replace("accelerator: cpu", f"accelerator: {device}"))
    more = ["--preset", str(path), "--cap", "12GB", *(["--rank-of", "4"] if ranks > 1 else [])]
    found = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(  # a process of its own: a fake process group is for good
        [sys.executable, "benchmarks/memory.py", *options(tmp_path, *more, device=device)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": found}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [row] = rows(tmp_path)
    assert "error" not in row, row["error"] + done.stderr
    assert row["cap"] == 12_000_000_000
    assert row["measured"]["iterations"] == 3
    assert row["measured"]["growth_mib"] <= 1
    assert row["measured"]["skipped_steps"] == 0
