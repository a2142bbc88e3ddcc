"""Replacing linear layers by bitsandbytes' quantized ones, what that costs and frees, and keeping them unsaved."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lit_ppo.callbacks._common import clean_name

MODES = ("nf4", "fp4", "int8")
SKIP = ("score", "classifier", "lm_head", "head", "v_head", "value_head", "lora_A", "lora_B")
"""Submodules that stay at full precision unless told otherwise: heads and adapters."""
PROBE_TOKENS = 32
PROBE_ROWS = 8
_MARK = "_lit_ppo_kept_out"


@dataclass
class QuantizationReport:
    """What quantizing one module did."""

    layers: int
    """Linear layers that are quantized."""
    bytes_before: int
    """Parameters and buffers at full precision."""
    bytes_after: int
    """Parameters, buffers and quantization constants now."""
    layer_error: float | None = None
    """Mean over layers of the relative error of their output on normally distributed inputs. None: not measured."""
    worst_layer: str | None = None
    """The layer whose output is furthest off."""
    worst_error: float | None = None
    """Its relative error."""
    output_error: float | None = None
    """Relative error of the module's output on random tokens, for transformers models that read token ids."""

    @property
    def bytes_freed(self) -> int:
        """How much smaller the module is."""
        return self.bytes_before - self.bytes_after

    def __str__(self) -> str:
        """Return one line for a log."""
        mib = 2**20
        text = (
            f"{self.layers} layers, {self.bytes_before / mib:,.1f} -> {self.bytes_after / mib:,.1f} MiB "
            f"({self.bytes_freed / mib:,.1f} MiB freed)"
        )
        if self.layer_error is None:
            return f"{text}, error not measured"
        text += f", layer error {self.layer_error:.2%} (worst {self.worst_error:.2%}: {self.worst_layer})"
        return text if self.output_error is None else f"{text}, output error {self.output_error:.2%}"


def loading_config(
    mode: str,
    device: torch.device,
    double_quant: bool = True,
    skip: Sequence[str] = SKIP,
    compute_dtype: torch.dtype | None = None,
) -> Any:
    """Return what makes `from_pretrained` quantize each weight as it is read: the whole is never in memory.

    Args:
        mode: One of `MODES`.
        device: Where the model will be.
        double_quant: Also quantize the constants of 4-bit blocks.
        skip: Submodules that stay at full precision.
        compute_dtype: What 4-bit layers compute in; None: bfloat16 on CUDA, else float32.
    """
    from transformers import BitsAndBytesConfig

    if mode == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=list(skip))
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=mode,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=compute_dtype or default,
        llm_int8_skip_modules=list(skip),
    )


def quantized_layers(module: nn.Module) -> dict[str, Any]:
    """Return the bitsandbytes layers in a module, by name."""
    bitsandbytes = sys.modules.get("bitsandbytes")  # not imported: there are none
    if bitsandbytes is None:
        return {}
    kinds = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)
    return {n: m for n, m in module.named_modules() if isinstance(m, kinds)}


def linear_layers(module: nn.Module, skip: list[str]) -> dict[str, nn.Module]:
    """Return the linear layers that can be quantized: not skipped, and not sharing their weight with another module.

    Args:
        module: Where to look, itself included.
        skip: Names of submodules (`score`, `decoder.final`) to leave alone, with all they contain.
    """
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", nn.Linear)  # GPT-2's linear layer
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    return {
        name: layer
        for name, layer in module.named_modules()
        # Not subclasses: those (in nn.MultiheadAttention, say) have their weight read from outside.
        if type(layer) in (nn.Linear, conv1d)
        and uses[id(layer.weight)] == 1
        and not any(f".{s}." in f".{name}." for s in skip)
    }


@torch.no_grad()
def quantize_(
    module: nn.Module,
    layers: dict[str, nn.Module],
    *,
    mode: str,
    double_quant: bool,
    compute_dtype: torch.dtype | None,
    device: torch.device | None,
    probe: bool,
) -> tuple[nn.Module, QuantizationReport]:
    """Quantize linear layers in place.

    Args:
        module: Holds the layers; it stays where it is.
        layers: From `linear_layers`.
        mode: One of `MODES`.
        double_quant: Also quantize the constants of 4-bit blocks (https://arxiv.org/abs/2305.14314).
        compute_dtype: What 4-bit layers compute in; None: the dtype of their input.
        device: Where to quantize; None: where each weight is.
        probe: Measure errors.

    Returns:
        The module (another one if it was a linear layer itself) and the report.
    """
    before = nbytes(module)
    expected = _probe_output(module) if probe else None
    errors: dict[str, float] = {}
    made: dict[str, nn.Module] = {}
    for name, layer in layers.items():
        made[name] = _quantized(layer, mode, double_quant, compute_dtype, device)
        if probe:
            weight, restored = _weight(layer), _dequantized(made[name])
            errors[name] = _layer_error(weight, restored)
            weight.copy_(
                restored
            )  # the probe sees the rounded weights; bitsandbytes' layers must not run before a move
    output = _probe_output(module) if probe else None
    holder = nn.ModuleDict({"module": module})
    for name, new in made.items():
        parent, _, attribute = f"module.{name}".rstrip(".").rpartition(".")
        owner = holder.get_submodule(parent)
        setattr(owner, attribute, new) if parent else holder.__setitem__("module", new)
        if isinstance(owner, nn.TransformerEncoderLayer):
            owner.activation_relu_or_gelu = 0  # turns off its fast path, which reads the weights itself
    module = holder["module"]
    report = QuantizationReport(len(made), before, nbytes(module))
    if errors:
        report.layer_error = sum(errors.values()) / len(errors)
        report.worst_layer = max(errors, key=lambda n: errors[n]) or "itself"
        report.worst_error = max(errors.values())
    if expected is not None and output is not None:
        report.output_error = _relative(output, expected)
    return module, report


def report_loaded(module: nn.Module) -> QuantizationReport:
    """Return the report of a module that was quantized while it was loaded: its full precision never existed."""
    layers = quantized_layers(module)
    after = nbytes(module)
    size = next(p.dtype.itemsize for p in module.parameters() if p.is_floating_point())
    packed = {t.untyped_storage().data_ptr(): t.nbytes for m in layers.values() for t in (m.weight, *constants(m))}
    full = sum(m.in_features * m.out_features * size for m in layers.values())
    return QuantizationReport(len(layers), after - sum(packed.values()) + full, after)


def prepare(module: nn.Module) -> None:
    """Make bitsandbytes' layers movable between devices, before and after their first forward.

    4-bit layers would repack their weights for the CPU in a forward; the packed form cannot move, rounds the constants
    to bfloat16 and refuses some shapes. 8-bit layers would leave their constants behind.
    """
    for layer in quantized_layers(module).values():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
        if hasattr(layer.weight, "SCB"):
            object.__setattr__(layer, "_apply", MethodType(_apply_8bit, layer))


def _apply_8bit(self: Any, fn: Any, recurse: bool = True) -> Any:
    nn.Module._apply(self, fn, recurse)
    for holder in (self.weight, self.state):
        if getattr(holder, "CB", None) is not None:
            holder.CB = self.weight.data
        if getattr(holder, "SCB", None) is not None:
            holder.SCB = holder.SCB.to(self.weight.device)
    return self


def nbytes(module: nn.Module) -> int:
    """Return the bytes of parameters, buffers and quantization constants; what layers share counts once."""
    more = [t for layer in quantized_layers(module).values() for t in constants(layer)]
    tensors = (*module.parameters(), *module.buffers(), *more)
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in tensors}.values())


def fingerprint(module: nn.Module) -> int:
    """Return a sum over all bits of the parameters, to tell other weights from the same ones."""
    return sum(int(p.detach().contiguous().view(torch.uint8).sum(dtype=torch.int64)) for p in module.parameters())


def constants(layer: Any) -> list[Tensor]:
    """Return the tensors of a quantized layer beside its weight."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        scale = layer.weight.SCB if getattr(layer.weight, "SCB", None) is not None else layer.state.SCB
        return [] if scale is None else [scale]
    nested = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [state.absmax, state.code, *nested]


def _weight(layer: Any) -> Tensor:
    """(out, in), also of GPT-2's transposed layer."""
    return layer.weight.detach() if isinstance(layer, nn.Linear) else layer.weight.detach().t()


def _quantized(
    layer: Any, mode: str, double_quant: bool, compute_dtype: torch.dtype | None, device: torch.device | None
) -> nn.Module:
    import bitsandbytes as bnb

    weight = _weight(layer).contiguous()
    home = weight.device
    features = {"input_features": weight.shape[1], "output_features": weight.shape[0], "bias": layer.bias is not None}
    if mode == "int8":
        new = bnb.nn.Linear8bitLt(**features, has_fp16_weights=False, threshold=6.0, device="meta")
        # It quantizes on the way from the CPU.
        new.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False).to(device or home)
    else:
        kind = {"quant_type": mode, "compress_statistics": double_quant}
        new = bnb.nn.Linear4bit(**features, **kind, compute_dtype=compute_dtype, device="meta")
        new.weight = bnb.nn.Params4bit(weight, requires_grad=False, **kind, module=new).to(device or home)
    new.weight = new.weight.to(home)
    if layer.bias is not None:
        new.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
    prepare(new)
    return new.train(layer.training)


def _dequantized(layer: Any) -> Tensor:
    import bitsandbytes as bnb

    if isinstance(layer, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return layer.weight.CB.float() * layer.weight.SCB[:, None] / 127


def _layer_error(weight: Tensor, restored: Tensor) -> float:
    shape = (PROBE_TOKENS, weight.shape[1])
    inputs = torch.randn(shape, generator=_generator(), dtype=torch.float32, device="cpu").to(weight.device)
    return _relative(inputs @ restored.float().t(), inputs @ weight.float().t())


def _generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)  # by name: Lightning sets the default device here


def _relative(value: Tensor, expected: Tensor) -> float:
    return float((value.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))


def _probe_output(module: Any) -> Tensor | None:
    """The first output of a transformers model for rows of random tokens; None for anything else."""
    config = getattr(module, "config", None)
    if config is None or getattr(module, "main_input_name", None) != "input_ids" or config.is_encoder_decoder:
        return None
    text = config.get_text_config()
    rows = 1 if text.pad_token_id is None else PROBE_ROWS  # classifiers take no more without one
    shape = (rows, PROBE_TOKENS)
    ids = torch.randint(text.vocab_size, shape, generator=_generator(), device="cpu").to(module.device)
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        with torch.autocast(module.device.type, enabled=False):
            return module(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
    finally:
        for m, training in modes.items():
            m.training = training


def keep_out_of_checkpoints(pl_module: nn.Module, name: str, module: nn.Module) -> None:
    """Leave a registered module out of what is saved, asked for and loaded."""
    if _MARK in vars(module):
        return
    object.__setattr__(module, _MARK, True)
    module.register_state_dict_post_hook(_drop_saved)
    module.register_load_state_dict_pre_hook(_drop_loaded)
    pl_module.register_load_state_dict_post_hook(partial(_forgive, name))


def _drop_saved(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [k for k in state_dict if k.startswith(prefix)]:
        del state_dict[key]


def _drop_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    _drop_saved(module, state_dict, prefix)


def _forgive(name: str, module: nn.Module, incompatible: Any) -> None:
    incompatible.missing_keys[:] = [k for k in incompatible.missing_keys if not clean_name(k).startswith(f"{name}.")]
