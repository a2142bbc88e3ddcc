"""The runs of test_resume.py, and a script that is killed in the middle of one and picks it up again.

python resumable.py MODEL FOLDER CASE MOMENT

trains CASE on MODEL in FOLDER, from FOLDER/last.ckpt if it is there, and kills itself at MOMENT: `never`, `PHASE:n` (as
phase PHASE of iteration n begins) or `save:n` (half-way through writing the n-th checkpoint of this process).
"""

from __future__ import annotations

import io
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import tiny
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lit_ppo import LoRAConfig, OptimConfig, PPOConfig, PPOLightningModule, PromptDataModule, SamplingConfig

ITERATIONS = 6
UPDATES = 2
"""Optimizer steps of an iteration."""


def noisy(responses: list[str], **_: Any) -> list[float]:
    """A reward that draws from every global generator."""
    return [len(r.split()) + random.random() + np.random.rand() + float(torch.rand(())) for r in responses]


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": LoRAConfig(r=4)},
    "shared": {"lora": LoRAConfig(r=4), "layout": "shared", "seed": 3},
    "stateful": {
        "reward": noisy,
        "ppo": PPOConfig(epochs=2, minibatches=1, kl_target=0.5, kl_horizon=50, scale_scores=True, micro_batch_size=3),
        "optim": OptimConfig(actor_lr=1e-3, schedule="cosine", warmup_iterations=2, weight_decay=0.1),
    },
    "no critic": {
        "sampling": SamplingConfig(max_new_tokens=5, temperature=1.0, samples_per_prompt=2),
        "ppo": PPOConfig(epochs=1, minibatches=2, advantage="grpo", kl_coef=0, kl_loss_coef=0.1),
    },
}


def module(case: str = "full", model: str | None = None, **changes: Any) -> PPOLightningModule:
    """The module of a case."""
    options = {
        "actor": model or tiny.folder(),
        "reward": tiny.count_w1,
        "sampling": SamplingConfig(max_new_tokens=5, temperature=1.0),
        "ppo": PPOConfig(epochs=1, minibatches=2),
        "optim": OptimConfig(actor_lr=1e-3),
    }
    return PPOLightningModule(**(options | CASES[case] | changes))


class Recorder(Callback):
    """Keeps the samples of every iteration."""

    def __init__(self) -> None:
        self.samples: dict[int, Any] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.samples[pl_module.iteration] = pl_module.samples


def train(folder: Path, run: PPOLightningModule, ckpt: Any = None, *extra: Any, **options: Any) -> Trainer:
    """Two epochs of three iterations in a new order each, with a validation and a checkpoint after every one."""
    saves = [
        ModelCheckpoint(folder, "{step}", every_n_train_steps=UPDATES, save_top_k=-1, save_last=True),
        ModelCheckpoint(folder, "end-of-{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True),
    ]
    settings = {
        "max_epochs": 2,
        "val_check_interval": 1,
        "enable_checkpointing": True,
        "logger": CSVLogger(folder, name="logs"),
        "callbacks": [*saves, *extra],
    }
    trainer = tiny.trainer(folder, **(settings | options))
    data = PromptDataModule(tiny.rows(24), val=tiny.rows(3), batch_size=8)
    trainer.fit(run, data, ckpt_path=ckpt)
    return trainer


def kill_at(run: PPOLightningModule, moment: str) -> None:
    """Arrange for this process to be killed."""
    phase, _, number = moment.partition(":")
    if phase == "save":
        save, saves = torch.save, []

        def half(obj: Any, file: Any) -> None:
            saves.append(obj)
            if len(saves) < int(number):
                save(obj, file)
                return
            buffer = io.BytesIO()
            save(obj, buffer)
            file.write(buffer.getvalue()[: buffer.tell() // 2])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

        torch.save = half
    elif moment != "never":
        run.phase_listeners.append(
            lambda now: os.kill(os.getpid(), signal.SIGKILL) if (now, run.iteration) == (phase, int(number)) else None
        )


def main(model: str, folder: str, case: str, moment: str) -> None:
    """Train, be killed."""
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    run = module(case, model)
    kill_at(run, moment)
    last = Path(folder) / "last.ckpt"
    train(Path(folder), run, last if last.exists() else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
