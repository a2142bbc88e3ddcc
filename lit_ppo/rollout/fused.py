"""Decoders of the Llama family with fused layers: ten kernels a layer instead of some forty.

The weights are the model's own. Those that read the same input (queries, keys and values; gate and up) are laid side by
side in one storage, of which the parameters become views, so that one matrix product serves them all: there is no
second copy, and an optimizer that updates the parameters in place updates what decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_ppo.roles.model import decoder_of
from lit_ppo.rollout.cache import AttentionSpec, DecodeAttention
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
    """

    def __init__(self, base: Any, width: int) -> None:
        super().__init__(base)
        from lit_ppo.rollout import layer_kernels

        self.kernels: Any = layer_kernels
        self.decoder = decoder_of(base)
        self.layers = [_Layer(layer) for layer in self.decoder.layers]
        self.reach(width)

    def reach(self, width: int) -> None:
        """Make the rotary table long enough; where it is already, captured graphs go on reading it."""
        if hasattr(self, "table") and len(self.table[0]) >= width:
            return
        weight = self.base.get_input_embeddings().weight
        cos, sin = self.decoder.rotary_emb(weight[:1, None], torch.arange(width, device=weight.device)[None])
        self.table: tuple[Tensor, Tensor] = cos[0].contiguous(), sin[0].contiguous()

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
            x = kernels.add_norm(layer.out(out), residual, *layer.mlp_norm)
            x = layer.down(kernels.swiglu(layer.gate_up(x)))
            after = self.layers[number + 1].norm if number + 1 < len(self.layers) else _norm(self.decoder.norm)
            x = kernels.add_norm(x, residual, *after)
        return x


class _Layer:
    """What a fused layer needs of a transformers decoder layer."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norm, self.mlp_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.qkv = side_by_side([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = side_by_side([mlp.gate_proj, mlp.up_proj])
        self.out: Projection = attention.o_proj
        self.down: Projection = mlp.down_proj
        config = attention.config
        self.heads = config.num_attention_heads, config.num_key_value_heads
        self.head_norms = None
        if hasattr(attention, "q_norm"):
            weight, eps = _norm(attention.q_norm)
            self.head_norms = weight, attention.k_norm.weight, eps
        self.spec = AttentionSpec(scale=attention.scaling, window=getattr(attention, "sliding_window", None))


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight, module.variance_epsilon


def side_by_side(modules: list[Any]) -> Projection:
    """Return one function for linear layers with the same input, whose outputs are joined.

    Plain layers get their weights laid out in one storage, of which their parameters become views. Others (adapted,
    quantized) are called one by one.

    Args:
        modules: Layers with the same input.
    """
    plain = all(type(m) is nn.Linear and type(m.weight.data) is Tensor for m in modules)
    biased = {getattr(m, "bias", None) is not None for m in modules}
    if not plain or len(biased) > 1 or len({m.weight.dtype for m in modules}) > 1:
        return lambda x: torch.cat([m(x) for m in modules], dim=-1)
    weight = _join([m.weight for m in modules])
    bias = _join([m.bias for m in modules]) if biased == {True} else None
    return lambda x: nn.functional.linear(x, weight, bias)


def _join(parameters: list[nn.Parameter]) -> Tensor:
    """Move parameters into one storage, one after the other, and return all of it."""
    first, place = parameters[0].data, parameters[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    joined = True
    for p in parameters:
        joined &= p.is_contiguous() and p.data_ptr() == place and p.untyped_storage().data_ptr() == storage
        place += p.numel() * p.element_size()
    shape = (sum(len(p) for p in parameters), *first.shape[1:])
    if joined:
        return first.as_strided(shape, first.stride())
    whole = torch.cat([p.data for p in parameters])
    for p, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        p.data = part
    return whole
