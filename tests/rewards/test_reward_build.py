import re
import sys
import types
from pathlib import Path

import pytest
import torch
from tiny_rewards import build_model, bytes_tokenizer

from lit_ppo.rewards import FunctionReward, ModelReward, RewardError, build_rewards
from lit_ppo.rewards.config import RewardConfig

SOURCE = """
import functools

def brevity(responses):
    return [-len(r) for r in responses]

def weighted(responses, power=1):
    return [float(len(r.split()) ** power) for r in responses]

squares = functools.partial(weighted, power=2)
number = 3
nothing = None

class Judge:
    def __call__(self, responses):
        return [1.0] * len(responses)

    @staticmethod
    def twos(responses):
        return [2.0] * len(responses)

class Needy:
    def __init__(self, threshold, *, scale=1.0):
        pass

judge = Judge()
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A user's folder with modules in it, from which a run is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != ""])
    before = set(sys.modules)
    (tmp_path / "my_rewards.py").write_text(SOURCE)
    package = tmp_path / "my_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "__init__.py").write_text("")
    (package / "inner" / "rules.py").write_text(SOURCE)
    (package / "needs.py").write_text("import a_module_that_is_not_installed\n")
    (package / "broken.py").write_text("def f(:\n")
    (package / "raises.py").write_text("raise RuntimeError('at import')\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("my_rewards", "my_package")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("source", "name", "scores"),
    [
        ("my_rewards.brevity", "brevity", [-13, -6]),
        ("my_rewards:brevity", "brevity", [-13, -6]),
        ("my_package.inner.rules.brevity", "brevity", [-13, -6]),
        ("my_package.inner.rules:brevity", "brevity", [-13, -6]),
        ("my_rewards.squares", "weighted", [9, 1]),
        ("my_rewards.Judge", "Judge", [1, 1]),
        ("my_rewards.judge", "Judge", [1, 1]),
        ("my_rewards.Judge.twos", "twos", [2, 2]),
        ("my_rewards:Judge.twos", "twos", [2, 2]),
        ("lit_ppo.rewards.rules.length_penalty", "length_penalty", [-3, -2]),
    ],
)
def test_an_import_path_names_a_callable_in_the_current_directory_or_an_installed_package(
    source, name, scores, project, roll, policy_tokenizer
):
    rewards = build_rewards(source)
    assert rewards.names == [name]
    rewards.check()
    rewards.load()
    assert rewards.score(roll(["a great deal", "awful"]), policy_tokenizer).total.tolist() == scores


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("my_rewards.brevty", "`my_rewards` has no attribute `brevty`. Did you mean `brevity`?"),
        ("my_rewards.Judge.threes", "`my_rewards.Judge` has no attribute `threes`."),
        ("my_rewards:Judge.threes", "`my_rewards.Judge` has no attribute `threes`."),
        ("my_rewards.sub.brevity", "`my_rewards` has no attribute `sub`"),
        ("my_reward.brevity", "there is no module `my_reward`."),
        ("my_reward.brevity", "Did you mean `my_rewards`"),
        ("my_reward:brevity", "there is no module `my_reward`."),
        ("my_package.iner.rules.brevity", "there is no module `my_package.iner`."),
        ("my_package.iner.rules.brevity", "Did you mean `inner`?"),
        ("my_package.inner.rule:brevity", "there is no module `my_package.inner.rule`."),
        ("my_package.needs.f", "importing `my_package.needs` failed with ModuleNotFoundError: No module named 'a_mod"),
        ("my_package.broken.f", "importing `my_package.broken` failed with SyntaxError"),
        ("my_package.raises:f", "importing `my_package.raises` failed with RuntimeError: at import. Fix that module"),
        ("my_rewards.Needy", "is a class that needs `threshold`. Give `options: {threshold: ...}`"),
    ],
)
def test_an_import_path_that_fails_says_which_part(source, message, project):
    with pytest.raises(RewardError, match=f"`reward.source='{source}'`.*{re.escape(message)}"):
        build_rewards(source)


def test_a_missing_module_says_where_it_was_looked_for(project):
    with pytest.raises(RewardError, match=re.escape(f"the current directory, {project}, were searched")):
        build_rewards("nowhere.to.be_found")


@pytest.mark.parametrize("name", ["number", "nothing"])
def test_what_is_imported_must_be_callable(name, project):
    with pytest.raises(TypeError, match=f"`reward.source='my_rewards.{name}'` is a .*, which cannot be called"):
        build_rewards(f"my_rewards.{name}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "is empty. A reward's `source` is a folder with a sequence-classification model"),
        ("./missing", r"does not exist \(.* holds: .*my_rewards.py.*\). A reward's"),
        ("/no/such/folder", r"does not exist \(/ holds: "),
        ("a/b/c", "does not exist"),
        ("./my_package/iner", r"does not exist \(.*my_package holds: inner\)"),
        ("my_rewards.py", "is a file. A reward's"),
        ("brevity", "is no folder in .*, and a function is given with its module, `module.brevity`. A reward's"),
        ("owner/na me", "is neither a folder, an import path nor a hub id"),
        ("owner/name@main", "is neither a folder, an import path nor a hub id"),
    ],
)
def test_a_wrong_path_says_what_is_expected(source, message, project):
    with pytest.raises(RewardError, match=f"`reward.source='{re.escape(source)}'` {message}"):
        build_rewards(source)


@pytest.mark.parametrize("source", ["owner/name", "Qwen/Qwen2.5-0.5B", "bert-base-uncased"])
def test_everything_else_is_a_hub_id_which_nothing_is_fetched_of_yet(source, project):
    rewards = build_rewards(source)
    assert isinstance(rewards.rewards[0], ModelReward)
    assert rewards.names == [source.split("/")[-1]]


def test_a_folder_is_a_model_even_where_its_name_looks_like_an_import_path(project, roll, policy_tokenizer):
    build_model("llama").save_pretrained("runs.best")
    bytes_tokenizer().save_pretrained("runs.best")
    rewards = build_rewards("runs.best")
    rewards.load("cpu")
    assert list(rewards.models) == ["runs.best"]
    assert rewards.score(roll(), policy_tokenizer).total.shape == (5,)


def test_a_module_can_be_named_by_its_import_path(project, monkeypatch, roll, policy_tokenizer):
    model = build_model("llama")
    model.tokenizer = bytes_tokenizer()
    module = types.ModuleType("my_models")
    module.scorer = model
    monkeypatch.setitem(sys.modules, "my_models", module)
    rewards = build_rewards({"source": "my_models.scorer", "name": "scorer", "batch_size": 2})
    rewards.load("cpu")
    assert rewards.models["scorer"] is model
    assert rewards.score(roll(), policy_tokenizer).total.shape == (5,)


def ones(responses):
    return [1.0] * len(responses)


def test_several_rewards_add_up_with_their_weights_and_are_kept_apart(project, save, roll, policy_tokenizer):
    folder = save("llama")
    rewards = build_rewards(
        [
            "my_rewards.brevity",
            {"source": "my_rewards.Judge", "weight": -3},
            RewardConfig(source="my_rewards:squares", weight=0.5, name="squares"),
            FunctionReward(ones, weight=0.0),
            {"source": folder, "weight": 2.0, "name": "liking"},
            lambda responses: [0.25] * len(responses),
        ]
    )
    assert rewards.names == ["brevity", "Judge", "squares", "ones", "liking", "lambda"]
    rewards.check()
    rewards.load("cpu")
    assert list(rewards.models) == ["liking"]
    scores = rewards.score(roll(), policy_tokenizer)
    weights = {"brevity": 1.0, "Judge": -3.0, "squares": 0.5, "ones": 0.0, "liking": 2.0, "lambda": 1.0}
    assert list(scores.parts) == list(weights)
    total = sum(w * scores.parts[n] for n, w in weights.items())
    torch.testing.assert_close(scores.total, total)
    assert scores.parts["Judge"].tolist() == [1] * 5  # unweighted
    assert all(part.dtype == torch.float32 and part.shape == (5,) for part in scores.parts.values())
    assert scores.truncated == {"liking": 0}


def test_two_rewards_of_one_name_are_refused(project):
    with pytest.raises(ValueError, match=r"Two rewards are called 'brevity'. Give each its own `name`"):
        build_rewards(["my_rewards.brevity", "my_package.inner.rules.brevity"])
    build_rewards(["my_rewards.brevity", {"source": "my_package.inner.rules.brevity", "name": "other"}])


@pytest.mark.parametrize("spec", [[], ()])
def test_no_reward_is_refused(spec):
    with pytest.raises(ValueError, match="`reward` is empty"):
        build_rewards(spec)


@pytest.mark.parametrize("spec", [None, 3, [3], object()])
def test_what_is_no_reward_is_refused(spec):
    with pytest.raises(TypeError, match=r"A reward is a folder, an import path, a hub id, .* got "):
        build_rewards(spec)


def test_bad_options_are_refused_where_they_are_given(project):
    with pytest.raises(ValueError, match=r"`wieght` is not an option of RewardConfig. Did you mean `weight`"):
        build_rewards({"source": "my_rewards.brevity", "wieght": 1})
    with pytest.raises(ValueError, match=r"`reward.timeout=0` must be > 0"):
        build_rewards({"source": "my_rewards.brevity", "timeout": 0})
    with pytest.raises(ValueError, match=r"`reward.max_length=5` has no effect on a reward that is a function"):
        build_rewards({"source": "my_rewards.brevity", "max_length": 5})
    with pytest.raises(ValueError, match=r"`reward.timeout=5` has no effect on a reward model"):
        build_rewards({"source": "owner/name", "timeout": 5})
    with pytest.raises(
        TypeError, match=r"`reward.source` must be a string, got function. For a Python object with opt"
    ):
        build_rewards({"source": ones, "weight": 2})


def test_scores_are_on_the_rollouts_device(roll, policy_tokenizer):
    scores = build_rewards(ones).score(roll().to("cpu"), policy_tokenizer)
    assert {scores.total.device, scores.keep.device, scores.parts["ones"].device} == {torch.device("cpu")}


def test_the_current_directory_is_searched_once(project):
    build_rewards("my_rewards.brevity")
    build_rewards("my_rewards.judge")
    assert sys.path.count(str(Path.cwd())) == 1


def test_a_guard_sizes_models_and_calls_functions_once(save, roll, policy_tokenizer):
    """What `OOMGuard` stands on: a model is scored again with fewer texts, a function is not called again."""
    calls = []

    def count(responses):
        calls.append(len(responses))
        return [1.0] * len(responses)

    rewards = build_rewards([count, {"source": save("llama"), "batch_size": 2, "name": "model"}])
    rewards.load()
    plain = rewards.score(roll(), policy_tokenizer)
    sizes = []

    def guard(size, body):
        sizes.append(size)
        body(size)
        return body(1)

    calls.clear()
    guarded = rewards.score(roll(), policy_tokenizer, guard)
    torch.testing.assert_close(guarded.total, plain.total)
    assert sizes == [2]
    assert len(calls) == 1
