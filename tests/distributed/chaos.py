"""One of two ranks, of which the second is killed: python chaos.py FOLDER JSON with `models`, `kind` and `moment`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import cases
import torch
from lightning.pytorch import Callback

torch.set_num_threads(1)


class Killer(Callback):
    """Kills this process in the third iteration."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.phase_listeners.append(
            lambda phase: self.die() if (phase, pl_module.iteration) == (self.moment, 2) else None
        )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.moment == "step" and pl_module.iteration == 2:
            self.die()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.moment == "validation" and pl_module.iteration == 2:
            self.die()


def kill_in_save() -> None:
    """Kill this process while the second checkpoint is being written."""
    import lightning.pytorch.strategies.model_parallel as lightning_fsdp2

    save, saves = lightning_fsdp2._distributed_checkpoint_save, []

    def half(state: Any, path: Any) -> None:
        saves.append(path)
        if len(saves) > 2:  # the first save writes two: of the step, and the last
            (Path(path) / "__1_0.distcp").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        save(state, path)

    lightning_fsdp2._distributed_checkpoint_save = half


def main(folder: str, argument: str) -> None:
    """Train until the end comes."""
    job, where = json.loads(argument), Path(folder)
    callbacks: list[Any] = [cases.saver(folder)]
    if os.environ["RANK"] == "1":
        callbacks.append(Killer(job["moment"]))
        if job["moment"] == "save":
            kill_in_save()
    options = {"callbacks": callbacks, "enable_checkpointing": True, "accelerator": job.get("accelerator", "cpu")}
    cases.fit("full", job["models"], job["kind"], 2, where, **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
