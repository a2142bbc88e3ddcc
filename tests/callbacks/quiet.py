"""A trainer that says nothing and keeps nothing, for the tests of callbacks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


def trainer(*callbacks: Callback, **options: Any) -> Trainer:
    """One epoch on one CPU unless told otherwise; checkpoints if there is a callback for them."""
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(callbacks=list(callbacks), **(defaults | options))
