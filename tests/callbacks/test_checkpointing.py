import copy
import warnings

import pytest
import quiet
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from lit_ppo.callbacks import GradientCheckpointing


class Block(nn.Module):
    """Dropout (random numbers), batch-norm (running statistics) and a tensor of the default dtype."""

    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.3), nn.Linear(4 * width, width))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x, scale=None):
        return x + self.norm(self.net(x)) * scale * torch.ones(1, device=x.device)


class Plain(LightningModule):
    def __init__(self, manual=False, depth=4):
        super().__init__()
        self.automatic_optimization = not manual
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.grads = []
        self.evaluated = []

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x

    def training_step(self, batch, batch_idx):
        if self.automatic_optimization:
            return self(batch).pow(2).mean()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in batch.chunk(2):
            self.manual_backward(self(part).pow(2).mean() / 2)
        optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer):
        self.grads.append([p.grad.clone() for p in self.parameters()])

    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            before = self.trainer.callbacks_calls()
            self(batch)
            self.evaluated.append(self.trainer.callbacks_calls() - before)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Text(LightningModule):
    """A causal LM that also generates inside its training step."""

    def __init__(self, model, generate=False):
        super().__init__()
        self.model = model
        self.generate = generate
        self.grads = []

    def training_step(self, ids, batch_idx):
        if self.generate:
            with torch.no_grad():
                self.cached = self.model.generate(ids, max_new_tokens=3, return_dict_in_generate=True, pad_token_id=0)
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def on_before_optimizer_step(self, optimizer):
        self.grads.append([p.grad.clone() for p in self.parameters() if p.grad is not None])

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


def llama(layers=3):
    seed_everything(0, verbose=False)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4
    )
    return AutoModelForCausalLM.from_config(config).train()


def trainer(*callbacks, **kwargs):
    made = quiet.trainer(*callbacks, **kwargs)
    made.callbacks_calls = lambda: sum(c._engine.calls for c in callbacks if isinstance(c, GradientCheckpointing))
    return made


def fit(module, data, *callbacks, val=None, **kwargs):
    seed_everything(1, verbose=False)
    made = trainer(*callbacks, **kwargs)
    made.fit(module, data, val)
    return made


pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]
VECTORS = DataLoader(
    [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)], batch_size=None
)
IDS = DataLoader([torch.randint(1, 64, (2, 8), generator=torch.Generator().manual_seed(i)) for i in range(2)], None)


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("options", [{"modules": "Block"}, {"modules": ["blocks.*"], "every_n": 2}])
def test_plain_module_learns_as_without(manual, precision, options):
    runs = []
    for callbacks in ([], [GradientCheckpointing(**options)]):
        seed_everything(0, verbose=False)
        module = Plain(manual)
        made = fit(module, VECTORS, *callbacks, precision=precision)
        runs.append(module)
    assert made.callbacks_calls() == 3 * (2 if manual else 1) * (2 if "every_n" in options else 4)
    for one, other in zip(*(m.grads for m in runs), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for one, other in zip(*(m.state_dict().items() for m in runs), strict=True):  # running statistics too
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1]), one[0]
    assert callbacks[0].bytes_saved > 0


def saved_bytes(module, forward):
    """Bytes of distinct storages that autograd keeps, without parameters and buffers."""
    weights = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *module.buffers())}
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return sum(s.nbytes() for p, s in kept.items() if p not in weights)


def test_bytes_saved_is_what_autograd_would_have_kept(tmp_path):
    x = VECTORS.dataset[0]
    module = Plain(depth=4)
    bare = Plain(depth=4).train()
    total = saved_bytes(bare, lambda: bare(x))
    # What still is kept: the input of every block (its first is the batch itself), and the loss.
    inputs = 4 * x.nbytes
    callback = GradientCheckpointing("Block")
    logger = CSVLogger(tmp_path)
    fit(module, VECTORS, callback, logger=logger, log_every_n_steps=1)
    assert callback.bytes_saved == total - inputs
    logged = [m for m in logger.experiment.metrics if "memory/activations_saved_gib" in m]
    logger.save()
    text = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
    assert text.startswith("memory/activations_saved_gib,step")
    assert len(logged) <= 1
    assert len(text.splitlines()) == 2  # once

    micro = GradientCheckpointing("Block")
    fit(Plain(manual=True), VECTORS, micro)  # two half batches, one after the other: half at any one time
    assert callback.bytes_saved / 2.2 < micro.bytes_saved < callback.bytes_saved / 1.8


def test_off_in_validation_even_with_gradients_and_on_again_after():
    callback = GradientCheckpointing("Block")
    module = Plain()
    made = fit(module, VECTORS, callback, val=VECTORS, max_epochs=2, num_sanity_val_steps=1)
    assert set(module.evaluated) == {0}
    assert len(module.evaluated) == 1 + 2 * 3
    assert made.callbacks_calls() == 2 * 3 * 4


@pytest.mark.parametrize("options", [{}, {"every_n": 2}, {"modules": "LlamaDecoderLayer"}, {"modules": "model"}])
def test_transformers_model(options):
    plain, module = Text(llama()), Text(llama(), generate=True)
    fit(plain, IDS)
    callback = GradientCheckpointing(**options)
    made = fit(module, IDS, callback)
    assert made.callbacks_calls() == len(IDS) * (2 if "every_n" in options else 3)
    for one, other in zip(plain.grads, module.grads, strict=True):
        assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(one, other, strict=True))
    cache = getattr(module.cached, "past_key_values", None) or module.cached.cache
    assert cache.get_seq_length() == IDS.dataset[0].shape[1] + 2  # generation kept its cache
    assert not any(getattr(m, "gradient_checkpointing", False) for m in module.modules())  # left as found
    assert not hasattr(module.model, "_require_grads_hook")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # by PEFT itself
def test_lora_on_a_frozen_base_learns():
    peft = pytest.importorskip("peft")
    runs = []
    for callbacks in ([], [GradientCheckpointing()]):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        module = Text(peft.get_peft_model(llama(), config))
        made = fit(module, IDS, *callbacks)
        runs.append(module)
    assert made.callbacks_calls() == len(IDS) * 3
    for one, other in zip(*(m.grads for m in runs), strict=True):
        assert len(one) == 3 * 2 * 2
        assert all(a.abs().max() > 0 for a in other)
        assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(one, other, strict=True))


def test_frozen_lower_layers_are_not_run_backward():
    module = Text(llama())
    for layer in module.model.model.layers[:2]:
        layer.requires_grad_(False)
    module.model.model.embed_tokens.requires_grad_(False)
    seen = []
    module.model.model.layers[0].register_full_backward_hook(lambda *args: seen.append(args))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        fit(module, IDS, GradientCheckpointing())
    assert not seen


def test_modules_made_in_configure_model():
    class Late(Plain):
        def __init__(self):
            super().__init__(depth=0)

        def configure_model(self):
            if not self.blocks:
                self.blocks.extend(Block() for _ in range(2))

    assert fit(Late(), VECTORS, GradientCheckpointing("Block")).callbacks_calls() == 2 * 3


def test_phases_decide_where_a_module_has_them():
    class Phased(Plain):
        def __init__(self):
            super().__init__()
            self.phase_listeners = []
            self.counts = {}

        def training_step(self, batch, batch_idx):
            for phase in ("rollout", "score", "update"):
                for listener in self.phase_listeners:
                    listener(phase)
                before = self.trainer.callbacks_calls()
                loss = self(batch).mean()
                self.counts[phase] = self.trainer.callbacks_calls() - before
                for listener in self.phase_listeners:
                    listener(None)
            return loss

    module = Phased()
    fit(module, VECTORS, GradientCheckpointing("Block"))
    assert module.counts == {"rollout": 0, "score": 0, "update": 4}
    assert module.phase_listeners == []


def test_a_model_may_adapt_the_checkpoint_function():
    class Hooked(Text):
        calls = 0

        def checkpoint_wrapper_hook(self, checkpoint):
            def run(function, *args, **kwargs):
                self.calls += 1
                return checkpoint(function, *args, **kwargs)

            return run

    module = Hooked(llama())
    made = fit(module, IDS, GradientCheckpointing())
    assert module.calls == made.callbacks_calls() == len(IDS) * 3


def test_on_in_a_trial_before_the_first_batch():
    class Trial(Callback):
        def on_train_start(self, trainer, pl_module):
            before = trainer.callbacks_calls()
            pl_module(VECTORS.dataset[0]).sum().backward()
            self.calls = trainer.callbacks_calls() - before

    trial = Trial()
    callback = GradientCheckpointing("Block")
    made = fit(Plain(), VECTORS, trial, callback)
    assert trial.calls == 4
    assert made.callbacks_calls() == 3 * 4


def test_two_backwards_through_one_forward():
    class Twice(Plain):
        def training_step(self, batch, batch_idx):
            loss = self(batch).pow(2).mean()
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)
            optimizer.step()

    runs = []
    for callbacks in ([], [GradientCheckpointing("Block")]):
        seed_everything(0, verbose=False)
        module = Twice(manual=True)
        fit(module, VECTORS, *callbacks)
        runs.append(module.grads)
    assert all(torch.equal(a, b) for one, other in zip(*runs, strict=True) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("first", [True, False])
def test_composes_with_weight_averaging_and_leaves_the_module_as_found(first):
    callback, average = GradientCheckpointing("Block"), WeightAveraging()
    module = Plain()
    keys = set(vars(module.blocks[0]))
    fit(module, VECTORS, *([callback, average] if first else [average, callback]))
    assert set(vars(module.blocks[0])) == keys
    assert "forward" not in vars(average._average_model.module.blocks[0]) or not first


def test_a_copy_made_during_the_fit_uses_its_own_weights():
    class Copying(Plain):
        def on_train_batch_end(self, *args):
            twin = copy.deepcopy(self.blocks[0])
            for p in twin.parameters():
                nn.init.zeros_(p)
            x = torch.ones(4, 16)
            assert torch.equal(twin(x, scale=1.0), x)

    fit(Copying(), VECTORS, GradientCheckpointing("Block"))


def test_parameter_names_and_checkpoints_are_unchanged(tmp_path):
    class Names(Plain):
        def on_train_batch_start(self, *args):
            self.seen = [n for n, _ in self.named_parameters()]

    module = Names()
    names = [n for n, _ in module.named_parameters()]
    made = fit(module, VECTORS, GradientCheckpointing("Block"), default_root_dir=tmp_path)
    assert module.seen == names
    made.save_checkpoint(tmp_path / "x.ckpt")
    assert list(torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]) == list(Plain().state_dict())
    again = trainer(max_epochs=2)
    again.fit(Plain(), VECTORS, ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert again.global_step == 6


# ------------------------------------------------------------------------------------------------------------- errors


def test_bad_values_raise_in_init():
    with pytest.raises(ValueError, match=r"`GradientCheckpointing\(every_n=0\)` must be an integer >= 1"):
        GradientCheckpointing("Block", every_n=0)
    with pytest.raises(ValueError, match=r"modules=\[\].* must be a name or pattern"):
        GradientCheckpointing([])


def test_a_pattern_that_matches_nothing_names_the_nearest():
    with pytest.raises(ValueError, match=r"modules='Blok'.*Nearest names: `Block`"):
        fit(Plain(), VECTORS, GradientCheckpointing("Blok"))
    with pytest.raises(ValueError, match=r"neither the class nor the name.*`blocks"):
        fit(Plain(), VECTORS, GradientCheckpointing("block.*"))


def test_no_transformers_model_and_no_name_suggests_blocks():
    with pytest.raises(ValueError, match=r"Name what to checkpoint.*`Block`"):
        fit(Plain(), VECTORS, GradientCheckpointing())


def test_never_doubled():
    wrapped = Plain()
    wrapped.blocks[0] = checkpoint_wrapper(wrapped.blocks[0])
    with pytest.raises(ValueError, match=r"`blocks.0` .* is checkpointed already"):
        fit(wrapped, VECTORS, GradientCheckpointing("Block"))
    nested = GradientCheckpointing("Sequential")  # inside Block
    with pytest.raises(ValueError, match="is checkpointed already"):
        fit(Plain(), VECTORS, GradientCheckpointing("Block"), nested)
    with pytest.raises(ValueError, match="is checkpointed already"):
        fit(Text(llama()), IDS, GradientCheckpointing(), GradientCheckpointing("LlamaMLP"))
    own = Text(llama())
    own.model.model.layers[0].gradient_checkpointing = True
    with pytest.raises(ValueError, match="is checkpointed already"):
        fit(own, IDS, GradientCheckpointing("LlamaMLP"))


def test_refuses_a_strategy_with_a_policy_of_its_own():
    made = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    made.strategy._activation_checkpointing_kwargs = FSDPStrategy(
        activation_checkpointing_policy={Block}
    )._activation_checkpointing_kwargs
    with pytest.raises(ValueError, match="would checkpoint the same layers twice"):
        GradientCheckpointing("Block").setup(made, Plain(), "fit")


def test_a_model_in_eval_mode_is_reported():
    with (
        pytest.warns(UserWarning, match="Found .* in eval mode"),  # Lightning's own
        pytest.warns(UserWarning, match="nothing was recomputed.*eval mode"),
    ):
        fit(Text(llama().eval()), IDS, GradientCheckpointing())


def test_after_a_failed_fit_nothing_is_left_behind():
    class Fails(Plain):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("on purpose")

    module = Fails()
    keys = set(vars(module.blocks[0]))
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(module, VECTORS, GradientCheckpointing("Block"))
    assert set(vars(module.blocks[0])) == keys


def test_counting_keeps_no_activation_alive():
    """The hooks that count stay in the graph; what they saw must not."""
    import gc
    import weakref

    seen = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            h = self.up(x).sin()
            seen.append(weakref.ref(h.untyped_storage()))
            return self.down(h.cos())

    class Module(Plain):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Watched() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            gc.collect()
            alive.append(sum(ref() is not None for ref in seen))
            return x

    for callbacks, expected in (([], 3), ([GradientCheckpointing("Watched")], 0)):
        seen.clear()
        alive = []
        fit(Module(), torch.randn(8, 16), *callbacks)
        assert alive[0] == expected
