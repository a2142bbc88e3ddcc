"""The demo of `make demo`, shortened; the whole of it is marked slow."""

from __future__ import annotations

import csv
import json
import logging
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import _demo_models  # noqa: E402
import _demo_texts  # noqa: E402
import demo  # noqa: E402


@pytest.fixture(autouse=True)
def loud_again():
    """Undo what the demo does to keep its output short."""
    from transformers.utils.logging import enable_progress_bar

    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    yield
    logger.setLevel(level)
    enable_progress_bar()


@pytest.fixture(scope="module")
def reviews():
    return _demo_texts.load_reviews(seed=0)


def test_it_runs_writes_everything_and_repeats_itself(tmp_path, capsys):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = ["--fast", "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    assert demo.main(arguments) == 0
    first = capsys.readouterr().out
    assert "trained in" in first
    assert "held-out prompts" in first
    out = tmp_path / "out"
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "samples.md").read_text().splitlines()) == 2 + 16
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(bool(row["objective/kl"]) for row in rows) == 2
    assert sum(bool(row["val/reward_textblob"]) for row in rows) == 1
    assert all(row["objective/scores"] == row["reward/vader"] for row in rows)  # the second judge has no weight

    (base,) = (tmp_path / "cache").iterdir()
    before, after = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (base, out / "export"))
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    tokenizer = AutoTokenizer.from_pretrained(out / "export")
    assert tokenizer("the film")["input_ids"][0] == tokenizer.bos_token_id

    result = json.loads((out / "result.json").read_text())
    assert demo.main(arguments) == 0
    assert "trained before" in capsys.readouterr().out
    again = json.loads((out / "result.json").read_text())
    assert [again[key] for key in ("before", "after", "kl")] == [result[key] for key in ("before", "after", "kl")]


def test_an_interrupted_training_of_the_language_model_is_not_taken_for_a_finished_one(tmp_path, reviews, capsys):
    options = _demo_models.Pretraining(steps=40, batch=2, vocabulary=100, hidden=32, layers=1)
    folder = _demo_models.review_model(reviews.train[:200], options, 0, tmp_path)
    kept = folder.rename(folder.with_name(folder.name + ".unfinished"))
    assert _demo_models.review_model(reviews.train[:200], options, 0, tmp_path) == folder
    assert "trained before" not in capsys.readouterr().out
    assert not kept.exists()
    assert _demo_models.review_model(reviews.train[:200], options, 1, tmp_path) != folder


def test_held_out_prompts_are_of_other_reviews_and_are_not_trained_on(reviews):
    assert not set(reviews.train) & set(reviews.held_out)
    assert _demo_texts.load_reviews(seed=1).held_out != reviews.held_out
    settings = demo.SETTINGS["reviews"]
    tokenizer = _demo_models.word_tokenizer(reviews.train, settings.pretraining.vocabulary)
    train, held_out = demo.make_prompts(reviews.train, reviews.held_out, settings, tokenizer)
    assert len(held_out) == settings.held_out
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    for row in train[:50] + held_out:
        ids = tokenizer(row["prompt"])["input_ids"]
        assert len(ids) == 1 + settings.prompt_words
        assert tokenizer.unk_token_id not in ids


def test_a_chat_model_is_asked_for_reviews(reviews):
    settings = demo.SETTINGS["smollm"]
    train, held_out = demo.make_prompts(reviews.train, reviews.held_out, settings, tokenizer=None)
    for row in (train[0], held_out[0]):
        (message,) = row["prompt"]
        assert message["role"] == "user"
        assert message["content"].endswith(row["start"])
        assert len(row["start"].split()) == settings.prompt_words


@pytest.mark.parametrize("judge", [_demo_texts.vader, _demo_texts.textblob])
def test_judges_like_praise_and_judge_only_the_answer_of_a_chat(judge):
    praise, blame = " wonderful and beautiful .", " awful and boring ."
    good, bad = judge(["a film"] * 2, [praise, blame], [None, None])
    assert bad < 0 < good
    prompt, answer = judge(["awful"], [praise], [None]), judge(["awful"], [praise], [[]])
    assert prompt[0] < answer[0]


def test_the_demo_fails_when_the_reward_has_not_risen(capsys):
    def result(after):
        return {"before": {"reward": 0.2, "reward_se": 0.03}, "after": {"reward": after, "reward_se": 0.02}}

    assert demo.risen(result(0.5))
    assert not demo.risen(result(0.25))
    assert "has not risen: +0.050, with a standard error of 0.036" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-path", "x"], "Add --model smollm"),
        (["--iterations", "0"], "--iterations 0 must be at least 1"),
        (["--model", "gpt"], "invalid choice: 'gpt'"),
    ],
)
def test_options_that_cannot_work_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        demo.main(arguments)
    assert message in capsys.readouterr().err


def test_a_package_that_is_missing_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"`some-thing` is not installed. Run `pip install some-thing`"):
        _demo_texts.package_folder("no_such_module", "some-thing")


@pytest.mark.slow
def test_the_reward_rises_and_so_does_the_second_judge(tmp_path):
    assert demo.main(["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    before, after = result["before"], result["after"]
    assert after["reward"] > 0.5 > 2 * before["reward"]
    assert after["second"] > before["second"] + 0.1
    assert after["distinct"] > 240
    assert 2 < result["kl"] < 10
    assert result["peak_gib"] < 4
