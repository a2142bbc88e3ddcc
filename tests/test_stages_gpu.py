"""SFT and the reward model on CUDA: packed in half precision as padded, 4-bit trunks, and what they leave behind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import stages
import tiny
import torch

from lit_ppo import LoRAConfig, RankingConfig, RoleConfig, SFTConfig
from lit_ppo.callbacks import GradientCheckpointing, OOMGuard
from lit_ppo.export import export
from lit_ppo.rewards.model import ModelReward

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def losses(tmp_path: Any, kind: str, *, packing: bool, precision: str) -> float:
    """The loss after two epochs."""
    option, config = ("sft", SFTConfig) if kind == "sft" else ("ranking", RankingConfig)
    module = getattr(stages, kind)(tiny.folder(), **{option: config(packing=packing, micro_batch_size=4)})
    trainer = stages.fit(tmp_path, module, accelerator="gpu", precision=precision, max_epochs=2)
    assert trainer.strategy.root_device.type == "cuda"
    return float(trainer.callback_metrics["val/loss"])


@pytest.mark.parametrize("kind", ["sft", "reward"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_packed_is_padded_on_cuda(tmp_path, kind, precision):
    packed, padded = (losses(tmp_path, kind, packing=packing, precision=precision) for packing in (True, False))
    assert packed == pytest.approx(padded, rel=1e-3 if precision == "32-true" else 0.1)


@pytest.mark.filterwarnings(
    "ignore:inner dimension .* is not aligned:UserWarning"
)  # a model this small has few columns
@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_a_trunk_in_4_bits_trains_by_its_adapter_on_cuda(tmp_path, kind):
    pytest.importorskip("bitsandbytes")
    source = RoleConfig(source=tiny.folder(), quantize="nf4")
    module = getattr(stages, kind)(source, lora=LoRAConfig(r=4))
    callbacks = [GradientCheckpointing(), OOMGuard()]
    trainer = stages.fit(tmp_path, module, accelerator="gpu", precision="bf16-true", callbacks=callbacks, max_epochs=2)
    assert math.isfinite(float(trainer.callback_metrics["val/loss"]))


def test_a_reward_model_from_cuda_scores_as_it_was_trained(tmp_path):
    module = stages.reward(ranking=RankingConfig(normalize="mean_std"))
    stages.fit(tmp_path, module, accelerator="gpu", max_epochs=2)
    reward = ModelReward(str(export(module, tmp_path / "reward")))
    reward.load("cuda")
    from test_stages import samples

    scores = reward.score(samples([(row["prompt"], row["chosen"]) for row in stages.pairs()]))
    assert float(scores.mean()) == pytest.approx(0, abs=0.1)
