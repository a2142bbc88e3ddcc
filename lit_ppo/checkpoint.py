"""What a checkpoint holds beside weights and optimizer, and how a run is picked up from it."""

from __future__ import annotations

import os
import random
import shutil
import sys
from dataclasses import asdict, is_dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn
from typing_extensions import override

from lit_ppo.optim.master import is_low_precision
from lit_ppo.ranks import gather
from lit_ppo.roles.loading import fingerprint
from lit_ppo.roles.names import frozen_names, named_tensors, saved_names, trunk_name
from lit_ppo.sharding.folders import is_folder, read_folder, recover, use_folders_safely

if TYPE_CHECKING:
    from lit_ppo.base import Harness
    from lit_ppo.harness import PPOHarness

ARCHITECTURE = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")


def save_hyperparameters(module: Harness, arguments: dict[str, Any]) -> None:
    """Store the module's arguments as plain data, so that `load_from_checkpoint` can build it again.

    What is no plain data (a model or function made on the spot) is stored as None and has to be passed again.

    Args:
        module: Has those that every stage takes.
        arguments: The others, by name.
    """
    shared = {"tokenizer": module._tokenizer, "lora": module.lora, "optim": module.optim, "seed": module.seed}
    module.save_hyperparameters({name: plain(value) for name, value in {**arguments, **shared}.items()})


def plain(value: Any) -> Any:
    """Return a value as strings, numbers, lists and dicts; functions as their import path; the rest as None."""
    if isinstance(value, np.generic):
        value = value.item()  # numpy's numbers do not load with `weights_only=True`
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {k: plain(v) for k, v in asdict(value).items()}
    if isinstance(value, (list, tuple)):
        items = [plain(v) for v in value]
        return None if any(i is None and v is not None for i, v in zip(items, value, strict=True)) else items
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    name, home = getattr(value, "__qualname__", None), getattr(value, "__module__", None)
    if not callable(value) or name is None or home in ("__main__", None) or isinstance(value, nn.Module):
        return None
    found = reduce(lambda owner, part: getattr(owner, part, None), name.split("."), sys.modules.get(home))
    return f"{home}.{name}" if found is value else None  # a lambda, closure or bound method is no import


def state(module: Harness) -> dict[str, Any]:
    """Return everything that Lightning does not save by itself."""
    return {
        "stage": module.stage,
        **module.counters(),
        "fingerprints": module.fingerprints,
        "architecture": architecture(module),
        "rng": gather(rng_state()),
    }


def name_optimizer_states(module: Harness, ckpt: dict[str, Any]) -> None:
    """Replace the numbers that optimizer states call their weights by with the weights' names.

    Loading by order goes on as before. Sharded runs load by name; they save so too.

    Args:
        module: Attached to its trainer.
        ckpt: What Lightning saves, changed in place.
    """
    if module.sharding.sharded:
        return
    names = {id(p): name for name, p in module.named_parameters()}
    for optimizer, state in zip(module.trainer.optimizers, ckpt.get("optimizer_states", ()), strict=False):
        held = (p for group in optimizer.param_groups for p in group["params"])
        saved = (key for group in state["param_groups"] for key in group["params"])
        name_of = {key: names[id(p)] for key, p in zip(saved, held, strict=True)}
        state["state"] = {name_of[key]: value for key, value in state["state"].items()}
        for group in state["param_groups"]:
            group["params"] = [name_of[key] for key in group["params"]]


def restore(module: Harness, ckpt: dict[str, Any]) -> None:
    """Take back what `state` returned.

    Raises:
        ValueError: The checkpoint is of another module, or of other models.
    """
    saved = ckpt.get("lit_ppo")
    if saved is None:
        raise ValueError(
            f"This checkpoint was not written by {type(module).__name__} (it has no `lit_ppo` entry). To start from "
            f"its weights, export them to a folder and pass that as `{next(iter(module.sources))}`."
        )
    if (stage := saved.get("stage", "ppo")) != module.stage:
        raise ValueError(
            f"This checkpoint is of the stage `{stage}`, and {type(module).__name__} is the stage `{module.stage}`. "
            f"To start from its weights, export them (`lit-ppo export --ckpt ... --to FOLDER`) and give the folder."
        )
    here, there = architecture(module), saved["architecture"]
    for role in sorted(here.keys() | there.keys()):
        if here.get(role) != there.get(role):
            raise ValueError(
                f"This checkpoint's `{role}` is {describe(there.get(role))}, and this module's is "
                f"{describe(here.get(role))}. "
                "Use the configuration that the checkpoint was trained with."
            )
    for name, theirs in saved["fingerprints"].items():
        ours = module.fingerprints.get(name)
        if ours is not None and ours != theirs:
            if ckpt.get("state_dict"):
                check_keys(module, ckpt["state_dict"])  # other shapes or adapters are the better explanation
            raise ValueError(
                f"The frozen `{name}` is not the one that this checkpoint was trained with (its weights have changed: "
                f"{theirs} then, {ours} now). Restore the original weights at its source, and `quantize` as it was."
            )
    module.load_counters(saved)
    module.cache["rng"] = saved["rng"]
    module.cache["conversions"] = conversions(module, ckpt)


def conversions(module: Harness, ckpt: dict[str, Any]) -> list[str]:
    """Say what of the checkpoint's optimizer state this run keeps in another form.

    Args:
        module: With its models.
        ckpt: What was loaded.
    """
    theirs = ckpt.get("hyper_parameters", {}).get("optim") or {}
    weights = [p for named in module.trained.values() for _, p in named]
    said = {"state": "the moments are converted"}
    if any(is_low_precision(p) for p in weights):
        master = module.optim.rounding == "master"
        said["rounding"] = (
            "float32 masters start from the rounded weights" if master else "the float32 masters are left out"
        )
    return [
        f"`optim.{name}` was {theirs[name]} and is {getattr(module.optim, name)}: {what}"
        for name, what in said.items()
        if ckpt.get("optimizer_states") and theirs.get(name, getattr(module.optim, name)) != getattr(module.optim, name)
    ]


def restore_rng(module: Harness) -> None:
    """Set this rank's random states from a loaded checkpoint, if there is one.

    PPO's own randomness is counter-based; this is for reward functions and other people's callbacks.
    """
    states = module.cache.pop("rng", None)
    if states is not None and module.global_rank < len(states):
        set_rng_state(states[module.global_rank])


def rng_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators as plain data."""
    generator: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = generator
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(states: dict[str, Any]) -> None:
    """Take back what `rng_state` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.cpu() for s in states["cuda"]])


def hold_rng(module: Harness) -> None:
    """Remember the random states before an evaluation; with `release_rng`, a validation changes nothing in training."""
    module.cache["held rng"] = rng_state()


def release_rng(module: Harness) -> None:
    """Put back what `hold_rng` remembered, before the end of the evaluation is saved."""
    set_rng_state(module.cache.pop("held rng"))


def architecture(module: Harness) -> dict[str, dict[str, Any]]:
    """Return what tells models apart, for the roles that are saved."""
    if module.views is None:
        return {}
    return {
        role: {
            **{key: getattr(view.store.base.config.get_text_config(), key, None) for key in ARCHITECTURE},
            "adapter": view.adapter,
            "layout": module.layout,
            "lora_rank": None if module.lora is None else module.lora.r,
            "lora_scale": None if module.lora is None else module.lora.scale,
        }
        for role, view in module.views.saved().items()
    }


def describe(arch: dict[str, Any] | None) -> str:
    """Say what `architecture` returned of one role."""
    if arch is None:
        return "absent"
    trunk = " on a shared trunk" if arch["layout"] == "shared" else ""
    adapter = ""
    if arch["adapter"]:
        adapter = f" with a LoRA adapter of rank {arch['lora_rank']}{trunk}, scaled by {arch['lora_scale']:g}"
    return (
        f"a {arch['model_type']} of {arch['num_hidden_layers']} layers, hidden size {arch['hidden_size']}, "
        f"vocabulary {arch['vocab_size']}{adapter}"
    )


def fingerprints(module: Harness) -> dict[str, str]:
    """Fingerprint the frozen weights that a checkpoint leaves out: the reference, and trunks under adapters."""
    found, seen = {}, set()
    for role, view in module.views.all().items():
        if view.store in seen:
            continue
        seen.add(view.store)
        saved, borrowed = saved_names(view.store), frozen_names(view.store)
        kept = borrowed if role == "reference" else borrowed | saved
        named = [(trunk_name(n, saved), p) for n, p in view.store.named_parameters() if n not in kept]
        if named and not any(p.is_meta for _, p in named):
            found[role if role == "reference" else f"{role}'s trunk"] = fingerprint(named)
    return found


def reward_fingerprints(module: PPOHarness) -> dict[str, str]:
    """Fingerprint the loaded reward models, by role."""
    models = {module.rewards.role(r): r for r in module.rewards.rewards if r.model is not None}
    return {role: fingerprint(reward.weights()) for role, reward in models.items()}


def keep_trained(module: Harness, full: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Drop what is never trained from a state dict.

    Args:
        module: The module.
        full: Its state dict, perhaps among other modules' (an average of the weights, say), which are left alone.
        prefix: Of the module's own names.
    """
    if module.views is None:
        return full
    for name, store in stores(module).items():
        own = f"{prefix}{name}."
        kept = {own + key for key in saved_names(store)}
        for key in [k for k in full if k.startswith(own) and k not in kept]:
            del full[key]
    return full


def stores(module: Harness) -> dict[str, Any]:
    """Return the registered parameter stores by attribute name."""
    return {name: getattr(module, name) for name in module.views.saved() if hasattr(module, name)}


def check_keys(module: Harness, given: dict[str, Any]) -> None:
    """Check that a state dict holds exactly what is trained, in the same shapes.

    Raises:
        RuntimeError: It does not.
    """
    expected = {
        f"{name}.{key}": tensor
        for name, store in stores(module).items()
        for key, tensor in named_tensors(store).items()
        if key in saved_names(store)
    }
    missing, foreign = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    shapes = [
        f"{key} {tuple(given[key].shape)} for {tuple(expected[key].shape)}"
        for key in expected.keys() & given.keys()
        if not module.sharding.flat and given[key].shape != expected[key].shape
    ]
    if missing or foreign or shapes:
        parts = [
            f"{what}: {', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
            for what, keys in (("missing", missing), ("not of this model", foreign), ("of another shape", shapes))
            if keys
        ]
        raise RuntimeError(
            f"This checkpoint is of another model; {'; '.join(parts)}. Use the configuration it was trained with."
        )


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, flushes it to the disk and renames it, so that a kill costs nothing old.

    Lightning's own goes through the system's temporary folder. Where that is another filesystem, its last step is a
    copy over the previous file, and a kill during it, or a full disk, leaves neither.
    """

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a file, or a folder that a sharded run wrote."""
        recover(path)
        return read_folder(path) if is_folder(path) else super().load_checkpoint(path, *args, **kwargs)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save to a local path; others go Lightning's way.

        Raises:
            OSError: It cannot be written. What was there before is untouched.
        """
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        final = Path(path)
        part = final.with_name(f"{final.name}.part")
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(part, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, final)
        except BaseException as error:
            written = part.stat().st_size if part.is_file() else 0
            part.unlink(missing_ok=True)
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):  # torch.save hides it behind its own
                cause = cause.__context__
            if cause is None:
                raise
            free = shutil.disk_usage(final.parent).free
            kept = any(path.suffix == final.suffix for path in final.parent.iterdir())
            then = "Earlier checkpoints are intact: make room, and resume from the last one."
            raise OSError(
                cause.errno,
                f"The checkpoint {str(final)!r} cannot be written: {cause.strerror} after {written:,} bytes, with "
                f"{free:,} bytes free. {then if kept else 'There is no earlier one: make room, and start again.'}",
            ) from error


def save_atomically(trainer: Any) -> None:
    """Give a trainer `AtomicCheckpointIO`, unless it was given a checkpoint plugin; the same for sharded ones."""
    use_folders_safely(trainer.strategy)
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
