"""Exports load in plain transformers or PEFT and compute what the trained module computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
)

from lit_ppo import LoRAConfig, OptimConfig, PPOConfig, PPOLightningModule, SamplingConfig
from lit_ppo.export import export, load_module, load_policy

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
]

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
LORA = LoRAConfig(r=4, alpha=16)


def trained(tmp_path: Path, kind: str = "llama", **options: Any) -> tuple[PPOLightningModule, Path]:
    """A module after an epoch at a high learning rate, and its checkpoint."""
    module = PPOLightningModule(
        actor=options.pop("actor", tiny.folder(kind)),
        reward=options.pop("reward", tiny.count_w1),
        sampling=SamplingConfig(max_new_tokens=5),
        ppo=PPOConfig(epochs=1, minibatches=2),
        optim=OptimConfig(actor_lr=1e-2),
        **options,
    )
    saver = ModelCheckpoint(dirpath=tmp_path / "checkpoints", save_last=True)
    tiny.fit(tmp_path, module, callbacks=[saver], enable_checkpointing=True, limit_train_batches=1)
    return module, tmp_path / "checkpoints" / "last.ckpt"


@torch.no_grad()
def logits(module: PPOLightningModule) -> torch.Tensor:
    view = module.views.actor
    with view.store.using(view.adapter):
        return view.store.base(input_ids=IDS, use_cache=False).logits


@torch.no_grad()
def plain(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS, use_cache=False).logits


def start(kind: str) -> torch.Tensor:
    return plain(AutoModelForCausalLM.from_pretrained(tiny.folder(kind)))


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_a_fully_trained_policy_loads_in_transformers(tmp_path, kind):
    module, ckpt = trained(tmp_path, kind)
    assert export(module, tmp_path / "model") == tmp_path / "model"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(plain(loaded), logits(module), rtol=0, atol=0)
    assert (plain(loaded) - start(kind)).abs().max() > 1e-3  # it was trained
    export(load_policy(ckpt), tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "model/model.safetensors").read_bytes()


@pytest.mark.parametrize("layout", ["separate", "shared"])
@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_an_adapter_loads_in_peft_and_merged_in_transformers(tmp_path, monkeypatch, kind, layout):
    module, ckpt = trained(tmp_path, kind, lora=LORA, layout=layout)
    before = logits(module)
    export(module, tmp_path / "adapter")
    export(module, tmp_path / "merged", merge=True)
    torch.testing.assert_close(logits(module), before, rtol=0, atol=0)  # exporting changes nothing
    assert (before - start(kind)).abs().max() > 1e-3

    monkeypatch.chdir(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tiny.folder(kind))
    adapted = peft.PeftModel.from_pretrained(base, "adapter")
    assert list(adapted.peft_config) == ["default"]
    torch.testing.assert_close(plain(adapted), before, rtol=0, atol=1e-6)
    settings = json.loads(Path("adapter/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == tiny.folder(kind)
    assert sorted(p.suffix for p in Path("adapter").iterdir() if p.is_file())  # nothing is left in a folder of its own
    assert not [p for p in Path("adapter").iterdir() if p.is_dir()]

    loaded = AutoModelForCausalLM.from_pretrained("merged")
    assert type(loaded) is LlamaForCausalLM
    assert loaded.config.tie_word_embeddings == (kind == "llama-tied")
    torch.testing.assert_close(plain(loaded), before, rtol=0, atol=1e-4)

    policy = load_policy(ckpt)
    torch.testing.assert_close(logits(policy), before, rtol=0, atol=0)
    assert policy.views.critic is None
    assert policy.views.reference is None


@pytest.mark.parametrize("rewarded_by", ["function", "model"])  # the critic starts from a reward model
@pytest.mark.parametrize("lora", [None, LORA])
def test_a_critic_loads_as_a_sequence_classifier(tmp_path, lora, rewarded_by):
    reward = tiny.count_w1 if rewarded_by == "function" else tiny.folder("llama", 3, labels=1)
    live, ckpt = trained(tmp_path, lora=lora, reward=reward)
    module = load_module(ckpt)
    view = module.views.critic
    for ours, theirs in zip(view.store.parameters(), live.views.critic.store.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    export(module, tmp_path / "critic", role="critic", merge=lora is not None)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic").eval()
    with torch.no_grad(), view.store.using(view.adapter):
        expected = view.store.base(input_ids=IDS, use_cache=False).logits
        assert expected.abs().max() > 1e-3  # the head started at zero
        torch.testing.assert_close(loaded(input_ids=IDS, use_cache=False).logits, expected, rtol=0, atol=1e-4)


def test_tokenizer_chat_template_and_generation_config_come_along(tmp_path):
    source = tmp_path / "source"
    tiny.model("llama").save_pretrained(source)
    tiny.tokenizer().save_pretrained(source)
    GenerationConfig(eos_token_id=[2, 9], do_sample=True, temperature=0.3).save_pretrained(source)
    for name, options in {"full": {}, "adapter": {"lora": LORA}}.items():
        module, _ = trained(tmp_path / name, actor=str(source), **options)
        export(module, tmp_path / name / "out")
        config = GenerationConfig.from_pretrained(tmp_path / name / "out")
        assert config.eos_token_id == [2, 9]
        assert config.temperature == 0.3
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name / "out")
        assert tokenizer.chat_template == tiny.CHAT
        assert tokenizer("w3 w4").input_ids == tiny.tokenizer()("w3 w4").input_ids


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("module"))[0]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("shared"), lora=LORA, layout="shared")[0]


def test_what_cannot_be_exported_is_refused(tmp_path, module, shared):
    target = tmp_path / "out"
    with pytest.raises(ValueError, match=r"`role='acter'` must be one of .* Did you mean 'actor'"):
        export(module, target, role="acter")
    with pytest.raises(ValueError, match="`merge`: the actor was trained without adapters"):
        export(module, target, merge=True)
    with pytest.raises(ValueError, match=r"layout: shared.*Only a critic of `layout: separate`"):
        export(shared, target, role="critic")
    with pytest.raises(ValueError, match="its models are not loaded yet"):
        export(PPOLightningModule(actor=tiny.folder()), target)
    lonely = PPOLightningModule(
        actor=tiny.folder(), ppo=PPOConfig(advantage="grpo"), sampling=SamplingConfig(samples_per_prompt=2)
    )
    lonely.configure_model()
    with pytest.raises(ValueError, match=r"`ppo.advantage` uses no critic"):
        export(lonely, target, role="critic")
    assert not target.exists()


def test_merging_an_adapter_on_tied_embeddings_is_refused(tmp_path):
    lora = LoRAConfig(r=4, target_modules=["q_proj", "embed_tokens"])
    tied = PPOLightningModule(actor=tiny.folder("llama-tied"), lora=lora, ppo=PPOConfig(kl_coef=0))
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        tied.configure_model()
    with pytest.raises(ValueError, match="one of the two tied embeddings"):
        export(tied, tmp_path / "out", merge=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_left_alone(tmp_path, module):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match=r"file` is a file"):
        export(module, tmp_path / "file")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="is not empty"):
        export(module, mine)
    with pytest.raises(FileExistsError, match="is no earlier export"):
        export(module, mine, overwrite=True)
    assert (mine / "thesis.tex").read_text() == "years of work"
    with pytest.raises(FileExistsError, match="holds the model that the training started from"):
        export(module, tiny.folder("llama"), overwrite=True)


def test_an_export_replaces_an_earlier_one_whole_or_not_at_all(tmp_path, module, monkeypatch):
    target = tmp_path / "deep" / "out"
    export(module, target)
    (target / "old.bin").write_text("")
    export(module, target, overwrite=True)
    assert not (target / "old.bin").exists()
    before = {path.name: path.read_bytes() for path in target.iterdir()}

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(module.tokenizer), "save_pretrained", full_disk)
    with pytest.raises(OSError, match="No space left"):
        export(module, target, overwrite=True)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path.name for path in target.parent.iterdir()] == ["out"]  # no scratch folder is left


def test_checkpoints_that_cannot_be_exported_say_why(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_policy(tmp_path / "nope.ckpt")
    with pytest.raises(FileNotFoundError, match=r"`ckpt`: there is no last\*\.ckpt under"):
        load_policy(tmp_path)
    with pytest.raises(FileNotFoundError, match="is an exported model"):
        load_policy(tiny.folder())
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / ".metadata").write_text("")
    with pytest.raises(ValueError, match="cannot be read as a checkpoint"):
        load_policy(tmp_path / "sharded")
    (tmp_path / "text.ckpt").write_text("hello")
    with pytest.raises(ValueError, match="cannot be read as a checkpoint"):
        load_policy(tmp_path / "text.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="was not written by lit-ppo"):
        load_policy(tmp_path / "other.ckpt")

    live, ckpt = trained(tmp_path / "live", actor=tiny.model(), tokenizer=tiny.folder())
    export(live, tmp_path / "from-python")
    with pytest.raises(ValueError, match="trained from a model made in Python"):
        load_policy(ckpt)


def test_a_trunk_that_changed_is_noticed(tmp_path):
    source = tmp_path / "source"
    tiny.model("llama").save_pretrained(source)
    tiny.tokenizer().save_pretrained(source)
    _, ckpt = trained(tmp_path, actor=str(source), lora=LORA)
    tiny.model("llama", seed=1).save_pretrained(source)
    with pytest.raises(ValueError, match="is not the one that this checkpoint was trained on"):
        load_policy(ckpt)
