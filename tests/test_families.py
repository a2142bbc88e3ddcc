"""Other families than Llama's: heads of other names, biases, learned positions, partial rotation, tied embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    CLIPTextConfig,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    MambaConfig,
    Phi3Config,
    PhiConfig,
    T5Config,
)

from lit_ppo import LoRAConfig, OptimConfig, PPOConfig, PPOLightningModule, SamplingConfig
from lit_ppo.export import export

SHAPE = dict(
    vocab_size=tiny.VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
FAMILIES: dict[str, Any] = {
    "gpt2": GPT2Config(
        vocab_size=tiny.VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    ),
    "gpt_neox": GPTNeoXConfig(**SHAPE, tie_word_embeddings=False),
    "gpt_neox-tied": GPTNeoXConfig(**SHAPE, tie_word_embeddings=True),
    "gemma": GemmaConfig(**SHAPE, num_key_value_heads=1, head_dim=8),
    "gemma2": Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=16),
    "phi": PhiConfig(**SHAPE, num_key_value_heads=4),
    "phi3": Phi3Config(**SHAPE, num_key_value_heads=2),
}  # fmt: skip


def wordy(responses: list[str]) -> list[float]:
    """A reward that differs from response to response."""
    return [sum(int(w[1:]) % 7 for w in r.split()) / 10 for r in responses]


OPTIONS = dict(
    reward=wordy,
    sampling=SamplingConfig(max_new_tokens=4, temperature=1.0),
    ppo=PPOConfig(epochs=1, minibatches=2, micro_batch_size=2, rollout_engine="hf"),
    optim=OptimConfig(actor_lr=1e-2, schedule="constant"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each family's model and tokenizer, saved."""
    made = {}
    for name, config in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter * 5 if parameter.dim() > 1 else parameter + torch.randn_like(parameter) * 0.1)
        made[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(made[name])
        tiny.tokenizer().save_pretrained(made[name])
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_an_iteration_trains_actor_and_critic(family, folders, tmp_path):
    module = PPOLightningModule(folders[family], **OPTIONS)
    trainer = tiny.fit(tmp_path / "run", module, max_epochs=2)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert module.iteration == 4
    assert metrics["policy/ratio_first_step"] == pytest.approx(1, abs=1e-5)
    assert metrics["rollout/logprob_gap"] < 1e-4
    assert metrics["objective/kl"] != 0
    assert metrics["optim/skipped_steps"] == 0
    start = AutoModelForCausalLM.from_pretrained(folders[family])
    trained = dict(module.actor.model.named_parameters())
    assert all(trained[n].shape == p.shape for n, p in start.named_parameters())
    moved = [n for n, p in start.named_parameters() if not torch.equal(trained[n], p)]
    assert len(moved) == len(trained), "every weight and bias is trained"
    values = module.critic.model.score.weight
    assert values.shape == (1, 32)
    assert values.abs().max() > 0, "the critic's head started at 0 and is trained"

    for role, cls in (("actor", AutoModelForCausalLM), ("critic", AutoModelForSequenceClassification)):
        folder = export(module, tmp_path / role, role=role)
        plain = cls.from_pretrained(folder)
        ours = getattr(module, role).model
        for n, p in plain.named_parameters():
            assert torch.equal(p, dict(ours.named_parameters())[n]), n


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_the_models_own(family, folders):
    module = PPOLightningModule(folders[family], **OPTIONS)
    module.configure_model()
    with torch.no_grad():
        rollout = module.generate(tiny.prompts(4), module.sampling, 0, 0)
        module.actor.check_head("actor")
        ours = module.views.actor(rollout)[0]
        values = module.views.critic(rollout)[0]
    assert not values.any(), "a new critic says 0"
    model = AutoModelForCausalLM.from_pretrained(folders[family])
    width = rollout.prompts.ids.shape[1]
    for row in range(4):
        n, r = int(rollout.prompts.lengths[row]), int(rollout.lengths[row])
        text = torch.cat([rollout.prompts.ids[row, width - n :], rollout.ids[row, :r]])
        with torch.no_grad():
            logits = model(text[None]).logits[0, n - 1 : -1].log_softmax(-1)
        theirs = logits.gather(-1, rollout.ids[row, :r, None])[:, 0]
        assert torch.allclose(ours[row, :r], theirs, atol=1e-4), family


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_a_shared_trunk(family, folders, tmp_path):
    module = PPOLightningModule(folders[family], lora=LoRAConfig(r=2), layout="shared", **OPTIONS)
    trainer = tiny.fit(tmp_path, module)
    assert float(trainer.callback_metrics["policy/ratio_first_step"]) == pytest.approx(1, abs=1e-5)
    assert module.iteration == 2
    from peft import PeftModel

    folder = export(module, tmp_path / "adapter")
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders[family]), folder)
    assert any("lora_B" in n and p.abs().max() > 0 for n, p in plain.named_parameters())
    whole = AutoModelForCausalLM.from_pretrained(export(module, tmp_path / "merged", merge=True))
    ids = tiny.prompts(1).ids
    with torch.no_grad():
        assert torch.allclose(whole(ids).logits, plain(ids).logits, atol=1e-4)


def test_a_critic_may_start_from_a_reward_model_of_the_family(tmp_path, folders):
    for family in ("gpt2", "gpt_neox", "phi"):
        config = type(FAMILIES[family])(**{**FAMILIES[family].to_dict(), "num_labels": 1})
        torch.manual_seed(1)
        reward = AutoModelForSequenceClassification.from_config(config)
        reward.save_pretrained(tmp_path / family)
        tiny.tokenizer().save_pretrained(tmp_path / family)
        module = PPOLightningModule(folders[family], **{**OPTIONS, "reward": str(tmp_path / family)})
        tiny.fit(tmp_path / "run", module, max_steps=1)
        assert not torch.equal(module.critic.model.score.weight, reward.score.weight)
        assert torch.allclose(module.critic.model.score.weight, reward.score.weight, atol=0.1)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (T5Config(d_model=32, num_layers=1, num_heads=2), r"`actor` is an encoder-decoder model \(t5\), whose"),
        (CLIPTextConfig(hidden_size=32), r"`actor` is a clip_text_model model, which generates no text"),
        (MambaConfig(hidden_size=32, vocab_size=tiny.VOCAB), r"`actor` is a mamba model.*no sequence classifier"),
    ],
    ids=lambda x: getattr(x, "model_type", ""),
)
def test_what_cannot_have_a_role_is_refused_before_a_weight_is_loaded(config, match, tmp_path):
    config.save_pretrained(tmp_path / "model")  # no weights at all
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=match):
        tiny.fit(tmp_path, PPOLightningModule(str(tmp_path / "model"), **OPTIONS))


def test_an_encoder_is_refused_when_its_log_probs_are_looked_at(tmp_path):
    """A masked language model has a class for generation, too."""
    config = BertConfig(**SHAPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="`actor` is a BertLMHeadModel, whose logits are not"):
        tiny.fit(tmp_path, PPOLightningModule(str(tmp_path / "model"), **OPTIONS))
