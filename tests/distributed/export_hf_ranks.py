"""One rank: python export_hf_ranks.py FOLDER JSON exports the best policy under every strategy, and one that fails."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import cases
import torch

from lit_ppo.callbacks import ExportHF

warnings.filterwarnings("ignore", message=".*does not have many workers")
torch.set_num_threads(1)


def main(folder: str, argument: str) -> None:
    """Run every job, of which each has a strategy and a case."""
    where, rank, world = Path(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for job in cases.parse(argument):
        kind, case = job["kind"], job["case"]
        name = f"{kind} {case}"
        export = ExportHF(str(where / name), monitor=None)
        result = cases.fit(case, job["models"], kind, world, where, callbacks=[export])
        if rank == 0:
            torch.save(result["weights"], where / f"{name}.pt")
    broken = ExportHF(str(where / "broken"), monitor=None)
    if rank == 0:
        broken._write = lambda *_: (where / "missing" / "file").write_text("")
    try:
        cases.fit("full", job["models"], "ddp", world, where, callbacks=[broken])
    except RuntimeError as error:
        (where / f"error-{rank}.txt").write_text(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
