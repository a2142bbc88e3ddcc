"""Folders that plain transformers or PEFT load, written whole or not at all. Knows nothing of PPO."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HEAD_FILE = "reward_head.json"
"""Beside an adapter with a head: `reward_bias` of its model's configuration, which PEFT has no place for."""
_WRAPPER = "_fsdp_wrapped_module."
"""What FSDP1 puts into the names of what it wraps."""


def write_folder(directory: str | os.PathLike[str], write: Callable[[Path], None]) -> Path:
    """Have `write` fill a folder beside its place, then put it there; an earlier one is replaced.

    Args:
        directory: The place.
        write: Gets a folder that does not exist yet.
    """
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(scratch / "export")
        if target.exists():
            os.replace(target, scratch / "old")
        os.replace(scratch / "export", target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def save_adapter(model: Any, adapter: str, folder: Path, state: dict[str, Any] | None = None) -> None:
    """Save one adapter of a PEFT model as the only one of a folder, with the generation config of its trunk.

    The head of a sequence classifier, which is trained with the adapter, is saved as PEFT saves such modules
    (`modules_to_save`).

    Args:
        model: A PEFT model.
        adapter: Which of its adapters.
        folder: Where.
        state: The model's state dict, where that is not what its parameters hold (sharded ones, say).
    """
    settings, base = model.peft_config[adapter], model.get_base_model()
    source, before = getattr(base, "name_or_path", ""), settings.base_model_name_or_path
    settings.base_model_name_or_path = os.path.abspath(source) if Path(source).is_dir() else source
    wrapped = {n.replace(_WRAPPER, ""): n for n, _ in model.named_parameters()}  # PEFT goes by its modules' names
    given = {} if state is None else {"state_dict": {wrapped.get(key, key): value for key, value in state.items()}}
    try:
        model.save_pretrained(folder, selected_adapters=[adapter], **given)  # in a folder of the adapter's name
    finally:
        settings.base_model_name_or_path = before
    if (folder / adapter).is_dir():  # all but the adapter "default"
        for path in (folder / adapter).iterdir():
            path.rename(folder / path.name)
        (folder / adapter).rmdir()
    file, head = folder / "adapter_model.safetensors", _head_of(base, state)
    if head or any(name != key for key, name in wrapped.items()):
        from safetensors.torch import load_file, save_file

        saved = {key.replace(_WRAPPER, ""): value for key, value in load_file(file).items()}
        save_file(saved | head, file, {"format": "pt"})
    if head:
        described = json.loads((folder / "adapter_config.json").read_text())
        described |= {"modules_to_save": ["score"], "task_type": "SEQ_CLS"}
        (folder / "adapter_config.json").write_text(json.dumps(described, indent=2, sort_keys=True))
        (folder / HEAD_FILE).write_text(json.dumps({"reward_bias": getattr(base.config, "reward_bias", None) or 0.0}))
    config = getattr(base, "generation_config", None)
    if config is not None:
        config.save_pretrained(folder)


def _head_of(base: Any, state: dict[str, Any] | None) -> dict[str, Any]:
    """Return the weights of a sequence classifier's head, by the names that PEFT saves them under."""
    head: Any = getattr(base, "score", None)
    if not callable(getattr(head, "state_dict", None)):
        return {}
    whole = head.state_dict() if state is None else {
        key.rsplit(".", 1)[-1]: value for key, value in state.items() if ".score." in f".{key}"
    }  # fmt: skip
    return {f"base_model.model.score.{name}": value.detach().cpu().contiguous() for name, value in whole.items()}


def check_target(directory: str | os.PathLike[str], source: str = "", overwrite: bool = False) -> None:
    """Refuse a folder that an export would damage.

    Args:
        directory: Where an export would go.
        source: Where the model came from, if that is known yet.
        overwrite: Whether an earlier export may be replaced.

    Raises:
        FileExistsError: The folder is in use.
        OSError: It cannot be made.
    """
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"`{target}` is a file. Give a folder that does not exist yet.")
    if source and target.exists() and Path(source).exists() and os.path.samefile(target, source):
        raise FileExistsError(f"`{target}` holds the model that the training started from. Choose another folder.")
    if target.exists() and any(target.iterdir()):
        if not overwrite:
            raise FileExistsError(
                f"`{target}` is not empty. Choose another folder, or replace an export by `overwrite` (--overwrite)."
            )
        if not any((target / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise FileExistsError(
                f"`{target}` is not empty and is no earlier export (it has no config.json): it is left alone. Choose "
                "another folder."
            )
    check_folder("to", target, target.parent)


def check_folder(option: str, path: str | os.PathLike[str], folder: Path) -> None:
    """Make a folder and check that it can be written.

    Args:
        option: What says where to write, for the error.
        path: As given.
        folder: Where it is.

    Raises:
        OSError: It cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(
            error.errno,
            f"`{option}={str(path)!r}` cannot be written ({error.strerror} in {str(folder)!r}). Choose another folder.",
        ) from error


@contextmanager
def no_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars while it reads or writes weights; downloads keep theirs."""
    from transformers.utils import logging

    shown = logging._tqdm_active  # `disable_progress_bar` would turn off the hub's as well
    logging._tqdm_active = False
    try:
        yield
    finally:
        logging._tqdm_active = shown
