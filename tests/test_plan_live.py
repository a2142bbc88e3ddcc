"""The forecast at the start of a fit is the plan's, costs the run nothing, and cannot fail it."""

from __future__ import annotations

import re

import pytest
import stages
import tiny
import torch
from lightning.pytorch import Callback

from lit_ppo import LoRAConfig, OptimConfig, PPOConfig, PPOLightningModule
from lit_ppo.callbacks import GradientCheckpointing
from lit_ppo.plan import live
from lit_ppo.plan.cards import GIB
from lit_ppo.plan.setup import read_setup
from lit_ppo.plan.stages import read_stage

CARD = 80 * GIB
LINE = r"Forecast of peak memory, GiB: (.*); there are 80\.00 on this device\."


class Ask(Callback):
    """Asks for the forecast as a run on a GPU does."""

    def on_train_start(self, trainer, pl_module):
        before = torch.get_rng_state()
        self.setup = live.setup_of(pl_module, CARD)
        self.line = live.said(pl_module, CARD)
        assert torch.equal(torch.get_rng_state(), before)
        self.phases = {n: p.total / GIB for n, p in live.Forecast(self.setup).phases.items()}


def ppo(**options):
    return PPOLightningModule(
        tiny.folder(),
        [tiny.count_w1, tiny.folder("llama", labels=1)],
        sampling={"max_new_tokens": 6},
        ppo=PPOConfig(epochs=1, minibatches=2, micro_batch_size=3),
        optim=OptimConfig(actor_lr=1e-3),
        **options,
    )


@pytest.mark.parametrize("options", [{}, {"layout": "shared", "lora": LoRAConfig(r=4)}], ids=["separate", "shared"])
def test_it_is_what_the_plan_says_of_the_configuration(tmp_path, options):
    ask = Ask()
    tiny.fit(tmp_path, ppo(**options), callbacks=[GradientCheckpointing(every_n=2), ask])
    config = {
        "model": {
            "actor": tiny.folder(),
            "reward": [tiny.folder("llama", labels=1)],
            "sampling": {"max_new_tokens": 6},
            "ppo": {"epochs": 1, "minibatches": 2, "micro_batch_size": 3},
            **options,
        },
        "data": {"batch_size": 8, "max_prompt_length": 5},
        "trainer": {"callbacks": [{"class_path": "GradientCheckpointing", "init_args": {"every_n": 2}}]},
    }
    want = read_setup(config, card=CARD)
    for name in ("shared", "lora", "prompt", "episodes", "micro", "length", "checkpointing", "family", "precision"):
        assert getattr(ask.setup, name) == getattr(want, name), name
    expected = {name: phase.total / GIB for name, phase in live.Forecast(want).phases.items()}
    assert ask.phases == expected
    said = re.fullmatch(LINE, ask.line)[1]
    assert said == ", ".join(f"{name} {peak:.2f}" for name, peak in expected.items())


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_the_stages_before_ppo_have_one(tmp_path, kind):
    ask, module = Ask(), getattr(stages, kind)()
    data = stages.data(module)
    stages.fit(tmp_path, module, data, callbacks=[ask])
    role = "actor" if kind == "sft" else "reward"
    config = {
        "model": {role: tiny.folder()}, "data": {"batch_size": 8, "max_length": data.longest}, "trainer": {},
    }  # fmt: skip
    want = live.Forecast(read_stage(config, kind, card=CARD)).phases
    assert ask.phases == {name: phase.total / GIB for name, phase in want.items()}
    assert re.fullmatch(LINE, ask.line)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_where_it_cannot_be_made_it_says_why(tmp_path):
    ask = Ask()
    ask.on_train_start = lambda trainer, module: setattr(ask, "line", live.said(module, CARD))
    loader = torch.utils.data.DataLoader(tiny.rows(), batch_size=8, collate_fn=list)
    module = ppo()
    tiny.trainer(tmp_path, callbacks=[ask]).fit(module, loader)
    assert ask.line.startswith("No forecast of memory: the data does not say how many rows a batch has")
    assert "forecast" not in module.cache


def test_a_device_that_is_too_small_is_pointed_out_and_the_end_compares(tmp_path, caplog):
    lines, module = [], ppo()

    class Small(Callback):
        def on_train_start(self, trainer, pl_module):
            lines.append(live.said(pl_module, 2**20))

        def on_train_end(self, trainer, pl_module):
            pl_module.peaks = {"update": 1.25, "score": 0.5}  # which are measured on CUDA alone

    tiny.fit(tmp_path, module, callbacks=[Small()])
    assert lines[0].endswith("there are 0.00 on this device: too little. `lit-ppo plan` says what would save memory.")
    (said,) = [m for m in caplog.messages if m.startswith("Measured peak memory")]
    assert re.fullmatch(
        r"Measured peak memory, GiB: update 1\.25, score 0\.50 \(forecast: update [\d.]+, score [\d.]+\)\.", said
    )


def test_a_run_on_the_cpu_says_nothing(tmp_path, caplog):
    tiny.fit(tmp_path, ppo())
    assert not [m for m in caplog.messages if "peak memory" in m or "forecast" in m.lower()]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ppo", "sft", "reward"])
def test_a_run_on_a_gpu_says_it_at_the_start_and_at_the_end(tmp_path, caplog, kind):
    import time

    module = ppo() if kind == "ppo" else getattr(stages, kind)()
    cost, announce = [], live.announce

    def timed(module):
        start = time.perf_counter()
        announce(module)
        cost.append(time.perf_counter() - start)

    options = {"accelerator": "gpu", "precision": "bf16-true"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "announce", timed)
        (tiny.fit if kind == "ppo" else stages.fit)(tmp_path, module, **options)
    start, end = [m for m in caplog.messages if "peak memory, GiB" in m]
    assert start.startswith("Forecast of peak memory, GiB: load 0.00, ")
    assert end.startswith("Measured peak memory, GiB: ")
    measured, forecast = (dict(re.findall(r"(\w+) ([\d.]+)", part)) for part in end.split("(forecast: "))
    assert measured.keys() == forecast.keys() == ({"rollout", "score", "update"} if kind == "ppo" else {"update"})
    assert cost[0] < 10, "the first of a process compiles nothing, but imports"
    caplog.clear()
    again = ppo() if kind == "ppo" else getattr(stages, kind)()
    (tiny.fit if kind == "ppo" else stages.fit)(tmp_path, again, fast_dev_run=True, **options)
    assert not [m for m in caplog.messages if "peak memory" in m]
