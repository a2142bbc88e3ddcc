"""Frozen roles on other devices than the rank's: the CPU, another GPU, or several."""

from __future__ import annotations

import pytest
import tiny
import torch

from lit_ppo import OptimConfig, PPOConfig, PPOLightningModule, RewardConfig, RoleConfig
from lit_ppo.callbacks import OffloadRoles
from lit_ppo.plan.setup import elsewhere
from lit_ppo.roles.spread import named_devices

PARTS = ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]


def run(tmp_path, accelerator="cpu", reward=None, callbacks=(), **options):
    module = PPOLightningModule(
        tiny.folder(),
        RewardConfig(source=tiny.folder(seed=1, labels=1), name="rm", dtype="float32", **(reward or {})),
        critic=tiny.folder(seed=2),
        sampling={"max_new_tokens": 6},
        optim=OptimConfig(actor_lr=1e-3),
        **options,
    )
    trainer = tiny.fit(tmp_path, module, accelerator=accelerator, callbacks=list(callbacks))
    return module, trainer


def test_a_reward_model_by_device_map(tmp_path):
    pytest.importorskip("accelerate")
    plain, _ = run(tmp_path)
    mapped, _ = run(tmp_path, reward={"device_map": "cpu"})
    by_part, _ = run(tmp_path, reward={"device_map": {"model": "cpu", "score": "cpu"}})
    for other in (mapped, by_part):
        for (name, p), (_, q) in zip(plain.named_parameters(), other.named_parameters(), strict=True):
            assert torch.equal(p, q), name


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("places", ["cpu", ["cpu"] * 6, ["cpu", "cpu", "cpu", "disk", "cpu", "disk"]])
def test_a_reference_by_device_map(tmp_path, packing, places):
    pytest.importorskip("accelerate")
    device_map = places if isinstance(places, str) else dict(zip(PARTS, places, strict=True))
    ppo = PPOConfig(epochs=1, packing=packing)
    plain, trainer = run(tmp_path / "plain", ppo=ppo)
    mapped, other = run(tmp_path / "mapped", reference=RoleConfig(device_map=device_map), ppo=ppo)
    store = mapped.views.reference.store
    assert store.home == torch.device("cpu")
    assert any(p.is_meta for p in store.parameters()) == ("disk" in places)  # it waits there
    assert float(trainer.callback_metrics["objective/kl"]) == float(other.callback_metrics["objective/kl"])
    for (name, p), (_, q) in zip(plain.named_parameters(), mapped.named_parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize(
    ("role", "options", "message"),
    [
        ("critic", {}, r"`critic.device_map='auto'`: only frozen roles are placed by hand"),
        ("reference", {"device": "cpu"}, r"`reference.device_map='auto'` cannot go with `reference.device='cpu'`"),
        ("reference", {"sharded": True}, r"cannot go with `reference.sharded=True`"),
        ("reference", {"quantize_embeddings": "int8"}, r"cannot go with `reference.quantize_embeddings='int8'`"),
        ("reference", {"device_map": {"": "cuda:77"}}, r"`reference.device_map='cuda:77'` does not exist"),
    ],
)
def test_maps_that_cannot_be(tmp_path, role, options, message):
    module = PPOLightningModule(
        tiny.folder(),
        tiny.count_w1,
        sampling={"max_new_tokens": 4},
        **{role: RoleConfig(**{"device_map": "auto"} | options)},
    )
    with pytest.raises(ValueError, match=message):
        tiny.fit(tmp_path, module)
    assert module.views is None


def test_what_is_spread_is_not_paged(tmp_path):
    device_map = dict(zip(PARTS, ["cpu", "cpu", "cpu", "disk", "cpu", "disk"], strict=True))
    with pytest.raises(ValueError, match=r"`reference` is spread over several devices \(`device_map`\)"):
        run(tmp_path, reference=RoleConfig(device_map=device_map), callbacks=[OffloadRoles(["reference"])])


def test_what_a_map_names():
    assert named_devices("balanced") == named_devices(None) == []
    assert named_devices("cuda:1") == ["cuda:1"]
    assert named_devices({"a": 0, "b": "cpu", "c": "disk", "d": "cuda:2"}) == ["cpu", "cuda:0", "cuda:2"]
    assert elsewhere({"a": 1, "b": "cpu"}) is not None
    assert elsewhere({"a": 0, "b": "cpu"}) is elsewhere("auto") is None


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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("places", [[0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, "cpu"]])
def test_a_reference_over_two_gpus(tmp_path, dtype, places):
    reference = {"source": tiny.folder(), "dtype": dtype}
    whole, trainer = run(tmp_path / "whole", "gpu", reference=RoleConfig(**reference))
    device_map = dict(zip(PARTS, places, strict=True))
    spread, other = run(tmp_path / "spread", "gpu", reference=RoleConfig(device_map=device_map, **reference))
    store = spread.views.reference.store
    assert {p.device.index for p in store.parameters() if p.is_cuda} == {0, 1}
    kl = float(trainer.callback_metrics["objective/kl"])
    assert float(other.callback_metrics["objective/kl"]) == pytest.approx(kl, rel=0.05, abs=0.01)
    assert whole.global_step == spread.global_step
