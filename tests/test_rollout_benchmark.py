"""`benchmarks/rollout.py`: it runs, and its page says what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import rollout  # noqa: E402


def test_rows_are_measured_and_reported(tmp_path):
    options = ["--shapes", "tiny", "--batch", "2", "--prompt", "8", "--new", "9", "--requests", "2", "--repeats", "1"]
    where = ["--device", "cpu", "--output", str(tmp_path)]
    rollout.main([*options, "--engines", "graph", "hf", "dynamic", *where])
    rows = [json.loads(line) for line in (tmp_path / "rollout.jsonl").read_text().splitlines()]
    assert [(r["lengths"], r["engine"]) for r in rows] == [
        (lengths, engine) for lengths in rollout.LENGTHS for engine in ("graph", "hf", "dynamic")
    ]
    equal = [r for r in rows if r["lengths"] == "equal"]
    assert all(r["tokens"] == 2 * 9 and r["requests"] == 2 for r in equal)
    assert [r["requests"] for r in rows if r["lengths"] == "third"] == [4] * 3
    page = (tmp_path / "rollout.md").read_text()
    assert page == rollout.page(rows)
    assert page.count("| tiny | 2 |") == 9
    assert "--output" not in page
    assert (tmp_path / "rollout.png").exists()
    rollout.main(["--report", "--output", str(tmp_path)])
    assert (tmp_path / "rollout.md").read_text() == page


def test_kernels_are_added_up_by_name_and_step():
    spans = [
        ("prefill", 0.0, 50.0),
        ("void a<int>(x)", 100.0, 110.0),
        ("b", 112.0, 115.0),
        ("void a<int>(x)", 115.0, 135.0),
    ]
    found = rollout.in_steps(spans, skip=60.0, steps=2)
    assert found == {"step_us": 17.5, "idle_us": 1.0, "kernels": [["void a<int>(x)", 1.0, 15.0], ["b", 0.5, 3.0]]}
    row = {
        "shape": "1.5B", "batch": 256, "engine": "graph", "lengths": "equal", "tokens_per_s": 90_000, "profile": found,
        "hardware": "X", "torch": "1", "transformers": "2", "date": "3", "command": "c", "code": "abc",
    }  # fmt: skip
    varying, third = row | {"lengths": "varying", "tokens_per_s": 80_000}, row | {"lengths": "third"}
    page = rollout.page([row | {"tokens_per_s": 1}, row, varying, third])
    assert "| 1.5B | 256 | equal | graph | 90,000 |  |  | 100,000 |" in page
    assert "| 1.5B | 256 | varying | graph | 80,000 | 89% |" in page
    assert "17.5 us a step, in 1.0 of which no kernel runs" in page
    assert "| `a` | 1 | 15 | 15.0 |" in page


def test_kernels_are_cudas(capsys):
    with pytest.raises(SystemExit):
        rollout.main(["--profile", "--device", "cpu"])
    assert "--profile reads CUDA kernels, and --device is cpu" in capsys.readouterr().err


def test_the_page_is_made_of_the_rows():
    folder = ROOT / "docs" / "benchmarks"
    rows = [json.loads(line) for line in (folder / "rollout.jsonl").read_text().splitlines()]
    assert (folder / "rollout.md").read_text() == rollout.page(rows), "python benchmarks/rollout.py --report"
