"""OOMGuard and what steps keep: weights of pieces, policies, metrics, random numbers, copies of a module."""

import copy
import weakref

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from oom_models import (
    Dropped,
    FailsAt,
    Linear,
    cut,
    difference,
    fit,
    labelled,
    out_of_memory,
    trainer,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lit_ppo.callbacks import OOMGuard
from lit_ppo.memory.retry import OutOfMemoryReport

pytestmark = [
    pytest.mark.usefixtures("fast_collections"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


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


class Collects(Linear):
    """Counts and keeps predictions, in all the ways there are; its third forward fails besides those above 4 rows."""

    limit = 4

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.kept, self.held, self.named = [], [torchmetrics.MeanMetric()], {"sum": torchmetrics.SumMetric()}
        self.forwards = 0

    def validation_step(self, batch, batch_idx):
        self.total += len(batch[0])
        for metric in (self.held[0], self.named["sum"]):
            metric.update(batch[0].sum())
        self.forwards += 1
        self.log("loss", self.loss(batch))
        if self.forwards == 3:
            out_of_memory()
        self.kept.append(batch[1])


def test_finished_pieces_of_an_evaluation_are_not_done_again():
    module = Collects()
    torch.manual_seed(0)
    undisturbed = Collects()
    undisturbed.limit, undisturbed.forwards = 99, 3
    undisturbed.load_state_dict(module.state_dict())
    expected = trainer(limit_val_batches=1.0).validate(undisturbed, labelled(), verbose=False)
    guard = OOMGuard()
    got = trainer(guard, limit_val_batches=1.0).validate(module, labelled(), verbose=False)
    assert guard.policy.events == {"validation": 2}
    assert module.total == 32
    assert torch.equal(torch.cat(module.kept), torch.cat(undisturbed.kept))
    assert got[0]["loss"] == pytest.approx(expected[0]["loss"])
    assert module.named["sum"].compute() == pytest.approx(float(undisturbed.named["sum"].compute()), rel=1e-5)
    assert module.held[0]._update_count == len(module.kept)


class Texts(Linear):
    failures = 0

    def predict_step(self, batch, batch_idx):
        if self.failures:
            self.failures -= 1
            out_of_memory()
        return [text.upper() for text in batch]


def test_a_batch_without_clear_rows_is_evaluated_uncut():
    texts = DataLoader(["a", "b", "c"], batch_size=2)
    module = Texts()
    for failures in (0, 1):
        module.failures = failures
        assert trainer(OOMGuard()).predict(module, texts) == [["A", "B"], ["C"]]
    module.failures = 2
    with pytest.raises(OutOfMemoryReport, match=r"rows of a batch of type list are not clear.*`split_batch`"):
        trainer(OOMGuard()).predict(module, texts)


class Augmented(Dataset):
    """Draws its own random numbers."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((6,), index / 32) + torch.randn(6), torch.tensor(index % 3)


@pytest.mark.parametrize("fails", [1, 3, 4, 6])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("validate", [False, True])
def test_random_numbers_are_those_of_the_undisturbed_run(fails, accumulate, validate):
    runs = []
    for callbacks in ([], [OOMGuard(dry_run=False), FailsAt(fails)]):
        torch.manual_seed(0)
        module = Dropped()
        t = trainer(
            *callbacks, accumulate_grad_batches=accumulate, limit_val_batches=2 * validate, val_check_interval=1
        )
        t.fit(module, DataLoader(Augmented(), 4), labelled())
        runs.append(module)
    assert module.forwards > 8
    assert difference(*runs) == 0


class Alive(Callback):
    """How many earlier batches are there when one begins."""

    def __init__(self):
        self.batches, self.most = [], 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.most = max(self.most, sum(b() is not None for b in self.batches))
        self.batches.append(weakref.ref(batch[0]))


def test_no_batch_is_kept():
    alive, guarded = Alive(), Alive()
    fit(Linear, labelled(), alive)
    fit(Linear, labelled(), OOMGuard(), guarded)
    assert guarded.most == alive.most
