"""Loading the models of the roles, and what every one of them gets: no dropout, one dtype rule."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lit_ppo.config import DTYPES, RoleConfig
from lit_ppo.hf_folder import no_bars

_DTYPES = {name: getattr(torch, name) for name in DTYPES if name != "auto"}


def resolve_dtype(
    dtype: str, *, trained: bool, device: torch.device, true_dtype: torch.dtype | None = None
) -> torch.dtype:
    """Return the dtype of a role: `auto` is the trainer's true precision, else float32, or bfloat16 if frozen on CUDA.

    Args:
        dtype: As in RoleConfig.
        trained: Whether an optimizer updates these very weights.
        device: Where they will be.
        true_dtype: What the trainer's precision makes of every weight, or None.
    """
    if dtype != "auto":
        return _DTYPES[dtype]
    if true_dtype is not None:
        return true_dtype
    return torch.bfloat16 if device.type == "cuda" and not trained else torch.float32


def load_causal_lm(config: RoleConfig, dtype: torch.dtype, **kwargs: Any) -> Any:
    """Load a causal language model in eval mode, dropout off, on the CPU.

    Raises:
        ValueError: Weights are missing at the source, which transformers would make up.
    """
    from transformers import AutoModelForCausalLM

    with no_bars():
        model, info = AutoModelForCausalLM.from_pretrained(
            config.source, output_loading_info=True, **_options(config, dtype), **kwargs
        )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{config.source!r} is not a whole {type(model).__name__}: it has no weights for {', '.join(missing[:3])}"
            f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}. Give a causal language model."
        )
    return _ready(model)


def empty_model(config: RoleConfig, dtype: torch.dtype, *, critic: bool) -> Any:
    """Build what `load_causal_lm` or `load_critic` loads on the meta device: its shapes, for weights that will come.

    Args:
        config: Names the source.
        dtype: Of the weights.
        critic: Whether it is a critic.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    options = _options(config, dtype)
    revision = {"revision": options.pop("revision")} if "revision" in options else {}
    labels = {"num_labels": 1} if critic else {}
    settings = AutoConfig.from_pretrained(
        config.source, trust_remote_code=config.trust_remote_code, **revision, **labels
    )
    with torch.device("meta"):
        return _ready(
            (AutoModelForSequenceClassification if critic else AutoModelForCausalLM).from_config(settings, **options)
        )


def load_critic(config: RoleConfig, dtype: torch.dtype, seed: int, **kwargs: Any) -> Any:
    """Load a critic as a one-label sequence classifier; a checkpoint without a head gets a zero one.

    Starting from a language model, all values are 0 at first (the N+ details start near 0 as well); starting from a
    reward model its head is kept.

    Args:
        config: Names the source.
        dtype: Of the weights.
        seed: Of what transformers initialises before it is zeroed.
        kwargs: Passed to `from_pretrained`.
    """
    from transformers import AutoModelForSequenceClassification

    with torch.random.fork_rng(devices=[]), _quiet_missing_head(), no_bars():
        torch.manual_seed(seed)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            config.source, num_labels=1, output_loading_info=True, **_options(config, dtype), **kwargs
        )
    if any("score" in key for key in info["missing_keys"]):
        nn.init.zeros_(model.score.weight)
    return _ready(model)


def critic_from(model: Any) -> Any:
    """Build a critic with a zero head from a causal LM that is already in memory, copying its trunk."""
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(model.config)
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        critic = AutoModelForSequenceClassification.from_config(config, dtype=model.dtype)
    critic.base_model.load_state_dict(model.base_model.state_dict())
    nn.init.zeros_(critic.score.weight)
    return _ready(critic.to(model.device))


def freeze(model: Any) -> Any:
    """Put a model in eval mode with no gradients and no dropout."""
    model = _ready(model)
    return model.requires_grad_(False)


def disable_dropout(model: nn.Module) -> None:
    """Turn every dropout off for good: a ratio between two dropout masks is noise.

    Covers modules and the probabilities that attention layers keep as plain numbers.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _ready(model: Any) -> Any:
    disable_dropout(model)
    return model.eval()


def _options(config: RoleConfig, dtype: torch.dtype) -> dict[str, Any]:
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": config.trust_remote_code}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    if config.revision is not None:
        options["revision"] = config.revision
    return options


@contextmanager
def _quiet_missing_head() -> Iterator[None]:
    """Keep transformers from warning that the critic's head is new: it is meant to be."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def fingerprint(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash names, shapes and a few values of each weight: enough to tell that a frozen role is the same one.

    Independent of dtype up to bfloat16 rounding, and cheap: a few numbers of each tensor are read.

    Args:
        named: Pairs of name and weight, in a fixed order.
    """
    digest = hashlib.sha256()
    for name, weight in named:
        sample = weight.detach().reshape(-1)[:: max(1, weight.numel() // 8)][:8]
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        if sample.is_floating_point():
            digest.update(str(sample.to(torch.bfloat16).float().tolist()).encode())
    return digest.hexdigest()[:16]
