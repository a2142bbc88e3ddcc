"""Add one callback to your project: an ordinary LightningModule, and one line each for what lit-ppo's callbacks do.

Runs on the CPU in seconds:

    python examples/add_one_callback.py                     # without any
    python examples/add_one_callback.py checkpointing       # with one
    python examples/add_one_callback.py quantize freeze     # they go together, in any order
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_ppo.callbacks import FreezeParameters, GradientCheckpointing, OOMGuard, QuantizeModules


class Block(nn.Module):
    """A residual block, as in any model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add to the input."""
        return x + self.net(x)


class Distillation(LightningModule):
    """A student learns from a frozen teacher. Nothing in here knows of the callbacks."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 8)
        self.teacher = nn.Sequential(nn.Linear(width, 512), nn.GELU(), nn.Linear(512, 8)).requires_grad_(False)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        """Mean squared distance to the teacher."""
        target = self.teacher(x)
        for block in self.blocks:
            x = block(x)
        loss = (self.head(x) - target).pow(2).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over everything; what is frozen is skipped."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make(name: str) -> Callback:
    """Return one of the callbacks."""
    if name == "checkpointing":
        return GradientCheckpointing("Block")
    if name == "freeze":
        return FreezeParameters("first:2", until="step 20")
    if name == "quantize":
        return QuantizeModules("teacher", mode="nf4")
    return OOMGuard()


def main(names: list[str], steps: int = 40) -> float:
    """Train with the named callbacks.

    Args:
        names: Of `checkpointing`, `freeze`, `quantize`, `oom`.
        steps: Optimizer steps.

    Returns:
        The last loss.
    """
    seed_everything(0, verbose=False)
    module = Distillation()
    data = DataLoader(torch.randn(16 * steps, 64), batch_size=16)
    trainer = Trainer(
        callbacks=[make(name) for name in names],  # the one line
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return float(trainer.callback_metrics["loss"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ("checkpointing", "freeze", "quantize", "oom")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    names = parser.parse_args().names
    for name in names:
        if name not in known:
            parser.error(f"`{name}` is not one of {', '.join(known)}")
    print(f"loss after training: {main(names):.4f}")
