"""Frozen weights in 4 or 8 bits, quantized while they are loaded, so that they never exist at full precision."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from lit_ppo.config import LoRAConfig, RoleConfig

EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")
"""What transformers calls the embeddings of its decoders."""


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


def check_frozen(name: str, source: RoleConfig, lora: LoRAConfig | None) -> None:
    """Check that no quantized weight is to be trained.

    Args:
        name: Of the role.
        source: Its options.
        lora: The run's adapters.

    Raises:
        ValueError: One is.
    """
    for option in ("quantize", "quantize_embeddings"):
        if getattr(source, option) != "none" and name != "reference" and lora is None:
            raise ValueError(
                f"`{name}.{option}={getattr(source, option)!r}`: quantized weights cannot train. Give `lora`, which "
                "trains adapters on them, or leave it out."
            )
    targets = [] if lora is None or isinstance(lora.target_modules, str) else lora.target_modules
    adapted = [target for target in targets if target.rsplit(".", 1)[-1] in EMBEDDINGS]
    if adapted and source.quantize_embeddings != "none" and name != "reference":
        raise ValueError(
            f"`lora.target_modules` names {adapted[0]!r}, and `{name}.quantize_embeddings="
            f"{source.quantize_embeddings!r}` holds it in a form that takes no adapter. Leave one of the two out."
        )


def loaded_by_each(source: Any) -> bool:
    """Whether a role's source is quantized while it is loaded, or spread over devices, which each rank does by itself.

    Args:
        source: A RoleConfig or the dict of one; anything else is not.
    """
    given = source if isinstance(source, dict) else vars(source) if isinstance(source, RoleConfig) else {}
    return given.get("quantize") not in (None, "none") or given.get("device_map") is not None


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
