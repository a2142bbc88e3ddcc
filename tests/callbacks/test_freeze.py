import operator
import warnings

import pytest
import quiet
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from lit_ppo.callbacks import FreezeParameters, GradientCheckpointing

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode"),
]
DATA = DataLoader([torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)], batch_size=None)


class Net(LightningModule):
    """Embedding-free: three blocks with batch-norm and dropout, and a head; weight decay and momentum in AdamW."""

    def __init__(self, manual=False, **optimizer):
        super().__init__()
        self.automatic_optimization = not manual
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.head = nn.Linear(8, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(self.record())
        x = batch
        for layer in self.layers:
            x = x + layer(x)
        loss = self.head(x).pow(2).mean()
        self.log("loss", loss.detach())
        self.log("step_number", float(self.global_step), on_step=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            return None
        return loss

    def record(self):
        return {
            "step": self.global_step,
            "trains": {n for n, p in self.named_parameters() if p.requires_grad},
            "modes": [m.training for m in self.layers[0]],
            "before": {n: p.detach().clone() for n, p in self.named_parameters()},
            "mean": self.layers[0][1].running_mean.clone(),
        }

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)


FIRST = {f"layers.0.{i}.{n}" for i in (0, 1) for n in ("weight", "bias")}


def fit(module, *callbacks, data=DATA, ckpt_path=None, **kwargs):
    seed_everything(7, verbose=False)
    made = quiet.trainer(*callbacks, **({"max_epochs": 3} | kwargs))
    made.fit(module, data, ckpt_path=ckpt_path, weights_only=True)
    return made


def net(**kwargs):
    seed_everything(0, verbose=False)
    return Net(**kwargs)


class Text(LightningModule):
    def __init__(self, tie=False, layers=3):
        super().__init__()
        seed_everything(0, verbose=False)
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            tie_word_embeddings=tie,
        )
        self.model = AutoModelForCausalLM.from_config(config).train()

    def training_step(self, batch, batch_idx):
        self.trains = {n for n, p in self.named_parameters() if p.requires_grad}
        return self.model(input_ids=batch, labels=batch, use_cache=False).loss

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


IDS = DataLoader([torch.arange(8).reshape(2, 4)], batch_size=None)


# ----------------------------------------------------------------------------------------------------------- selection


@pytest.mark.parametrize(
    ("options", "trains"),
    [
        ({"freeze": "layers.0"}, lambda n: "layers.0." not in n),
        ({"freeze": ["*.bias"]}, lambda n: not n.endswith("bias")),
        ({"freeze": r"re:layers\.[01]\.0"}, lambda n: not n.startswith(("layers.0.0", "layers.1.0"))),
        ({"freeze": "norms"}, lambda n: ".1." not in n.removeprefix("layers.")),
        ({"freeze": "all-but-head"}, lambda n: n.startswith("head")),
        ({"freeze": "first:2"}, lambda n: n.startswith(("layers.2", "head"))),
        ({"freeze": "last:1"}, lambda n: not n.startswith("layers.2")),
        ({"freeze": "*", "keep": ["head", r"re:\.bias$"]}, lambda n: n.startswith("head") or n.endswith(".bias")),
    ],
)
def test_patterns_and_presets(options, trains):
    module = net()
    names = {n for n, _ in module.named_parameters()}
    trainer = fit(module, FreezeParameters(**options), max_epochs=1)
    expected = {n for n in names if trains(n)}
    assert 0 < len(expected) < len(names)
    assert all(record["trains"] == expected for record in module.seen)
    final = dict(module.named_parameters())
    for name, start in module.seen[0]["before"].items():
        assert torch.equal(final[name], start) == (name not in expected), name
    assert all(p.requires_grad for p in module.parameters())  # left as found
    assert len(trainer.optimizers[0].state) == len(expected)


@pytest.mark.parametrize("preset", ["embeddings", "norms", "first:2", "last:1", "all-but-head"])
def test_presets_on_a_transformers_model(preset):
    module = Text()
    fit(module, FreezeParameters(preset), data=IDS, max_epochs=1)
    frozen = {n for n, _ in module.named_parameters()} - module.trains
    is_frozen = {
        "embeddings": lambda n: "embed_tokens" in n,
        "norms": lambda n: "norm" in n,
        "first:2": lambda n: "layers.0." in n or "layers.1." in n,
        "last:1": lambda n: "layers.2." in n,
        "all-but-head": lambda n: "lm_head" not in n,
    }[preset]
    assert frozen == {n for n, _ in module.named_parameters() if is_frozen(n)}
    assert frozen


def test_tied_weights_are_one_parameter():
    module = Text(tie=True)
    fit(module, FreezeParameters("all-but-head"), data=IDS, max_epochs=1)
    assert module.trains == {"model.model.embed_tokens.weight"}  # which is the head's
    module = Text(tie=True)
    fit(module, FreezeParameters("*", keep="model.lm_head"), data=IDS, max_epochs=1)
    assert module.trains == {"model.model.embed_tokens.weight"}


@pytest.mark.parametrize("hook", ["setup", "configure_model"])
def test_layers_made_in_setup_or_configure_model(hook):
    class Late(Net):
        def __init__(self):
            super().__init__()
            self.made, self.layers = [*self.layers], nn.ModuleList()

        def make(self, stage=None):
            if not self.layers:
                self.layers.extend(self.made)

    setattr(Late, hook, Late.make)
    module = Late()
    fit(module, FreezeParameters("layers.0"), max_epochs=1)
    fit(module, FreezeParameters("layers.0"), max_epochs=1)
    assert len(module.seen) == 8
    assert all(FIRST.isdisjoint(record["trains"]) for record in module.seen)
    assert "_after_configure_model" not in vars(module)
    assert "configure_model" not in vars(module)


# ----------------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize(
    ("options", "frozen_at"),
    [
        ({"until": "step 5"}, range(5)),
        ({"until": "epoch 2"}, range(8)),
        ({"start": "step 3"}, range(3, 12)),
        ({"start": "epoch 1", "until": "step 6"}, range(4, 6)),
        ({"until": "step_number >= 6"}, range(7)),
        ({"start": "step_number > 1.5", "until": "step_number > 4"}, range(3, 6)),
    ],
)
def test_schedule(manual, options, frozen_at):
    module = net(manual=manual)
    trainer = fit(module, FreezeParameters("layers.0", **options))
    states = [*module.seen, module.record()]
    for i, record in enumerate(module.seen):
        frozen = i in frozen_at
        assert (record["trains"] & FIRST == set()) == frozen, i
        assert record["modes"] == [not frozen] * 4, i
        for name in FIRST:
            assert torch.equal(states[i]["before"][name], states[i + 1]["before"][name]) == frozen, (i, name)
        assert torch.equal(states[i]["mean"], states[i + 1]["mean"]) == frozen
        assert not torch.equal(states[i]["before"]["head.weight"], states[i + 1]["before"]["head.weight"])
    assert len(trainer.optimizers[0].param_groups[0]["params"]) == 14  # from the start


@pytest.mark.parametrize(
    "options",
    [
        {"until": "step 5"},
        {"start": "step 2", "until": "step 7"},
        {"until": "epoch 1"},
        {"until": "step_number >= 4"},
        {"start": "step_number >= 2", "until": "step_number >= 8"},
    ],
)
@pytest.mark.parametrize("at", [3, 5, 6])
def test_resume_is_exact(options, at, tmp_path):
    def run(ckpt_path=None):
        saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=False)
        module = net()
        trainer = fit(module, saver, FreezeParameters("layers.0", **options), ckpt_path=ckpt_path)
        return module, trainer

    whole, trainer = run()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*")
        resumed, again = run(tmp_path / f"step={at}.ckpt")
    assert [r["step"] for r in resumed.seen] == list(range(at, 12))
    for one, other in zip(whole.seen[at:], resumed.seen, strict=True):
        assert one["trains"] == other["trains"]
        assert one["modes"] == other["modes"]
    assert trainer.optimizers[0].state_dict()["param_groups"] == again.optimizers[0].state_dict()["param_groups"]
    states = [t.optimizers[0].state_dict()["state"] for t in (trainer, again)]
    assert states[0].keys() == states[1].keys()
    assert [s["step"] for s in states[0].values()] == [s["step"] for s in states[1].values()]


def test_resumed_weights_are_the_same_bit_for_bit(tmp_path):
    class Deterministic(Net):
        """No dropout, so that nothing depends on the random state, which Lightning does not restore."""

        def __init__(self):
            super().__init__()
            for layer in self.layers:
                layer[3].p = 0.0

    def run(ckpt_path=None):
        seed_everything(0, verbose=False)
        module = Deterministic()
        saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        fit(module, FreezeParameters("layers.0", until="step 6"), saver, ckpt_path=ckpt_path)
        return module.state_dict()

    whole, resumed = run(), run(tmp_path / "step=4.ckpt")
    assert all(torch.equal(whole[k], resumed[k]) for k in whole)


def test_several_callbacks_add_up():
    module = net()
    fit(module, FreezeParameters("layers.0", until="step 4"), FreezeParameters("norms", until="step 8"))
    for i, record in enumerate(module.seen):
        assert ("layers.0.0.weight" in record["trains"]) == (i >= 4)
        assert ("layers.0.1.weight" in record["trains"]) == (i >= 8)  # in both
        assert ("layers.1.1.weight" in record["trains"]) == (i >= 8)
    assert all(p.requires_grad for p in module.parameters())


def test_gradients_of_frozen_lower_layers_are_not_computed():
    class Watched(Net):
        def on_after_backward(self):
            self.seen[-1]["grads"] = {n for n, p in self.named_parameters() if p.grad is not None}

    module = Watched()
    fit(module, FreezeParameters("layers.0", until="step 2"), max_epochs=1)
    assert [FIRST & r["grads"] == set() for r in module.seen] == [True, True, False, False]


def test_eval_mode_can_be_left_alone_and_only_whole_submodules_are_put_in_it():
    module = net()
    fit(module, FreezeParameters("layers.0", eval_mode=False), max_epochs=1)
    assert all(r["modes"] == [True] * 4 for r in module.seen)
    module = net()
    fit(module, FreezeParameters("layers.0.1"), max_epochs=1)
    assert all(r["modes"] == [True, False, True, True] for r in module.seen)
    assert all(m.training for m in module.layers[0])


@pytest.mark.parametrize("order", [1, -1])
def test_composes_with_gradient_checkpointing(order):
    runs = []
    for extra in ([], [GradientCheckpointing()]):
        module = Text()
        callbacks = [FreezeParameters("last:1", until="step 1"), *extra][::order]
        trainer = fit(module, *callbacks, data=IDS)
        runs.append([p.detach().clone() for p in module.parameters()])
        calls = sum(c._engine.calls for c in callbacks if isinstance(c, GradientCheckpointing))
    assert calls == 3 * trainer.global_step  # frozen layers are in eval mode inside, not themselves
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*runs, strict=True))


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"freeze": []}, "must be a name or pattern"),
        ({"freeze": "re:("}, "is not a regular expression"),
        ({"freeze": "first:0"}, "needs a number of layers >= 1, got '0'"),
        ({"freeze": "last"}, "needs a number of layers >= 1, got ''"),
        ({"freeze": "*", "until": "1000"}, r"until='1000'\)` must read like 'step 1000'"),
        ({"freeze": "*", "start": 5}, r"start=5\)` must read like"),
        ({"freeze": "*", "until": "step 0"}, "contradicts itself: the end is the beginning"),
        ({"freeze": "*", "start": "step 5", "until": "step 5"}, "`until` is reached no later than `start`"),
        ({"freeze": "*", "start": "loss < 1", "until": "loss < 2"}, "`until` is reached no later than `start`"),
        ({"freeze": "*", "start": "acc > 2", "until": "acc >= 1"}, "`until` is reached no later than `start`"),
    ],
)
def test_bad_values_raise_in_init(options, match):
    with pytest.raises(ValueError, match=match):
        FreezeParameters(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"freeze": "layer.0"}, r"freeze='layer.0'.*matches no parameter of Net.*`layers.0`"),
        ({"freeze": "norm"}, "Nearest names:.*`norms`"),
        ({"freeze": "*", "keep": "hed"}, r"keep='hed'.*`head`"),
        ({"freeze": "re:^head$"}, "matches no parameter"),
        ({"freeze": "embeddings"}, "Net has no `nn.Embedding`"),
        ({"freeze": "first:4"}, "`layers` has 3 layers only"),
        ({"freeze": "*"}, "nothing to train"),
        ({"freeze": "*", "until": "step 1"}, "nothing to train"),
    ],
)
def test_what_does_not_fit_the_module_raises_at_the_start(options, match):
    with pytest.raises(ValueError, match=match):
        fit(net(), FreezeParameters(**options))


def test_presets_that_do_not_apply():
    class Small(Net):
        def __init__(self):
            LightningModule.__init__(self)
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)

    for preset, match in (("norms", "no normalisation"), ("all-but-head", "no head"), ("last:1", "no stack of layers")):
        with pytest.raises(ValueError, match=f"Small has {match}"):
            fit(Small(), FreezeParameters(preset))


def test_an_optimizer_that_lacks_what_will_thaw_is_an_error():
    class Head(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.head.parameters(), 0.1)

    with pytest.raises(ValueError, match=r"schedule for 4 parameters that no optimizer of Head holds \(`layers.0"):
        fit(Head(), FreezeParameters("layers.0", until="step 1"))


def test_a_metric_that_is_never_logged_is_an_error():
    with pytest.raises(RuntimeError, match=r"waits for 'lss < 1', but no metric.*Nearest names: `loss`"):
        fit(net(), FreezeParameters("layers.0", until="lss < 1"))


def test_an_end_before_the_start_is_an_error_when_it_comes():
    with pytest.raises(RuntimeError, match=r"contradicts itself: the end came no later than the start \(step 2"):
        fit(net(), FreezeParameters("layers.0", start="epoch 1", until="step 2"))
    with pytest.raises(RuntimeError, match=r"contradicts itself"):
        fit(net(), FreezeParameters("layers.0", start="epoch 1", until="step 4"))


def test_a_failed_fit_leaves_the_module_as_found():
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            assert not self.layers[0][0].weight.requires_grad
            raise RuntimeError("on purpose")

    for options in ({}, {"until": "step 3"}):
        module = Fails()
        with pytest.raises(RuntimeError, match="on purpose"):
            fit(module, FreezeParameters("layers.0", **options))
        assert all(p.requires_grad for p in module.parameters())
        assert all(m.training for m in module.modules())


def test_state_is_plain_data_and_keyed_by_the_arguments():
    a, b = FreezeParameters("x", until="step 1"), FreezeParameters("x", until="step 2")
    assert operator.ne(a.state_key, b.state_key)
    c = FreezeParameters("x", until="loss < 1")
    c.load_state_dict({"until": 7})
    assert c.state_dict() == {"until": 7}
