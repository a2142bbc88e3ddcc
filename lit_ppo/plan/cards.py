"""Cards by name, and what a process can have of them."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

GIB = 2**30
CONTEXT = 0.5
"""GiB that CUDA's context, its libraries and the allocator's rounding take."""

CARDS = {
    "RTX3060-12G": 11.75,
    "RTX4070-12G": 11.75,
    "T4-16G": 14.7,
    "V100-16G": 15.8,
    "RTX4080-16G": 15.6,
    "A2-16G": 14.6,
    "RTX3090-24G": 23.6,
    "RTX4090-24G": 23.5,
    "A10G-24G": 22.1,
    "A10-24G": 22.1,
    "L4-24G": 22.0,
    "V100-32G": 31.7,
    "RTX5090-32G": 31.4,
    "A100-40G": 39.4,
    "A6000-48G": 47.4,
    "L40S-48G": 44.4,
    "A100-80G": 79.2,
    "H100-80G": 79.2,
    "H200-141G": 139.8,
    "B200-180G": 178.4,
}
"""GiB that CUDA reports as the device's total."""

WITHOUT_BF16 = ("T4", "V100")
"""Makes that only emulate bfloat16; others here, and sizes, are taken to compute it."""


@dataclass(frozen=True)
class Gpus:
    """Some cards of one kind."""

    count: int
    name: str
    usable: int
    """Bytes of each that tensors can have."""

    @property
    def bf16(self) -> bool:
        """Whether they compute bfloat16."""
        return computes_bf16(self.name)


def computes_bf16(card: str) -> bool:
    """Whether a card of CARDS, or one of a given size, computes bfloat16."""
    return card.split("-")[0] not in WITHOUT_BF16


def parse_gpus(text: str) -> Gpus:
    """Read `4xA100-80G`, `RTX4090`, `24GB` or `2x11.5GiB`.

    Args:
        text: A number of cards and a name, or a size (GB and G are 1e9 bytes of which nothing is set aside).

    Raises:
        ValueError: Neither.
    """
    found = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(.+?)\s*", text, re.IGNORECASE)
    count, name = int((found and found[1]) or 1), found[2] if found else text
    size = re.fullmatch(r"([\d.]+)\s*(GiB|GB|G)", name, re.IGNORECASE)
    if count >= 1 and size:
        unit = GIB if size[2].lower() == "gib" else 10**9
        return Gpus(count, name, int(float(size[1]) * unit))
    plain = {key.lower().replace("-", "").replace(" ", ""): key for key in CARDS}
    wanted = name.lower().replace("-", "").replace("_", "").replace(" ", "").replace("gb", "g")
    matches = [
        key for short, key in plain.items() if wanted in (short, short.rsplit(key.rsplit("-", 1)[1].lower(), 1)[0])
    ]
    if count < 1 or not matches:
        near = difflib.get_close_matches(wanted, plain, n=1, cutoff=0.4)
        hint = f" Did you mean {plain[near[0]]}?" if near else ""
        raise ValueError(
            f"`--gpus {text}` is no card that is known.{hint} Known are {', '.join(CARDS)}; a size works too: 24GB."
        )
    card = max(matches, key=CARDS.__getitem__)
    return Gpus(count, card, int((CARDS[card] - CONTEXT) * GIB))
