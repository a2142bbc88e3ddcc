"""OffloadRoles: the same run with less in memory. Storages really come and go, on the CPU too."""

from __future__ import annotations

import pytest
import tiny
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn

from lit_ppo import LoRAConfig, OptimConfig, PPOConfig, PPOLightningModule, PromptDataModule, RewardConfig, RoleConfig
from lit_ppo.callbacks import OffloadRoles, _paging

TIMES = ("time/", "rollout/tokens_per_s", "memory/", "rollout/share", "update/")


@pytest.fixture(autouse=True)
def tiny_storages_count(monkeypatch):
    monkeypatch.setattr(_paging, "SMALLEST", 256)


def held(module):
    """Bytes of parameters that are really there."""
    return sum(p.untyped_storage().nbytes() for p in module.parameters())


class Look(Callback):
    """What is there in each phase, once it has started."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, pl_module):
        def look(phase):
            if phase is not None:
                there = {n for n, m in pl_module.roles.items() if held(m) > 0.5 * self.full[n]}
                state = [v for s in trainer.optimizers[0].state.values() for k, v in s.items() if k != "step"]
                if any(v.untyped_storage().nbytes() >= 256 for v in state):
                    there.add("optimizer")
                self.seen.append((phase, sorted(there)))

        self.full = {n: held(m) for n, m in pl_module.roles.items()}
        pl_module.phase_listeners.append(look)


def module(**options):
    options = {
        "reward": RewardConfig(source=tiny.folder(seed=1, labels=1), name="rm"),
        "critic": tiny.folder(seed=2),
    } | options
    return PPOLightningModule(
        tiny.folder(),
        sampling={"max_new_tokens": 6},
        ppo=PPOConfig(epochs=1, minibatches=2),
        optim=OptimConfig(actor_lr=1e-3, schedule="constant"),
        **options,
    )


def run(tmp_path, *callbacks, epochs=2, make=module, ckpt_path=None, **options):
    made = make(**options)
    trainer = tiny.trainer(tmp_path, max_epochs=epochs, callbacks=list(callbacks), logger=False)
    trainer.fit(made, PromptDataModule(tiny.rows(), batch_size=8), ckpt_path=ckpt_path)
    return made, trainer


def same(one, two):
    for (name, p), (_, q) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_roles_are_there_when_they_compute_and_only_then(tmp_path):
    plain, trainer_plain = run(tmp_path / "plain")
    offload = OffloadRoles(["reference", "critic", "reward"], optimizer=True)
    look = Look()
    ours, trainer = run(tmp_path / "ours", offload, look)
    same(plain, ours)
    numbers = {k: v for k, v in trainer_plain.logged_metrics.items() if not k.startswith(TIMES)}
    assert numbers == {k: v for k, v in trainer.logged_metrics.items() if not k.startswith(TIMES)}
    first, second = look.seen[:3], look.seen[3:6]
    assert first == [("rollout", ["actor"]), ("score", ["actor"]), ("update", ["actor"])]  # on demand
    assert second == [
        ("rollout", ["actor"]),
        ("score", ["actor", "critic", "reference", "reward"]),
        ("update", ["actor", "critic", "optimizer"]),
    ]
    assert look.seen[3:6] == look.seen[6:9] == look.seen[9:12]
    for name, role in ours.roles.items():
        assert held(role) == look.full[name]
    assert set(offload.bytes) == {"reference", "critic", "reward", "optimizer"}
    for part in ours.views.reference.store.modules():
        assert not part._forward_pre_hooks
    assert ours.phase_listeners != []
    assert offload._on_phase not in ours.phase_listeners


def test_frozen_roles_by_default(tmp_path):
    offload = OffloadRoles()
    run(tmp_path, offload, epochs=1)
    assert set(offload.bytes) == {"reference", "reward"}


@pytest.mark.parametrize("mode", ["nf4", "int8"])
@pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast")
def test_quantized_roles_page_with_their_constants(tmp_path, mode):
    pytest.importorskip("bitsandbytes")
    options = {
        "reference": RoleConfig(quantize=mode),
        "reward": RewardConfig(source=tiny.folder(seed=1, labels=1), quantize=mode, name="rm"),
    }
    plain, _ = run(tmp_path / "plain", **options)
    ours, _ = run(tmp_path / "ours", OffloadRoles(), **options)
    same(plain, ours)


def test_a_critic_on_an_adapter_and_checkpoints(tmp_path):
    """What is away when a checkpoint is written comes back first; a resumed run goes on as without."""
    options = {"lora": LoRAConfig(r=4), "critic": None}

    class Save(Callback):
        def on_train_start(self, trainer, pl_module):
            def save(phase):
                if phase == "rollout" and pl_module.iteration == 2:
                    trainer.save_checkpoint(tmp_path / "mid.ckpt")

            pl_module.phase_listeners.append(save)

    plain, trainer = run(tmp_path / "plain", **options)
    offload = OffloadRoles(["critic", "reward"], optimizer=True)
    ours, _ = run(tmp_path / "ours", offload, Save(), **options)
    same(plain, ours)
    mid = torch.load(tmp_path / "mid.ckpt", weights_only=True)
    assert all(v.numel() and v.isfinite().all() for v in mid["state_dict"].values())
    state = mid["optimizer_states"][0]["state"]
    assert all(v["exp_avg"].any() for name, v in state.items() if "lora_B" in name)
    _, trainer = run(tmp_path / "first", OffloadRoles(["critic"], optimizer=True), epochs=1, **options)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    second, _ = run(
        tmp_path / "second", OffloadRoles(["critic"], optimizer=True), ckpt_path=tmp_path / "one.ckpt", **options
    )
    same(plain, second)


def test_an_exception_brings_everything_back(tmp_path):
    class Fail(Callback):
        def on_train_start(self, trainer, pl_module):
            def fail(phase):
                if phase == "rollout" and pl_module.iteration == 1:
                    raise KeyError("stop here")

            pl_module.phase_listeners.append(fail)
            self.module = pl_module
            self.full = {n: held(m) for n, m in pl_module.roles.items()}

    fail = Fail()
    with pytest.raises(KeyError, match="stop here"):
        run(tmp_path, OffloadRoles(["critic", "reference"]), fail)
    assert {n: held(m) for n, m in fail.module.roles.items()} == fail.full


def test_validation_pages_only_what_it_uses(tmp_path):
    made = module()
    look = Look()
    trainer = tiny.trainer(tmp_path, max_epochs=2, callbacks=[OffloadRoles(), look], num_sanity_val_steps=0)
    data = PromptDataModule(tiny.rows(), batch_size=8, val=tiny.rows(4))
    trainer.fit(made, data)
    last = look.seen[-2:]
    assert [phase for phase, _ in last] == ["rollout", "score"]
    assert last[1][1] == ["actor", "critic", "optimizer", "reward"]  # not the reference, which is away


@pytest.mark.parametrize(
    ("callback", "options", "message"),
    [
        (lambda: OffloadRoles("actor"), {}, "`OffloadRoles.roles=.'actor'..`: the actor samples"),
        (lambda: OffloadRoles("refrence"), {}, "is no role. Nearest names: `reference`"),
        (lambda: OffloadRoles("reference"), {"layout": "shared", "lora": LoRAConfig(), "critic": None},
         "`reference` shares weights with `actor`, which stays"),
        (OffloadRoles, {"layout": "shared", "lora": LoRAConfig(), "critic": None, "reward": tiny.count_w1},
         "has nothing to do: every role trains, or shares its weights"),
    ],
)  # fmt: skip
def test_what_cannot_work(tmp_path, callback, options, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, callback(), **options)


def test_modules_without_phases_are_refused(tmp_path):
    class Plain(LightningModule):
        def training_step(self, batch, batch_idx):
            raise AssertionError

        def configure_optimizers(self):
            return torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)

    trainer = tiny.trainer(tmp_path, callbacks=[OffloadRoles()])
    with pytest.raises(ValueError, match="Plain has no `phase_listeners`"):
        trainer.fit(Plain(), torch.utils.data.DataLoader([0]))


def test_host_copies_of_frozen_weights_are_kept_until_something_writes_to_them():
    layer = nn.Linear(32, 32).requires_grad_(False)
    unit = _paging.Unit.of_module(layer)
    unit.leave()
    assert layer.weight.untyped_storage().nbytes() == 0
    unit.wait()
    host = next(iter(unit._held.values())).host
    before = layer.weight.clone()
    host.fill_(7)  # as it will be seen only if it is read again
    unit.leave()
    unit.wait()
    assert not torch.equal(layer.weight, before)
    with torch.no_grad():
        layer.weight.copy_(before)
    unit.leave()
    unit.wait()
    assert torch.equal(layer.weight, before)
    unit.release()


@pytest.mark.gpu
@pytest.mark.filterwarnings(
    "ignore:inner dimension .* is not aligned:UserWarning"
)  # a model this small has few columns
@pytest.mark.parametrize("mode", ["none", "nf4", "int8"])
def test_on_cuda_the_memory_comes_free_and_the_result_stays(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(_paging, "SMALLEST", 2**10)
    options = {
        "reference": RoleConfig(source=tiny.folder(), quantize=mode, dtype="bfloat16"),
        "reward": RewardConfig(source=tiny.folder(seed=1, labels=1), quantize=mode, name="rm"),
    }
    results = []
    for callbacks in ([], [OffloadRoles(["reference", "reward", "critic"], optimizer=True)]):
        made = module(**options)
        trainer = tiny.trainer(tmp_path, max_epochs=2, callbacks=callbacks, accelerator="gpu")
        trainer.fit(made, PromptDataModule(tiny.rows(), batch_size=8))
        results.append(made)
    for (name, p), (_, q) in zip(*(m.named_parameters() for m in results), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.gpu
def test_prefetch_is_ordered_with_compute_on_cuda():
    torch.manual_seed(0)
    layers = [nn.Linear(4096, 4096, device="cuda").requires_grad_(False) for _ in range(3)]
    x = torch.randn(64, 4096, device="cuda")
    expected = [layer(x) for layer in layers]
    units = [_paging.Unit.of_module(layer) for layer in layers]
    for unit in units:
        before = torch.cuda.memory_allocated()
        assert unit.leave() == unit.bytes
        assert before - torch.cuda.memory_allocated() == unit.bytes
    for _ in range(5):
        for i, unit in enumerate(units):
            junk = torch.full((4096, 4096), float("nan"), device="cuda")  # takes the memory that was given back
            units[(i + 1) % 3].fetch()
            unit.wait()
            assert torch.equal(layers[i](x), expected[i])
            del junk
            unit.leave()
    for unit in units:
        unit.release()
    for layer, y in zip(layers, expected, strict=True):
        assert torch.equal(layer(x), y)
