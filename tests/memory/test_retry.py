"""The policy: undo, cut, try again, and the same result."""

import random
import weakref
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lit_ppo.memory.ledger import holdings
from lit_ppo.memory.report import memory_report
from lit_ppo.memory.retry import OOMPolicy, OutOfMemoryReport, retry
from lit_ppo.memory.undo import Snapshot, batch_dependent_layers, is_out_of_memory

pytestmark = pytest.mark.usefixtures("fast_collections")


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def trainable(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def accumulate(model, x, size, fail_at=()):
    """Sum of squares over `x`, in micro-batches; calls whose number is in `fail_at` run out of memory."""
    for number, part in enumerate(x.split(size)):
        if number in fail_at:
            out_of_memory()
        model(part).square().sum().backward()


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def test_one_attempt_when_nothing_fails():
    policy = OOMPolicy(recover=True)
    sizes = []
    for attempt in policy.retry("update", 8):
        with attempt:
            sizes.append((attempt.size, attempt.number))
    assert sizes == [(8, 0)]
    assert policy.state_dict() == {"sizes": {}, "events": {}, "quiet": {}}


@settings(max_examples=8, deadline=None)
@given(rows=st.integers(2, 13), fits=st.integers(1, 6), fail_at=st.integers(0, 3))
def test_same_gradient_for_any_cut(rows, fits, fail_at):
    model, x = trainable(), torch.randn(rows, 4, dtype=torch.float64)
    accumulate(model, x, rows)
    expected = gradients(model)
    model.zero_grad()
    policy = OOMPolicy(recover=True)
    for attempt in policy.retry("update", rows, module=model, parameters=model.parameters()):
        with attempt:
            # a failing attempt leaves partial gradients behind if its later micro-batches fail
            accumulate(model, x, attempt.size, fail_at={fail_at, 0} if attempt.size > fits else ())
    for got, want in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert policy.size("update", rows) == attempt.size <= max(fits, 1)


def test_partial_gradients_of_a_failed_attempt_are_dropped():
    model, x = trainable(), torch.randn(8, 4, dtype=torch.float64)
    accumulate(model, x, 2)
    expected = gradients(model)
    model.zero_grad()
    for attempt in OOMPolicy(recover=True).retry("update", 4, module=model, parameters=model.parameters()):
        with attempt:
            accumulate(model, x, attempt.size, fail_at={1} if attempt.number == 0 else ())
    for got, want in zip(gradients(model), expected, strict=True):
        assert torch.equal(got, want)


def test_backward_failure_is_recovered():
    model, x = trainable(), torch.randn(6, 4, dtype=torch.float64)
    accumulate(model, x, 3)
    expected = gradients(model)
    model.zero_grad()
    calls = []

    def hook(gradient):
        calls.append(None)
        if len(calls) == 1:
            out_of_memory()

    def loss(part):
        out = model(part)
        out.register_hook(hook)
        return out.square().sum()

    for attempt in OOMPolicy(recover=True).retry("update", 6, parameters=model.parameters()):
        with attempt:
            for part in x.split(attempt.size):
                loss(part).backward()
    assert len(calls) == 3
    for got, want in zip(gradients(model), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("least", "sizes"), [(1, [64, 32, 16, 8, 4, 2, 1]), (9, [64, 32, 16, 9]), (100, [64])])
def test_it_stops_when_nothing_is_left_to_split(least, sizes):
    tried, options = [], {"module": trainable(), "least": least}

    def body(size):
        tried.append(size)
        out_of_memory()

    with pytest.raises(OutOfMemoryReport, match="One row at a time does not fit either") as stopped:
        OOMPolicy(recover=True).run("update (tokens)", 64, body, **options)
    assert tried == sizes
    assert "smaller micro-batch" not in str(stopped.value)
    with pytest.raises(OutOfMemoryReport, match=r"(?s)size 101.*smaller micro-batch"):
        OOMPolicy().run("update (tokens)", 101, body, **options)


def test_random_states_and_buffers_are_put_back():
    numpy = pytest.importorskip("numpy")
    layer = nn.BatchNorm1d(3)
    policy, draws = OOMPolicy(recover=True, on_batch_dependent="warn"), []
    for attempt in policy.retry("step", 1, module=layer, uncut="It is whole."):
        with attempt:
            draws.append((torch.rand(1).item(), random.random(), numpy.random.rand()))
            layer(torch.randn(5, 3))
            if attempt.number == 0:
                layer.running_mean = torch.full((3,), 7.0)  # replaced, not only written to
                out_of_memory()
    assert draws[0] == draws[1]
    assert layer.num_batches_tracked.item() == 1
    assert layer.running_mean.abs().max() < 1


def test_snapshot_leaves_out_what_does_not_change():
    module = nn.ModuleDict({"fixed": nn.BatchNorm1d(2).eval(), "moving": nn.BatchNorm1d(2)})
    module["moving"].register_buffer("mask", torch.ones(2), persistent=False)
    snapshot = Snapshot(module)
    for buffer in module.buffers():
        buffer.add_(5)
    snapshot.restore()
    assert module["fixed"].running_mean.eq(5).all()
    assert module["moving"].mask.eq(6).all()
    assert module["moving"].running_mean.eq(0).all()


def test_failed_tensors_are_free_before_the_next_attempt():
    held = []

    def body(size):
        activations = torch.zeros(1000)
        held.append(weakref.ref(activations))
        if size > 2:
            out_of_memory()
        assert [ref() for ref in held[:-1]] == [None] * (len(held) - 1)
        return size

    assert OOMPolicy(recover=True).run("update", 8, body) == 2
    assert len(held) == 3


def test_undo_is_called_after_every_failure_and_only_then():
    undone = []
    for attempt in OOMPolicy(recover=True).retry("update", 4, undo=lambda: undone.append(1)):
        with attempt:
            if attempt.size > 1:
                out_of_memory()
    assert undone == [1, 1]


def test_size_is_remembered_by_phase_and_grows_back():
    policy = OOMPolicy(recover=True, grow_after=2)

    def unit(phase, fits, rows=8):
        return policy.run(phase, rows, lambda size: out_of_memory() if size > fits else size)

    assert unit("update", 2) == 2
    assert policy.events == {"update": 2}
    assert unit("score", 8) == 8
    assert unit("update", 8, rows=2) == 2  # not limited: says nothing about larger sizes
    assert policy.quiet == {"update": 1}
    assert unit("update", 8) == 2
    assert unit("update", 8) == 4
    restored = OOMPolicy(recover=True)
    restored.load_state_dict(policy.state_dict())
    assert restored.size("update", 8) == 4
    assert restored.size("score", 8) == 8


def test_without_growth_the_size_stays():
    policy = OOMPolicy(recover=True)
    policy.run("update", 4, lambda size: out_of_memory() if size > 2 else size)
    for _ in range(5):
        assert policy.run("update", 4, lambda size: size) == 2


def test_events_are_told():
    told = []
    policy = OOMPolicy(recover=True, on_event=lambda *event: told.append(event))
    policy.run("update", 5, lambda size: out_of_memory() if size > 1 else size)
    assert told == [("update", 5, 2), ("update", 2, 1)]


def test_chunks_keep_what_is_finished_and_its_noise():
    torch.manual_seed(0)
    expected = torch.rand(10)
    torch.manual_seed(0)
    policy, calls = OOMPolicy(recover=True), []

    def body(start, stop):
        calls.append((start, stop))
        drawn = torch.rand(stop - start)
        if start >= 4 and stop - start > 1:
            out_of_memory()
        return drawn

    assert torch.equal(torch.cat(policy.run_chunks("rollout", 10, 4, body)), expected)
    assert calls[:4] == [(0, 4), (4, 8), (4, 6), (4, 5)]
    assert calls[-1] == (9, 10)


def test_gives_up_at_one_with_the_report_and_the_cause():
    model = trainable()
    policy = OOMPolicy(recover=True)
    with pytest.raises(
        OutOfMemoryReport, match=r"(?s)Out of memory on cpu in update, size 1.*One row.*weights"
    ) as info:
        policy.run("update", 4, out_of_memory, module=model)
    assert isinstance(info.value.__cause__, torch.OutOfMemoryError)
    assert policy.events == {"update": 2}
    assert not is_out_of_memory(info.value)  # an outer guard must not try again


def test_report_only_by_default():
    class Holder(nn.Module):
        pass

    def unit(holder, calls):
        for attempt in retry(holder, "update", 4):
            with attempt:
                calls.append(attempt.size)
                out_of_memory()

    for holder in (Holder(), trainable()):
        calls = []
        with pytest.raises(OutOfMemoryReport, match=r"Out of memory on cpu in update, size 4\. CUDA out of memory"):
            unit(holder, calls)
        assert calls == [4]


def test_retry_uses_the_policy_of_the_module():
    model = trainable()
    model.oom_policy = OOMPolicy(recover=True)
    for attempt in retry(model, "update", 4):
        with attempt:
            if attempt.size > 1:
                out_of_memory()
    assert model.oom_policy.sizes == {"update": 1}


@pytest.mark.parametrize("recover", [True, False])
def test_other_errors_pass(recover):
    calls = []

    def body(size):
        calls.append(size)
        return size / 0

    with pytest.raises(ZeroDivisionError):
        OOMPolicy(recover=recover).run("update", 4, body)
    assert calls == [4]


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.Dropout(0.1)])
def test_batch_dependent_work_is_tried_uncut_then_refused(layer):
    sizes, policy = [], OOMPolicy(recover=True)
    model = nn.Sequential(nn.Linear(4, 4), layer)
    assert policy.run("step", 8, lambda size: sizes.append(size) or (out_of_memory() if len(sizes) == 1 else size),
                      module=model) == 8  # fmt: skip
    assert sizes == [8, 8]
    with pytest.raises(OutOfMemoryReport, match=r"not cut because `1` depend on.*on_batch_dependent='warn'"):
        policy.run("step", 8, lambda size: sizes.append(size) or out_of_memory(), module=model)
    assert sizes == [8] * 4
    assert policy.sizes == {}
    policy.sizes["step"] = 4  # learned elsewhere
    with pytest.raises(RuntimeError, match=r"has 8 rows and at most 4 fit.*`1` depend on"):
        policy.run("step", 8, lambda size: size, module=model)
    assert policy.run("step", 8, lambda size: size, module=model.eval()) == 4


def test_batch_dependent_work_is_cut_with_a_warning_if_asked():
    policy = OOMPolicy(recover=True, on_batch_dependent="warn")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.warns(UserWarning, match=r"is cut from 8 to 4 rows, which changes its result: `1`") as record:
        assert policy.run("step", 8, lambda size: out_of_memory() if size > 2 else size, module=model) == 2
    assert len(record) == 1


def test_batch_dependent_layers_are_found():
    model = nn.ModuleDict(
        {
            "bn": nn.BatchNorm2d(2),
            "fixed": nn.BatchNorm2d(2).eval(),
            "norm": nn.LayerNorm(2),
            "instance": nn.InstanceNorm1d(2),
            "tracking": nn.InstanceNorm1d(2, track_running_stats=True),
            "off": nn.Dropout(0.0),
            "on": nn.Dropout1d(0.2),
            "lstm": nn.LSTM(2, 2, num_layers=2, dropout=0.3),
            "attention": nn.MultiheadAttention(2, 1, dropout=0.1),
        }
    )
    assert batch_dependent_layers(model) == ["bn", "tracking", "on", "lstm", "attention"]
    assert batch_dependent_layers(model.eval()) == []


def test_what_cannot_be_cut_is_tried_once_more():
    sizes = []
    with pytest.raises(OutOfMemoryReport, match="cannot be cut from outside"):
        OOMPolicy(recover=True).run(
            "step", 8, lambda size: sizes.append(size) or out_of_memory(), uncut="It cannot be cut from outside."
        )
    assert sizes == [8, 8]


class Ranks:
    """The other rank, played back: its answers to each agreement."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def __call__(self, mine):
        return max(mine, self.answers.pop(0))


def test_a_failure_elsewhere_is_undone_here():
    seen, smaller = [], OOMPolicy(recover=True)._vote
    other = OOMPolicy(recover=True).retry("update", 6)  # the peer fails at 6 and asks for 3
    attempt = next(other)
    attempt.error = torch.OutOfMemoryError("x")
    policy = OOMPolicy(recover=True, agree=Ranks(smaller(attempt, None, ""), 0))
    assert policy.run("update", 8, lambda size: seen.append(size) or size) == 3
    assert seen == [8, 3]
    assert policy.events == {"update": 1}


def test_the_smallest_size_of_any_rank_wins():
    peer = OOMPolicy()._vote
    answers = []
    for size in (2, 16):
        attempt = next(OOMPolicy(recover=True).retry("update", size))
        attempt.error = torch.OutOfMemoryError("x")
        answers.append(peer(attempt, None, ""))
    policy = OOMPolicy(recover=True, agree=Ranks(max(answers), 0))
    assert policy.run("update", 8, lambda size: size) == 1


def test_all_ranks_stop_together():
    peer = OOMPolicy(recover=True)
    attempt = next(peer.retry("update", 1))
    attempt.error = torch.OutOfMemoryError("x")
    policy = OOMPolicy(recover=True, agree=Ranks(peer._vote(attempt, None, "")))
    with pytest.raises(OutOfMemoryReport, match="Another rank ran out of memory for good"):
        policy.run("update", 8, lambda size: size)


def test_reductions_stay_out_of_attempts_and_follow_the_agreement():
    order, model = [], trainable()

    @contextmanager
    def no_sync():
        order.append("enter")
        yield
        order.append("exit")

    policy = OOMPolicy(
        recover=True,
        no_sync=no_sync,
        agree=lambda value: order.append("agree") or value,
        average=lambda parameters: order.append(len(parameters)),
    )
    for attempt in policy.retry("update", 2, parameters=model.parameters()):
        with attempt:
            order.append(attempt.size)
    assert order == ["enter", 2, "exit", "agree", 4]
    order.clear()
    policy.run("score", 2, lambda size: size)  # no gradients, nothing to reduce
    assert order == ["agree"]


def test_bad_arguments():
    policy = OOMPolicy(recover=True)
    with pytest.raises(ValueError, match=r"`size=0` of the unit 'update' must be >= 1"):
        next(policy.retry("update", 0))
    with pytest.raises(ValueError, match=r"`on_batch_dependent='stop'` must be 'refuse' or 'warn'"):
        OOMPolicy(on_batch_dependent="stop")
    with pytest.raises(ValueError, match=r"`grow_after=0` must be a whole number >= 1"):
        OOMPolicy(grow_after=0)
    attempts = policy.retry("update", 2)
    next(attempts)
    with pytest.raises(RuntimeError, match=r"attempt at 'update' was not entered"):
        next(attempts)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 8 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("shapes do not match"), False),
        (MemoryError(), True),
        (None, False),
    ],
)
def test_is_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


def test_report_names_roles_and_what_they_hold():
    actor = nn.Linear(1024, 1024, bias=False)  # 4 MiB
    reward = nn.Linear(1024, 512, bias=False).requires_grad_(False)
    owner = nn.Module()
    owner.actor = actor
    owner.roles = {"actor": actor, "tied": actor, "reward": reward}
    optimizer = torch.optim.AdamW(actor.parameters())
    actor(torch.randn(1, 1024)).sum().backward()
    optimizer.step()
    rows = {r.name: r for r in holdings(owner, torch.device("cpu"), [optimizer])}
    assert list(rows) == ["actor", "reward"]  # shared weights once, largest first
    assert (rows["actor"].weights, rows["actor"].gradients) == (1 << 22, 1 << 22)
    assert rows["actor"].optimizer == pytest.approx(1 << 23, abs=64)
    assert (rows["reward"].weights, rows["reward"].frozen, rows["reward"].gradients) == (1 << 21, 1 << 21, 0)
    assert holdings(owner, torch.device("meta")) == []


def test_report_ranks_the_levers_by_what_is_held():
    owner = nn.Module()
    owner.reward = nn.Linear(16384, 16384, bias=False, device="meta").requires_grad_(False)
    text = memory_report(owner, phase="update", size=4)
    first = text[text.index("What helps") :].splitlines()[1]
    assert "QuantizeRewardModel" in first
    text = memory_report(trainable(), phase="update", size=1)
    assert "GradientCheckpointing" in text
    assert "micro_batch_size" not in text  # it is 1 already
    used = trainable()
    used[0].gradient_checkpointing = True
    assert "GradientCheckpointing" not in memory_report(used, phase="update", size=1)
    assert "rollout_batch_size" in memory_report(trainable(), phase="rollout", size=4)
    assert "score_batch_size" in memory_report(trainable(), phase="score", size=4)
    assert "LoRA" not in memory_report(None, phase="update", size=4)


@pytest.mark.gpu
def test_a_real_cuda_out_of_memory_is_recovered():
    device = torch.device("cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + (256 << 20)) / total)
    try:
        model = nn.Linear(1024, 1024, bias=False, device=device)
        x = torch.randn(1 << 14, 1024, device=device)  # 64 MiB

        def body(size):
            for part in x.split(size):
                hidden = model(part)
                (hidden.tanh() * hidden.sin()).square().sum().backward()
            return size

        policy = OOMPolicy(recover=True)
        size = policy.run("update", len(x), body, module=model, parameters=model.parameters())
        assert size < len(x)
        assert policy.events["update"] >= 1
        recovered = model.weight.grad.clone()
        model.zero_grad()
        body(size)
        assert torch.equal(model.weight.grad, recovered)
        with pytest.raises(OutOfMemoryReport, match=r"(?s)reserved but unallocated.*other processes"):
            policy.run("huge", 1, lambda size: torch.zeros(1 << 30, device=device), module=model)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
