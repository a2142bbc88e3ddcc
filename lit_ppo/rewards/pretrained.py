"""Reading a saved sequence-classification model: a whole one, or an adapter and the model under it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lit_ppo.hf_folder import HEAD_FILE, no_bars
from lit_ppo.rewards.base import RewardError
from lit_ppo.rewards.config import RewardConfig
from lit_ppo.roles.quantized import check_quantize, loading_options, make_movable

_HEADS = {"score", "classifier"}


@dataclass
class Pretrained:
    """What is known of a saved model before its weights are read."""

    source: str
    """Folder or hub id, as the user wrote it."""
    base: str
    """Folder or hub id of the whole model: the source, or what its adapter belongs on."""
    revision: str | None
    """Of the whole model."""
    adapter: str | None
    """Folder or hub id of the adapter, if it is one."""
    saved: set[str]
    """Names of the modules that the adapter brings whole, its head among them."""
    config: Any
    """The whole model's configuration."""
    tokenizer: Any
    """The model's own tokenizer."""


def find_pretrained(options: RewardConfig) -> Pretrained:
    """Read the configuration and the tokenizer of a saved model.

    Raises:
        RewardError: One of them cannot be read, or nothing there has a head.
    """
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import find_adapter_config_file

    source = str(Path(options.source).expanduser())
    base, revision, saved, trust = source, options.revision, set[str](), options.trust_remote_code
    try:
        adapter = find_adapter_config_file(source, revision=options.revision)
        if adapter is not None:
            described = json.loads(Path(adapter).read_text(encoding="utf-8"))
            base, revision = described["base_model_name_or_path"], described.get("revision")
            saved = set(described.get("modules_to_save") or ())
        config = AutoConfig.from_pretrained(base, revision=revision, trust_remote_code=trust)
        if adapter is not None and not _has_head(config):
            if not _HEADS & saved:
                raise RewardError(
                    f"`reward.source={options.source!r}` is an adapter without a head (`modules_to_save`), and {base!r}"
                    " under it is not a sequence-classification model, so its scores would be random."
                )
            config = AutoConfig.from_pretrained(base, num_labels=1, revision=revision, trust_remote_code=trust)
        if adapter is not None and (bias := head_options(source, options.revision).get("reward_bias")) is not None:
            config.reward_bias = bias
        tokenizer = AutoTokenizer.from_pretrained(source, revision=options.revision, trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as error:
        raise RewardError(
            f"`reward.source={options.source!r}`: no model and tokenizer could be read from it, "
            f"{'a folder' if Path(source).is_dir() else 'which is not a folder here, as a hub id'}: {error}"
        ) from error
    check_quantize("reward.quantize", options.quantize, config)
    return Pretrained(options.source, base, revision, source if adapter is not None else None, saved, config, tokenizer)


def head_options(source: str, revision: str | None) -> dict[str, Any]:
    """Return what lit-ppo writes beside an adapter with a head; nothing where another has written it."""
    from transformers.utils import cached_file

    file = cached_file(
        source, HEAD_FILE, revision=revision,
        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    return {} if file is None else dict(json.loads(Path(file).read_text(encoding="utf-8")))


def load_pretrained(found: Pretrained, options: RewardConfig, device: torch.device, load_kwargs: dict[str, Any]) -> Any:
    """Load the weights, on the CPU unless they are saved quantized.

    Args:
        found: What to load.
        options: `dtype`, `attn_implementation` and `trust_remote_code` count.
        device: Where the model will be: `auto` is bfloat16 on CUDA, else float32.
        load_kwargs: Further arguments of `from_pretrained`.

    Raises:
        RewardError: The weights cannot be read, or some are missing and would be random.
    """
    from transformers import AutoModelForSequenceClassification

    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    if options.quantize != "none" and "quantization_config" in load_kwargs:
        raise RewardError(
            f"`reward.source={found.source!r}`: `reward.quantize` and a callback quantize the same weights. "
            "Leave one of the two out."
        )
    extra: dict[str, Any] = {**load_kwargs, **loading_options(options.quantize, device)}
    if options.attn_implementation is not None:
        extra["attn_implementation"] = options.attn_implementation
    if getattr(found.config, "quantization_config", None) is not None or "quantization_config" in extra:
        extra["device_map"] = {"": device}  # quantized weights are put where they stay
    if options.device_map is not None:
        extra["device_map"] = options.device_map
    try:
        with (
            no_bars(),
            torch.device("cpu"),
        ):  # a device context of the caller's would make transformers ask for accelerate
            model, info = AutoModelForSequenceClassification.from_pretrained(
                found.base,
                config=found.config,
                dtype=getattr(torch, dtype),
                revision=found.revision,
                trust_remote_code=options.trust_remote_code,
                output_loading_info=True,
                **extra,
            )
            if found.adapter is not None:
                from peft import PeftModel  # transformers 5.17 loads adapters itself, but drops their heads

                model = PeftModel.from_pretrained(
                    model, found.adapter, revision=options.revision, torch_device="cpu", low_cpu_mem_usage=False
                )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise RewardError(f"`reward.source={found.source!r}`: its weights could not be loaded: {error}") from error
    if options.quantize != "none":
        make_movable(model)
    absent = [str(key) for key in (*sorted(info["missing_keys"]), *info["mismatched_keys"])]
    absent = [key for key in absent if not found.saved.intersection(key.split("."))]
    if absent:
        raise RewardError(
            f"`reward.source={found.source!r}`: its weights lack {', '.join(absent[:5])}"
            f"{' and more' if len(absent) > 5 else ''}, which would be random. Is this a trained reward model?"
        )
    return model


def _has_head(config: Any) -> bool:
    return any(kind.endswith("ForSequenceClassification") for kind in config.architectures or ())
