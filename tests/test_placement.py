"""Frozen roles on other devices than the rank's: the CPU, another GPU, or several."""

from __future__ import annotations

import pytest
import tiny
import torch

from lit_ppo import OptimConfig, PPOLightningModule, RewardConfig, RoleConfig


def run(tmp_path, accelerator="cpu", reward=None, **options):
    module = PPOLightningModule(
        tiny.folder(),
        RewardConfig(source=tiny.folder(seed=1, labels=1), name="rm", dtype="float32", **(reward or {})),
        critic=tiny.folder(seed=2),
        sampling={"max_new_tokens": 6},
        optim=OptimConfig(actor_lr=1e-3),
        **options,
    )
    trainer = tiny.fit(tmp_path, module, accelerator=accelerator)
    return module, trainer


def test_a_reward_model_by_device_map(tmp_path):
    pytest.importorskip("accelerate")
    plain, _ = run(tmp_path)
    mapped, _ = run(tmp_path, reward={"device_map": "cpu"})
    by_part, _ = run(tmp_path, reward={"device_map": {"model": "cpu", "score": "cpu"}})
    for other in (mapped, by_part):
        for (name, p), (_, q) in zip(plain.named_parameters(), other.named_parameters(), strict=True):
            assert torch.equal(p, q), name


def test_one_device_or_several():
    with pytest.raises(ValueError, match=r"`reward.device='cpu'` puts the model on one device and .*'auto'"):
        RewardConfig(source="x", device="cpu", device_map="auto")


@pytest.mark.gpu
def test_frozen_roles_on_the_cpu_and_the_rest_on_cuda(tmp_path):
    resident, _ = run(tmp_path, "gpu", reference=RoleConfig(dtype="float32"))
    away, trainer = run(tmp_path, "gpu", reward={"device": "cpu"}, reference=RoleConfig(dtype="float32", device="cpu"))
    assert next(away.rewards.rewards[0].model.parameters()).device.type == "cpu"
    assert next(away.views.reference.store.parameters()).device.type == "cpu"
    assert trainer.strategy.root_device.type == "cuda"  # where the rest was; a fit ends on the CPU
    for (name, p), (_, q) in zip(resident.named_parameters(), away.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_reward_model_over_two_gpus(tmp_path):
    parts = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "score": 1}
    parts["model.rotary_emb"] = 0
    spread, _ = run(tmp_path, "gpu", reward={"device_map": parts})
    assert {p.device.index for p in spread.rewards.rewards[0].model.parameters()} == {0, 1}
