import functools
import re
import threading
import time

import numpy as np
import pytest
import torch

from lit_ppo.rewards import FunctionReward, RewardError, build_rewards
from lit_ppo.rewards.rules import ExactMatch, RegexFormat, exact_match, length_penalty


def words(responses):
    return [len(r.split()) for r in responses]


def test_a_function_gets_texts_by_length_and_returns_one_number_each(roll, policy_tokenizer):
    seen = {}

    def judge(prompts, responses, messages, response_ids, stopped):
        seen.update(prompts=prompts, responses=responses, messages=messages, ids=response_ids, stopped=stopped)
        return words(responses)

    rollout = roll()
    scores = build_rewards(judge).score(rollout, policy_tokenizer)
    assert scores.total.tolist() == [5, 1, 4, 7, 0]
    assert scores.total.dtype == torch.float32
    assert scores.keep.all()
    assert scores.keep.dtype == torch.bool
    assert seen["prompts"] == ["the film was"] * 5
    assert seen["responses"][:2] == [" a great deal of fun", " awful"]  # prompt + response is the text
    assert seen["ids"] == [row[:n] for row, n in zip(rollout.ids.tolist(), rollout.lengths.tolist(), strict=True)]
    assert seen["ids"][1][-1] == policy_tokenizer.eos_token_id
    assert seen["stopped"] == [False, True, False, True, False]
    assert seen["messages"] == [None] * 5


def test_columns_arrive_as_lists_and_kwargs_gets_everything(roll, policy_tokenizer):
    rollout = roll(["4", "2"], columns=[{"answer": "4", "level": 1}, {"answer": "4"}])

    def declared(responses, answer, *, missing="default"):
        assert missing == "default"
        return [r.strip() == a for r, a in zip(responses, answer, strict=True)]

    def everything(**columns):
        assert sorted(columns) == ["answer", "level", "messages", "prompts", "response_ids", "responses", "stopped"]
        assert columns["level"] == [1, None]
        return [0.0, 1.0]

    scores = build_rewards([declared, everything]).score(rollout, policy_tokenizer)
    assert scores.parts["declared"].tolist() == [1, 0]
    assert scores.parts["everything"].tolist() == [0, 1]


def test_an_argument_that_is_not_a_column_is_named(roll, policy_tokenizer):
    def judge(responses, solution):
        return words(responses)

    rewards = build_rewards(judge)
    with pytest.raises(RewardError, match=r"`judge`: its argument `solution` is not a column.*`answer`, `level`"):
        rewards.score(roll(["4"], columns=[{"answer": "4", "level": 1}]), policy_tokenizer)


def test_a_column_that_hides_what_is_offered_is_refused(roll, policy_tokenizer):
    rollout = roll(["4"], columns=[{"stopped": "yes"}])
    with pytest.raises(RewardError, match="`stopped` is both"):
        build_rewards(lambda **kwargs: [0]).score(rollout, policy_tokenizer)
    assert build_rewards(words).score(rollout, policy_tokenizer).total.tolist() == [1]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: tuple(x),
        lambda x: np.array(x),
        lambda x: np.array(x, dtype=np.float64) + 0,
        lambda x: torch.tensor(x, dtype=torch.bfloat16, requires_grad=True),
        lambda x: [torch.tensor(v) for v in x],
        lambda x: [np.float32(v) for v in x],
    ],
)
def test_numbers_come_in_any_container(make, roll, policy_tokenizer):
    total = build_rewards(lambda responses: make([0.5, -2.0])).score(roll(["a", "the"]), policy_tokenizer).total
    assert total.tolist() == [0.5, -2.0]
    assert not total.requires_grad


def test_scores_are_float32_whatever_the_default_dtype(roll, policy_tokenizer):
    torch.set_default_dtype(torch.bfloat16)
    try:
        scores = build_rewards(lambda responses: [1.2345678]).score(roll(["a"]), policy_tokenizer)
    finally:
        torch.set_default_dtype(torch.float32)
    assert scores.total.dtype == torch.float32
    assert scores.total.item() == pytest.approx(1.2345678, abs=1e-6)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], r"returned 1 scores for 2 samples. The first without a score is sample 1 \(prompt ends 'the film was'"),
        ([1.0, 2.0, 3.0], "returned 3 scores for 2 samples"),
        ([1.0, "good"], r"returned 'good', which is not a number, for sample 1 .*response starts ' the'"),
        ([None, 1.0], "returned None, which is not a number, for sample 0"),
        ([1.0, "3"], "returned '3', which is not a number"),
        ([1.0, [2.0]], "not a number, for sample 1"),
        (np.array(["a", "b"]), "returned 'a', which is not a number"),
        (1.0, "returned a float, not a list"),
        ({"a": 1, "b": 2}, "returned a dict, not a list"),
        ("ab", "returned a str, not a list"),
        (torch.ones(2, 1), r"Tensor of shape \(2, 1\), not one number per sample: \(2,\)"),
        (torch.tensor(1.0), r"Tensor of shape \(\)"),
        ([1.0, float("nan")], "scored sample 1 .* nan. Scores must be finite"),
        ([float("-inf"), 0.0], "scored sample 0 .* -inf"),
        ([0.0, 1e39], "scored sample 1 .* inf"),  # not finite once it is float32
    ],
)
def test_what_is_not_one_finite_number_per_sample_is_an_error(value, message, roll, policy_tokenizer):
    rewards = build_rewards(FunctionReward(lambda responses: value, name="judge"))
    with pytest.raises(RewardError, match="Reward `judge`.*" + message):
        rewards.score(roll(["a", "the"]), policy_tokenizer)


def test_skip_leaves_samples_out_and_says_so_once(roll, policy_tokenizer):
    rewards = build_rewards(
        [
            FunctionReward(lambda responses: [1.0, float("nan"), 3.0], name="shaky", on_error="skip", weight=2.0),
            FunctionReward(words, weight=10.0),
        ]
    )
    rollout = roll(["a", "the", "was the"])
    with pytest.warns(UserWarning, match="`shaky`: it scored sample 1 .* nan; samples whose score is not finite"):
        scores = rewards.score(rollout, policy_tokenizer)
    assert scores.keep.tolist() == [True, False, True]
    assert scores.total.tolist() == [12.0, 0.0, 26.0]
    assert scores.parts["words"].tolist() == [1, 1, 2]
    assert scores.parts["shaky"].tolist() == [1, 0, 3]
    rewards.score(rollout, policy_tokenizer)  # a second warning would be an error here


def test_an_exception_names_the_function_and_the_first_bad_sample(roll, policy_tokenizer):
    def judge(responses):
        return [1 / (len(r.split()) - 2) for r in responses]

    with pytest.raises(RewardError, match=r"`judge`: it raised ZeroDivisionError.*sample 2 .*' was the'") as caught:
        build_rewards(judge).score(roll(["a", "the", "was the", "the was"]), policy_tokenizer)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_exception_that_no_sample_raises_alone_is_reported_all_the_same(roll, policy_tokenizer):
    def judge(responses):
        if len(responses) > 1:
            raise KeyError("batch")
        return [0.0]

    with pytest.raises(RewardError, match=r"it raised KeyError: 'batch' on a batch of 2 samples\.$"):
        build_rewards(judge).score(roll(["a", "the"]), policy_tokenizer)


def test_out_of_memory_reaches_the_trainer_as_it_is(roll, policy_tokenizer):
    def judge(responses):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        build_rewards(judge).score(roll(["a"]), policy_tokenizer)


def test_functions_run_without_gradients(roll, policy_tokenizer):
    modes = []

    def judge(responses):
        modes.append(torch.is_grad_enabled())
        return words(responses)

    rollout = roll(["a"])
    build_rewards(judge).score(rollout, policy_tokenizer)
    build_rewards(FunctionReward(judge, timeout=10)).score(rollout, policy_tokenizer)
    assert modes == [False, False]


def test_a_function_that_does_not_return_in_time_stops_the_run(roll, policy_tokenizer):
    release = threading.Event()
    rewards = build_rewards(FunctionReward(lambda responses: release.wait(30), name="stuck", timeout=0.2))
    start = time.monotonic()
    try:
        with pytest.raises(RewardError, match=r"`stuck`: it did not return within `reward.timeout=0.2` seconds"):
            rewards.score(roll(["a"]), policy_tokenizer)
    finally:
        release.set()
    assert time.monotonic() - start < 5


def test_a_function_with_a_time_limit_still_fails_with_its_own_error(roll, policy_tokenizer):
    def judge(responses):
        return [int(r) for r in responses]

    with pytest.raises(RewardError, match=r"`judge`: it raised ValueError.*sample 1"):
        build_rewards(FunctionReward(judge, timeout=10)).score(roll(["2", "fun"]), policy_tokenizer)
    assert build_rewards(FunctionReward(judge, timeout=10)).score(roll(["2"]), policy_tokenizer).total.item() == 2


async def coroutine(responses):
    return [0.0]


class AsyncJudge:
    async def __call__(self, responses):
        return [0.0]


@pytest.mark.parametrize("function", [coroutine, AsyncJudge(), functools.partial(coroutine)])
def test_async_functions_are_refused_with_the_reason(function):
    with pytest.raises(TypeError, match=r"is an async function.*no event loop.*asyncio\.run"):
        build_rewards(function)


def test_an_awaitable_result_is_an_error(roll, policy_tokenizer):
    with pytest.raises(RewardError, match="returned an awaitable"):
        build_rewards(lambda responses: coroutine(responses)).score(roll(["a"]), policy_tokenizer)


def test_positional_arguments_and_unreadable_signatures_are_refused():
    def judge(responses, /):
        return words(responses)

    with pytest.raises(TypeError, match="takes `responses` by position only"):
        build_rewards(judge)
    with pytest.raises(TypeError, match="no signature that can be read"):
        build_rewards(FunctionReward(iter))
    with pytest.raises(TypeError, match="cannot be called"):
        FunctionReward(3)  # type: ignore[arg-type]


def test_options_of_models_are_refused_for_functions():
    with pytest.raises(ValueError, match=r"`reward.batch_size=2` has no effect on a reward that is a function"):
        FunctionReward(words, batch_size=2)
    with pytest.raises(ValueError, match="Did you mean `weight`"):
        FunctionReward(words, wieght=2)


def test_a_rank_without_samples_calls_nothing(roll, policy_tokenizer):
    def judge(responses):
        raise AssertionError

    scores = build_rewards(judge).score(roll([]), policy_tokenizer)
    assert scores.total.shape == scores.keep.shape == scores.parts["judge"].shape == (0,)


def test_rules(roll, policy_tokenizer):
    rollout = roll(["4", "2", "4 4"], columns=[{"answer": 4, "goal": "2"}, {"answer": "4", "goal": "2"}, {"answer": 4}])
    whole = RegexFormat(r"\A\s*\d\s*\Z")
    scores = build_rewards(
        [
            FunctionReward(length_penalty, weight=0.5),
            exact_match,
            FunctionReward(ExactMatch("goal"), name="goal"),
            whole,
        ]
    ).score(rollout, policy_tokenizer)
    assert scores.parts["length_penalty"].tolist() == [-1, -2, -2]  # the second has its EOS
    assert scores.parts["exact_match"].tolist() == [1, 0, 0]
    assert scores.parts["goal"].tolist() == [0, 1, 0]
    assert scores.parts["RegexFormat"].tolist() == [1, 1, 0]
    assert torch.equal(
        scores.total,
        0.5 * scores.parts["length_penalty"] + sum(scores.parts[n] for n in ("exact_match", "goal", "RegexFormat")),
    )


def test_rules_refuse_what_they_cannot_use(roll, policy_tokenizer):
    with pytest.raises(ValueError, match=re.escape("`RegexFormat(pattern='(')` is not a regular expression")):
        RegexFormat("(")
    with pytest.raises(RewardError, match=r"ExactMatch\(column='solution'\)`: there are only answer,"):
        build_rewards(ExactMatch("solution")).score(roll(["4"], columns=[{"answer": "4"}]), policy_tokenizer)
