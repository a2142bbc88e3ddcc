"""Bad input: one clear error that names the value, the cause and the fix, before any weight is loaded if possible."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import PreTrainedModel

from lit_ppo import (
    LoRAConfig,
    OptimConfig,
    PPOConfig,
    PPOLightningModule,
    PromptDataModule,
    RewardConfig,
    RoleConfig,
    SamplingConfig,
)
from lit_ppo.config import from_dict
from lit_ppo.rewards import FunctionReward, RewardError


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `from_pretrained` was asked for: every model that a run loads."""
    seen: list[Any] = []
    real = PreTrainedModel.from_pretrained.__func__

    def load(cls: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(source)
        return real(cls, source, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(load))
    return seen


pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


def fit(tmp_path: Path, data: Any = None, trainer: dict[str, Any] | None = None, **options: Any) -> None:
    """Train as a user would."""
    defaults = {
        "actor": tiny.folder(),
        "reward": tiny.count_w1,
        "sampling": SamplingConfig(max_new_tokens=3, temperature=1.0),
        "ppo": PPOConfig(epochs=1),
    }
    run = PPOLightningModule(**(defaults | options))
    data = PromptDataModule(tiny.rows(8), batch_size=8) if data is None else data
    tiny.trainer(tmp_path, **(trainer or {})).fit(run, data)


def test_the_defaults_of_these_tests_train(tmp_path: Path, loads: list[Any]) -> None:
    fit(tmp_path, actor=Path(tiny.folder()))
    assert len(loads) == 3


# -------------------------------------------------------------------------------------------- options, by themselves


BAD_VALUES = [
    (SamplingConfig, {"max_new_tokens": 0}, r"`sampling.max_new_tokens=0` must be >= 1"),
    (SamplingConfig, {"max_new_tokens": 2.5}, r"`sampling.max_new_tokens=2.5` must be a whole number, and is a float"),
    (SamplingConfig, {"temperature": -1}, r"`sampling.temperature=-1` must be >= 0"),
    (SamplingConfig, {"temperature": float("nan")}, r"`sampling.temperature=nan` must be >= 0"),
    (SamplingConfig, {"temperature": "hot"}, r"`sampling.temperature='hot'` must be a number, and is a str"),
    (SamplingConfig, {"top_k": -1}, r"`sampling.top_k=-1` must be >= 0"),
    (SamplingConfig, {"top_p": 0}, r"`sampling.top_p=0` must be > 0"),
    (SamplingConfig, {"top_p": 1.5}, r"`sampling.top_p=1.5` must be <= 1"),
    (SamplingConfig, {"min_p": -0.1}, r"`sampling.min_p=-0.1` must be >= 0"),
    (SamplingConfig, {"min_p": 2}, r"`sampling.min_p=2` must be <= 1"),
    (SamplingConfig, {"samples_per_prompt": 0}, r"`sampling.samples_per_prompt=0` must be >= 1"),
    (RoleConfig, {"dtype": "float23"}, r"`role.dtype='float23'` must be one of .*Did you mean 'float32'"),
    (RoleConfig, {"trust_remote_code": "no"}, r"`role.trust_remote_code='no'` must be true or false, and is a str"),
    (LoRAConfig, {"r": 0}, r"`lora.r=0` must be >= 1"),
    (LoRAConfig, {"r": True}, r"`lora.r=True` must be a whole number, and is a bool"),
    (LoRAConfig, {"alpha": 0}, r"`lora.alpha=0` must be > 0"),
    (RewardConfig, {"on_error": "ignore"}, r"`reward.on_error='ignore'` must be one of 'raise', 'skip'"),
    (RewardConfig, {"dtype": "int8"}, r"`reward.dtype='int8'` must be one of"),
    (RewardConfig, {"batch_size": 0}, r"`reward.batch_size=0` must be >= 1"),
    (RewardConfig, {"max_length": 0}, r"`reward.max_length=0` must be >= 1"),
    (RewardConfig, {"timeout": 0}, r"`reward.timeout=0` must be > 0"),
    (RewardConfig, {"weight": float("inf")}, r"`reward.weight=inf` must be a finite number"),
    (RewardConfig, {"weight": float("nan")}, r"`reward.weight=nan` must be a finite number"),
    (PPOConfig, {"epochs": 0}, r"`ppo.epochs=0` must be >= 1"),
    (PPOConfig, {"epochs": "4"}, r"`ppo.epochs='4'` must be a whole number, and is a str"),
    (PPOConfig, {"minibatches": 0}, r"`ppo.minibatches=0` must be >= 1"),
    (PPOConfig, {"micro_batch_tokens": 0}, r"`ppo.micro_batch_tokens=0` must be >= 1"),
    (
        PPOConfig,
        {"micro_batch_tokens": 64, "micro_batch_size": 2},
        r"`ppo.micro_batch_tokens=64` cuts batches by tokens, and `ppo.micro_batch_size=2` by sequences. Leave one",
    ),
    (PPOConfig, {"micro_batch_tokens": 64, "score_batch_size": 2}, r"`ppo.score_batch_size=2` by sequences"),
    (PPOConfig, {"packing": 1}, r"`ppo.packing=1` must be true or false"),
    (PPOConfig, {"micro_batch_size": 0}, r"`ppo.micro_batch_size=0` must be >= 1"),
    (PPOConfig, {"score_batch_size": -2}, r"`ppo.score_batch_size=-2` must be >= 1"),
    (PPOConfig, {"rollout_batch_size": 0}, r"`ppo.rollout_batch_size=0` must be >= 1"),
    (PPOConfig, {"rollout_prefill_tokens": 0}, r"`ppo.rollout_prefill_tokens=0` must be >= 1"),
    (
        PPOConfig,
        {"rollout_prefill_tokens": 64, "rollout_engine": "hf"},
        r"`ppo.rollout_prefill_tokens=64` is of the graph engine.*Leave it out",
    ),
    (PPOConfig, {"advantage": "gea"}, r"`ppo.advantage='gea'` must be one of .*Did you mean 'gae'"),
    (PPOConfig, {"loss_aggregation": "mean"}, r"`ppo.loss_aggregation='mean'` must be one of"),
    (PPOConfig, {"kl_estimator": "k4"}, r"`ppo.kl_estimator='k4'` must be one of"),
    (PPOConfig, {"kl_loss_estimator": "k9"}, r"`ppo.kl_loss_estimator='k9'` must be one of"),
    (PPOConfig, {"kl_loss_estimator": "k1"}, r"`ppo.kl_loss_estimator='k1'` cannot be a loss.*Use 'k2'"),
    (PPOConfig, {"gamma": 1.1}, r"`ppo.gamma=1.1` must be <= 1"),
    (PPOConfig, {"gamma": -0.1}, r"`ppo.gamma=-0.1` must be >= 0"),
    (PPOConfig, {"lam": 2}, r"`ppo.lam=2` must be <= 1"),
    (PPOConfig, {"clip": 0}, r"`ppo.clip=0` must be > 0"),
    (PPOConfig, {"clip": 1.2}, r"`ppo.clip=1.2` must be <= 1. A ratio is never below 0"),
    (PPOConfig, {"clip_high": 0}, r"`ppo.clip_high=0` must be > 0. Leave it out"),
    (PPOConfig, {"value_clip": -1}, r"`ppo.value_clip=-1` must be > 0. Leave it out"),
    (PPOConfig, {"score_clip": 0}, r"`ppo.score_clip=0` must be > 0. Leave it out"),
    (PPOConfig, {"kl_target": 0}, r"`ppo.kl_target=0` must be > 0. Leave it out"),
    (PPOConfig, {"target_kl": -1}, r"`ppo.target_kl=-1` must be > 0. Leave it out"),
    (PPOConfig, {"max_grad_norm": 0}, r"`ppo.max_grad_norm=0` must be > 0. Leave it out"),
    (PPOConfig, {"dual_clip": 1}, r"`ppo.dual_clip=1` must be > 1. Leave it out"),
    (PPOConfig, {"vf_coef": -0.1}, r"`ppo.vf_coef=-0.1` must be >= 0"),
    (PPOConfig, {"entropy_coef": -0.1}, r"`ppo.entropy_coef=-0.1` must be >= 0"),
    (PPOConfig, {"kl_coef": -0.05}, r"`ppo.kl_coef=-0.05` must be >= 0"),
    (PPOConfig, {"kl_loss_coef": -1}, r"`ppo.kl_loss_coef=-1` must be >= 0"),
    (PPOConfig, {"missing_eos_penalty": -1}, r"`ppo.missing_eos_penalty=-1` must be >= 0"),
    (PPOConfig, {"kl_horizon": 0}, r"`ppo.kl_horizon=0` must be >= 1"),
    (PPOConfig, {"critic_warmup_iterations": -1}, r"`ppo.critic_warmup_iterations=-1` must be >= 0"),
    (PPOConfig, {"kl_target": 6, "kl_coef": 0}, r"`ppo.kl_target` adapts `ppo.kl_coef`, which is 0.*above 0"),
    (PPOConfig, {"advantage": "grpo", "bootstrap_truncated": True}, r"`ppo.bootstrap_truncated` needs a critic"),
    (PPOConfig, {"advantage": "rloo", "critic_warmup_iterations": 1}, r"`ppo.critic_warmup_iterations` needs a critic"),
    (OptimConfig, {"actor_lr": -1e-6}, r"`optim.actor_lr=-1e-06` must be >= 0"),
    (OptimConfig, {"actor_lr": "3e-6"}, r"`optim.actor_lr='3e-6'` must be a number, and is a str"),
    (OptimConfig, {"critic_lr": -1}, r"`optim.critic_lr=-1` must be >= 0"),
    (OptimConfig, {"weight_decay": -1}, r"`optim.weight_decay=-1` must be >= 0"),
    (OptimConfig, {"eps": 0}, r"`optim.eps=0` must be > 0"),
    (OptimConfig, {"betas": (-0.1, 0.9)}, r"`optim.betas=-0.1` must be >= 0"),
    (OptimConfig, {"betas": (0.9,)}, r"`optim.betas=\(0.9,\)` must be two numbers"),
    (OptimConfig, {"betas": "abc"}, r"`optim.betas='abc'` must be two numbers"),
    (OptimConfig, {"betas": ("a", 0.9)}, r"`optim.betas=\('a', 0.9\)` must be two numbers"),
    (OptimConfig, {"actor_lr": float("inf")}, r"`optim.actor_lr=inf` must be a finite number"),
    (SamplingConfig, {"temperature": float("inf")}, r"`sampling.temperature=inf` must be a finite number"),
    (RoleConfig, {"source": ".", "revision": "v1"}, r"`role.revision='v1'` has no effect on '.', which is a folder"),
    (RewardConfig, {"source": ".", "revision": "v1"}, r"`reward.revision='v1'` has no effect on '.', which is a"),
    (OptimConfig, {"betas": (0.9, 1)}, r"`optim.betas=\(0.9, 1\)` must be below 1"),
    (OptimConfig, {"schedule": "liner"}, r"`optim.schedule='liner'` must be one of .*Did you mean 'linear'"),
    (OptimConfig, {"warmup_iterations": -1}, r"`optim.warmup_iterations=-1` must be >= 0"),
    (OptimConfig, {"total_iterations": 0}, r"`optim.total_iterations=0` must be >= 1"),
]


@pytest.mark.parametrize(("cls", "values", "match"), BAD_VALUES, ids=lambda x: None if isinstance(x, str) else str(x))
def test_a_value_out_of_range(cls: type, values: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        cls(**values)
    with pytest.raises((ValueError, TypeError), match=match):
        from_dict(cls, values)


@pytest.mark.parametrize("option", ["sampling", "eval_sampling", "ppo", "optim", "lora"])
def test_a_misspelt_option(option: str) -> None:
    wrong = {"sampling": "temprature", "eval_sampling": "top-p", "ppo": "kl_coeff", "optim": "lr", "lora": "rank"}[
        option
    ]
    match = {
        "temprature": r"`temprature` is not an option of SamplingConfig. Did you mean `temperature`",
        "top-p": r"`top-p` is not an option of SamplingConfig. Did you mean `top_p`",
        "kl_coeff": r"`kl_coeff` is not an option of PPOConfig. Did you mean `kl_coef`",
        "lr": r"`lr` is not an option of OptimConfig",
        "rank": r"`rank` is not an option of LoRAConfig",
    }[wrong]
    with pytest.raises(ValueError, match=match):
        PPOLightningModule(tiny.folder(), tiny.count_w1, **{option: {wrong: 1}})
    with pytest.raises(TypeError, match=r"Expected \w+Config or a dict of its fields, got int: 3"):
        PPOLightningModule(tiny.folder(), tiny.count_w1, **{option: 3})


# ---------------------------------------------------------------------------------- together, before a weight is loaded


def vocabulary(tmp_path: Path, size: int) -> str:
    LlamaForCausalLM(LlamaConfig(**(tiny.SHAPE | {"vocab_size": size}))).save_pretrained(tmp_path / "vocabulary")
    tiny.tokenizer().save_pretrained(tmp_path / "vocabulary")
    return str(tmp_path / "vocabulary")


def copied(tmp_path: Path, name: str, content: str | None = None, **extra: str) -> str:
    """A copy of the tiny model with a file replaced, or with those that match removed."""
    folder = tmp_path / "copy"
    shutil.copytree(tiny.folder(), folder)
    for file in folder.glob(name):
        file.unlink()
    if content is not None:
        (folder / name).write_text(content)
    return str(folder)


def adapter(tmp_path: Path) -> str:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    return str(tmp_path / "adapter")


def folder(tmp_path: Path) -> str:
    (tmp_path / "folder").mkdir()
    return str(tmp_path / "folder")


F = tiny.folder
EARLY: list[tuple[str, Callable[[Path], dict[str, Any]], str]] = [
    ("unknown path", lambda _: {"actor": "/no/such"}, r"`actor='/no/such'` cannot be read: .*no such folder.*spelling"),
    ("unknown id", lambda _: {"actor": "no/such"}, r"`actor='no/such'` cannot be read.*Hugging Face id.*offline"),
    ("unknown critic", lambda _: {"critic": "/no"}, r"`critic='/no'` cannot be read.*Check the spelling"),
    ("unknown reference", lambda _: {"reference": "/no"}, r"`reference='/no'` cannot be read.*Check the spelling"),
    ("unknown tokenizer", lambda _: {"tokenizer": "/no"}, r"No tokenizer could be loaded from '/no'.*pass `tokenizer="),
    ("unknown reward", lambda _: {"reward": "/no/such"}, r"`reward.source='/no/such'` does not exist.*A reward's"),
    (
        "misspelt reward",
        lambda _: {"reward": "tiny.count_w"},
        r"`tiny` has no attribute `count_w`. Did you mean `count_w1`",
    ),
    ("a bare reward", lambda _: {"reward": "brevity"}, r"`reward.source='brevity'` is no folder.*`module.brevity`"),
    ("unknown reward id", lambda _: {"reward": "someone/none"}, r"`reward.source='someone/none'`: no model and tok"),
    (
        "a column that is not there",
        lambda _: {
            "reward": lambda responses, answer: [0.0] * 8,
            "data": PromptDataModule([{"prompt": "w1", "b": 1}], batch_size=1),
        },
        r"its argument `answer` is not a column of the prompt set, which has `b`",
    ),
    (
        "a column that is not in val",
        lambda _: {
            "reward": lambda responses, answer: [0.0] * 8,
            "data": PromptDataModule([{"prompt": "w1", "answer": 1}], val=["w1"], batch_size=1),
        },
        r"its argument `answer` is not a column of the prompt set, which has none but the prompt",
    ),
    (
        "a reserved column",
        lambda _: {"data": PromptDataModule([{"prompt": "w1", "responses": "x"}], batch_size=1)},
        r"`responses` is both what every reward is offered and a column of the prompt set",
    ),
    (
        "a critic for nothing",
        lambda _: {"critic": F(), "ppo": {"advantage": "reinforce_pp"}},
        r"`critic` has no effect: `ppo.advantage` has no critic. Leave it out",
    ),
    (
        "a reference for nothing",
        lambda _: {"reference": F(), "ppo": {"kl_coef": 0.0}},
        r"`reference` has no effect: no KL is measured .*`log_kl` are off",
    ),
    (
        "numbers for nothing",
        lambda _: {"ppo": {"advantage": "reinforce_pp", "lam": 0.9}, "optim": {"critic_lr": 1e-3}},
        r"`ppo.lam`, `optim.critic_lr`: no effect, as `ppo.advantage='reinforce_pp'` has no critic",
    ),
    (
        "a discount for nothing",
        lambda _: {
            "ppo": {"advantage": "rloo", "gamma": 0.9},
            "sampling": {"max_new_tokens": 4, "samples_per_prompt": 2},
        },
        r"`ppo.gamma`: no effect, as `ppo.advantage='rloo'` scores whole responses",
    ),
    (
        "whitening that cannot be off",
        lambda _: {"ppo": {"advantage": "reinforce_pp", "whiten_advantages": False}},
        r"`ppo.whiten_advantages`: no effect, as `ppo.advantage='reinforce_pp'` always whitens",
    ),
    (
        "an actor that is a file",
        lambda _: {"actor": __file__},
        r"`actor='.*test_errors.py'` is a file. Give the folder",
    ),
    ("a huge seed", lambda _: {"seed": 2**70}, r"`seed=1180591620717411303424` does not fit into 63 bits"),
    ("no stop token", lambda _: {"sampling": {"stop_tokens": []}}, r"`sampling.stop_tokens` is empty: every response"),
    ("a reward of 3", lambda _: {"reward": 3}, r"A reward is a folder, .*got int: 3"),
    ("no reward", lambda _: {"reward": None}, r"`reward` is missing: `fit` needs at least one"),
    ("no actor", lambda _: {"actor": None}, r"`actor` is missing: give a folder"),
    ("options alone", lambda _: {"actor": RoleConfig(dtype="float32")}, r"`actor` is missing: give a folder"),
    ("an actor of 3", lambda _: {"actor": 3}, r"`actor` must be a folder, .*got 3"),
    (
        "not transformers",
        lambda _: {"actor": torch.nn.Linear(2, 2)},
        r"`actor` is a Linear without a transformers `config`",
    ),
    ("no tokenizer", lambda _: {"actor": tiny.model()}, r"`actor` is a model without a path.*pass `tokenizer="),
    (
        "no tokenizer files",
        lambda p: {"actor": copied(p, "tokenizer*")},
        r"No tokenizer could be loaded.*Save one beside",
    ),
    (
        "empty folder",
        lambda p: {"actor": folder(p)},
        r"without a config.json \(it holds nothing\).*`save_pretrained` wrote",
    ),
    ("an adapter", lambda p: {"actor": adapter(p)}, r"It is a PEFT adapter: merge it"),
    ("broken config", lambda p: {"actor": copied(p, "config.json", "{")}, r"has a config.json that cannot be read"),
    (
        "critic vocabulary",
        lambda p: {"critic": vocabulary(p, 80)},
        r"`critic` has a vocabulary of 80 .*the actor one of 64",
    ),
    ("reference vocabulary", lambda p: {"reference": vocabulary(p, 80)}, r"`reference` has a vocabulary of 80 "),
    ("actor vocabulary", lambda p: {"actor": vocabulary(p, 60)}, r"`tokenizer` knows 64 tokens and the actor 60"),
    ("layout", lambda _: {"layout": "sharde"}, r"`layout='sharde'` must be one of .*Did you mean 'shared'"),
    ("shared without lora", lambda _: {"layout": "shared"}, r"`layout=\"shared\"` .*give `lora` too"),
    (
        "shared with a critic",
        lambda _: {"layout": "shared", "lora": LoRAConfig(), "critic": F()},
        r"`critic` has a source of its own.*Leave `critic` out",
    ),
    (
        "critic on a device",
        lambda _: {"critic": RoleConfig(source=F(), device="cpu")},
        r"`critic.device='cpu'`: only frozen roles",
    ),
    (
        "critic of options, actor of Python",
        lambda _: {"actor": tiny.model(), "tokenizer": tiny.tokenizer(), "critic": RoleConfig(dtype="float32")},
        r"`critic` sets options but no `source`",
    ),
    ("no such device", lambda _: {"reference": RoleConfig(device="gpu")}, r"`reference.device='gpu'` is no device"),
    (
        "no such GPU",
        lambda _: {"reference": {"device": "cuda:99"}},
        r"`reference.device='cuda:99'` does not exist: this machine has \d+ CUDA devices",
    ),
    (
        "no such GPU for a reward",
        lambda _: {"reward": RewardConfig(source=tiny.folder(labels=1), device="cuda:99")},
        r"`reward.device='cuda:99'` does not exist",
    ),
    ("greedy training", lambda _: {"sampling": {"temperature": 0}}, r"`sampling.temperature=0` is greedy.*above 0"),
    ("rloo of one", lambda _: {"ppo": {"advantage": "rloo"}}, r"`sampling.samples_per_prompt=1` must be at least 2"),
    (
        "unknown stop token",
        lambda _: {"sampling": {"stop_tokens": ["<end>"]}},
        r"`sampling.stop_tokens` names '<end>', which is not one of the model's 64",
    ),
    (
        "id out of range",
        lambda _: {"sampling": {"suppress_tokens": [64]}},
        r"`sampling.suppress_tokens` names 64, which is not one of",
    ),
    (
        "stop token suppressed",
        lambda _: {"sampling": {"suppress_tokens": ["<eos>"]}},
        r"`sampling.suppress_tokens` holds \[2\], which are stop tokens",
    ),
    (
        "response longer than the context",
        lambda _: {"sampling": {"max_new_tokens": 62}},
        r"A prompt of 5 tokens and `sampling.max_new_tokens=62` exceed .* 64 tokens: set .* 2 or lower .* 59",
    ),
    (
        "evaluated response longer than the context",
        lambda _: {"eval_sampling": {"max_new_tokens": 64}},
        r"A prompt of 5 tokens and `eval_sampling.max_new_tokens=64` exceed .*64 tokens: lower .* to at most 59\.$",
    ),
    (
        "prompt longer than the context",
        lambda _: {"data": PromptDataModule([" ".join(["w5"] * 70)], batch_size=1)},
        r"A prompt of 70 tokens .*exceed the actor's context of 64 tokens: set `max_prompt_length`.* at most 61\.$",
    ),
    (
        "held-out prompt longer than the context",
        lambda _: {"data": PromptDataModule(["w5"], val=[" ".join(["w5"] * 70)], batch_size=1)},
        r"A prompt of 70 tokens .*exceed the actor's context",
    ),
    (
        "minibatches",
        lambda _: {"ppo": {"minibatches": 3}},
        r"`ppo.minibatches=3` does not divide the 8 episodes .*Use one of \[1, 2, 4\]",
    ),
    (
        "minibatches of the last batch",
        lambda _: {"ppo": {"minibatches": 2}, "data": PromptDataModule(tiny.rows(9), batch_size=8, drop_last=False)},
        r"`ppo.minibatches=2` does not divide the 1 episodes",
    ),
    (
        "no end",
        lambda _: {"trainer": {"max_epochs": -1}},
        r"`optim.schedule=\"linear\"` ends at the last iteration, but this fit has no end",
    ),
    (
        "warm-up",
        lambda _: {"optim": {"warmup_iterations": 1}},
        r"`optim.warmup_iterations=1` is as long as the run of 1 it",
    ),
    (
        "warm-up of a schedule",
        lambda _: {"optim": {"warmup_iterations": 9, "total_iterations": 9}},
        r"`optim.warmup_iterations=9` is as long as the run of 9 iterations",
    ),
    ("clipping by the trainer", lambda _: {"trainer": {"gradient_clip_val": 1.0}}, r"gradient_clip_val=1.0"),
    (
        "accumulation by the trainer",
        lambda _: {"trainer": {"accumulate_grad_batches": 2}},
        r"accumulate_grad_batches=2",
    ),
]


@pytest.mark.parametrize(("options", "match"), [row[1:] for row in EARLY], ids=[row[0] for row in EARLY])
def test_it_is_said_before_any_weight_is_loaded(
    tmp_path: Path, loads: list[Any], options: Callable[[Path], dict[str, Any]], match: str
) -> None:
    with pytest.raises(Exception, match=f"(?s){match}") as caught:
        fit(tmp_path, **options(tmp_path))
    assert not isinstance(caught.value, (AttributeError, KeyError, AssertionError))
    assert loads == []


# ------------------------------------------------------------------------------------------------------ prompt files


def test_a_prompt_file_that_cannot_be_used(tmp_path: Path, loads: list[Any]) -> None:
    def refused(error: type[Exception], match: str, path: Path, **options: Any) -> None:
        with pytest.raises(error, match=match):
            fit(tmp_path, PromptDataModule(str(path), **options))
        assert loads == []

    file = tmp_path / "prompts.jsonl"
    refused(FileNotFoundError, r"`train='.*prompts.jsonl'` is not a file.*Give the path", file)
    file.write_text("")
    refused(ValueError, r"`train='.*prompts.jsonl'` has no rows: it is empty", file)
    file.write_text('{"prompt": "w1"}\n{"prompt": "w2"}\n{"prompt": "w3\n')
    refused(ValueError, r"prompts.jsonl, line 3 is not JSON", file)
    file.write_text('{"prompt": "w1"}\n{"text": "w2"}\n')
    refused(ValueError, r"prompts.jsonl, line 2 has no column `prompt`; it has 'text'. Set `prompt_column`", file)
    file.write_bytes(json.dumps({"prompt": "w1 café"}, ensure_ascii=False).encode("latin-1"))
    refused(ValueError, r"prompts.jsonl, line 1: byte 0xe9 .*cannot be read with `encoding='utf-8'`", file)


# ----------------------------------------------------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("reward", "match"),
    [
        (
            lambda responses: 1 / 0,
            r"it raised ZeroDivisionError: division by zero on a batch of 8.*sample 0 \(prompt ends",
        ),
        (lambda responses: [1.0], r"it returned 1 scores for 8 samples. The first without a score is sample 1"),
        (lambda responses: [1.0] * 9, r"it returned 9 scores for 8 samples"),
        (
            lambda responses: [float("nan")] * 8,
            r"it scored sample 0 .* nan. Scores must be finite; `reward.on_error: skip`",
        ),
        (lambda responses: [1.0] * 7 + [float("-inf")], r"it scored sample 7 .* -inf. Scores must be finite"),
        (lambda responses: ["good"] * 8, r"it returned 'good', which is not a number, for sample 0"),
        (lambda responses: "goodgood", r"it returned a str, not a list"),
        (lambda responses: None, r"it returned a NoneType, not a list"),
        (
            lambda responses: torch.ones(8, 1),
            r"it returned a Tensor of shape \(8, 1\), not one number per sample: \(8,\)",
        ),
        (lambda responses: torch.ones(8, device="meta"), r"it returned a tensor on the meta device"),
        (lambda answer: [0.0], r"its argument `answer` is not a column of the prompt set"),
    ],
)
def test_a_reward_that_misbehaves(tmp_path: Path, reward: Callable[..., Any], match: str) -> None:
    with pytest.raises(RewardError, match=f"Reward `judge`: {match}"):
        fit(tmp_path, reward=FunctionReward(reward, name="judge"))


def test_a_column_that_few_rows_have_is_none_in_batches_without_it(tmp_path: Path) -> None:
    seen: list[Any] = []

    def judge(responses: list[str], answer: list[Any]) -> list[float]:
        seen.extend(answer)
        return [0.0] * len(responses)

    rows = [{"prompt": "w1", "answer": 1}, {"prompt": "w2"}, {"prompt": "w3"}]
    fit(tmp_path, PromptDataModule(rows, batch_size=1), reward=judge)
    assert sorted(seen, key=str) == [1, None, None]


def test_a_skipped_sample_is_told_of_once(tmp_path: Path) -> None:
    reward = FunctionReward(lambda responses: [float("nan")] + [1.0] * 7, name="judge", on_error="skip")
    with pytest.warns(UserWarning, match="Said once") as caught:
        fit(tmp_path, reward=reward, data=PromptDataModule(tiny.rows(32), batch_size=8))
    assert sum("Said once" in str(w.message) for w in caught) == 1


def test_predictions_lose_no_column_to_their_own(tmp_path: Path) -> None:
    run = PPOLightningModule(tiny.folder(), eval_sampling={"max_new_tokens": 3})
    data = PromptDataModule(predict=[{"prompt": "w1", "response": "gold", "id": 7}], batch_size=1)
    with pytest.warns(UserWarning, match=r"a column `response`, as predictions do: theirs is written as `data/respon"):
        (batch,) = tiny.trainer(tmp_path).predict(run, data)
    assert set(batch[0]) == {"prompt", "response", "stopped", "data/response", "id"}
    assert batch[0]["data/response"] == "gold"


def test_a_reward_may_be_any_kind_of_number(tmp_path: Path) -> None:
    for scores in (
        torch.ones(8, requires_grad=True, dtype=torch.bfloat16),
        tuple(range(8)),
        [torch.tensor(1.0)] * 8,
        [True] * 8,
    ):
        fit(tmp_path, reward=lambda responses, scores=scores: scores)


# ------------------------------------------------------------------------------- what only the weights or batches show


def test_a_model_of_another_kind_is_not_made_up(tmp_path: Path, loads: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"is not a whole LlamaForCausalLM: it has no weights for lm_head.weight"):
        fit(tmp_path, actor=tiny.folder(labels=1))
    assert len(loads) == 1


def test_targets_of_lora_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"`lora.target_modules=\['query'\]` does not fit .*Its linear layers are .*q_proj"
    ):
        fit(tmp_path, lora=LoRAConfig(target_modules=["query"]))


def loader(rows: Any, batch_size: int = 8) -> Any:
    return DataLoader(rows, batch_size=batch_size, collate_fn=list)


@pytest.mark.filterwarnings(
    "ignore:The 'train_dataloader' does not have many workers", "ignore:You defined a `validation_"
)
def test_batches_of_another_loader(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"A batch is a Tensor. Use PromptDataModule, or a loader that yields lists"):
        fit(tmp_path, DataLoader(torch.arange(8), batch_size=8))
    with pytest.raises(ValueError, match=r"`ppo.minibatches=3` does not divide the 8 episodes"):
        fit(tmp_path, loader(tiny.rows(8)), ppo=PPOConfig(epochs=1, minibatches=3))
    with pytest.raises(ValueError, match=r"A prompt of 62 tokens .*exceed the actor's context of 64"):
        fit(tmp_path, loader([" ".join(["w5"] * 62)]))
    fit(tmp_path, loader(tiny.rows(8)), ppo=PPOConfig(epochs=1, minibatches=2))


# ---------------------------------------------------------------------------------------------------- output folders


@contextmanager
def disk_of(limit: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes, which writers see as a full disk: a write that fails half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_folder_that_cannot_be_written(tmp_path: Path, loads: list[Any]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "fine").mkdir()
    for bad in (tmp_path / "file" / "below", Path("/proc/sys")):
        with pytest.raises(OSError, match=rf"`default_root_dir`, '{bad}', cannot be written.*choose another folder"):
            fit(tmp_path, trainer={"default_root_dir": str(bad)})
        saver = ModelCheckpoint(bad)
        with pytest.raises(OSError, match=rf"`ModelCheckpoint\(dirpath=...\)`, '{bad}', cannot be written"):
            fit(tmp_path / "fine", trainer={"enable_checkpointing": True, "callbacks": [saver]})
        with pytest.raises(OSError, match=rf"'{bad}"):  # Lightning's own
            fit(tmp_path / "fine", trainer={"logger": CSVLogger(bad)})
    with disk_of(1000), pytest.raises(OSError, match=r"`default_root_dir`, .*, cannot be written: File too large"):
        fit(tmp_path / "fine")
    assert loads == []
    assert list((tmp_path / "fine").iterdir()) == []


def test_a_disk_that_fills_up_costs_no_earlier_checkpoint(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_last=True)
    fit(tmp_path, trainer={"enable_checkpointing": True, "callbacks": [saver]})
    before = {file.name: file.read_bytes() for file in tmp_path.glob("*.ckpt*")}
    assert set(before) == {"step=1.ckpt", "last.ckpt"}
    run = PPOLightningModule(tiny.folder(), tiny.count_w1, ppo=PPOConfig(epochs=1), sampling={"max_new_tokens": 3})
    trainer = tiny.trainer(
        tmp_path,
        max_epochs=3,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_last=True)],
    )
    match = (
        r"The checkpoint '.*step=2.ckpt' cannot be written: File too large after 150,000 bytes, with [\d,]+ bytes free"
    )
    with disk_of(150_000), pytest.raises(OSError, match=match + ". Earlier checkpoints are intact: make room"):
        trainer.fit(run, PromptDataModule(tiny.rows(8), batch_size=8), ckpt_path="last")
    assert {file.name: file.read_bytes() for file in tmp_path.glob("*.ckpt*")} == before


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    run = PPOLightningModule(tiny.folder(), tiny.count_w1, ppo=PPOConfig(epochs=1), sampling={"max_new_tokens": 3})
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: .*nothing.ckpt"):
        tiny.trainer(tmp_path).fit(
            run, PromptDataModule(tiny.rows(8), batch_size=8), ckpt_path=tmp_path / "nothing.ckpt"
        )


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_weights_that_cannot_be_read_name_their_role(tmp_path: Path, role: str) -> None:
    shutil.copytree(tiny.folder(), tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not weights at all")
    sources = {"actor": tiny.folder(), role: str(tmp_path / "broken")}
    sampling = SamplingConfig(max_new_tokens=4)
    with pytest.raises(ValueError, match=rf"`{role}='.*broken'`: its weights could not be loaded: "):
        tiny.fit(tmp_path, PPOLightningModule(reward=tiny.count_w1, sampling=sampling, **sources))


def test_an_attention_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`actor.attn_implementation='flash_attention_9'` cannot be used: .*leave it"):
        fit(tmp_path, actor=RoleConfig(source=tiny.folder(), attn_implementation="flash_attention_9"))


def test_a_layout_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"`layout='share'` must be one of .*Did you mean 'shared'"):
        PPOLightningModule(tiny.folder(), tiny.count_w1, layout="share")


def test_a_seed_is_a_number() -> None:
    with pytest.raises(TypeError, match="`seed='a'` must be an int"):
        PPOLightningModule(tiny.folder(), reward=tiny.count_w1, seed="a")  # type: ignore[arg-type]
