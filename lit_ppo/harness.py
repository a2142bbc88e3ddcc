"""What surrounds the algorithm of `lit_ppo.module`: construction, checks, modes, the optimizer, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lit_ppo import checkpoint, checks, preflight, summary
from lit_ppo.algo.controllers import AdaptiveKL, FixedKL, RunningStd
from lit_ppo.config import LoRAConfig, OptimConfig, PPOConfig, RewardConfig, RoleConfig, SamplingConfig, from_dict
from lit_ppo.hooks import after_configure_model
from lit_ppo.memory.retry import OOMPolicy
from lit_ppo.metrics import Means
from lit_ppo.optim import apply_options, build_optimizer, schedule
from lit_ppo.ranks import gather, together
from lit_ppo.rewards import build_rewards
from lit_ppo.roles.build import Roles, build_roles
from lit_ppo.rollout.base import RolloutEngine, Sampling
from lit_ppo.rollout.select import build_engine
from lit_ppo.sharding import sharding_for
from lit_ppo.sharding.materialize import Source
from lit_ppo.sharding.replicated import Replicated
from lit_ppo.speed import Work


class PPOHarness(LightningModule):
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

    # Set past nn.Module's own __setattr__: see __init__.
    sources: dict[str, Any]
    views: Any
    """The roles (`lit_ppo.roles.build.Roles`), once `configure_model` has run."""
    rewards: Any
    """The `RewardSum`, or None."""
    engine: RolloutEngine
    _tokenizer: Any

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
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False  # `load_state_dict` checks the names itself: frozen trunks are not saved
        self.sampling_config = from_dict(SamplingConfig, sampling)
        self.eval_sampling_config = preflight.eval_sampling(self.sampling_config, eval_sampling)
        self.ppo = from_dict(PPOConfig, ppo)
        self.optim = from_dict(OptimConfig, optim)
        self.lora = None if lora is None else from_dict(LoRAConfig, lora)
        if not isinstance(seed, int):
            raise TypeError(f"`seed={seed!r}` must be an int.")
        self.layout, self.seed = layout, seed
        preflight.check_options(self.sampling_config, self.ppo, layout, self.lora)
        # Plain attributes: a registered submodule would be saved, moved and counted as part of what is trained.
        object.__setattr__(self, "sources", {"actor": actor, "critic": critic, "reference": reference})
        object.__setattr__(self, "_tokenizer", tokenizer)
        object.__setattr__(self, "rewards", None if reward is None else build_rewards(reward))
        object.__setattr__(self, "views", None)
        self.cache: dict[str, Any] = {}  # what was looked up once
        checkpoint.save_hyperparameters(self, reward)

        self.iteration = 0
        self.episodes = 0
        self.kl = (
            AdaptiveKL(self.ppo.kl_coef, self.ppo.kl_target, self.ppo.kl_horizon)
            if self.ppo.kl_target is not None
            else FixedKL(self.ppo.kl_coef)
        )
        self.score_scale = RunningStd()
        self.oom_policy = OOMPolicy()
        self.sharding = Replicated(None)
        self.means = Means()
        self.eval_means = Means()
        self.nonfinite_in_a_row = 0
        self.skipped_steps = 0
        self.updated = False
        self.fingerprints: dict[str, str] = {}
        self.work: dict[str, Work] = {}

        # The protocol that callbacks read (lit_ppo.callbacks); any module may offer the same.
        self.phase: str | None = None
        self.phase_listeners: list[Callable[[str | None], None]] = []
        self.role_transforms: list[Callable[[str, nn.Module], nn.Module]] = []
        self.role_load_kwargs: dict[str, dict[str, Any]] = {}
        self.samples: list[dict[str, Any]] = []
        self._iteration_end: float | None = None

    # ------------------------------------------------------------------------------------------------ construction

    def setup(self, stage: str) -> None:
        """Check everything that can be checked before a weight is loaded."""
        together("the checks before the run", lambda: preflight.check_run(self, stage))
        preflight.check_ranks(self)
        self.sharding = sharding_for(self.trainer.strategy)
        if stage == "fit":
            checks.check_optimizer(self, replace(preflight.plan(self), true_dtype=preflight.true_dtype(self)))
        checkpoint.save_atomically(self.trainer)
        after_configure_model(self.trainer, self, self, self.shard)

    def configure_model(self) -> None:
        """Load the models, once."""
        if self.views is None:
            plan = preflight.plan(self)
            plan.transforms, plan.load_kwargs = self.role_transforms, self.role_load_kwargs
            plan.true_dtype = preflight.true_dtype(self)
            ranks = 1 if self._trainer is None else self.trainer.world_size
            once = ranks > 1 and not plan.transforms and not plan.load_kwargs
            plan.empty = once and self.global_rank > 0
            self.adopt(together("loading the models", lambda: build_roles(plan, self.target_device)))
            if once:
                self.fingerprints = gather(self.fingerprints)[0]
            self.cache["weights are on rank 0"] = once
        if self.rewards is not None and self._trainer is not None:
            self.rewards.load(self.target_device, self.role_load_kwargs, self.role_transforms)
            self.fingerprints |= checkpoint.reward_fingerprints(self)

    def adopt(self, views: Roles) -> None:
        """Take the models: what is trained as submodules, what is frozen as plain attributes."""
        object.__setattr__(self, "views", views)
        self.actor = views.actor.store
        if views.critic is not None and views.critic.store is not views.actor.store:
            self.critic = views.critic.store
        object.__setattr__(self, "engine", build_engine(self.ppo.rollout_engine, views.actor))
        store = views.actor.store
        self.work = {"actor": Work.of(store, store.base.config)}
        if views.critic is not None:
            store = views.critic.store
            self.work["critic"] = Work.of(store, store.base.config, without=store.base.get_output_embeddings())
        self.fingerprints = checkpoint.fingerprints(self)

    def shard(self) -> None:
        """Give each store its weights and its shape on this rank.

        After the callbacks that change layers, and before Lightning would wrap what is not wrapped.
        """
        broadcast = self.cache.pop("weights are on rank 0", False)
        placed: dict[int, tuple[nn.Module, torch.device | None]] = {}
        for role in ("actor", "critic", "reference"):
            view = getattr(self.views, role)
            if view is None:
                continue
            store = view.store
            if id(store) not in placed:
                config = preflight.plan(self).reference if role == "reference" else None
                home, whole = self.target_device, False
                if isinstance(config, RoleConfig):
                    home = self.target_device if config.device is None else torch.device(config.device)
                    whole = config.device is not None or config.sharded is False
                if role == "reference" and not all(p.is_floating_point() for p in store.parameters()):
                    whole = True  # quantized
                sharding = Replicated(self.trainer.strategy) if whole else self.sharding
                shaped = sharding.place(store, Source(broadcast, self.target_device, home))
                placed[id(store)] = shaped, home if sharding.sharded else None
            view.store, view.computes_on = placed[id(store)]
        self.actor = self.views.actor.store
        if self.views.critic is not None and self.views.critic.store is not self.actor:
            self.critic = self.views.critic.store

    def configure_optimizers(self) -> Any:
        """One AdamW with a group per role, so that `global_step` counts PPO updates; the schedule counts iterations."""
        groups = [
            {"params": [p for _, p in self.trained[options["name"]]], **options} for options in self.group_options
        ]
        optimizer = build_optimizer(groups, self.optim, self.seed)
        scheduler = schedule(optimizer, self.optim, lambda: preflight.total_iterations(self))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch", "name": "lr"}}

    def configure_callbacks(self) -> list[Any]:
        """Show phase, tokens per second and reward on the progress bar."""
        from lit_ppo.callbacks.progress import RolloutProgress

        there = any(isinstance(callback, RolloutProgress) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        return [] if there else [RolloutProgress()]

    def place_frozen(self) -> None:
        """Move what Lightning does not see (frozen roles, reward models) to where it computes."""
        reference = self.views.reference
        if reference is not None and reference.store is not self.views.actor.store and not self.sharding.sharded:
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
        self.set_mode(train=True)  # what Lightning expects to find; every phase sets its own
        summary.print_table(self)

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
    def tokenizer(self) -> Any:
        """The policy's tokenizer, loaded when first used."""
        if self._tokenizer is None or isinstance(self._tokenizer, str):
            object.__setattr__(self, "_tokenizer", preflight.load_policy_tokenizer(self, self._tokenizer))
        return self._tokenizer

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
    def trained(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Named parameters of each optimizer group."""
        return self.views.trained()

    @property
    def group_options(self) -> list[dict[str, Any]]:
        """Options of each optimizer group, as configured."""
        o = self.optim
        rates = {"actor": o.actor_lr, "critic": o.actor_lr if o.critic_lr is None else o.critic_lr}
        shared = {"betas": tuple(o.betas), "eps": o.eps, "weight_decay": o.weight_decay}
        return [{"name": role, "lr": rates[role], **shared} for role in self.trained]

    @property
    def trains_actor(self) -> bool:
        """False during the critic's warm-up."""
        return self.iteration >= self.ppo.critic_warmup_iterations

    @property
    def roles(self) -> dict[str, nn.Module]:
        """The models by role, for callbacks and reports; several roles may be views of one."""
        return summary.role_modules(self)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes beside parameters and buffers, by name, for `lit_ppo.memory.ledger`: what the engine holds."""
        return {} if self.views is None else self.engine.memory_bytes()

    @property
    def target_device(self) -> torch.device:
        """Where this rank computes: known from the trainer before Lightning moves anything."""
        return self.trainer.strategy.root_device if self._trainer is not None else self.device

    def reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Sum a tensor over ranks."""
        if self._trainer is None or self.trainer.world_size == 1:
            return x
        reduced: Any = self.trainer.strategy.reduce(x.to(self.device), reduce_op=op)
        return reduced.to(x.device)

    def reduce_max(self, x: Tensor) -> Tensor:
        """Take the maximum of a tensor over ranks."""
        return self.reduce(x, "max")

    def set_mode(self, *, train: bool) -> None:
        """Put the trained roles in train mode for the update (gradient checkpointing needs it), else in eval mode."""
        for view in (self.views.actor, self.views.critic):
            if view is not None:
                view.store.train(train)

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """Time a phase, measure its peak memory, and tell listeners."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.phase = name
        for listener in self.phase_listeners:
            listener(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            if cuda:
                torch.cuda.synchronize(self.device)
                peak = torch.cuda.max_memory_allocated(self.device) / 2**30
                self.means.add(f"memory/{name}_peak_gib", peak, 1)
            self.means.add(f"time/{name}", time.perf_counter() - start, 1)
            self.phase = None
            for listener in self.phase_listeners:
                listener(None)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the strategy behind in a copy or a pickle, as Lightning leaves the trainer."""
        return {**super().__getstate__(), "sharding": Replicated(None)}

    # ------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """Return what is trained: with adapters, not the frozen trunk under them."""
        return checkpoint.keep_trained(self, super().state_dict(*args, prefix=prefix, **kwargs), prefix)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` returned; anything missing or foreign is an error that says so."""
        checkpoint.check_keys(self, state_dict)
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        result.missing_keys.clear()  # frozen weights, of which Lightning would warn
        return result

    def on_after_backward(self) -> None:
        """Leave it to the strategy what becomes of a micro-batch's gradients."""
        self.sharding.after_backward()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Have the last iteration's metrics written."""
        self.save_logs()

    def save_logs(self) -> None:
        """Have loggers write what they hold (CSVLogger holds 100 rows), so that a killed run keeps its metrics."""
        for logger in self.loggers:
            logger.save()

    def on_save_checkpoint(self, ckpt: dict[str, Any]) -> None:
        """Save counters, controllers, random states and the fingerprints of the frozen roles."""
        self.save_logs()
        ckpt["lit_ppo"] = checkpoint.state(self)
        checkpoint.name_optimizer_states(self, ckpt)

    def on_load_checkpoint(self, ckpt: dict[str, Any]) -> None:
        """Go on as if nothing had happened, or say why that is impossible."""
        checkpoint.restore(self, ckpt)

    def on_train_start(self) -> None:
        """Put back the random states of a resumed run, after everything else has drawn."""
        checkpoint.restore_rng(self)
        warmup = self.ppo.critic_warmup_iterations
        if warmup and not preflight.endless(self.trainer) and warmup >= (total := preflight.total_iterations(self)):
            raise ValueError(
                f"`ppo.critic_warmup_iterations={warmup}` leaves nothing of the run's {total} iterations: the policy "
                "would never be trained."
            )
        changed = apply_options(self.optimizers(), self.lr_schedulers(), self.group_options)
        if changed:
            rank_zero_info(
                f"The optimizer goes on with this run's options, not the checkpoint's: {', '.join(changed)}."
            )
