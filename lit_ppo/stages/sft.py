"""Supervised fine-tuning: the first stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_ppo.config import LoRAConfig, RoleConfig, from_dict
from lit_ppo.data.answers import Answers, SFTDataModule
from lit_ppo.roles.build import Roles, build_roles
from lit_ppo.stages.base import StageModule, Stats, hyperparameters
from lit_ppo.stages.config import SFTConfig, StageOptimConfig


class SFTModule(StageModule):
    """Supervised fine-tuning of a causal language model: the likelihood of answers, given what stands before them.

    The loss of a batch is the mean of the negative log-likelihood over all tokens of answers of the global batch,
    whatever ranks and micro-batches they are in. One batch is one optimizer step. What it learns is the `actor` of PPO.

    Args:
        actor: A folder, a Hugging Face id, a `RoleConfig`, or a transformers model.
        tokenizer: Its tokenizer, or where it is. None: beside the model.
        lora: Train an adapter instead of the whole model.
        sft: Micro-batches and clipping.
        optim: Learning rate, Adam and the schedule.
        seed: Of the adapter.

    Logs `train/loss` and `train/tokens_per_s` each step, `val/loss` and `val/perplexity` at each validation.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lit_ppo import SFTDataModule, SFTModule
        >>> module = SFTModule("my-model")
        >>> Trainer(max_epochs=1).fit(module, SFTDataModule("answers.jsonl"))  # doctest: +SKIP
    """

    stage = "sft"
    data_class = SFTDataModule

    def __init__(
        self,
        actor: str | RoleConfig | nn.Module,
        tokenizer: Any = None,
        lora: LoRAConfig | None = None,
        sft: SFTConfig | None = None,
        optim: StageOptimConfig | None = None,
        seed: int = 0,
    ) -> None:
        self_options = from_dict(SFTConfig, sft)
        super().__init__("actor", actor, tokenizer, lora, self_options, optim, seed)
        hyperparameters(self, "sft", self_options, actor)

    def loss(self, micro: Answers) -> tuple[Tensor, Stats]:
        """Return the negative log-likelihood of a micro-batch's answers, summed, and its metrics."""
        logprobs, _ = self.view(micro)
        mask = micro.mask & micro.trained
        loss = -(logprobs * mask).sum()
        return loss, {"loss": (loss.detach(), mask.sum())}

    def lengths(self, batch: Answers) -> Tensor:
        """(B,) int64: the tokens of each text."""
        return batch.prompts.lengths + batch.lengths

    def count(self, batch: Answers) -> Tensor:
        """Return the tokens of answers on this rank."""
        return batch.trained.sum()

    def worst(self, rows: int, longest: int) -> Answers:
        """Return a batch of texts as long as the longest, all of them answers."""
        ids, trained = [[1] * longest] * rows, [[False] + [True] * (longest - 1)] * rows
        return Answers.of(ids, trained, torch.arange(rows), 0)

    def log_evaluation(self, prefix: str) -> None:
        """Log the evaluation's means, and the perplexity."""
        loss = self.eval_means.compute(self.reduce).get("loss")
        if loss is not None:
            self.eval_means.add("perplexity", float(torch.tensor(loss, dtype=torch.float64).exp()), 1)
        super().log_evaluation(prefix)

    def build(self, *, empty: bool) -> Roles:
        """Load the model; with `empty`, on the meta device what another rank loads."""
        return build_roles(self.ready_plan(empty=empty), self.target_device)

    def on_fit_start(self) -> None:
        """Check the head; print the effective configuration."""
        with torch.no_grad(), self.sharding.gathered(self.view.store):
            self.view.store.check_head(self.role)
        super().on_fit_start()
