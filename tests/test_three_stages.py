"""examples/three_stages.py: the whole road at toy size, and as it stands in a slow test."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("pandas")
pytest.importorskip("vaderSentiment")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import _demo_models  # noqa: E402
import _demo_texts  # noqa: E402
import stages  # noqa: E402
import three_stages  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")


def run(folder: Path, *options: str) -> dict:
    assert three_stages.main(["--out", str(folder), *options]) == 0
    assert (folder / "curves.png").stat().st_size > 10_000
    for model in ("policy-sft", "reward-model", "policy-ppo"):
        assert (folder / model / "model.safetensors").is_file()
    return json.loads((folder / "result.json").read_text())


def test_the_road_runs_at_toy_size(tmp_path, capsys):
    result = run(tmp_path, "--fast")
    assert list(result["ppo"]) == list(three_stages.SETTINGS["reviews"].runs)
    assert result["sft"]["after"] < result["sft"]["before"]
    shown = capsys.readouterr().out
    for line in ("1. SFT: held-out loss", "2. Reward model:", "3. PPO, KL held:", "gold: VADER, mean"):
        assert line in shown


def test_the_road_of_a_chat_model_runs_at_toy_size(tmp_path):
    texts = _demo_texts.load_reviews(0).train[:400]
    tokenizer = _demo_models.word_tokenizer(texts, 1000)
    tokenizer.chat_template = stages.TEMPLATE
    model = _demo_models.new_llama(tokenizer, _demo_models.Pretraining(vocabulary=1000, hidden=32), 0)
    base = _demo_models.keep(tmp_path / "base", model, tokenizer)
    run(tmp_path / "out", "--fast", "--model", "smollm", "--model-path", str(base))


def test_no_stage_sees_the_reviews_that_it_is_measured_on():
    options = three_stages.parse(["--fast"])
    road = three_stages.Road(three_stages.SETTINGS["reviews"], options)
    train, held_out = (road.pairs(texts, 200) for texts in (road.reviews.train, road.reviews.held_out))
    assert not {p["chosen"] for p in train} & {p["chosen"] for p in held_out}
    for pair in train:
        lengths = [len(pair[side].split()) for side in ("chosen", "rejected")]
        assert max(lengths) <= 32


def test_chats_of_the_preset_are_rows_of_the_data_modules():
    options = three_stages.parse(["--model", "smollm"])
    road = three_stages.Road(three_stages.SETTINGS["smollm"], options)
    row = road.example(road.reviews.train[0])
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
    pair = road.pairs(road.reviews.train, 1)[0]
    assert pair["chosen"][1]["content"] != pair["rejected"][1]["content"]
    three_stages.SFTDataModule([row], batch_size=1)
    three_stages.PreferenceDataModule([pair], reference=[road.judged(road.reviews.train[0], 8)], batch_size=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_gold_rises_with_the_proxy(tmp_path):
    result = run(tmp_path)
    held = result["ppo"]["KL held"]
    assert result["reward"]["accuracy"] > 0.65
    assert held["after"]["proxy"] > held["before"]["proxy"] + 0.8
    assert held["after"]["vader"] > held["before"]["vader"] + 0.1
    assert held["kl"] < 9
    assert held["after"]["distinct"] > 230
