"""Tiny real models and tokenizers; the reward models' tokenizers are others than the policy's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from lit_ppo.experience import Prompts, Rollout

TEXT = "the film was a great deal of fun and not bad at all good awful boring <2> answer is 4 2 +"
WORDS = TEXT.split()
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESPONSES = ["a great deal of fun", "awful", "not bad at all", "good good good good good good good", ""]


@pytest.fixture(scope="session")
def policy_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words; its pad is its EOS."""
    vocab = {w: i for i, w in enumerate(["</s>", "<s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )


def bytes_tokenizer(*, pad: str | None = None, bos: bool = False, template: str | None = None) -> Any:
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token=pad, bos_token="<|bos|>"
    )
    wrapped.chat_template = template
    return wrapped


def pieces_tokenizer() -> Any:
    """BERT's: lower case, [CLS] in front, [SEP] at the end."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted(set(TEXT) - {" "})
    vocab = {p: i for i, p in enumerate(dict.fromkeys([*special, *letters, *WORDS, *("##" + c for c in letters)]))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 300,
    "num_labels": 1,
}
ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForSequenceClassification, LlamaConfig),
    "qwen2": (Qwen2ForSequenceClassification, Qwen2Config),
    "qwen3": (Qwen3ForSequenceClassification, Qwen3Config),
    "gpt2": (GPT2ForSequenceClassification, GPT2Config),
    "bert": (BertForSequenceClassification, BertConfig),
    "roberta": (RobertaForSequenceClassification, RobertaConfig),
}


def build_model(kind: str, **changes: Any) -> Any:
    """Build a model whose scores differ from text to text."""
    model_class, config_class = ARCHITECTURES[kind]
    options = {**SIZES, **({} if kind in ("gpt2", "bert", "roberta") else {"num_key_value_heads": 2}), **changes}
    options.setdefault("pad_token_id", None if "ert" not in kind else 0 if kind == "bert" else 1)
    torch.manual_seed(0)
    model = model_class(config_class(**options))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., str]:
    """Save a tiny reward model with its tokenizer and return its folder."""

    def make(kind: str = "llama", tokenizer: Any = None, *, folder: str = "rm", **changes: Any) -> str:
        tokenizer = tokenizer or (pieces_tokenizer() if "ert" in kind else bytes_tokenizer())
        build_model(kind, **changes).save_pretrained(tmp_path / folder)
        tokenizer.save_pretrained(tmp_path / folder)
        return str(tmp_path / folder)

    return make


@pytest.fixture
def roll(policy_tokenizer: Any) -> Callable[..., Rollout]:
    """Make a rollout of given responses; odd rows end with the EOS, which is also the padding."""

    def make(
        responses: list[str] = RESPONSES,
        prompt: str = "the film was",
        messages: list[list[dict[str, str]]] | None = None,
        columns: list[dict[str, Any]] | None = None,
    ) -> Rollout:
        n = len(responses)
        prompts = [policy_tokenizer.encode("<s> " + prompt) for _ in responses]
        ids = [policy_tokenizer.encode(r) + [policy_tokenizer.eos_token_id] * (i % 2) for i, r in enumerate(responses)]
        width = max([len(row) for row in ids], default=0) + 2
        return Rollout(
            prompts=Prompts(
                ids=torch.tensor([[0, *p] for p in prompts], dtype=torch.long).reshape(
                    n, 1 + max(map(len, prompts), default=0)
                ),
                lengths=torch.tensor([len(p) for p in prompts], dtype=torch.long),
                index=torch.arange(n),
                text=[prompt] * n,
                messages=list(messages) if messages else [None] * n,
                columns=columns or [{} for _ in responses],
            ),
            ids=torch.tensor([row + [0] * (width - len(row)) for row in ids], dtype=torch.long).reshape(n, width),
            lengths=torch.tensor([len(row) for row in ids], dtype=torch.long),
            stopped=torch.tensor([bool(i % 2) for i in range(n)]),
            logprobs=torch.zeros(n, width),
        )

    return make
