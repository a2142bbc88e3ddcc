"""What all ranks find out together before they wait for each other: errors, differences, devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def distributed() -> bool:
    """Whether there is a process group, if only of one rank."""
    return dist.is_available() and dist.is_initialized()


def gather(value: Any) -> list[Any]:
    """Return every rank's value, in the order of ranks."""
    if not distributed() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def together(what: str, act: Callable[[], T]) -> T:
    """Call `act` on every rank; if it fails on one, all stop, rather than wait for it.

    Args:
        what: Names the work in the error of the other ranks.
        act: Without collectives of its own.

    Raises:
        RuntimeError: Another rank failed; its error is quoted.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = act()
    except Exception as failure:
        error = failure
    errors = gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = {rank: text for rank, text in enumerate(errors) if text is not None}
    if failed:
        first = min(failed)
        raise RuntimeError(f"Rank {first} failed in {what}, so all ranks stop. {failed[first]}")
    return result


def check_same(settings: dict[str, Any]) -> None:
    """Compare settings over ranks.

    Args:
        settings: By the names to call them by; compared by their `repr`.

    Raises:
        ValueError: A setting differs; on every rank.
    """
    everyone = gather({name: repr(value) for name, value in settings.items()})
    for name in sorted(set().union(*everyone)):
        values = [theirs.get(name) for theirs in everyone]
        for rank, value in enumerate(values):
            if value != values[0]:
                raise ValueError(
                    f"`{name}` differs between ranks: {_short(values[0])} on rank 0, {_short(value)} on rank {rank}. "
                    "All ranks must run the same configuration."
                )


def check_device(option: str, device: str | None, owned: list[torch.device]) -> None:
    """Refuse to put a frozen role where another rank computes.

    Args:
        option: Its name, for the error.
        device: The option's value.
        owned: Where the ranks of this node compute.

    Raises:
        ValueError: A rank of this node has that device.
    """
    if device is None or len(owned) < 2:
        return
    wanted = torch.device(device)
    if wanted.type != "cpu" and torch.device(wanted.type, wanted.index or 0) in owned:
        rank = owned.index(torch.device(wanted.type, wanted.index or 0))
        raise ValueError(
            f"`{option}={device!r}` is where rank {rank} of this node computes. Leave it out (then each rank has its "
            "own copy), name a device that no rank uses, or 'cpu'."
        )


def _short(text: str | None) -> str:
    return "missing" if text is None else text if len(text) <= 200 else f"{text[:200]}..."
