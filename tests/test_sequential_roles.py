"""One role's gradients at a time gives what both together give, to the bit, and frees them in between."""

from __future__ import annotations

import math

import pytest
import tiny
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lit_ppo import LoRAConfig, OptimConfig, PPOConfig, PPOLightningModule
from lit_ppo.callbacks import OOMGuard

TIMES = ("time/", "rollout/tokens_per_s", "update/tokens_per_s", "memory/")


class Watch(Callback):
    """Which roles have gradients at each step, and what `global_step` is."""

    def __init__(self, spoil=None):
        self.seen, self.spoil = [], spoil

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        alive = {r for r, named in pl_module.trained.items() if any(p.grad is not None for _, p in named)}
        self.seen.append((sorted(alive), trainer.global_step))
        if self.spoil in alive:
            pl_module.trained[self.spoil][0][1].grad.fill_(math.nan)


def run(tmp_path, sequential, *callbacks, layout="separate", precision="32-true", lora=None, accelerator="cpu", **ppo):
    options = {"epochs": 2, "minibatches": 2, "micro_batch_size": 3} | ppo
    module = PPOLightningModule(
        tiny.folder(),
        tiny.count_w1,
        sampling={"max_new_tokens": 6},
        layout=layout,
        lora=lora,
        ppo=PPOConfig(**options, sequential_roles=sequential),
        optim=OptimConfig(actor_lr=1e-3),
    )
    where = tmp_path / f"{sequential}"
    logger = CSVLogger(where, flush_logs_every_n_steps=1)
    trainer = tiny.fit(
        where, module, callbacks=list(callbacks), precision=precision, logger=logger, accelerator=accelerator
    )
    metrics = {k: v for k, v in trainer.logged_metrics.items() if not k.startswith(TIMES)}
    return module, trainer, metrics


@pytest.mark.filterwarnings("ignore:.*`optim.*")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("layout", ["separate", "lora", "shared"])
def test_the_result_is_the_same_to_the_bit(tmp_path, layout, precision):
    options = {
        "layout": "shared" if layout == "shared" else "separate",
        "lora": None if layout == "separate" else LoRAConfig(r=4),
        "precision": precision,
    }
    together, apart = Watch(), Watch()
    one, trainer_one, metrics_one = run(tmp_path, False, together, **options)
    two, trainer_two, metrics_two = run(tmp_path, True, apart, **options)
    assert trainer_one.global_step == trainer_two.global_step == 8
    assert metrics_one == metrics_two
    for (name, p), (_, q) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    assert together.seen == [(["actor", "critic"], i) for i in range(8)]
    assert apart.seen == [([role], i) for i in range(8) for role in ("actor", "critic")]
    for module in (one, two):
        assert all(p.grad is None for p in module.parameters())  # nothing stays for the next rollout


def test_the_critic_alone_and_no_critic(tmp_path):
    warm = Watch()
    run(tmp_path, True, warm, critic_warmup_iterations=1)
    assert [roles for roles, _ in warm.seen[:5]] == [["critic"]] * 4 + [["actor"]]
    alone = Watch()
    run(tmp_path, True, alone, advantage="reinforce_pp")
    assert alone.seen == [(["actor"], i) for i in range(8)]


@pytest.mark.filterwarnings("ignore:The gradient of iteration")
@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("sequential", [False, True])
def test_three_bad_gradients_in_a_row_stop_the_run(tmp_path, role, sequential):
    watch = Watch(spoil=role)
    with pytest.raises(FloatingPointError, match="3 updates in a row"):
        run(tmp_path, sequential, watch)


@pytest.mark.filterwarnings("ignore:The gradient of iteration")
def test_a_bad_gradient_of_the_actor_drops_the_whole_step(tmp_path):
    class Once(Watch):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.spoil = "actor" if trainer.global_step == 2 else None
            super().on_before_optimizer_step(trainer, pl_module, optimizer)

    one, _, metrics_one = run(tmp_path, False, Once())
    two, trainer, metrics_two = run(tmp_path, True, Once())
    assert trainer.global_step == 8
    for (name, p), (_, q) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    assert metrics_one["optim/skipped_steps"] == metrics_two["optim/skipped_steps"]


def test_an_out_of_memory_is_retried_role_by_role(tmp_path, monkeypatch):
    fails = {"critic"}
    plain = PPOLightningModule.loss

    def loss(self, micro, tokens, sequences, roles):
        if fails & set(roles) and len(micro) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, micro, tokens, sequences, roles)

    expected, _, _ = run(tmp_path, False)
    monkeypatch.setattr(PPOLightningModule, "loss", loss)
    module, trainer, _ = run(tmp_path, True, OOMGuard(dry_run=False))
    assert trainer.global_step == 8
    assert module.oom_policy.events["update"] > 0
    for (name, p), (_, q) in zip(module.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*")
def test_a_gradient_scaler_steps_for_each_role(tmp_path):
    module, trainer, _ = run(tmp_path, True, precision="16-mixed", accelerator="gpu")
    assert trainer.global_step == 8
    assert all(p.isfinite().all() for p in module.parameters())
