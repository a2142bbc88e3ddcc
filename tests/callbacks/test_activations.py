"""OffloadActivations: the same gradients with the activations elsewhere in between."""

from __future__ import annotations

import pytest
import tiny
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from lit_ppo import LoRAConfig, OptimConfig, PPOConfig, PPOLightningModule
from lit_ppo.callbacks import GradientCheckpointing, OffloadActivations
from lit_ppo.callbacks.activations import Away, Mover, unpack


def module(**options):
    return PPOLightningModule(
        tiny.folder(),
        tiny.count_w1,
        sampling={"max_new_tokens": 6},
        ppo=PPOConfig(micro_batch_size=3, epochs=1),
        optim=OptimConfig(actor_lr=1e-3),
        **options,
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)])
def test_a_fit_is_the_same_to_the_bit(tmp_path, lora, checkpointing):
    layout = "separate" if lora is None else "shared"
    extra = [GradientCheckpointing()] if checkpointing else []
    plain, ours = module(lora=lora, layout=layout), module(lora=lora, layout=layout)
    tiny.fit(tmp_path / "plain", plain)
    offload = OffloadActivations(min_mib=0)
    tiny.fit(tmp_path / "ours", ours, callbacks=[*extra, offload])
    for (name, p), (_, q) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    assert offload.bytes_moved > 0
    assert len(ours.phase_listeners) == 0 or offload not in ours.phase_listeners
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


class Plain(LightningModule):
    """Automatic optimization, no phases."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        x = batch
        for block in self.net:
            x = checkpoint(block, x, use_reentrant=False) if batch_idx % 2 else block(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.. is deprecated")
def test_any_module(tmp_path):
    data = torch.utils.data.DataLoader(list(torch.randn(4, 8, 32)), batch_size=None)
    results = []
    for callbacks in ([], [OffloadActivations(min_mib=0)]):
        plain = Plain()
        tiny.trainer(tmp_path, callbacks=callbacks).fit(plain, data)
        results.append(torch.cat([p.detach().flatten() for p in plain.parameters()]))
    assert torch.equal(*results)
    assert (
        callbacks[0].bytes_moved == (4 * 2 + 1) * 8 * 32 * 4
    )  # inputs of linear layers, GELUs and the loss: each once


def test_what_moves_and_what_stays():
    mover = Mover(256)
    weight = nn.Parameter(torch.randn(32, 32))
    mover.stay = {weight.untyped_storage()._cdata}
    x = torch.randn(32, 32, requires_grad=True)
    y = x * 2
    assert mover.pack(weight) is weight
    assert mover.pack(weight.t()).untyped_storage()._cdata in mover.stay
    assert mover.pack(x) is x  # a leaf, which the user holds anyway
    small = torch.randn(3)
    assert mover.pack(small) is small
    wide = torch.randn(1, 32).expand(64, 32)
    assert mover.pack(wide) is wide
    away = mover.pack(y)
    assert isinstance(away, Away)
    assert mover.pack(y) is away  # saved twice, moved once
    assert isinstance(mover.pack(y.t()), Away)
    assert torch.equal(unpack(away), y)
    assert unpack(away).stride() == y.stride()
    before = mover.moved
    y.mul_(3)
    later = mover.pack(y)
    assert later is not away  # it was written to
    assert mover.moved > before
    assert torch.equal(unpack(later), unpack(away) * 3)


def test_bad_values():
    for bad in (-1, "all", True, float("nan")):
        with pytest.raises(ValueError, match=r"`OffloadActivations\(min_mib=.*must be a number of MiB >= 0"):
            OffloadActivations(min_mib=bad)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_and_memory_on_cuda(checkpointing):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda() for _ in range(12)]
    parameters = [p for block in blocks for p in block.parameters()]
    x = torch.randn(32768, 1024, device="cuda")  # beside which the gradients are small

    def run(mover):
        hooks = None
        if mover is not None:
            mover.stay = {p.untyped_storage()._cdata for p in parameters}
            hooks = torch.autograd.graph.saved_tensors_hooks(mover.pack, unpack)
            hooks.__enter__()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()  # earlier runs' gradients among it
        y = x
        for block in blocks:
            y = y + (checkpoint(block, y, use_reentrant=False) if checkpointing else block(y))
        loss = y.square().mean()
        del y
        loss.backward()
        if hooks is not None:
            hooks.__exit__()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - start
        grads = [p.grad.clone() for p in parameters]
        for p in parameters:
            p.grad = None
        return grads, peak

    expected, peak = run(None)
    mover = Mover(2**20)
    for _ in range(3):
        grads, lower = run(mover)
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    assert lower < peak
    assert mover.moved > 3 * 11 * x.nbytes
