"""LoRA adapters on one trunk: several roles that differ only in which adapter is switched on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lit_ppo.config import LoRAConfig

POLICY = "policy"
VALUE = "value"


@dataclass
class FrozenAdapter:
    """An adapter that was trained elsewhere, on the same trunk."""

    name: str
    settings: Any
    """PEFT's configuration of it."""
    read: Callable[[], dict[str, torch.Tensor]] | None = None
    """Reads its weights, by the names that PEFT saves them under. None: a stand-in, for the shapes alone."""


def add_adapters(
    model: nn.Module, config: LoRAConfig, names: list[str], seed: int, frozen: Sequence[FrozenAdapter] = ()
) -> Any:
    """Wrap `model` in PEFT with one LoRA adapter a name, all trainable at once.

    The update starts at zero, so every adapter starts as the trunk itself. Adapters of a bf16 trunk are float32.

    Args:
        model: A transformers model; its own weights are frozen.
        config: Rank, scale, target layers.
        names: Adapter names.
        seed: Of the random half of each adapter.
        frozen: Further adapters, which keep the weights that they come with.

    Raises:
        ValueError: No layer of the model matches `lora.target_modules`.
    """
    import peft

    targets = config.target_modules
    settings = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # pyright: ignore
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=["score"] if hasattr(model, "score") else None,  # a critic's head is trained itself
        lora_dropout=0.0,  # dropout would make the first ratio differ from 1
        use_rslora=config.use_rslora,
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),  # GPT-2's layers: (in, out) weights
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            wrapped = peft.get_peft_model(model, settings, adapter_name=names[0])
            for name in names[1:]:
                wrapped.add_adapter(name, settings)
        except ValueError as error:
            linear = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
            raise ValueError(
                f"`lora.target_modules={targets!r}` does not fit {type(model).__name__}: {error} "
                f'Its linear layers are {", ".join(linear)}; "all-linear" takes all but the head.'
            ) from error
        for adapter in frozen:
            # its head is no part of the trunk
            settings = replace(adapter.settings, modules_to_save=None, exclude_modules=None, task_type=None)
            wrapped.add_adapter(adapter.name, settings)
            _fill(wrapped, adapter)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        ours = any(is_adapter_parameter(name, adapter) for adapter in names)
        if ours and ".lora_A." in name:  # as PEFT starts it, but with the same numbers on every kind of device
            # whatever the default device and dtype are
            fresh = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            nn.init.kaiming_uniform_(fresh, a=5**0.5, generator=draw)
            parameter.data.copy_(fresh)
        parameter.requires_grad_(ours)
    return wrapped


def _fill(wrapped: Any, adapter: FrozenAdapter) -> None:
    """Give a frozen adapter its weights, unless another rank sends them."""
    from peft import set_peft_model_state_dict

    if adapter.read is None or wrapped.get_base_model().get_input_embeddings().weight.is_meta:
        return
    set_peft_model_state_dict(wrapped, adapter.read(), adapter_name=adapter.name)


def is_adapter_parameter(name: str, adapter: str) -> bool:
    """Whether a parameter name belongs to the adapter of that name."""
    return "lora_" in name and f".{adapter}." in f"{name}."  # those of an embedding end with it


def tuner_layers(model: nn.Module) -> list[Any]:
    """Return the layers that carry adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [m for m in model.modules() if isinstance(m, BaseTunerLayer)]


@contextmanager
def active_adapter(layers: list[Any], name: str | None) -> Iterator[None]:
    """Compute with one adapter, or with none, and leave `requires_grad` of all of them alone.

    PEFT's own `set_adapter` freezes the other adapters, which a joint backward through two roles cannot have.

    Args:
        layers: From `tuner_layers`.
        name: The adapter, or None for the bare trunk.
    """
    before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
    for layer in layers:
        layer._active_adapter = [name] if name is not None else layer._active_adapter
        layer._disable_adapters = name is None
    try:
        yield
    finally:
        for layer, (active, disabled) in zip(layers, before, strict=True):
            layer._active_adapter, layer._disable_adapters = active, disabled


def adapter_aware(checkpoint: Callable[..., Any], layers: list[Any]) -> Callable[..., Any]:
    """Make a checkpoint function recompute with the adapter that was on in its forward.

    The recomputation runs inside the backward, when another role's adapter may be on: without this, the gradients of
    a shared trunk under gradient checkpointing would be silently wrong.

    Args:
        checkpoint: A function such as `torch.utils.checkpoint.checkpoint`.
        layers: From `tuner_layers`.
    """

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        active = layers[0]._active_adapter
        name = None if layers[0]._disable_adapters else (active if isinstance(active, str) else active[0])

        def bound(*inner: Any, **inner_kwargs: Any) -> Any:
            with active_adapter(layers, name):
                return function(*inner, **inner_kwargs)

        return checkpoint(bound, *args, **kwargs)

    return run
