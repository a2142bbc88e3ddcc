"""What SFT and the reward model share: one model, one optimizer step a batch, validation, checks before a run."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lit_ppo import checkpoint, checks, preflight, summary
from lit_ppo.algo.cut import least_budget
from lit_ppo.base import Harness
from lit_ppo.config import LoRAConfig, PPOConfig, RoleConfig, from_dict
from lit_ppo.data.sets import SetsDataModule
from lit_ppo.metrics import Means
from lit_ppo.output import check_output
from lit_ppo.plan import live
from lit_ppo.ranks import check_same, distributed
from lit_ppo.roles.build import RolePlan, Source
from lit_ppo.roles.fused_layers import fuse_if
from lit_ppo.roles.model import RoleView
from lit_ppo.roles.single import plan_role
from lit_ppo.roles.sources import context_length
from lit_ppo.stages.config import RankingConfig, SFTConfig, StageOptimConfig

Stats = dict[str, tuple[Tensor, Tensor]]
"""Sums and counts of metrics, by name."""


class StageModule(Harness):
    """One model trained on batches of examples; a batch is one optimizer step, however it is cut.

    Args:
        role: What the model is.
        source: A folder, a Hugging Face id, a `RoleConfig`, or a transformers model.
        tokenizer: Its tokenizer, or where it is. None: beside the model.
        lora: Train an adapter instead of the whole model.
        options: Those of the stage.
        optim: Learning rate, Adam and the schedule.
        seed: Of adapters and fresh heads.
    """

    data_class: ClassVar[type[SetsDataModule]]
    """What yields its batches."""
    span: ClassVar[int] = 1
    """Texts of an example."""
    optim: StageOptimConfig

    def __init__(
        self,
        role: str,
        source: Any,
        tokenizer: Any,
        lora: LoRAConfig | None,
        options: SFTConfig | RankingConfig,
        optim: StageOptimConfig | None,
        seed: int,
    ) -> None:
        super().__init__({role: source}, tokenizer, lora, from_dict(StageOptimConfig, optim), seed)
        self.role, self.options = role, options

    # ------------------------------------------------------------------------------------------------- what is trained

    @abstractmethod
    def loss(self, micro: Any) -> tuple[Tensor, Stats]:
        """Return the sum of the loss over a micro-batch, and sums and counts for the metrics.

        Every micro-batch has the same names, and `loss` among them, whose count is what the loss is a mean over.
        """

    @abstractmethod
    def lengths(self, batch: Any) -> Tensor:
        """(B,) int64: the tokens of each example, by which the ones of a micro-batch are put together."""

    @abstractmethod
    def worst(self, rows: int, longest: int) -> Any:
        """Return a batch of so many examples, all as long as the longest."""

    @abstractmethod
    def count(self, batch: Any) -> Tensor:
        """Return what the loss of a batch is a mean over, on this rank."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Take one optimizer step: the gradient of the mean over the global batch, however it is cut."""
        start = time.perf_counter()
        self.means, self.skipped_steps = Means(), 0
        if self._iteration_end is not None:
            self.means.add("time/idle", start - self._iteration_end, 1)
        optimizer: Any = self.optimizers()
        weights = [p for named in self.trained.values() for _, p in named]
        total = self.reduce(self.count(batch).to(self.device))
        self.set_mode(train=True)
        with self.in_phase("update"):
            optimizer.zero_grad()
            size, least = self.micro_batch(batch), self.least(batch)
            for attempt in self.oom_policy.retry(
                self.unit("update"), size, module=self, parameters=weights, least=least
            ):
                with attempt, self.sharding.unsynced():
                    found = []
                    for rows in self.parts(batch, attempt.size):
                        loss, stats = self.loss(batch.part(rows))
                        # The mean over all ranks; the factor undoes the data-parallel mean.
                        self.manual_backward(loss / total * self.trainer.world_size)
                        found.append(stats)
            if not self.oom_policy.recover:  # it has averaged, once all ranks had agreed
                self.sharding.average(weights)
            optimizer.step()  # clips the gradient on the way: `on_before_optimizer_step`
        self.means_of(found, self.means, "train/")
        self.means.add("train/tokens", self.lengths(batch).sum(), 1 / self.trainer.world_size)
        self.end_iteration()

    def end_iteration(self) -> None:
        """Move the schedule, log every metric once, over all ranks."""
        metrics = self.means.compute(self.reduce, self.reduce_max)
        metrics["train/tokens_per_s"] = metrics["train/tokens"] / metrics["time/update"]
        metrics["optim/skipped_steps"] = float(self.skipped_steps)
        schedule: Any = self.lr_schedulers()
        metrics["lr"] = float(schedule.get_last_lr()[0])
        self.log_dict(metrics, batch_size=1)
        self.log("loss", metrics["train/loss"], prog_bar=True, logger=False, batch_size=1)
        schedule.step()
        self.iteration += 1
        self._iteration_end = time.perf_counter()

    def micro_batch(self, batch: Any) -> int:
        """Return how many examples, or tokens, are computed at once, unless memory is short."""
        return self.options.micro_batch_tokens or self.options.micro_batch_size or max(1, len(batch))

    def unit(self, phase: str) -> str:
        """Return the name under which sizes are learned from out-of-memory errors; it says what they count."""
        return phase if self.options.micro_batch_tokens is None else f"{phase} (tokens)"

    def least(self, batch: Any) -> int:
        """Return the size at which each example is alone, so that nothing is left to split."""
        return 1 if self.options.micro_batch_tokens is None else least_budget(self.lengths(batch).tolist())

    def parts(self, batch: Any, size: int) -> list[Tensor]:
        """Cut a batch into micro-batches; where they are padded, examples of like length are together."""
        lengths = self.lengths(batch).cpu()
        rows = torch.arange(len(batch)) if self.view.store.packs else lengths.argsort(stable=True)
        by_tokens = self.options.micro_batch_tokens is not None
        return self.cuts(rows, size, lengths[rows].tolist() if by_tokens else None)

    def means_of(self, found: list[Stats], means: Means, prefix: str) -> None:
        """Add the metrics of micro-batches."""
        for stats in found:
            for name, (total, n) in stats.items():
                means.add(prefix + name, total, n)

    @property
    def view(self) -> RoleView:
        """The model, as its role."""
        views: dict[str, RoleView] = self.views.all()
        return views[self.role]

    # ------------------------------------------------------------------------------------------------------ evaluation

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Measure held-out examples; logs `val/loss` for ModelCheckpoint and EarlyStopping."""
        self.evaluate_batch(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Measure test examples; logs `test/loss`."""
        self.evaluate_batch(batch)

    @torch.no_grad()
    def evaluate_batch(self, batch: Any) -> None:
        """Add what a batch says to the means of the evaluation."""
        self.set_mode(train=False)
        size, least = self.micro_batch(batch), self.least(batch)
        for attempt in self.oom_policy.retry(self.unit("score"), size, module=self, least=least):
            with attempt:
                found = [self.loss(batch.part(rows))[1] for rows in self.parts(batch, attempt.size)]
        self.means_of(found, self.eval_means, "")

    def on_validation_start(self) -> None:
        """Keep training's random states."""
        self.save_logs()
        checkpoint.hold_rng(self)

    def on_validation_epoch_end(self) -> None:
        """Log the means over all held-out examples; training goes on as if there had been no validation."""
        self.log_evaluation("val")
        checkpoint.release_rng(self)

    def on_test_epoch_end(self) -> None:
        """Log the means over all test examples."""
        self.log_evaluation("test")

    def log_evaluation(self, prefix: str) -> None:
        """Log and forget the evaluation's means."""
        metrics, self.eval_means = self.eval_means.compute(self.reduce), Means()
        named = {f"{prefix}/{name}": value for name, value in metrics.items()}
        self.log_dict(named, batch_size=1, sync_dist=distributed())  # equal, but Lightning asks

    # ---------------------------------------------------------------------------------------------------- construction

    def plan(self) -> RolePlan:
        """Return what will be loaded, checked once."""
        if "plan" not in self.cache:
            source: Source = self.sources[self.role]
            self.cache["plan"] = plan_role(self.role, source, self.lora, self.seed)
        found: RolePlan = self.cache["plan"]
        return replace(found, true_dtype=preflight.true_dtype(self))

    def ready_plan(self, *, empty: bool) -> RolePlan:
        """Return what will be loaded, and how the callbacks want it."""
        return replace(self.plan(), transforms=self.role_transforms, load_kwargs=self.role_load_kwargs, empty=empty)

    def check_run(self, stage: str) -> None:
        """Check source, tokenizer, lengths and the trainer's options; load no weights.

        Raises:
            ValueError: What is wrong, and what to change.
            TypeError: Batches of another stage.
        """
        trainer: Any = self.trainer
        data, stage = trainer.datamodule, str(getattr(stage, "value", stage))  # Lightning passes an enum
        config = self.plan().config
        known = config.get_text_config().vocab_size
        if len(self.tokenizer) > known:
            raise ValueError(
                f"`tokenizer` knows {len(self.tokenizer)} tokens and `{self.role}` {known}: ids above that would be "
                "out of range. Use the model's own tokenizer, or resize its embeddings first."
            )
        if isinstance(data, SetsDataModule) and not isinstance(data, self.data_class):
            raise TypeError(
                f"{type(self).__name__} trains on the {self.data_class.what} of {self.data_class.__name__}, and the "
                f"datamodule is a {type(data).__name__}."
            )
        longest, context = getattr(data, "longest", None), context_length(config.get_text_config())
        if longest is not None and context is not None and longest > context:
            raise ValueError(
                f"A text of {longest} tokens exceeds the context of `{self.role}`, {context} tokens. Set `max_length` "
                f"of {type(data).__name__} to at most {context}."
            )
        if stage != "fit":
            return
        if getattr(self.tokenizer, "eos_token_id", None) is None and self.stage == "sft":
            rank_zero_warn("The tokenizer has no EOS token, so the answers are learned without an end.")
        if isinstance(data, SetsDataModule):
            preflight.check_warmup(self, len(data.train_dataloader()))
        if self.optim.schedule != "constant" and self.optim.total_iterations is None and preflight.endless(trainer):
            raise ValueError(
                f'`optim.schedule="{self.optim.schedule}"` ends at the last iteration, but this fit has no end: set '
                "`max_epochs` or `max_steps`, `optim.total_iterations`, or `schedule: constant`."
            )
        if trainer.log_every_n_steps == 50:  # Lightning's default, made for steps that take milliseconds
            trainer.log_every_n_steps = 1
        check_output(trainer, PPOConfig(epochs=1, minibatches=1))

    def setup(self, stage: str) -> None:
        """Check everything that can be checked before a weight is loaded."""
        super().setup(stage)
        if stage == "fit":
            checks.check_optimizer(self, checks.trained_dtypes(self.plan(), self.target_device))

    def check_ranks(self) -> None:
        """Check that all ranks run the same thing."""
        trainer: Any = self.trainer
        names = ("max_epochs", "max_steps", "limit_train_batches", "limit_val_batches", "val_check_interval")
        settings = {name: getattr(trainer, name, None) for name in (*names, "precision")}
        settings |= dict(self.hparams)
        describe: Callable[[], dict[str, Any]] = getattr(trainer.datamodule, "describe", dict)
        settings |= {f"{type(trainer.datamodule).__name__}.{key}": value for key, value in describe().items()}
        check_same(settings)

    def adopt(self, views: Any) -> None:
        """Take the model, packed if it can be."""
        super().adopt(views)
        fuse_if(self.options.fused_layers, [self.view.store])
        if self.options.packing and (reason := views.pack()) is not None:
            rank_zero_info(f"The model runs padded: {reason}.")

    def on_fit_start(self) -> None:
        """Check that a packed forward is right; print the effective configuration."""
        with torch.no_grad(), self.sharding.gathered(self.view.store), self.trainer.precision_plugin.forward_context():
            reason = self.view.store.packing_fails()
        if reason is not None:
            self.views.pad()
            rank_zero_info(f"The model runs padded: {reason}.")
        self.set_mode(train=True)
        summary.print_table(self, self.arithmetic())
        live.announce(self)

    def arithmetic(self) -> str:
        """Say how examples become optimizer steps."""
        batch = getattr(getattr(self.trainer, "datamodule", None), "batch_size", None)
        size, options = "a batch" if batch is None else f"{batch} {self.data_class.what}", self.options
        cut = "whole" if options.micro_batch_size is None else f"in micro-batches of {options.micro_batch_size}"
        if options.micro_batch_tokens is not None:
            cut = f"in micro-batches of {options.micro_batch_tokens:,} tokens"
        return (
            f"{size} an optimizer step, over {self.trainer.world_size} rank(s), {cut}; learning rate "
            f"{self.optim.lr:g}, {self.optim.schedule}; precision {self.trainer.precision}, seed {self.seed}."
        )

    def dry_runs(self) -> dict[str, tuple[int, Callable[[int], object]]]:
        """Return what `OOMGuard` tries before training: an update at the longest text that can come."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, SetsDataModule):
            return {}
        rows, tokens = -(-data.batch_size // self.trainer.world_size), self.options.micro_batch_tokens
        span = self.span * max(2, data.longest)

        def update(size: int) -> None:
            self.set_mode(train=True)
            count = size if tokens is None else max(1, size // span)
            self.manual_backward(self.loss(self.worst(count, max(2, data.longest)).to(self.device))[0])

        if tokens is not None:
            return {self.unit("update"): (min(tokens, rows * span), update)}
        return {"update": (min(self.options.micro_batch_size or rows, rows), update)}

    @property
    def rates(self) -> dict[str, float]:
        """The learning rate of each role that is trained."""
        return {self.role: self.optim.lr}

    @property
    def max_grad_norm(self) -> float | None:
        """The gradient norm that each role is clipped to."""
        return self.options.max_grad_norm


def hyperparameters(module: StageModule, option: str, options: Any, source: str | RoleConfig | nn.Module) -> None:
    """Store the arguments of a stage, as `PPOLightningModule` does."""
    checkpoint.save_hyperparameters(module, {module.role: source, option: options})
