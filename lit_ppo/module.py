"""PPO for language models as a LightningModule. Read `training_step` first: rollout -> score -> update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lit_ppo import checkpoint, preflight, summary
from lit_ppo.algo.advantages import estimate
from lit_ppo.algo.kl import kl_estimate
from lit_ppo.algo.losses import aggregate, policy_loss, value_loss
from lit_ppo.algo.masked import whiten
from lit_ppo.experience import Experience, Prompts, Rollout
from lit_ppo.harness import PPOHarness
from lit_ppo.metrics import Means, Sums
from lit_ppo.micro import cuts, least, score_size, unit, update_size
from lit_ppo.ranks import distributed
from lit_ppo.rewards import Scores
from lit_ppo.rollout.base import PREDICT, TEST, TRAIN, VALIDATE, Draw, Sampling
from lit_ppo.worst_case import DryRun, dry_runs


class PPOLightningModule(PPOHarness):
    """Proximal policy optimization of a causal language model from a reward.

    One batch of prompts is one PPO iteration: responses are sampled, scored, and trained on for `ppo.epochs` passes of
    `ppo.minibatches` optimizer steps. Lightning's `global_step` counts these steps; loggers count iterations.
    Arguments, construction and checkpoints are those of `PPOHarness`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lit_ppo import PPOLightningModule, PromptDataModule
        >>> def brevity(responses, **_):
        ...     return [-len(r) for r in responses]
        >>> module = PPOLightningModule(actor="my-model", reward=brevity)
        >>> Trainer(max_epochs=1).fit(module, PromptDataModule("prompts.jsonl"))  # doctest: +SKIP
    """

    # ------------------------------------------------------------------------------------------ one PPO iteration

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Run one PPO iteration on a batch of prompts."""
        start = time.perf_counter()
        self.means = Means()
        if self._iteration_end is not None:
            self.means.add("time/idle", start - self._iteration_end, 1)
        prompts = preflight.as_prompts(batch, self).repeat(self.sampling.samples_per_prompt)
        with self.in_phase("rollout"):
            rollout = self.generate(prompts, self.sampling, TRAIN, self.iteration)
        with self.in_phase("score"):
            experience = self.score(rollout)
        with self.in_phase("update"):
            self.update(experience)
        self.end_iteration(experience)

    @torch.no_grad()
    def generate(self, prompts: Prompts, sampling: Sampling, stream: int, number: int) -> Rollout:
        """Sample one response for each row of `prompts`, `ppo.rollout_batch_size` at a time.

        Args:
            prompts: B rows.
            sampling: Options.
            stream: Which noise: training's, or one of the evaluations'.
            number: Of the iteration, or of the batch of an evaluation.
        """
        self.set_mode(train=False)
        draw = Draw(seed=self.seed, iteration=number, stream=stream)

        def sample(start: int, stop: int) -> Rollout:
            if not len(prompts):  # a rank without any, which takes part in what the ranks agree on
                return Rollout.empty(prompts, sampling.entropy)
            return self.engine.generate(prompts.select(torch.arange(start, stop)), sampling, draw)

        with self.sharding.gathered(self.views.actor.store):
            self.engine.wake()
            size = self.ppo.rollout_batch_size
            parts = self.oom_policy.run_chunks("rollout", max(1, len(prompts)), size, sample, module=self)
            self.engine.sleep()
        return Rollout.cat(parts).measured()

    @torch.no_grad()
    def score(self, rollout: Rollout) -> Experience:
        """Give every response token its old log-prob, value, reward and advantage."""
        self.set_mode(train=False)
        ppo = self.ppo
        scores = self.score_responses(rollout)
        old, values, ref = self.evaluate_roles(rollout)

        mask = rollout.mask & scores.keep[:, None]
        total = self.shape_scores(scores, rollout)
        rewards = torch.zeros_like(old)
        if ref is not None:
            kl = kl_estimate(old, ref, ppo.kl_estimator, mask)
            rewards = -self.kl.value * kl
            self.means.add("objective/kl", kl.sum(), scores.keep.sum())
            self.means.add_mean("objective/kl_token", kl, mask)
        self.means.add("objective/non_score_reward", rewards[mask].sum(), scores.keep.sum())
        rewards = rewards.scatter_add(1, rollout.lengths[:, None] - 1, total[:, None].to(rewards.dtype))
        self.means.add("objective/rlhf_reward", rewards[mask].sum(), scores.keep.sum())
        advantages, returns = torch.zeros_like(rewards), values
        if int(self.reduce(mask.sum())):
            if ppo.whiten_rewards:
                rewards = whiten(rewards, mask, self.reduce, keep_mean=True)
            advantages, returns = estimate(
                ppo.advantage,
                rewards,
                mask,
                gamma=ppo.gamma,
                lam=ppo.lam,
                values=values,
                bootstrap=self.value_at_cut(rollout) if ppo.bootstrap_truncated else None,
                groups=rollout.prompts.index // self.sampling.samples_per_prompt,
                whiten_advantages=ppo.whiten_advantages,
                reduce=self.reduce,
            )
        else:
            rank_zero_warn(
                f"The rewards skipped every sample of iteration {self.iteration}: nothing is learned from it."
            )
        summary.record(self, rollout, scores, total, old, values, returns, mask)
        self.samples = summary.sample_rows(rollout, scores, self.tokenizer)
        return Experience(
            **vars(rollout),
            old_logprobs=old,
            advantages=advantages,
            returns=returns,
            values=values,
            ref_logprobs=ref,
            keep=scores.keep,
        )

    def update(self, experience: Experience) -> None:
        """Train actor and critic on the batch: epochs x minibatches, one optimizer step each."""
        self.set_mode(train=True)
        self.updated, self.skipped_steps = False, 0
        for epoch in range(self.ppo.epochs):
            epoch_kl = Means()
            for rows in self.minibatches(experience, epoch):
                self.update_minibatch(experience.select(rows), epoch_kl)
            if self.ppo.target_kl is not None and epoch_kl.compute(self.reduce).get("kl", 0.0) > self.ppo.target_kl:
                break
        tokens = (epoch + 1) * (experience.prompts.lengths + experience.lengths).sum()
        self.means.add("update/tokens", tokens, 1 / self.trainer.world_size)
        self.set_mode(train=False)

    def update_minibatch(self, minibatch: Experience, epoch_kl: Means) -> None:
        """Take one optimizer step. The gradient does not depend on how the minibatch is cut into micro-batches."""
        optimizer: Any = self.optimizers()
        mask = minibatch.loss_mask
        tokens, sequences = self.reduce(torch.stack([mask.sum(), mask.any(1).sum()]).to(self.device))
        optimizer.zero_grad()
        together = self.updated_together
        if not tokens or not together:  # the rewards skipped every sample, or callbacks have frozen every role
            self.empty_step(optimizer)
            return
        stats: list[Sums] = []
        *earlier, last = together
        self.dropped = False
        for roles in earlier:  # with `ppo.sequential_roles`: one role's gradients and activations at a time
            stats += self.backward_of(roles, minibatch, tokens, sequences)
            self.uncounted_step(optimizer)
            optimizer.zero_grad()
        if self.dropped:  # a gradient that is not finite drops the whole step, as far as it is not taken yet
            self.empty_step(optimizer)
        else:
            stats += self.backward_of(last, minibatch, tokens, sequences)
            optimizer.step()  # clips each role's gradient on the way: `on_before_optimizer_step`
        optimizer.zero_grad()  # nothing of it is alive in the next rollout
        summary.record_update(self, stats, epoch_kl)

    def backward_of(self, roles: list[str], minibatch: Experience, tokens: Tensor, sequences: Tensor) -> list[Sums]:
        """Build the gradients of some roles, micro-batch by micro-batch; return what `loss` says for the metrics."""
        weights = [p for role in roles for _, p in self.trained[role]]
        size, end = update_size(self, len(minibatch)), least(self, minibatch)
        for attempt in self.oom_policy.retry(unit(self, "update"), size, module=self, parameters=weights, least=end):
            with attempt, self.sharding.unsynced():
                stats = []
                for rows in cuts(self, minibatch, torch.arange(len(minibatch)), attempt.size):
                    loss, micro_stats = self.loss(minibatch.part(rows), tokens, sequences, roles)
                    self.manual_backward(loss * self.trainer.world_size)  # undoes the data-parallel mean
                    stats.append(micro_stats)
        if not self.oom_policy.recover:  # it has averaged, once all ranks had agreed
            self.sharding.average(weights)
        return stats

    def loss(self, micro: Experience, tokens: Tensor, sequences: Tensor, roles: list[str]) -> tuple[Tensor, Sums]:
        """Return a micro-batch's share of the minibatch's loss, and sums and counts for the metrics.

        Args:
            micro: b rows.
            tokens: Response tokens of the global minibatch.
            sequences: Its sequences.
            roles: Whose losses to add up: actor, critic.
        """
        ppo, mask = self.ppo, micro.loss_mask

        def total(token_loss: Tensor) -> Tensor:
            mode, width = ppo.loss_aggregation, self.sampling.max_new_tokens
            return aggregate(token_loss, mask, mode, tokens=tokens, sequences=sequences, width=width)

        loss = torch.zeros((), dtype=torch.float32, device=self.device)
        stats: Sums = {}
        n = mask.sum()
        if "actor" in roles:
            logprobs, entropy = self.views.actor(micro, entropy=True, **self.tempering)
            clip_high = ppo.clip if ppo.clip_high is None else ppo.clip_high
            token_loss, s = policy_loss(
                logprobs, micro.old_logprobs, micro.advantages, mask, ppo.clip, clip_high, ppo.dual_clip
            )
            loss = loss + total(token_loss)
            if ppo.entropy_coef:
                loss = loss - ppo.entropy_coef * total(entropy)
            if ppo.kl_loss_coef:
                assert micro.ref_logprobs is not None
                loss = loss + ppo.kl_loss_coef * total(
                    kl_estimate(logprobs, micro.ref_logprobs, ppo.kl_loss_estimator, mask)
                )
            stats = {
                "loss/policy_avg": (token_loss.detach().sum(), n),
                "policy/approxkl_avg": (s["approxkl"], n),
                "policy/clipfrac_avg": (s["clipfrac"], n),
                "policy/entropy_avg": (torch.where(mask, entropy.detach(), 0.0).sum(), n),
                "val/ratio": (s["ratio"], n),
                "val/ratio_sq": (s["ratio_sq"], n),
            }
            if ppo.dual_clip is not None:
                stats["policy/dual_clipfrac_avg"] = (s["dual_clipfrac"], n)
        if "critic" in roles:
            values, _ = self.views.critic(micro)
            assert micro.values is not None
            assert micro.returns is not None
            token_loss, s = value_loss(values, micro.values, micro.returns, mask, ppo.value_clip)
            loss = loss + ppo.vf_coef * total(token_loss)
            stats |= {"loss/value_avg": (token_loss.detach().sum(), n), "val/clipfrac_avg": (s["clipfrac"], n)}
        return loss, stats

    # ---------------------------------------------------------------------------------------- parts of an iteration

    def minibatches(self, rollout: Rollout, epoch: int) -> Iterator[Tensor]:
        """Yield the local rows of each global minibatch: a fresh permutation every epoch, the same on any rank count.

        The permutation is over the global batch; a rank takes what it holds of each minibatch.
        """
        index = rollout.prompts.index.cpu()
        total = int(self.reduce(torch.tensor(len(rollout), device=self.device)))
        preflight.check_batch(self, total)  # of loaders that preflight does not know
        bounds = [total * i // self.ppo.minibatches for i in range(self.ppo.minibatches + 1)]
        mixed = (self.seed * 1_000_003 + self.iteration) * 1_009 + epoch
        order = torch.randperm(total, generator=torch.Generator().manual_seed(mixed % 2**63))
        place = torch.empty_like(order)
        place[order] = torch.arange(total)
        mine = place[index]
        for start, stop in pairwise(bounds):
            rows = ((mine >= start) & (mine < stop)).nonzero()[:, 0]
            yield rows[mine[rows].argsort()]

    def evaluate_roles(self, rollout: Rollout) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run actor, critic and reference over the rollout, cut into the first epoch's micro-batches.

        The cut is the update's own, so with equal batch sizes the first ratio is exactly 1. Where the sampler's
        log-probs are the old ones, the actor runs over the first micro-batch alone, to measure how far off they are.

        Returns:
            (B, R) float32 each, 0 off the mask: old log-probs; values or None; reference log-probs or None.
        """
        views, shape = self.views, rollout.ids.shape
        minibatches = list(self.minibatches(rollout, epoch=0))
        size = score_size(self, max(map(len, minibatches)))  # a rank may have more of one than of another
        for attempt in self.oom_policy.retry(unit(self, "score"), size, module=self, least=least(self, rollout)):
            with attempt:
                zeros = torch.zeros(shape, dtype=torch.float32, device=rollout.ids.device)
                fresh, values, ref = zeros, zeros.clone(), zeros.clone()
                seen = torch.zeros(len(rollout), dtype=torch.bool, device=zeros.device)
                entropy_sum, skip = zeros.new_zeros(()), False
                for rows in minibatches:
                    for part in cuts(self, rollout, rows, attempt.size):
                        batch, n = rollout.part(part), len(part)  # 0 for a ghost, of which nothing is kept
                        width = batch.ids.shape[1]
                        if not skip:
                            logprobs, entropy = views.actor(batch, entropy=True, **self.tempering)
                            fresh[part, :width] = logprobs[:n]
                            entropy_sum += entropy[:n].sum()
                            seen[part] = True
                        skip = self.ppo.old_logprobs == "rollout"
                        if views.critic is not None:
                            values[part, :width] = views.critic(batch)[0][:n]
                        if views.reference is not None:
                            ref[part, :width] = views.reference(batch, **self.tempering)[0][:n]
        self.means.add("objective/entropy", entropy_sum, seen.sum())
        self.means.add_mean("rollout/logprob_gap", (rollout.logprobs - fresh).abs(), rollout.mask & seen[:, None])
        old = rollout.logprobs if skip else fresh
        return old, None if views.critic is None else values, None if views.reference is None else ref

    def dry_runs(self) -> dict[str, DryRun]:
        """Return what `OOMGuard` tries before training, by phase."""
        return dry_runs(self)

    def score_responses(self, rollout: Rollout) -> Scores:
        """Ask the rewards; a reward model that runs out of memory is given fewer texts at once."""

        def guard(size: int, body: Callable[[int], Tensor]) -> Tensor:
            return self.oom_policy.run("reward", size, body, module=self, apart=True)

        trunk = self.sharding.gathered(self.views.actor.store) if self.trunk_rewards else nullcontext()
        with trunk:  # then no rank waits for another's texts
            return self.rewards.score(rollout, self.tokenizer, guard)

    def value_at_cut(self, rollout: Rollout) -> Tensor:
        """(B,) float32: the critic's value after the last token of truncated responses, 0 for the others."""
        padded = nn.functional.pad(rollout.ids, (0, 1))
        longer = Rollout(rollout.prompts, padded, rollout.lengths + 1, rollout.stopped, padded.float())
        values = torch.zeros(len(longer), dtype=torch.float32, device=rollout.ids.device)
        size = score_size(self, -(-len(longer) // self.ppo.minibatches))
        for attempt in self.oom_policy.retry(unit(self, "score"), size, module=self, least=least(self, longer)):
            with attempt:
                for rows in cuts(self, longer, torch.arange(len(longer)), attempt.size):
                    part = longer.part(rows)
                    at_end = self.views.critic(part)[0].gather(1, part.lengths[:, None] - 1)[:, 0]
                    values[rows] = at_end[: len(rows)]
        return torch.where(rollout.stopped, 0.0, values)

    def shape_scores(self, scores: Scores, rollout: Rollout) -> Tensor:
        """(B,) float32: the scores as trained on: scaled, clipped, less the penalty for a missing stop token."""
        total = scores.total
        if self.ppo.scale_scores:
            self.score_scale.update(total[scores.keep], self.reduce)
            total = total / self.score_scale.std
        if self.ppo.score_clip is not None:
            total = total.clamp(-self.ppo.score_clip, self.ppo.score_clip)
        return torch.where(rollout.stopped, total, total - self.ppo.missing_eos_penalty)

    def end_iteration(self, experience: Experience) -> None:
        """Move schedule and KL controller, log every metric once, over all ranks."""
        metrics = self.means.compute(self.reduce, self.reduce_max)
        batch = int(self.reduce(torch.tensor(len(experience), device=self.device)))
        self.episodes += batch
        metrics["episode"] = float(self.episodes)
        metrics["kl_coef"] = self.kl.value
        metrics["optim/skipped_steps"] = float(self.skipped_steps)
        if "objective/kl" in metrics:
            self.kl.update(metrics["objective/kl"], batch)
        summary.derive(metrics, self)
        self.log_dict(metrics, batch_size=1)
        self.lr_schedulers().step()  # type: ignore[union-attr]
        self.iteration += 1
        self._iteration_end = time.perf_counter()

    # -------------------------------------------------------------------------------- validation, test, prediction

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Sample and score held-out prompts; logs `val/reward` for ModelCheckpoint and EarlyStopping."""
        self.evaluate_batch(batch, batch_idx, VALIDATE)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Sample and score test prompts; logs `test/reward`."""
        self.evaluate_batch(batch, batch_idx, TEST)

    def predict_step(self, batch: Any, batch_idx: int) -> list[dict[str, Any]]:
        """Return one dict a prompt: `prompt`, `response`, `stopped`, and the prompt's other columns."""
        with self.in_phase("rollout"):
            prompts = preflight.as_prompts(batch, self).repeat(self.eval_sampling.samples_per_prompt)
            rollout = self.generate(prompts, self.eval_sampling, PREDICT, batch_idx)
        return summary.sample_rows(rollout, None, self.tokenizer, limit=None)

    def evaluate_batch(self, batch: Any, batch_idx: int, stream: int) -> None:
        """Sample and score a batch of prompts that is not trained on."""
        prompts = preflight.as_prompts(batch, self).repeat(self.eval_sampling.samples_per_prompt)
        with self.in_phase("rollout"):
            rollout = self.generate(prompts, self.eval_sampling, stream, batch_idx)
        with self.in_phase("score"), torch.no_grad():
            scores = self.score_responses(rollout)
        summary.record_evaluation(self.eval_means, rollout, scores)
        self.samples = summary.sample_rows(rollout, scores, self.tokenizer)

    def on_validation_epoch_end(self) -> None:
        """Log the means over all held-out prompts; training goes on as if there had been no validation."""
        self.log_evaluation("val")
        checkpoint.release_rng(self)

    def on_test_epoch_end(self) -> None:
        """Log the means over all test prompts."""
        self.log_evaluation("test")

    def log_evaluation(self, prefix: str) -> None:
        """Log and forget the evaluation's means."""
        metrics, self.eval_means = self.eval_means.compute(self.reduce), Means()
        named = {f"{prefix}/{k}": v for k, v in metrics.items()}
        self.log_dict(named, batch_size=1, sync_dist=distributed())  # equal, but Lightning asks
