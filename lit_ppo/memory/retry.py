"""What an out-of-memory error does: say who holds the memory, or undo the work, cut it smaller and do it again.

A unit of work is written once, for any micro-batch size, inside an attempt::

    for attempt in retry(self, "update", size=len(batch), parameters=self.parameters()):
        with attempt:
            for micro in batch.split(attempt.size):
                self.manual_backward(self.loss(micro) * len(micro) / len(batch))
    optimizer.step()

On its own this runs the body once and turns an out-of-memory error into a report. With `OOMGuard` among the trainer's
callbacks (or a policy with `recover=True`) the body runs again with half the size until it fits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any, Literal, TypeVar

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lit_ppo.memory.report import memory_report
from lit_ppo.memory.undo import OutOfMemoryReport, Snapshot, batch_dependent_layers, is_out_of_memory, release_memory

log = logging.getLogger(__name__)

__all__ = ["Attempt", "OOMPolicy", "OutOfMemoryReport", "retry"]

T = TypeVar("T")

# What the ranks tell each other after an attempt: the largest answer decides.
_DONE, _AGAIN, _STOP = 0, 1, 1 << 40  # between _AGAIN and _STOP: `_STOP - n` asks for the size n


class Attempt:
    """One try at a unit of work; entered with `with`, which swallows an out-of-memory error if there is a next try.

    Leave the block by its end: a `return` or `break` inside it would skip the agreement with the other ranks.

    Attributes:
        phase: Name of the unit.
        size: Rows to work on at once.
        number: 0 for the first try.
    """

    def __init__(self, phase: str, size: int, number: int, give_report: Callable[[BaseException], str] | None) -> None:
        self.phase = phase
        self.size = size
        self.number = number
        self.error: BaseException | None = None
        self.entered = False
        self.snapshot: Snapshot | None = None
        self.around: AbstractContextManager[Any] = nullcontext()
        self._give_report = give_report

    def keep(self) -> None:
        """Keep what is done so far: a failure after this goes back to here, not to the start of the unit.

        For results that the body collects itself, such as chunks of a rollout. The body must then go on from there.
        """
        if self.snapshot is not None:
            self.snapshot = self.snapshot.renewed()

    def __enter__(self) -> Attempt:
        self.entered = True
        self.around.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.around.__exit__(kind, error, trace)
        if not is_out_of_memory(error):
            return False
        assert error is not None
        if self._give_report is not None:
            raise OutOfMemoryReport(self._give_report(error)) from error
        self.error = error
        return True


def _alone(value: int) -> int:
    return value


def _nothing(parameters: list[nn.Parameter]) -> None:
    return None


def _settled() -> None:
    return None


@dataclass
class OOMPolicy:
    """Decides what follows an out-of-memory error, and remembers the sizes that fit.

    A module holds one as `oom_policy` and uses it through `retry`; `OOMGuard` configures it. On several ranks every
    rank must run the same units in the same order, since each attempt ends with one `agree`.
    """

    recover: bool = False
    """Undo, halve and try again. False: report and raise."""
    on_batch_dependent: Literal["refuse", "warn"] = "refuse"
    """Layers whose result depends on how a batch is cut: try once more uncut, then refuse; or cut and say so."""
    grow_after: int | None = None
    """Double a size that was cut after this many units in a row that fitted; None: never."""
    agree: Callable[[int], int] = _alone
    """Maximum of an integer over all ranks, outside the model's own collectives."""
    agree_soon: Callable[[int], int] | None = None
    """The same, for units whose forwards or backwards are collective: a rank that failed gives up soon, since the
    others, if they have not, wait for it inside the model and never come. None: as `agree`."""
    settle: Callable[[], None] = _settled
    """Has the strategy forget the forward or backward that an error cut off."""
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered by attempts that build gradients: keeps data-parallel reductions out of them."""
    average: Callable[[list[nn.Parameter]], None] = _nothing
    """Averages gradients over ranks once an attempt that built them is agreed on."""
    on_event: Callable[[str, int, int], None] | None = None
    """Called with the phase, the size that failed and the next size."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Largest size allowed in each phase; a phase that never failed has none."""
    events: dict[str, int] = field(default_factory=dict)
    """Out-of-memory errors recovered from, by phase."""
    quiet: dict[str, int] = field(default_factory=dict)
    """Units in a row, by phase, that fitted at a cut size."""

    micro_batch: int | None = None
    """Size of the last unit that built gradients."""

    def __post_init__(self) -> None:
        """Check every value."""
        if self.on_batch_dependent not in ("refuse", "warn"):
            raise ValueError(f"`on_batch_dependent={self.on_batch_dependent!r}` must be 'refuse' or 'warn'.")
        grow = self.grow_after
        if grow is not None and (not isinstance(grow, int) or isinstance(grow, bool) or grow < 1):
            raise ValueError(f"`grow_after={grow!r}` must be a whole number >= 1 of units, or None to never grow back.")
        self._warned = False

    def size(self, phase: str, wanted: int) -> int:
        """Return the size that a unit of `phase` with `wanted` rows would start with."""
        return min(wanted, self.sizes.get(phase, wanted))

    def retry(
        self,
        phase: str,
        size: int,
        *,
        module: nn.Module | None = None,
        uses: nn.Module | None = None,
        parameters: Iterable[nn.Parameter] | None = None,
        undo: Callable[[], object] | None = None,
        snapshot: Snapshot | None = None,
        uncut: str = "",
        local: bool = False,
        apart: bool = False,
        least: int = 1,
    ) -> Iterator[Attempt]:
        """Yield attempts until one succeeds on every rank.

        Between attempts the random states and buffers are put back, the gradients of `parameters` are dropped, `undo`
        is called and cached memory is released. Variables of the body outlive a failed attempt: a body that keeps
        large tensors in variables belongs in a function (see `run`).

        Args:
            phase: Names the unit; sizes are learned by phase.
            size: Rows to work on at once if memory allows, >= 1.
            module: Whom the report is about.
            uses: What the body runs: its buffers are put back, and its layers decide whether the body may be cut.
                None: all of `module`.
            parameters: Those whose gradients the unit builds, from zero. Dropped after a failure; averaged over
                the ranks after success where the policy keeps reductions out of the attempts.
            undo: Puts back whatever else the body changed.
            snapshot: The state to go back to; None: the state now.
            uncut: Why the body cannot be cut: it is tried once more as it is. Empty: it can.
            local: The unit concerns this rank alone, so there is nothing to agree on.
            apart: No other rank waits for what the body does, even where forwards are collective elsewhere.
            least: Size at which nothing is left to split: where sizes count tokens, each row is alone long before 1.

        Raises:
            OutOfMemoryReport: It does not fit at the least size, may not be cut, or `recover` is off.
            ValueError: `size` is below 1.
            RuntimeError: An attempt was not entered, or a learned size would cut a batch that may not be cut.
        """
        if size < 1:
            raise ValueError(f"`size={size!r}` of the unit {phase!r} must be >= 1: there is nothing to work on.")
        built = None if parameters is None else list(parameters)
        agree = _alone if local else self.agree if apart or self.agree_soon is None else self.agree_soon
        uses = module if uses is None else uses
        if snapshot is None and self.recover:
            snapshot = Snapshot(uses)
        for number in count():
            limit = self.size(phase, size)
            if limit < size and self.recover:
                self._check_cut(phase, size, limit, uses)
            give_report = None if self.recover else self._reporter(phase, limit, module, "", least)
            attempt = Attempt(phase, limit, number, give_report)
            attempt.snapshot = snapshot
            if built is not None and self.recover:
                attempt.around = self.no_sync()
            yield attempt
            if not attempt.entered:
                raise RuntimeError(f"The attempt at {phase!r} was not entered. Put its body into `with attempt:`.")
            if not self.recover:
                return
            if attempt.error is not None and agree is not _alone:  # the others may never come to agree
                log.warning("Out of memory in %s at size %d; asking the other ranks. %s", phase, limit, attempt.error)
            try:
                verdict = agree(self._vote(attempt, uses, uncut, least))
            except RuntimeError as problem:
                if attempt.error is None:
                    raise
                reason = f"It could not be undone, as the other ranks are not at the same point. {problem}"
                report = self._reporter(phase, limit, module, reason, least)(attempt.error)
                raise OutOfMemoryReport(report) from attempt.error
            if verdict == _DONE:
                if built is not None:
                    self.micro_batch = limit
                    self.average(built)
                self._note_success(phase, limit, size)
                return
            if verdict == _STOP:
                reason = self._why_stop(attempt, uses, uncut)
                report = self._reporter(phase, limit, module, reason, least)(attempt.error)
                raise OutOfMemoryReport(report) from attempt.error
            self._note_failure(phase, limit, verdict)
            attempt.error = None  # its traceback holds the tensors of the failed forward
            snapshot = attempt.snapshot
            if snapshot is not None:
                snapshot.restore()
            for parameter in built or ():
                parameter.grad = None
            if not apart:
                self.settle()
            for parameter in built or ():  # settling may have finished some
                parameter.grad = None
            if undo is not None:
                undo()
            del attempt
            release_memory()

    def run(self, phase: str, size: int, body: Callable[[int], T], **kwargs: Any) -> T:
        """Call `body(size)` until it succeeds on every rank, and return its result. Arguments as in `retry`."""
        for attempt in self.retry(phase, size, **kwargs):
            with attempt:
                result = body(attempt.size)
        return result

    def run_chunks(
        self, phase: str, rows: int, size: int | None, body: Callable[[int, int], T], *, module: nn.Module | None = None
    ) -> list[T]:
        """Call `body(start, stop)` over `rows` in chunks, keep those that are finished, and return their results.

        For work without gradients that the other ranks do not wait for within a chunk.

        Args:
            phase: As in `retry`.
            rows: Number of rows, >= 1.
            size: Largest chunk; None: all rows.
            body: Called with consecutive, disjoint ranges that cover all rows. It must not depend on their borders.
            module: As in `retry`.

        Raises:
            OutOfMemoryReport: As in `retry`.
            ValueError: `rows` or `size` is below 1.
        """
        results: list[T] = []
        start = 0
        for attempt in self.retry(phase, min(rows, rows if size is None else size), module=module, apart=True):
            with attempt:
                while start < rows:
                    stop = min(start + attempt.size, rows)
                    results.append(body(start, stop))
                    start = stop
                    attempt.keep()
        return results

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, as plain data."""
        return {"sizes": dict(self.sizes), "events": dict(self.events), "quiet": dict(self.quiet)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.sizes, self.events, self.quiet = dict(state["sizes"]), dict(state["events"]), dict(state["quiet"])

    def _vote(self, attempt: Attempt, module: nn.Module | None, uncut: str, least: int = 1) -> int:
        if attempt.error is None:
            return _DONE
        if uncut or self.may_not_cut(module):
            return _AGAIN if attempt.number == 0 else _STOP
        return _STOP if attempt.size <= least else _STOP - max(attempt.size // 2, least)

    def may_not_cut(self, module: nn.Module | None) -> list[str]:
        """Name the layers of a module that forbid cutting."""
        return batch_dependent_layers(module) if module is not None and self.on_batch_dependent == "refuse" else []

    def _check_cut(self, phase: str, size: int, limit: int, module: nn.Module | None) -> None:
        """Refuse, or say once, that a batch is cut whose result depends on it."""
        if refused := self.may_not_cut(module):
            raise RuntimeError(
                f"The unit {phase!r} has {size} rows and at most {limit} fit, but cutting it would change its result: "
                f"{_some(refused)} depend on how a batch is cut. Use batches of {limit}, switch these layers off, or "
                "accept the difference with `on_batch_dependent='warn'`."
            )
        if not self._warned and module is not None and (layers := batch_dependent_layers(module)):
            self._warned = True
            rank_zero_warn(
                f"The unit {phase!r} is cut from {size} to {limit} rows, which changes its result: {_some(layers)} "
                "depend on how a batch is cut."
            )

    def _why_stop(self, attempt: Attempt, module: nn.Module | None, uncut: str) -> str:
        if attempt.error is None:
            return "Another rank ran out of memory for good; all ranks stop here."
        if uncut:
            return uncut
        if layers := self.may_not_cut(module):
            return (
                f"The batch was not cut because {_some(layers)} depend on how a batch is cut: switch these layers off, "
                "or accept the difference with `on_batch_dependent='warn'`."
            )
        return "One row at a time does not fit either."

    @staticmethod
    def _reporter(
        phase: str, size: int, module: nn.Module | None, reason: str, least: int
    ) -> Callable[[BaseException | None], str]:
        return lambda error: memory_report(module, phase=phase, size=size, reason=reason, error=error, least=least)

    def _note_failure(self, phase: str, failed: int, verdict: int) -> None:
        if verdict != _AGAIN:
            self.sizes[phase] = _STOP - verdict
        following = self.size(phase, failed)
        self.events[phase] = self.events.get(phase, 0) + 1
        self.quiet[phase] = 0
        log.warning("Out of memory in %s at size %d: undone, tried again at size %d.", phase, failed, following)
        if self.on_event is not None:
            self.on_event(phase, failed, following)

    def _note_success(self, phase: str, size: int, wanted: int) -> None:
        if self.grow_after is None or size == wanted:
            return
        self.quiet[phase] = self.quiet.get(phase, 0) + 1
        if self.quiet[phase] >= self.grow_after:
            self.sizes[phase] *= 2
            self.quiet[phase] = 0


def retry(
    module: nn.Module,
    phase: str,
    size: int,
    *,
    uses: nn.Module | None = None,
    parameters: Iterable[nn.Parameter] | None = None,
    undo: Callable[[], object] | None = None,
) -> Iterator[Attempt]:
    """Yield attempts by the policy that `module` holds as `oom_policy` (report only, if it holds none).

    See `OOMPolicy.retry`, to which the arguments go.
    """
    policy = getattr(module, "oom_policy", None) or OOMPolicy()
    return policy.retry(phase, size, module=module, uses=uses, parameters=parameters, undo=undo)


def _some(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
