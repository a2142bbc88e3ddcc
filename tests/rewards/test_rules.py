"""The ready rules: lengths, numbers, formats, and their options in a file."""

from __future__ import annotations

import importlib.util
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_ppo.rewards import FunctionReward, RewardError, build_rewards
from lit_ppo.rewards import rules as rules_module
from lit_ppo.rewards.rules import LengthWithin, NumericAnswer, RegexFormat, plain_number


def test_a_length_is_within_bounds_or_falls_to_zero():
    ids = [[1] * n for n in (0, 2, 4, 5, 6, 9)]
    texts = ["a b " * n for n in (0, 1, 2, 3, 4, 5)]
    assert LengthWithin(2, 4)(texts, ids) == [0, 1, 1, 0, 0, 0]
    assert LengthWithin(2, 4, slack=4)(texts, ids) == [0.5, 1, 1, 0.75, 0.5, 0]
    assert LengthWithin(high=4, unit="words")(texts, ids) == [1, 1, 1, 0, 0, 0]
    assert LengthWithin(low=8, unit="characters")(texts, ids) == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"unit": "lines", "high": 1}, "`unit` must be 'tokens', 'words' or 'characters'"),
        ({"low": 3, "high": 2}, "needs 0 <= `low` <= `high`"),
        ({"high": 2, "slack": -1}, "0 <= `slack`"),
        ({}, "every response has such a length. Give `low` or `high`"),
    ],
)
def test_lengths_that_mean_nothing_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        LengthWithin(**options)


NUMBERS = [
    ("42", 42),
    ("The answer is 42.", 42),
    ("so 3 + 4 = 7, and 7 * 2 = 14", 14),
    ("1,234.5 apples", 1234.5),
    ("$1,000,000", 1_000_000),
    ("x = -3", -3),
    ("12-7", 7),
    ("(a)-7", 7),
    ("3/4", 0.75),
    ("-1 / 8", -0.125),
    ("2.5e-3", 0.0025),
    (r"\boxed{12}, not 13", 12),
    ("9 apples #### 8\nas 3 is less", 3),
    ("12 #### 8", 8),
    ("none", None),
    ("1/0", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_the_plain_reader_takes_the_number_that_a_text_ends_on(text, number):
    assert plain_number(text) == (None if number is None else pytest.approx(number))


@given(st.floats(-1e12, 1e12), st.integers(0, 6))
def test_the_plain_reader_reads_what_python_writes(number, digits):
    assert plain_number(f"It is {number:,.{digits}f}.") == pytest.approx(round(number, digits), abs=10.0**-digits)
    assert plain_number(f"It is {number!r}") == number


@pytest.mark.parametrize("reader", ["plain", "math-verify"])
def test_a_numeric_answer_is_right_or_wrong(reader, roll, policy_tokenizer):
    if reader == "math-verify":
        pytest.importorskip("math_verify")
    rule = NumericAnswer(reader=reader)
    texts = ["It is 4.", "4.0", "5", "no idea", "2 + 2 = 4", r"\boxed{4}", "8/2"]
    assert rule(texts, answer=[4] * 7) == [1, 1, 0, 0, 1, 1, 1]
    assert rule(["72", "48"], answer=["48/2 = 24, so 48 + 24 = 72\n#### 72"] * 2) == [1, 0]
    with pytest.raises(RewardError, match=r"no number is in 'unknown', the answer of sample 1"):
        rule(["4", "4"], answer=["4", "unknown"])
    with pytest.raises(RewardError, match=r"`NumericAnswer\(column='sum'\)`: there are only answer"):
        NumericAnswer("sum", reader)(["4"], answer=[4])
    # with a limit of time it runs in a thread, where math-verify's own alarm does not work
    reward = FunctionReward(rule, timeout=60)
    scores = build_rewards(reward).score(roll(["4", "2"], columns=[{"answer": 4}] * 2), policy_tokenizer)
    assert scores.parts["NumericAnswer"].tolist() == [1, 0]
    assert threading.current_thread() is threading.main_thread()


def test_math_verify_reads_what_the_plain_reader_does_not():
    pytest.importorskip("math_verify")
    rule = NumericAnswer()
    assert rule([r"$\frac{1}{2}$", r"\boxed{\sqrt{4}}", "0.5"], answer=["0.5", "2", "1/2"]) == [1, 1, 1]
    assert NumericAnswer(reader="plain")([r"\boxed{\sqrt{4}}"], answer=["2"]) == [0]


def test_without_math_verify_the_plain_reader_is_used_and_says_so(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(rules_module, "find_spec", lambda name: None if name == "math_verify" else real(name))
    with pytest.warns(UserWarning, match=r"reads plain numbers only .* as math-verify is not installed"):
        rule = NumericAnswer()
    assert rule(["so 4"], answer=[4]) == [1]
    with pytest.raises(ModuleNotFoundError, match="Run `pip install math-verify`"):
        NumericAnswer(reader="math-verify")
    NumericAnswer(reader="plain")  # chosen: nothing to say
    with pytest.raises(ValueError, match=r"`NumericAnswer\(reader='sympy'\)` must be"):
        NumericAnswer(reader="sympy")


def test_rules_get_their_options_from_a_file(roll, policy_tokenizer):
    rollout = roll(["4", "2 4"], columns=[{"answer": 4, "goal": 4}, {"answer": 4, "goal": 2}])
    rewards = build_rewards(
        [
            {"source": "lit_ppo.rewards.rules.RegexFormat", "options": {"pattern": r"\A\s*\d\Z"}, "weight": 0.5},
            {"source": "lit_ppo.rewards.rules.LengthWithin", "options": {"high": 1, "unit": "words"}},
            {"source": "lit_ppo.rewards.rules.NumericAnswer", "options": {"column": "goal", "reader": "plain"}},
            {"source": "lit_ppo.rewards.rules.exact_match", "options": {"answer": ["4", "2 4"]}, "name": "bound"},
        ]
    )
    rewards.check()
    scores = rewards.score(rollout, policy_tokenizer)
    assert {name: part.tolist() for name, part in scores.parts.items() if name != "bound"} == {
        "RegexFormat": [1, 0],
        "LengthWithin": [1, 0],
        "NumericAnswer": [1, 0],
    }


@pytest.mark.parametrize(
    ("reward", "match"),
    [
        ({"source": "lit_ppo.rewards.rules.RegexFormat"}, r"is a class that needs `pattern`. Give `options: {pattern:"),
        (
            {"source": "lit_ppo.rewards.rules.RegexFormat", "options": {"patern": "a"}},
            r"has no option `patern`. Did you mean `pattern`",
        ),
        (
            {"source": "lit_ppo.rewards.rules.length_penalty", "options": {"x": "a"}},
            r"has no option `x`. It takes `response_ids`",
        ),
        (
            {"source": "lit_ppo.rewards.rules.RegexFormat", "options": {"pattern": "("}},
            r"refuses its options: .*RegexF",
        ),
        ({"source": "lit_ppo.rewards.rules.LengthWithin"}, r"refuses its options: .*Give `low` or `high`"),
    ],
)
def test_options_that_a_rule_cannot_take_are_refused(reward, match):
    with pytest.raises(RewardError, match=match):
        build_rewards(reward)


def test_options_have_no_effect_on_a_model():
    with pytest.raises(ValueError, match=re.escape("`reward.options={'a': 1}` has no effect on a reward model")):
        build_rewards({"source": "owner/name", "options": {"a": 1}})


def test_a_pattern_may_set_its_own_flags():
    assert RegexFormat("(?s)^<a>.*</a>$")(["<a>x\ny</a>", "<a>"]) == [1, 0]
