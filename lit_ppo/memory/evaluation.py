"""Evaluation steps that are done again in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule

from lit_ppo.memory.logs import LogRecorder
from lit_ppo.memory.retry import OOMPolicy
from lit_ppo.memory.split import Splitter, combine
from lit_ppo.memory.undo import Snapshot


def cut_step(
    policy: OOMPolicy, splitter: Splitter, module: LightningModule, step: Callable[..., Any], phase: str
) -> Callable[..., Any]:
    """Return an evaluation step that outlives an out-of-memory error: what failed is cut, what is done is kept.

    Args:
        policy: Decides; each rank by itself.
        splitter: Cuts. A batch whose rows it cannot tell is tried once more uncut.
        module: Whose buffers, metrics and logged values are put back after a failure.
        step: `validation_step`, `test_step` or `predict_step`; its first argument is the batch.
        phase: Sizes are learned by phase.
    """

    def guarded(batch: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = LogRecorder(module, by_share=splitter.weight is not None)
        rows, uncut = 1, ""
        if policy.recover:
            try:
                rows = splitter.rows(batch)
            except ValueError as problem:
                uncut = str(problem)
        waiting, done, outputs = [(batch, rows, 1.0)], [], []
        snapshot = Snapshot(module, evaluating=True) if policy.recover else None
        with recorder:
            for attempt in policy.retry(phase, rows, module=module, local=True, uncut=uncut, snapshot=snapshot):
                with attempt:
                    recorder.clear()
                    while waiting:
                        piece, count, share = waiting[0]
                        if count > attempt.size:
                            waiting[:1] = _cut(splitter, piece, attempt.size, share)
                            continue
                        recorder.piece(share)
                        outputs.append(step(piece, *args, **kwargs))
                        done.append(waiting.pop(0))
                        recorder.keep()
                        attempt.keep()
        recorder.replay()
        return combine(outputs, [count for _, count, _ in done], [share for _, _, share in done])

    return guarded


def _cut(splitter: Splitter, batch: Any, size: int, whole: float) -> list[tuple[Any, int, float]]:
    """Return pieces, their rows and their shares, which add up to that of the batch."""
    pieces, rows = splitter.cut(batch, size)
    shares = splitter.shares(pieces, rows) if whole else [0.0] * len(pieces)
    return [(piece, count, whole * share) for piece, count, share in zip(pieces, rows, shares, strict=True)]
