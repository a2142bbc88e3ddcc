"""One rank: python ranks.py FOLDER JSON runs the jobs of the JSON, and writes FOLDER/<job>-<rank>.pt."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message=".*does not have many workers")
import cases
import torch

torch.set_num_threads(1)


def main(folder: str, argument: str) -> None:
    """Run every job."""
    where, rank, world = Path(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for job in cases.parse(argument):
        name, case, kind, actor = job["name"], job["case"], job["kind"], job["actor"]
        replay = torch.load(job["replay"], weights_only=False) if "replay" in job else None
        result = cases.fit(case, actor, kind, world, where, replay, devices=int(os.environ["LOCAL_WORLD_SIZE"]))
        torch.save(cases.forgettable(result), where / f"{name}-{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
