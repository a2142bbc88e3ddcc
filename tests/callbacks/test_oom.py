"""OOMGuard on modules that know nothing of it: errors at every point, and the weights of the undisturbed run."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from oom_models import (
    CNN,
    GAN,
    Cuttable,
    OutOfMemoryAt,
    Rehearsing,
    TextClassifier,
    difference,
    fit,
    images,
    plain,
    points,
    texts,
    trainer,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lit_ppo
from lit_ppo.callbacks import OOMGuard
from lit_ppo.memory.retry import OutOfMemoryReport
from lit_ppo.memory.undo import release_memory

pytestmark = [
    pytest.mark.usefixtures("fast_collections"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor"),
]


class Logged(Callback):
    """What was logged, step by step and at the end of the epoch, and what steps returned."""

    def __init__(self):
        self.steps, self.outputs, self.epoch = [], [], {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append({k: float(v) for k, v in trainer.logged_metrics.items() if "oom" not in k})
        self.outputs.append(outputs)

    def on_fit_end(self, trainer, pl_module):
        self.epoch = {k: float(v) for k, v in trainer.callback_metrics.items() if "oom" not in k}


def test_a_guarded_run_without_errors_is_bit_equal():
    for make, data in ((CNN, images), (GAN, points), (TextClassifier, texts)):
        logged, guarded = Logged(), Logged()
        expected, _ = fit(make, data(), logged)
        got, _ = fit(make, data(), Rehearsing(), guarded)
        assert difference(expected, got) == 0
        assert guarded.steps == logged.steps
        assert guarded.epoch == logged.epoch


@pytest.mark.parametrize("at", [{"forward": {1}}, {"backward": {1}}, {"clip": {1}}])
def test_uncut_recovery_of_batch_norm_is_bit_equal(at):
    logged, guarded = Logged(), Logged()
    expected, _ = fit(CNN, images(), logged, gradient_clip_val=0.1)
    injector = OutOfMemoryAt("head", at)
    guard = OOMGuard(dry_run=False)
    got, _ = fit(CNN, images(), guard, injector, guarded, gradient_clip_val=0.1)
    assert injector.raised == 1
    assert sum(guard.policy.events.values()) == 1
    assert guard.policy.sizes == {}
    assert difference(expected, got) == 0
    assert guarded.steps == logged.steps
    assert guarded.epoch == logged.epoch


@pytest.mark.parametrize(
    "at",
    [
        {"forward": {0}},
        {"backward": {0}},
        {"forward": {1, 3}},  # the first whole batch is fine, then the second and a micro-batch of it are not
        {"backward": {1, 3}},
        {"forward": {1, 2, 3}},  # down to one row
        {"forward": {0}, "backward": {2}, "clip": {1}},
    ],
)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_cut_recovery_equals_the_undisturbed_run(at, optimizer):
    def make():
        return CNN(norm=False, optimizer=optimizer).double()

    logged, guarded = Logged(), Logged()
    kwargs = {"gradient_clip_val": 0.5, "precision": "64-true"}
    expected, _ = fit(make, images(), logged, **kwargs)
    injector = OutOfMemoryAt("head", at)
    guard = OOMGuard(dry_run=False)
    got, _ = fit(make, images(), guard, injector, guarded, **kwargs)
    assert injector.raised == sum(len(calls) for calls in at.values())
    assert guard.policy.sizes["train"] < 8
    assert difference(expected, got) < 1e-9
    for one, other in zip(logged.steps, guarded.steps, strict=True):
        assert other == pytest.approx(one, rel=1e-6)
    assert guarded.epoch == pytest.approx(logged.epoch, rel=1e-6)
    for one, other in zip(logged.outputs, guarded.outputs, strict=True):
        torch.testing.assert_close(one["logits"], other["logits"], atol=1e-9, rtol=1e-6)
        torch.testing.assert_close(one["loss"], other["loss"])


def test_float32_stays_within_a_millionth():
    expected, _ = fit(lambda: CNN(norm=False, optimizer="sgd"), images())
    got, _ = fit(lambda: CNN(norm=False, optimizer="sgd"), images(), OOMGuard(dry_run=False),
                 OutOfMemoryAt("head", {"backward": {0}}))  # fmt: skip
    assert 0 < difference(expected, got) < 1e-6


@pytest.mark.parametrize("at", [{"forward": {3}}, {"backward": {2}}])
def test_an_accumulated_step_restarts_from_its_first_batch(at):
    kwargs = {"accumulate_grad_batches": 3, "precision": "64-true"}
    logged, guarded = Logged(), Logged()
    expected, _ = fit(plain, images(48), logged, **kwargs)
    got, t = fit(plain, images(48), OOMGuard(dry_run=False), OutOfMemoryAt("head", at), guarded, **kwargs)
    assert t.global_step == 2
    assert difference(expected, got) < 1e-9
    assert guarded.epoch == pytest.approx(logged.epoch, rel=1e-6)


def test_a_text_classifier_is_cut():
    expected, _ = fit(TextClassifier, texts(), precision="64-true")
    guard = OOMGuard(dry_run=False)
    got, _ = fit(TextClassifier, texts(), guard, OutOfMemoryAt("model.classifier", {"forward": {0}, "backward": {1}}),
                 precision="64-true")  # fmt: skip
    assert guard.policy.sizes == {"train": 1}
    assert difference(expected, got) < 1e-8


class Tokens(LightningModule):
    """A mean over the tokens that are not -100."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(
            self.layer(batch["x"]).flatten(0, 1), batch["y"].flatten(), ignore_index=-100
        )
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch["x"]))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def ragged():
    torch.manual_seed(4)
    y = torch.randint(0, 3, (8, 5))
    y[:3, 1:] = -100
    return DataLoader(
        [{"x": x, "y": y, "id": f"row {i}"} for i, (x, y) in enumerate(zip(torch.randn(8, 5, 4), y, strict=True))], 8
    )


def count_tokens(batch):
    assert len(batch["id"]) == len(batch["x"])
    return float((batch["y"] != -100).sum())


def test_a_mean_over_tokens_needs_their_count():
    logged, guarded, unweighted = Logged(), Logged(), Logged()
    injector = {"layer": "layer", "at": {"forward": {0}}}
    expected, _ = fit(Tokens, ragged(), logged, precision="64-true")
    got, _ = fit(Tokens, ragged(), OOMGuard(dry_run=False, weight=count_tokens), OutOfMemoryAt(**injector), guarded,
                 precision="64-true")  # fmt: skip
    assert difference(expected, got) < 1e-12
    assert guarded.steps == [pytest.approx(step) for step in logged.steps]
    wrong, _ = fit(
        Tokens, ragged(), OOMGuard(dry_run=False), OutOfMemoryAt(**injector), unweighted, precision="64-true"
    )
    assert difference(expected, wrong) > 1e-3


@pytest.mark.parametrize(
    ("layer", "at"),
    [
        ("critic", {"forward": {3}}),  # second training_step, before any optimizer step
        ("critic", {"forward": {5}}),  # after the critic's step
        ("critic", {"backward": {4}}),
        ("generator", {"backward": {1}}),
        ("generator", {"forward": {2}}),
        ("critic", {"forward": {2}}),  # the very first training_step, after the critic's first step
    ],
)
def test_a_manual_step_is_put_back_and_done_again(layer, at):
    logged, guarded = Logged(), Logged()
    expected, one = fit(GAN, points(), logged)
    injector = OutOfMemoryAt(layer, at)
    got, other = fit(GAN, points(), OOMGuard(), injector, guarded)
    assert injector.raised == 1
    assert difference(expected, got) == 0
    assert one.global_step == other.global_step == 6
    assert guarded.epoch == logged.epoch
    assert [p.requires_grad for p in got.parameters()] == [p.requires_grad for p in expected.parameters()]


def test_a_manual_step_that_fails_again_says_how_to_be_cut():
    with pytest.raises(OutOfMemoryReport, match=r"cannot be cut from outside.*lit_ppo\.memory\.retry\.retry"):
        fit(GAN, points(), OOMGuard(), OutOfMemoryAt("critic", {"forward": {0, 1}}))


class Accumulating(GAN):
    """Adds to the gradients of the step before."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.critic(batch[0]).mean())
        self.critic(batch[0])


def test_lost_gradients_are_said():
    with pytest.raises(OutOfMemoryReport, match="added to gradients of an earlier"):
        fit(Accumulating, points(), OOMGuard(), OutOfMemoryAt("critic", {"forward": {3}}))


@pytest.mark.parametrize("at", [{"forward": {1}}, {"backward": {1}}])
def test_manual_optimization_with_retry_is_cut(at):
    expected, _ = fit(Cuttable, points(), precision="64-true")
    guard = OOMGuard()
    got, _ = fit(Cuttable, points(), guard, OutOfMemoryAt("critic", at), precision="64-true")
    assert got.sizes == [8, 8, 4, 4]
    assert guard.policy.events == {"critic": 1}
    assert difference(expected, got) < 1e-9


def test_without_the_guard_retry_reports():
    with pytest.raises(OutOfMemoryReport, match="Out of memory on cpu in critic, size 8"):
        fit(Cuttable, points(), OutOfMemoryAt("critic", {"forward": {1}}))


def test_batch_norm_is_refused_or_said():
    at = {"forward": {0, 1}}
    with pytest.raises(OutOfMemoryReport, match=r"(?s)not cut because `norm` depend.*What helps"):
        fit(CNN, images(), OOMGuard(dry_run=False), OutOfMemoryAt("head", at))
    with pytest.warns(UserWarning, match="is cut from 8 to 4 rows, which changes its result: `norm`"):
        fit(CNN, images(), OOMGuard(dry_run=False, on_batch_dependent="warn"), OutOfMemoryAt("head", at))


def test_dropout_is_refused():
    at = {"forward": {0, 1}}
    with pytest.raises(OutOfMemoryReport, match=r"not cut because `model\.bert\.embeddings\.dropout`"):
        fit(
            lambda: TextClassifier(dropout=0.1),
            texts(),
            OOMGuard(dry_run=False),
            OutOfMemoryAt("model.classifier", at),
        )


def test_one_row_that_does_not_fit_ends_with_the_report():
    at = {"forward": set(range(100))}
    with pytest.raises(OutOfMemoryReport, match=r"(?s)in train, size 1\..*One row.*optimizer.*conv") as info:
        fit(plain, images(), OOMGuard(dry_run=False), OutOfMemoryAt("head", at))
    assert isinstance(info.value.__cause__, torch.OutOfMemoryError)


def test_an_error_elsewhere_gets_the_report_as_a_note():
    class Failing(CNN):
        def on_train_batch_start(self, batch, batch_idx):
            raise torch.OutOfMemoryError("elsewhere")

    with pytest.raises(torch.OutOfMemoryError, match="elsewhere") as info:
        fit(Failing, images(), OOMGuard())
    assert "What helps" in info.value.__notes__[0]


class OutOfMemoryAbove(Callback):
    """Training forwards above some rows run out of memory."""

    def __init__(self, rows):
        self.rows, self.seen = rows, []

    def on_fit_start(self, trainer, pl_module):
        def check(module, args):
            self.seen.append(len(args[0]))
            if len(args[0]) > self.rows:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        pl_module.head.register_forward_pre_hook(check)


@pytest.mark.parametrize("fits", [1, 3, 5, 7, 8])
def test_the_dry_run_finds_the_largest_size(fits):
    expected, _ = fit(plain, images(), precision="64-true")
    guard = Rehearsing()
    got, _ = fit(plain, images(), guard, OutOfMemoryAbove(fits), precision="64-true")
    assert guard.policy.sizes == ({} if fits == 8 else {"train": fits})
    assert guard.policy.events == {}
    assert guard.policy.micro_batch == fits
    assert difference(expected, got) < 1e-9


def test_the_dry_run_takes_the_worst_case_it_is_given():
    def worst_case(module):
        return torch.randn(20, 1, 6, 6), torch.zeros(20, dtype=torch.long)

    class Says(CNN):
        worst_case_batch = worst_case

    for make, guard in ((plain, Rehearsing(worst_case=worst_case)), (lambda: Says(norm=False), Rehearsing())):
        limit = OutOfMemoryAbove(13)
        fit(make, images(), guard, limit, precision="64-true")
        assert guard.policy.sizes == {"train": 13}
        assert limit.seen[0] == 20
        assert guard.policy.micro_batch == 8


def test_a_dry_run_that_fits_nothing_stops_before_training():
    with pytest.raises(OutOfMemoryReport, match=r"(?s)in the dry run, size 1.*One row does not fit with 10%"):
        fit(plain, images(), Rehearsing(), OutOfMemoryAbove(0))


def test_a_dry_run_does_not_let_batch_norm_be_cut():
    guard, limit = Rehearsing(), OutOfMemoryAbove(4)
    with (
        pytest.warns(UserWarning, match=r"8 rows does not fit with 10% of the memory left free.*`norm` depends"),
        pytest.raises(OutOfMemoryReport, match=r"not cut because `norm` depend"),
    ):
        fit(CNN, images(), guard, limit)
    assert limit.seen == [8, 8, 8]  # the dry run, the step, and once more
    assert guard.policy.sizes == {}


class DryRuns(Cuttable):
    def dry_runs(self):
        return {"critic": (8, lambda size: self.critic(torch.randn(size, 6)).sum().backward())}


def test_a_manual_module_names_its_dry_runs():
    class Above3(OutOfMemoryAbove):
        def on_fit_start(self, trainer, pl_module):
            pl_module.head = pl_module.critic
            super().on_fit_start(trainer, pl_module)

    guard = OOMGuard()
    module, _ = fit(DryRuns, points(), guard, Above3(3))
    assert guard.policy.sizes == {"critic": 3}
    assert module.sizes == [3, 3, 3]


@pytest.mark.parametrize("verb", ["validate", "predict"])
def test_evaluation_is_cut(verb):
    torch.manual_seed(0)
    module = CNN()
    expected = getattr(trainer(limit_val_batches=1.0), verb)(module, images(20))
    calls = []

    def check(layer, args):
        calls.append(len(args[0]))
        if len(args[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    module.head.register_forward_pre_hook(check)
    guard = OOMGuard()
    got = getattr(trainer(guard, limit_val_batches=1.0), verb)(module, images(20))
    assert max(calls[2:]) == 2
    assert sum(calls) > 20
    if verb == "predict":
        torch.testing.assert_close(torch.cat(expected), torch.cat(got))
    else:
        assert got[0] == pytest.approx(expected[0])
    assert "log" not in vars(module)
    assert not any(name.endswith("_step") for name in vars(module))


def test_the_size_is_in_the_checkpoint_and_grows_back(tmp_path):
    guard = OOMGuard(dry_run=False, grow_after=2)
    _, t = fit(plain, images(), guard, OutOfMemoryAt("head", {"forward": {0}}))
    assert guard.policy.sizes == {"train": 8}  # 3 quiet steps: 4 doubled once
    guard.policy.sizes["train"] = 2
    t.save_checkpoint(tmp_path / "run.ckpt")
    resumed = OOMGuard(dry_run=False)
    fit(plain, images(), resumed, ckpt_path=tmp_path / "run.ckpt", max_epochs=2)
    assert resumed.policy.sizes == {"train": 2}
    assert resumed.policy.events == {"train": 1}
    assert resumed.policy.micro_batch == 2


def test_metrics_are_logged():
    _, t = fit(plain, images(), OOMGuard(dry_run=False), OutOfMemoryAt("head", {"forward": {1}}))
    assert t.callback_metrics["oom/events"] == 1
    assert t.callback_metrics["oom/micro_batch"] == 4


def test_optimizer_state_is_there_before_the_first_step():
    class Look(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 0:
                self.states = [len(o.state) for o in trainer.optimizers]

    look = Look()
    fit(GAN, points(), OOMGuard(), look)
    assert look.states == [6, 4]


class Unsupported(OOMGuard):
    """As under a strategy that cannot undo a step."""

    def _connect(self, trainer, pl_module):
        assert not self.policy.recover


def test_a_strategy_that_cannot_recover_gets_the_report():
    for make, data, layer in ((plain, images, "head"), (Cuttable, points, "critic")):
        injector = OutOfMemoryAt(layer, {"forward": {1}})
        with pytest.raises(OutOfMemoryReport, match=r"(?s)Out of memory on cpu in .*\(forward 1\).*What helps"):
            fit(make, data(), Unsupported(), injector)
        assert injector.raised == 1
    injector = OutOfMemoryAt("critic", {"forward": {1}})
    with pytest.raises(torch.OutOfMemoryError, match="forward 1") as info:
        fit(GAN, points(), Unsupported(), injector)
    assert "What helps" in info.value.__notes__[0]


def test_a_custom_split():
    def cut(batch, size):
        x, y = batch
        return list(zip(x.split(size), y.split(size), strict=True))

    expected, _ = fit(plain, images(), precision="64-true")
    got, _ = fit(plain, images(), OOMGuard(dry_run=False, split_batch=cut), OutOfMemoryAt("head", {"forward": {0}}),
                 precision="64-true")  # fmt: skip
    assert difference(expected, got) < 1e-9


def test_the_module_is_left_as_it_was():
    module, t = fit(GAN, points(), OOMGuard())
    assert not {"training_step", "log", "configure_gradient_clipping"} & set(vars(module))
    module, t = fit(CNN, images(), OOMGuard(), gradient_clip_val=1.0)
    assert not {"training_step", "log", "configure_gradient_clipping"} & set(vars(module))
    assert "_make_closure" not in vars(t.fit_loop.epoch_loop.automatic_optimization)
    assert not hasattr(module, "oom_policy")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"headroom": 1.0}, r"`headroom=1.0` must be at least 0 and below 1"),
        ({"headroom": -0.1}, r"`headroom=-0.1` must be at least 0"),
        ({"headroom": None}, r"`headroom=None` must be"),
        ({"headroom": float("nan")}, r"`headroom=nan` must be"),
        ({"timeout": 0}, r"`timeout=0` must be > 0"),
        ({"timeout": "1"}, r"`timeout='1'` must be > 0"),
        ({"timeout": float("inf")}, r"`timeout=inf` must be .* finite"),
        ({"dry_run": "no"}, r"`dry_run='no'` must be True or False"),
        ({"grow_after": 1.5}, r"`grow_after=1.5` must be a whole number"),
        ({"grow_after": True}, r"`grow_after=True` must be"),
        ({"grow_after": "3"}, r"`grow_after='3'` must be"),
        ({"weight": "rows"}, r"`weight='rows'` must be a function"),
        ({"split_batch": 2}, r"`split_batch=2` must be a function"),
        ({"on_batch_dependent": "ignore"}, r"`on_batch_dependent='ignore'` must be"),
        ({"grow_after": 0}, r"`grow_after=0` must be a whole number >= 1"),
        ({"worst_case": len, "dry_run": False}, r"`worst_case` is what the dry run runs"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        OOMGuard(**kwargs)


def test_one_guard_only():
    with pytest.raises(MisconfigurationException, match="has 2 `OOMGuard` callbacks"):
        fit(CNN, images(), OOMGuard(), Second())


class Second(OOMGuard):
    @property
    def state_key(self):
        return "second"


def test_batches_that_cannot_be_cut_are_refused_early():
    class Odd(CNN):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[:2], batch_idx)

    data = DataLoader([0], collate_fn=lambda _: (torch.randn(4, 1, 6, 6), torch.zeros(3)))
    with pytest.raises(ValueError, match=r"holds tensors of \[3, 4\] rows.*`split_batch`"):
        fit(Odd, data, OOMGuard())
    with pytest.raises(ValueError, match=r"`weight` returned \[0.0, 0.0\]"):
        fit(plain, images(), OOMGuard(dry_run=False, weight=lambda b: 0), OutOfMemoryAt("head", {"forward": {0}}))


def test_iterating_steps_are_refused():
    class Iterates(CNN):
        def training_step(self, dataloader_iter):
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    with pytest.raises(MisconfigurationException, match=r"training_step\(dataloader_iter\)"):
        fit(Iterates, images(), OOMGuard())


def test_two_ranks(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = str(Path(__file__).with_name("oom_ranks.py"))
    env = {**os.environ, "PYTHONPATH": str(Path(lit_ppo.__file__).parents[1])}
    runs = [subprocess.Popen([sys.executable, script, str(rank), port, str(tmp_path)], env=env) for rank in range(2)]
    try:
        codes = [run.wait(timeout=240) for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert codes == [0, 0]
    for rank in range(2):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert ("Another rank" if rank == 0 else "One row") in results.pop("stopped")
        assert "`static_graph=True` does not allow" in results.pop("refused")
        assert results.pop("events") == [1, 1, rank, 1, 1, 1, 1, 1]  # clipping is each rank's own
        assert len(results) == 12
        for case, (got, bound) in results.items():
            assert got <= bound, f"rank {rank}, {case}: {got}"


class Wide(LightningModule):
    """Activations of 32 KiB a row in each of four layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(x for _ in range(4) for x in (nn.Linear(8192, 8192, bias=False), nn.Sigmoid())))

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def wide():
    return DataLoader(TensorDataset(torch.randn(32768, 8192)), 16384)


@pytest.mark.gpu
@pytest.mark.parametrize("dry_run", [False, True])
def test_cuda_runs_out_of_memory_and_goes_on(dry_run):
    kwargs = {"accelerator": "gpu", "precision": "32-true"}
    torch.manual_seed(5)
    data = wide()
    logged, guarded = Logged(), Logged()
    expected, _ = fit(Wide, data, logged, **kwargs)
    expected.cpu()
    release_memory()
    total = torch.cuda.get_device_properties(0).total_memory
    # 3 GiB of weights, gradients and momentum; a whole batch is 0.5 GiB and needs 4 GiB of activations
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (6 << 30)) / total)
    try:
        guard = OOMGuard(dry_run=dry_run)
        got, _ = fit(Wide, data, guard, guarded, **kwargs)
        assert guard.policy.sizes["train"] < 16384
        assert (sum(guard.policy.events.values()) == 0) is dry_run
        assert torch.cuda.get_per_process_memory_fraction() < 0.5  # the dry run put the limit back
        assert difference(expected, got.cpu()) < 1e-6
        assert guarded.epoch == pytest.approx(logged.epoch, rel=1e-5)
        # Whatever other processes hold: it is this one's limit that is in the way.
        advice = r"(?s)One row.*limit of this process.*reserved but unallocated.*1\. recompute activations: `Gradient"
        with pytest.raises(OutOfMemoryReport, match=advice):
            fit(Wide, DataLoader(TensorDataset(torch.randn(2, 1 << 14, 8192))), OOMGuard(), **kwargs)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
