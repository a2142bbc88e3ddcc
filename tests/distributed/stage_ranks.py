"""One rank of the stages before PPO: python stage_ranks.py FOLDER JSON; see test_stages_ranks.py."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import cases  # puts the tests' folder on the path
import stages
import torch

warnings.filterwarnings("ignore", message=".*does not have many workers")
torch.set_num_threads(1)

ROWS = 9
"""Of two optimizer steps: with 4 ranks, one has none of the last batch's single row."""


def fit(kind: str, strategy: str, world: int, source: str, folder: Path, ckpt: str | None = None) -> dict[str, Any]:
    """Train and return what every rank must agree on."""
    torch.manual_seed(0)
    module = getattr(stages, kind)(source)
    rows = stages.answers(ROWS) if kind == "sft" else stages.pairs(ROWS)
    data = stages.data(module, train=rows, val=rows[:3], drop_last=False, seed=1)
    options = {
        "strategy": cases.strategy(strategy, world),
        "devices": world,
        "max_epochs": 2,
        "use_distributed_sampler": False,
    }
    trainer = stages.fit(folder, module, data, ckpt, **options)
    path = folder / f"{kind}-{strategy}.ckpt"
    trainer.save_checkpoint(path)
    metrics = {name: float(trainer.callback_metrics[name]) for name in ("train/loss", "val/loss")}
    return {"metrics": metrics, "step": trainer.global_step, "ckpt": str(path)}


def main(folder: str, argument: str) -> None:
    """Run every job."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    for kind, strategy, source in json.loads(argument):
        result = fit(kind, strategy, world, source, Path(folder))
        torch.save(result, Path(folder) / f"{kind}-{strategy}-{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
