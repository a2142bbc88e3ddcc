"""The callbacks on the PPO module: phases, adapters on one trunk, roles that are quantized."""

import pytest
import tiny
import torch

from lit_ppo import PPOLightningModule
from lit_ppo.callbacks import FreezeParameters, GradientCheckpointing, QuantizeModules, QuantizeRewardModel
from lit_ppo.callbacks._bitsandbytes import quantized_layers

pytestmark = [
    pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode"),
    pytest.mark.filterwarnings("ignore:.*sampl.*"),
]
LAYOUTS = {
    "separate": {},
    "lora": {"lora": {"r": 4}},
    "shared": {"layout": "shared", "lora": {"r": 4}},
}


def make(layout="separate", reward=tiny.count_w1):
    return PPOLightningModule(
        actor=tiny.folder(),
        reward=reward,
        sampling={"max_new_tokens": 5},
        ppo={"epochs": 2, "minibatches": 2, "micro_batch_size": 2},
        optim={"actor_lr": 1e-2},
        **LAYOUTS[layout],
    )


def weights(module):
    return {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_checkpointing_changes_nothing_and_runs_in_the_update_only(tmp_path, layout):
    plain, module = make(layout), make(layout)
    tiny.fit(tmp_path, plain)
    callback = GradientCheckpointing()
    trainer = tiny.fit(tmp_path, module, callbacks=[callback])
    for name, value in weights(plain).items():
        assert torch.allclose(weights(module)[name], value, atol=1e-6), name
    micro_batches = trainer.global_step * 2  # of 2 rows, in minibatches of 4; no forward of a rollout is among them
    assert callback._engine.calls == micro_batches * 2 * 2  # actor and critic, of 2 layers each
    assert callback.bytes_saved > 0


def test_freezing_a_part_of_the_actor(tmp_path):
    frozen = "actor.model.model.layers.0"
    start = {n: p.detach().clone() for n, p in make_ready(tmp_path).named_parameters()}
    module = make()
    tiny.fit(tmp_path, module, callbacks=[FreezeParameters(frozen)])
    moved = {n for n, p in module.named_parameters() if not torch.equal(p, start[n])}
    assert moved == {n for n in start if not n.startswith(frozen)}


def make_ready(tmp_path):
    """A module as it is before the first step."""
    module = make()
    tiny.trainer(tmp_path, limit_train_batches=0).fit(module, tiny.PromptDataModule(tiny.rows(), batch_size=8))
    return module


def test_the_reference_and_the_reward_model_are_quantized(tmp_path):
    pytest.importorskip("bitsandbytes")
    module = make(reward=tiny.folder(labels=1))
    reference, reward = QuantizeModules("reference"), QuantizeRewardModel()
    tiny.fit(tmp_path, module, callbacks=[reference, reward, GradientCheckpointing()])
    for name, callback in (("reference", reference), ("reward", reward)):
        assert callback.reports[name].bytes_freed > 0
        assert len(quantized_layers(module.roles[name])) == 14
    assert not quantized_layers(module.roles["actor"])
    assert not quantized_layers(module.roles["critic"])
