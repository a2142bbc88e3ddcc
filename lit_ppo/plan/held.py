"""What a forecast is made of: bytes by purpose, by parameter store, and what FSDP gathers and reduces."""

from __future__ import annotations

from dataclasses import dataclass, field

from lit_ppo.config import AdamConfig

CHUNK = 2**26
"""Elements that `MasterAdamW` updates at once."""
PIECE = 2**24
"""Elements whose state `LeanAdamW` has on the GPU at once where it is paged; twice."""


@dataclass(frozen=True)
class Units:
    """Bytes of one store's FSDP units, whole: its root (embedding, head, norms) and one of its decoder layers.

    A unit is gathered into one buffer and copied out of it. In a forward the buffer lives until the next unit has
    arrived and is copied out, in a backward the next one is fetched ahead. A unit's gradients are copied into one
    buffer, which lives until the next unit's are complete; this rank's share of it is left.
    """

    root: int
    layer: int
    root_trained: int
    """Gradients of the root."""
    head_trained: int
    """Those of them that are there when the backward reaches the last layer."""
    layer_trained: int
    ranks: int

    def at(self, moment: str) -> int:
        """Return what is held at a moment.

        Args:
            moment: begin (the root has been gathered, the first layer follows), forward, head, top, bottom (as
                `lit_ppo.plan.trace` cuts a backward, whose peaks have the gradient that is being made in them), or
                reduce (what is left for the end: the root's gradients).
        """
        return {
            "begin": 2 * self.root + 2 * self.layer,
            "forward": self.root + 3 * self.layer,
            "head": self.root + self.layer,
            "top": self.root + self.head_trained + 2 * self.layer + 2 * self.layer_trained,
            "bottom": self.root + self.head_trained + self.layer_trained,
            "reduce": 2 * self.root_trained + self.root_trained // self.ranks + self.layer_trained,
        }[moment]


@dataclass
class Phase:
    """What is on the GPU when a phase is at its peak, in bytes, by what it is for."""

    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The peak."""
        return sum(self.parts.values())

    @staticmethod
    def worst(held: dict[str, int], moments: list[dict[str, int]]) -> Phase:
        """Return the moment with the most beside what is held all along."""
        parts = held | max(moments, key=lambda parts: sum(parts.values()))
        return Phase({name: size for name, size in parts.items() if size})


@dataclass
class Store:
    """One parameter store: bytes on this rank."""

    weights: int
    trained: int
    """Of `weights`, what gradients are made of: this is their size, too."""
    state: int
    """Of the optimizer."""
    largest: int
    """Elements of its largest trained weight."""
    units: Units | None = None
    """Under FSDP: what is gathered at once."""
    whole: int = 0
    """Weights of all ranks together."""


def stepping(store: Store, optim: AdamConfig, *, half: bool) -> int:
    """Return what a step of the optimizer takes beside its state.

    Args:
        store: What is updated.
        optim: Which optimizer.
        half: Its weights have 16 bits.
    """
    size = 2 if half else 4
    if optim.paged:  # two buffers for pieces of it
        return 2 * min(PIECE, store.largest) * (store.state * size // max(1, store.trained))
    if optim.state != "float32" or optim.rounding != "master":
        return 0
    at_once = min(max(CHUNK, store.largest), store.trained // size)
    return (4 + 4 * half) * at_once  # a denominator, and a gradient in float32
