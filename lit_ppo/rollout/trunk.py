"""A transformers decoder as a function of packed tokens, with attention that is ours: through AttentionInterface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from lit_ppo.roles.attention import AttentionSpec, unreachable
from lit_ppo.roles.fused_head import HeadSpec
from lit_ppo.roles.int8 import dtype_of
from lit_ppo.roles.model import RoleView, decoder_of
from lit_ppo.rollout.cache import DecodeAttention, PrefillAttention, SlotCache


class Attention(Protocol):
    """Attention over packed tokens that also stores keys and values; see `lit_ppo.rollout.cache`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """(n, H, D) queries, (n, HK, D) keys and values -> (n, H, D)."""


NAME = "lit_ppo_slots"
"""Our attention's name in transformers' AttentionInterface."""

STATEFUL_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that look at the longest position of a batch, so that a row would depend on its neighbours."""

PROBE = [[3, 5, 7, 11, 13, 17, 19, 23, 29], [31, 37, 41]]
"""What trunks are compared on, modulo the vocabulary."""

_running: list[Attention] = []
_replaced: list[Any] = []


def unservable(base: Any) -> str | None:
    """Say why a model's attention cannot be ours, as far as its configuration tells; None if nothing speaks against it.

    Args:
        base: A transformers causal LM.
    """
    config = base.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    ropes_bad = [r["rope_type"] for r in ropes if r.get("rope_type") in STATEFUL_ROPE]
    if ropes_bad:
        return f"its rotary embedding ({ropes_bad[0]}) depends on the other sequences of a batch"
    if getattr(config, "kv_lora_rank", None):
        return "it compresses its keys and values, whose heads differ in size"
    return unreachable(base)


def is_sharded(policy: RoleView) -> bool:
    """Whether the actor's layers are wrapped in hooks that gather them."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return any(isinstance(m, FSDPModule | FullyShardedDataParallel) for m in policy.store.modules())


@contextmanager
def our_attention(base: Any) -> Iterator[None]:
    """Make a model's layers call the attention that `run_decoder` was given, and put back theirs afterwards."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _interface)
    config = base.config.get_text_config()
    before, pad = config._attn_implementation, getattr(config, "pad_token_id", None)
    with _attention(base, NAME):  # no mask is made for a name without a mask function
        _replaced.append(before)
        config.pad_token_id = None  # GPT-2 looks for it in its input, on the host: a graph cannot
        try:
            yield
        finally:
            _replaced.pop()
            config.pad_token_id = pad


def theirs(base: Any) -> AbstractContextManager[None]:
    """Inside `our_attention`: compute with the model's own attention again."""
    return _attention(base, _replaced[-1])


@contextmanager
def _attention(base: Any, name: Any) -> Iterator[None]:
    config = base.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def _interface(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """(1, H, n, D) -> (1, n, H, D), by the attention of the run."""
    spec = AttentionSpec.of(query, options)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _running[-1].attend(module.layer_idx, q, k, v, spec)[None], None


class HFTrunk:
    """The model's own forward, with our attention: any architecture that AttentionInterface reaches.

    Args:
        base: A transformers causal LM.
    """

    def __init__(self, base: Any) -> None:
        self.base = base

    def reach(self, width: int) -> None:
        """Get ready for sequences of up to `width` tokens."""

    def refresh(self) -> None:
        """Take the weights as they are now: nothing to do where they are the model's own."""

    def hidden(self, ids: Tensor, places: Tensor, attention: Attention) -> Tensor:
        """Run the decoder over packed tokens.

        Args:
            ids: (n,) int64.
            places: (n,) int64 position of each token in its sequence.
            attention: Of prefill or decode.

        Returns:
            (n, H) last hidden states.
        """
        _running.append(attention)
        try:
            out = decoder_of(self.base)(input_ids=ids[None], position_ids=places[None], use_cache=False)
        finally:
            _running.pop()
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, H) hidden states -> (n, V) logits."""
        return HeadSpec.of(self.base.config)(self.base.get_output_embeddings()(hidden))


def wobble(base: Any) -> float:
    """Compare a model with itself: its forward over a few tokens, and one token after the other with its own cache.

    The two are the same but for rounding, so their difference says how much of it a model makes: in bfloat16 about 2 %
    with 32 layers and random weights, several times that with 4-bit ones, whose products depend on the number of rows.

    Args:
        base: A transformers causal LM.

    Returns:
        The relative difference of the logits, as in `differs`.
    """
    device, vocab = base.get_input_embeddings().weight.device, base.config.get_text_config().vocab_size
    error = norm = 0.0
    with theirs(base):
        for row in PROBE:
            ids = torch.tensor([[i % vocab for i in row]], device=device)
            whole = base(input_ids=ids, use_cache=False).logits[0, -2:].double()
            out = base(input_ids=ids[:, :-2], use_cache=True)
            for at in (-2, -1):
                name = "cache" if "cache" in out else "past_key_values"  # as transformers called it up to 5.23
                out = base(input_ids=ids[:, at:][:, :1], use_cache=True, **{name: out[name]})
                error += float((out.logits[0, -1].double() - whole[at]).square().sum())
            norm += float(whole.square().sum())
    return float((error / max(norm, 1e-30)) ** 0.5)


def differs(trunk: HFTrunk, kernels: Any = None) -> float:
    """Compare a trunk, its attention and its cache with the model's own forward, on a few tokens.

    Args:
        trunk: To be checked; must run inside `our_attention`.
        kernels: `lit_ppo.rollout.kernels`, or None.

    Returns:
        The relative error of the logits: near the rounding of the weights' dtype if all is right.
    """
    base = trunk.base
    device, vocab = base.get_input_embeddings().weight.device, base.config.get_text_config().vocab_size
    rows = [[i % vocab for i in row] for row in PROBE]
    cache = cache_for(base, slots=2, width=16)
    attention: Any = PrefillAttention(cache, [len(row) - 2 for row in rows], [[1], [0]], device)
    first = torch.tensor([i for row in rows for i in row[:-2]], device=device)
    trunk.hidden(first, attention.place, attention)
    slots, found = torch.tensor([1, 0], device=device), []
    for step in (2, 1):
        lengths = torch.tensor([len(row) - step for row in rows], device=device)
        attention = DecodeAttention(cache, slots, lengths, 16, kernels)
        ids = torch.tensor([row[-step] for row in rows], device=device)
        found.append(trunk.logits(trunk.hidden(ids, lengths, attention)).double())
    error = norm = 0.0
    with theirs(base):
        for number, row in enumerate(rows):
            logits = base(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0, -2:].double()
            error += float((torch.stack([f[number] for f in found]) - logits).square().sum())
            norm += float(logits.square().sum())
    return (error / max(norm, 1e-30)) ** 0.5


def cache_for(base: Any, slots: int, width: int) -> SlotCache:
    """Make KV memory for a model.

    Args:
        base: A transformers causal LM.
        slots: Sequences.
        width: Tokens of each.
    """
    return SlotCache(slots=slots, width=width, device=base.get_input_embeddings().weight.device, **cache_shape(base))


def cache_shape(base: Any) -> dict[str, Any]:
    """Return layers, KV heads, head dimension and dtype of a model's keys and values."""
    config, dtype = base.config.get_text_config(), dtype_of(base.get_input_embeddings())
    kind = base.get_input_embeddings().weight.device.type
    return {
        "layers": config.num_hidden_layers,
        "heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "dtype": torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype,
    }
