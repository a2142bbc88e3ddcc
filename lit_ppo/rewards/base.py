"""What every reward is: something that turns the texts of a batch into one number per sample."""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from lit_ppo.experience import Rollout
from lit_ppo.rewards.config import RewardConfig


class RewardError(RuntimeError):
    """A reward that cannot be found, loaded, called or believed. It names the reward and the first bad sample."""


@dataclass
class Samples:
    """The texts of a rollout, decoded once for all rewards. Every field has one entry per sample."""

    prompts: list[str]
    """What the policy read, its special tokens included."""
    plain_prompts: list[str]
    """The same without the policy's special tokens."""
    responses: list[str]
    """The continuations without special tokens: `plain_prompts[i] + responses[i]` is the whole text."""
    messages: list[list[dict[str, str]] | None]
    """The chat that a prompt was made from, where it was one."""
    response_ids: list[list[int]]
    """Token ids of the responses, the stop token included."""
    stopped: list[bool]
    """Whether a response ended with a stop token."""
    columns: list[dict[str, Any]]
    """The other columns of the prompt set."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.prompts)

    @classmethod
    def from_rollout(cls, rollout: Rollout, tokenizer: Any) -> Samples:
        """Decode the responses, by their lengths (a pad id says nothing: it may be the EOS).

        A response is what its tokens add to the decoded prompt, so that a leading space, which many tokenizers drop
        at the start of a text, is kept where the response goes on mid-sentence.

        Args:
            rollout: B prompts with responses.
            tokenizer: The policy's.
        """
        prompts, width = rollout.prompts, rollout.prompts.ids.shape[1]
        prompt_ids = [row[width - n :] for row, n in zip(prompts.ids.tolist(), prompts.lengths.tolist(), strict=True)]
        response_ids = [row[:n] for row, n in zip(rollout.ids.tolist(), rollout.lengths.tolist(), strict=True)]

        def decode(ids: list[list[int]]) -> list[str]:
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            return list(texts)

        before, alone = decode(prompt_ids), decode(response_ids)
        whole = decode([p + r for p, r in zip(prompt_ids, response_ids, strict=True)])
        responses = [
            text[len(start) :] if text.startswith(start) else short
            for text, start, short in zip(whole, before, alone, strict=True)
        ]
        special = {str(token) for token in tokenizer.all_special_tokens}
        special |= {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special}
        # longest first, so that a token that starts like another is removed whole
        pattern = "|".join(re.escape(token) for token in sorted(special - {""}, key=len, reverse=True))
        return cls(
            prompts=list(prompts.text),
            plain_prompts=[re.sub(pattern, "", text) if pattern else text for text in prompts.text],
            responses=responses,
            messages=list(prompts.messages),
            response_ids=response_ids,
            stopped=rollout.stopped.tolist(),
            columns=list(prompts.columns),
        )

    def select(self, rows: list[int]) -> Samples:
        """Return the given samples, in the given order."""
        return Samples(**{f.name: [getattr(self, f.name)[i] for i in rows] for f in fields(self)})

    def describe(self, row: int) -> str:
        """Return how error messages speak of a sample: its number, the end of its prompt, the start of its response."""
        prompt, response = self.plain_prompts[row][-60:], self.responses[row][:60]
        return f"sample {row} (prompt ends {prompt!r}, response starts {response!r})"


class Reward(ABC):
    """One term of the sum.

    Args:
        config: Its weight, name and other options.
        name: Its name where the options give none.
    """

    model: nn.Module | None = None
    """The loaded model of a reward that has one."""
    truncated: int = 0
    """Samples of the last batch that were cut because they are longer than the reward model's context."""

    def __init__(self, config: RewardConfig, name: str) -> None:
        self.config = config
        self.name = config.name or name
        self._warned: set[str] = set()

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the loaded weights by name, of which a resumed run checks that they are the same."""
        return () if self.model is None else self.model.named_parameters()

    @abstractmethod
    def score(self, samples: Samples, batch_size: int | None = None) -> Tensor:
        """Return (B,) float32 scores on the CPU; NaN and Inf are left for the caller to judge.

        Args:
            samples: B samples.
            batch_size: Texts in one forward of a model; None: as configured. Functions get all samples at once.
        """

    def check(self) -> None:  # noqa: B027 (most rewards have been checked when they are made)
        """Find every mistake that can be found without loading weights.

        Raises:
            RewardError: What is wrong and what to do.
        """

    def load(  # noqa: B027 (only models have weights)
        self,
        device: torch.device | str,
        load_kwargs: dict[str, Any] | None = None,
        transforms: Sequence[Callable[[nn.Module], nn.Module]] = (),
    ) -> None:
        """Load the weights, once, onto `config.device` or `device`."""

    def fail(self, message: str) -> RewardError:
        """Return an error that names this reward."""
        return RewardError(f"Reward `{self.name}`: {message}")

    def warn_once(self, about: str, message: str) -> None:
        """Warn the first time that this reward has something to say about a matter.

        Args:
            about: The matter.
            message: The warning, which may show the sample that gave rise to it.
        """
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(f"Reward `{self.name}`: {message}", stacklevel=2)


def refuse_options(config: RewardConfig, allowed: set[str], what: str) -> None:
    """Refuse options that would be ignored.

    Args:
        config: The options.
        allowed: Names of the options that mean something here.
        what: What this is, for the message.

    Raises:
        ValueError: An option that is set and not allowed.
    """
    for f in fields(config):
        if f.name not in allowed and getattr(config, f.name) != f.default:
            raise ValueError(f"`reward.{f.name}={getattr(config, f.name)!r}` has no effect on {what}. Leave it out.")
