"""What `OOMGuard` tries before training: scoring and update at the longest prompt and response that can come."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lit_ppo.experience import Experience, Prompts
from lit_ppo.micro import unit

if TYPE_CHECKING:
    from lit_ppo.module import PPOLightningModule

DryRun = tuple[int, Callable[[int], object]]


def dry_runs(module: PPOLightningModule) -> dict[str, DryRun]:
    """Return, by phase, the rows of this rank and a function that does the phase's work on so many rows at once.

    No optimizer steps. Nothing is returned where the longest prompt is unknown (another datamodule than ours). The
    rollout is not tried: it keeps what it has finished, so running out of memory there costs little.

    Args:
        module: Attached to a trainer, models loaded and placed.
    """
    datamodule = getattr(module.trainer, "datamodule", None)
    longest, batch = getattr(datamodule, "longest_prompt", None), getattr(datamodule, "batch_size", None)
    if not isinstance(longest, int) or not isinstance(batch, int):
        return {}
    episodes = -(-batch * module.sampling.samples_per_prompt // module.trainer.world_size)
    minibatch = -(-episodes // module.ppo.minibatches)

    def score(size: int) -> None:
        module.set_mode(train=False)
        rows = experience(module, size, longest)
        with torch.no_grad():
            for view in (module.views.actor, module.views.critic, module.views.reference):
                if view is not None:
                    view(rows, **(module.tempering if view.output == "logprobs" else {}))

    def update(size: int) -> None:
        module.set_mode(train=True)
        rows = experience(module, size, longest)
        tokens, sequences = rows.loss_mask.sum(), torch.tensor(size, device=module.device)
        try:
            for roles in module.in_groups(module.thawed):  # the actor too, while only the critic is warming up
                module.manual_backward(module.loss(rows, tokens, sequences, roles)[0])
                for _, parameter in (named for role in roles for named in module.trained[role]):
                    parameter.grad = None if module.ppo.sequential_roles else parameter.grad
        finally:
            module.set_mode(train=False)

    ppo = module.ppo
    if ppo.micro_batch_tokens is not None:
        span = longest + module.sampling.max_new_tokens
        most = min(ppo.micro_batch_tokens, minibatch * span)
        return {unit(module, n): (most, in_tokens(f, span)) for n, f in (("update", update), ("score", score))}
    return {
        "update": (min(ppo.micro_batch_size or minibatch, minibatch), update),
        "score": (min(ppo.score_batch_size or ppo.micro_batch_size or minibatch, minibatch), score),
    }


def in_tokens(body: Callable[[int], object], span: int) -> Callable[[int], None]:
    """Make a function of tokens out of one of rows; what has fitted once is not tried again.

    Args:
        body: Does the work of so many of the longest rows.
        span: Tokens of such a row.
    """
    fitted = 0

    def run(tokens: int) -> None:
        nonlocal fitted
        rows = -(-tokens // span)
        if rows > fitted:
            body(rows)
            fitted = rows

    return run


def experience(module: PPOLightningModule, rows: int, longest: int) -> Experience:
    """Return rows as long as they can get; what the tokens are does not matter.

    Args:
        module: Has the options.
        rows: How many.
        longest: Tokens of the longest prompt.
    """
    device, width = module.device, module.sampling.max_new_tokens
    ids = torch.ones(rows, longest, dtype=torch.long, device=device)
    zeros = torch.zeros(rows, width, dtype=torch.float32, device=device)
    optional: dict[str, Any] = {
        "values": None if module.views.critic is None else zeros,
        "returns": None if module.views.critic is None else zeros,
        "ref_logprobs": None if module.views.reference is None else zeros,
    }
    return Experience(
        prompts=Prompts(
            ids=ids,
            lengths=torch.full((rows,), longest, device=device),
            index=torch.arange(rows, device=device),
            text=[""] * rows,
            messages=[None] * rows,
            columns=[{}] * rows,
        ),
        ids=torch.ones(rows, width, dtype=torch.long, device=device),
        lengths=torch.full((rows,), width, device=device),
        stopped=torch.zeros(rows, dtype=torch.bool, device=device),
        logprobs=zeros,
        old_logprobs=zeros,
        advantages=zeros + 1,
        sizes=[(longest, width)] * rows,
        **optional,
    )
