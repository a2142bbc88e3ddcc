"""OOMGuard: what a dry run leaves alone, what a cut changes, which options and errors it knows, what its page shows."""

import re
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from oom_models import (
    GAN,
    Cuttable,
    Dropped,
    FailsAt,
    Linear,
    OutOfMemoryAt,
    Rehearsing,
    cut,
    difference,
    fit,
    labelled,
    out_of_memory,
    points,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_ppo.callbacks import OOMGuard
from lit_ppo.memory.retry import OOMPolicy
from lit_ppo.memory.undo import is_out_of_memory

pytestmark = [
    pytest.mark.usefixtures("fast_collections"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


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


def test_pieces_that_are_too_large_are_refused():
    guard = OOMGuard(split_batch=lambda batch, size: [tuple(x[:2] for x in batch), tuple(x[2:] for x in batch)])
    with pytest.raises(ValueError, match=r"`split_batch` returned pieces of .* rows for size 1"):
        fit(cut(Linear, 1), labelled(6, 6), guard)


def test_the_page_shows_how_to_cut_manual_optimization():
    page = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "class Regression" in block]
    names = {"__name__": __name__}
    exec(code, names)
    data = DataLoader(TensorDataset(torch.randn(16, 6), torch.randn(16)), 8)
    expected, _ = fit(names["Regression"], data, precision="64-true")
    guard = OOMGuard()
    got, _ = fit(names["Regression"], data, guard, OutOfMemoryAt("net", {"forward": {0}}), precision="64-true")
    assert guard.policy.sizes == {"update": 4}
    assert difference(expected, got) < 1e-9
