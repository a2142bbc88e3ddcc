"""What flows through one PPO iteration: Prompts -> Rollout -> Experience.

Shapes: B sequences, P prompt width (left-padded), R response width (right-padded).
Masks are made from lengths, never from token ids, so a tokenizer whose pad is its EOS is right.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Self = TypeVar("Self", bound="_Rows")


@dataclass
class _Rows:
    """Tensors and lists that share their first dimension."""

    def select(self: Self, rows: Tensor) -> Self:
        """Return the given rows, in the given order.

        Args:
            rows: (b,) int64 row numbers, on any device.
        """
        listed = rows.tolist()
        picked: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                picked[f.name] = value[rows.to(value.device)]
            elif isinstance(value, list):
                picked[f.name] = [value[i] for i in listed]
            elif isinstance(value, _Rows):
                picked[f.name] = value.select(rows)
        return replace(self, **picked)

    def to(self: Self, device: torch.device | str) -> Self:
        """Return a copy with every tensor on `device`."""
        moved: dict[str, Any] = {
            f.name: getattr(self, f.name).to(device)
            for f in fields(self)
            if isinstance(getattr(self, f.name), (Tensor, _Rows))
        }
        return replace(self, **moved)


@dataclass
class Prompts(_Rows):
    """Tokenized prompts, one row per response that will be sampled."""

    ids: Tensor
    """(B, P) int64, left-padded."""
    lengths: Tensor
    """(B,) int64, real tokens of each row."""
    index: Tensor
    """(B,) int64, global number of the sample in its iteration, over all ranks: it picks the sampling noise."""
    text: list[str]
    """What the model read, decoded or as given: what a reward function gets as `prompts`."""
    messages: list[list[dict[str, str]] | None]
    """The chat a prompt was made from, where it was one."""
    columns: list[dict[str, Any]]
    """The other columns of the prompt set, row by row."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ids)

    def repeat(self, n: int) -> Prompts:
        """Return every row n times in a row; sample k of prompt i gets the index i * n + k."""
        if n == 1:
            return self
        rows = self.select(torch.arange(len(self)).repeat_interleave(n))
        offset = torch.arange(n, device=rows.index.device).repeat(len(self))
        return replace(rows, index=rows.index * n + offset)

    @property
    def mask(self) -> Tensor:
        """(B, P) bool, True on real tokens."""
        width = self.ids.shape[1]
        return torch.arange(width, device=self.ids.device) >= width - self.lengths[:, None]


@dataclass
class Rollout(_Rows):
    """Prompts with one sampled response each."""

    prompts: Prompts
    ids: Tensor
    """(B, R) int64 response tokens, right-padded; up to and including the first stop token."""
    lengths: Tensor
    """(B,) int64, tokens of each response, the stop token included."""
    stopped: Tensor
    """(B,) bool: ended with a stop token (else cut by its length)."""
    logprobs: Tensor
    """(B, R) float32: the sampler's own log-prob of each token; 0 off the mask."""
    entropy: Tensor | None = field(default=None, kw_only=True)
    """(B, R) float32, nats, if `sampling.entropy` asks for it: of the distribution that each token was drawn from, the
    softmax of all logits over the temperature, before top-k, top-p and min-p; 0 off the mask."""
    sizes: list[tuple[int, int]] | None = field(default=None, kw_only=True)
    """Tokens of each prompt and response, known to the host so that nothing waits for the device; see `measured`."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ids)

    @property
    def mask(self) -> Tensor:
        """(B, R) bool, True on response tokens."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]

    def on_host(self) -> list[tuple[int, int]]:
        """Return the tokens of each prompt and response."""
        if self.sizes is not None:
            return self.sizes
        return list(zip(self.prompts.lengths.tolist(), self.lengths.tolist(), strict=True))

    def measured(self: RolloutLike) -> RolloutLike:
        """Return the same rollout, with `sizes`."""
        return replace(self, sizes=self.on_host())

    @staticmethod
    def empty(prompts: Prompts, entropy: bool = False) -> Rollout:
        """Return the rollout of no prompts.

        Args:
            prompts: 0 rows.
            entropy: With entropies.
        """
        none, nothing = prompts.lengths, prompts.lengths.reshape(0, 1)
        measured = nothing.float() if entropy else None
        return Rollout(prompts, nothing, none, none.bool(), nothing.float(), entropy=measured)

    @staticmethod
    def cat(parts: list[Rollout]) -> Rollout:
        """Join rollouts, padding prompts on the left and responses on the right to the widest.

        Args:
            parts: One or more.
        """
        if len(parts) == 1:
            return parts[0]
        prompts = [part.prompts for part in parts]
        return Rollout(
            prompts=Prompts(
                ids=_stack([p.ids for p in prompts], left=True),
                lengths=torch.cat([p.lengths for p in prompts]),
                index=torch.cat([p.index for p in prompts]),
                text=[x for p in prompts for x in p.text],
                messages=[x for p in prompts for x in p.messages],
                columns=[x for p in prompts for x in p.columns],
            ),
            ids=_stack([part.ids for part in parts]),
            lengths=torch.cat([part.lengths for part in parts]),
            stopped=torch.cat([part.stopped for part in parts]),
            logprobs=_stack([part.logprobs for part in parts]),
            entropy=_stack(known) if (known := [p.entropy for p in parts if p.entropy is not None]) else None,
        )

    def trim(self: RolloutLike) -> RolloutLike:
        """Cut padding that no row of this batch needs, in prompts and in every response-shaped tensor."""
        if len(self) == 0:
            return self
        width, response = (max(sizes) for sizes in zip(*self.on_host(), strict=True))
        changes: dict[str, Any] = {"prompts": replace(self.prompts, ids=self.prompts.ids[:, -width:])}
        full = self.ids.shape
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor) and value.shape == full:
                changes[f.name] = value[:, :response]
        return replace(self, **changes)

    def part(self: RolloutLike, rows: Tensor) -> RolloutLike:
        """Return the given rows, trimmed; for no rows at all a ghost: one row that no loss and no metric counts.

        With it, a rank that has nothing to do takes part in what the others do together.

        Args:
            rows: (b,) int64 row numbers.
        """
        if len(rows):
            return self.select(rows).trim()
        device = self.ids.device
        one = torch.ones(1, dtype=torch.long, device=device)
        prompt = Prompts(one[:, None], one, one, text=[""], messages=[None], columns=[{}])
        changes: dict[str, Any] = {"prompts": prompt, "ids": one[:, None], "lengths": one, "sizes": [(1, 1)]}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor) and f.name not in changes:
                changes[f.name] = torch.zeros((1,) * value.dim(), dtype=value.dtype, device=device)
            elif f.name == "keep":
                changes["keep"] = torch.zeros(1, dtype=torch.bool, device=device)
        return replace(self, **changes)


@dataclass
class Experience(Rollout):
    """A scored rollout: everything the update needs."""

    old_logprobs: Tensor
    """(B, R) float32, by the training forward before the first update."""
    advantages: Tensor
    """(B, R) float32."""
    returns: Tensor | None = None
    """(B, R) float32; None without a critic."""
    values: Tensor | None = None
    """(B, R) float32, V before each token; None without a critic."""
    ref_logprobs: Tensor | None = None
    """(B, R) float32; None without a reference."""
    keep: Tensor | None = None
    """(B,) bool; False: the reward asked to skip this sample. None: all are kept."""

    @property
    def loss_mask(self) -> Tensor:
        """(B, R) bool: response tokens of the samples that are kept."""
        return self.mask if self.keep is None else self.mask & self.keep[:, None]


RolloutLike = TypeVar("RolloutLike", bound=Rollout)


def _stack(parts: list[Tensor], *, left: bool = False) -> Tensor:
    """Stack (b, w) tensors of several widths into one, padded with 0 on one side."""
    width = max(part.shape[1] for part in parts)
    pads = [(width - part.shape[1], 0) if left else (0, width - part.shape[1]) for part in parts]
    return torch.cat([torch.nn.functional.pad(part, pad) for part, pad in zip(parts, pads, strict=True)])
