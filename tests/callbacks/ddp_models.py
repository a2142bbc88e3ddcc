"""A module and the callbacks it is fitted with, on one device and on two ranks (test_ddp.py, ddp_ranks.py)."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lit_ppo.callbacks import FreezeParameters, GradientCheckpointing, QuantizeModules

SIZE = 2
CASES = ("bare", "checkpointing", "frozen", "thawed", "thawed by a metric", "frozen later", "quantized", "all")


class Net(LightningModule):
    """A student of a frozen teacher, in manual optimization with clipping over all gradients."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.teacher = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)).requires_grad_(False)
        self.record = []

    def training_step(self, x, batch_idx):
        target = self.teacher(x)
        for layer in self.layers:
            x = layer(x)
        loss = (self.head(x) - target).pow(2).mean()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.record.append(
            {
                "requires_grad": self.layers[0][0].weight.requires_grad,
                "has_grad": self.layers[0][0].weight.grad is not None,
                "in_state": self.layers[0][0].weight in optimizer.optimizer.state,
            }
        )
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()
        # Only the second rank sees it fall: the decision must be everyone's.
        rank = torch.tensor(float(self.global_rank))
        self.log("own", 1.0 - rank * (self.global_step > 3), on_step=True, sync_dist=False)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)

    def calls(self, callbacks):
        return sum(c._engine.calls for c in callbacks if isinstance(c, GradientCheckpointing))


def callbacks(case):
    """The callbacks of a case."""
    checkpointing = GradientCheckpointing("layers.*")
    thaw = FreezeParameters("layers.0", until="step 4")
    return {
        "bare": [],
        "checkpointing": [checkpointing],
        "frozen": [FreezeParameters("layers.0")],
        "thawed": [thaw],
        "thawed by a metric": [FreezeParameters("layers.0", until="own < 0.5")],
        "frozen later": [FreezeParameters("layers.0", start="epoch 1")],
        "quantized": [QuantizeModules("teacher")],
        "all": [checkpointing, thaw, QuantizeModules("teacher")],
    }[case]


def shards(rank, world):
    """Batches of 4 rows, split evenly over the ranks."""
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    return DataLoader([b.chunk(world)[rank] for b in batches], batch_size=None)
