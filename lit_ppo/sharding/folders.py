"""Sharded checkpoints, which are folders: written whole or not at all, and read anywhere."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FAMILIES = {"model": "FSDPStrategy", "state_dict": "ModelParallelStrategy"}
"""By the name that a folder keeps the weights under, the strategy that wrote it."""


def is_folder(path: Any) -> bool:
    """Whether a path is a sharded checkpoint."""
    return "://" not in str(path) and (Path(path) / "meta.pt").is_file()


def read_folder(path: Any) -> dict[str, Any]:
    """Read a sharded checkpoint as the one file that a run on one device would have written.

    Args:
        path: The folder; all of it must fit into memory.

    Raises:
        ValueError: It cannot be read.
    """
    from lightning.fabric.utilities.load import _load_distributed_checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        ckpt: dict[str, Any] = _load_distributed_checkpoint(Path(path))
    except CheckpointException as error:  # not an Exception
        raise ValueError(
            f"The sharded checkpoint {str(path)!r} cannot be read: part of it is missing or broken."
        ) from error
    ckpt["state_dict"] = ckpt.pop("state_dict" if "state_dict" in ckpt else "model")
    names = sorted((k for k in ckpt if k.startswith("optimizer_") and k != "optimizer_states"), key=len)
    if names:
        ckpt["optimizer_states"] = [ckpt.pop(name) for name in names]
    return ckpt


def check_family(path: Any, strategy: Any) -> None:
    """Refuse a sharded checkpoint of another strategy, whose own reader would not find what it looks for.

    Args:
        path: What a fit resumes from.
        strategy: The one that would read it.

    Raises:
        ValueError: It was written by another.
    """
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    ours = next((c.__name__ for c in (FSDPStrategy, ModelParallelStrategy) if isinstance(strategy, c)), None)
    if ours is None or not is_folder(path):
        return
    held = FileSystemReader(path).read_metadata().state_dict_metadata
    theirs = next((FAMILIES[k.split(".")[0]] for k in held if k.split(".")[0] in FAMILIES), ours)
    if theirs != ours:
        raise ValueError(
            f"`ckpt_path={str(path)!r}` is a sharded checkpoint of {theirs}, which {ours} cannot read. Resume with "
            f"{theirs}, on any number of ranks, or on one device; to change the strategy, save full checkpoints "
            "(`FSDPStrategy(state_dict_type='full')`, `ModelParallelStrategy(save_distributed_checkpoint=False)`)."
        )


def writes_folders(strategy: Any) -> bool:
    """Whether a strategy saves sharded checkpoints."""
    sharded = getattr(strategy, "_state_dict_type", None) == "sharded"
    return sharded or bool(getattr(strategy, "_save_distributed_checkpoint", False))


def use_folders_safely(strategy: Any) -> None:
    """Have a strategy write sharded checkpoints beside their place and rename them when all ranks are done.

    Its own way is to write into the folder, where `last.ckpt` is the previous checkpoint: a kill would cost both.
    Before it reads one, look whether it can, and whether such a rename was cut off.
    """
    if not hasattr(strategy, "_state_dict_type") and not hasattr(strategy, "_save_distributed_checkpoint"):
        return
    if "save_checkpoint" in vars(strategy):
        return
    write, read = strategy.save_checkpoint, strategy.load_checkpoint

    def load_checkpoint(checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        recover(checkpoint_path)
        strategy.barrier()
        check_family(checkpoint_path, strategy)
        hook = partial(make_whole, device=strategy.root_device)
        hooks = [optimizer.register_load_state_dict_pre_hook(hook) for optimizer in strategy.optimizers]
        try:
            return read(checkpoint_path, weights_only=weights_only)
        finally:
            for added in hooks:
                added.remove()

    strategy.load_checkpoint = load_checkpoint
    if not writes_folders(strategy):
        return

    def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        path = Path(strategy.broadcast(filepath))
        if "://" in str(filepath):
            write(checkpoint, filepath, storage_options)
            return
        part, old = _beside(path, "part"), _beside(path, "old")
        if strategy.global_rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        strategy.barrier()
        write(checkpoint, part, storage_options)
        strategy.barrier()
        if strategy.global_rank == 0:
            for file in part.iterdir():
                with open(file, "rb") as written:
                    os.fsync(written.fileno())
            _remove(old)
            if path.exists():
                os.rename(path, old)
            os.rename(part, path)
            _remove(old)
        strategy.barrier()

    strategy.save_checkpoint = save_checkpoint


def make_whole(optimizer: Any, state: dict[str, Any], *, device: torch.device) -> None:
    """Gather what is cut of an optimizer's state, in place, where its parameter is whole.

    torch reads every state of a sharded checkpoint in shards, and FSDP puts those of its own parameters where they
    belong.

    Args:
        optimizer: That loads the state.
        state: The same on all ranks, but for the shards.
        device: That collectives run on.
    """
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    for key in sorted(state["state"], key=str):
        for name, value in sorted(state["state"][key].items()):
            if isinstance(value, ShardedTensor):
                state["state"][key][name] = _gathered(value, device)


def _gathered(cut: Any, device: torch.device) -> torch.Tensor:
    """Return a ShardedTensor whole, on every rank and this device."""
    mine = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in cut.local_shards()}
    whole = torch.empty(cut.size(), dtype=cut.dtype, device=device)
    for shard in cut.metadata().shards_metadata:  # of rows
        first, rows = shard.shard_offsets[0], shard.shard_sizes[0]
        part = whole[first : first + rows]
        if tuple(shard.shard_offsets) in mine:
            part.copy_(mine[tuple(shard.shard_offsets)])
        dist.broadcast(part, shard.placement.rank())
    return whole


def recover(path: Any) -> None:
    """Put back a folder whose replacement was cut off between two renames. Called by every rank at once.

    Args:
        path: What a fit resumes from, or None.
    """
    if path is None or "://" in str(path) or Path(path).exists():
        return
    for name in ("part", "old"):  # by then the new one is whole
        beside = _beside(Path(path), name)
        if is_folder(beside) and _beside(Path(path), "old").exists():
            try:
                os.rename(beside, path)
            except FileNotFoundError:  # another rank was faster
                return
            return


def _beside(path: Path, name: str) -> Path:
    return path.with_name(f"{path.name}.{name}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
