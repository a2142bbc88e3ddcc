"""A reward model that is a third adapter of the actor's trunk: the same scores as with a trunk of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import stages
import tiny
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lit_ppo import LoRAConfig, OptimConfig, PPOConfig, PPOLightningModule, RankingConfig, RoleConfig
from lit_ppo.callbacks import ExportHF, OffloadRoles, OOMGuard, QuantizeRewardModel
from lit_ppo.cli import main
from lit_ppo.export import export, load_module, load_policy
from lit_ppo.memory.ledger import holdings
from lit_ppo.plan.forecast import Forecast
from lit_ppo.plan.setup import read_setup
from lit_ppo.rewards import ModelReward, RewardError, TrunkReward, build_rewards
from lit_ppo.rewards.base import Samples

LORA = LoRAConfig(r=2)


def module(adapter: str, actor=None, name="rm", **options):
    options = {"lora": LORA, "layout": "shared", "optim": OptimConfig(actor_lr=1e-2)} | options
    reward = {"source": adapter, "trunk": "actor", "name": name} | options.pop("reward", {})
    return PPOLightningModule(actor or tiny.folder(), reward, sampling={"max_new_tokens": 6}, **options)


def samples():
    """Texts of different lengths."""
    rows = stages.pairs()
    n = len(rows)
    prompts, responses = [r["prompt"] for r in rows], [r["chosen"] for r in rows]
    return Samples(prompts, prompts, responses, [None] * n, [[]] * n, [True] * n, [{} for _ in rows])


def separate(adapter: str, **options) -> torch.Tensor:
    """The scores of a model with a trunk of its own."""
    reward = ModelReward(adapter, **options)
    reward.load("cpu")
    return reward.score(samples())


def test_from_training_to_ppo(tmp_path):
    ranker = stages.reward(lora=LoRAConfig(r=4), ranking=RankingConfig(normalize="mean_std"))
    stages.fit(tmp_path, ranker, max_epochs=3)
    adapter = str(export(ranker, tmp_path / "adapter"))
    merged = str(export(ranker, tmp_path / "merged", merge=True))
    ours = module(adapter)
    trainer = tiny.fit(tmp_path, ours)
    scores = ours.rewards.rewards[0].score(samples())
    torch.testing.assert_close(scores, separate(adapter), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores, separate(merged), rtol=1e-4, atol=1e-4)
    assert scores.std() > 0.1
    assert "reward/rm" in trainer.callback_metrics
    assert not any("reward0" in n or "score" in n for n in ours.state_dict())
    assert not any("reward0" in n for named in ours.trained.values() for n, _ in named)


@pytest.mark.parametrize(
    ("layout", "packing", "cut"),
    [
        ("shared", True, {}),
        ("shared", False, {"micro_batch_size": 3}),
        ("separate", True, {"micro_batch_tokens": 12}),
        ("separate", False, {"score_batch_size": 5}),
    ],
)
def test_layouts_and_cuts_make_no_difference(tmp_path, layout, packing, cut):
    adapter = tiny.adapter()
    ours = module(adapter, layout=layout, ppo=PPOConfig(packing=packing, epochs=1, **cut))
    tiny.fit(tmp_path, ours, limit_train_batches=1)
    assert ours.views.actor.store.packs == packing
    reward = ours.rewards.rewards[0]
    torch.testing.assert_close(reward.score(samples()), separate(adapter), rtol=1e-5, atol=1e-5)
    sizes = []
    ours.views.actor.store.register_forward_hook(lambda m, args, out: sizes.append(len(out[0])))
    reward.score(samples())
    assert max(sizes) <= cut.get("micro_batch_size", cut.get("score_batch_size", 16))
    assert (len(sizes) == 1) == (cut == {})


@pytest.mark.parametrize("mode", ["nf4", "int8"])
@pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast")
def test_a_quantized_trunk(tmp_path, mode):
    pytest.importorskip("bitsandbytes")
    adapter = tiny.adapter()
    ours = module(adapter, RoleConfig(source=tiny.folder(), quantize=mode))
    tiny.fit(tmp_path, ours)
    scores = ours.rewards.rewards[0].score(samples())
    torch.testing.assert_close(scores, separate(adapter, quantize=mode), rtol=1e-4, atol=1e-4)
    assert (scores - separate(adapter)).abs().max() > 1e-4


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_half_precision(tmp_path, precision):
    adapter = tiny.adapter()
    ours = module(adapter)
    tiny.fit(tmp_path, ours, precision=precision)
    scores, expected = ours.rewards.rewards[0].score(samples()), separate(adapter)
    tolerance = 0.05 * float(expected.std()) if precision == "bf16-true" else 1e-5  # scores do not follow autocast
    torch.testing.assert_close(scores, expected, rtol=0, atol=tolerance)


def test_other_adapters_draw_and_train_as_without_it(tmp_path):
    adapter = tiny.adapter(targets=("k_proj", "down_proj"))

    def train(reward):
        ours = module(adapter) if reward else PPOLightningModule(
            tiny.folder(), tiny.count_w1, lora=LORA, layout="shared", sampling={"max_new_tokens": 6}
        )  # fmt: skip
        ours._trainer = None
        ours.configure_model()
        return {n: p.detach().clone() for n, p in ours.named_parameters() if p.requires_grad}

    with_it, without = train(True), train(False)
    assert with_it.keys() == without.keys()
    assert all(torch.equal(with_it[n], without[n]) for n in with_it)


def test_several_rewards_on_one_trunk(tmp_path):
    one, two = tiny.adapter(), tiny.adapter(seed=1, targets=("q_proj", "down_proj"))
    rewards = [
        {"source": one, "trunk": "actor", "name": "one"},
        {"source": two, "trunk": "actor", "name": "two", "weight": 0.5},
        tiny.count_w1,
    ]
    ours = PPOLightningModule(tiny.folder(), rewards, lora=LORA, layout="shared", sampling={"max_new_tokens": 6})
    trainer = tiny.fit(tmp_path, ours, callbacks=[OOMGuard()])
    for reward, adapter in zip(ours.rewards.rewards, (one, two), strict=False):
        torch.testing.assert_close(reward.score(samples()), separate(adapter), rtol=1e-5, atol=1e-5)
    metrics = trainer.callback_metrics
    total = metrics["reward/one"] + 0.5 * metrics["reward/two"] + metrics["reward/count_w1"]
    assert float(metrics["objective/scores"]) == pytest.approx(float(total), rel=1e-4)
    assert set(ours.roles) == {"actor", "critic", "reference", "reward/one", "reward/two"}


def test_a_resumed_run_ends_with_the_same_bits_and_checks_the_adapter(tmp_path):
    adapter = tmp_path / "adapter"
    shutil.copytree(tiny.adapter(), adapter)

    def make():
        return module(str(adapter), optim=OptimConfig(actor_lr=1e-2, schedule="constant"))

    whole, second = tiny.interrupted(tmp_path, make)
    for (name, p), (_, q) in zip(whole.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    file = adapter / "adapter_model.safetensors"
    save_file({n: t * 1.5 for n, t in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="The frozen `reward` is not the one that this checkpoint was trained with"):
        tiny.fit(tmp_path / "third", make(), max_epochs=2, ckpt_path=tmp_path / "one.ckpt")


def test_the_policy_is_exported_without_it(tmp_path):
    adapter = tmp_path / "adapter"
    shutil.copytree(tiny.adapter(targets=("q_proj", "down_proj")), adapter)
    lora = LoRAConfig(r=2, target_modules=["q_proj", "up_proj"])
    ours = module(str(adapter), lora=lora)
    trainer = tiny.fit(tmp_path, ours, callbacks=[ExportHF(str(tmp_path / "by callback"), monitor=None)])
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    export(ours, tmp_path / "live")
    export(ours, tmp_path / "merged", merge=True)
    shutil.rmtree(adapter)  # an export needs nothing of it
    for load in (load_policy, load_module):
        export(load(tmp_path / "run.ckpt"), tmp_path / load.__name__)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad(), ours.actor.using("policy"):
        expected = ours.actor.base(input_ids=ids).logits
    for name in ("by callback", "live", "load_policy", "load_module"):
        weights = load_file(tmp_path / name / "adapter_model.safetensors")
        assert not [n for n in weights if "down_proj" in n or "score" in n]
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny.folder()), tmp_path / name).eval()
        torch.testing.assert_close(plain(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_no_second_trunk_is_held(tmp_path):
    ours, alone = module(tiny.adapter()), None
    tiny.fit(tmp_path, ours, limit_train_batches=1)
    alone = PPOLightningModule(tiny.folder(), tiny.count_w1, lora=LORA, layout="shared", sampling={"max_new_tokens": 6})
    tiny.fit(tmp_path, alone, limit_train_batches=1)
    (row,) = holdings(ours, torch.device("cpu"))
    (plain,) = holdings(alone, torch.device("cpu"))
    extra = sum(t.numel() * 4 for n, t in load_file(Path(tiny.adapter()) / "adapter_model.safetensors").items()
                if "lora_" in n)  # fmt: skip
    assert row.weights == plain.weights
    assert row.adapters - plain.adapters == row.frozen - plain.frozen == extra
    with pytest.raises(ValueError, match="OffloadRoles"):
        tiny.fit(tmp_path, module(tiny.adapter()), callbacks=[OffloadRoles(["reward"])])


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # Lightning's calls
def test_a_folder_is_given_to_all_doors(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in tiny.rows(8)))
    (tmp_path / "run.yaml").write_text(
        f"""
model:
  actor: {tiny.folder()}
  reward: {{source: {tiny.adapter()}, trunk: actor, name: rm}}
  lora: {{r: 2}}
  layout: shared
  sampling: {{max_new_tokens: 4}}
data: {{train: prompts.jsonl, batch_size: 8, max_prompt_length: 8}}
trainer: {{max_epochs: 1, accelerator: cpu, logger: false, enable_checkpointing: false, enable_progress_bar: false}}
"""
    )
    main(["plan", "--config", "run.yaml", "--gpus", "24GB"])
    assert "sequences of 8 + 4 tokens" in capsys.readouterr().out
    main(["fit", "--config", "run.yaml"])
    assert "view of actor" in capsys.readouterr().out


def test_the_forecast_counts_its_bytes():
    def weights(reward):
        config = {
            "model": {"actor": tiny.folder(), "reward": reward, "layout": "shared", "lora": {"r": 2}},
            "data": {"batch_size": 8, "max_prompt_length": 16},
        }
        found = Forecast(read_setup(config))
        assert found.peak > 0
        return found.stores["actor"].weights, found.stores["actor"].trained, set(found.stores)

    with_it = weights({"source": tiny.adapter(), "trunk": "actor"})
    without = weights("tests.tiny.count_w1")
    numbers = [
        t.numel() for n, t in load_file(Path(tiny.adapter()) / "adapter_model.safetensors").items() if "lora_" in n
    ]
    assert with_it[0] - without[0] == pytest.approx(sum(-(-4 * n // 512) * 512 for n in numbers), rel=0.01)
    assert with_it[1:] == without[1:]


# ------------------------------------------------------------------------------------------------------------ mistakes


def changed(tmp_path: Path, weights=None, settings=None) -> str:
    """A copy of the adapter with something else in it."""
    folder = tmp_path / "changed"
    shutil.copytree(tiny.adapter(), folder)
    if weights is not None:
        file = folder / "adapter_model.safetensors"
        save_file(weights(load_file(file)), file, {"format": "pt"})
    if settings is not None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return str(folder)


def halved(weights):
    """Weights that read 16 features."""
    return {n: x[:, :16].contiguous() if "lora_A" in n else x for n, x in weights.items()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: module(tiny.adapter(), lora=None, layout="separate"), r"`reward.trunk: actor` needs a trunk that"),
        (lambda t: module(tiny.adapter(), tiny.folder(seed=3)), r"was trained on .* and the actor is .*another trunk"),
        (lambda t: module(tiny.folder(labels=1)), r"needs an adapter, and .* is a whole model"),
        (
            lambda t: module(changed(t, lambda w: {n: x for n, x in w.items() if "score" not in n})),
            r"has no head \(`score.weight`\), so its scores would be random",
        ),
        (
            lambda t: module(changed(t, halved)),
            r"reads 16 features, and the actor has .. there",
        ),
        (
            lambda t: module(changed(t, lambda w: {n.replace("layers.1", "layers.7"): x for n, x in w.items()})),
            r"has weights for `model.layers.7.*`, which LlamaForCausalLM does not have",
        ),
        (
            lambda t: module(changed(t, lambda w: w | {"base_model.model.lm_head.weight": torch.zeros(64, 32)})),
            r"also brings lm_head.weight, which would replace the actor's own",
        ),
        (lambda t: module(changed(t, settings={"peft_type": "IA3"})), "is an adapter of the kind"),
        (lambda t: module("no/such/folder"), "no/such/folder"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_before_a_weight_is_loaded(tmp_path, make, message):
    ours = make(tmp_path)
    with pytest.raises((RewardError, ValueError), match=message):
        tiny.fit(tmp_path, ours)
    assert ours.views is None


def test_another_tokenizer_is_refused(tmp_path):
    folder = changed(tmp_path)
    file = Path(folder) / "tokenizer.json"
    file.write_text(file.read_text().replace('"w1": 5', '"w1": 6').replace('"w2": 6', '"w2": 5'))
    with pytest.raises(RewardError, match=r"its tokenizer writes 'w1' as 6, and the actor's as 5"):
        tiny.fit(tmp_path, module(folder))


def test_options_without_effect_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`reward.quantize='nf4'` has no effect on a reward on the actor's trunk"):
        build_rewards({"source": tiny.adapter(), "trunk": "actor", "quantize": "nf4"})
    with pytest.raises(ValueError, match=r"`reward.trunk='critic'` must be one of"):
        build_rewards({"source": tiny.adapter(), "trunk": "critic"})
    with pytest.raises(ValueError, match=r"`reward.trunk='actor'` has no effect on a ModelReward"):
        ModelReward(tiny.adapter(), trunk="actor")
    with pytest.raises(RewardError, match="only a PPOLightningModule loads it"):
        TrunkReward(tiny.adapter()).load("cpu")
    with pytest.raises(RewardError, match=r"a callback quantizes it, but its trunk is the actor's"):
        tiny.fit(tmp_path, module(tiny.adapter()), callbacks=[QuantizeRewardModel()])


def test_a_whole_reward_model_and_an_adapter_beside_each_other(tmp_path):
    whole = tiny.folder("qwen2", labels=1)
    rewards = [{"source": tiny.adapter(), "trunk": "actor", "name": "a"}, {"source": whole, "name": "b"}]
    ours = PPOLightningModule(tiny.folder(), rewards, lora=LORA, layout="separate", sampling={"max_new_tokens": 6})
    tiny.fit(tmp_path, ours, callbacks=[OffloadRoles()] if torch.cuda.is_available() else [])
    assert isinstance(ours.rewards.rewards[0], TrunkReward)
    assert AutoModelForSequenceClassification.from_pretrained(whole).config.num_labels == 1


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_on_cuda_with_the_graph_engine(tmp_path, quantize):
    adapter = tiny.adapter(targets=("q_proj", "down_proj"))
    lora = LoRAConfig(r=2, target_modules=["q_proj", "up_proj"])
    ours = module(adapter, RoleConfig(source=tiny.folder(), quantize=quantize, dtype="bfloat16"), lora=lora,
                  ppo=PPOConfig(rollout_engine="graph"))  # fmt: skip
    tiny.fit(tmp_path, ours, accelerator="gpu", precision="bf16-true")
    reward = ModelReward(adapter, quantize=quantize, dtype="bfloat16")
    reward.load("cuda")
    expected = reward.score(samples())
    torch.testing.assert_close(ours.rewards.rewards[0].score(samples()), expected, rtol=0, atol=0.1 * expected.std())
