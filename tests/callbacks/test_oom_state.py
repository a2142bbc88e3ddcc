"""OOMGuard and what steps keep: weights of pieces, policies, metrics, random numbers, copies of a module."""

import copy
import gc
import weakref

import pytest
import torch
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from oom_models import GAN, Cuttable, Rehearsing, difference, fit, points, trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lit_ppo.callbacks import OOMGuard
from lit_ppo.memory.retry import OOMPolicy, OutOfMemoryReport
from lit_ppo.memory.undo import is_out_of_memory

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


class Taught(Linear):
    """Keeps a moving average of its weights, in a module that no optimizer has, and of its inputs."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(6, 3).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for mine, kept in zip(self.layer.parameters(), self.teacher.parameters(), strict=True):
                kept.lerp_(mine, 0.1)
            self.mean.lerp_(batch[0].mean(0), 0.5)
        return self.loss(batch) + nn.functional.mse_loss(self.layer(batch[0]), self.teacher(batch[0] - self.mean))

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


class Backbone(Taught):
    """The moving average is large."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(100, 100).requires_grad_(False)


def test_a_dry_run_changes_nothing():
    expected, _ = fit(Taught, labelled())
    got, _ = fit(Taught, labelled(), Rehearsing())
    assert difference(expected, got) == 0
    assert torch.equal(expected.mean, got.mean)
    with pytest.warns(UserWarning, match=r"changes `teacher\.weight`.*`dry_run=False`"):
        fit(Backbone, labelled(), Rehearsing())


def test_off_cuda_there_is_no_dry_run():
    module, _ = fit(Dropped, labelled(), OOMGuard())
    assert module.forwards == 4


class Noisy(Linear):
    """Draws noise, or moves a buffer, in each forward."""

    limit = 4
    noise = True

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.noise:
            x = x + torch.randn_like(x)
        else:
            self.seen += 1
        return self.loss((x, y))


@pytest.mark.parametrize("noise", [True, False])
def test_what_a_cut_changes_is_said(noise):
    def make():
        module = Noisy()
        module.noise = noise
        return module

    with pytest.warns(UserWarning, match="uses random numbers piece by" if noise else "uses the buffer `seen` piece"):
        fit(make, labelled(), OOMGuard())


class EveryThird(GAN):
    """The generator learns from every third batch; the forward with the number `fails` runs out of memory."""

    fails, forwards = 0, 0

    def training_step(self, batch, batch_idx):
        for_generator, for_critic = self.optimizers()
        networks = [(for_critic, self.critic(batch[0]).mean())]
        if batch_idx % 3 == 2:
            networks.append((for_generator, None))
        for optimizer, loss in networks:
            self.forwards += 1
            if self.forwards == self.fails:
                out_of_memory()
            loss = self.critic(self.generator(batch[0][:, :4])).mean() if loss is None else loss
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


@pytest.mark.parametrize("fails", [2, 4, 8])
def test_an_optimizer_that_steps_now_and_then_is_known(fails):
    expected, _ = fit(EveryThird, points(48))
    got, _ = fit(EveryThird, points(48), OOMGuard(), FailsAt(fails))
    assert got.forwards == expected.forwards + (1 if fails == 2 else 2 if fails in (4, 8) else 0)
    assert difference(expected, got) == 0


def test_options_that_manual_optimization_does_not_use():
    with pytest.raises(MisconfigurationException, match=r"`worst_case` is for automatic.*`dry_runs\(\)`"):
        fit(GAN, points(), OOMGuard(worst_case=len))

    def own():
        module = Cuttable()
        module.oom_policy = OOMPolicy()
        return module

    with pytest.raises(MisconfigurationException, match="`split_batch` and `weight` of `OOMGuard` would not be used"):
        fit(own, points(), OOMGuard(split_batch=lambda b, n: [b], weight=len))


class Counts(Callback):
    """Logs from hooks inside the closure, in both ways."""

    def on_after_backward(self, trainer, pl_module):
        self.log("by_callback", 1.0, on_step=False, on_epoch=True, reduce_fx="max")
        pl_module.log("by_module", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("sum", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")


def test_callbacks_log_once_too():
    for make, guards, backwards in ((Linear, [], 4), (Linear, [OOMGuard()], 4), (cut(Linear, 4), [OOMGuard()], 8)):
        _, t = fit(make, labelled(), *guards, Counts())
        assert t.callback_metrics["by_callback"] == 1
        assert t.callback_metrics["by_module"] == t.callback_metrics["sum"] == backwards


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("x"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        RuntimeError("NCCL Error 1: unhandled cuda error. Cuda failure 2 'out of memory'"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes."),
    ],
)
def test_errors_of_all_allocators_are_known(error):
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))
