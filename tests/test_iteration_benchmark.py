"""benchmarks/iteration.py: its rows are options that exist, it runs, and its tables are made of what it wrote."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import iteration  # noqa: E402

TINY = ["--shapes", "tiny", "--cells", "4x4", "--prompt", "6", "--device", "cpu", "--iterations", "2"]


def test_a_row_is_measured_once_and_reported(tmp_path, capsys):
    command = [*TINY, "--rows", "plain", "--output", str(tmp_path)]
    iteration.main(command)
    row = json.loads((tmp_path / "iteration.jsonl").read_text())
    found = row["measured"]
    assert found["response_tokens"] == 16
    assert found["prompt_tokens"] == 24
    assert found["checks"]["policy/ratio_first_step"] == pytest.approx(1, abs=1e-3)
    assert found["seconds"] >= found["rollout_s"] + found["score_s"] + found["update_s"] - 2e-3
    iteration.main(command)
    assert len((tmp_path / "iteration.jsonl").read_text().splitlines()) == 1
    row |= {"name": "lean", "options": iteration.ROWS["lean"], "error": "OutOfMemoryError: CUDA out of memory. Tried"}
    with (tmp_path / "iteration.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    iteration.main(["--report", "--output", str(tmp_path)])
    table = (tmp_path / "iteration.md").read_text()
    assert "## tiny: 4 x 4 new tokens, full fine-tuning of actor and critic" in table
    assert "| plain | float32 masters and moments | " in table
    assert "one role at a time, NF4 reference and reward | out of memory | |" in table
    widths = {line.count("|") for line in table.splitlines() if line.startswith("|")}
    assert widths == {12}


def test_levers_add_up():
    args = iteration.parser().parse_args(["--ablation", "1.5B", "8B", "--device", "cpu"])
    rows = iteration.rows_of(args)
    plain = rows[0]["options"]
    assert plain["precision"] == "32-true"
    assert plain["head"] == "naive"
    for before, after in pairwise(rows):
        if after["name"] != "plain":
            assert before["options"].keys() <= after["options"].keys()
            assert before["options"] != after["options"]


def test_model_flop_of_an_update():
    row = {"shape": "1.5B", "options": {}}
    found = {"seconds": 2.0, "update_s": 1.0, "prompt_tokens": 100, "response_tokens": 50}
    got = iteration.rates(row, found)
    layer = 1536 * 1536 * 2 + 2 * 1536 * 256 + 3 * 1536 * 8960
    assert got["update_flop"] == 6 * (2 * 28 * layer * 150 + 151936 * 1536 * 50)
    assert got["tokens_per_s"] == 25
    assert iteration.rates(row | {"options": {"lora.r": 16}}, found)["update_flop"] * 6 == got["update_flop"] * 4
