"""Least work and least time, counted by hand."""

from __future__ import annotations

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_ppo import LoRAConfig, PPOLightningModule
from lit_ppo.roles.adapters import add_adapters
from lit_ppo.roles.model import RoleModel, RoleView
from lit_ppo.rollout.graph import GraphEngine
from lit_ppo.rollout.hf import HFEngine
from lit_ppo.rollout.select import AutoEngine
from lit_ppo.speed import PEAKS, Peak, Work, decode_floor, device_peak, peak_of, rollout_floor, update_flop

H, F, L, V, KV = 32, 48, 2, tiny.VOCAB, 2 * 8
LAYER = 2 * H * H + 2 * H * KV + 3 * H * F


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Tesla T4", None),
        ("NVIDIA H2000", None),
    ],
)
def test_devices_are_known_by_name(name, key):
    assert peak_of(name) == (None if key is None else PEAKS[key])
    assert device_peak(torch.device("cpu")) is None


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2"])
def test_matrices_are_the_layers_and_the_head_but_not_the_embedding(kind):
    model = tiny.model(kind)
    work = Work.of(model, model.config)
    assert work.matrices == L * LAYER + V * H
    assert work.matrix_bytes == 4 * work.matrices
    assert work.kv_bytes == 2 * L * KV * 4
    assert Work.of(model, model.config, without=model.lm_head).matrices == L * LAYER
    assert Work.of(add_adapters(model, LoRAConfig(r=2), ["policy"], 0), model.config) == work
    assert Work.of(model.to(torch.bfloat16), model.config).matrix_bytes == 2 * work.matrices


def test_a_packed_layer_counts_its_numbers_and_its_bytes():
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(H, F, bias=False)
    layer.weight = bnb.nn.Params4bit(torch.randn(F, H), requires_grad=False, quant_type="nf4")
    model = torch.nn.Sequential(layer.to("cpu"))
    work = Work.of(model, tiny.CONFIGS["llama"])
    assert (work.matrices, work.matrix_bytes) == (H * F, H * F // 2)


def test_floors_by_hand():
    work, peak = Work(matrices=100, matrix_bytes=200, kv_bytes=3), Peak(flops=1000.0, bandwidth=50.0)
    assert decode_floor(work, tokens=1, steps=1, contexts=10, peak=peak) == 200 / 50 + 10 * 3 / 50
    assert decode_floor(work, tokens=50, steps=1, contexts=0, peak=peak) == 2 * 100 * 50 / 1000  # multiplies longer
    # 2 responses of 3 and 1 tokens after prompts of 5 and 2: 3 steps; contexts 5+1, 5+2, 5+3 and 2+1
    expected = decode_floor(work, tokens=4, steps=3, contexts=24, peak=peak)
    assert rollout_floor(work, [5, 2], [3, 1], 8, peak) == expected
    assert rollout_floor(work, [5, 2], [3, 1], 1, peak) == decode_floor(work, tokens=4, steps=4, contexts=24, peak=peak)
    assert rollout_floor(work, [], [], 8, peak) == 0.0
    assert update_flop([work, work], adapters=False) == 6 * 200
    assert update_flop([work], adapters=True) == 4 * 100


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=20), st.integers(1, 30))
def test_more_rows_are_never_slower(pairs, rows):
    work, peak = Work(10, 20, 2), Peak(1e3, 1e2)
    prompts, responses = [p for p, _ in pairs], [r for _, r in pairs]
    assert rollout_floor(work, prompts, responses, rows + 1, peak) <= rollout_floor(
        work, prompts, responses, rows, peak
    )


def test_an_update_counts_real_tokens_and_a_known_device_its_share(tmp_path, monkeypatch):
    peak = Peak(flops=1e12, bandwidth=1e9)
    monkeypatch.setattr("lit_ppo.summary.device_peak", lambda device: peak)
    module = PPOLightningModule(tiny.folder(), tiny.count_w1, sampling={"max_new_tokens": 4}, ppo={"epochs": 2})
    trainer = tiny.fit(tmp_path, module, max_steps=2)
    seen = trainer.callback_metrics
    tokens = float(seen["update/tokens_per_s"] * seen["time/update"])
    responses = float(seen["rollout/length_mean"]) * 8
    assert tokens <= 2 * (8 * 5 + responses) + 1e-3
    assert tokens / 2 == pytest.approx(round(tokens / 2), abs=1e-2)  # two epochs
    assert tokens >= 2 * (8 + responses)
    matrices = 2 * L * LAYER + V * H + H  # the critic has one row for a head
    assert float(seen["update/mfu"]) == pytest.approx(
        float(seen["update/tokens_per_s"]) * 6 * matrices / 1e12, rel=1e-4
    )
    assert 0 < float(seen["rollout/share_of_floor"]) < 1


def test_an_engine_says_how_many_rows_it_decodes_together():
    policy = RoleView(RoleModel(tiny.model()), "logprobs")
    assert HFEngine(policy).rows_at_once(1000) == 1000
    auto = AutoEngine(policy, max_rows=64)
    assert auto.rows_at_once(1000) == 1000  # before it has chosen
    auto.engine = GraphEngine(policy, **auto.options)
    assert (auto.rows_at_once(1000), auto.rows_at_once(3)) == (64, 3)
