"""The `hf` engine: transformers' own `generate`, on any device. The default on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_ppo.algo.noise import gumbel
from lit_ppo.experience import Prompts, Rollout
from lit_ppo.roles.logprobs import tempered_logits
from lit_ppo.roles.model import RoleView
from lit_ppo.rollout.base import Draw, RolloutEngine, Sampling, finish
from lit_ppo.rollout.stop import StopWatch


class HFEngine(RolloutEngine):
    """Left-padded batched `generate`.

    Args:
        policy: The actor: its model generates, with its adapter on.
    """

    def __init__(self, policy: RoleView) -> None:
        self.policy = policy

    def generate(self, prompts: Prompts, sampling: Sampling, draw: Draw) -> Rollout:
        """Sample one response for each row.

        Args:
            prompts: B rows on the policy's device.
            sampling: Options.
            draw: Which noise.

        Returns:
            A rollout whose width R is that of its longest response.
        """
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        store = self.policy.store
        sampler = _Sampler(sampling, draw, prompts.index)
        # `generate` fills what it is not given from the model's own generation config (a repetition penalty, say),
        # which would sample from another distribution than the one that is trained: this config replaces it.
        config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,  # the sampler adds the noise; the likeliest of the perturbed logits is the sample
            use_cache=True,
            pad_token_id=sampling.pad,
            eos_token_id=sampling.stop.tolist() or None,
        )
        watch = None
        if sampling.stop_strings is not None:
            watch = StopWatch(sampling.stop_strings, prompts.ids.shape[1], len(prompts))
        base = store.base
        before = base.generation_config
        base.generation_config = config
        try:
            with torch.no_grad(), store.using(self.policy.adapter):
                output = base.generate(
                    prompts.ids,
                    attention_mask=prompts.mask.long(),
                    generation_config=config,
                    logits_processor=LogitsProcessorList([sampler]),
                    stopping_criteria=StoppingCriteriaList([] if watch is None else [watch]),
                    synced_gpus=False,  # sharded weights are gathered around this: nobody waits for anybody
                )
        finally:
            base.generation_config = before
        ids = output[:, prompts.ids.shape[1] :]
        logprobs = torch.stack(sampler.logprobs, dim=1)[:, : ids.shape[1]]
        entropy = torch.stack(sampler.entropies, dim=1)[:, : ids.shape[1]] if sampling.entropy else None
        return finish(prompts, ids, logprobs, sampling.stop, None if watch is None else watch.ends, entropy)

    def sleep(self) -> None:
        """Nothing is held between rollouts."""

    def wake(self) -> None:
        """Nothing is held between rollouts."""


class _Sampler:
    """A logits processor: tempers, truncates, perturbs, and records the log-prob of what will be picked."""

    def __init__(self, sampling: Sampling, draw: Draw, index: Tensor) -> None:
        self.sampling, self.draw, self.index = sampling, draw, index
        self.logprobs: list[Tensor] = []
        self.entropies: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) logits -> (B, V) perturbed logits, whose argmax is the sample."""
        s, d = self.sampling, self.draw
        logits = tempered_logits(scores, s.temperature, s.suppress)
        perturbed = truncate(logits, s)
        if s.temperature > 0:
            t = len(self.logprobs)
            perturbed = perturbed + gumbel(d.seed, d.iteration, self.index, t, logits.shape[-1], stream=d.stream)
        token = perturbed.argmax(dim=-1, keepdim=True)
        logprob, entropy = measured(logits, token[:, 0], s.entropy)
        self.logprobs.append(logprob)
        self.entropies += [entropy] if entropy is not None else []
        return perturbed


def measured(logits: Tensor, token: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-prob of what was sampled, and the entropy of what it was sampled from.

    Args:
        logits: (B, V) float32, tempered and not truncated.
        token: (B,) int64.
        entropy: Whether it is asked for.

    Returns:
        (B,) float32 each; without `entropy` the second is None.
    """
    total = logits.logsumexp(-1)
    logprob = logits.gather(-1, token[:, None])[:, 0] - total
    if not entropy:
        return logprob, None
    logits = logits - total[:, None]
    return logprob, -(logits.exp() * logits.clamp(min=-1e30)).sum(-1)  # 0 * -inf would be NaN


def truncate(logits: Tensor, sampling: Any) -> Tensor:
    """Apply top-k, top-p and min-p to (B, V) tempered logits, in this order, by transformers' own warpers."""
    from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    none: Any = None  # the warpers ignore the input ids
    if sampling.top_k > 0:
        logits = TopKLogitsWarper(sampling.top_k)(none, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(none, logits)
    if sampling.min_p > 0:
        logits = MinPLogitsWarper(sampling.min_p)(none, logits)
    return logits
