"""The presets run as they stand, in miniature: the same options on a model of 64 words."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest
import tiny
import yaml

from lit_ppo.cli import main

pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),  # Lightning's calls
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*prompts of `train` are longer than:UserWarning"),
]

ROOT = Path(__file__).parent.parent
PRESETS = sorted((ROOT / "examples" / "presets").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_trains(preset, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("examples", "examples.rewards"):
        sys.modules.pop(name, None)  # another test's copy
    options = yaml.safe_load(preset.read_text())
    actor = "--model.actor" if isinstance(options["model"]["actor"], str) else "--model.actor.source"
    argv = [f"{actor}={tiny.folder()}", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    argv += ["--model.sampling.max_new_tokens=4", "--data.max_prompt_length=32", "--trainer.limit_train_batches=2"]
    argv += ["--data.batch_size=8", "--trainer.default_root_dir=outputs"]
    if "source" in str(options["model"]["reward"]) and "examples." not in str(options["model"]["reward"]):
        [reward] = options["model"]["reward"]
        argv.append(f"--model.reward={json.dumps([reward | {'source': tiny.folder(labels=1)}])}")
    if options["model"]["optim"].get("paged"):
        argv.append("--model.optim.paged=false")  # host memory has nowhere to page to
    if options["trainer"]["devices"] != 1:
        argv += ["--trainer.devices=1", "--trainer.strategy.init_args.data_parallel_size=1"]
    assert main(["fit", "--config", str(preset.relative_to(ROOT)), *argv]) == 0
    with open(next(Path("outputs").glob("version_*/metrics.csv"))) as file:
        rows = [row for row in csv.DictReader(file) if row["objective/scores"]]
    assert len(rows) == 2
    assert abs(float(rows[0]["policy/ratio_first_step"]) - 1) < 1e-3
    assert float(rows[0]["optim/skipped_steps"]) == 0
