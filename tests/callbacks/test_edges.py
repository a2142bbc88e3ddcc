"""What other code in a run does to the callbacks, and they to it: copies, failures, finders, averaging, odd modules."""

import copy
import gc
import pickle

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    EMAWeightAveraging,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from quiet import trainer
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from lit_ppo.callbacks import FreezeParameters, GradientCheckpointing, OOMGuard, QuantizeModules

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]
DATA = DataLoader([torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)], batch_size=None)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return x + self.inner(x)


class Net(LightningModule):
    def __init__(self, kind=Block, **extra):
        super().__init__()
        seed_everything(0, verbose=False)
        self.layers = nn.Sequential(nn.Linear(8, 8), kind(), kind(), nn.Linear(8, 1))
        for name, value in extra.items():
            setattr(self, name, value)

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch).pow(2).mean()
        self.log("loss", loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def fit(module, *callbacks, **kwargs):
    seed_everything(1, verbose=False)
    made = trainer(*callbacks, **kwargs)
    made.fit(module, DATA)
    return module


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


# ---------------------------------------------------------------------------------------------- gradient checkpointing


class Spectral(Block):
    def __init__(self):
        super().__init__()
        self.inner[0] = nn.utils.parametrizations.spectral_norm(self.inner[0])


class OldSpectral(Block):
    def __init__(self):
        super().__init__()
        self.inner[0] = nn.utils.spectral_norm(self.inner[0])


class Assigned(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean()
        return super().forward(x * self.scale)


@pytest.mark.parametrize("kind", [Spectral, OldSpectral, Assigned])
@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated")
def test_buffers_that_a_forward_moves_are_recomputed_from_where_they_were(kind):
    assert same(fit(Net(kind)), fit(Net(kind), GradientCheckpointing(kind.__name__)))


class Flagged(Block):
    def __init__(self):
        super().__init__()
        self.gradient_checkpointing = False


def test_a_block_with_a_flag_of_its_own_is_checkpointed():
    callback, usual = GradientCheckpointing("Flagged"), GradientCheckpointing("Block")
    assert same(fit(Net(Flagged), callback), fit(Net(), usual))
    assert callback.bytes_saved == usual.bytes_saved > 0


def test_an_input_modified_in_place_is_refused():
    class InPlace(Block):
        def forward(self, x):
            x += 1
            return self.inner(x)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fit(Net(InPlace), GradientCheckpointing("InPlace"))


def test_can_be_pickled_and_lets_go_of_the_module():
    callback = pickle.loads(pickle.dumps(GradientCheckpointing("Block")))
    fit(Net(), callback)
    assert callback._engine.module is None
    assert callback.bytes_saved > 0


def test_graphs_thrown_away_do_not_count():
    class Critic(Net):
        def training_step(self, batch, batch_idx):
            self.layers(batch).detach()
            return super().training_step(batch, batch_idx)

    callback, usual = GradientCheckpointing("Block"), GradientCheckpointing("Block")
    fit(Critic(), callback)
    fit(Net(), usual)
    assert callback.bytes_saved == usual.bytes_saved


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch.compile itself
def test_compiled_blocks_are_compiled_once():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    module, callback = Net(), GradientCheckpointing("Block")
    module.layers[1] = torch.compile(module.layers[1], backend=backend)
    module.layers[2] = torch.compile(module.layers[2], backend=backend)
    fit(module, callback, max_epochs=4)
    assert len(graphs) == 1
    assert callback.bytes_saved is None


class Text(LightningModule):
    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
        )
        self.model = AutoModelForCausalLM.from_config(config).train()

    def training_step(self, batch, batch_idx):
        ids = batch.abs().mul(4).long()
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_one_callback_for_one_transformers_model():
    one, other = (GradientCheckpointing(f"model.model.layers.{i}") for i in range(2))
    module = Text()
    before = {n: dict(vars(m)) for n, m in module.named_modules()}
    with pytest.raises(ValueError, match=r"checkpointed already.*go to one callback"):
        fit(module, one, other)
    fit(module, GradientCheckpointing(["model.model.layers.0", "model.model.layers.1"]))
    for name, m in module.named_modules():
        assert {k for k in vars(m) if "checkpoint" in k} == {k for k in before[name] if "checkpoint" in k}


@pytest.mark.parametrize("callback", [GradientCheckpointing("Block"), FreezeParameters("layers.0", until="step 2")])
@pytest.mark.parametrize("finder", [BatchSizeFinder, LearningRateFinder])
def test_finders_are_said_to_come_first(callback, finder):
    made = trainer(callback, finder())
    made.state.fn = "fit"
    with pytest.warns(UserWarning, match=rf"`{finder.__name__}` runs before `{type(callback).__name__}` starts"):
        callback.setup(made, Net(), "fit")


# ----------------------------------------------------------------------------------------- after `configure_model`


class Fails(Callback):
    def setup(self, trainer, pl_module, stage):
        raise OSError("on purpose")


@pytest.mark.parametrize("callback", [FreezeParameters("layers.0"), QuantizeModules("teacher")])
def test_a_failed_setup_leaves_nothing_for_the_next_fit(callback):
    module = Net(teacher=nn.Linear(64, 64).requires_grad_(False))
    names = set(vars(module))
    with pytest.raises(OSError, match="on purpose"):
        fit(module, callback, Fails())
    assert "configure_model" not in vars(module)
    assert names <= set(vars(module))
    before = copy.deepcopy(module.layers[0].weight)
    fit(module)
    assert not torch.equal(before, module.layers[0].weight)
    assert type(module.teacher) is nn.Linear


def test_a_copy_made_in_setup_is_apart():
    def trainers():
        return [id(o) for o in gc.get_objects() if type(o) is Trainer]

    class Copies(Callback):
        def setup(self, trainer, pl_module, stage):
            before = trainers()
            self.copy = copy.deepcopy(pl_module)
            assert trainers() == before

    class Late(Net):
        def configure_model(self):
            self.made = True

    copies = Copies()
    module = fit(Late(), FreezeParameters("layers.0", until="step 9"), copies)
    copies.copy.configure_model()
    assert copies.copy.made
    assert module.made
    assert all(p.requires_grad for p in copies.copy.parameters())


# -------------------------------------------------------------------------------------------------------- quantization


AVERAGING = [WeightAveraging, EMAWeightAveraging, lambda: StochasticWeightAveraging(swa_lrs=0.01)]


@pytest.mark.parametrize("averaging", AVERAGING)
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("registered", [True, False])
def test_packed_weights_are_not_averaged(averaging, order, registered):
    pytest.importorskip("bitsandbytes")
    teacher = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    module = Net(**({"teacher": teacher} if registered else {}))
    if not registered:
        object.__setattr__(module, "teacher", teacher)
    callbacks = [QuantizeModules("teacher", probe=False), averaging()][::order]
    if not registered:
        fit(module, *callbacks)
        assert type(module.teacher[0]).__name__ == "Linear4bit"
        return
    with pytest.raises(ValueError, match=r"averages every registered parameter.*`teacher`"):
        fit(module, *callbacks)


def test_roles_that_are_no_roles():
    pytest.importorskip("bitsandbytes")
    module = Net(teacher=nn.Sequential(nn.Linear(64, 64)).requires_grad_(False), roles=["speaker", "listener"])
    fit(module, QuantizeModules("teacher"))
    assert type(module.teacher[0]).__name__ == "Linear4bit"


# ------------------------------------------------------------------------------------------------------------ freezing


def test_complex_parameters_freeze():
    class Complex(Net):
        def training_step(self, batch, batch_idx):
            return self.layers((batch * self.phase).real).pow(2).mean()

    phase = nn.Parameter(torch.ones(8, dtype=torch.cfloat))
    frozen = fit(Complex(phase=phase), FreezeParameters("phase"))
    assert torch.equal(frozen.phase, torch.ones(8, dtype=torch.cfloat))
    assert frozen.phase.requires_grad


@pytest.mark.parametrize("order", [1, -1])
def test_frozen_parameters_have_no_optimizer_state(order):
    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            state = trainer.optimizers[0].state
            self.sizes = [len(state.get(p, ())) for p in pl_module.layers[0].parameters()]

    look = Look()
    fit(Net(), *[FreezeParameters("layers.0", until="step 9"), OOMGuard()][::order], look)
    assert look.sizes == [0, 0]


def test_a_metric_of_the_modules_epoch_end_is_refused():
    class Late(Net):
        def on_train_epoch_end(self):
            self.log("late", 0.1)

    with pytest.raises(RuntimeError, match=r"'late < 1'.*own `on_train_epoch_end` after callbacks"):
        fit(Late(), FreezeParameters("layers.0", until="late < 1"), max_epochs=2)


# ----------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GradientCheckpointing(nn.Linear), r"`GradientCheckpointing\(modules=.*must be a name or pattern"),
        (lambda: GradientCheckpointing("Block", every_n=1.5), r"every_n=1.5\)` must be an integer"),
        (lambda: GradientCheckpointing("Block", every_n=True), r"every_n=True\)` must be an integer"),
        (lambda: GradientCheckpointing("Block", every_n="2"), r"every_n='2'\)` must be an integer"),
        (lambda: FreezeParameters(None), r"`FreezeParameters\(freeze=None\)` must be a name"),
        (lambda: FreezeParameters("head", eval_mode="yes"), r"eval_mode='yes'\)` must be True or False"),
        (lambda: QuantizeModules(None), r"`QuantizeModules\(modules=None\)` must be a name"),
        (lambda: QuantizeModules("teacher", skip=5), r"skip=5\)` must be a name"),
        (lambda: QuantizeModules("teacher", double_quant="no"), r"double_quant='no'\)` must be True or False"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
