"""What surrounds the algorithm of `lit_ppo.module`: arguments, checks, the frozen roles, the rollout engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lit_ppo import checkpoint, checks, preflight, summary
from lit_ppo.algo.controllers import AdaptiveKL, FixedKL, RunningStd
from lit_ppo.base import Harness
from lit_ppo.config import LoRAConfig, OptimConfig, PPOConfig, RoleConfig, SamplingConfig, from_dict
from lit_ppo.plan import live
from lit_ppo.rewards import TrunkReward, build_rewards
from lit_ppo.rewards.config import RewardConfig
from lit_ppo.roles.build import Roles, build_roles
from lit_ppo.roles.fused_layers import fuse_if
from lit_ppo.rollout.base import RolloutEngine, Sampling
from lit_ppo.rollout.select import build_engine
from lit_ppo.speed import Work


class PPOHarness(Harness):
    """Everything of a PPO module but its algorithm.

    Args:
        actor: The policy: a folder, a Hugging Face id, a `RoleConfig`, or a transformers model.
        reward: What is maximised: a Python function (or its import path), a sequence-classification model (path, id or
            module), a `RewardConfig`, or a list of these. See `lit_ppo.rewards`.
        critic: The value model. None: starts from the reward model if that has the actor's architecture, else from the
            actor with a head that outputs 0.
        reference: What the KL is measured against. None: the actor as it starts.
        tokenizer: The policy's tokenizer or where it is. None: beside the actor.
        layout: "separate", or "shared": policy, value and reference on one frozen trunk, by adapters (needs `lora`).
        lora: Train adapters instead of the whole model.
        sampling: How training responses are sampled.
        eval_sampling: How validation, test and predict sample. None: as `sampling`, one sample a prompt at temperature
            0.01.
        ppo: The algorithm.
        optim: Learning rates, Adam and the schedule.
        seed: Of the sampling noise, the order of minibatches and fresh weights.

    Raises:
        ValueError: An option that cannot work. Everything that can be checked without a weight is checked in `setup`,
            before any is loaded.
    """

    stage = "ppo"
    advice = (
        "look at the last rewards and `policy/approxkl_avg`; lower `optim.actor_lr` or `ppo.max_grad_norm`, clip "
        "scores (`ppo.score_clip`), or use float32."
    )
    optim: OptimConfig
    actor: Any
    """The store of the policy."""
    critic: Any
    """The store of the value model, where it is one of its own."""
    rewards: Any
    """The `RewardSum`, or None. Set, as `engine`, past nn.Module's own __setattr__."""
    engine: RolloutEngine

    def __init__(
        self,
        actor: str | RoleConfig | nn.Module,
        reward: str | RewardConfig | nn.Module | Callable[..., Any] | list[str | RewardConfig] | None = None,
        critic: str | RoleConfig | nn.Module | None = None,
        reference: str | RoleConfig | nn.Module | None = None,
        tokenizer: Any = None,
        layout: str = "separate",
        lora: LoRAConfig | None = None,
        sampling: SamplingConfig | None = None,
        eval_sampling: SamplingConfig | None = None,
        ppo: PPOConfig | None = None,
        optim: OptimConfig | None = None,
        seed: int = 0,
    ) -> None:
        sources = {"actor": actor, "critic": critic, "reference": reference}
        super().__init__(sources, tokenizer, lora, from_dict(OptimConfig, optim), seed)
        self.sampling_config = from_dict(SamplingConfig, sampling)
        self.eval_sampling_config = preflight.eval_sampling(self.sampling_config, eval_sampling)
        self.ppo = from_dict(PPOConfig, ppo)
        self.layout = layout
        preflight.check_options(self.sampling_config, self.ppo, layout, self.lora)
        object.__setattr__(self, "rewards", None if reward is None else build_rewards(reward))
        given = {"sampling": self.sampling_config, "eval_sampling": self.eval_sampling_config, "ppo": self.ppo}
        checkpoint.save_hyperparameters(self, {**sources, "reward": reward, "layout": layout, **given})

        self.episodes = 0
        self.kl = (
            AdaptiveKL(self.ppo.kl_coef, self.ppo.kl_target, self.ppo.kl_horizon)
            if self.ppo.kl_target is not None
            else FixedKL(self.ppo.kl_coef)
        )
        self.score_scale = RunningStd()
        self.updated = False

    # ------------------------------------------------------------------------------------------------ construction

    def check_run(self, stage: str) -> None:
        """Check sources, tokenizer, lengths, batch arithmetic and the trainer's options; load no weights."""
        preflight.check_run(self, stage)

    def check_ranks(self) -> None:
        """Check that all ranks run the same thing."""
        preflight.check_ranks(self)

    def setup(self, stage: str) -> None:
        """Check everything that can be checked before a weight is loaded."""
        super().setup(stage)
        if stage == "fit":
            plan = replace(preflight.plan(self), true_dtype=preflight.true_dtype(self))
            checks.check_optimizer(self, checks.trained_dtypes(plan, self.target_device))

    def build(self, *, empty: bool) -> Roles:
        """Load the models and return the roles; with `empty`, on the meta device what another rank loads."""
        plan = preflight.plan(self)
        plan.transforms, plan.load_kwargs = self.role_transforms, self.role_load_kwargs
        plan.true_dtype, plan.empty = preflight.true_dtype(self), empty
        plan.frozen = [reward.frozen() for reward in self.trunk_rewards]
        return build_roles(plan, self.target_device)

    def configure_model(self) -> None:
        """Load the models, once."""
        super().configure_model()
        if self.rewards is not None and self._trainer is not None:
            self.rewards.load(self.target_device, self.role_load_kwargs, self.role_transforms)
            fuse_if(self.ppo.fused_layers, self.rewards.models.values())
            self.fingerprints |= checkpoint.reward_fingerprints(self)

    def adopt(self, views: Roles) -> None:
        """Take the models, and make the engine that samples from the actor."""
        super().adopt(views)
        self.bind_rewards()
        fuse_if(self.ppo.fused_layers, (view.store for view in views.all().values()))
        if self.ppo.packing and (reason := views.pack()) is not None:
            rank_zero_info(f"The models run padded: {reason}.")
        object.__setattr__(
            self,
            "engine",
            build_engine(self.ppo.rollout_engine, views.actor, prefill_tokens=self.ppo.rollout_prefill_tokens),
        )
        store = views.actor.store
        self.work = {"actor": Work.of(store, store.base.config)}
        if views.critic is not None:
            store = views.critic.store
            self.work["critic"] = Work.of(store, store.base.config, without=store.base.get_output_embeddings())

    @property
    def trunk_rewards(self) -> list[TrunkReward]:
        """The rewards that are adapters of the actor's trunk, in a run that scores."""
        return [] if self.rewards is None or self._trainer is None else self.rewards.on_trunk

    def bind_rewards(self) -> None:
        """Let the rewards on the actor's trunk compute with it, in forwards no larger than those of the other roles."""
        for reward in self.trunk_rewards:
            rows = self.ppo.score_batch_size or self.ppo.micro_batch_size
            reward.bind(self.views.actor, rows, self.ppo.micro_batch_tokens)

    def shard(self) -> None:
        """Give each store its weights and its shape on this rank, and the rewards on the trunk what came of it."""
        super().shard()
        self.bind_rewards()

    def placement(self, role: str, store: nn.Module) -> tuple[torch.device, bool]:
        """Return where a role's weights are on this rank, and whether it has all of them under any strategy."""
        home, whole = self.target_device, False
        config = preflight.plan(self).reference if role == "reference" else None
        if isinstance(config, RoleConfig):
            home = self.target_device if config.device is None else torch.device(config.device)
            whole = config.device is not None or config.sharded is False
        if role == "reference" and not all(p.is_floating_point() for p in store.parameters()):
            whole = True  # quantized
        return home, whole

    def configure_callbacks(self) -> list[Any]:
        """Show phase, tokens per second and reward on the progress bar."""
        from lit_ppo.callbacks.progress import RolloutProgress

        there = any(isinstance(callback, RolloutProgress) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        return [] if there else [RolloutProgress()]

    def place_frozen(self) -> None:
        """Move what Lightning does not see (frozen roles, reward models) to where it computes."""
        reference = self.views.reference
        moves = reference is not None and reference.store is not self.views.actor.store and reference.store.home is None
        if moves and not self.sharding.sharded:
            config = preflight.plan(self).reference
            device = config.device if isinstance(config, RoleConfig) and config.device else self.device
            reference.store.to(device)
        if self.rewards is not None:
            self.rewards.load(self.device)

    def on_fit_start(self) -> None:
        """Place the frozen roles, check the heads, print the effective configuration."""
        self.place_frozen()
        with torch.no_grad(), self.sharding.gathered(self.actor):
            self.actor.check_head("actor")
            with self.trainer.precision_plugin.forward_context():
                reason = self.actor.packing_fails()
        if reason is not None:
            self.views.pad()
            rank_zero_info(f"The models run padded: {reason}.")
        self.set_mode(train=True)  # what Lightning expects to find; every phase sets its own
        summary.print_table(self, summary.batch_arithmetic(self))
        live.announce(self)

    def on_validation_start(self) -> None:
        """Place the frozen roles, for a validation without a fit; keep training's random states."""
        self.save_logs()
        self.place_frozen()
        checkpoint.hold_rng(self)

    def on_test_start(self) -> None:
        """Place the frozen roles."""
        self.place_frozen()

    # ------------------------------------------------------------------------------------------------- small things

    @property
    def sampling(self) -> Sampling:
        """Training's sampling options as token ids."""
        return preflight.resolved(self, self.sampling_config)

    @property
    def eval_sampling(self) -> Sampling:
        """Evaluation's sampling options as token ids."""
        return preflight.resolved(self, self.eval_sampling_config)

    @property
    def tempering(self) -> dict[str, Any]:
        """What every log-prob is taken of: the distribution that is sampled from."""
        return {"temperature": self.sampling.temperature, "suppress": self.sampling.suppress}

    @property
    def rates(self) -> dict[str, float]:
        """The learning rate of each role that is trained."""
        o = self.optim
        return {"actor": o.actor_lr, "critic": o.actor_lr if o.critic_lr is None else o.critic_lr}

    @property
    def max_grad_norm(self) -> float | None:
        """The gradient norm that each role is clipped to."""
        return self.ppo.max_grad_norm

    @property
    def updates(self) -> int:
        """Optimizer steps of an iteration."""
        return self.ppo.epochs * self.ppo.minibatches

    @property
    def varies(self) -> bool:
        """Whether an iteration may end before it has taken all its optimizer steps."""
        return self.ppo.target_kl is not None

    @property
    def trains_actor(self) -> bool:
        """False during the critic's warm-up."""
        return self.iteration >= self.ppo.critic_warmup_iterations

    @property
    def updated_together(self) -> list[list[str]]:
        """The roles that are trained now, one by one if so configured; not one that something else holds frozen."""
        return self.in_groups([role for role in self.thawed if role != "actor" or self.trains_actor])

    @property
    def thawed(self) -> list[str]:
        """The roles that have something to train, in the critic's warm-up too."""
        return [role for role, named in self.trained.items() if any(p.requires_grad for _, p in named)]

    def in_groups(self, roles: list[str]) -> list[list[str]]:
        """Return groups of roles whose gradients are alive together."""
        return [[role] for role in roles] if self.ppo.sequential_roles else [roles] if roles else []

    @property
    def roles(self) -> dict[str, nn.Module]:
        """The models by role, for callbacks and reports; several roles may be views of one."""
        return summary.role_modules(self)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes beside parameters and buffers, by name, for `lit_ppo.memory.ledger`: what the engine holds."""
        return {} if self.views is None else self.engine.memory_bytes()

    # ------------------------------------------------------------------------------------------------- checkpoints

    def counters(self) -> dict[str, Any]:
        """Return as plain data what is counted and controlled from one iteration to the next."""
        controllers = {"kl": self.kl.state_dict(), "score_scale": self.score_scale.state_dict()}
        return super().counters() | {"episodes": self.episodes} | controllers

    def load_counters(self, saved: dict[str, Any]) -> None:
        """Take back what `counters` returned."""
        super().load_counters(saved)
        self.episodes = saved["episodes"]
        self.kl.load_state_dict(saved["kl"])
        self.score_scale.load_state_dict(saved["score_scale"])

    def on_train_start(self) -> None:
        """Put back the random states of a resumed run; check the critic's warm-up against the run's length."""
        super().on_train_start()
        warmup = self.ppo.critic_warmup_iterations
        if warmup and not preflight.endless(self.trainer) and warmup >= (total := preflight.total_iterations(self)):
            raise ValueError(
                f"`ppo.critic_warmup_iterations={warmup}` leaves nothing of the run's {total} iterations: the policy "
                "would never be trained."
            )
