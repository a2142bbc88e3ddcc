"""How fast an iteration could be: what a device can do, and the least work of an update and of a rollout.

Only multiplications by matrices are counted, as is usual: of every model the linear layers with the head, not the
embedding. Adapters are left out; recomputation (gradient checkpointing) is not work but its price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn


@dataclass(frozen=True)
class Peak:
    """What a device can do at best."""

    flops: float
    """Operations a second in bf16, without sparsity."""
    bandwidth: float
    """Bytes a second of its memory."""


PEAKS = {
    "B200": Peak(2250e12, 8.0e12),
    "H200": Peak(989e12, 4.8e12),
    "GH200": Peak(989e12, 4.0e12),
    "H100 NVL": Peak(835e12, 3.9e12),
    "H100 PCIe": Peak(756e12, 2.0e12),
    "H100": Peak(989e12, 3.35e12),
    "H800": Peak(989e12, 3.35e12),
    "A100-SXM4-80GB": Peak(312e12, 2.04e12),
    "A100-PCIE-40GB": Peak(312e12, 1.56e12),
    "A100-SXM4-40GB": Peak(312e12, 1.56e12),
    "A100": Peak(312e12, 1.94e12),
    "A800": Peak(312e12, 1.94e12),
    "A40": Peak(149.7e12, 0.696e12),
    "A30": Peak(165e12, 0.933e12),
    "A10G": Peak(70e12, 0.6e12),
    "A10": Peak(125e12, 0.6e12),
    "L40S": Peak(362e12, 0.864e12),
    "L40": Peak(181e12, 0.864e12),
    "L4": Peak(121e12, 0.3e12),
    "RTX 6000 Ada": Peak(182e12, 0.96e12),
    "RTX A6000": Peak(155e12, 0.768e12),
    "RTX 5090": Peak(209.5e12, 1.79e12),
    "RTX 4090": Peak(165.2e12, 1.01e12),
    "RTX 4080": Peak(97.5e12, 0.717e12),
    "RTX 3090": Peak(71e12, 0.936e12),
}
"""By a part of the name that CUDA gives a device; from the makers' data sheets."""


def peak_of(name: str) -> Peak | None:
    """Return what a device of that name can do, or None if it is not known.

    Args:
        name: As `torch.cuda.get_device_name` says it, such as "NVIDIA H200".
    """
    words = f" {name.upper()} ".replace("-", " ")
    fitting = [key for key in PEAKS if f" {key.upper()} ".replace("-", " ") in words]
    return PEAKS[max(fitting, key=len)] if fitting else None


@cache
def device_peak(device: torch.device) -> Peak | None:
    """Return what a device can do; None on the CPU, and on devices that are not known, which is said once."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = peak_of(name)
    if peak is None:
        rank_zero_info(
            f"`update/mfu` and `rollout/share_of_floor` are not logged: the peak rates of a {name!r} are not in "
            "`lit_ppo.speed.PEAKS`, where you can add them."
        )
    return peak


@dataclass(frozen=True)
class Work:
    """What one token costs a model."""

    matrices: int
    """Numbers in its matrices, those of the head included."""
    matrix_bytes: int
    """What they take in memory."""
    kv_bytes: int
    """Keys and values of one token, over all layers."""

    @classmethod
    def of(cls, model: nn.Module, config: Any, without: nn.Module | None = None) -> Work:
        """Count a whole model; one on the meta device will do.

        Args:
            model: Before it is sharded.
            config: Its transformers configuration.
            without: A layer that is not used: the language model's head, where values are computed.
        """
        numbers = size = 0
        for name, module in model.named_modules():
            weight = module._parameters.get("weight")
            if hasattr(module, "num_embeddings") or weight is None or module is without or "lora_" in name:
                continue
            linear = isinstance(module, nn.Linear)  # whose weight, in 4 bits, is a column of bytes
            if linear or weight.dim() == 2:
                numbers += module.in_features * module.out_features if linear else weight.numel()
                size += weight.numel() * weight.element_size()
        text = config.get_text_config()
        heads = text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        stored = 2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or heads) * dim
        dtypes = [p.element_size() for p in model.parameters() if p.is_floating_point()]
        return cls(numbers, size, stored * (min(dtypes) if dtypes else 2))


def decode_floor(work: Work, *, tokens: float, steps: float, contexts: float, peak: Peak) -> float:
    """Return the least seconds in which tokens can be decoded.

    A step reads every matrix once, or multiplies by it for as many tokens as there are, whichever takes longer; and
    every token reads the keys and values of its context.

    Args:
        work: Of the model.
        tokens: How many are decoded.
        steps: In how many steps.
        contexts: Sum over the tokens of how many others each looks at.
        peak: What the device can do.
    """
    read, multiply = steps * work.matrix_bytes / peak.bandwidth, 2 * work.matrices * tokens / peak.flops
    return max(read, multiply) + contexts * work.kv_bytes / peak.bandwidth


def rollout_floor(work: Work, prompts: Sequence[int], responses: Sequence[int], rows: int, peak: Peak) -> float:
    """Return the least seconds in which responses can be sampled, prompts read for nothing.

    Args:
        work: Of the policy.
        prompts: Tokens of each prompt.
        responses: Tokens of each response.
        rows: Sequences decoded at once.
        peak: What the device can do.
    """
    if not responses:
        return 0.0
    tokens = sum(responses)
    contexts = sum(p * r + r * (r + 1) // 2 for p, r in zip(prompts, responses, strict=True))
    return decode_floor(
        work, tokens=tokens, steps=max(max(responses), -(-tokens // max(1, rows))), contexts=contexts, peak=peak
    )


def update_flop(works: Sequence[Work], *, adapters: bool) -> int:
    """Return the operations of forward and backward for one token: 6 a number in a matrix, or 4 where it is frozen.

    Args:
        works: Of each role that is trained.
        adapters: Whether only adapters are.
    """
    return (4 if adapters else 6) * sum(work.matrices for work in works)
