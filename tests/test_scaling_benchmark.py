"""benchmarks/scaling.py: its rows are options that exist, it runs on ranks, and its table is made of what it wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import scaling  # noqa: E402
from benchmarks.memory import folder  # noqa: E402
from lit_ppo import PPOLightningModule  # noqa: E402

TINY = ["--shapes", "tiny", "--device", "cpu", "--batch", "2", "--prompt", "24", "--new", "4", "--micro", "2"]


def arguments(*more: str) -> list[str]:
    return [*TINY, "--iterations", "2", *more]


def test_rows_share_one_run_on_one_gpu_and_leave_out_what_cannot_run(capsys):
    rows = scaling.rows_of(scaling.parser().parse_args(arguments("--worlds", "4", "1", "2")))
    found = [(r["method"], r["world"], r["strategy"]) for r in rows]
    half = [(1, "one"), (2, "fsdp2"), (4, "fsdp2")]
    assert found == [(method, *rest) for method in ("full", "lora") for rest in half]
    assert "fsdp: left out, as Lightning has FSDPStrategy on GPUs alone" in capsys.readouterr().out
    assert len({scaling.key_of(r) for r in rows}) == 6


def test_a_host_with_too_few_gpus_says_so(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    args = scaling.parser().parse_args(["--device", "cuda", "--methods", "full"])
    rows = scaling.rows_of(args)
    assert [(r["world"], r["strategy"]) for r in rows] == [(1, "one"), (2, "fsdp"), (2, "fsdp2")]
    assert "Left out, as this host has 2 GPUs: 4" in capsys.readouterr().out


def test_the_forecast_is_of_the_row(tmp_path):
    row = {"shape": "tiny", "world": 2, "prompt": 24, "new": 4, "batch": 2, "micro": 2, "device": "cpu"}
    row |= {"method": "lora", "strategy": "fsdp2"}
    peaks = scaling.forecast(row, tmp_path)
    assert peaks.keys() == {"rollout", "score", "update"}
    assert all(peak > 0 for peak in peaks.values())
    config = scaling.config_of(row, tmp_path)
    assert config["data"]["batch_size"] == 4
    assert config["model"]["reward"]["source"] == folder("tiny", tmp_path, "cpu", classifier=True)
    PPOLightningModule(**config["model"])


def test_the_table_compares_with_the_fewest_gpus_that_worked(tmp_path):
    base = {"shape": "7B", "method": "full", "prompt": 128, "new": 256, "batch": 64, "micro": 8, "device": "cuda"}
    base |= {"forecast": {"rollout": 10.0, "score": 20.0, "update": 30.0}, "hardware": "a GPU", "torch": "2.11"}
    base |= {"transformers": "5.17", "date": "2026-01-01"}
    times = {"seconds": 4.0, "rollout_s": 1.0, "gather_s": 0.5, "score_s": 1.0, "update_s": 2.0, "peak_gib": 25.0}
    rows = [
        base | {"world": 4, "strategy": "fsdp2", "measured": times | {"tokens_per_s": 900}},
        base | {"world": 2, "strategy": "fsdp2", "measured": times | {"tokens_per_s": 1000}},
        base | {"world": 1, "strategy": "one", "error": "rank 0: OutOfMemoryError: CUDA out of memory. Tried"},
    ]
    (tmp_path / "scaling.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    scaling.main(["--report", "--output", str(tmp_path)])
    table = [line for line in (tmp_path / "scaling.md").read_text().splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert table[2].startswith("| 1 | one | out of memory |")
    assert table[3] == "| 2 | fsdp2 | 4.00 | 1.00 | 0.50 | 1.00 | 2.00 | 1,000 | 100% | 25.0 | 30.0 | +20% |"
    assert "| 900 | 90% |" in table[4]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_are_measured_once_and_one_that_fails_is_written_down(tmp_path):
    command = arguments("--worlds", "2", "--methods", "lora", "--strategies", "fsdp2")
    command += ["--output", str(tmp_path), "--scratch", str(tmp_path / "scratch")]
    scaling.main(command)
    scaling.main(command)
    (row,) = scaling.read(tmp_path / "scaling.jsonl")
    found = row["measured"]
    assert found["response_tokens"] == 2 * 4
    assert found["prompt_tokens"] == 2 * 24
    assert 0 < found["gather_s"] < found["rollout_s"] < found["seconds"]
    assert found["checks"]["policy/ratio_first_step"] == pytest.approx(1, abs=1e-3)
    assert "| 2 | fsdp2 |" in (tmp_path / "scaling.md").read_text()
    broken = Path(folder("tiny", tmp_path / "scratch", "cpu", classifier=True)) / "model.safetensors"
    broken.write_bytes(b"0" * 100)
    scaling.main([*command, "--again"])
    assert "rank 0: " in scaling.read(tmp_path / "scaling.jsonl")[-1]["error"]
