import copy
import importlib.util

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from quiet import trainer
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, LlamaConfig
from transformers.pytorch_utils import Conv1D

from lit_ppo.callbacks import FreezeParameters, GradientCheckpointing, QuantizeModules, QuantizeRewardModel
from lit_ppo.callbacks._bitsandbytes import nbytes, quantized_layers

bnb = pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]
IDS = DataLoader([torch.randint(1, 64, (2, 6), generator=torch.Generator().manual_seed(i)) for i in range(3)], None)
BITS = {"nf4": 4, "fp4": 4, "int8": 8}
ERROR = {"nf4": (0.05, 0.15), "fp4": (0.05, 0.2), "int8": (0.001, 0.02)}


def llama_config(**kwargs):
    return LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        num_labels=1,
        **kwargs,
    )


def reward_model(config=None):
    seed_everything(3, verbose=False)
    return AutoModelForSequenceClassification.from_config(config or llama_config()).eval().requires_grad_(False)


class Ranker(LightningModule):
    """A small policy that climbs a frozen reward model, held as a submodule or as a plain attribute."""

    def __init__(self, reward=None, registered=True):
        super().__init__()
        self.policy = nn.Embedding(64, 64)
        reward = reward_model() if reward is None else reward
        if registered:
            self.reward = reward
        else:
            object.__setattr__(self, "reward", reward)
        self.scores = []

    def forward(self, ids):
        return self.reward(inputs_embeds=self.policy(ids), use_cache=False).logits

    def training_step(self, ids, batch_idx):
        score = self(ids).mean()
        self.scores.append(score.detach())
        return -score

    def validation_step(self, ids, batch_idx):
        self.scores.append(self(ids).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.policy.parameters(), 0.01)


def ranker(**kwargs):
    seed_everything(5, verbose=False)
    return Ranker(**kwargs)


def follows(module, plain=None):
    """Whether a policy went roughly where the full-precision reward leads."""
    if plain is None:
        plain = ranker()
        trainer().fit(plain, IDS)
    start = ranker().policy.weight
    moves = [(m.policy.weight - start).flatten().detach() for m in (module, plain)]
    return 0.7 < torch.cosine_similarity(*moves, dim=0) < 0.9999


@pytest.mark.filterwarnings("ignore:.*inputs_embeds")
@pytest.mark.parametrize("mode", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("registered", [True, False])
def test_a_frozen_reward_model_is_quantized_and_still_teaches(mode, registered, tmp_path):
    plain, module = ranker(registered=registered), ranker(registered=registered)
    twin = copy.deepcopy(plain.reward)
    trainer().fit(plain, IDS)
    callback, logger = QuantizeRewardModel(mode=mode), CSVLogger(tmp_path)
    trainer(callback, logger=logger, log_every_n_steps=1).fit(module, IDS)
    report = callback.reports["reward"]
    assert report.layers == len(quantized_layers(module.reward)) == 2 * 7
    assert type(module.reward.score) is nn.Linear
    assert isinstance(module.reward.model.layers[0].mlp.up_proj.weight, (bnb.nn.Params4bit, bnb.nn.Int8Params))
    # What is freed: all of the layers' float32 bits but 4 or 8, and but the constants.
    layers = quantized_layers(module.reward).values()
    weights = sum(m.in_features * m.out_features for m in layers)
    # A block of 64 has a byte, which is in blocks of 256; each layer has an offset and two code books.
    constants = sum(4 * m.out_features if mode == "int8" else 4 + 4 + 4 * 16 + 4 * 256 for m in layers)
    constants += 0 if mode == "int8" else weights // 64
    assert report.bytes_before == nbytes(twin)
    assert report.bytes_after == nbytes(module.reward)
    assert report.bytes_freed == weights * (32 - BITS[mode]) // 8 - constants
    low, high = ERROR[mode]
    assert low < report.layer_error <= report.worst_error < high
    assert low / 5 < report.output_error < 3 * high
    # The reported output error is the one seen, on the same tokens.
    ids = torch.randint(64, (8, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        seen, exact = module.reward(ids)[0], twin(ids)[0]
    # (8-bit layers round their inputs too, which the probe leaves out.)
    assert float((seen - exact).norm() / exact.norm()) == pytest.approx(report.output_error, rel=0.05, abs=5e-3)
    # And training follows the full-precision run: the gradient reaches the policy through quantized layers.
    assert follows(module, plain)
    text = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
    for name in ("freed_gib", "layer_error", "output_error"):
        assert f"quantization/reward/{name}" in text


def test_double_quantization_frees_more():
    freed = {}
    for double in (True, False):
        module = ranker()
        module.teacher = nn.Sequential(nn.Linear(512, 512), nn.ReLU()).requires_grad_(False)
        callback = QuantizeModules("teacher", double_quant=double, probe=False)
        trainer(callback).fit(module, IDS)
        freed[double] = callback.reports["teacher"].bytes_freed
        assert callback.reports["teacher"].layer_error is None
    assert freed[True] > freed[False]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-true"])
@pytest.mark.parametrize("mode", ["nf4", "int8"])
def test_every_precision_and_evaluation_without_a_fit(precision, mode):
    module = ranker()
    callback = QuantizeRewardModel(mode=mode)
    made = trainer(callback, precision=precision)
    made.validate(module, IDS, verbose=False)
    assert quantized_layers(module.reward)
    with torch.no_grad():
        expected = ranker()(IDS.dataset[0]).mean()
    assert module.scores[0].float() == pytest.approx(float(expected), rel=0.5, abs=0.1)
    assert module.reward.model.layers[0].mlp.up_proj.weight.dtype in (torch.uint8, torch.int8)


@pytest.mark.parametrize("registered", [True, False])
def test_outside_checkpoints_and_resumes_exactly(registered, tmp_path):
    def run(ckpt_path=None):
        module = ranker(registered=registered)
        saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        made = trainer(QuantizeRewardModel(), saver, max_epochs=2)
        made.fit(module, IDS, ckpt_path=ckpt_path, weights_only=True)
        return module

    whole = run()
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    assert set(saved["state_dict"]) == {"policy.weight"}
    resumed = run(tmp_path / "epoch=0.ckpt")
    assert torch.equal(whole.policy.weight, resumed.policy.weight)
    assert resumed.scores == whole.scores[3:]
    trainer(QuantizeRewardModel()).validate(ranker(), IDS, ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)


def test_a_checkpoint_with_the_full_module_loads_too(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="full")
    trainer(saver).fit(ranker(), IDS)
    module = ranker()
    trainer(QuantizeRewardModel(), max_epochs=2).fit(module, IDS, ckpt_path=tmp_path / "full.ckpt", weights_only=True)
    assert quantized_layers(module.reward)
    assert len(module.scores) == 3


def test_other_weights_on_resume_are_noticed(tmp_path):
    trainer(QuantizeRewardModel(), ModelCheckpoint(tmp_path, filename="x")).fit(ranker(), IDS)
    other = reward_model()
    other.model.layers[0].mlp.up_proj.weight.neg_()
    with pytest.warns(UserWarning, match="weights of `reward` are not those that this checkpoint was trained with"):
        trainer(QuantizeRewardModel(), max_epochs=2).fit(
            ranker(reward=other), IDS, ckpt_path=tmp_path / "x.ckpt", weights_only=True
        )


def test_names_globs_skip_and_single_layers():
    class Vision(LightningModule):
        def __init__(self):
            super().__init__()
            self.teachers = nn.ModuleList(
                nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 64), nn.Linear(64, 4))
                for _ in range(2)
            )
            self.teachers.requires_grad_(False)
            self.proj = nn.Linear(64, 64).requires_grad_(False)
            self.student = nn.Conv2d(3, 4, 8)

        def training_step(self, x, batch_idx):
            target = sum(t(x) for t in self.teachers)
            return (self.student(x).flatten(1) - target).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.student.parameters(), 0.1)

    module = Vision()
    callback = QuantizeModules(["teachers.*", "proj"], skip=["3"])
    images = DataLoader([torch.randn(2, 3, 8, 8)], batch_size=None)
    trainer(callback).fit(module, images)
    assert set(quantized_layers(module)) == {"teachers.0.2", "teachers.1.2", "proj"}
    assert callback.reports["teachers.0"].output_error is None
    assert callback.reports["proj"].worst_layer == "itself"
    trainer(callback).fit(module, images)  # again: nothing left to do
    assert callback.reports["teachers.0"].layers == 1


def test_attention_and_encoder_layers_of_torch_keep_working():
    class Torch(Ranker):
        def __init__(self):
            super().__init__(nn.Identity())
            layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().requires_grad_(False)

        def forward(self, ids):
            return self.encoder(self.policy(ids))

    plain, module = Torch(), Torch()
    module.load_state_dict(plain.state_dict())
    trainer(QuantizeModules("encoder")).fit(module, IDS)
    assert len(quantized_layers(module)) == 4  # not the attention's projections, which are read from outside
    with torch.no_grad():
        x = torch.randn(2, 5, 64)
        got, expected = module.encoder(x), plain.encoder(x)
    assert 0.001 < (got - expected).norm() / expected.norm() < 0.3


def test_gpt2_and_tied_heads():
    config = GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2, n_positions=32)
    seed_everything(1, verbose=False)
    teacher = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    plain = copy.deepcopy(teacher)
    module = ranker(reward=nn.Identity())
    module.reward = teacher
    module.forward = lambda ids: teacher(inputs_embeds=module.policy(ids), use_cache=False).logits
    trainer(QuantizeRewardModel(skip=[], mode="int8")).fit(module, IDS)
    assert len(quantized_layers(teacher)) == 4
    assert not any(isinstance(m, Conv1D) for m in teacher.modules())
    assert teacher.lm_head.weight is teacher.transformer.wte.weight
    with torch.no_grad():
        got, expected = teacher(IDS.dataset[0]).logits, plain(IDS.dataset[0]).logits
    assert (got - expected).norm() / expected.norm() < 0.02


# ------------------------------------------------------------------------------------------------------------ protocol


class Roles(Ranker):
    """A LightningModule that loads its roles in `configure_model` and opens the loading to callbacks."""

    def __init__(self, path):
        super().__init__(nn.Identity())
        del self.reward
        self.path = path
        self.role_transforms, self.role_load_kwargs, self.roles = [], {}, {}

    def configure_model(self):
        if self.roles:
            return
        kwargs = self.role_load_kwargs.get("reward", {})
        model = AutoModelForSequenceClassification.from_pretrained(self.path, **kwargs)
        for transform in self.role_transforms:
            model = transform("reward", model)
        model.requires_grad_(False).eval()
        self.roles = {"reward": model}
        object.__setattr__(self, "reward", model)


@pytest.mark.parametrize("mode", ["nf4", "int8"])
@pytest.mark.parametrize("while_loading", [True, False])
def test_a_role_is_quantized_by_the_loader_or_after_it(mode, while_loading, tmp_path):
    reward_model().save_pretrained(tmp_path)
    seed_everything(5, verbose=False)
    module = Roles(tmp_path)
    callback = QuantizeRewardModel(mode=mode, while_loading=while_loading)
    trainer(callback).fit(module, IDS)
    report = callback.reports["reward"]
    assert report.layers == 14
    assert report.bytes_freed == report.bytes_before - nbytes(module.reward)
    assert report.bytes_before == nbytes(reward_model())
    assert (report.layer_error is None) == while_loading
    assert type(module.reward.score) is nn.Linear
    assert module.role_load_kwargs == ({"reward": {}} if while_loading else {})
    assert module.role_transforms == []
    assert follows(module)


def test_a_role_that_is_loaded_late_or_never(tmp_path):
    class Late(Roles):
        def on_fit_start(self):
            self.ready = True
            Roles.configure_model(self)

        def configure_model(self):
            if getattr(self, "ready", False):
                super().configure_model()

    reward_model().save_pretrained(tmp_path)
    seed_everything(5, verbose=False)
    module = Late(tmp_path)
    callback = QuantizeRewardModel(while_loading=False)
    trainer(callback, num_sanity_val_steps=1).fit(module, IDS, IDS)
    assert callback.reports["reward"].layers == len(quantized_layers(module.reward)) == 14
    with pytest.raises(ValueError, match=r"modules='rewards'.*Nearest names: `reward`"):
        trainer(QuantizeRewardModel("rewards")).fit(Late(tmp_path), IDS)


@pytest.mark.parametrize("order", [1, -1])
def test_composes_with_freezing_and_checkpointing_in_any_order(order):
    reward = reward_model().requires_grad_(True)
    module = ranker(reward=reward)
    callbacks = [QuantizeRewardModel(), FreezeParameters("reward"), GradientCheckpointing("LlamaMLP")]
    trainer(*callbacks[::order]).fit(module, IDS)
    assert len(quantized_layers(module.reward)) == 14
    assert callbacks[2]._engine.calls == 2 * len(IDS)
    alone = ranker()
    trainer(QuantizeRewardModel()).fit(alone, IDS)
    assert torch.allclose(module.policy.weight, alone.policy.weight, atol=1e-6)


def test_lora_adapters_stay_at_full_precision():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="SEQ_CLS")
    module = ranker(reward=peft.get_peft_model(reward_model(), config).eval().requires_grad_(False))
    trainer(QuantizeRewardModel()).fit(module, IDS)
    names = quantized_layers(module.reward)
    assert len(names) == 14
    assert not any("lora" in n or "score" in n for n in names)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("mode", ["nf4", "fp4", "int8"])
def test_on_cuda_and_between_devices(mode, precision):
    module, callback = ranker(), QuantizeRewardModel(mode=mode)
    trainer(callback, accelerator="gpu", devices=1, precision=precision).fit(module, IDS)
    assert ERROR[mode][0] < callback.reports["reward"].layer_error < ERROR[mode][1]
    assert follows(module)
    reward = module.reward.float()
    with torch.no_grad():
        ids = torch.cat(list(IDS.dataset))
        on_cpu = reward(ids).logits
        on_cuda = reward.cuda()(ids.cuda()).logits.cpu()
        again = reward.cpu()(ids).logits
    assert torch.allclose(on_cpu, on_cuda, atol=2e-2 * float(on_cpu.abs().max()))
    assert torch.allclose(on_cpu, again)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"modules": "x", "mode": "int4"}, r"mode='int4'\)` must be one of 'nf4', 'fp4', 'int8'"),
        ({"modules": "x", "compute_dtype": "float64"}, "compute_dtype='float64'"),
        ({"modules": "x", "compute_dtype": "bfloat16", "mode": "int8"}, "is for 4-bit layers"),
        ({"modules": ""}, "must be a name or pattern"),
        ({"modules": "x", "skip": [""]}, r"skip=\[''\].*must be a name or pattern"),
    ],
)
def test_bad_values_raise_in_init(options, match):
    with pytest.raises(ValueError, match=match):
        QuantizeModules(**options)


def test_what_cannot_be_quantized_raises_at_the_start(monkeypatch):
    with pytest.raises(ValueError, match=r"modules='rewards'.*Nearest names: `reward`"):
        trainer(QuantizeModules("rewards")).fit(ranker(), IDS)
    with pytest.raises(ValueError, match=r"`reward` has \d+ trainable parameters.*cannot train. Freeze it"):
        trainer(QuantizeRewardModel()).fit(ranker(reward=reward_model().requires_grad_(True)), IDS)
    with pytest.raises(ValueError, match=r"`reward` \(Identity\) has no linear layer to quantize"):
        trainer(QuantizeRewardModel()).fit(ranker(reward=nn.Identity()), IDS)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
    with pytest.raises(NotImplementedError) as error:  # from Lightning's clean-up, which cannot move it
        trainer(QuantizeRewardModel()).fit(ranker(reward=empty), IDS)
    assert "`reward` has no weights yet" in str(error.value.__context__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lit-ppo\[quantize\]'"):
        trainer(QuantizeRewardModel()).fit(ranker(), IDS)
