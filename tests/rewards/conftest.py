"""Tiny real models and tokenizers; the reward models' tokenizers are others than the policy's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_rewards import RESPONSES, WORDS, build_model, bytes_tokenizer, pieces_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lit_ppo.experience import Prompts, Rollout


@pytest.fixture(scope="session")
def policy_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words; its pad is its EOS."""
    vocab = {w: i for i, w in enumerate(["</s>", "<s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )


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
