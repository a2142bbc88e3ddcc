"""Keys and values in contiguous slots, and attention over them: packed prompts (prefill) and one token a row (decode).

Both attentions have one interface, ``attend(layer, q, k, v, spec)``, so that the decoder above them is the same for
both: n tokens in, n outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_ppo.memory.ledger import available, device_use
from lit_ppo.roles.attention import AttentionSpec, masked_attention

SCORES = 2**26
"""Query-key products held at once where prefill needs a mask: a window, a soft cap, the later piece of a prompt."""


class SlotCache:
    """KV memory of every layer: `slots` sequences of up to `width` tokens.

    One further slot takes what rows without a sequence write.

    Args:
        layers: Decoder layers.
        slots: Sequences held at once.
        heads: KV heads.
        width: Tokens a slot can hold.
        dim: Head dimension.
        dtype: Of keys and values.
        device: Where they are.
    """

    def __init__(
        self, layers: int, slots: int, heads: int, width: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (layers, slots + 1, heads, width, dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)  # zeros: what is masked must be finite too
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.slots, self.width = slots, width

    @staticmethod
    def slot_bytes(layers: int, heads: int, width: int, dim: int, dtype: torch.dtype) -> int:
        """Return the memory of one slot."""
        return 2 * layers * heads * width * dim * dtype.itemsize

    @property
    def trash(self) -> int:
        """The slot that nobody reads."""
        return self.slots

    def write(self, layer: int, slots: Tensor, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of n tokens.

        Args:
            layer: Number of the layer.
            slots: (n,) int64 slot of each token.
            places: (n,) int64 its position there.
            k: (n, heads, dim).
            v: (n, heads, dim).
        """
        self.keys[layer][slots, :, places] = k.to(self.keys.dtype)
        self.values[layer][slots, :, places] = v.to(self.values.dtype)


def free_bytes(device: torch.device) -> int | None:
    """Return how much memory a device can still give; None for the CPU, where slots take what they need.

    Args:
        device: Of the actor.
    """
    return available(device_use(device)) if device.type == "cuda" else None


class PrefillAttention:
    """Causal attention within each of several packed prompts, or pieces of prompts, whose keys and values are stored.

    Args:
        cache: Where to; the beginning of a prompt of which this is a later piece is there already.
        lengths: Tokens of each piece, all above 0.
        slots: The slots of each: several, when several samples share a prompt.
        device: Of the tokens.
        starts: How many tokens of its prompt come before each piece. None: none.
    """

    def __init__(
        self,
        cache: SlotCache,
        lengths: list[int],
        slots: list[list[int]],
        device: torch.device,
        starts: list[int] | None = None,
    ) -> None:
        self.cache = cache
        starts = starts or [0] * len(lengths)
        each, before = torch.tensor(lengths), torch.tensor(starts)
        row = torch.arange(len(lengths)).repeat_interleave(each)
        first = each.cumsum(0) - each
        place = torch.arange(len(row)) - first[row] + before[row]
        copies = [len(group) for group in slots]
        if max(copies) > 1:
            owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(copies))
            which = torch.arange(len(owner)).repeat_interleave(each[owner])
            source = torch.arange(len(which)) - (each[owner].cumsum(0) - each[owner] - first[owner])[which]
            to_slot = torch.tensor([s for group in slots for s in group])[which]
        else:
            source, to_slot = None, torch.tensor([group[0] for group in slots])[row]
        blocks = _blocks([0 if start else n for n, start in zip(lengths, starts, strict=True)], first)
        self.later = [
            (int(first[i]), n, start, group[0])
            for i, (n, start, group) in enumerate(zip(lengths, starts, slots, strict=True))
            if start
        ]
        self.order = None
        if len(blocks) + len(self.later) > 1:
            at = [block.at for block in blocks] + [torch.arange(f, f + n) for f, n, _, _ in self.later]
            self.order = torch.cat(at).argsort().to(device, non_blocking=True)
        self.blocks = [block.on(device) for block in blocks]
        self.row, self.place, self.to_slot = (x.to(device, non_blocking=True) for x in (row, place, to_slot))
        self.source = None if source is None else source.to(device, non_blocking=True)
        self.to_place = self.place if self.source is None else self.place[self.source]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """(n, H, D) queries and (n, HK, D) keys and values of the packed tokens -> (n, H, D)."""
        stored = (k, v) if self.source is None else (k[self.source], v[self.source])
        self.cache.write(layer, self.to_slot, self.to_place, *stored)
        parts = [
            block.packed(causal_attention(block.padded(q), block.padded(k), block.padded(v), spec))
            for block in self.blocks
        ]
        for first, length, start, slot in self.later:
            queries, end = q[None, first : first + length].transpose(1, 2), start + length
            keys, values = (x[layer, slot : slot + 1, :, :end] for x in (self.cache.keys, self.cache.values))
            out = causal_attention(queries, keys.to(q.dtype), values.to(q.dtype), spec)
            parts.append(out[0].transpose(0, 1))
        return parts[0] if self.order is None else torch.cat(parts)[self.order]


@dataclass
class _Block:
    """Prompts of similar length, right-padded to the longest. No real token sees padding, as attention is causal."""

    rows: int
    width: int
    at: Tensor
    """(m,) int64, where their tokens are among all packed ones."""
    to: Tensor
    """(m,) int64, where they are among rows * width."""

    def on(self, device: torch.device) -> _Block:
        """Return it on a device."""
        at, to = (x.to(device, non_blocking=True) for x in (self.at, self.to))
        return _Block(self.rows, self.width, at, to)

    def padded(self, x: Tensor) -> Tensor:
        """(n, H, D) packed -> (rows, H, width, D)."""
        taken = x if len(self.at) == len(x) else x[self.at]
        if len(taken) < self.rows * self.width:
            taken = x.new_zeros(self.rows * self.width, *x.shape[1:]).index_copy_(0, self.to, taken)
        return taken.view(self.rows, self.width, *x.shape[1:]).transpose(1, 2)

    def packed(self, x: Tensor) -> Tensor:
        """(rows, H, width, D) -> (m, H, D)."""
        flat = x.transpose(1, 2).reshape(self.rows * self.width, x.shape[1], x.shape[3])
        return flat if len(self.at) == len(flat) else flat[self.to]


def _blocks(lengths: list[int], first: Tensor) -> list[_Block]:
    """Group prompts such that each is at least half as long as the longest of its block: padding stays bounded.

    Args:
        lengths: Of each; 0 for what has no part in it.
        first: (rows,) where the tokens of each begin.
    """
    found: list[list[int]] = []
    for row in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
        if found and 2 * lengths[row] >= lengths[found[-1][0]]:
            found[-1].append(row)
        else:
            found.append([row])
    blocks = []
    for rows in found:
        width, rows = lengths[rows[0]], sorted(rows)
        at = torch.cat([torch.arange(lengths[i]) + first[i] for i in rows])
        to = torch.cat([torch.arange(lengths[i]) + number * width for number, i in enumerate(rows)])
        blocks.append(_Block(len(rows), width, at, to))
    return blocks


def causal_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of the last T of S tokens to those before them, in pieces where it needs a mask.

    Args:
        q: (B, H, T, D).
        k: (B, HK, S, D), HK a divisor of H, S at least T.
        v: (B, HK, S, D).
        spec: Scale, window and soft cap.

    Returns:
        (B, H, T, D).
    """
    (batch, heads, queries), keys, window = q.shape[:3], k.shape[2], spec.window or k.shape[2]
    if queries == keys and window >= keys and spec.softcap is None:
        return masked_attention(q, k, v, None, spec)
    size = max(1, SCORES // (batch * heads * keys))
    parts = []
    for first in range(0, queries, size):
        last = min(first + size, queries)
        end = keys - queries + last
        begin = max(0, end - (last - first) - window + 1)
        at = torch.arange(end - (last - first), end, device=q.device)[:, None]
        place = torch.arange(begin, end, device=q.device)
        mask = (place <= at) & (place > at - window)
        parts.append(masked_attention(q[:, :, first:last], k[:, :, begin:end], v[:, :, begin:end], mask, spec))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


class DecodeAttention:
    """Attention of one new token a row over its slot, the token itself included.

    Args:
        cache: KV memory.
        slots: (B,) int64 slot of each row; read when called, so its content may change under a captured graph.
        lengths: (B,) int64 tokens stored before this one; likewise.
        bound: More than every length: how much of a slot is looked at without kernels.
        kernels: `lit_ppo.rollout.kernels`, or None for plain PyTorch.
    """

    def __init__(self, cache: SlotCache, slots: Tensor, lengths: Tensor, bound: int, kernels: Any = None) -> None:
        self.cache, self.slots, self.lengths, self.kernels = cache, slots, lengths, kernels
        self.bound = min(bound, cache.width)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """(B, H, D) queries and (B, HK, D) new keys and values -> (B, H, D)."""
        self.cache.write(layer, self.slots, self.lengths, k, v)
        return self.read(layer, q, spec)

    def read(self, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend to what is stored, where the new keys and values already are."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if self.kernels is not None:
            out: Tensor = self.kernels.decode_attention(q, keys, values, self.slots, self.lengths, spec)
            return out
        place = torch.arange(self.bound, device=q.device)
        seen = place <= self.lengths[:, None]
        if spec.window is not None:
            seen &= place > self.lengths[:, None] - spec.window
        k, v = (x[self.slots, :, : self.bound].to(q.dtype) for x in (keys, values))
        return masked_attention(q[:, :, None], k, v, seen[:, None, None], spec)[:, :, 0]

    def fused(self, layer: int, qkv: Tensor, spec: AttentionSpec, heads: int, table: Any, norms: Any) -> Tensor:
        """Attend from what the projections give, in one kernel; see `kernels.fused_attention`."""
        stored = self.cache.keys[layer], self.cache.values[layer], self.slots, self.lengths
        out: Tensor = self.kernels.fused_attention(qkv, *stored, spec, heads, table, norms)
        return out
