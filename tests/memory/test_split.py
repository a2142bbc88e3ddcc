"""Cutting batches, putting outputs together, holding back logs' shares, allocating optimizer state."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from lit_ppo.memory.optimizers import allocate_state
from lit_ppo.memory.split import Splitter, batch_rows, combine, split_batch

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Record:
    x: Tensor
    name: str


@given(rows=st.integers(1, 9), size=st.integers(1, 9))
def test_pieces_cover_the_batch_in_order(rows, size):
    x = torch.arange(rows)
    batch = {
        "x": x,
        "nested": [x * 2, (x * 3, Pair(x * 4, 1.5))],
        "text": [f"row {i}" for i in range(rows)],
        "scale": torch.tensor(2.0),
        "record": Record(x * 5, "same"),
        "other": "word",
    }
    pieces = split_batch(batch, size)
    assert [batch_rows(p) for p in pieces] == [min(size, rows - i) for i in range(0, rows, size)]
    assert torch.equal(torch.cat([p["x"] for p in pieces]), x)
    assert torch.equal(torch.cat([p["nested"][1][1].x for p in pieces]), x * 4)
    assert torch.equal(torch.cat([p["record"].x for p in pieces]), x * 5)
    assert [t for p in pieces for t in p["text"]] == batch["text"]
    for p in pieces:
        assert p["scale"] == 2
        assert (p["other"], p["record"].name, p["nested"][1][1].y) == ("word", "same", 1.5)
        assert isinstance(p["nested"][1][1], Pair)


def test_a_pair_of_two_rows_is_still_a_pair():
    x, y = torch.randn(2, 3), torch.tensor([0, 1])
    pieces = split_batch([x, y], 1)
    assert all(torch.equal(p[0], x[i : i + 1]) and torch.equal(p[1], y[i : i + 1]) for i, p in enumerate(pieces))
    assert len(pieces) == 2


def test_an_encoding_of_transformers_is_cut():
    from transformers import BatchEncoding

    encoding = BatchEncoding({"input_ids": torch.arange(6).view(3, 2), "labels": torch.arange(3)})
    pieces = split_batch(encoding, 2)
    assert [p["input_ids"].tolist() for p in pieces] == [[[0, 1], [2, 3]], [[4, 5]]]
    assert pieces[0].input_ids is not None  # still an encoding


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(2), "y": torch.zeros(3)}, r"tensors of \[2, 3\] rows"),
        (["text"], "holds no tensor"),
        (torch.tensor(1.0), "holds no tensor"),
        (torch.zeros(0, 2), r"tensors of \[0\] rows"),
    ],
)
def test_rows_that_are_not_clear(batch, message):
    with pytest.raises(ValueError, match=message):
        batch_rows(batch)


def test_shares():
    batch = {"x": torch.zeros(5)}
    assert Splitter().pieces(batch, 2)[1:] == ([2, 2, 1], [0.4, 0.4, 0.2])
    assert Splitter().pieces(batch, 5)[1:] == ([5], [1.0])
    weighted = Splitter(weight=lambda b: 3 - len(b["x"]))
    assert weighted.pieces(batch, 2)[2] == [0.25, 0.25, 0.5]
    by_hand = Splitter(split=lambda b, size: [{"x": p} for p in b["x"].split(size)])
    assert by_hand.rows(batch) == 5
    assert by_hand.pieces(batch, 4)[1] == [4, 1]
    for bad in (-1, float("nan"), float("inf"), 0):
        with pytest.raises(ValueError, match="`weight` returned"):
            Splitter(weight=lambda b, bad=bad: bad).pieces(batch, 2)


def test_outputs_are_put_together():
    outputs = [
        {"loss": torch.tensor(1.0), "logits": torch.zeros(2, 3), "names": ["a", "b"], "n": 2, "none": None, "f": 1.0},
        {"loss": torch.tensor(4.0), "logits": torch.ones(1, 3), "names": ["c"], "n": 1, "none": None, "f": 4.0},
    ]
    whole = combine(outputs, [2, 1], [2 / 3, 1 / 3])
    assert whole["loss"] == pytest.approx(2.0)
    assert whole["f"] == pytest.approx(2.0)
    assert whole["logits"].tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert whole["names"] == ["a", "b", "c"]
    assert whole["n"] == [2, 1]
    assert whole["none"] is None
    pair = combine([(torch.zeros(2), torch.tensor(0.0)), (torch.ones(1), torch.tensor(3.0))], [2, 1], [2 / 3, 1 / 3])
    assert pair[0].tolist() == [0, 0, 1]
    assert pair[1] == pytest.approx(1.0)
    assert combine([outputs[0]], [2], [1.0]) is outputs[0]


def train(make, allocate):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    allocated = allocate_state(optimizer) if allocate else None
    if allocate:
        assert all(p.grad is None for p in model.parameters())
    sizes = [len(optimizer.state[p]) for p in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
    return model, allocated, sizes, [g["lr"] for g in optimizer.param_groups]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.1),
        lambda p: optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
        lambda p: optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
        lambda p: optim.Adamax(p, lr=0.1),
        lambda p: optim.Adadelta(p, lr=0.1),
        lambda p: optim.Adagrad(p, lr=0.1),
    ],
)
def test_allocated_state_changes_no_step(make):
    expected, _, _, rates = train(make, allocate=False)
    got, allocated, sizes, rates_after = train(make, allocate=True)
    assert allocated
    assert rates == rates_after
    assert isinstance(make([nn.Parameter(torch.ones(1))]), optim.SGD) or min(sizes) > 0
    for a, b in zip(expected.parameters(), got.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.NAdam(p, lr=0.1),
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
        lambda p: optim.Adam(p, lr=0.1, eps=0),
    ],
)
def test_state_that_cannot_be_allocated_ahead_is_left_alone(make):
    expected, _, _, _ = train(make, allocate=False)
    got, allocated, sizes, _ = train(make, allocate=True)
    assert not allocated
    assert sizes == [0, 0]
    for a, b in zip(expected.parameters(), got.parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_of_made_steps_is_kept():
    model = nn.Linear(2, 1)
    optimizer = optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = optimizer.state[model.weight]["exp_avg"].clone()
    assert allocate_state(optimizer)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], before)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert not allocate_state(optimizer)


def test_own_ways_of_allocating_are_used():
    class Own(optim.SGD):
        def allocate_state(self):
            self.called = True

    optimizer = Own([nn.Parameter(torch.ones(2))], lr=0.1)
    assert allocate_state(optimizer)
    assert optimizer.called


def test_bitsandbytes_state_is_allocated():
    bnb = pytest.importorskip("bitsandbytes")

    def make(p):
        return bnb.optim.AdamW8bit(p, lr=0.1, min_8bit_size=1)

    states = []
    for allocate in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(512))
        optimizer = make([weight])
        if allocate:
            assert allocate_state(optimizer)
            assert optimizer.state[weight]["state1"].dtype == torch.uint8
        for _ in range(3):
            weight.grad = torch.ones_like(weight) * weight.detach()
            optimizer.step()
        states.append(weight.detach().clone())
    assert torch.equal(*states)
