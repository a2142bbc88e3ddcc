"""Steps of automatic optimization that can be undone, and done again in pieces."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.optimization.closure import AbstractClosure
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lit_ppo.memory.logs import LogRecorder
from lit_ppo.memory.ranks import Ranks
from lit_ppo.memory.report import memory_report
from lit_ppo.memory.retry import OOMPolicy
from lit_ppo.memory.split import Splitter, combine
from lit_ppo.memory.undo import OutOfMemoryReport, RandomStates, Snapshot, batch_dependent_layers, is_out_of_memory


@dataclass
class Batch:
    """One batch of an accumulation, and how to make Lightning's closure for it or for a piece of it."""

    kwargs: OrderedDict[str, Any]
    """The arguments of `training_step`, by name."""
    make: Callable[[OrderedDict[str, Any]], Closure]
    """Lightning's closure for such arguments."""
    random: RandomStates = field(default_factory=RandomStates)
    """The random states when it began; what is drawn between the batches of an accumulation is not drawn again."""


class UndoableSteps:
    """Makes closures, in the place of Lightning's own, that a policy may undo and run again in pieces.

    A failure restarts the whole optimizer step, so the batches of one accumulation are kept until it is complete.

    Args:
        policy: Decides.
        splitter: Cuts.
        trainer: Its automatic optimization is meant.
        module: What is trained.
    """

    def __init__(self, policy: OOMPolicy, splitter: Splitter, trainer: Trainer, module: LightningModule) -> None:
        self.policy = policy
        self.splitter = splitter
        self.ranks: Ranks | None = None
        self.before_first: Callable[[Batch], None] | None = None
        """Called once, with the first batch, before it is run."""
        self._trainer = trainer
        self._module = module
        self._make = trainer.fit_loop.epoch_loop.automatic_optimization._make_closure
        self._window: list[Batch] = []
        self._start: Snapshot | None = None
        self._checked = False

    def make_closure(
        self, kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int
    ) -> AbstractClosure[ClosureResult]:
        """Stand in for the loop's own method of this name."""
        batch = Batch(kwargs, partial(self._make, optimizer=optimizer, batch_idx=batch_idx))
        if batch_idx % self._trainer.accumulate_grad_batches == 0:
            self._window.clear()
        self._window.append(batch)
        return _Closure(partial(self._optimize, batch))

    def forget(self) -> None:
        """Let go of the batches of a step that is complete."""
        self._window.clear()
        self._start = None

    def _optimize(self, batch: Batch) -> ClosureResult:
        """Forward and backward of one batch, in as many pieces as it takes."""
        module = self._module
        whole = batch.kwargs["batch"]
        if not self.policy.recover:
            try:
                return batch.make(batch.kwargs).closure()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise OutOfMemoryReport(memory_report(module, phase="train", error=error)) from error
        if self.ranks is not None:
            self.ranks.sync_buffers()
        if self.before_first is not None:
            self.before_first(batch)
            self.before_first = None
        if batch is self._window[0]:
            self._start = Snapshot(module)
        batch.random = RandomStates(module)
        recorder = LogRecorder(module, by_share=self.splitter.weight is not None)
        window = list(self._window)
        hook = module._current_fx_name
        tries = 0

        def body(size: int) -> ClosureResult:
            nonlocal tries
            tries += 1
            module._current_fx_name = hook  # an error leaves that of the hook it came from
            for earlier in window[:-1] if tries > 1 else ():
                earlier.random.restore()
                self._run(earlier, size, recorder)
            batch.random.restore()
            recorder.clear()
            result = self._run(batch, size, recorder)
            if size < rows:
                self._check_cut(batch)
            return result

        trainable = [p for p in module.parameters() if p.requires_grad]
        rows = self.splitter.rows(whole)
        with recorder:
            result = self.policy.run("train", rows, body, module=module, parameters=trainable, snapshot=self._start)
        recorder.replay()
        return result

    def _check_cut(self, batch: Batch) -> None:
        """Say once that a step draws random numbers or changes buffers, so that it is another one in pieces."""
        if self._checked or self._start is None:
            return
        self._checked = True
        if batch_dependent_layers(self._module):
            return  # of these the policy speaks
        drew = ["random numbers"] if batch.random.moved() else []
        if uses := [*drew, *(f"the buffer `{name}`" for name in self._start.changed_buffers()[:3])]:
            rank_zero_warn(
                "OOMGuard: a batch was cut, and its result is not exactly that of the whole batch, since "
                f"`training_step` uses {' and '.join(uses)} piece by piece."
            )

    def _run(self, batch: Batch, size: int, recorder: LogRecorder) -> ClosureResult:
        """Forward and backward in pieces of at most `size` rows; the losses add up to the mean of the whole batch."""
        pieces, rows, shares = self.splitter.pieces(batch.kwargs["batch"], size)
        results = []
        for number, (piece, share) in enumerate(zip(pieces, shares, strict=True)):
            recorder.piece(share)
            plain = batch.make(OrderedDict(batch.kwargs, batch=piece))
            zero_grad = plain._zero_grad_fn if number == 0 else None
            backward = plain._backward_fn if share else None  # the loss of a piece that counts nothing may be NaN
            result = Closure(partial(_scaled, plain._step_fn, share), backward, zero_grad).closure()
            result.closure_loss = None  # its graph is used up
            results.append(result)
        if len(results) == 1:
            return results[0]
        combined = ClosureResult(None, extra=combine([r.extra for r in results], rows, shares))
        combined.loss = combine([r.loss for r in results], rows, shares)
        return combined

    def clip(self, clip: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Clip; once more after an out-of-memory error that left the gradients as they were.

        Each rank by itself: gradients are shared already, and a rank that has clipped must not do so again.
        """
        gradients = [p.grad for p in self._module.parameters() if p.grad is not None]
        before = [g._version for g in gradients]

        def check() -> None:
            if [g._version for g in gradients] != before:
                reason = "Some gradients are clipped already, some are not."
                raise OutOfMemoryReport(memory_report(self._module, phase="clip", reason=reason))

        self.policy.run(
            "clip",
            1,
            lambda _: clip(*args, **kwargs),
            module=self._module,
            undo=check,
            uncut="Clipping cannot be cut.",
            local=True,
        )

    def rehearse(self, batch: Batch, whole: Any, size: int) -> None:
        """Run forward and backward of `size` rows of `whole`, twice: the second time next to the first's gradients."""
        piece = self.splitter.pieces(whole, size)[0][0]
        for _ in range(2):
            result = batch.make(OrderedDict(batch.kwargs, batch=piece))._step_fn()
            if result.closure_loss is not None:
                self._module.backward(result.closure_loss)


class _Closure(AbstractClosure[ClosureResult]):
    def __init__(self, run: Callable[[], ClosureResult]) -> None:
        super().__init__()
        self._run = run

    @override
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        return self._run()

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._result = self.closure()
        return self._result.loss


def _scaled(step: Callable[[], ClosureResult], share: float) -> ClosureResult:
    result = step()
    if share != 1 and result.closure_loss is not None:
        result.closure_loss = result.closure_loss * share
    return result
