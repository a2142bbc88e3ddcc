"""The benchmark beside TRL, on a tiny model: our side end to end, the other's reward adapter, the report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tiny
import torch

sys.path[:0] = [str(Path(__file__).parent.parent / name) for name in ("benchmarks", "examples")]

import _learning_trl  # noqa: E402
import learning  # noqa: E402

FAST = {"device": "cpu", "batch-size": 4, "budget": 8, "new-tokens": 4, "held-out": 4, "epochs": 2, "lr": 1e-3}


def run(folder: Path, *more: str) -> list[dict]:
    learning.main(
        [f"--{name}={value}" for name, value in FAST.items()]
        + ["--model", tiny.folder(), "--output", str(folder), *more]
    )
    return learning.read(folder / "learning.jsonl")


def test_a_run_is_measured_once_and_reported(tmp_path, capsys):
    (row,) = run(tmp_path, "--side", "lit")
    assert row["complete"]
    assert [point["episode"] for point in row["curve"]] == [4, 8]
    assert row["before"]["kl"] == 0
    assert row["after"]["kl"] >= 0  # the tiny model knows no word that VADER knows
    assert len(run(tmp_path, "--side", "lit")) == 1
    assert "This run is in" in capsys.readouterr().out
    assert len(run(tmp_path, "--side", "lit", "--seed", "1", "--matmul", "highest")) == 2
    other = {**row, "side": "trl", "seconds": row["seconds"] * 4, "engine": "transformers"}
    with (tmp_path / "learning.jsonl").open("a") as file:
        file.write(json.dumps(other) + "\n")
    learning.main(["--report", "--output", str(tmp_path)])
    assert "lit-ppo takes 0.25 of TRL's time" in (tmp_path / "learning.md").read_text()
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")


def test_a_time_limit_leaves_a_row_that_does_not_count(tmp_path):
    (row,) = run(tmp_path, "--side", "lit", "--time-limit", "0")
    assert not row["complete"]
    assert len(row["curve"]) == 1
    with pytest.raises(SystemExit, match="no complete run"):
        learning.main(["--report", "--output", str(tmp_path)])
    assert [r["complete"] for r in run(tmp_path, "--side", "lit")] == [False, True]


def test_evaluation_gives_the_kl_of_two_policies():
    """Against a sum over the whole vocabulary, position by position."""
    policy, start = (tiny.model(seed=seed).requires_grad_(False) for seed in (0, 1))
    tokenizer = tiny.tokenizer()
    settings = learning.Run("lit", 0, 8, 1, "cpu", "highest", False, learning.Options(new_tokens=5, temperature=0.7))
    found = learning.evaluate(policy, start, tiny.prompts(4), tokenizer, settings)
    torch.manual_seed(0)
    batch = tiny.prompts(4)
    ids = policy.generate(batch.ids, attention_mask=batch.mask.long(), generation_config=policy.generation_config)
    total, lengths = 0.0, 0
    for row, n in zip(ids, batch.lengths.tolist(), strict=True):
        width = batch.ids.shape[1]
        new = row[width:].tolist()
        new = new[: new.index(2) + 1] if 2 in new else new
        text = torch.cat([row[width - n : width], torch.tensor(new)])[None]
        p, q = (m(text).logits[0, n - 1 : -1].double().div(0.7).log_softmax(-1) for m in (policy, start))
        total += float((p.exp() * (p - q)).sum())
        lengths += len(new)
    assert found["kl"] == pytest.approx(total / 4, rel=1e-4)
    assert found["length"] == lengths / 4


def test_the_reward_model_that_trl_gets_says_what_the_function_says():
    tokenizer = tiny.tokenizer("<eos>")
    with pytest.raises(ValueError, match="no special token to spare"):
        _learning_trl.separate_pad(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["w50", "w1"]})  # the template writes w1
    _learning_trl.separate_pad(tokenizer)
    assert tokenizer.pad_token == "w50"
    pad, opening = tokenizer.pad_token_id, [tiny.WORDS.index("w1")]

    def words(texts: list[str]) -> list[float]:
        return [float(len(text.split())) for text in texts]

    judge = _learning_trl.TextReward(words, tokenizer, opening)
    ids = {word: i for i, word in enumerate(tiny.WORDS)}
    prompts = [[ids["w7"], ids["w8"], ids["w1"]], [ids["w9"], ids["w1"]]]
    judge.check(prompts)
    with pytest.raises(ValueError, match="must end with"):
        judge.check([[ids["w1"], ids["w9"], ids["w1"]]])
    responses = [[ids["w3"], ids["w4"], 2, pad], [ids["w1"], ids["w5"], ids["w1"], ids["w6"]]]
    whole = torch.tensor([[*prompts[0], *responses[0]], [pad, *prompts[1], *responses[1]]])
    # as TRL reads a reward model: pads become id 0 under a mask, and the score is the one at the last real token
    mask = whole != pad
    output = getattr(judge, judge.base_model_prefix)(
        input_ids=whole.masked_fill(~mask, 0), attention_mask=mask, position_ids=None, use_cache=False
    )
    scores = judge.score(output.hidden_states[-1])
    assert scores.shape == (2, 7, 1)
    assert scores[[0, 1], [5, 6], 0].tolist() == [
        2.0,
        2.0,
    ]  # the EOS is no word; the first opening ends the prompt
    assert judge.lengths == [3.5]
