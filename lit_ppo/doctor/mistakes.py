"""Known mistakes of a configuration, one check each. What a fit itself refuses is not repeated here."""

from __future__ import annotations

import difflib
import fnmatch
import importlib.util
import shutil
from collections.abc import Callable, Iterator

import torch

from lit_ppo.config import RoleConfig
from lit_ppo.doctor import Line
from lit_ppo.doctor.config import Run
from lit_ppo.doctor.machine import existing
from lit_ppo.memory.ledger import GIB

VALIDATED = {
    "ppo": ("val/reward", "val/length_mean", "val/eos_rate"),
    "sft": ("val/loss", "val/perplexity"),
    "reward": ("val/accuracy", "val/loss", "val/score_gap"),
}
"""What a validation logs, by stage; `val/reward_<name>` comes with several rewards."""

UP, DOWN = ("val/reward", "val/accuracy", "val/score_gap"), ("val/loss", "val/perplexity")
"""What is better when it is higher, and what when it is lower."""

SECTIONS = {"ppo": "ppo", "sft": "sft", "reward": "ranking"}
"""Where a stage's configuration says how a batch is cut."""


def launch(run: Run) -> Iterator[Line]:
    """Fewer or more processes than devices."""
    env, devices, nodes = run.here.env, run.devices, int(run.options.get("num_nodes") or 1)
    started = env.get("LOCAL_WORLD_SIZE")
    if started is not None:
        if int(started) != devices:
            what = f"torchrun starts {started} processes on this node, and `trainer.devices` is {devices}"
            yield Line("error", what, f"trainer.devices: {started}", "trainer.devices")
        machines = int(env.get("GROUP_WORLD_SIZE") or nodes)
        if machines != nodes:
            what = f"torchrun runs on {machines} nodes, and `trainer.num_nodes` is {nodes}"
            yield Line("error", what, f"trainer.num_nodes: {machines}", "trainer.num_nodes")
    elif "SLURM_NTASKS" in env and env.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        if int(env["SLURM_NTASKS"]) != run.ranks:
            what = (
                f"SLURM starts {env['SLURM_NTASKS']} tasks, and the configuration asks for {devices} devices x {nodes} "
                f"nodes = {run.ranks}: the others would be waited for, or left out"
            )
            yield Line("error", what, f"#SBATCH --nodes={nodes} --ntasks-per-node={devices}", "trainer.devices")
    elif nodes > 1:
        what = f"`trainer.num_nodes` is {nodes}, and neither torchrun nor SLURM starts the processes of the other nodes"
        fix = f"torchrun --nnodes={nodes} --nproc-per-node={devices} --rdzv-endpoint=HOST:29500 -m lit_ppo fit ..."
        yield Line("warn", what, fix, "trainer.num_nodes")
    idle = len(run.here.gpus) - devices
    if run.on_cuda and idle > 0 and started is None:
        what = f"{idle} of this machine's {len(run.here.gpus)} GPUs are left idle"
        yield Line("info", what, f"trainer.devices: {len(run.here.gpus)}", "trainer.devices")


def devices(run: Run) -> Iterator[Line]:
    """Devices that are not there."""
    there = len(run.here.gpus)
    if not run.on_cuda:
        return
    if not there:
        what = "`trainer.accelerator` asks for a GPU, and this machine has none that PyTorch can use (`lit-ppo doctor`)"
        yield Line("error", what, "trainer.accelerator: cpu", "trainer.accelerator")
    elif run.indices is not None and max(run.indices, default=0) >= there:
        what = f"`trainer.devices` names {run.indices}, and this machine has {there} GPUs, counted from 0"
        yield Line("error", what, f"trainer.devices: {list(range(there))}", "trainer.devices")
    elif run.devices > there:
        what = f"`trainer.devices` is {run.devices}, and this machine has {there} GPUs"
        yield Line("error", what, f"trainer.devices: {there}", "trainer.devices")


def precision(run: Run) -> Iterator[Line]:
    """Precisions that the devices do not have."""
    name = str(run.options.get("precision") or "32-true")
    half = name.startswith("16")
    if run.on_cuda and name.startswith("bf16") and any(major < 8 for major, _ in run.here.gpus):
        what = f"`trainer.precision` is {name}, and this machine's GPUs compute bf16 by emulation"
        yield Line("warn", what, "trainer.precision: 16-mixed", "trainer.precision")
    if half and not run.on_cuda:
        what = f"`trainer.precision` is {name}, which needs a GPU"
        yield Line("error", what, "trainer.precision: bf16-mixed", "trainer.precision")
    elif half and name.endswith("true"):
        what = f"`trainer.precision` is {name}: gradients and moments below 6e-8 are 0, and there is no loss scaling"
        yield Line("warn", what, "trainer.precision: bf16-true", "trainer.precision")


def strategy(run: Run) -> Iterator[Line]:
    """Strategies that do nothing, or cannot work."""
    if "deepspeed" in run.strategy:
        what = "`trainer.strategy` is DeepSpeed, which is not supported"
        yield Line("error", what, "trainer.strategy: fsdp", "trainer.strategy")
    if run.sharded and run.ranks == 1:
        what = "`trainer.strategy` shards weights over 1 device: nothing is saved, and every layer costs a copy"
        yield Line("warn", what, "trainer.strategy: auto", "trainer.strategy")
    size, what = getattr(run.data, "batch_size", None), getattr(run.data, "what", "rows")
    if size and size % run.ranks:
        said = f"`data.batch_size` is {size}, for {run.ranks} ranks: some have more {what} than others, which wait"
        yield Line("info", said, f"data.batch_size: {-(-size // run.ranks) * run.ranks}", "data.batch_size")


def optimization(run: Run) -> Iterator[Line]:
    """Options of the Trainer that belong to automatic optimization."""
    section = SECTIONS[run.stage]
    for name, off, instead in (
        ("accumulate_grad_batches", (None, 1), f"model.{section}.micro_batch_size: <as many as fit>"),
        ("gradient_clip_val", (None, 0), f"model.{section}.max_grad_norm: {run.options.get('gradient_clip_val')}"),
    ):
        if run.options.get(name) not in off:
            what = f"`trainer.{name}` is for automatic optimization, and this module has its own; remove it"
            yield Line("error", what, instead, f"trainer.{name}")


def monitors(run: Run) -> Iterator[Line]:
    """Callbacks that wait for a metric which nobody logs, or take the worst for the best."""
    options = run.options
    rewards = run.module.rewards.names if run.stage == "ppo" and run.module.rewards is not None else []
    known = [*VALIDATED[run.stage], *(f"val/reward_{name}" for name in rewards if len(rewards) > 1)]
    held_out = getattr(run.data, "_sets", {"val": None})
    epochs, every = options.get("max_epochs"), options.get("check_val_every_n_epoch")
    why, fix = "", ""
    if "val" not in held_out:
        why, fix = f"there are no {getattr(run.data, 'what', 'rows')} to validate on", "data.val_fraction: 0.1"
    elif options.get("limit_val_batches") == 0:
        why, fix = "`trainer.limit_val_batches` is 0", "trainer.limit_val_batches: 1.0"
    elif epochs and epochs > 0 and every and every > epochs:
        why = f"`trainer.check_val_every_n_epoch` is {every} and `max_epochs` {epochs}"
        fix = f"trainer.check_val_every_n_epoch: {epochs}"
    for callback in run.callbacks:
        monitor, name = getattr(callback, "monitor", None), type(callback).__name__
        if not isinstance(monitor, str) or not monitor.startswith("val/"):
            continue
        if monitor in ("val/ratio", "val/ratio_var", "val/clipfrac_avg", "val/num_eos_tokens"):
            continue  # TRL's names for metrics of training
        if why:
            what = f"`{name}` monitors {monitor!r}, and the run never validates: {why}"
            yield Line("error", what, fix, "monitor")
        elif monitor not in known:
            near = difflib.get_close_matches(monitor, known, n=1) or known[:1]
            yield Line("error", f"`{name}` monitors {monitor!r}, which is not logged", f"monitor: {near[0]}", "monitor")
        elif monitor.startswith(UP) and getattr(callback, "mode", "max") == "min":
            what = f"`{name}` takes the lowest {monitor!r} for the best: Lightning's default `mode` is min"
            yield Line("warn", what, "mode: max", "monitor")
        elif monitor in DOWN and getattr(callback, "mode", "min") == "max":
            yield Line("warn", f"`{name}` takes the highest {monitor!r} for the best", "mode: min", "monitor")


def checkpointing(run: Run) -> Iterator[Line]:
    """Activations recomputed twice."""
    ours = [c for c in run.callbacks if type(c).__name__ == "GradientCheckpointing"]
    if not ours:
        return
    fix = "remove one of the two"
    if len(ours) > 1:
        yield Line("error", f"{len(ours)} `GradientCheckpointing` callbacks", fix, "trainer.callbacks")
    if getattr(run.options.get("strategy"), "_activation_checkpointing_kwargs", None):
        what = "`GradientCheckpointing` and the strategy's `activation_checkpointing_policy` recompute the same layers"
        yield Line("error", what, fix, "activation_checkpointing_policy")
    if run.plan is not None and getattr(run.plan.config, "gradient_checkpointing", False):
        what = f"the {run.role}'s config.json says `gradient_checkpointing`, which `GradientCheckpointing` does already"
        yield Line("warn", what, 'remove "gradient_checkpointing" from config.json', "GradientCheckpointing")


def quantization(run: Run) -> Iterator[Line]:
    """Quantized weights that would be trained, and quantization without its package."""
    module = run.module
    trained = ({"actor", "critic"} if run.stage == "ppo" else {run.role}) if module.lora is None else set()
    fix = "model.lora: {r: 16}"
    asked = False
    for callback in run.callbacks:
        patterns = getattr(callback, "modules", None)
        if type(callback).__name__ not in ("QuantizeModules", "QuantizeRewardModel"):
            continue
        asked = True
        for role in sorted(trained):
            if any(fnmatch.fnmatchcase(role, p) for p in patterns or ()):
                what = f"`{type(callback).__name__}` quantizes `{role}`, which is trained: only adapters could be"
                yield Line("error", what, fix, "modules")
    for role, source in run.sources:
        mode = getattr(source, "quantize", None)
        if mode in (None, "none"):
            continue
        asked = True
        if role in trained:
            what = f"`{role}.quantize: {mode}` on weights that are trained: only adapters could be"
            yield Line("error", what, fix, f"{role}.quantize")
    asked = asked or any(getattr(r.config, "quantize", None) not in (None, "none") for r in run.reward_models)
    if asked and importlib.util.find_spec("bitsandbytes") is None:
        yield Line(
            "error", "quantization needs bitsandbytes, which is not installed", "pip install 'lit-ppo[quantize]'"
        )


def learning_rates(run: Run) -> Iterator[Line]:
    """Learning rates out of the ordinary."""
    module, ppo = run.module, run.stage == "ppo"
    low, high, usual = (1e-7, 1e-4, "3.0e-6") if ppo else (1e-7, 1e-3, "1.0e-5")
    if module.lora is not None:
        low, high, usual = 1e-6, 2e-3, "1.0e-4"
    kind = "adapters" if module.lora is not None else "all weights"
    rates = {"actor_lr": module.optim.actor_lr} if ppo else {"lr": module.optim.lr}
    if ppo and module.ppo.has_critic and module.optim.critic_lr is not None:
        rates["critic_lr"] = module.optim.critic_lr
    for name, rate in rates.items():
        if rate == 0:
            yield Line("warn", f"`optim.{name}` is 0: nothing is learned", f"model.optim.{name}: {usual}", name)
        elif not low <= rate <= high * (10 if name == "critic_lr" else 1):
            what = f"`optim.{name}` is {rate:g}, far from what is usual for {kind} ({usual})"
            yield Line("warn", what, f"model.optim.{name}: {usual}", name)


def adapters(run: Run) -> Iterator[Line]:
    """LoRA targets that match nothing."""
    from lit_ppo.roles.adapters import POLICY, add_adapters
    from lit_ppo.roles.loading import empty_model

    lora, actor = run.module.lora, getattr(run.plan, "actor", None)
    if lora is None or lora.target_modules == "all-linear" or not isinstance(actor, RoleConfig):
        return
    try:
        add_adapters(empty_model(actor, torch.float32, critic=run.stage == "reward"), lora, [POLICY], 0)
    except ValueError as error:
        yield Line("error", str(error), "model.lora.target_modules: all-linear", "target_modules")


def tokens(run: Run) -> Iterator[Line]:
    """Tokens that other trainers stumble over."""
    if run.plan is None:
        return
    tokenizer = run.module.tokenizer
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        which = "has no pad token" if tokenizer.pad_token_id is None else "pads with its EOS token"
        yield Line("info", f"the tokenizer {which}: nothing to do, masks are made from lengths")


def batches(run: Run) -> Iterator[Line]:
    """Sizes that have no effect, and a run that never ends."""
    ppo, examples = run.module.ppo if run.stage == "ppo" else None, getattr(run.data, "batch_size", None)
    if examples:
        samples = 1 if ppo is None else run.module.sampling_config.samples_per_prompt
        share = -(-examples * samples // (1 if ppo is None else ppo.minibatches) // run.ranks)
        size, option = getattr(run.section, "micro_batch_size", None), f"{SECTIONS[run.stage]}.micro_batch_size"
        if size is not None and size > share:
            whole = (
                f"a batch of a rank has {share} {run.data.what}"
                if ppo is None
                else f"a minibatch of a rank has {share} sequences"
            )
            yield Line(
                "info", f"`{option}` is {size}, and {whole}: no effect", f"model.{option}: {share}", "micro_batch_size"
            )
    if run.options.get("max_epochs") is None and run.options.get("max_steps") in (None, -1):
        what = "neither `trainer.max_epochs` nor `max_steps` is set: Lightning trains for 1,000 epochs"
        yield Line("warn", what, "trainer.max_epochs: 1", "trainer")


def attention(run: Run) -> Iterator[Line]:
    """Attention that is not installed."""
    held = run.sources
    held += [("reward", reward.config) for reward in run.reward_models]
    for role, config in held:
        asked = str(getattr(config, "attn_implementation", None))
        if asked.startswith("flash_attention_2") and importlib.util.find_spec("flash_attn") is None:
            what = f"`{role}.attn_implementation: {asked}` needs the package flash-attn, which is not installed"
            yield Line("error", what, f"model.{role}.attn_implementation: sdpa", "attn_implementation")


def disk(run: Run) -> Iterator[Line]:
    """Checkpoints that do not fit on the disk."""
    from lit_ppo.roles.loading import empty_model

    actor, folder = getattr(run.plan, "actor", None), str(run.options.get("default_root_dir") or ".")
    if run.module.lora is not None or not isinstance(actor, RoleConfig) or "://" in folder:
        return
    numbers = sum(p.numel() for p in empty_model(actor, torch.float32, critic=run.stage == "reward").parameters())
    need = 12 * numbers * (2 if run.stage == "ppo" and run.module.ppo.has_critic else 1)
    free = shutil.disk_usage(existing(folder)).free
    if need > free:
        what = (
            f"a checkpoint takes about {need / GIB:.0f} GiB (weights and Adam's moments in float32), and the disk of "
            f"{folder!r} has {free / GIB:.0f} GiB free"
        )
        yield Line("error", what, "trainer.default_root_dir: <a larger disk>", "default_root_dir")


OF_EVERY_STAGE: tuple[Callable[[Run], Iterator[Line]], ...] = (
    launch, devices, precision, strategy, optimization, monitors, checkpointing, quantization, learning_rates,
    adapters, tokens, batches, attention, disk,
)  # fmt: skip
