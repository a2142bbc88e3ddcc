import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def on_ranks() -> Callable[..., list[Any]]:
    """Run `function(rank, reduce)` on `world` ranks at once; `reduce` blocks until every rank has called it."""

    def run(function: Callable[[int, Callable[[Tensor], Tensor]], Any], world: int = 2) -> list[Any]:
        barrier = threading.Barrier(world, timeout=30)
        slots: list[Tensor] = [torch.empty(0)] * world

        def on_rank(rank: int) -> Any:
            def reduce(x: Tensor) -> Tensor:
                slots[rank] = x
                barrier.wait()
                total = torch.stack(slots).sum(0)
                barrier.wait()
                return total

            return function(rank, reduce)

        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(on_rank, range(world)))

    return run
