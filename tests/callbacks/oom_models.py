"""Modules that know nothing of OOMGuard, and out-of-memory errors at chosen calls."""

from __future__ import annotations

from collections import Counter

import quiet
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_ppo.callbacks import OOMGuard
from lit_ppo.memory.retry import retry


class OutOfMemoryAt(Callback):
    """Raises at the n-th forward or backward of a layer, or at the n-th clipping: {"forward": {2}, "backward": {0}}."""

    def __init__(self, layer: str, at: dict[str, set[int]], rank: int | None = None) -> None:
        self.layer, self.at, self.rank = layer, at, rank
        self.calls: Counter[str] = Counter()
        self.raised = 0

    def check(self, where: str) -> None:
        number = self.calls[where]
        self.calls[where] += 1
        if number in self.at.get(where, ()):
            self.raised += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 1.00 GiB. ({where} {number})")

    def on_fit_start(self, trainer, pl_module):
        if self.rank is not None and trainer.global_rank != self.rank:
            return
        layer = pl_module.get_submodule(self.layer)

        def forward(module, args, output):
            if not pl_module.training:
                return
            self.check("forward")
            if output.requires_grad:
                output.register_hook(lambda gradient: self.check("backward"))

        layer.register_forward_hook(forward)
        pl_module.before_clip = lambda: self.check("clip")


class Rehearsing(OOMGuard):
    """Runs its dry run on the CPU, too."""

    def _counts_memory(self, pl_module):
        return True


class CNN(LightningModule):
    """Automatic optimization, optionally batch-norm, logs and a torchmetrics object."""

    def __init__(self, norm: bool = True, optimizer: str = "adam") -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4) if norm else nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * 4 * 4, 3)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.kind = optimizer

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().flatten(1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("largest", logits.max(), on_step=True, on_epoch=True, reduce_fx="max")
        return {"loss": loss, "logits": logits.detach()}

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        getattr(self, "before_clip", int)()
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_accuracy(logits, y)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))
        self.log("val_accuracy", self.val_accuracy)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        if self.kind == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class GAN(LightningModule):
    """Manual optimization, two optimizers, batch-norm, noise, a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        real = batch[0]
        for_generator, for_critic = self.optimizers()
        fake = self.generator(torch.randn(len(real), 4))

        self.toggle_optimizer(for_critic)
        loss = nn.functional.softplus(self.critic(fake.detach())).mean()
        loss = loss + nn.functional.softplus(-self.critic(real)).mean()
        self.log("critic_loss", loss)
        for_critic.zero_grad()
        self.manual_backward(loss)
        for_critic.step()
        self.lr_schedulers().step()
        self.untoggle_optimizer(for_critic)

        self.toggle_optimizer(for_generator)
        loss = nn.functional.softplus(-self.critic(fake)).mean()
        for_generator.zero_grad()
        self.manual_backward(loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)

    def configure_optimizers(self):
        critic = torch.optim.Adam(self.critic.parameters(), lr=1e-2)
        return [torch.optim.Adam(self.generator.parameters(), lr=1e-2), critic], [
            torch.optim.lr_scheduler.StepLR(critic, 2)
        ]


class Cuttable(GAN):
    """Manual optimization that is written with `retry`."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def training_step(self, batch, batch_idx):
        _, optimizer = self.optimizers()
        optimizer.zero_grad()
        for attempt in retry(self, "critic", len(batch[0]), uses=self.critic, parameters=self.critic.parameters()):
            with attempt:
                self.sizes.append(attempt.size)
                for part in batch[0].split(attempt.size):
                    self.manual_backward(self.critic(part).square().sum() / len(batch[0]))
        optimizer.step()
        self.lr_schedulers().step()


class TextClassifier(LightningModule):
    """A Hugging Face classifier; batches are dicts."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        self.model = BertForSequenceClassification(
            BertConfig(
                vocab_size=50,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
                num_labels=3,
            )
        ).train()

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def plain():
    """Return a CNN whose result does not depend on how a batch is cut."""
    return CNN(norm=False)


def images(rows=24, batch_size=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 1, 6, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def points(rows=24, batch_size=8, seed=1):
    return DataLoader(TensorDataset(torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))), batch_size)


def texts(rows=12, batch_size=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (rows, 7), generator=generator)
    labels = torch.randint(0, 3, (rows,), generator=generator)
    data = [{"input_ids": i, "attention_mask": torch.ones(7, dtype=torch.long), "labels": y} for i, y in
            zip(ids, labels, strict=True)]  # fmt: skip
    return DataLoader(data, batch_size)


def trainer(*callbacks, **kwargs):
    defaults = {
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "use_distributed_sampler": False,
        "log_every_n_steps": 1,
    }
    return quiet.trainer(*callbacks, **(defaults | kwargs))


def fit(make, data, *callbacks, ckpt_path=None, **kwargs):
    """Train a fresh module and return it and its trainer."""
    torch.manual_seed(0)
    module = make()
    torch.manual_seed(2)
    t = trainer(*callbacks, **kwargs)
    t.fit(module, data, ckpt_path=ckpt_path)
    return module, t


def difference(one, other):
    """Return the largest difference of two modules' states."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory.")


class Linear(LightningModule):
    """One layer; training and evaluation above `limit` rows run out of memory."""

    limit = 10**9

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def loss(self, batch):
        x, y = batch
        if len(x) > self.limit:
            out_of_memory()
        return nn.functional.cross_entropy(self.layer(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def labelled(rows=32, batch_size=8):
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size)


def cut(make, limit):
    """Return a maker of such modules with a limit."""

    def limited():
        module = make()
        module.limit = limit
        return module

    return limited


class Dropped(Linear):
    """Dropout, and noise of a generator of its own; the forward with the number `fails` runs out of memory."""

    fails = 0

    def __init__(self):
        super().__init__()
        self.dropout, self.forwards = nn.Dropout(0.3), 0
        self.generator = torch.Generator().manual_seed(3)

    def training_step(self, batch, batch_idx):
        self.forwards += 1
        loss = self.loss((self.dropout(batch[0] + torch.randn(len(batch[0]), 6, generator=self.generator)), batch[1]))
        if self.forwards == self.fails:
            out_of_memory()
        return loss

    def validation_step(self, batch, batch_idx):
        torch.randn(3)


class FailsAt(Callback):
    def __init__(self, number):
        self.number = number

    def on_fit_start(self, trainer, pl_module):
        pl_module.fails = self.number
