"""What PPO and the stages before it share: models by role, phases, the optimizer, exact checkpoints."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_ppo import checkpoint, preflight
from lit_ppo.algo.cut import by_sequences, by_tokens
from lit_ppo.checks import check_optimizer
from lit_ppo.config import AdamConfig, LoRAConfig, from_dict
from lit_ppo.hooks import after_configure_model
from lit_ppo.memory.retry import OOMPolicy
from lit_ppo.metrics import Means
from lit_ppo.optim import apply_options, build_optimizer, schedule
from lit_ppo.plan import live
from lit_ppo.ranks import gather, together
from lit_ppo.roles.quantized import loaded_by_each
from lit_ppo.sharding import sharding_for
from lit_ppo.sharding.materialize import Source
from lit_ppo.sharding.replicated import Replicated
from lit_ppo.speed import Work

NONFINITE_LIMIT = 3
"""So many updates with a non-finite gradient in a row stop the run."""


class Harness(LightningModule):
    """A LightningModule of models by role, trained by manual optimization: one batch is one iteration.

    Args:
        sources: What each role is made of, by the name of the argument.
        tokenizer: A tokenizer, where one is, or None: beside the first of the sources.
        lora: Train adapters instead of whole models.
        optim: Adam and the schedule.
        seed: Of everything that the module draws.

    Raises:
        TypeError: A seed that is no int.
    """

    stage: ClassVar[str]
    """Which of the three: sft, reward or ppo."""
    advice: ClassVar[str] = "lower the learning rate or `max_grad_norm`, or use float32."
    """What to try when gradients stay not finite."""
    layout = "separate"

    # Set past nn.Module's own __setattr__: a registered submodule would be saved, moved and counted as trained.
    sources: dict[str, Any]
    views: Any
    """The roles (`lit_ppo.roles.build.Roles`), once `configure_model` has run."""
    optim: AdamConfig
    _tokenizer: Any

    def __init__(
        self, sources: dict[str, Any], tokenizer: Any, lora: LoRAConfig | None, optim: AdamConfig, seed: int
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False  # `load_state_dict` checks the names itself: frozen trunks are not saved
        if not isinstance(seed, int):
            raise TypeError(f"`seed={seed!r}` must be an int.")
        self.lora = None if lora is None else from_dict(LoRAConfig, lora)
        self.optim, self.seed = optim, seed
        object.__setattr__(self, "sources", sources)
        object.__setattr__(self, "_tokenizer", tokenizer)
        object.__setattr__(self, "views", None)
        self.cache: dict[str, Any] = {}  # what was looked up once

        self.iteration = 0
        self.oom_policy = OOMPolicy()
        self.sharding = Replicated(None)
        self.means = Means()
        self.eval_means = Means()
        self.nonfinite_in_a_row = 0
        self.skipped_steps = 0
        self.dropped = False
        self.fingerprints: dict[str, str] = {}
        self.work: dict[str, Work] = {}
        self.peaks: dict[str, float] = {}  # GiB, by phase

        # The protocol that callbacks read (lit_ppo.callbacks); any module may offer the same.
        self.phase: str | None = None
        self.phase_listeners: list[Callable[[str | None], None]] = []
        self.gather_listeners: list[Callable[[nn.Module, bool], None]] = []
        self.role_transforms: list[Callable[[str, nn.Module], nn.Module]] = []
        self.role_load_kwargs: dict[str, dict[str, Any]] = {}
        self.samples: list[dict[str, Any]] = []
        self._iteration_end: float | None = None

    # ------------------------------------------------------------------------------------------------ construction

    @abstractmethod
    def check_run(self, stage: str) -> None:
        """Check everything that can be checked before a weight is loaded, on each rank by itself."""

    @abstractmethod
    def check_ranks(self) -> None:
        """Check that all ranks run the same thing."""

    @abstractmethod
    def build(self, *, empty: bool) -> Any:
        """Load the models and return the roles; with `empty`, on the meta device what another rank loads."""

    def setup(self, stage: str) -> None:
        """Check everything that can be checked before a weight is loaded."""
        together("the checks before the run", lambda: self.check_run(stage))
        self.check_ranks()
        self.sharding = sharding_for(self.trainer.strategy)
        self.sharding.listeners = self.gather_listeners
        checkpoint.save_atomically(self.trainer)
        after_configure_model(self.trainer, self, self, self.shard)

    def configure_model(self) -> None:
        """Load the models, once."""
        if self.views is None:
            ranks = 1 if self._trainer is None else self.trainer.world_size
            once = ranks > 1 and not self.role_transforms and not self.role_load_kwargs
            once = once and not any(loaded_by_each(source) for source in self.sources.values())
            empty = once and self.global_rank > 0
            self.adopt(together("loading the models", lambda: self.build(empty=empty)))
            if once:
                self.fingerprints = gather(self.fingerprints)[0]
            self.cache["weights are on rank 0"] = once

    def adopt(self, views: Any) -> None:
        """Take the models: what is trained as submodules, what is frozen as plain attributes."""
        object.__setattr__(self, "views", views)
        self.register()
        self.fingerprints = checkpoint.fingerprints(self)

    def finished(self, model: Any) -> AbstractContextManager[Any]:
        """Return a context in which a model of the roles is as it is to be exported."""
        return nullcontext()

    def register(self) -> None:
        """Make submodules of the stores that are trained, by the names of their roles; each once."""
        seen: list[Any] = []
        for role, view in self.views.saved().items():
            if not any(view.store is store for store in seen):
                setattr(self, role, view.store)
                seen.append(view.store)

    def shard(self) -> None:
        """Give each store its weights and its shape on this rank.

        After the callbacks that change layers, and before Lightning would wrap what is not wrapped.
        """
        broadcast = self.cache.pop("weights are on rank 0", False)
        placed: dict[int, tuple[nn.Module, torch.device | None]] = {}
        for role, view in self.views.all().items():
            store = view.store
            if id(store) not in placed and store.home is not None:
                placed[id(store)] = store, store.home
            elif id(store) not in placed:
                home, whole = self.placement(role, store)
                sharding = Replicated(self.trainer.strategy) if whole else self.sharding
                shaped = sharding.place(store, Source(broadcast, self.target_device, home))
                placed[id(store)] = shaped, home if sharding.sharded else None
            view.store, view.computes_on = placed[id(store)]
        self.register()

    def placement(self, role: str, store: nn.Module) -> tuple[torch.device, bool]:
        """Return where a role's weights are on this rank, and whether it has all of them under any strategy."""
        return self.target_device, False

    def configure_optimizers(self) -> Any:
        """One AdamW with a group per role, so that `global_step` counts updates; the schedule counts iterations."""
        groups = [
            {"params": [p for _, p in self.trained[options["name"]]], **options} for options in self.group_options
        ]
        check_optimizer(self, {p.dtype for group in groups for p in group["params"]})
        optimizer = build_optimizer(groups, self.optim, self.seed)
        scheduler = schedule(optimizer, self.optim, lambda: preflight.total_iterations(self))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch", "name": "lr"}}

    # ------------------------------------------------------------------------------------------------- small things

    @property
    @abstractmethod
    def rates(self) -> dict[str, float]:
        """The learning rate of each role that is trained."""

    @property
    @abstractmethod
    def max_grad_norm(self) -> float | None:
        """The gradient norm that each role is clipped to."""

    @property
    def updates(self) -> int:
        """Optimizer steps of an iteration."""
        return 1

    @property
    def varies(self) -> bool:
        """Whether an iteration may end before it has taken all its optimizer steps."""
        return False

    @property
    def roles(self) -> dict[str, nn.Module]:
        """The models by role, for callbacks and reports; several roles may be views of one."""
        return {} if self.views is None else {role: view.store for role, view in self.views.all().items()}

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the trained models, loaded when first used."""
        if self._tokenizer is None or isinstance(self._tokenizer, str):
            object.__setattr__(self, "_tokenizer", preflight.load_own_tokenizer(self, self._tokenizer))
        return self._tokenizer

    @property
    def trained(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Named parameters of each optimizer group."""
        return self.views.trained()

    @property
    def updated_together(self) -> list[list[str]]:
        """The roles that are trained now, in groups whose gradients are alive together."""
        return [list(self.trained)]

    @property
    def group_options(self) -> list[dict[str, Any]]:
        """Options of each optimizer group, as configured."""
        shared = {"betas": tuple(self.optim.betas), "eps": self.optim.eps, "weight_decay": self.optim.weight_decay}
        return [{"name": role, "lr": self.rates[role], **shared} for role in self.trained]

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

    def cuts(self, rows: Tensor, size: int, tokens: list[int] | None = None) -> list[Tensor]:
        """Cut rows into parts: one or more, and as many on every rank where forwards are collective.

        Those beyond a rank's own rows are empty, which `Rollout.part` makes a ghost of.

        Args:
            rows: (b,) int64 row numbers, on the CPU.
            size: Rows of a part; its tokens, where `tokens` are given.
            tokens: Of each of the rows.
        """
        parts = by_sequences(len(rows), size) if tokens is None else by_tokens(tokens, size)
        rounds = torch.tensor(max(1, len(parts)))
        if self.sharding.sharded:
            rounds = self.reduce_max(rounds)
        return [rows[part] for part in parts] + [rows[:0]] * (int(rounds) - len(parts))

    def set_mode(self, *, train: bool) -> None:
        """Put the trained roles in train mode for the update (gradient checkpointing needs it), else in eval mode."""
        for view in self.views.saved().values():
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
                self.peaks[name] = max(peak, self.peaks.get(name, 0.0))
            self.means.add(f"time/{name}", time.perf_counter() - start, 1)
            self.phase = None
            for listener in self.phase_listeners:
                listener(None)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Clip each role's gradient by its global norm; drop a step whose gradient is not finite.

        Lightning calls this after unscaling, so it holds for every precision.
        """
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        norms = {role: self.sharding.clip([p for _, p in named], limit) for role, named in self.trained.items()}
        found = {role: norm for role, norm in norms.items() if norm is not None}
        for role, norm in found.items():
            self.means.add(f"optim/grad_norm_{role}", norm if norm.isfinite() else 0.0, float(norm.isfinite()))
        if all(norm.isfinite() for norm in found.values()):
            if any(role in found for roles in self.updated_together[-1:] for role in roles):  # the step is whole
                self.nonfinite_in_a_row = 0
            return
        optimizer.zero_grad(set_to_none=True)  # the step that follows then changes nothing
        self.dropped = True
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            return  # the scaler looks for its scale by overflowing: not a fault
        self.nonfinite_in_a_row += 1
        self.skipped_steps += 1  # of this iteration
        self.report_nonfinite()

    def uncounted_step(self, optimizer: Any) -> None:
        """Step as Lightning does (its hooks, its precision) without counting it in `global_step`."""
        self.trainer.strategy.optimizer_step(optimizer.optimizer, lambda: None)

    def empty_step(self, optimizer: Any) -> None:
        """Count a step for which there are no gradients; a GradScaler would insist on some."""
        plugin: Any = self.trainer.precision_plugin
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None:
            plugin.scaler = None
        try:
            optimizer.step()
        finally:
            if scaler is not None:
                plugin.scaler = scaler

    def report_nonfinite(self) -> None:
        """Warn of a dropped update; stop the run when `NONFINITE_LIMIT` in a row were.

        Raises:
            FloatingPointError: The limit is reached.
        """
        count, iteration = self.nonfinite_in_a_row, self.iteration
        if count < NONFINITE_LIMIT:
            rank_zero_warn(
                f"The gradient of iteration {iteration} is not finite: this update is dropped ({count} in a row)."
            )
            return
        bad = [
            f"{role}.{name}"
            for role, named in self.trained.items()
            for name, parameter in named
            if not getattr(parameter, "_local_tensor", parameter).isfinite().all()  # FSDP2's share of this rank
        ]
        raise FloatingPointError(
            f"{count} updates in a row had a gradient that is not finite; the run stops at iteration {iteration}, and "
            "its last checkpoint is intact. "
            + (f"Weights that are not finite: {', '.join(bad[:5])}. " if bad else "All weights are finite still. ")
            + f"{self.advice[0].upper()}{self.advice[1:]}"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave the strategy behind in a copy or a pickle, as Lightning leaves the trainer."""
        return {**super().__getstate__(), "sharding": Replicated(None)}

    # ------------------------------------------------------------------------------------------------- checkpoints

    def counters(self) -> dict[str, Any]:
        """Return as plain data what is counted and controlled from one iteration to the next."""
        return {"iteration": self.iteration, "nonfinite_in_a_row": self.nonfinite_in_a_row}

    def load_counters(self, saved: dict[str, Any]) -> None:
        """Take back what `counters` returned."""
        self.iteration, self.nonfinite_in_a_row = saved["iteration"], saved["nonfinite_in_a_row"]

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """Return what is trained: with adapters, not the frozen trunk under them."""
        return checkpoint.keep_trained(self, super().state_dict(*args, prefix=prefix, **kwargs), prefix)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` returned; anything missing or foreign is an error that says so."""
        checkpoint.check_keys(self, state_dict)
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        result.missing_keys.clear()  # frozen weights, of which Lightning would warn
        return result

    def on_fit_end(self) -> None:
        """Say what the peaks of memory were, beside the forecast."""
        live.compare(self)

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
        """Put back the random states of a resumed run, after everything else has drawn; apply this run's options."""
        checkpoint.restore_rng(self)
        if converted := self.cache.pop("conversions", None):
            rank_zero_info(f"The optimizer goes on in another form than the checkpoint's: {'; '.join(converted)}.")
        changed = apply_options(self.optimizers(), self.lr_schedulers(), self.group_options)
        if changed:
            rank_zero_info(
                f"The optimizer goes on with this run's options, not the checkpoint's: {', '.join(changed)}."
            )
