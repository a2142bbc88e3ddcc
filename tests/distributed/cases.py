"""Runs that must be the same on any number of ranks, and the strategies to run them under."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor

from lit_ppo import (
    LoRAConfig,
    OptimConfig,
    PPOConfig,
    PPOLightningModule,
    PromptDataModule,
    RewardConfig,
    RoleConfig,
    SamplingConfig,
)
from lit_ppo.callbacks import FreezeParameters, GradientCheckpointing, OOMGuard, QuantizeRewardModel
from lit_ppo.experience import Rollout
from lit_ppo.roles.names import clean_name, saved_names
from lit_ppo.rollout.base import TRAIN

ITERATIONS = 5
TIED = "llama-tied"


def wordy(responses: list[str], **_: Any) -> list[float]:
    """A reward that differs from response to response."""
    return [sum(int(w[1:]) % 7 for w in r.split()) / 10 for r in responses]


CASES: dict[str, dict[str, Any]] = {
    # tied embeddings, accumulation, an adaptive KL, statistics over ranks, and an actor that rests at first
    "full": {
        "ppo": PPOConfig(
            epochs=2,
            minibatches=2,
            micro_batch_size=2,
            kl_target=0.5,
            kl_horizon=50,
            scale_scores=True,
            whiten_rewards=True,
            critic_warmup_iterations=1,
            max_grad_norm=0.5,
        ),
    },
    "shared": {"lora": LoRAConfig(r=4), "layout": "shared"},
    # float32 adapters and heads on a bfloat16 trunk, as `auto` has it on a GPU: FSDP1 cannot flatten them together
    "two dtypes": {"lora": LoRAConfig(r=4), "ppo": PPOConfig(epochs=2, minibatches=2, micro_batch_size=1)},
    # all of the callbacks at once: layers that thaw, layers that never train, recomputation, a reward model in 4 bits
    "callbacks": {"reward": [wordy, RewardConfig(source="REWARD", weight=0.5, name="model")]},
    # a reward model that is a third adapter of the trunk, read from micro-batches of another cut
    "trunk": {
        "lora": LoRAConfig(r=4, target_modules=["q_proj", "up_proj"]),
        "layout": "shared",
        "reward": [wordy, RewardConfig(source="ADAPTER", trunk="actor", name="model")],
        "ppo": PPOConfig(epochs=2, micro_batch_size=3),
    },
    # three prompts: with four ranks, one has none; micro-batches by tokens, more on one rank than on another
    "scarce": {
        "lora": LoRAConfig(r=4),
        "ppo": PPOConfig(epochs=2, bootstrap_truncated=True, max_grad_norm=0.1, micro_batch_tokens=9),
    },
    "no critic": {
        "ppo": PPOConfig(epochs=2, advantage="grpo", kl_loss_coef=0.1, loss_aggregation="seq_mean_token_mean"),
        "sampling": SamplingConfig(max_new_tokens=6, temperature=1.0, samples_per_prompt=2),
        "optim": OptimConfig(actor_lr=1e-3),
    },
}
PROMPTS = {"scarce": 3}
DTYPES = {"two dtypes": "bfloat16"}
"""Of the actor's weights."""
CALLBACKS: dict[str, Any] = {
    "shared": lambda: [GradientCheckpointing()],
    "callbacks": lambda: [
        GradientCheckpointing(),
        FreezeParameters("first:1", until="step 6"),
        FreezeParameters("embeddings"),
        QuantizeRewardModel(),
        OOMGuard(),
    ],
}


def folders() -> dict[str, str]:
    """What the cases load; the same folders on every rank."""
    return {"actor": tiny.folder(TIED), "reward": tiny.folder("qwen2", labels=1), "adapter": tiny.adapter(TIED)}


def module(
    case: str, actor: str, reward: str, adapter: str, dtype: str = "auto", embeddings: str = "none", **changes: Any
) -> PPOLightningModule:
    """The module of a case; with a dtype for the actor's weights, where the case has none."""
    options = {
        "actor": RoleConfig(source=actor, dtype=DTYPES.get(case, dtype), quantize_embeddings=embeddings),
        "reward": wordy,
        "sampling": SamplingConfig(max_new_tokens=6, temperature=1.0),
        "ppo": PPOConfig(epochs=2, minibatches=2),
        "optim": OptimConfig(actor_lr=1e-3, critic_lr=2e-3),
    }
    options |= CASES[case]
    if isinstance(options["reward"], list):
        model = options["reward"][1]
        options["reward"] = [wordy, replace(model, source=reward if model.trunk == "own" else adapter)]
    return PPOLightningModule(**(options | changes))


def data(case: str, iterations: int = ITERATIONS) -> PromptDataModule:
    """The prompts of a case; a few held-out ones, fewer in the last batch than there may be ranks."""
    batch = PROMPTS.get(case, 8)
    return PromptDataModule(tiny.rows(batch * iterations), val=tiny.rows(5), batch_size=batch, val_batch_size=4)


class CPUFullyShardedStrategy(FSDPStrategy):
    """FSDPStrategy on the CPU, where Lightning refuses it: the same calls of FSDP with another device."""

    def __init__(self, **options: Any) -> None:
        forget_offload()
        super().__init__(process_group_backend="gloo", **options)

    def model_sharded_context(self):
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import enable_wrap

        return enable_wrap(
            wrapper_cls=FullyShardedDataParallel,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


def strategy(name: str, world: int, gpu: bool = False) -> Any:
    """A strategy on so many ranks; `-full` and `-sharded` say how it saves."""
    name, _, saves = name.partition("-")
    options: dict[str, Any] = {}
    if saves:
        options = {"save_distributed_checkpoint": saves == "sharded"} if name == "fsdp2" else {"state_dict_type": saves}
    backend: dict[str, Any] = {} if gpu else {"process_group_backend": "gloo"}
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1, **backend, **options)
    if name == "fsdp1":
        return (FSDPStrategy if gpu else CPUFullyShardedStrategy)(**options)
    return DDPStrategy(**backend) if name == "ddp" else "auto"


def forget_offload() -> None:
    """FSDP1's full state dicts crash on the CPU where they are asked to be moved there."""
    import lightning.pytorch.strategies.fsdp as lightning_fsdp
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
    from torch.distributed.fsdp.api import FullOptimStateDictConfig

    def full(module: Any, world_size: int, rank0_only: bool = True) -> Any:
        return FullyShardedDataParallel.state_dict_type(
            module,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
            FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
        )

    lightning_fsdp._get_full_state_dict_context = full
    lightning_fsdp._load_raw_module_state.__globals__["_get_full_state_dict_context"] = full


class Watch(Callback):
    """Keeps each iteration's metrics and samples; gives everyone the samples of a run on one device, if there are."""

    def __init__(self, replay: list[Rollout] | None) -> None:
        self.replay = replay
        self.metrics: list[dict[str, float]] = []
        self.rollouts: list[Rollout] = []
        self.sampled_alike: list[bool] = []

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        generate = pl_module.generate

        def recorded(prompts: Any, sampling: Any, stream: int, number: int) -> Rollout:
            rollout = generate(prompts, sampling, stream, number)
            if stream != TRAIN:
                return rollout
            if self.replay is None:
                self.rollouts.append(rollout)
                return rollout
            theirs = self.replay[number].select(prompts.index).to(rollout.ids.device)
            for mine, its in zip(rows(rollout), rows(theirs), strict=True):
                self.sampled_alike.append(mine == its)
            return theirs

        pl_module.generate = recorded

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("time/")})


def rows(rollout: Rollout) -> list[list[int]]:
    """The responses as lists of tokens."""
    return [row[:n].tolist() for row, n in zip(rollout.ids, rollout.lengths, strict=True)]


def weights(run: PPOLightningModule) -> dict[str, Tensor]:
    """Everything that is trained, whole, on every rank."""
    found = {}
    for role, view in (("actor", run.views.actor), ("critic", run.views.critic)):
        if view is None:
            continue
        with run.sharding.gathered(view.store):
            for name, p in view.store.named_parameters():
                if clean_name(name) in saved_names(view.store):
                    found[f"{role}.{clean_name(name)}"] = p.detach().to("cpu", copy=True)
    return found


def fit(
    case: str,
    models: dict[str, str],
    kind: str,
    world: int,
    folder: Path,
    replay: list[Rollout] | None = None,
    ckpt: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a case and return what it did."""
    seed_everything(0, verbose=False)
    watch = Watch(replay)
    run = module(case, **models)
    callbacks = [watch, *CALLBACKS.get(case, list)(), *options.pop("callbacks", [])]
    gpu = options.get("accelerator") == "gpu"
    settings = dict(strategy=strategy(kind, world, gpu), devices=world, callbacks=callbacks, val_check_interval=2)
    trainer = tiny.trainer(folder, **(settings | options))
    trainer.fit(run, data(case), ckpt_path=ckpt)
    return {
        "weights": weights(run),
        "metrics": watch.metrics,
        "rollouts": watch.rollouts,
        "alike": watch.sampled_alike,
        "val": float(trainer.callback_metrics["val/reward"]),
        "global_step": trainer.global_step,
        "dtypes": sorted({str(p.dtype) for p in run.actor.parameters()}),
        "buffers": sorted({str(b.dtype) for b in run.actor.buffers()}),
        "reference": sum(local(p).numel() for p in run.views.reference.store.parameters())
        if run.views.reference
        else 0,
        "odd": sum(p.numel() for p in run.actor.parameters() if p.dtype != run.actor.base.dtype),
        "local": sum(local(p).numel() for p in run.actor.parameters()),
        "module": run,
        "trainer": trainer,
    }


class Shortage(Callback):
    """Runs out of memory once, in the second iteration: in a layer of the actor, at a moment, on some of the ranks."""

    def __init__(self, moment: str, ranks: list[int]) -> None:
        self.moment, self.ranks, self.times = moment, ranks, 0

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        # A backward comes to the MLP first: when it is at the attention, the MLP has gradients.
        part = "self_attn.o_proj" if "attention" in self.moment else "mlp"
        layer = pl_module.get_submodule(f"actor.model.model.layers.1.{part}")

        def short(*_: Any) -> None:
            phase = self.moment.split()[0]
            due = pl_module.phase == phase and pl_module.iteration == 1 and not self.times
            if due and trainer.global_rank in self.ranks:
                self.times += 1
                if trainer.strategy.root_device.type == "cuda":
                    torch.empty(2**46, dtype=torch.uint8, device=trainer.strategy.root_device)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        if self.moment.endswith("backward"):
            layer.register_full_backward_pre_hook(short)
        else:
            layer.register_forward_pre_hook(short)


def saver(folder: str) -> ModelCheckpoint:
    """Saves after the second iteration, and again over the same name after the fourth."""
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=8, save_top_k=-1, save_last=True)


def local(p: Tensor) -> Tensor:
    """What this rank holds of a parameter."""
    return p.to_local() if hasattr(p, "to_local") else p


def forgettable(result: dict[str, Any]) -> dict[str, Any]:
    """What can be written to a file."""
    return {k: v for k, v in result.items() if k not in ("module", "trainer")}


def parse(argument: str) -> dict[str, Any]:
    """The JSON of a command line."""
    return json.loads(argument)
