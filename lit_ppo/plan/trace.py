"""Peaks of forwards and backwards, from fake tensors: the roles' real code on a few layers, extrapolated to all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lit_ppo.experience import Prompts, Rollout
from lit_ppo.plan.roles import Line
from lit_ppo.plan.stand_ins import kernels
from lit_ppo.plan.track import Tracker, tracing
from lit_ppo.sharding.units import layers

SEGMENTS = ("forward", "head", "top", "bottom")
"""Stretches of a training step: the forward; the backward down to the last layer; that layer; the first to the end."""


@dataclass
class Step:
    """Bytes of one role's forward and backward on a micro-batch, gradients of weights apart."""

    kept: Line
    """Alive between forward and backward."""
    peaks: dict[str, Line]
    """By segment. All but the last grow with the layers as `kept` does; in the last no other layer's activations are
    left."""


def rows_of(count: int, prompt: int, new: int) -> Rollout:
    """Return rows as long as they can get, really."""
    zeros = torch.zeros(count, new)
    prompts = Prompts(
        torch.ones(count, prompt, dtype=torch.long),
        torch.full((count,), prompt),
        torch.arange(count),
        [""] * count,
        [None] * count,
        [{}] * count,
    )
    ids = torch.ones(count, new, dtype=torch.long)
    return Rollout(prompts, ids, torch.full((count,), new), torch.zeros(count, dtype=torch.bool), zeros)


def training_step(
    view: Any,
    rollout: Rollout,
    *,
    autocast: torch.dtype | None,
    checkpoint: int | None,
    offload: float | None,
    options: dict[str, Any],
) -> Step:
    """Trace one role's part of a micro-batch.

    Args:
        view: The role, as a fake model, with more layers than `checkpoint`, and one besides where the embedding is
            frozen: the first layer then keeps less than the others.
        rollout: The micro-batch.
        autocast: Under `torch.autocast` to this dtype.
        checkpoint: Recompute every n-th layer.
        offload: MiB from which saved tensors are not on the GPU.
        options: What the view is called with.
    """
    store = view.store.train()
    stack = [layer for _, _, layer in layers(store)]
    handles = []
    with tracing() as tracker, kernels(), _autocast(autocast):
        tracker.ignore(store)
        after: list[int] = []  # bytes alive after each layer of the forward
        forward = [True]

        def watch(place: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                out = output[0] if isinstance(output, tuple) else output
                if forward[0]:
                    after.append(tracker.live)
                    if out.requires_grad:
                        out.register_hook(lambda grad: tracker.mark(place))

            return hook

        for i, layer in enumerate(stack):
            place = "bottom" if i == 0 else "top" if i == len(stack) - 1 else "middle"
            handles.append(layer.register_forward_hook(watch(place)))
            _recompute(layer, store, checkpoint is not None and i % checkpoint == 0)
        for parameter in store.parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(_drop))
        tracker.mark("forward")
        with _away(offload):
            output, _ = view(rollout, **options)
            loss = (output * rollout.mask).sum()
        del output
        forward[0] = False
        kept = tracker.live
        tracker.mark("head")
        loss.backward()
        segments = tracker.finish()
    for handle in handles:
        handle.remove()
    depth = len(stack)
    span = checkpoint or 1
    slope = (after[-1] - after[-1 - span]) / span
    peaks = {name: Line(segments.get(name, 0) - slope * depth, slope) for name in SEGMENTS[:-1]}
    return Step(Line(kept - slope * depth, slope), peaks | {"bottom": Line(segments.get("bottom", 0), 0)})


def scoring(view: Any, rollout: Rollout, *, autocast: torch.dtype | None, options: dict[str, Any]) -> int:
    """Return the peak of a forward without gradients, which does not depend on the number of layers."""
    view.store.eval()
    with tracing() as tracker, kernels(), torch.no_grad(), _autocast(autocast):
        tracker.ignore(view.store)
        view(rollout, **options)
    return tracker.peak


def rewarding(model: Any, rows: int, length: int) -> int:
    """Return the peak of a reward model's forward over so many texts of so many tokens."""
    with tracing() as tracker, kernels(), torch.no_grad():
        tracker.ignore(model)
        ids = torch.ones(rows, length, dtype=torch.long)
        trunk = getattr(model, model.base_model_prefix)
        trunk(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return tracker.peak


def prefill(base: Any, rows: int, length: int, *, cache: bool) -> int:
    """Return the peak of a forward over prompts.

    Args:
        base: A fake causal LM.
        rows: Prompts.
        length: Tokens of each.
        cache: Whether keys and values are kept, as `generate` does.
    """
    with tracing() as tracker, kernels(), torch.no_grad():
        tracker.ignore(base)
        ids = torch.ones(rows, length, dtype=torch.long)
        out = base(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=cache, logits_to_keep=1)
        del out
    return tracker.peak


def sampling(rows: int, vocab: int, dtype: torch.dtype, options: Any) -> int:
    """Return the peak of picking a token in each row, as the `hf` engine does.

    Args:
        rows: Sequences.
        vocab: Size of the vocabulary.
        dtype: Of the model's logits.
        options: `SamplingConfig`.
    """
    from lit_ppo.rollout.base import Draw, Sampling
    from lit_ppo.rollout.hf import _Sampler

    none = torch.tensor([], dtype=torch.long)
    resolved = Sampling(
        options.max_new_tokens, options.temperature, options.top_k, options.top_p, options.min_p, 1, none, none, 0,
        entropy=options.entropy,
    )  # fmt: skip
    with tracing() as tracker, torch.no_grad():
        logits = torch.empty(rows, 1, vocab, dtype=dtype)[:, -1].to(copy=True, dtype=torch.float32)
        keys = torch.empty(rows, 1)  # integers that depend on it are fake: noise is as large as the logits
        sampler = _Sampler(resolved, Draw(0, 0), (keys[:, 0] * 0).long())
        sampler(torch.empty(rows, 1), logits).argmax(-1)
    return tracker.peak


def _recompute(layer: Any, store: Any, on: bool) -> None:
    """Switch a layer's own checkpointing on or off; one without is left to `GradientCheckpointing`'s wrapper."""
    from functools import partial

    from torch.utils.checkpoint import checkpoint

    function = partial(checkpoint, use_reentrant=False)
    layer.gradient_checkpointing = on
    layer._gradient_checkpointing_func = store.checkpoint_wrapper_hook(function)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def _away(offload: float | None) -> Iterator[None]:
    """Keep what is saved and as large as that off the GPU, until it is asked for."""
    if offload is None:
        yield
        return

    def pack(tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) or tensor.numel() * tensor.element_size() < offload * 2**20:
            return tensor
        return SimpleNamespace(shape=tensor.shape, like=tensor.new_empty(0))

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.like.new_empty(packed.shape)

    with saved_tensors_hooks(pack, unpack):
        yield


@contextmanager
def _autocast(dtype: torch.dtype | None) -> Iterator[None]:
    if dtype is None:
        yield
        return
    with torch.autocast("cpu", dtype=dtype):
        yield


__all__ = ["SEGMENTS", "Step", "Tracker", "prefill", "rewarding", "rows_of", "sampling", "scoring", "training_step"]
