"""How the models are spread over ranks, one file per strategy family: what is wrapped, gathered, clipped and saved."""

from __future__ import annotations

from typing import Any

from lit_ppo.sharding.replicated import Replicated


def sharding_for(strategy: Any) -> Replicated:
    """Return what a Lightning strategy asks of the models.

    Args:
        strategy: The trainer's, with its processes started.

    Raises:
        ValueError: A strategy, or an option of one, that the models cannot be trained under.
    """
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

    if isinstance(strategy, FSDPStrategy):
        from lit_ppo.sharding.fsdp1 import FSDP1

        return FSDP1(strategy)
    if isinstance(strategy, ModelParallelStrategy):
        from lit_ppo.sharding.fsdp2 import FSDP2

        return FSDP2(strategy)
    if isinstance(strategy, (DDPStrategy, SingleDeviceStrategy)):
        return Replicated(strategy)
    raise ValueError(
        f"`Trainer(strategy=...)` is a {type(strategy).__name__}, which is not supported. Use one device, 'ddp', "
        "'fsdp', or `ModelParallelStrategy(data_parallel_size=N, tensor_parallel_size=1)`."
    )
