"""Which modules are gathered at once: the decoder layers of a transformers model, one by one."""

from __future__ import annotations

from typing import Any

from torch import nn


def layers(store: Any) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return the decoder layers of a parameter store, as (parent, name in it, layer).

    Their classes are those that transformers says may not be split; a model that names none is cut at the longest list
    of modules of one class.

    Args:
        store: A RoleModel.

    Raises:
        ValueError: It has no layers to tell apart.
    """
    base = store.base
    names = set(getattr(base, "_no_split_modules", None) or ())
    found = [(m, n, c) for m in base.modules() for n, c in m.named_children() if type(c).__name__ in names]
    if not found:
        lists = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len({type(c) for c in m}) == 1]
        longest: Any = max(lists, key=len, default=())
        found = [(longest, n, c) for n, c in longest.named_children()] if len(longest) else []
    if not found:
        raise ValueError(
            f"`{type(base).__name__}` names no decoder layers (`_no_split_modules` is empty and it has no list of "
            "layers), so it cannot be sharded layer by layer. Use strategy='ddp'."
        )
    inside = {id(m) for _, _, layer in found for m in layer.modules() if m is not layer}
    return [entry for entry in found if id(entry[2]) not in inside]


def check_floats(store: nn.Module, strategy: str) -> None:
    """Refuse to shard quantized weights.

    Raises:
        ValueError: There are some.
    """
    for name, parameter in store.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(
                f"`{name}` is quantized ({parameter.dtype}), and {strategy} shards floating-point weights only: a "
                "shard of packed weights has no meaning of its own. Train adapters on a quantized trunk with "
                "strategy='ddp', where each rank holds the small trunk whole."
            )
