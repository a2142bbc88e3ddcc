"""`sampling.entropy` in a run: what is logged, and where it comes from. The sampler's own tests are beside it."""

from __future__ import annotations

import pytest
import tiny
import torch

from lit_ppo import PPOLightningModule, PromptDataModule
from lit_ppo.experience import Rollout
from lit_ppo.metrics import Means
from lit_ppo.rewards import Scores
from lit_ppo.summary import record_evaluation


def fit(tmp_path, engine="hf", **options):
    module = PPOLightningModule(
        tiny.folder(),
        tiny.count_w1,
        sampling={"max_new_tokens": 6, "temperature": 0.8, "entropy": True},
        ppo={"epochs": 1, "rollout_engine": engine, "rollout_batch_size": 3},
        **options,
    )
    data = PromptDataModule(tiny.rows(), val=tiny.rows(4), batch_size=8)
    return module, data, tiny.fit(tmp_path, module, data)


@pytest.mark.parametrize("engine", ["hf", "graph"])
def test_it_is_that_of_the_training_forward(tmp_path, engine):
    module, _, trainer = fit(tmp_path, engine)
    logged = trainer.logged_metrics
    per_response = float(logged["rollout/entropy"] * logged["rollout/length_mean"])
    assert per_response == pytest.approx(float(logged["objective/entropy"]), rel=1e-4)
    assert 0 < float(logged["rollout/entropy"]) < 4.2  # the logarithm of 64 words
    assert "val/entropy" not in trainer.callback_metrics  # near-greedy: nobody asked for its entropy
    assert not module.eval_sampling.entropy


def test_an_evaluation_that_asks_for_it_gets_it(tmp_path):
    module, data, trainer = fit(tmp_path, eval_sampling={"max_new_tokens": 4, "entropy": True})
    shown = trainer.validate(module, data, verbose=False)[0]["val/entropy"]
    rows = [row for batch in trainer.predict(module, data) for row in batch]
    assert 0 < shown < 4.2
    assert all(0 <= row["entropy"] < 4.2 for row in rows)


def test_a_rank_without_prompts_has_entropies_of_nothing():
    none = tiny.prompts(1).select(torch.tensor([], dtype=torch.long))
    assert Rollout.empty(none).entropy is None
    empty = Rollout.empty(none, entropy=True)
    assert empty.entropy.shape == (0, 1)
    means = Means()
    scores = Scores(torch.zeros(0), parts={}, keep=torch.zeros(0, dtype=torch.bool), truncated={})
    record_evaluation(means, empty, scores)
    assert "entropy" in means._sums  # the ranks add up the same names
