"""The ledger counts what is there, by role and kind."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import nn

from lit_ppo import LoRAConfig, PPOLightningModule, SamplingConfig
from lit_ppo.memory.ledger import Holding, Ledger, Use, available, device_of, device_use, holdings, process_use, take
from lit_ppo.memory.report import memory_report

CPU = torch.device("cpu")


class Owner(nn.Module):
    """4 MiB of trained weights, and what a module may offer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1024, 1024, bias=False)

    def memory_bytes(self) -> dict[str, int]:
        return {"KV cache": 1 << 20, "CUDA graphs": 1 << 21, "nothing": 0}


def test_what_a_module_holds_beside_its_weights_is_a_row_of_its_own():
    ledger = take(Owner())
    assert ledger.device == CPU
    assert [(row.name, row.total) for row in ledger.rows] == [("net", 1 << 22)]
    assert ledger.caches == {"KV cache": 1 << 20, "CUDA graphs": 1 << 21}
    assert "KV cache: 0.001 GiB" in memory_report(Owner(), phase="update")


def test_the_rest_and_fragmentation_by_hand():
    use = Use(allocated=100, reserved=190, others=7, free=3, device=200, peak=150)
    ledger = Ledger(CPU, [Holding("a", weights=30, adapters=1, gradients=20, optimizer=9)], {"KV cache": 15}, use)
    assert ledger.rest == 100 - 60 - 15
    assert ledger.fragmentation == 90
    ledger.caches["CUDA graphs"] = 50  # reserved, and not allocated
    assert (ledger.rest, ledger.fragmentation) == (25, 40)
    assert use.named()["reserved but unallocated (fragmentation)"] == 90
    ledger.caches["KV cache"] = 1000
    assert ledger.rest == 0


def test_adapters_are_counted_apart_from_the_trunk_and_are_trained(tmp_path):
    module = PPOLightningModule(
        tiny.folder(), tiny.count_w1, layout="shared", lora=LoRAConfig(r=2), sampling=SamplingConfig(max_new_tokens=4)
    )
    trainer = tiny.fit(tmp_path, module)
    rows = {row.name: row for row in holdings(module, CPU, trainer.optimizers)}
    assert set(rows) == {"actor"}  # the critic and the reference are views of it
    row = rows["actor"]
    adapters = sum(p.numel() * 4 for n, p in module.named_parameters() if "lora_" in n)
    total = sum(p.untyped_storage().nbytes() for p in {p.data_ptr(): p for p in module.parameters()}.values())
    assert row.adapters == adapters
    assert row.weights + row.adapters >= total  # and rotary frequencies
    head = module.actor.value_head
    assert row.weights + row.adapters - row.frozen == adapters + sum(p.numel() * 4 for p in head.parameters())
    trained = sum(p.numel() * 4 for named in module.trained.values() for _, p in named)
    assert row.optimizer == pytest.approx(2 * trained, rel=0.1)
    assert module.memory_bytes() == {}


def test_four_bit_weights_count_their_constants():
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(256, 128, bias=False, quant_type="nf4", compress_statistics=False)
    layer.weight = bnb.nn.Params4bit(torch.randn(128, 256), requires_grad=False, quant_type="nf4",
                                     compress_statistics=False)  # fmt: skip
    layer = layer.to("cpu")
    owner = nn.Module()
    owner.net = layer
    constants = layer.weight.quant_state.absmax.nbytes + layer.weight.quant_state.code.nbytes
    [row] = holdings(owner, CPU)
    assert row.weights == 128 * 256 // 2 + constants
    assert row.frozen == row.weights


def test_what_can_still_be_allocated_ends_at_the_limit_of_the_process():
    for limit, expected in ((0, 70), (50, 20), (200, 70)):  # 0: none
        assert available(Use(allocated=30, reserved=40, free=60, device=100, limit=limit)) == expected


def test_the_process_says_what_it_uses():
    now, peak = process_use()
    assert 0 < now <= peak
    use = device_use(CPU)
    assert use.allocated > 0
    assert use.reserved == use.device == 0
    assert set(use.named()) == {"allocated", "peak of this process"}
    assert take(None).rows == []
    assert device_of(None).type in ("cpu", "cuda")


@pytest.mark.gpu
def test_a_device_says_what_it_uses():
    x = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    use = device_use(x.device)
    assert use.allocated >= 1 << 28
    assert use.device >= use.reserved + use.others + use.free - (1 << 20)
    assert use.reserved >= use.allocated
    assert use.peak >= use.allocated


def test_the_graph_engine_says_what_its_slots_hold(tmp_path):
    module = PPOLightningModule(
        tiny.folder(), tiny.count_w1, sampling=SamplingConfig(max_new_tokens=4), ppo={"rollout_engine": "graph"}
    )
    tiny.fit(tmp_path, module)
    slots, width = module.engine._cache.slots + 1, module.engine._cache.width
    assert take(module).caches == {"KV cache": 2 * 2 * 2 * 8 * 4 * slots * width}  # 2 layers, 2 heads of 8, float32
    module.engine.release()
    assert take(module).caches == {}
