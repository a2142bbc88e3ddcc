"""LeanAdamW on sharded parameters: the noise and the blocks are those of one device, and a checkpoint reshards."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lit_ppo.optim import LeanAdamW, lean
from lit_ppo.optim.codes import local
from lit_ppo.optim.lean import first_row

pytestmark = pytest.mark.timeout(300)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
SHAPES = [(33, 300), (300, 33), (70, 64)]  # 33 rows on 2 ranks: 17 and 16


def model():
    torch.manual_seed(0)
    return nn.ParameterList([torch.randn(shape).bfloat16() for shape in SHAPES])


def train(net, optimizer, steps, start=0):
    for step in range(start, start + steps):
        for i, p in enumerate(net.parameters()):
            g = torch.Generator().manual_seed(100 * step + i)
            whole = (torch.randn(p.shape, generator=g) * 1e-2).bfloat16()
            if hasattr(p, "to_local"):
                mine, first = p.to_local(), first_row(p)
                part = whole[first : first + len(mine)].clone().to(mine.device)
                p.grad = type(p).from_local(part, p.device_mesh, p.placements,
                                            shape=p.shape, stride=p.stride())  # fmt: skip
            else:
                p.grad = whole
        optimizer.step()
        optimizer.zero_grad()


def whole(net):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in net.parameters()]


def make(net, **kind):
    return LeanAdamW(net.parameters(), lr=1e-2, seed=5, **kind)


def rank_main(rank, world, port, folder, kind):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    net = model()
    fully_shard(net, mesh=mesh)
    optimizer = make(net, **kind)
    train(net, optimizer, 3)
    three = whole(net)
    state = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=FULL))  # the step counter is no copy
    train(net, optimizer, 2, start=3)
    five = whole(net)
    # a new run, from what was saved, here on the same ranks; one device reads it in the test
    again = model()
    for p, value in zip(again.parameters(), three, strict=True):
        p.data.copy_(value)
    fully_shard(again, mesh=mesh)
    resumed = make(again, **kind)
    set_optimizer_state_dict(again, resumed, state if rank == 0 else {}, options=StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True))  # fmt: skip
    train(again, resumed, 2, start=3)
    assert all(torch.equal(a, b) for a, b in zip(whole(again), five, strict=True))
    if rank == 0:
        torch.save({"three": three, "five": five, "state": state}, f"{folder}/sharded.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("state", ["8bit", "float32"])
@pytest.mark.parametrize("rounding", ["stochastic", "master"])
def test_sharded_is_one_device_bit_by_bit_and_reshards(tmp_path, state, rounding):
    kind = {"state": state, "rounding": rounding}
    port = 29_500 + 7 * ["8bit", "float32"].index(state) + 3 * ["stochastic", "master"].index(rounding)
    mp.spawn(rank_main, (2, port, str(tmp_path), kind), nprocs=2)
    sharded = torch.load(tmp_path / "sharded.pt", weights_only=True)
    alone = model()
    optimizer = make(alone, **kind)
    train(alone, optimizer, 3)
    assert all(torch.equal(a, b) for a, b in zip(whole(alone), sharded["three"], strict=True))
    resumed_net = model()
    for p, value in zip(resumed_net.parameters(), sharded["three"], strict=True):
        p.data.copy_(value)
    resumed = make(resumed_net, **kind)
    set_optimizer_state_dict(resumed_net, resumed, sharded["state"], options=StateDictOptions(full_state_dict=True))
    for net, own in ((alone, optimizer), (resumed_net, resumed)):
        train(net, own, 2, start=3)
        assert all(torch.equal(a, b) for a, b in zip(whole(net), sharded["five"], strict=True))


def written(net, optimizer):
    """What a sharded checkpoint is written from, and read into."""
    return {"net": dict(enumerate(net.parameters())), "optimizer": get_optimizer_state_dict(net, optimizer)}


def read(net, optimizer, folder):
    found = written(net, optimizer)
    dcp.load(found, checkpoint_id=folder)
    set_optimizer_state_dict(net, optimizer, found["optimizer"])


def paged_main(rank, world, port, folder, kind, saves):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    optimizer = make(net, paged=True, **kind)
    if saves:
        train(net, optimizer, 3)
        dcp.save(written(net, optimizer), checkpoint_id=f"{folder}/three")
    else:
        read(net, optimizer, f"{folder}/three")
        again = copy.deepcopy(get_optimizer_state_dict(net, optimizer))  # saved before it is used: the same
        step = next(iter(again["state"].values()))["step"]
        assert step == 3
    train(net, optimizer, 2, start=3)
    five = whole(net)
    if rank == 0:
        torch.save(five, f"{folder}/five-{world}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{"state": "8bit", "rounding": "stochastic"}, {"state": "float32"}])
def test_a_sharded_checkpoint_of_paged_state_is_read_by_any_number_of_ranks(tmp_path, kind):
    port = 29_560 + 5 * len(kind)
    for world in (2, 1, 4):
        mp.spawn(paged_main, (world, port, str(tmp_path), kind, world == 2), nprocs=world)
    want = torch.load(tmp_path / "five-2.pt")
    for world in (1, 4):
        for a, b in zip(want, torch.load(tmp_path / f"five-{world}.pt"), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["8bit", "float32"])
@pytest.mark.parametrize("rounding", ["stochastic", "master"])
def test_paged_state_of_shards_is_the_same_leaves_the_gpu_and_is_saved(tmp_path, monkeypatch, state, rounding):
    """NCCL alone, as Lightning starts it: nothing may be sent from host memory."""
    monkeypatch.setattr(lean, "PIECE", 3000)
    kind = {"state": state, "rounding": rounding}
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", f"file://{tmp_path}/store", rank=0, world_size=1, device_id=torch.device("cuda:0"))
    try:
        mesh = init_device_mesh("cuda", (1,))

        def sharded(weights=None):
            net = model().cuda()
            for p, value in zip(net.parameters(), weights or [], strict=False):
                p.data.copy_(value)
            fully_shard(net, mesh=mesh)
            return net

        nets = [sharded(), sharded()]
        resident, paged = make(nets[0], **kind), make(nets[1], paged=True, **kind)
        train(nets[0], resident, 3)
        train(nets[1], paged, 3)
        three = [w.clone() for w in whole(nets[0])]  # of one rank the whole is the shard itself
        assert all(torch.equal(a, b) for a, b in zip(three, whole(nets[1]), strict=True))
        for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            for name, value in paged.state[q].items():
                mine = local(value)
                assert mine.device.type == "cpu"
                assert name == "step" or mine.is_pinned()
                assert torch.equal(mine, local(resident.state[p][name]).cpu()), name
        full = copy.deepcopy(get_optimizer_state_dict(nets[1], paged, options=FULL))
        dcp.save(written(nets[1], paged), checkpoint_id=tmp_path / "three")
        train(nets[0], resident, 2, start=3)
        for how in ("full", "sharded"):
            net = sharded(three)
            again = make(net, paged=True, **kind)
            if how == "full":
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                set_optimizer_state_dict(net, again, copy.deepcopy(full), options=options)
            else:
                read(net, again, tmp_path / "three")
            train(net, again, 2, start=3)
            assert all(local(v).device.type == "cpu" for s in again.state.values() for v in s.values())
            assert all(torch.equal(a, b) for a, b in zip(whole(net), whole(nets[0]), strict=True)), how
    finally:
        dist.destroy_process_group()
