"""Real transformers models and tokenizers, small enough to make on the spot."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from lit_ppo import PPOLightningModule, PromptDataModule
from lit_ppo.experience import Prompts

VOCAB = 64
WORDS = ["<pad>", "<bos>", "<eos>", "<unk>"] + [f"w{i}" for i in range(VOCAB - 4)]
CHAT = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w1{% endif %}"
)
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
}


def tokenizer(pad: str | None = "<pad>") -> Any:
    """A word-level tokenizer of 64 words; `pad` may be "<eos>" or None."""
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _with_special_tokens(words, pad)


def qwen2_tokenizer(pad: str | None = "<pad>") -> Any:
    """The same ids for the same words, in a form that transformers' own class for Qwen2 reads: it takes BPE alone."""
    words = Tokenizer(models.BPE({w: i for i, w in enumerate(WORDS[:4])}, merges=[]))
    words.add_tokens([AddedToken(w, lstrip=True, normalized=False) for w in WORDS[4:]])
    return _with_special_tokens(words, pad)


def _with_special_tokens(words: Tokenizer, pad: str | None) -> Any:
    extra = {} if pad is None else {"pad_token": pad}
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", chat_template=CHAT, **extra
    )


def model(kind: str = "llama", seed: int = 0, scale: float = 5.0) -> Any:
    """A randomly initialised causal LM; `scale` sharpens its distribution so that tokens differ in probability."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = AutoModelForCausalLM.from_config(CONFIGS[kind])
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return lm.eval()


@functools.cache
def folder(kind: str = "llama", seed: int = 0, pad: str | None = "<pad>", labels: int | None = None) -> str:
    """Save a model and its tokenizer once a process; with `labels`, a sequence classifier."""
    path = Path(tempfile.mkdtemp(prefix=f"lit-ppo-{kind}-"))
    if labels is None:
        model(kind, seed).save_pretrained(path)
    else:
        config = CONFIGS[kind].__class__(**{**CONFIGS[kind].to_dict(), "num_labels": labels})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    (qwen2_tokenizer if kind.startswith("qwen2") else tokenizer)(pad).save_pretrained(path)
    return str(path)


@functools.cache
def adapter(kind: str = "llama", seed: int = 0, targets: str | tuple[str, ...] = "all-linear") -> str:
    """Save, as PEFT does, an adapter and a head that make a reward model of `folder(kind)`; nothing of it is zero."""
    from peft import LoraConfig, TaskType, get_peft_model

    path = Path(tempfile.mkdtemp(prefix=f"lit-ppo-adapter-{kind}-"))
    settings = LoraConfig(
        r=3, lora_alpha=6, task_type=TaskType.SEQ_CLS, modules_to_save=["score"], init_lora_weights=False,
        target_modules=targets if isinstance(targets, str) else list(targets), exclude_modules=["score"],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7 + seed)
        whole = folder() if kind == "llama" else folder(kind)
        base = AutoModelForSequenceClassification.from_pretrained(whole, num_labels=1)
        with warnings.catch_warnings():  # of excluded modules where there are none, and of tied embeddings
            warnings.simplefilter("ignore")
            get_peft_model(base, settings).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def rows(count: int = 16) -> list[str]:
    """Prompts of 1 to 5 words, all different."""
    return [" ".join(f"w{(i * (j + 3) + j) % 60}" for j in range(1 + i % 5)) for i in range(count)]


def prompts(count: int = 6, pad: int = 0) -> Prompts:
    """The same as a batch."""
    ids = [[WORDS.index(w) for w in row.split()] for row in rows(count)]
    width = max(map(len, ids))
    return Prompts(
        ids=torch.tensor([[pad] * (width - len(i)) + i for i in ids]),
        lengths=torch.tensor([len(i) for i in ids]),
        index=torch.arange(count),
        text=rows(count),
        messages=[None] * count,
        columns=[{} for _ in range(count)],
    )


def count_w1(responses: list[str], **_: Any) -> list[float]:
    """A reward: how often the word w1 is said."""
    return [float(response.split().count("w1")) for response in responses]


def trainer(tmp_path: Path, **options: Any) -> Trainer:
    """A quiet trainer on one CPU."""
    defaults = dict(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(tmp_path),
    )
    return Trainer(**(defaults | options))


def fit(
    tmp_path: Path,
    module: PPOLightningModule,
    data: PromptDataModule | None = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Trainer:
    """Train for an epoch (two iterations of 8 prompts unless told otherwise) and return the trainer."""
    done = trainer(tmp_path, **options)
    done.fit(module, data if data is not None else PromptDataModule(rows(), batch_size=8), ckpt_path=ckpt_path)
    return done


def interrupted(
    tmp_path: Path, make: Callable[[], PPOLightningModule]
) -> tuple[PPOLightningModule, PPOLightningModule]:
    """Train for two epochs, at once and with a new start from `tmp_path / "one.ckpt"` after the first; return both."""
    whole, second, checkpoint = make(), make(), tmp_path / "one.ckpt"
    fit(tmp_path / "whole", whole, max_epochs=2)
    fit(tmp_path / "first", make()).save_checkpoint(checkpoint)
    fit(tmp_path / "second", second, max_epochs=2, ckpt_path=checkpoint)
    return whole, second
