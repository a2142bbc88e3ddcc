"""Frozen weights in 4 or 8 bits, quantized while they are loaded, so that they never exist at full precision."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn


def check_quantize(option: str, mode: str, config: Any) -> None:
    """Check that a source can be quantized while it is loaded.

    Args:
        option: Its name, for the error.
        mode: none, nf4, fp4 or int8.
        config: The source's transformers configuration.

    Raises:
        ValueError: It is saved quantized.
        ModuleNotFoundError: What quantizes is not installed.
    """
    if mode == "none":
        return
    missing = [name for name in ("bitsandbytes", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"`{option}={mode!r}` needs {' and '.join(missing)}: `pip install 'lit-ppo[quantize]'`."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"`{option}={mode!r}`: its weights are saved quantized already. Leave it out.")


def quantizes(source: Any) -> bool:
    """Whether a role's source is quantized while it is loaded, which every rank then does by itself.

    Args:
        source: A RoleConfig or the dict of one; anything else is not.
    """
    mode = source.get("quantize") if isinstance(source, dict) else getattr(source, "quantize", None)
    return mode not in (None, "none")


def loading_options(mode: str, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that quantize: none for the mode none.

    Heads and embeddings stay at full precision; constants of 4-bit blocks are quantized too; 4-bit layers compute in
    bfloat16 on CUDA, else in float32.

    Args:
        mode: none, nf4, fp4 or int8.
        device: Where the weights are put while they are read.
    """
    if mode == "none":
        return {}
    from lit_ppo.callbacks._bitsandbytes import loading_config

    return {"device_map": {"": device}, "quantization_config": loading_config(mode, device)}


def make_movable(model: nn.Module) -> None:
    """Let quantized layers be moved between devices, before and after their first forward."""
    from lit_ppo.callbacks._bitsandbytes import prepare

    prepare(model)
