"""The plain string "fsdp", and FSDP2, on real CUDA and NCCL: one device is as many ranks as these need."""

from __future__ import annotations

import cases
import pytest
import tiny
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

from lit_ppo.callbacks import GradientCheckpointing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:FSDP is switching to use"),  # to NO_SHARD, as there is one rank
    pytest.mark.filterwarnings("ignore:.*NO_SHARD.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*FSDP.state_dict_type.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:When using ``NO_SHARD``:UserWarning"),  # on one rank a shard is everything
    # Lightning wraps a module in DDP on a stream of its own, and the hooks on its gradients stay there
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
    # torch's own, when it reads the optimizer's state of a sharded checkpoint of FSDP1
    pytest.mark.filterwarnings("ignore:.*_get_pg_default_device.*will be deprecated"),
    pytest.mark.filterwarnings("ignore:`load_state_dict` is deprecated:FutureWarning"),  # Lightning reads by it
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),  # the saver is not needed
]

STRATEGIES = {
    "fsdp": lambda: "fsdp",
    "FSDPStrategy": lambda: FSDPStrategy(state_dict_type="sharded", sharding_strategy="SHARD_GRAD_OP"),
    "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1),
    "fsdp2-full": lambda: ModelParallelStrategy(1, 1, save_distributed_checkpoint=False),
    "ddp": lambda: DDPStrategy(),
}


@pytest.fixture(autouse=True)
def exact():
    """Float32 that is float32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def fit(case, folder, strategy="auto", replay=None, ckpt=None, **options):
    """Train a case on the GPU and return the module, its weights and what was watched."""
    watch = cases.Watch(replay)
    module = cases.module(case, **cases.folders())
    callbacks = [watch, *options.pop("callbacks", [])]
    settings = dict(accelerator="gpu", strategy=strategy, callbacks=callbacks, val_check_interval=2)
    trainer = tiny.trainer(folder, **(settings | options))
    trainer.fit(module, cases.data(case), ckpt_path=ckpt)
    weights = {name: w.float().cpu() for name, w in cases.weights(module).items()}
    return module, weights, watch


@pytest.mark.parametrize("case", ["full", "shared", "scarce", "no critic"])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_one_rank_trains_as_one_device(tmp_path, strategy, case):
    _, want, alone = fit(case, tmp_path / "alone")
    _, got, watch = fit(case, tmp_path / "spread", STRATEGIES[strategy](), alone.rollouts)
    assert got.keys() == want.keys()
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    for mine, its in zip(watch.metrics, alone.metrics, strict=True):
        for name in ("objective/kl", "loss/policy_avg", "optim/grad_norm_actor", "objective/scores"):
            if name in its or name in mine:  # no policy loss while the actor rests
                assert mine[name] == pytest.approx(its[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", "ddp"])
def test_precisions(tmp_path, strategy, precision):
    if (strategy, precision) == ("fsdp2", "16-mixed"):
        with pytest.raises(ValueError, match="does not support"):
            fit("shared", tmp_path, STRATEGIES[strategy](), precision=precision)
        return
    module, weights, watch = fit("shared", tmp_path, STRATEGIES[strategy](), precision=precision)
    assert all(w.isfinite().all() for w in weights.values())
    assert len(watch.metrics) == cases.ITERATIONS
    assert watch.metrics[0]["policy/ratio_first_step"] == pytest.approx(1, abs=0.05)
    buffers = [b for _, b in module.actor.named_buffers() if b.is_floating_point()]
    assert {b.dtype for b in buffers} == {torch.float32}  # rotary frequencies


@pytest.mark.parametrize("case", ["full", "shared"])  # one dtype, and float32 adapters on a bfloat16 trunk
@pytest.mark.parametrize("strategy", ["fsdp", "FSDPStrategy", "fsdp2", "fsdp2-full"])
def test_a_resumed_run_goes_on(tmp_path, strategy, case):
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=8, save_top_k=-1)
    _, want, whole = fit(case, tmp_path, STRATEGIES[strategy](), callbacks=[saver], enable_checkpointing=True)
    torch.distributed.destroy_process_group()
    _, got, watch = fit(case, tmp_path, STRATEGIES[strategy](), whole.rollouts, ckpt=str(tmp_path / "step=8.ckpt"))
    assert len(watch.metrics) == cases.ITERATIONS - 2
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_recomputation_changes_nothing(tmp_path, strategy):
    _, want, alone = fit("shared", tmp_path, STRATEGIES[strategy]())
    torch.distributed.destroy_process_group()
    options = {"callbacks": [GradientCheckpointing()]}
    _, got, _ = fit("shared", tmp_path, STRATEGIES[strategy](), alone.rollouts, **options)
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=1e-5)


def test_fsdp_with_offload_to_the_cpu(tmp_path):
    _, want, alone = fit("full", tmp_path / "alone")
    _, got, _ = fit("full", tmp_path / "offloaded", FSDPStrategy(cpu_offload=True), alone.rollouts)
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=1e-5)


def test_a_rollout_gives_its_memory_back(tmp_path):
    """What is gathered for a rollout is gone before the update."""
    held = []
    module = cases.module("full", **cases.folders())
    module.phase_listeners.append(lambda phase: held.append((phase, torch.cuda.memory_allocated())))
    trainer = tiny.trainer(tmp_path, accelerator="gpu", strategy=STRATEGIES["fsdp2"](), limit_train_batches=3)
    trainer.fit(module, cases.data("full"))
    # without the first, before which cuBLAS has no workspace (32 MiB) and Adam no state
    before = [m for phase, m in held if phase == "update"][1:]
    assert len(before) >= 2
    assert max(before) - min(before) < 2**20
