"""Decoders of the Llama family with fused layers: ten kernels a layer instead of some forty.

The weights are the model's own. Those that read the same input (queries, keys and values; gate and up) are laid side by
side in one storage, of which the parameters become views, so that one matrix product serves them all: there is no
second copy, and an optimizer that updates the parameters in place updates what decodes. Of LoRA adapters, which are
small and often float32, copies in the trunk's dtype are made at the start of each rollout.

Only weights are used, not the forwards of the modules that hold them: so sharded layers, whose forwards gather, are
served too while they are gathered. Their storage is not ours to arrange, so they are multiplied one by one unless FSDP
has laid them side by side already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_ppo.roles.attention import AttentionSpec
from lit_ppo.roles.int8 import dtype_of
from lit_ppo.roles.model import decoder_of
from lit_ppo.rollout.cache import DecodeAttention
from lit_ppo.rollout.trunk import Attention, HFTrunk

FAMILY = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
"""Decoders whose layers are: norm, attention, add, norm, SwiGLU, add."""

Projection = Callable[[Tensor], Tensor]


def unfusable(base: Any) -> str | None:
    """Say why a model's layers cannot be fused, or None."""
    decoder, config = decoder_of(base), base.config.get_text_config()
    if type(decoder).__name__ not in FAMILY:
        return f"{type(decoder).__name__} is not one of {', '.join(FAMILY)}"
    if getattr(config, "hidden_act", None) not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}"
    if len({layer.input_layernorm.weight.dtype for layer in decoder.layers}) > 1:
        return "its layers differ in dtype"
    return None


class FusedTrunk(HFTrunk):
    """The decoder's own weights in fused layers. Checked against the model's forward before it is used.

    Args:
        base: A transformers causal LM for which `unfusable` is None, on a device that Triton serves.
        width: Longest sequence.
        adapter: The LoRA adapter to decode with; None is the bare trunk.
        arrange: Lay weights side by side. False: the storage belongs to a sharding strategy.
    """

    def __init__(self, base: Any, width: int, adapter: str | None = None, arrange: bool = True) -> None:
        super().__init__(base)
        from lit_ppo.rollout import layer_kernels, matmul_kernels

        self.kernels: Any = layer_kernels
        self.products: Any = matmul_kernels
        self.decoder = decoder_of(base)
        self.layers = [_Layer(layer, adapter, arrange) for layer in self.decoder.layers]
        self.reach(width)

    def reach(self, width: int) -> None:
        """Make the rotary table long enough; where it is already, captured graphs go on reading it."""
        if hasattr(self, "table") and len(self.table[0]) >= width:
            return
        embedding = self.base.get_input_embeddings()
        places = torch.arange(width, device=embedding.weight.device)[None]
        cos, sin = self.decoder.rotary_emb(torch.empty(1, 1, dtype=dtype_of(embedding), device=places.device), places)
        self.table: tuple[Tensor, Tensor] = cos[0].contiguous(), sin[0].contiguous()

    def refresh(self) -> None:
        """Take the adapters as they are now."""
        for layer in self.layers:
            for projection in (layer.qkv, layer.out, layer.gate_up, layer.down):
                if isinstance(projection, _Adapted):
                    projection.refresh()

    def hidden(self, ids: Tensor, places: Tensor, attention: Attention) -> Tensor:
        """Run the decoder over packed tokens; as `HFTrunk.hidden`."""
        kernels = self.kernels
        residual = self.decoder.embed_tokens(ids)
        x = kernels.add_norm(residual, None, *self.layers[0].norm)
        for number, layer in enumerate(self.layers):
            qkv = layer.qkv(x)
            if isinstance(attention, DecodeAttention):
                out = attention.fused(number, qkv, layer.spec, layer.heads[0], self.table, layer.head_norms)
            else:
                q, k, v = kernels.rotate(qkv, self.table, places, layer.heads, layer.head_norms)
                out = attention.attend(number, q, k, v, layer.spec).flatten(1)
            x = self._add(layer.out, out, residual, *layer.mlp_norm)
            after = self.layers[number + 1].norm if number + 1 < len(self.layers) else _norm(self.decoder.norm)
            x = self._add(layer.down, self._gated(layer.gate_up, x), residual, *after)
        return x

    def _add(self, projection: Projection, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Project, add to the residual stream in place, and return its norm."""
        tiles = self.products.tiles_of_parts(x, getattr(projection, "weight", None))
        if tiles is None or projection.bias is not None:  # type: ignore[attr-defined]
            return self.kernels.add_norm(projection(x), residual, weight, eps)
        parts = self.products.product_parts(x, projection.weight, tiles)  # type: ignore[attr-defined]
        return self.products.add_parts_norm(parts, residual, weight, eps)

    def _gated(self, projection: Projection, x: Tensor) -> Tensor:
        """SwiGLU of the projections gate and up."""
        tiles = self.products.tiles_of_gated(x, getattr(projection, "weight", None))
        if tiles is None or projection.bias is not None:  # type: ignore[attr-defined]
            return self.kernels.swiglu(projection(x))
        return self.products.gated_product(x, projection.weight, tiles)  # type: ignore[attr-defined]


class _Layer:
    """What a fused layer needs of a transformers decoder layer."""

    def __init__(self, layer: Any, adapter: str | None, arrange: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norm, self.mlp_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.qkv = side_by_side([attention.q_proj, attention.k_proj, attention.v_proj], adapter, arrange)
        self.gate_up = side_by_side([mlp.gate_proj, mlp.up_proj], adapter, arrange)
        self.out = side_by_side([attention.o_proj], adapter, arrange)
        self.down = side_by_side([mlp.down_proj], adapter, arrange)
        config = attention.config
        self.heads = config.num_attention_heads, config.num_key_value_heads
        self.head_norms = None
        if hasattr(attention, "q_norm"):
            weight, eps = _norm(attention.q_norm)
            self.head_norms = weight, attention.k_norm.weight, eps
        self.spec = AttentionSpec(scale=attention.scaling, window=getattr(attention, "sliding_window", None))


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight, module.variance_epsilon


def side_by_side(modules: list[Any], adapter: str | None = None, arrange: bool = True) -> Projection:
    """Return one function for linear layers with the same input, whose outputs are joined.

    Plain layers get their weights laid out in one storage, of which their parameters become views; so do those under
    LoRA adapters. Others (quantized, merged) are called one by one.

    Args:
        modules: Layers with the same input.
        adapter: The LoRA adapter to compute with.
        arrange: Lay weights side by side where they are not yet.
    """
    if adapter is not None:
        modules = [_without_others(m, adapter) for m in modules]
    if adapter is not None and all(_is_lora(m, adapter) for m in modules):
        return _Adapted(modules, adapter, arrange)
    plain = all(type(m) is nn.Linear and type(m.weight.data) is Tensor for m in modules)
    biased = {getattr(m, "bias", None) is not None for m in modules}
    plain = plain and (arrange or all(_adjoin([m.weight for m in modules]) and m.bias is None for m in modules))
    if not plain or len(biased) > 1 or len({m.weight.dtype for m in modules}) > 1:
        return lambda x: _one_by_one(modules, x)
    weight = _join([m.weight for m in modules])
    return _Plain(weight, _join([m.bias for m in modules]) if biased == {True} else None)


def _one_by_one(modules: list[Any], x: Tensor) -> Tensor:
    """(n, in) -> (n, sum of outs), by the layers' own forwards."""
    return torch.cat([m(x) for m in modules], dim=-1) if len(modules) > 1 else modules[0](x)


class _Plain:
    """Linear layers with the same input as one product."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """(n, in) -> (n, sum of outs)."""
        return nn.functional.linear(x, self.weight, self.bias)


class _Adapted:
    """Linear layers with the same input and a LoRA adapter each: one product for all, then one a layer."""

    def __init__(self, modules: list[Any], adapter: str, arrange: bool) -> None:
        self.modules, self.adapter = modules, adapter
        self.base = side_by_side([m.base_layer for m in modules], None, arrange)
        self.ranks = [len(m.lora_A[adapter].weight) for m in modules]
        self.widths = [len(m.lora_B[adapter].weight) for m in modules]
        self.down: Tensor | None = None
        self.ups: list[Tensor] = []

    def _weights(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        down = torch.cat([m.lora_A[self.adapter].weight.detach() for m in self.modules]).to(dtype)
        scaled = [m.lora_B[self.adapter].weight.detach() * m.scaling[self.adapter] for m in self.modules]
        return down, [up.to(dtype) for up in scaled]

    def refresh(self) -> None:
        """Copy the adapters in place, so that captured graphs see them."""
        if self.down is not None:
            down, ups = self._weights(self.down.dtype)
            self.down.copy_(down)
            for mine, up in zip(self.ups, ups, strict=True):
                mine.copy_(up)

    def __call__(self, x: Tensor) -> Tensor:
        """(n, in) -> (n, sum of outs)."""
        if self.down is None:
            self.down, self.ups = self._weights(x.dtype)
        out = self.base(x)
        low = nn.functional.linear(x, self.down).split(self.ranks, dim=1)
        for part, small, up in zip(out.split(self.widths, dim=1), low, self.ups, strict=True):
            part.addmm_(small, up.t())
        return out


def _without_others(module: Any, adapter: str) -> Any:
    """Return what is under a layer's adapters, if none of them is the one that is asked for."""
    names = getattr(module, "lora_A", None)
    return module if names is None or adapter in names or module.merged else module.base_layer


def _is_lora(module: Any, adapter: str) -> bool:
    """Whether a layer is ``base(x) + scale * B A x`` with this adapter, and nothing else."""
    if adapter not in getattr(module, "lora_A", ()) or module.merged:
        return False
    unusual = module.lora_variant.get(adapter) if hasattr(module, "lora_variant") else module.use_dora.get(adapter)
    dropout, biased = module.lora_dropout[adapter], module.lora_B[adapter].bias is not None
    return not unusual and not biased and isinstance(dropout, nn.Identity)


def _adjoin(parameters: list[nn.Parameter]) -> bool:
    """Whether parameters lie in one storage, one after the other."""
    place, storage = parameters[0].data_ptr(), parameters[0].untyped_storage().data_ptr()
    for p in parameters:
        if not p.is_contiguous() or p.data_ptr() != place or p.untyped_storage().data_ptr() != storage:
            return False
        place += p.numel() * p.element_size()
    return True


def _join(parameters: list[nn.Parameter]) -> Tensor:
    """Move parameters into one storage, one after the other, and return all of it."""
    first = parameters[0].data
    shape = (sum(len(p) for p in parameters), *first.shape[1:])
    if _adjoin(parameters):
        return first.as_strided(shape, first.stride())
    whole = torch.cat([p.data for p in parameters])
    for p, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        p.data = part
    return whole
