"""Embeddings and heads as int8 rows: what they compute, what they take, where they may stand."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lit_ppo import LoRAConfig, OptimConfig, PPOConfig, PPOLightningModule, RoleConfig
from lit_ppo.export import export
from lit_ppo.memory.ledger import holdings
from lit_ppo.plan.forecast import Forecast
from lit_ppo.plan.setup import read_setup
from lit_ppo.roles import int8
from lit_ppo.roles.fused_head import HeadSpec
from lit_ppo.roles.int8 import Int8Embedding, Int8Head, quantize_embeddings_, rounded
from lit_ppo.roles.logprobs import token_logprobs

LORA = LoRAConfig(r=4)


def module(kind: str = "llama", actor=None, layout="shared", **options):
    options = {"lora": LORA, "optim": OptimConfig(actor_lr=1e-2, schedule="constant")} | options
    actor = actor or RoleConfig(source=tiny.folder(kind), quantize_embeddings="int8")
    return PPOLightningModule(actor, tiny.count_w1, layout=layout, sampling={"max_new_tokens": 6}, **options)


def test_rows_by_hand():
    weight, scale = rounded(torch.tensor([[1.27, -0.5, 0.004], [0.0, 0.0, 0.0], [-2.54, 2.54, 0.01]]))
    assert weight.dtype == torch.int8
    assert weight.tolist() == [[127, -50, 0], [0, 0, 0], [-127, 127, 0]]
    torch.testing.assert_close(scale, torch.tensor([0.01, 0.0, 0.02]))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 99), st.sampled_from([torch.float32, torch.bfloat16]))
def test_no_weight_is_off_by_more_than_half_a_step(vocab, width, seed, dtype):
    original = torch.randn(vocab, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    weight, scale = rounded(original)
    back = weight.float() * scale[:, None]
    assert ((back - original.float()).abs() <= original.float().abs().amax(1, keepdim=True) * (0.5 / 127 + 1e-6)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_dequantized_matrix(monkeypatch, dtype, bias):
    monkeypatch.setattr(int8, "BLOCK", 8 * 7)  # blocks of 7 rows, the last one shorter
    torch.manual_seed(0)
    plain = nn.Linear(8, 30, bias=bias)
    weight, scale = rounded(plain.weight)
    head = Int8Head(weight, scale, dtype, plain.bias)
    plain.weight.data = weight.float() * scale[:, None]
    plain.double()
    hidden = torch.randn(2, 5, 8, dtype=dtype, requires_grad=True)
    exact = hidden.detach().double().requires_grad_()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-6}[dtype]
    out, wanted = head(hidden), plain(exact)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted.backward(grad.double())
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)
    ids = torch.tensor([[3, 29], [0, 3]])
    rows = Int8Embedding(weight, scale, dtype)(ids)
    assert rows.dtype == dtype
    torch.testing.assert_close(rows.double(), plain.weight[ids], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spec", [HeadSpec(), HeadSpec(cap=2.0), HeadSpec(scale=0.5)])
def test_the_fused_head_takes_them(monkeypatch, spec):
    monkeypatch.setattr(int8, "BLOCK", 8 * 7)
    torch.manual_seed(0)
    plain = nn.Linear(8, 30)
    weight, scale = rounded(plain.weight)
    head = Int8Head(weight, scale, torch.float32, plain.bias.requires_grad_(False))
    plain.weight.data = weight.float() * scale[:, None]
    plain.requires_grad_(False)
    hidden, targets = torch.randn(11, 8), torch.randint(0, 29, (11,))
    suppress, found = torch.tensor([29]), []
    for which in (head, plain):
        h = hidden.clone().requires_grad_()
        options = {"temperature": 0.7, "suppress": suppress, "spec": spec, "entropy": True, "chunk_elements": 90}
        logprobs, entropy = token_logprobs(h, targets, which, **options)
        (logprobs.sum() + 0.3 * entropy.sum()).backward()
        found.append((logprobs, entropy, h.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_log_probs_are_off_by_no_more_than_the_rounding_allows():
    torch.manual_seed(0)
    plain = nn.Linear(256, 4000, bias=False).to(torch.bfloat16).requires_grad_(False)
    nn.init.normal_(plain.weight, std=0.02)
    hidden, targets = torch.randn(64, 256).to(torch.bfloat16), torch.randint(0, 4000, (64,))
    head = Int8Head(*rounded(plain.weight), torch.bfloat16, None)
    exact, _ = token_logprobs(hidden.double(), targets, copy.deepcopy(plain).double())
    ours, half = (token_logprobs(hidden, targets, which)[0].double() for which in (head, plain))
    # a weight is off by up to half a step: a logit by the root of the sum over 256 of (x * step / sqrt(12))^2
    step = plain.weight.float().abs().amax(1).max() / 127
    bound = float(step / 12**0.5 * hidden.float().norm(dim=1).max())
    assert (ours - exact).abs().max() < 5 * bound
    assert (ours - exact).std() < 2 * bound
    assert (ours - half).abs().max() < 0.02


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2"])
def test_conversions_and_ties(kind):
    model = tiny.model(kind).requires_grad_(False)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.arange(3, 12)[None]
    before = model(input_ids=ids).logits
    quantize_embeddings_(model, "actor.quantize_embeddings='int8'")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied == (kind == "llama-tied")
    assert (model(input_ids=ids).logits - before).norm() < 0.02 * before.norm()
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        assert head.scale.dtype == embedding.scale.dtype == torch.float32
        assert head.weight.dtype == torch.int8
        assert model(input_ids=ids).logits.dtype == embedding(ids).dtype == dtype
    assert copy.deepcopy(model)(input_ids=ids).logits.shape == before.shape
    assert model.dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "quantize", "precision", "layout"),
    [
        ("llama", "none", "32-true", "shared"),
        ("llama-tied", "nf4", "bf16-true", "shared"),
        ("llama", "nf4", "bf16-mixed", "separate"),
    ],
)
def test_adapters_train_on_them(tmp_path, kind, quantize, precision, layout):
    if quantize != "none":
        pytest.importorskip("bitsandbytes")
    actor = RoleConfig(source=tiny.folder(kind), quantize=quantize, quantize_embeddings="int8")
    ours = module(actor=actor, layout=layout)
    ours.configure_model()
    before = {n: p.detach().clone() for n, p in ours.named_parameters() if p.requires_grad}
    trainer = tiny.fit(tmp_path, ours, precision=precision, limit_train_batches=2)
    embedding = ours.actor.base.get_input_embeddings()
    assert isinstance(embedding, Int8Embedding)
    assert isinstance(ours.views.critic.store.base.get_input_embeddings(), Int8Embedding)
    assert embedding.scale.dtype == torch.float32
    assert any(not torch.equal(p.float(), before[n].float()) for n, p in ours.named_parameters() if n in before)
    assert float(trainer.callback_metrics["policy/ratio_first_step"]) == 1.0
    assert not [n for n in ours.state_dict() if "embed" in n or "scale" in n or "lm_head" in n]
    export(ours, tmp_path / "adapter")
    with pytest.raises(ValueError, match="the embeddings are in 8 bits"):
        export(ours, tmp_path / "merged", merge=True)


def test_the_bytes_are_a_quarter_of_float32():
    def weights(option):
        ours = module(actor=RoleConfig(source=tiny.folder(), quantize_embeddings=option))
        ours.configure_model()
        (row,) = holdings(ours, torch.device("cpu"))
        return row.weights

    assert weights("none") - weights("int8") == 2 * 64 * (
        3 * 32 - 4
    )  # two matrices of 64 rows of 32, and 4 for a scale


def test_a_reference_alone_and_a_resumed_run(tmp_path):
    reference = RoleConfig(quantize_embeddings="int8")
    full = PPOLightningModule(
        tiny.folder(), tiny.count_w1, reference=reference, sampling={"max_new_tokens": 6}, ppo=PPOConfig(epochs=1)
    )
    trainer = tiny.fit(tmp_path, full, limit_train_batches=1)
    assert isinstance(full.views.reference.store.base.get_input_embeddings(), Int8Embedding)
    assert 0 < abs(float(trainer.callback_metrics["objective/kl"])) < 0.5  # the rounding

    whole, second = tiny.interrupted(tmp_path, module)
    for (name, p), (_, q) in zip(whole.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_the_forecast_knows_them():
    def weights(**actor):
        config = {
            "model": {"actor": {"source": tiny.folder(), **actor}, "reward": "tests.tiny.count_w1", "layout": "shared",
                      "lora": {"r": 2}},
            "data": {"batch_size": 8, "max_prompt_length": 16},
            "trainer": {"precision": "bf16-true"},
        }  # fmt: skip
        found = Forecast(read_setup(config))
        assert found.peak > 0
        return found.stores["actor"].weights

    assert weights() - weights(quantize_embeddings="int8") == 2 * 64 * 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": None, "layout": "separate"}, r"`actor.quantize_embeddings='int8'`: quantized weights cannot train"),
        ({"lora": LoRAConfig(target_modules=["q_proj", "lm_head"])}, r"names 'lm_head', and .* takes no adapter"),
    ],
)
def test_what_cannot_work_is_said_before_a_weight_is_loaded(tmp_path, options, message):
    ours = module(**options)
    with pytest.raises(ValueError, match=message):
        tiny.fit(tmp_path, ours)
    assert ours.views is None


def test_other_embeddings_and_values_are_refused():
    class Scaled(nn.Embedding):
        pass

    model = tiny.model()
    model.set_input_embeddings(Scaled(64, 32))
    with pytest.raises(ValueError, match="has a Scaled where a plain Embedding can be held in 8 bits"):
        quantize_embeddings_(model, "actor.quantize_embeddings='int8'")
    with pytest.raises(ValueError, match=r"`role.quantize_embeddings='int4'` must be one of"):
        RoleConfig(quantize_embeddings="int4")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen2-tied"])
@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_on_cuda_with_the_graph_engine(tmp_path, kind, quantize):
    actor = RoleConfig(source=tiny.folder(kind), quantize=quantize, quantize_embeddings="int8", dtype="bfloat16")
    ours = module(actor=actor, ppo=PPOConfig(rollout_engine="graph"))
    trainer = tiny.fit(tmp_path, ours, accelerator="gpu", precision="bf16-true")
    assert float(trainer.callback_metrics["policy/ratio_first_step"]) == pytest.approx(1.0, abs=1e-3)
    assert float(trainer.callback_metrics["rollout/logprob_gap"]) < 0.2


@pytest.mark.gpu
def test_no_whole_matrix_is_ever_widened_on_cuda():
    weight = torch.randn(128_256, 1024, device="cuda", dtype=torch.bfloat16)
    head = Int8Head(*rounded(weight), torch.bfloat16, None)
    plain = nn.Linear(1024, 128_256, bias=False, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    hidden = torch.randn(300, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 128_256, (300,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, _ = token_logprobs(hidden / 32, targets, head, chunk_elements=2**22)
    logprobs.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < weight.nbytes
    expected, _ = token_logprobs(hidden.detach() / 32, targets, plain)
    torch.testing.assert_close(logprobs.detach(), expected, rtol=0, atol=0.1)
