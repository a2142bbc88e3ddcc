"""Options of the stages before PPO: a dataclass each, a docstring per field, checked when constructed."""

from __future__ import annotations

from dataclasses import dataclass

from lit_ppo.config import AdamConfig, choice
from lit_ppo.options import at_least, check_types

NORMALIZATIONS = ("none", "mean", "mean_std")


@dataclass
class StageOptimConfig(AdamConfig):
    """One AdamW for the one model that a stage before PPO trains."""

    lr: float = 1e-5
    """Learning rate."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        at_least("optim", "lr", self.lr, 0)


def check_micro_batch(me: str, rows: int | None, tokens: int | None) -> None:
    """Check that micro-batches are counted in one way."""
    at_least(me, "micro_batch_size", rows, 1)
    at_least(me, "micro_batch_tokens", tokens, 1)
    if rows is not None and tokens is not None:
        raise ValueError(
            f"`{me}.micro_batch_tokens={tokens}` cuts batches by tokens, and `{me}.micro_batch_size={rows}` by "
            "examples. Leave one of the two out."
        )


@dataclass
class SFTConfig:
    """Supervised fine-tuning: the likelihood of answers."""

    micro_batch_size: int | None = None
    """Examples in one forward and backward. None: the whole batch. Changes memory and speed, not the gradient."""
    micro_batch_tokens: int | None = None
    """Instead of `micro_batch_size`: micro-batches of so many tokens, whatever the number of examples."""
    packing: bool = True
    """Run the real tokens of a micro-batch as one row without padding, if the model can (docs/packing.md)."""
    fused_layers: bool = True
    """Norms, SwiGLU and rotary embeddings as one kernel each, on CUDA in 16 bits (docs/packing.md)."""
    max_grad_norm: float | None = 1.0
    """The gradient norm is clipped to this; None is off."""

    def __post_init__(self) -> None:
        """Check every value."""
        check_types("sft", self)
        check_micro_batch("sft", self.micro_batch_size, self.micro_batch_tokens)
        at_least("sft", "max_grad_norm", self.max_grad_norm, 0, strict=True, why="Leave it out (null) to turn it off.")


@dataclass
class RankingConfig:
    """A reward model from pairs of answers, by the Bradley-Terry model."""

    micro_batch_size: int | None = None
    """Pairs in one forward and backward. None: the whole batch. Changes memory and speed, not the gradient."""
    micro_batch_tokens: int | None = None
    """Instead of `micro_batch_size`: micro-batches of so many tokens, whatever the number of pairs."""
    packing: bool = True
    """Run the real tokens of a micro-batch as one row without padding, if the model can (docs/packing.md)."""
    fused_layers: bool = True
    """Norms, SwiGLU and rotary embeddings as one kernel each, on CUDA in 16 bits (docs/packing.md)."""
    max_grad_norm: float | None = 1.0
    """The gradient norm is clipped to this; None is off."""
    normalize: str = "mean"
    """What scores are over reference answers: mean 0 (`mean`), also standard deviation 1 (`mean_std`), or as they come
    out of training (`none`). It is measured for each checkpoint and becomes part of what is exported."""
    references: int = 512
    """Reference answers at most that it is measured on."""

    def __post_init__(self) -> None:
        """Check every value."""
        check_types("ranking", self)
        check_micro_batch("ranking", self.micro_batch_size, self.micro_batch_tokens)
        off = "Leave it out (null) to turn it off."
        at_least("ranking", "max_grad_norm", self.max_grad_norm, 0, strict=True, why=off)
        choice("ranking", "normalize", self.normalize, NORMALIZATIONS)
        at_least("ranking", "references", self.references, 2)
