"""The `graph` engine: decoding on the actor's own weights at the speed of the memory. The default on CUDA.

Sequences live in contiguous KV slots. One decode step (forward, sampling, log-prob, ends, refills) runs on the device
without the host, captured as a CUDA graph for each batch bucket; the host prefills the next prompts and reads the board
every few steps. Without CUDA the same code runs step by step, which is how its scheduling is tested.

What is promised: the sampling noise of a token is that of `lit_ppo.algo.noise`, so it depends on the sample alone.
Which row a sample is decoded in, and beside whom, changes its logits only by the rounding of the matrix kernels, which
differ between batch buckets; a token changes only where that rounding decides between two candidates.
"""

from __future__ import annotations

import importlib.util
import time
from collections import deque
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from lit_ppo.algo.noise import base_key
from lit_ppo.experience import Prompts, Rollout
from lit_ppo.roles.int8 import dtype_of
from lit_ppo.roles.model import RoleView
from lit_ppo.rollout.base import Draw, RolloutEngine, Sampling
from lit_ppo.rollout.board import INDEX, LENGTH, SLOT, STEP, TOKEN, Board, Cutter, Look
from lit_ppo.rollout.cache import DecodeAttention, PrefillAttention, SlotCache, free_bytes
from lit_ppo.rollout.capture import CaptureFailed, Captures, in_a_line
from lit_ppo.rollout.fused import FusedTrunk, unfusable
from lit_ppo.rollout.sampler import DeviceSampler, sampling_key
from lit_ppo.rollout.scheduler import Feeder, bucket_of, chunks, entries
from lit_ppo.rollout.trunk import HFTrunk, cache_shape, differs, is_sharded, our_attention, unservable, wobble

READ_EVERY = 8
"""Decode steps between two looks of the host."""


class Unservable(ValueError):
    """A model that this engine cannot run; the message says why."""


class GraphEngine(RolloutEngine):
    """Slots, refills and captured decode steps.

    Args:
        policy: The actor: its model generates, with its adapter on.
        max_rows: Sequences decoded at once.
        prefill_tokens: Prompt tokens in one forward: prompts are packed, and longer ones cut. Bounds its memory.
        memory_fraction: KV memory takes at most this share of what is free.
        keep_fraction: KV memory of up to this share of the device stays allocated through the update, and its graphs
            stay valid; more is released in `sleep` and captured again.
        capture: Capture CUDA graphs. None: on CUDA.
        use_kernels: Use the Triton kernels. None: on CUDA, where Triton is installed.
        read_behind: The host reads the board so many times `READ_EVERY` steps late, and the device need not wait for
            it. None: 1 on CUDA, else 0.
    """

    def __init__(
        self,
        policy: RoleView,
        *,
        max_rows: int = 256,
        prefill_tokens: int = 32768,
        memory_fraction: float = 0.8,
        keep_fraction: float = 0.1,
        capture: bool | None = None,
        use_kernels: bool | None = None,
        read_behind: int | None = None,
    ) -> None:
        self.policy = policy
        self.max_rows, self.prefill_tokens = max_rows, prefill_tokens
        self.memory_fraction, self.keep_fraction = memory_fraction, keep_fraction
        self.capture, self.use_kernels = capture, use_kernels
        self.read_behind = int(policy.device.type == "cuda") if read_behind is None else read_behind
        self.stats: dict[str, float] = {}
        """Of the last rollout: seconds, seconds before the first decode step, decode steps; graphs captured so far."""
        self._cache: SlotCache | None = None
        self._board: Board | None = None
        self._trunk: Any = None
        self._samplers: dict[Any, DeviceSampler] = {}
        self._graphs = Captures()
        self._addresses: tuple[int, ...] = ()
        self._limited = False  # whether the cache has fewer slots than it could use

    # ----------------------------------------------------------------------------------------------- the protocol

    @torch.no_grad()
    def generate(self, prompts: Prompts, sampling: Sampling, draw: Draw) -> Rollout:
        """Sample one response for each row.

        Consecutive rows with the same prompt share its prefill.

        Args:
            prompts: B rows on the policy's device.
            sampling: Options.
            draw: Which noise.

        Returns:
            A rollout whose width R is that of its longest response.

        Raises:
            ValueError: A prompt without a token.
            Unservable: A model whose attention cannot be ours.
            torch.OutOfMemoryError: Not even one sequence fits into the memory that is free.
        """
        store = self.policy.store
        try:
            with store.using(self.policy.adapter), our_attention(store.base):
                return self._run(prompts, sampling, draw)
        except torch.OutOfMemoryError:
            self.release()  # whoever tries again with fewer sequences starts from all the memory
            raise

    def sleep(self) -> None:
        """Release the KV memory and the graphs that point to it, unless there is room for it."""
        if is_sharded(self.policy):  # the weights that graphs point to are given back
            self.release()
            self._trunk = None
        if self._cache is None or self.policy.device.type != "cuda":
            return
        held = 2 * self._cache.keys.numel() * self._cache.keys.element_size()
        if held > self.keep_fraction * torch.cuda.get_device_properties(self.policy.device).total_memory:
            self.release()

    def wake(self) -> None:
        """Nothing: memory is taken when a rollout knows how much it needs."""

    def release(self) -> None:
        """Give back everything the engine holds on the device."""
        self._graphs.forget()
        self._samplers.clear()
        self._cache = self._board = None

    def memory_bytes(self) -> dict[str, int]:
        """Return what slots and graphs hold between rollouts."""
        cache = 0 if self._cache is None else self._cache.keys.nbytes + self._cache.values.nbytes
        return {"KV cache": cache, "CUDA graphs": self._graphs.bytes}

    def rows_at_once(self, total: int) -> int:
        """Return how many of `total` sequences are decoded together, memory permitting."""
        return min(total, self.max_rows)

    # ------------------------------------------------------------------------------------------------ one rollout

    def _run(self, prompts: Prompts, sampling: Sampling, draw: Draw) -> Rollout:
        self._prepare()
        start = self._now()
        feeder, limit = Feeder(prompts), sampling.max_new_tokens
        cache, board = self._reserve(feeder, limit)
        self._trunk.reach(cache.width)
        sampler = self._sampler(sampling)
        board.start(limit, base_key(draw.seed, draw.iteration, draw.stream), sampling.pad, sampling.entropy)
        feeder.open(cache.slots)
        width = board.rows.shape[1]
        bucket = min(bucket_of(feeder.total), width)
        ahead = max(1, (cache.slots - width) // 4)  # prefill so many at a time, before a row needs them
        self._feed(feeder, prompts, cache, board, at_least=1)
        board.fill(width)
        filled = self._now()
        remaining, steps, looks = limit, 0, deque[Look]()
        cutter = Cutter(board, sampling.stop_strings, feeder.total)
        while True:
            for _ in range(min(READ_EVERY, remaining)):
                self._step(bucket, feeder.longest + steps, sampling, sampler)
                steps, remaining = steps + 1, remaining - 1
            looks.append(Look.at(board, feeder.total, steps, sampling.stop_strings is not None))
            if len(looks) <= self.read_behind and remaining > 0:
                continue  # the host works on what the board showed before, while the device decodes on
            look = looks.popleft()
            request, step, lengths, head = look.read(width)
            if look.ids is not None:
                cutter.cut(look.ids, request, step, lengths, bucket)
            feeder.collect(lengths)
            if feeder.ended == feeder.total:
                break
            self._feed(feeder, prompts, cache, board, at_least=ahead)
            remaining = limit
            if head == feeder.total:  # the queue is empty: from here on the batch shrinks
                busy = [row for row, number in enumerate(request) if number >= 0 and not lengths[number]]
                remaining = max(0, limit - min(step[row] for row in busy) - (steps - look.steps))
                if bucket_of(len(busy)) < bucket:
                    bucket = bucket_of(len(busy))
                    board.gather(torch.tensor(busy, device=board.rows.device))
                    looks.clear()  # they show the rows where they were
        self.stats = {
            "seconds": _seconds(start, self._now()),
            "prefill_seconds": _seconds(start, filled),
            "steps": steps,
            "captures": self._graphs.count,
        }
        ended = torch.tensor(lengths, device=prompts.ids.device)
        longest = max(lengths)
        rollout = Rollout(
            prompts=prompts,
            ids=board.ids[: feeder.total, :longest].clone(),
            lengths=ended,
            stopped=board.stopped[: feeder.total].clone(),
            logprobs=board.logprobs[: feeder.total, :longest].clone(),
            entropy=board.entropy[: feeder.total, :longest].clone() if sampling.entropy else None,  # type: ignore[index]
        )
        if cutter.lengths:  # what was decoded before the host had seen a stop string
            after = ~rollout.mask
            rollout.ids.masked_fill_(after, sampling.pad)
            rollout.logprobs.masked_fill_(after, 0.0)
            if rollout.entropy is not None:
                rollout.entropy.masked_fill_(after, 0.0)
        return rollout

    def _now(self) -> Any:
        """Mark a point in the device's time."""
        if self.policy.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _feed(self, feeder: Feeder, prompts: Prompts, cache: SlotCache, board: Board, at_least: int) -> None:
        """Prefill the next requests, all but the last token of each prompt: that is the first step's input."""
        device = prompts.ids.device
        width = prompts.ids.shape[1]
        batch = feeder.batch(at_least)
        if batch is None:
            return
        work = [(r, g) for r, g in zip(batch.leaders, batch.groups, strict=True) if feeder.lengths[r] > 1]
        for chunk in chunks([feeder.lengths[r] - 1 for r, _ in work], self.prefill_tokens):
            rows, starts = [work[n] for n, _, _ in chunk], [start for _, start, _ in chunk]
            sizes = [end - start for _, start, end in chunk]
            attention = PrefillAttention(cache, sizes, [slots for _, slots in rows], device, starts)
            host = torch.tensor([[r for r, _ in rows], [width - feeder.lengths[r] for r, _ in rows]])
            leader, first = host.to(device, non_blocking=True)
            ids = prompts.ids[leader[attention.row], first[attention.row] + attention.place]
            self._trunk.hidden(ids, attention.place, attention)
        board.enqueue(batch.first, entries(prompts, batch, feeder.lengths))

    def _step(self, rows: int, bound: int, sampling: Sampling, sampler: DeviceSampler) -> None:
        """Decode one token in each of the first `rows` rows."""
        device = self.policy.device
        if not (device.type == "cuda" if self.capture is None else self.capture):
            self._decode(rows, bound, sampler)
            return
        assert self._cache is not None
        width = self._cache.width
        try:
            self._graphs.run((rows, sampling_key(sampling)), lambda: self._decode(rows, width, sampler), device)
        except CaptureFailed as cause:  # of a model whose forward asks the device something, as some routers of experts
            self.release()
            raise self._cannot(f"its decode step cannot be captured ({cause})") from cause

    def _decode(self, rows: int, bound: int, sampler: DeviceSampler) -> None:
        board, cache, kind = self._board, self._cache, self.policy.device.type
        assert board is not None
        assert cache is not None
        state = board.rows[:, :rows]
        attention = DecodeAttention(cache, state[SLOT], state[LENGTH], bound, self._kernels())
        # A weight that autocast keeps would be the weight of the capture for ever.
        dtype, on = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        with torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=False):
            logits = self._trunk.logits(self._trunk.hidden(state[TOKEN], state[LENGTH], attention))
        token, logprob, entropy = sampler(logits, board.base, state[INDEX], state[STEP])
        board.advance(rows, token, logprob, sampler.stop_table, self._kernels(), entropy)

    # ------------------------------------------------------------------------------------- its memory and its model

    def _prepare(self) -> None:
        """Find out how to run the model; again, and with new graphs, if its weights have moved."""
        base, kernels = self.policy.store.base, self._kernels()
        if self._trunk is not None and self._addresses == self._where():
            self._trunk.refresh()
            return
        self._graphs.forget()
        reason = unservable(base)
        if reason is not None:
            raise self._cannot(reason)
        self._trunk = self._fused_trunk(kernels) or HFTrunk(base)
        sharded = is_sharded(self.policy) and not isinstance(self._trunk, FusedTrunk)
        reason = "its sharded layers cannot be fused" if sharded else self._error(self._trunk)
        if reason is not None:
            self._trunk = None
            raise self._cannot(reason)
        self._addresses = self._where()

    def _cannot(self, reason: str) -> Unservable:
        return Unservable(f"The graph engine cannot serve {type(self.policy.store.base).__name__}: {reason}.")

    def _fused_trunk(self, kernels: Any) -> HFTrunk | None:
        """Return fused layers for a model of the Llama family, if they compute what the model does."""
        base = self.policy.store.base
        if kernels is None or torch.is_autocast_enabled(self.policy.device.type) or unfusable(base) is not None:
            return None
        trunk = FusedTrunk(base, 64, self.policy.adapter, arrange=not is_sharded(self.policy))
        reason = self._error(trunk)
        if reason is None:
            return trunk
        rank_zero_info(f"{type(base).__name__} is decoded without fused layers, which is slower: {reason}.")
        return None

    def _error(self, trunk: HFTrunk) -> str | None:
        """Say how a trunk differs from the model's own forward, or None."""
        try:
            error = differs(trunk, self._kernels())
        except torch.OutOfMemoryError:
            raise
        except Exception as cause:  # whatever an unknown model or an unknown compiler raises: `generate` still works
            return in_a_line(cause)
        half = dtype_of(self.policy.store.base.get_input_embeddings()).itemsize < 4
        limit = 0.05 if half or torch.is_autocast_enabled(self.policy.device.type) else 1e-3
        if error <= limit:
            return None
        own = wobble(self.policy.store.base) if half else 0.0  # rounding that the model makes by itself, too
        if error <= 3 * own:
            return None
        return f"its logits come out {error:.1%} off those of its own forward, which rounds by {own:.1%}"

    def _where(self) -> tuple[int, ...]:
        """Return where the weights are, and which adapters are merged into them: what a captured graph relies on."""
        store = self.policy.store
        merged = tuple(len(m.merged_adapters) for m in store.modules() if hasattr(m, "merged_adapters"))
        return tuple(p.data_ptr() for p in store.parameters()) + merged

    def _reserve(self, feeder: Feeder, limit: int) -> tuple[SlotCache, Board]:
        """Take memory for a rollout; what is held already is kept if it is enough, and the graphs with it."""
        base, device = self.policy.store.base, self.policy.device
        rows = bucket_of(min(feeder.total, self.max_rows))
        slots = min(feeder.total, rows + max(8, rows // 2)) if feeder.total > rows else feeder.total
        width = -(-(feeder.longest + limit) // 64) * 64
        held_cache, held_board = self._cache, self._board
        if held_cache is not None and held_board is not None:
            fits = held_cache.width >= width
            if not self._limited:  # else no more sequences would fit
                fits = fits and held_cache.slots >= min(slots, rows) and held_board.rows.shape[1] >= rows
            if fits and held_board.nobody >= feeder.total and held_board.ids.shape[1] >= limit:
                return held_cache, held_board
            slots, width = max(slots, held_cache.slots), max(width, held_cache.width)
            rows = max(rows, held_board.rows.shape[1])
            limit, requests = max(limit, held_board.ids.shape[1]), max(feeder.total, held_board.nobody)
            held_cache = held_board = None
            self.release()
        else:
            requests = feeder.total
        shape = cache_shape(base)
        affordable = self._affordable(SlotCache.slot_bytes(width=width, **shape), slots)
        slots, self._limited = affordable, affordable < slots
        self._cache = SlotCache(slots=slots, width=width, device=device, **shape)
        self._board = Board(min(rows, bucket_of(slots)), requests, limit, self._cache.trash, device)
        return self._cache, self._board

    def _affordable(self, slot_bytes: int, slots: int) -> int:
        """Return how many of so many slots the free memory holds."""
        free = free_bytes(self.policy.device)
        if free is None:
            return slots
        slots = min(slots, int(self.memory_fraction * free / slot_bytes) - 1)  # one more is of rows without a sequence
        if slots < 1:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: a rollout needs {slot_bytes / 2**20:.0f} MiB of KV memory a sequence and "
                f"{free / 2**20:.0f} MiB are free. Lower `sampling.max_new_tokens` or cut the prompts."
            )
        return slots

    def _kernels(self) -> Any:
        """Return the Triton kernels, or None where PyTorch has to do."""
        use = self.policy.device.type == "cuda" if self.use_kernels is None else self.use_kernels
        if not use or importlib.util.find_spec("triton") is None:
            return None
        from lit_ppo.rollout import kernels

        return kernels

    def _sampler(self, sampling: Sampling) -> DeviceSampler:
        """Return the sampler of these options; its tables are what captured graphs read."""
        key = sampling_key(sampling)
        if key not in self._samplers:
            vocab = self.policy.store.base.get_output_embeddings().weight.shape[0]
            self._samplers[key] = DeviceSampler(sampling, vocab, self.policy.device, self._kernels())
        return self._samplers[key]


def _seconds(start: Any, end: Any) -> float:
    """Return the time between two marks."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
