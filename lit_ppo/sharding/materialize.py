"""Weights from one rank to all: loaded once, sent tensor by tensor, and never whole in the memory of the others."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Source:
    """Where the weights of a store are."""

    broadcast: bool
    """Rank 0 loaded them, the others hold a model on the meta device. False: every rank has them."""
    via: torch.device
    """The device that collectives run on."""
    home: torch.device
    """The device that they are to be on."""


def fill(module: nn.Module, source: Source, skip: Container[nn.Module] = ()) -> None:
    """Move a module's tensors to their device, and send them from rank 0 where only it has them.

    Args:
        module: The same on every rank but for the values.
        source: See there.
        skip: Submodules to leave alone.

    Raises:
        RuntimeError: The ranks have built different models.
    """
    if not source.broadcast:
        for _, tensor, owners in _tensors(module, skip):
            _set(owners, tensor, tensor.detach().to(source.home))
        return
    found = list(_tensors(module, skip))
    described = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor, _ in found]
    shared = [described]
    dist.broadcast_object_list(shared, 0)
    names, theirs = [name for name, *_ in described], [name for name, *_ in shared[0]]
    if names != theirs:
        odd = sorted(set(names) ^ set(theirs)) or names
        raise RuntimeError(
            f"Rank {dist.get_rank()} has built another model than rank 0: {', '.join(odd[:3])}. "
            "All ranks must run the same code, libraries and configuration."
        )
    for (_, tensor, owners), (_, shape, dtype) in zip(found, shared[0], strict=True):
        if dist.get_rank() == 0:
            value = tensor.detach().to(source.via).contiguous()
        else:
            value = torch.empty(shape, dtype=dtype, device=source.via)
        dist.broadcast(value, 0)
        _set(owners, tensor, value.to(source.home))


def _tensors(
    module: nn.Module, skip: Container[nn.Module]
) -> Iterator[tuple[str, Tensor, list[tuple[nn.Module, str]]]]:
    """Yield every tensor of a module once, with its first name and all places that hold it (tied weights)."""
    places: dict[int, tuple[str, Tensor, list[tuple[nn.Module, str]]]] = {}
    for prefix, owner in _walk(module, "", skip):
        # Not parameters and buffers alone: some models keep a tensor as a plain attribute.
        held = {**owner._parameters, **owner._buffers, **vars(owner)}
        for name, tensor in held.items():
            if isinstance(tensor, Tensor):
                places.setdefault(id(tensor), (f"{prefix}{name}", tensor, []))[2].append((owner, name))
    yield from places.values()


def _walk(module: nn.Module, prefix: str, skip: Container[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module in skip:
        return
    yield prefix, module
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", skip)


def _set(owners: list[tuple[nn.Module, str]], old: Tensor, value: Tensor) -> None:
    """Put a value where a tensor was: in place if that can be, so that whoever else holds the parameter has it too."""
    if isinstance(old, nn.Parameter) and not old.is_meta:
        old.data = value
        return
    new = nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
    for owner, name in owners:
        if name in owner._parameters:
            owner._parameters[name] = new  # type: ignore[assignment]
        elif name in owner._buffers:
            owner._buffers[name] = new
        else:
            object.__setattr__(owner, name, new)
