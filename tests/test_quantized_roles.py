"""Trunks and frozen roles in 4 or 8 bits by one line of YAML, quantized while they are loaded."""

from __future__ import annotations

import pytest
import tiny
import torch

from lit_ppo import LoRAConfig, OptimConfig, PPOConfig, PPOLightningModule, RewardConfig, RoleConfig
from lit_ppo.callbacks import QuantizeModules
from lit_ppo.callbacks._bitsandbytes import quantized_layers
from lit_ppo.rewards.model import ModelReward

pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast")]
SAMPLING = {"max_new_tokens": 6}
MODES = ["nf4", "fp4", "int8"]


def module(actor, reward=tiny.count_w1, layout="shared", **options):
    options = {"lora": LoRAConfig(r=4), "optim": OptimConfig(actor_lr=1e-2)} | options
    return PPOLightningModule(actor, reward, layout=layout, sampling=SAMPLING, **options)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("mode", MODES)
def test_a_shared_quantized_trunk_trains_its_adapters(tmp_path, mode, precision):
    ours = module(RoleConfig(source=tiny.folder(), quantize=mode))
    ours.configure_model()
    layers = quantized_layers(ours.actor)
    assert len(layers) == 2 * 7
    packed = {n: m.weight.data.clone() for n, m in layers.items()}
    before = {n: p.detach().clone() for n, p in ours.named_parameters() if p.requires_grad}
    tiny.fit(tmp_path, ours, precision=precision)
    assert all(torch.equal(m.weight.data, packed[n]) for n, m in layers.items() if mode != "int8")
    base = ours.actor.base
    for weight in (base.lm_head.weight, base.get_input_embeddings().weight):
        assert weight.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    kinds = {p.dtype for _, named in ours.trained.items() for _, p in named}
    assert kinds == {torch.bfloat16 if precision == "bf16-true" else torch.float32}  # with float32 masters
    moved = [n for n, p in ours.named_parameters() if n in before and not torch.equal(p.float(), before[n].float())]
    assert any(".policy." in n for n in moved)
    assert any(".value." in n for n in moved)
    assert set(ours.state_dict()) == {n for n, p in ours.named_parameters() if p.requires_grad}


def test_it_computes_what_the_callback_computes(tmp_path):
    by_option = module(RoleConfig(source=tiny.folder(), quantize="nf4"))
    by_callback = module(tiny.folder())
    tiny.fit(tmp_path / "a", by_option)
    tiny.fit(tmp_path / "b", by_callback, callbacks=[QuantizeModules("actor", probe=False)])
    for (name, p), (_, q) in zip(by_option.named_parameters(), by_callback.named_parameters(), strict=True):
        if p.requires_grad:
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7, msg=name)


def test_separate_roles_inherit_the_trunk_and_a_reference_has_its_own(tmp_path):
    ours = module(RoleConfig(source=tiny.folder(), quantize="nf4"), layout="separate")
    ours.configure_model()
    assert quantized_layers(ours.critic)
    assert not quantized_layers(ours.critic.base.score)
    full = module(tiny.folder(), layout="separate", lora=None, reference=RoleConfig(quantize="nf4"))
    full.configure_model()
    assert quantized_layers(full.views.reference.store)
    assert not quantized_layers(full.actor)
    tiny.fit(tmp_path, full)


@pytest.mark.parametrize("mode", MODES)
def test_a_quantized_reward_model(tmp_path, mode):
    source = tiny.folder(seed=1, labels=1)
    ours = module(tiny.folder(), RewardConfig(source=source, quantize=mode, name="rm"), layout="separate", lora=None)
    tiny.fit(tmp_path, ours)
    model = ours.rewards.rewards[0].model
    assert len(quantized_layers(model)) == 2 * 7
    assert model.score.weight.dtype == torch.float32
    assert not quantized_layers(ours.critic)  # which starts from the reward model at full precision


def test_a_resumed_run_goes_on(tmp_path):
    def make():
        return module(RoleConfig(source=tiny.folder(), quantize="nf4"))

    whole, first = make(), make()
    tiny.fit(tmp_path / "whole", whole, max_epochs=2)
    trainer = tiny.fit(tmp_path / "first", first, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    second = make()
    trainer = tiny.trainer(tmp_path / "second", max_epochs=2)
    from lit_ppo import PromptDataModule

    trainer.fit(second, PromptDataModule(tiny.rows(), batch_size=8), ckpt_path=tmp_path / "one.ckpt")
    assert second.iteration == whole.iteration == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": None, "layout": "separate"}, "`actor.quantize='nf4'`: quantized weights cannot train. Give `lora`"),
        ({"callbacks": True}, "`actor.quantize` and a callback quantize the same weights"),
    ],
)
def test_what_cannot_work(tmp_path, options, message):
    callbacks = [QuantizeModules("actor")] if options.pop("callbacks", False) else []
    with pytest.raises(ValueError, match=message):
        tiny.fit(tmp_path, module(RoleConfig(source=tiny.folder(), quantize="nf4"), **options), callbacks=callbacks)


def test_values_are_checked():
    with pytest.raises(ValueError, match=r"`role.quantize='nf5'` must be one of .* Did you mean 'nf4'\?"):
        RoleConfig(quantize="nf5")
    with pytest.raises(ValueError, match=r"`reward.quantize='4bit'` must be one of"):
        RewardConfig(source="x", quantize="4bit")
    with pytest.raises(ValueError, match=r"`reward.quantize='nf4'` has no effect on a reward model that is already"):
        ModelReward(tiny.model(), tiny.tokenizer(), quantize="nf4")


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ours = module(RoleConfig(source=tiny.folder(), quantize="nf4"), ppo=PPOConfig())
    with pytest.raises(ModuleNotFoundError, match=r"`actor.quantize='nf4'` needs bitsandbytes and accelerate"):
        ours.configure_model()


def test_a_source_that_is_quantized_already(tmp_path):
    ours = module(RoleConfig(source=tiny.folder(), quantize="nf4"))
    ours.configure_model()
    config = ours.actor.base.config
    config.save_pretrained(tmp_path)
    again = module(RoleConfig(source=str(tmp_path), quantize="nf4"))
    with pytest.raises(ValueError, match="its weights are saved quantized already"):
        again.configure_model()


@pytest.mark.gpu
def test_on_cuda_no_full_copy_is_ever_there(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **tiny.SHAPE | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 64}
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours = module(RoleConfig(source=str(tmp_path), quantize="nf4"))
    peaks: list[int] = []  # of what was before each phase: the first is the loading's
    ours.phase_listeners.append(lambda _: peaks.append(torch.cuda.max_memory_allocated()))
    tiny.fit(tmp_path / "fit", ours, precision="bf16-true", accelerator="gpu", limit_train_batches=1)
    full = sum(p.numel() for p in LlamaForCausalLM(config).parameters()) * 2
    assert peaks[0] - before < full / 2
