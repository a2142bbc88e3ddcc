"""Padding-free forwards: the real tokens of all rows stand in one row, and attention keeps the sequences apart.

A model is *attached* once: its attention gets a name of ours in transformers' AttentionInterface. The function behind
that name computes a packed batch if it is given one, and otherwise does what the model did before, so that `generate`
and every other forward are unchanged. What decides is an argument of the call, never a switch: a layer that gradient
checkpointing runs again in the backward gets the same argument again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_ppo.experience import Rollout
from lit_ppo.roles.attention import AttentionSpec, masked_attention, unreachable, window_mask

PREFIX = "lit_ppo_packed_"
"""Before the name of the model's own attention."""

ARGUMENT = "lit_ppo_packing"
"""Name of the argument that carries a `Packing` through a model's layers to its attention."""


@dataclass
class Packing:
    """Where the sequences of a packed row begin and end."""

    lengths: list[int]
    """Tokens of each sequence, all above 0."""
    bounds: Tensor
    """(B + 1,) int32 on the device: 0 and the running sum of the lengths."""


@dataclass
class Layout:
    """Where the real tokens of a micro-batch are: index tensors, made on the host from lengths, without a sync.

    T tokens are run (prompt and response, but no row's last token, which predicts nothing); N tokens are predicted.
    """

    tokens: Tensor
    """(T,) int64 cells of the (B, P + R) grid of prompt and response ids."""
    positions: Tensor
    """(T,) int64 position of each in its sequence."""
    states: Tensor
    """(N,) int64: which of the T states predicts each response token."""
    padded_states: Tensor
    """(N,) int64: the same in a (B, P + R - 1) grid."""
    cells: Tensor
    """(N,) int64 cells of the (B, R) grid of response tokens."""
    packing: Packing

    @staticmethod
    def of(rollout: Rollout) -> Layout:
        """Make the layout of a micro-batch."""
        width, response = rollout.prompts.ids.shape[1], rollout.ids.shape[1]
        p, r = torch.tensor(rollout.on_host(), dtype=torch.long).reshape(-1, 2).unbind(1)
        row, position, start = _runs(p + r - 1)
        predicted, step, _ = _runs(r)
        lengths = p + r - 1
        found = [
            row * (width + response) + (width - p)[row] + position,
            position,
            (start + p - 1)[predicted] + step,
            predicted * (width + response - 1) + width - 1 + step,
            predicted * response + step,
            torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        ]
        flat, device = torch.cat(found), rollout.ids.device
        if device.type == "cuda":
            flat = flat.pin_memory()  # or a copy of this size would wait for the device
        parts = flat.to(device, non_blocking=True).split([len(x) for x in found])
        tokens, positions, states, padded_states, cells, bounds = parts
        packing = Packing(lengths.tolist(), bounds.int())
        return Layout(tokens, positions, states, padded_states, cells, packing)


def _runs(lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For runs of the given lengths, one after the other: each element's run, its place there, and each run's start."""
    run = torch.arange(len(lengths)).repeat_interleave(lengths)
    start = lengths.cumsum(0) - lengths
    return run, torch.arange(len(run)) - start[run], start


def attach(base: Any) -> str | None:
    """Make a model able to run packed batches.

    Args:
        base: A transformers model. Only its configuration is changed, in what is never saved.

    Returns:
        Why it cannot, or None if it can.
    """
    reason = unreachable(base)
    if reason is not None:
        return reason
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = base.config.get_text_config()
    own = config._attn_implementation or ""
    if own.startswith(PREFIX):
        return None
    if is_flash(own):
        return None
    masks = AttentionMaskInterface()
    if own not in masks or (own != "eager" and own not in ALL_ATTENTION_FUNCTIONS):
        return f"its attention implementation is {own!r}, which is not known to transformers' AttentionInterface"
    AttentionInterface.register(PREFIX + own, functools.partial(_attention, own))
    AttentionMaskInterface.register(PREFIX + own, masks[own])
    config._attn_implementation = PREFIX + own
    return None


def is_flash(name: str) -> bool:
    """Whether an attention implementation is a flash-attn package or kernel, which runs packed batches by itself."""
    return name.startswith("flash_attention") or "/" in name


def packed_states(decoder: Callable[..., Any], ids: Tensor, layout: Layout, own: str) -> Tensor:
    """Run an attached model's decoder over the real tokens of a micro-batch.

    Args:
        decoder: Turns ids into hidden states.
        ids: (B, P + R) int64 prompt and response ids.
        layout: Of the micro-batch.
        own: The model's attention implementation.

    Returns:
        (T, H) last hidden states.
    """
    packing = layout.packing
    extra: dict[str, Any]
    if is_flash(own):
        longest = max(packing.lengths)
        extra = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), packing.bounds)  # transformers' own names
        extra |= dict.fromkeys(("max_length_q", "max_length_k"), longest)
        extra["attention_mask"] = None
    else:  # a mask of four dimensions is taken as it is
        extra = {ARGUMENT: packing, "attention_mask": ids.new_empty(1, 1, 1, 0, dtype=torch.bool)}
    hidden: Tensor = decoder(
        input_ids=ids.flatten().index_select(0, layout.tokens)[None],
        position_ids=layout.positions[None],
        use_cache=False,
        **extra,
    ).last_hidden_state
    return hidden[0]


def _attention(
    own: str, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> Any:
    """(1, H, T, D) -> (1, T, H, D) for a packed batch; else what the model's own attention gives."""
    packing: Packing | None = options.pop(ARGUMENT, None)
    if packing is None:
        return _own_attention(own, module)(module, query, key, value, attention_mask, **options)
    spec = AttentionSpec.of(query, options)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, packing, spec)[None], None


def _own_attention(own: str, module: Any) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(own, eager)


def attend(q: Tensor, k: Tensor, v: Tensor, packing: Packing, spec: AttentionSpec) -> Tensor:
    """Causal attention within each of several packed sequences, differentiable.

    On CUDA in half precision one FlashAttention call for all; else, and where a soft cap is asked for, one call a
    sequence.

    Args:
        q: (T, H, D).
        k: (T, HK, D), HK a divisor of H.
        v: (T, HK, D).
        packing: The sequences.
        spec: Scale, window, soft cap.

    Returns:
        (T, H, D).
    """
    kind = q.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else v.dtype
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)  # rotary embeddings may have raised some
    run = _flash if _flash_serves(q, v, spec) else _one_by_one
    return run(q, k, v, packing, spec)


def _flash_serves(q: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    """Whether FlashAttention, as it is part of PyTorch, has a kernel for this."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or spec.softcap is not None:
        return False
    dim = q.shape[-1]
    return dim == v.shape[-1] and dim % 8 == 0 and dim <= 256 and _flash_built(q.device.index)


@functools.cache
def _flash_built(device: int) -> bool:
    built = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device) >= (8, 0)


def _flash(q: Tensor, k: Tensor, v: Tensor, packing: Packing, spec: AttentionSpec) -> Tensor:
    # The operator under torch.nn.attention.varlen.varlen_attn, whose own signature differs between torch 2.11 and 2.13.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    bounds = packing.bounds.to(q.device)  # of a role on several devices
    longest = max(2, *packing.lengths)  # queries of one token alone would be laid out in another way
    window = None if spec.window is None or spec.window >= longest else spec.window - 1
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, bounds, longest, longest, 0.0, True, False,
        scale=spec.scale, window_size_left=window, window_size_right=None if window is None else 0,
    )[0]  # fmt: skip
    return out


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, packing: Packing, spec: AttentionSpec) -> Tensor:
    if q.is_cuda and q.dtype == torch.float32:  # where the kernels that save memory know no grouped queries
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    outs = []
    for parts in zip(*(x.split(packing.lengths) for x in (q, k, v)), strict=True):
        one = [x.transpose(0, 1)[None] for x in parts]
        mask = window_mask(len(parts[0]), spec.window, q.device)
        outs.append(masked_attention(one[0], one[1], one[2], mask, spec)[0].transpose(0, 1))
    return torch.cat(outs)
