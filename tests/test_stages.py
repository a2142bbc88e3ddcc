"""SFT and the reward model: losses by hand, any cut of a batch the same gradient, each output the next one's input."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import stages
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import PeftModel
from test_resume import same
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lit_ppo import (
    LoRAConfig,
    PPOConfig,
    PPOLightningModule,
    PreferenceDataModule,
    PromptDataModule,
    RankingConfig,
    RoleConfig,
    SamplingConfig,
    SFTConfig,
    SFTDataModule,
    StageOptimConfig,
)
from lit_ppo.callbacks import ExportHF, FreezeParameters, GradientCheckpointing, OOMGuard, QuantizeModules
from lit_ppo.cli import main
from lit_ppo.data.pairs import texts
from lit_ppo.export import export, load_module, load_policy
from lit_ppo.rewards.base import Samples
from lit_ppo.rewards.model import ModelReward

pytestmark = pytest.mark.filterwarnings(
    "ignore:The dirpath has changed",  # a resumed run has a folder of its own
    "ignore:Be aware that when using `ckpt_path`, callbacks",
)


def gradients(tmp_path: Path, module: Any, datamodule: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    """The clipped gradient of the first step."""
    found: dict[str, torch.Tensor] = {}
    hook = module.on_before_optimizer_step

    def keep(optimizer: Any) -> None:
        if not found:
            named = [pair for group in module.trained.values() for pair in group]
            found.update({name: p.grad.clone() for name, p in named if p.grad is not None})
        hook(optimizer)

    module.on_before_optimizer_step = keep
    stages.fit(tmp_path, module, datamodule, **options)
    return found


# ---------------------------------------------------------------------------------------------------------------- SFT


def test_the_loss_is_the_mean_over_answer_tokens_alone(tmp_path):
    rows = stages.answers(6)
    module = stages.sft()
    losses = []
    model = AutoModelForCausalLM.from_pretrained(tiny.folder()).eval()
    for row in rows:  # one at a time, by transformers alone
        prompt, answer = ([tiny.WORDS.index(w) for w in row[key].split()] for key in ("prompt", "answer"))
        ids = torch.tensor([prompt + answer + [2]])
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :]
        assert len(own) == len(answer) + 1
        losses += (-own[:, 0]).tolist()
    trainer = stages.fit(tmp_path, module, SFTDataModule(rows, batch_size=6, shuffle=False), max_epochs=1)
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.parametrize("kind", ["sft", "reward"])
@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 3, "packing": False},
        {"micro_batch_tokens": 20},
        {"packing": False},
    ],
    ids=str,
)
def test_the_gradient_does_not_depend_on_the_cut_or_on_padding(tmp_path, kind, options):
    make = getattr(stages, kind)
    option, config = ("sft", SFTConfig) if kind == "sft" else ("ranking", RankingConfig)
    source = tiny.folder() if kind == "sft" else tiny.folder(labels=1)
    whole = gradients(tmp_path, make(source))
    cut = gradients(tmp_path, make(source, **{option: config(**options)}))
    assert whole.keys() == cut.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()) + 1e-8)


def test_chats_are_trained_on_their_answers_and_the_ends_of_them():
    chat = [
        {"role": "user", "content": "w5 w6"},
        {"role": "assistant", "content": "w7"},
        {"role": "user", "content": "w8"},
        {"role": "assistant", "content": "w9 w10"},
    ]
    words = tiny.tokenizer()
    for answers, expected in (("all", ["w7", "<eos>", "w9", "w10", "<eos>"]), ("last", ["w9", "w10", "<eos>"])):
        data = SFTDataModule([{"messages": chat}], answers=answers, chat_template=stages.TEMPLATE)
        data._tokenizer = words
        (row,) = data.tokenized("train", data._sets["train"])
        assert words.convert_ids_to_tokens([i for i, own in zip(row.ids, row.trained, strict=True) if own]) == expected
        assert row.ids == words(stages_text(words, chat), add_special_tokens=False).input_ids


def stages_text(words: Any, chat: Any) -> str:
    return str(words.apply_chat_template(chat, chat_template=stages.TEMPLATE, tokenize=False))


def test_an_answer_without_a_prompt_is_learned_from_its_second_token_on():
    data = SFTDataModule(["w5 w6 w7"])
    data._tokenizer = tiny.tokenizer()
    (row,) = data.tokenized("train", data._sets["train"])
    assert row.ids == [9, 10, 11, 2]  # this tokenizer writes no BOS
    assert row.trained == [False, True, True, True]


def test_sft_learns(tmp_path):
    module = stages.sft()
    trainer = stages.fit(tmp_path, module, max_epochs=12)
    assert float(trainer.callback_metrics["train/loss"]) < 0.7
    val = float(trainer.callback_metrics["val/loss"])
    assert float(trainer.callback_metrics["val/perplexity"]) == pytest.approx(math.exp(val))


# ------------------------------------------------------------------------------------------------------- reward model


def test_bradley_terry_by_hand(tmp_path):
    source, rows = tiny.folder(labels=1), stages.pairs(6)
    model = AutoModelForSequenceClassification.from_pretrained(source).eval()

    def score(text: str) -> torch.Tensor:
        return model(input_ids=torch.tensor([[tiny.WORDS.index(w) for w in text.split()]])).logits[0, 0]

    gaps = torch.stack([score(r["prompt"] + r["chosen"]) - score(r["prompt"] + r["rejected"]) for r in rows])
    margins = torch.tensor([float(r["margin"]) for r in rows])
    expected = F.softplus(margins - gaps).mean()
    expected.backward()
    module = stages.reward(source, ranking=RankingConfig(micro_batch_size=4, max_grad_norm=None))
    data = PreferenceDataModule(rows, batch_size=6, margin_column="margin")
    found = gradients(tmp_path, module, data)
    torch.testing.assert_close(found["model.score.weight"], model.score.weight.grad, rtol=1e-4, atol=1e-7)
    metrics = module.trainer.callback_metrics
    assert float(metrics["train/loss"]) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float(metrics["train/accuracy"]) == pytest.approx(float((gaps > 0).float().mean()))
    assert float(metrics["train/score_gap"]) == pytest.approx(float(gaps.mean().detach()), rel=1e-4, abs=1e-6)


def test_a_new_head_guesses(tmp_path):
    module = stages.reward()
    trainer = tiny.trainer(tmp_path)
    (metrics,) = trainer.validate(module, stages.data(module), verbose=False)
    assert metrics["val/accuracy"] == 0.5
    assert metrics["val/loss"] == pytest.approx(math.log(2))


@pytest.mark.parametrize("normalize", ["none", "mean", "mean_std"])
@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)])
def test_scores_are_normalised_in_what_is_exported(tmp_path, normalize, lora):
    rows = stages.pairs()
    references = [{"prompt": row["prompt"], "answer": row["rejected"]} for row in rows]
    module = stages.reward(lora=lora, ranking=RankingConfig(normalize=normalize))
    data = stages.data(module, reference=references)
    stages.fit(tmp_path, module, data, max_epochs=4)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    folder = export(module, tmp_path / "reward", merge=lora is not None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert not hasattr(module.reward.base.config, "reward_bias")

    reward = ModelReward(str(folder))
    reward.load("cpu")
    ours = reward.score(samples([(row["prompt"], row["answer"]) for row in references])).double()
    if normalize != "none":
        assert float(ours.mean()) == pytest.approx(0, abs=1e-5)
    if normalize == "mean_std":
        assert float(ours.std(unbiased=False)) == pytest.approx(1, rel=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()  # as anybody has it
    inputs = tokenizer([row["prompt"] + row["answer"] for row in references], padding=True, return_tensors="pt")
    logits = plain(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).logits[:, 0]
    shift = ours - logits.detach()
    torch.testing.assert_close(shift, torch.full_like(shift, plain.config.reward_bias), rtol=1e-4, atol=1e-5)
    trained = module.scores(texts([inputs.input_ids[0][inputs.attention_mask[0].bool()].tolist()], torch.arange(1), 0))
    scale = module.score_std if normalize == "mean_std" else 1.0
    torch.testing.assert_close(trained, logits[:1] * scale, rtol=1e-4, atol=1e-5)


def samples(rows: list[tuple[str, str]]) -> Samples:
    """What a reward is given in PPO."""
    prompts, responses = [row[0] for row in rows], [row[1] for row in rows]
    n = len(rows)
    return Samples(prompts, prompts, responses, [None] * n, [[]] * n, [True] * n, [{} for _ in rows])


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=6), st.floats(0, 5))
def test_the_bradley_terry_gradient_is_the_probability_of_the_wrong_order(gaps, margin):
    gap = torch.tensor(gaps, dtype=torch.float64, requires_grad=True)
    (-F.logsigmoid(gap - margin)).sum().backward()
    torch.testing.assert_close(gap.grad, torch.sigmoid(gap.detach() - margin) - 1)


def test_chats_are_read_as_the_reward_reads_them():
    chat = [{"role": "user", "content": "w5 w6"}]
    row = {"prompt": chat, "chosen": " w7 ", "rejected": [*chat, {"role": "assistant", "content": "w8"}]}
    data = PreferenceDataModule([row])
    data._tokenizer = tiny.tokenizer()
    (pair,) = data.tokenized("train", data._sets["train"])
    reward = ModelReward(tiny.folder(labels=1))
    reward.load("cpu")
    both = samples([("", " w7 "), ("", "w8")])
    both.messages[:] = [chat, chat]
    assert reward._encode(both) == [pair.chosen.ids, pair.rejected.ids]


# --------------------------------------------------------------------------------------------------- what goes on next


def test_each_stage_is_the_next_ones_input_and_loads_in_plain_transformers(tmp_path):
    first = stages.sft()
    stages.fit(tmp_path, first, enable_checkpointing=False)
    policy = export(first, tmp_path / "policy")
    assert AutoModelForCausalLM.from_pretrained(policy).generate(torch.tensor([[5]]), max_new_tokens=2).shape[1] > 1

    second = stages.reward(str(policy))
    stages.fit(tmp_path, second)
    scorer = export(second, tmp_path / "scorer")
    assert AutoModelForSequenceClassification.from_pretrained(scorer).config.num_labels == 1

    third = PPOLightningModule(
        str(policy), reward=str(scorer), sampling=SamplingConfig(max_new_tokens=4), ppo=PPOConfig(epochs=1)
    )
    trainer = tiny.trainer(tmp_path)
    trainer.fit(third, PromptDataModule(tiny.rows(8), batch_size=8))
    assert math.isfinite(float(trainer.callback_metrics["objective/scores"]))
    loaded = AutoModelForSequenceClassification.from_pretrained(scorer)
    fresh = PPOLightningModule(str(policy), reward=str(scorer))
    fresh.configure_model()  # the critic starts from the reward model: head, trunk and bias
    assert torch.equal(fresh.critic.base.score.weight, loaded.score.weight)
    text = texts([[5, 6, 7]], torch.arange(1), 0)
    value = fresh.views.critic(text)[0][0, 0].detach()
    logit = loaded(input_ids=torch.tensor([[5, 6, 7]])).logits[0, 0].detach()
    assert float(value) == pytest.approx(float(logit) + loaded.config.reward_bias, rel=1e-4)


def test_a_checkpoint_can_be_sampled_from_and_exported(tmp_path):
    first = stages.sft(lora=LoRAConfig(r=4))
    trainer = stages.fit(tmp_path, first)
    trainer.save_checkpoint(tmp_path / "sft.ckpt")
    policy = load_policy(tmp_path / "sft.ckpt", {"max_new_tokens": 3})
    assert policy.eval_sampling.max_new_tokens == 3
    for name, tensor in first.state_dict().items():
        assert torch.equal(policy.state_dict()[name], tensor)
    export(policy, tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()

    second = stages.reward(ranking=RankingConfig(normalize="mean_std"))
    trainer = stages.fit(tmp_path, second)
    trainer.save_checkpoint(tmp_path / "reward.ckpt")
    loaded = load_module(tmp_path / "reward.ckpt")
    assert (loaded.score_mean, loaded.score_std) == (second.score_mean, second.score_std) != (0.0, 1.0)
    one, two = (export(module, tmp_path / name) for module, name in ((loaded, "one"), (second, "two")))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert (one / "config.json").read_text() == (two / "config.json").read_text()
    with pytest.raises(ValueError, match="is of a reward model, and this needs a policy"):
        load_policy(tmp_path / "reward.ckpt")
    with pytest.raises(ValueError, match="is of the stage `sft`, and RewardModule is the stage `reward`"):
        stages.fit(tmp_path, stages.reward(), ckpt=tmp_path / "sft.ckpt")


@pytest.mark.parametrize("by", ["export", "callback"])
def test_an_adapter_is_exported_with_its_head(tmp_path, by):
    module = stages.reward(lora=LoRAConfig(r=4), ranking=RankingConfig(normalize="mean_std"))
    callback = ExportHF(str(tmp_path / "adapter"), monitor=None)
    stages.fit(tmp_path, module, max_epochs=2, callbacks=[callback] if by == "callback" else [])
    if by == "export":
        export(module, tmp_path / "adapter")
    export(module, tmp_path / "merged", merge=True)
    assert not hasattr(module.reward.base.config, "reward_bias")

    texts = samples([(row["prompt"], row["chosen"]) for row in stages.pairs()])
    adapter, merged = (ModelReward(str(tmp_path / name)) for name in ("adapter", "merged"))
    for reward in (adapter, merged):
        reward.load("cpu")
    assert adapter.model.get_base_model().config.reward_bias == merged.model.config.reward_bias != 0
    torch.testing.assert_close(adapter.score(texts), merged.score(texts), rtol=1e-4, atol=1e-4)

    base = AutoModelForSequenceClassification.from_pretrained(tiny.folder(), num_labels=1)
    plain = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()  # as anybody has it
    ids = torch.arange(3, 12)[None]
    torch.testing.assert_close(plain(input_ids=ids).logits, merged.model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------------------------------------- callbacks


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_the_callbacks_work(tmp_path, kind):
    pytest.importorskip("bitsandbytes")
    role = "actor" if kind == "sft" else "reward"
    module = getattr(stages, kind)(lora=LoRAConfig(r=4))
    callbacks = [QuantizeModules(role), GradientCheckpointing(), OOMGuard()]
    trainer = stages.fit(tmp_path, module, callbacks=callbacks, max_epochs=2)
    assert math.isfinite(float(trainer.callback_metrics["val/loss"]))
    assert any("4bit" in type(p).__name__ for p in module.parameters())

    frozen = getattr(stages, kind)()
    found = gradients(tmp_path, frozen, callbacks=[FreezeParameters("*embed_tokens*")])
    assert found
    assert not any("embed_tokens" in name for name in found)


# -------------------------------------------------------------------------------------------------------------- errors

ROWS: dict[str, tuple[Any, str]] = {
    "no answer": (
        [{"prompt": "w5", "anwser": "w6"}],
        r"has no column `answer`.*Did you mean `anwser`\? Set `answer_column`",
    ),
    "no prompt": ([{"answer": "w6"}], "has no column `prompt`"),
    "empty": ([{"prompt": "w5", "answer": " "}], "`answer` is empty"),
    "number": ([{"prompt": "w5", "answer": 3}], "`answer` is neither a string nor a list"),
    "no assistant": ([{"messages": [{"role": "user", "content": "w5"}]}], "no message of the role 'assistant'"),
    "nothing": ([], "is empty"),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_without_an_answer_are_refused_by_their_place(case):
    rows, message = ROWS[case]
    with pytest.raises((ValueError, TypeError), match=message):
        SFTDataModule(rows)


PAIRS: dict[str, tuple[Any, str]] = {
    "no rejected": (
        [{"prompt": "w5", "chosen": "w6", "reject": "w7"}],
        r"no column `rejected`.*Did you mean `reject`\?",
    ),
    "same": (
        [{"prompt": "w5", "chosen": "w6", "rejected": "w6"}],
        r"`train\[0\]`: `chosen` and `rejected` are the same",
    ),
    "empty": ([{"prompt": "w5", "chosen": "", "rejected": "w6"}], "`chosen` is empty"),
    "mixed": (
        [{"prompt": "w5", "chosen": [{"role": "assistant", "content": "w6"}], "rejected": "w7"}],
        "the prompt is a text, and `chosen` a chat",
    ),
}


@pytest.mark.parametrize("case", PAIRS)
def test_pairs_that_prefer_nothing_are_refused_by_their_place(case):
    rows, message = PAIRS[case]
    with pytest.raises((ValueError, TypeError), match=message):
        PreferenceDataModule(rows)
    with pytest.raises(ValueError, match="must be a number of at least 0, got str 'x'"):
        PreferenceDataModule([{"prompt": "w5", "chosen": "w6", "rejected": "w7", "m": "x"}], margin_column="m")


def test_rows_that_are_too_long(tmp_path):
    with pytest.raises(ValueError, match=r"No row of `train` is left: all 16 .* Raise `max_length`"):
        stages.fit(tmp_path, stages.sft(), SFTDataModule(stages.answers(), max_length=1))
    with pytest.warns(UserWarning, match="rows of `train` are longer than `max_length=5` tokens"):
        stages.fit(tmp_path, stages.sft(), SFTDataModule(stages.answers(), max_length=5, batch_size=2, overlong="cut"))
    with pytest.raises(ValueError, match=r"exceeds the context of `actor`, 64 tokens. Set `max_length`"):
        stages.fit(tmp_path, stages.sft(), SFTDataModule([{"prompt": "w5", "answer": "w6 " * 70}], batch_size=1))
    with pytest.raises(ValueError, match="No pair of `train` is left"):
        stages.fit(tmp_path, stages.reward(), PreferenceDataModule(stages.pairs(), max_length=1))
    unknown = {"prompt": "w5", "chosen": " x", "rejected": " y"}
    with pytest.warns(UserWarning, match="are of two texts with the same tokens"):
        stages.fit(tmp_path, stages.reward(), PreferenceDataModule([unknown, *stages.pairs(3)], batch_size=2))


def test_what_a_stage_cannot_do_is_said_before_a_weight_is_loaded(tmp_path):
    def refused(module: Any, message: str, datamodule: Any = None, **options: Any) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            stages.fit(tmp_path, module, datamodule, **options)
        assert module.views is None

    refused(stages.sft("./nope"), r"`actor='./nope'` cannot be read")
    refused(stages.reward(tiny.folder(labels=2)), "classifier of 2 labels")
    refused(stages.sft(), "trains on the rows of SFTDataModule", stages.data(stages.reward()))
    refused(
        stages.reward(), "trains on the pairs of PreferenceDataModule", PromptDataModule(tiny.rows(8), batch_size=8)
    )
    warm = StageOptimConfig(warmup_iterations=2)
    refused(stages.sft(optim=warm), "as long as the run of 2 iterations")
    with pytest.raises(ValueError, match=r"`optim.lr=-1` must be >= 0"):
        stages.sft(optim={"lr": -1})
    with pytest.raises(ValueError, match=r"`ranking.normalize='z'`"):
        stages.reward(ranking={"normalize": "z"})
    with pytest.raises(ValueError, match=r"`sft.micro_batch_tokens=9` cuts batches by tokens"):
        stages.sft(sft={"micro_batch_tokens": 9, "micro_batch_size": 1})


# -------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("kind", "lora"), [("sft", None), ("reward", None), ("reward", LoRAConfig(r=4))])
def test_a_run_stopped_anywhere_and_resumed_ends_with_the_same_bits(tmp_path, kind, lora):
    def run(folder: Path, ckpt: Path | None = None) -> None:
        module = getattr(stages, kind)(
            lora=lora, optim=StageOptimConfig(lr=1e-2, schedule="cosine", warmup_iterations=1, weight_decay=0.1)
        )
        rows = stages.answers(24) if kind == "sft" else stages.pairs(24)
        save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)
        options = {"enable_checkpointing": True, "max_epochs": 2, "val_check_interval": 2, "callbacks": [save]}
        stages.fit(folder, module, stages.data(module, train=rows, drop_last=False), ckpt, **options)

    run(tmp_path / "whole")
    expected = torch.load(tmp_path / "whole" / "last.ckpt", weights_only=True)
    assert expected["global_step"] == 6
    for step in (1, 3, 4):
        torch.manual_seed(99)
        run(tmp_path / f"from-{step}", tmp_path / "whole" / f"step={step}.ckpt")
        found = torch.load(tmp_path / f"from-{step}" / "last.ckpt", weights_only=True)
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "lit_ppo", "global_step", "epoch"):
            same(found[part], expected[part], part)


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_the_module_of_a_checkpoint_is_built_from_it_alone(tmp_path, kind):
    module = getattr(stages, kind)(lora=LoRAConfig(r=4))
    stages.fit(tmp_path, module).save_checkpoint(tmp_path / "run.ckpt")
    again = type(module).load_from_checkpoint(tmp_path / "run.ckpt", weights_only=True)
    same(dict(again.state_dict()), dict(module.state_dict()))
    assert again.lora == module.lora
    assert again.optim.lr == module.optim.lr


# --------------------------------------------------------------------------------------------------- the command line


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # Lightning's calls
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
def test_the_whole_road_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, rows in (("answers", stages.answers()), ("pairs", stages.pairs())):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in tiny.rows(8)))
    shared = ["--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]

    def run(command: str, *more: str) -> str:
        capsys.readouterr()
        assert main([*command.split(), *more]) == 0
        return capsys.readouterr().out

    sft = ["--model.actor", tiny.folder(), "--data.train=answers.jsonl", "--data.val_fraction=4", "--data.batch_size=4"]
    run("sft fit", *sft, *shared, "--trainer.default_root_dir=sft", "--model.optim.lr=1e-2")
    assert "val/loss" in run("sft validate", *sft, *shared, "--trainer.default_root_dir=sft", "--ckpt_path=last")
    run("generate --ckpt sft --prompt w1 --max-new-tokens 3")
    run("export --ckpt sft --to policy")
    pairs = ["--model.reward=policy", "--data.train=pairs.jsonl", "--data.val_fraction=4", "--data.batch_size=4"]
    run("reward fit", *pairs, *shared, "--trainer.default_root_dir=rm", "--model.ranking.normalize=mean_std")
    assert "val/accuracy" in run(
        "reward validate", *pairs, *shared, "--trainer.default_root_dir=rm", "--ckpt_path=last"
    )
    run("export --ckpt rm --to scorer")
    ppo = ["--model.actor=policy", "--model.reward=scorer", "--data.train=prompts.jsonl", "--data.batch_size=8"]
    run("ppo fit", *ppo, *shared, "--trainer.default_root_dir=ppo", "--model.sampling.max_new_tokens=4")
    run("export --ckpt ppo --to final")
    assert Path("final/model.safetensors").is_file()

    for argv, message in (
        (
            ["sft", "predict"],
            "`predict` is not a command of lit-ppo sft. The commands are: fit, validate, test, plan, doctor.",
        ),
        (["reward", "fitt"], "Did you mean `fit`?"),
        (["reward", "fit", "--ckpt_path=sft/nope.ckpt", *pairs], "does not exist"),
        (["reward", "fit", *pairs, "--data.chosen_column=chosn"], "has no column `chosn`"),
        (["generate", "--ckpt=rm", "--prompt=w1"], "is of a reward model"),
    ):
        assert main(argv) in (1, 2)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["sft", "fit", "--model.optim.lrr=1"])
    assert "Did you mean `model.optim.lr`?\n`lit-ppo sft fit --help` lists" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_every_logged_metric_is_in_the_glossary(tmp_path, kind):
    known = set(re.findall(r"`([\w/<>]+)`", (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()))
    module = getattr(stages, kind)()
    data = stages.data(module, test=stages.answers(3) if kind == "sft" else stages.pairs(3))
    trainer = stages.fit(tmp_path, module, data)
    logged = set(trainer.callback_metrics)
    trainer.test(module, data, verbose=False)
    assert logged | set(trainer.callback_metrics) <= known | {"loss"}  # which is for the progress bar alone


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_a_trunk_in_4_bits_by_its_role(tmp_path, kind):
    pytest.importorskip("bitsandbytes")
    module = getattr(stages, kind)(RoleConfig(source=tiny.folder(), quantize="nf4"), lora=LoRAConfig(r=4))
    trainer = stages.fit(tmp_path, module, max_epochs=2)
    assert math.isfinite(float(trainer.callback_metrics["val/loss"]))
    assert any("4bit" in type(p).__name__ for p in module.parameters())
