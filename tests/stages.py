"""Small runs of the stages before PPO, for the tests of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
from lightning.pytorch import Trainer

from lit_ppo import PreferenceDataModule, RewardModule, SFTDataModule, SFTModule, StageOptimConfig

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% if m['role'] == 'assistant' %}<eos> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
OPTIM = StageOptimConfig(lr=1e-2, schedule="constant")


def answers(count: int = 16) -> list[dict[str, Any]]:
    """Prompts of 1 to 5 words with answers of 1 to 4: always w1."""
    return [{"prompt": row, "answer": " w1" * (1 + i % 4)} for i, row in enumerate(tiny.rows(count))]


def pairs(count: int = 16) -> list[dict[str, Any]]:
    """Prompts with answers of which the one that ends with w1 is preferred."""
    return [
        {
            "prompt": row,
            "chosen": f" w{2 + i % 7} w1",
            "rejected": " w1" + f" w{2 + i % 5}" * (1 + i % 3),
            "margin": i % 3,
        }
        for i, row in enumerate(tiny.rows(count))
    ]


def sft(source: Any = None, **options: Any) -> SFTModule:
    """A module for SFT."""
    return SFTModule(source or tiny.folder(), **({"optim": OPTIM} | options))


def reward(source: Any = None, **options: Any) -> RewardModule:
    """A module for a reward model."""
    return RewardModule(source or tiny.folder(), **({"optim": OPTIM} | options))


def data(module: Any, **options: Any) -> Any:
    """The data of a module."""
    if isinstance(module, SFTModule):
        return SFTDataModule(**({"train": answers(), "val": answers(5), "batch_size": 8} | options))
    return PreferenceDataModule(**({"train": pairs(), "val": pairs(5), "batch_size": 8} | options))


def fit(folder: Path, module: Any, datamodule: Any = None, ckpt: Any = None, **options: Any) -> Trainer:
    """Train for an epoch of two steps, unless told otherwise."""
    trainer = tiny.trainer(folder, **options)
    trainer.fit(module, datamodule or data(module), ckpt_path=ckpt, weights_only=True if ckpt else None)
    return trainer
