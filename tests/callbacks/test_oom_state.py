"""OOMGuard and what steps keep: weights of pieces, policies, metrics, random numbers, copies of a module."""

import copy
import gc

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from oom_models import difference, fit, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_ppo.callbacks import OOMGuard

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:.*LeafSpec.*:FutureWarning",  # torch 2.13, from within Lightning
)


@pytest.fixture(autouse=True, scope="module")
def _fast_collections():
    """Every recovery collects garbage, of which imported libraries are none."""
    gc.freeze()
    yield
    gc.unfreeze()


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


class Masked(Linear):
    """A mean over the rows whose label is not 0: NaN for a piece that has none."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.loss(batch)
        loss = nn.functional.cross_entropy(self.layer(x), y, ignore_index=0)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(x))
        return loss


@pytest.mark.parametrize("limit", [1, 2])
def test_a_piece_that_counts_nothing_changes_nothing(limit):
    kwargs = {"precision": "64-true"}
    expected, one = fit(Masked, labelled(), **kwargs)
    guard = OOMGuard(dry_run=False, weight=lambda batch: float((batch[1] != 0).sum()))
    got, other = fit(cut(Masked, limit), labelled(), guard, **kwargs)
    assert guard.policy.sizes == {"train": limit}
    assert difference(expected, got) < 1e-9
    assert other.callback_metrics["loss"] == pytest.approx(float(one.callback_metrics["loss"]))


class Validated(Linear):
    """Its validation is too large."""

    limit = 4

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


def test_every_run_of_a_module_is_guarded():
    module, guard, whole = Validated(), OOMGuard(dry_run=False), {"limit_val_batches": 1.0}
    t = trainer(guard, **whole)
    for _ in range(2):
        t.validate(module, labelled(), verbose=False)
    t.fit(module, labelled(), labelled())
    t.validate(module, labelled(), verbose=False)
    trainer(OOMGuard(), **whole).fit(module, labelled(), labelled())
    assert "oom_policy" not in vars(module)


class Copies(Callback):
    """Copies the module while it trains."""

    def on_train_start(self, trainer, pl_module):
        self.copy = copy.deepcopy(pl_module)
        with torch.no_grad():
            self.copy.layer.weight.zero_()
            self.copy.layer.bias.zero_()


def test_a_copy_of_a_guarded_module_is_its_own():
    copies = Copies()
    module, _ = fit(Predicting, labelled(), OOMGuard(), copies, gradient_clip_val=1.0)
    x = next(iter(labelled()))
    assert copies.copy.predict_step(x, 0).abs().max() == 0
    assert module.predict_step(x, 0).abs().max() > 0
    assert copies.copy.configure_gradient_clipping.__self__ is copies.copy


class Predicting(Linear):
    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])


def test_methods_of_an_instance_are_kept():
    module = Predicting()
    module.predict_step = own = lambda batch, batch_idx: Predicting.predict_step(module, batch, batch_idx) * 2
    t = trainer(OOMGuard())
    got = t.predict(module, labelled(8))
    assert vars(module)["predict_step"] is own
    torch.testing.assert_close(got[0], 2 * module.layer(next(iter(labelled(8)))[0]))
