"""The rollout protocol, and what sampling options mean for one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lit_ppo.config import SamplingConfig
from lit_ppo.experience import Prompts, Rollout
from lit_ppo.roles.sources import token_ids
from lit_ppo.rollout.stop import StopStrings

TRAIN, VALIDATE, TEST, PREDICT = 0, 1, 2, 3
"""Streams of sampling noise: validation in between changes nothing in training."""


@dataclass(frozen=True)
class Sampling:
    """Sampling options resolved against a tokenizer and a model: ids instead of names."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    samples_per_prompt: int
    suppress: Tensor
    """(S,) int64."""
    stop: Tensor
    """(E,) int64."""
    pad: int
    """Fills positions after the end; never read, as masks come from lengths."""
    stop_strings: StopStrings | None = None
    """Texts that end a response too."""
    entropy: bool = False
    """Also return `Rollout.entropy`."""


@dataclass(frozen=True)
class Draw:
    """Which noise a rollout uses: token t of sample i depends on these, on i and on t, and on nothing else."""

    seed: int
    iteration: int
    stream: int = TRAIN


class RolloutEngine(Protocol):
    """Samples responses with the actor's own weights. Derive from it for the defaults."""

    def generate(self, prompts: Prompts, sampling: Sampling, draw: Draw) -> Rollout:
        """Sample one response for each row of `prompts`."""

    def sleep(self) -> None:
        """Give memory back before the update."""

    def wake(self) -> None:
        """Take it again before a rollout."""

    def memory_bytes(self) -> dict[str, int]:
        """Return what it holds between rollouts beside the model, by name (see `lit_ppo.memory.ledger`)."""
        return {}

    def rows_at_once(self, total: int) -> int:
        """Return how many of `total` sequences are decoded together."""
        return total


def resolve_sampling(config: SamplingConfig, tokenizer: Any, model_config: Any, generation_config: Any) -> Sampling:
    """Look up token ids.

    Args:
        config: The user's options.
        tokenizer: The policy's.
        model_config: The policy's transformers configuration.
        generation_config: Its generation configuration, or None; gives further stop tokens.

    Raises:
        ValueError: A token that does not exist, a stop token that is suppressed, or no stop token at all.
    """
    vocab = model_config.get_text_config().vocab_size
    stop = token_ids(config.stop_tokens, tokenizer, "sampling.stop_tokens", vocab)
    if config.stop_tokens is None:
        found = [tokenizer.eos_token_id, getattr(generation_config, "eos_token_id", None)]
        flat = [i for entry in found for i in (entry if isinstance(entry, list) else [entry]) if i is not None]
        stop = sorted({i for i in flat if 0 <= i < vocab})
    suppress = token_ids(config.suppress_tokens, tokenizer, "sampling.suppress_tokens", vocab)
    # Padded vocabularies: ids that the tokenizer does not know are never meant to be sampled, but the model was trained
    # with them in its softmax, so they stay in unless suppressed by hand.
    both = sorted(set(stop) & set(suppress))
    if both:
        raise ValueError(f"`sampling.suppress_tokens` holds {both}, which are stop tokens: no response could end.")
    pad = tokenizer.pad_token_id
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        samples_per_prompt=config.samples_per_prompt,
        suppress=torch.tensor(sorted(set(suppress)), dtype=torch.long),
        stop=torch.tensor(stop, dtype=torch.long),
        pad=pad if pad is not None else (stop[0] if stop else 0),
        stop_strings=StopStrings(config.stop_strings, tokenizer.decode) if config.stop_strings else None,
        entropy=config.entropy,
    )


def finish(
    prompts: Prompts,
    ids: Tensor,
    logprobs: Tensor,
    stop: Tensor,
    ends: list[int | None] | None = None,
    entropy: Tensor | None = None,
) -> Rollout:
    """Cut sampled tokens after the first stop token, or where a stop string ends before it.

    Args:
        prompts: B rows.
        ids: (B, R) int64 sampled tokens; what follows a stop token is ignored.
        logprobs: (B, R) float32 of the sampler.
        stop: (E,) int64.
        ends: Length of each response up to its stop string, if any.
        entropy: (B, R) float32, where it was asked for.
    """
    is_stop = torch.isin(ids, stop.to(ids.device))
    stopped = is_stop.any(dim=1)
    first = is_stop.int().argmax(dim=1) + 1
    lengths = torch.where(stopped, first, torch.full_like(first, ids.shape[1]))
    if ends is not None:
        cut = torch.tensor([ids.shape[1] + 1 if end is None else end for end in ends], device=ids.device)
        stopped, lengths = stopped | (cut <= lengths), torch.minimum(lengths, cut)
    rollout = Rollout(prompts=prompts, ids=ids, lengths=lengths, stopped=stopped, logprobs=logprobs)
    rollout.logprobs = torch.where(rollout.mask, logprobs, 0.0)
    rollout.entropy = None if entropy is None else torch.where(rollout.mask, entropy, 0.0)
    return rollout
