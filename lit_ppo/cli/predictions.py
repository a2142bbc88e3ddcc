"""Predictions as JSON lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lit_ppo.hf_folder import check_folder


class PredictionWriter(Callback):
    """Write what `predict_step` returns, one JSON object a line, in the order of the prompts, from all ranks.

    The file appears when it is complete; until then it is `<path>.part`.

    Args:
        path: The file; an older one is replaced.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.part = self.path.with_name(self.path.name + ".part")
        self.count = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start an empty file, before any weight is loaded."""
        if trainer.is_global_zero:
            check_folder("output", self.path, self.path.parent)
            self.part.write_text("")

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Append the rows of a batch: every rank has a share of it, in order."""
        shares: list[Any] = [outputs]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            shares = [None] * dist.get_world_size()
            dist.all_gather_object(shares, outputs)
        if not trainer.is_global_zero:
            return
        rows = [row for share in shares for row in share]
        self.count += len(rows)
        with self.part.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the file its name and say where it is."""
        if trainer.is_global_zero:
            os.replace(self.part, self.path)
            print(f"{self.count} responses written to {self.path}")
