"""One rank: python ranks.py FOLDER JSON runs the jobs of the JSON, and writes FOLDER/<job>-<rank>.pt."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import cases
import torch

from lit_ppo.callbacks import OOMGuard

warnings.filterwarnings("ignore", message=".*does not have many workers")

torch.set_num_threads(1)


def main(folder: str, argument: str) -> None:
    """Run every job."""
    where, rank, world = Path(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    for job in cases.parse(argument):
        name, case, kind = job["name"], job["case"], job["kind"]
        replay = torch.load(job["replay"], weights_only=False, map_location="cpu") if "replay" in job else None
        options = {"devices": per_node, "num_nodes": world // per_node, "ckpt": job.get("ckpt")}
        options |= {k: job[k] for k in ("precision", "accelerator") if k in job}
        if "save" in job:
            options |= {"enable_checkpointing": True, "callbacks": [cases.saver(job["save"])]}
        if "short" in job:
            guard = OOMGuard(timeout=job.get("timeout", 120))
            options["callbacks"] = [guard, cases.Shortage(job["short"], job["ranks"])]
        result = cases.fit(case, job["models"], kind, world, where, replay, **options)
        torch.save(cases.forgettable(result), where / f"{name}-{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
