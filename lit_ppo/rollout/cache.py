"""Keys and values in contiguous slots, and attention over them: packed prompts (prefill) and one token a row (decode).

Both attentions have one interface, ``attend(layer, q, k, v, spec)``, so that the decoder above them is the same for
both: n tokens in, n outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_ppo.roles.attention import AttentionSpec, masked_attention, window_mask


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


class PrefillAttention:
    """Causal attention within each of several packed prompts, whose keys and values are then stored.

    Args:
        cache: Where to.
        lengths: Tokens of each prompt, all above 0.
        slots: The slots of each prompt: several, when several samples share it.
        device: Of the tokens.
    """

    def __init__(self, cache: SlotCache, lengths: list[int], slots: list[list[int]], device: torch.device) -> None:
        self.cache = cache
        self.width, self.rows, self.total = max(lengths), len(lengths), sum(lengths)
        self.equal = min(lengths) == self.width
        each = torch.tensor(lengths, dtype=torch.int64)
        self.row = torch.arange(self.rows).repeat_interleave(each)
        starts = each.cumsum(0) - each
        self.place = torch.arange(self.total) - starts[self.row]
        copies = max(map(len, slots))
        self.shared = copies > 1
        if self.shared:
            flat = torch.tensor([s for group in slots for s in group])
            owner = torch.arange(self.rows).repeat_interleave(torch.tensor([len(group) for group in slots]))
            spans = each[owner]
            which = torch.arange(len(flat)).repeat_interleave(spans)
            self.to_place = torch.arange(int(spans.sum())) - (spans.cumsum(0) - spans)[which]
            self.source = (starts[owner])[which] + self.to_place
            self.to_slot = flat[which]
            self.source = self.source.to(device, non_blocking=True)
        else:
            self.to_place, self.to_slot = self.place, torch.tensor([group[0] for group in slots])[self.row]
        for name in ("row", "place", "to_place", "to_slot"):
            setattr(self, name, getattr(self, name).to(device, non_blocking=True))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """(n, H, D) queries and (n, HK, D) keys and values of the packed tokens -> (n, H, D)."""
        stored_k, stored_v = (k[self.source], v[self.source]) if self.shared else (k, v)
        self.cache.write(layer, self.to_slot, self.to_place, stored_k, stored_v)
        mask = window_mask(self.width, spec.window, q.device)
        # Right-padded and causal: no real token sees padding, so no further mask is needed.
        out = masked_attention(self._padded(q), self._padded(k), self._padded(v), mask, spec).transpose(1, 2)
        if self.equal:
            return out.reshape(self.total, *out.shape[2:])
        return out[self.row, self.place]

    def _padded(self, x: Tensor) -> Tensor:
        if self.equal:
            padded = x.reshape(self.rows, self.width, *x.shape[1:])
        else:
            padded = x.new_zeros(self.rows, self.width, *x.shape[1:])
            padded[self.row, self.place] = x
        return padded.transpose(1, 2)


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
