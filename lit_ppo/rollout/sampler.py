"""Sampling on the device: temperature, truncation, counter-based noise, and the log-prob of what was picked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_ppo.algo.noise import random_bits, row_keys, to_gumbel
from lit_ppo.roles.logprobs import tempered_logits
from lit_ppo.rollout.base import Sampling
from lit_ppo.rollout.hf import measured, truncate


class DeviceSampler:
    """Picks tokens from logits without the host, so that it can be part of a captured graph.

    Args:
        sampling: Options.
        vocab_size: V.
        device: Of the logits.
        kernels: `lit_ppo.rollout.kernels`, or None for plain PyTorch. A truncated distribution is always sampled in
            PyTorch.
    """

    def __init__(self, sampling: Sampling, vocab_size: int, device: torch.device, kernels: Any = None) -> None:
        self.sampling = sampling
        self.suppress = sampling.suppress.to(device)
        self.stop_table = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.stop_table[sampling.stop.to(device)] = True
        self.suppress_table = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.suppress_table[self.suppress] = True
        truncates = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self.kernels = None if truncates else kernels

    def __call__(
        self, logits: Tensor, base: Tensor, index: Tensor, step: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sample.

        Args:
            logits: (B, V) of any float dtype, as the head gives them.
            base: () int64 noise key of the rollout.
            index: (B,) int64 noise index of each row.
            step: (B,) int64 number of the token in its response.

        Returns:
            (B,) int64 tokens, their (B,) float32 log-probs under the tempered, not truncated, distribution, and its
            (B,) float32 entropy in nats, or None where `Sampling.entropy` does not ask for it.
        """
        s = self.sampling
        if self.kernels is not None:
            table = self.suppress_table if s.suppress.numel() else None
            options = s.temperature, table, base, index, step, s.entropy
            picked: tuple[Tensor, Tensor, Tensor | None] = self.kernels.sample(logits, *options)
            return picked
        tempered = tempered_logits(logits, s.temperature, self.suppress)
        perturbed = truncate(tempered, s)
        if s.temperature > 0:
            perturbed = perturbed + to_gumbel(random_bits(row_keys(base, index, step), logits.shape[-1]))
        token = perturbed.argmax(-1)
        return token, *measured(tempered, token, s.entropy)


def sampling_key(sampling: Sampling) -> tuple[Any, ...]:
    """What two samplings must share to share a captured graph; the longest response is not part of it."""
    s = sampling
    return s.temperature, s.top_k, s.top_p, s.min_p, s.entropy, tuple(s.suppress.tolist()), tuple(s.stop.tolist())
