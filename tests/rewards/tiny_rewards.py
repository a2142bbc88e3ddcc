"""Builders of tiny reward models and tokenizers, whose scores differ from text to text."""

from typing import Any

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

TEXT = "the film was a great deal of fun and not bad at all good awful boring <2> answer is 4 2 +"
WORDS = TEXT.split()
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESPONSES = ["a great deal of fun", "awful", "not bad at all", "good good good good good good good", ""]


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
