"""The reward model: the second stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from lit_ppo.config import LoRAConfig, RoleConfig, from_dict
from lit_ppo.data.encode import pad_id
from lit_ppo.data.pairs import Pairs, PreferenceDataModule, texts
from lit_ppo.experience import Rollout
from lit_ppo.roles.single import OneRole, build_scorer, check_scorer
from lit_ppo.stages.base import StageModule, Stats, hyperparameters
from lit_ppo.stages.config import RankingConfig, StageOptimConfig


class RewardModule(StageModule):
    """A reward model from pairs of answers, by the Bradley-Terry model (arXiv 2203.02155).

    The loss of a batch is the mean of -log sigmoid(score(chosen) - score(rejected) - margin) over all pairs of the
    global batch. A score is a linear head on the last token's hidden state; one batch is one optimizer step. Each
    checkpoint measures the scores of reference answers, and what is exported gives them the mean 0 (`ranking`).

    Args:
        reward: A language model, which gets a head that outputs 0, or a reward model to go on with: a folder, a Hugging
            Face id, a `RoleConfig`, or a transformers model.
        tokenizer: Its tokenizer, or where it is. None: beside the model.
        lora: Train an adapter and the head instead of the whole model.
        ranking: Micro-batches, clipping and what scores are normalised to.
        optim: Learning rate, Adam and the schedule.
        seed: Of the adapter.

    Logs `train/loss`, `train/accuracy` and `train/score_gap` each step, the same as `val/...` at each validation.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lit_ppo import PreferenceDataModule, RewardModule
        >>> module = RewardModule("sft-model")
        >>> Trainer(max_epochs=1).fit(module, PreferenceDataModule("pairs.jsonl"))  # doctest: +SKIP
    """

    stage = "reward"
    data_class = PreferenceDataModule
    span = 2
    options: RankingConfig

    def __init__(
        self,
        reward: str | RoleConfig | nn.Module,
        tokenizer: Any = None,
        lora: LoRAConfig | None = None,
        ranking: RankingConfig | None = None,
        optim: StageOptimConfig | None = None,
        seed: int = 0,
    ) -> None:
        options = from_dict(RankingConfig, ranking)
        super().__init__("reward", reward, tokenizer, lora, options, optim, seed)
        hyperparameters(self, "ranking", options, reward)
        self.score_mean, self.score_std = 0.0, 1.0
        """Of the reference answers, when they were last scored."""

    def loss(self, micro: Pairs) -> tuple[Tensor, Stats]:
        """Return the Bradley-Terry loss of a micro-batch's pairs, summed, and its metrics."""
        scores = self.scores(Rollout.cat([micro.chosen, micro.rejected]))
        gap = scores[: len(micro)] - scores[len(micro) :]
        losses = -logsigmoid(gap - micro.margin)
        n, real = micro.real.sum(), micro.real
        right = ((gap > 0).float() + (gap == 0).float() / 2).detach()  # a tie is a guess
        loss = losses[real].sum()
        return loss, {
            "loss": (loss.detach(), n),
            "accuracy": (right[real].sum(), n),
            "score_gap": (gap.detach()[real].sum(), n),
        }

    def scores(self, batch: Rollout) -> Tensor:
        """(B,) float32: the scores of whole texts, as `lit_ppo.data.pairs.texts` makes them."""
        return self.view(batch)[0][:, 0]

    def lengths(self, batch: Pairs) -> Tensor:
        """(B,) int64: the tokens of each pair."""
        return batch.chosen.prompts.lengths + batch.rejected.prompts.lengths

    def count(self, batch: Pairs) -> Tensor:
        """Return the pairs on this rank."""
        return batch.real.sum()

    def worst(self, rows: int, longest: int) -> Pairs:
        """Return pairs of texts as long as the longest."""
        longer = texts([[1] * longest] * rows, torch.arange(rows), 0)
        return Pairs(longer, longer, torch.zeros(rows), torch.ones(rows, dtype=torch.bool))

    # ---------------------------------------------------------------------------------------------------- construction

    def check_run(self, stage: str) -> None:
        """Check source, tokenizer, lengths and the trainer's options; load no weights."""
        super().check_run(stage)
        check_scorer(self.role, self.plan())

    def build(self, *, empty: bool) -> OneRole:
        """Load the model; with `empty`, on the meta device what another rank loads."""
        return OneRole(self.role, build_scorer(self.role, self.ready_plan(empty=empty), self.target_device))

    # --------------------------------------------------------------------------------------------------- normalisation

    @torch.no_grad()
    def measure(self) -> None:
        """Score the reference answers of the datamodule, over all ranks; keep their mean and standard deviation."""
        data = getattr(self.trainer, "datamodule", None)
        if self.options.normalize == "none" or not isinstance(data, PreferenceDataModule):
            return
        found = data.references(self.options.references)
        mine = found[self.global_rank :: self.trainer.world_size]
        batch = texts(mine, torch.arange(len(mine)), pad_id(self.tokenizer)).to(self.device)
        training = self.view.store.training
        self.set_mode(train=False)
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        size = self.options.micro_batch_size or data.batch_size
        with self.trainer.precision_plugin.forward_context():
            for rows in self.cuts(batch.prompts.lengths.argsort(stable=True).cpu(), size):
                scores = self.scores(batch.part(rows))[: len(rows)].double()
                sums += torch.stack([scores.sum(), scores.square().sum(), scores.new_tensor(len(rows))])
        self.set_mode(train=training)
        total, squares, n = self.reduce(sums).tolist()
        self.score_mean = total / n
        self.score_std = max(squares / n - self.score_mean**2, 0.0) ** 0.5 or 1.0

    def counters(self) -> dict[str, Any]:
        """Return what is counted, and the scores of the reference answers with the weights as they are."""
        if self._trainer is not None:
            self.measure()
        return super().counters() | {"score_mean": self.score_mean, "score_std": self.score_std}

    def load_counters(self, saved: dict[str, Any]) -> None:
        """Take back what `counters` returned."""
        super().load_counters(saved)
        self.score_mean, self.score_std = saved["score_mean"], saved["score_std"]

    def on_train_end(self) -> None:
        """Score the reference answers, for an export from memory."""
        self.measure()

    def before_export(self) -> None:
        """Score the reference answers, for an export by a callback: on all ranks."""
        self.measure()

    @contextmanager
    def finished(self, model: Any) -> Iterator[None]:
        """Have a model as it is to be exported: its scores normalised, and pad tokens known to transformers.

        The factor goes into the head. The heads of transformers have no bias, so the shift is `reward_bias` of the
        configuration, which lit-ppo adds to every score and value.

        Args:
            model: A sequence classifier.
        """
        config, weight = model.config, model.score.weight
        before, pad, head = getattr(config, "reward_bias", None), config.pad_token_id, weight.detach().clone()
        mean = 0.0 if self.options.normalize == "none" else self.score_mean
        scale = self.score_std if self.options.normalize == "mean_std" else 1.0
        config.reward_bias = ((before or 0.0) - mean) / scale
        config.pad_token_id = pad_id(self.tokenizer) if pad is None else pad
        with torch.no_grad():
            weight.div_(scale)
        try:
            yield
        finally:
            config.pad_token_id = pad
            if before is None:
                del config.reward_bias
            else:
                config.reward_bias = before
            with torch.no_grad():
                weight.copy_(head)
