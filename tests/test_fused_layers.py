"""Fused norms, SwiGLU and rotary embeddings against transformers' own modules, in values and gradients."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from types import MethodType

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama as llama
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from lit_ppo import PPOLightningModule
from lit_ppo.config import LoRAConfig
from lit_ppo.plan.trace import _recompute
from lit_ppo.roles import fused_layers as fl
from lit_ppo.roles.adapters import POLICY, add_adapters
from lit_ppo.roles.fused_layers import fuse, fuse_if, unfuse
from lit_ppo.roles.model import RoleModel, probe

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
HALVES = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]  # Triton's interpreter cuts bfloat16 off
NORMS = [llama.LlamaRMSNorm, GemmaRMSNorm, Olmo2RMSNorm]


def serve(patch):
    """Have the kernels serve everything: on the CPU Triton's interpreter runs them."""
    pytest.importorskip("triton")
    from lit_ppo.roles import layer_kernels

    patch.setattr(fl, "_serving", lambda x: layer_kernels if x.numel() else None)
    return layer_kernels


@pytest.fixture
def fused(monkeypatch):
    return serve(monkeypatch)


def gap(ours, theirs) -> float:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert torch.isfinite(ours).all()
    least = 0.05 * theirs.numel() ** 0.5  # of few numbers a gradient may cancel out
    return float(
        (ours.detach().double() - theirs.detach().double()).norm() / theirs.detach().double().norm().clamp(min=least)
    )


def limit(dtype) -> float:
    return {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]


def both(module, inputs, dtype=None, frozen=False):
    """Outputs and gradients of a module as it is and fused, for the same inputs."""
    module.requires_grad_(not frozen)
    found = []
    for on in (False, True):
        (fuse if on else unfuse)(module)
        given = [x.detach().clone().requires_grad_() for x in inputs]
        module.zero_grad()
        out = module(*given)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out))
        found.append([out.detach(), *(x.grad for x in given), *(p.grad for p in module.parameters() if not frozen)])
    unfuse(module)
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert gap(ours, theirs) < limit(dtype or ours.dtype)


def norm_of(kind, width, dtype=torch.float32):
    made = kind(width, eps=1e-5)
    nn.init.normal_(made.weight, 0.5, 0.3)
    return made.to(DEVICE, dtype)


@settings(max_examples=12)
@given(st.sampled_from(NORMS), st.integers(1, 3), st.integers(1, 9), st.integers(1, 300), st.booleans())
def test_norms(kind, batch, length, width, frozen):
    with pytest.MonkeyPatch.context() as patch:
        serve(patch)
        both(norm_of(kind, width), [torch.randn(batch, length, width, device=DEVICE)], frozen=frozen)


def test_a_norm_of_more_rows_than_partial_sums_and_of_an_input_that_is_not_contiguous(fused, monkeypatch):
    monkeypatch.setattr(fused, "PARTS", 3)
    monkeypatch.setattr(fused, "TILE", 128)
    both(norm_of(llama.LlamaRMSNorm, 40), [torch.randn(40, 2, 11, device=DEVICE).permute(2, 1, 0)])


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", HALVES)
def test_norms_round_where_transformers_rounds(fused, kind, dtype):
    module = norm_of(kind, 96, dtype)
    x = torch.randn(50, 96, device=DEVICE, dtype=dtype)
    expected = module(x)
    fuse(module)
    same = (module(x) == expected).float().mean()
    assert same > 0.99  # but where the order of a sum decides
    unfuse(module)
    both(module, [x], dtype)


def test_a_norm_of_float32_weights_over_16_bits_gives_what_transformers_gives(fused):
    for kind in NORMS:
        module = norm_of(kind, 48)
        x = torch.randn(5, 48, device=DEVICE).half().requires_grad_()
        expected = module(x)
        wanted = torch.autograd.grad(expected.float().square().sum(), [x, module.weight])
        fuse(module)
        assert gap(module(x), expected) < 2e-4
        got = torch.autograd.grad(module(x).float().square().sum(), [x, module.weight])
        for ours, theirs in zip(got, wanted, strict=True):
            assert gap(ours, theirs) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("width", [1, 50, 2500])
def test_swiglu(fused, dtype, width):
    config = tiny.CONFIGS["llama"].__class__(**tiny.SHAPE | {"intermediate_size": width})
    module = llama.LlamaMLP(config).to(DEVICE, dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    both(module, [torch.randn(3, 7, 32, device=DEVICE, dtype=dtype)], dtype)


@pytest.mark.parametrize(("dtype", "table"), [(torch.float32, torch.float32), *((d, d) for d in HALVES),
                                              (HALVES[-1], torch.float32)])  # fmt: skip
@pytest.mark.parametrize(("batch", "shared", "heads", "kv_heads", "length", "dim"), [
    (2, False, 3, 1, 5, 24), (3, True, 9, 4, 2, 128), (1, True, 33, 33, 1, 64), (1, False, 1, 1, 7, 2)])  # fmt: skip
def test_rotary(fused, dtype, table, batch, shared, heads, kv_heads, length, dim):
    """Cosines that differ between the two halves, which none of the models has, prove the backward."""
    q, k = (torch.randn(batch, length, n, dim, device=DEVICE).to(dtype).transpose(1, 2) for n in (heads, kv_heads))
    cos, sin = torch.randn(2, 1 if shared else batch, length, dim, device=DEVICE).to(table)
    found = []
    for run in (llama.apply_rotary_pos_emb, lambda *x: fl._rotate(llama.apply_rotary_pos_emb, *x)):
        inputs = [q.clone().requires_grad_(), k.contiguous().requires_grad_()]
        outs = run(*inputs, cos, sin)
        draw = torch.Generator().manual_seed(1)
        loss = sum((o * torch.randn(o.shape, generator=draw).to(o)).sum() for o in outs)
        found.append([*(o.detach() for o in outs), *torch.autograd.grad(loss, inputs)])
    for i, (ours, theirs) in enumerate(zip(found[1], found[0], strict=True)):
        assert i > 1 or torch.equal(ours, theirs) or dtype == torch.float32
        assert gap(ours, theirs) < limit(dtype)


# ------------------------------------------------------------------------------------------------------ whole models


def step(model, ids):
    """Logits and gradients of a causal language model."""
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits.float()
    loss = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()
    loss.backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def made(kind, **changes):
    config = AutoConfig.for_model(kind, **tiny.SHAPE | changes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(DEVICE)


def tokens(batch=2, length=9):
    return torch.randint(3, tiny.VOCAB, (batch, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "olmo2", "gemma3_text"])
def test_whole_models(fused, kind):
    model = made(kind)
    names = list(model.state_dict())
    expected = step(model, tokens())
    counts = fuse(model)
    assert counts["rotary"] == 2
    assert counts["norms"] >= 5
    assert counts["gated"] == (0 if "gemma" in kind else 2)
    for ours, theirs in zip(step(model, tokens()), expected, strict=True):
        assert gap(ours, theirs) < 1e-5
    assert list(model.state_dict()) == names


def test_adapters_checkpointing_packing_and_offloading(fused):
    """LoRA, in a packed forward whose layers are computed again from what has been copied."""
    from torch.autograd.graph import saved_tensors_hooks

    results = []
    for on in (False, True):
        base = made("qwen2")
        (fuse if on else unfuse)(base)
        store = RoleModel(add_adapters(base.requires_grad_(False), LoRAConfig(r=2), [POLICY], seed=0)).to(DEVICE)
        for name, parameter in store.named_parameters():
            if "lora_B" in name:
                torch.manual_seed(len(name))
                nn.init.normal_(parameter, std=0.02)
        assert store.pack() is None
        store.train()
        for layer in base.model.layers:
            _recompute(layer, store, True)
        with saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            logprobs, _ = store("logprobs", POLICY, probe(3, tiny.VOCAB).to(DEVICE))
        logprobs.square().sum().backward()
        results.append([logprobs.detach(), *(p.grad for p in store.parameters() if p.grad is not None)])
        assert fuse(base)["norms"] == 5  # still, under PEFT's wrapper
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert gap(ours, theirs) < 1e-5


def test_less_is_kept_for_the_backward(fused):
    """A norm keeps its input and a number a row, SwiGLU gate and up; the projections keep what they are given."""
    from torch.autograd.graph import saved_tensors_hooks

    kept = []
    for on in (False, True):
        model = made("llama", num_hidden_layers=1)
        (fuse if on else unfuse)(model)
        layer, weights = model.model.layers[0].mlp, {p.data_ptr() for p in model.parameters()}
        norm, found = model.model.norm, {}
        with saved_tensors_hooks(lambda x, found=found: found.setdefault(x.data_ptr(), x), lambda x: x):
            x = torch.randn(2, 8, 32, device=DEVICE, requires_grad=True)
            out = layer(norm(x))
        kept.append(sum(x.nbytes for place, x in found.items() if place not in weights))
        del out
    tokens, hidden, middle = 16, 32, 48
    assert kept[1] == 4 * tokens * (2 * hidden + 3 * middle + 1)
    assert kept[1] < 0.8 * kept[0]


def test_only_cuda_and_16_bits_or_autocast_are_served(monkeypatch):
    x = torch.randn(2, 3)
    assert fl._serving(x.half()) is None  # not on CUDA
    kernels = serve_cpu(monkeypatch)
    assert fl._serving(x.half()) is fl._serving(x.bfloat16()) is kernels
    assert fl._serving(x) is fl._serving(x.double()) is fl._serving(x[:0].half()) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert fl._serving(x) is kernels
        assert fl._serving(x.double()) is None


def serve_cpu(patch):
    pytest.importorskip("triton")
    from lit_ppo.roles import layer_kernels

    patch.setattr(fl, "kernels_for", lambda x: layer_kernels)
    return layer_kernels


def test_in_float32_the_bits_are_those_of_the_model(monkeypatch):
    serve_cpu(monkeypatch)
    model = made("llama")
    expected = step(model, tokens())
    fuse(model)
    for ours, theirs in zip(step(model, tokens()), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_autocast(monkeypatch):
    serve_cpu(monkeypatch)
    model = made("qwen3")
    with torch.autocast(DEVICE.type, torch.float16):
        expected = step(model, tokens())
        fuse(model)
        for ours, theirs in zip(step(model, tokens()), expected, strict=True):
            assert gap(ours, theirs) < 5e-3


def test_what_computes_otherwise_is_left_alone():
    class Odd(llama.LlamaRMSNorm):
        def forward(self, x):
            return super().forward(x) + 1

    class Careless(llama.LlamaRMSNorm):
        def forward(self, hidden_states):
            x = hidden_states.float()
            return self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)).to(
                hidden_states.dtype
            )

    config = tiny.CONFIGS["llama"].__class__(**tiny.SHAPE, hidden_act="gelu")
    mine = llama.LlamaRMSNorm(8)
    mine.forward = lambda x: x
    modules = nn.ModuleList([Odd(8), Careless(8), nn.RMSNorm(8, 1e-6), nn.LayerNorm(8), mine, llama.LlamaMLP(config)])
    assert fuse(modules) == {"norms": 0, "gated": 0, "rotary": 0}
    assert mine.forward(3) == 3
    unfuse(modules)
    assert mine.forward(3) == 3
    assert fuse(made("cohere"))["norms"] == 0  # layer norms, and a rotary embedding of neighbours
    assert fuse(made("cohere"))["rotary"] == 0


def test_a_forward_that_is_asked_for_more_is_the_models_own(fused):
    q, table = torch.randn(1, 2, 3, 8), torch.randn(2, 1, 3, 8)
    own = llama.apply_rotary_pos_emb
    for ours, theirs in zip(
        fl._rotate(own, q.transpose(1, 2), q.transpose(1, 2), *table, unsqueeze_dim=2),
        own(q.transpose(1, 2), q.transpose(1, 2), *table, unsqueeze_dim=2),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    norm = llama.LlamaRMSNorm(8)
    fuse(norm)
    assert torch.equal(norm(hidden_states=q), llama.LlamaRMSNorm(8)(q))


def test_what_is_fused_does_not_depend_on_where_tensors_are_made():
    """Models are made on a GPU with that as the default device."""
    here, there = tiny.model(), tiny.model()
    counts = fuse(here)
    fl._rotating.cache_clear()
    with torch.device("meta"):
        assert fuse(there) == counts
    assert counts == {"norms": 5, "gated": 2, "rotary": 2}


def test_nothing_but_instances_changes_and_it_can_be_taken_back():
    before = [llama.LlamaRMSNorm.forward, llama.LlamaAttention.forward, llama.apply_rotary_pos_emb]
    state = torch.random.get_rng_state()
    model, other = tiny.model("llama"), tiny.model("llama", seed=1)
    counts = fuse(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [llama.LlamaRMSNorm.forward, llama.LlamaAttention.forward, llama.apply_rotary_pos_emb] == before
    assert counts == fuse(model) == {"norms": 5, "gated": 2, "rotary": 2}
    assert not any("forward" in vars(m) for m in other.modules())
    twin, saved = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for m in twin.modules():
        assert "forward" not in vars(m) or (isinstance(m.forward, MethodType) and m.forward.__self__ is m)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    for copied in (twin, saved):
        assert copied(input_ids=tokens().cpu()).logits.any()
    unfuse(model)
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("on", [True, False])
def test_the_option(on):
    actor = tiny.model("llama")
    fuse(actor)
    critic = AutoModelForSequenceClassification.from_pretrained(tiny.folder("llama", labels=1))
    module = PPOLightningModule(actor, tiny.count_w1, critic, tokenizer=tiny.tokenizer(), ppo={"fused_layers": on})
    module.configure_model()
    for view in module.views.all().values():
        assert ("forward" in vars(view.store.base.base_model.norm)) == on


# ------------------------------------------------------------------------------------------------------------- CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(("rows", "width"), [(3000, 1536), (1200, 4096), (50_000, 128), (300, 12288), (1, 576)])
def test_norms_on_cuda_are_as_exact_as_transformers_and_the_same_every_time(dtype, kind, rows, width):
    module = norm_of(kind, width, dtype)
    x, weight = torch.randn(2, rows, width, device="cuda", dtype=dtype)
    double, w = x.double().requires_grad_(), module.weight.detach().double().requires_grad_()
    formula = fl._kind_of(module, 1e-5)
    out = double * torch.rsqrt(double.square().mean(-1, keepdim=True) + 1e-5) * (formula.offset + w)
    exact = [out.detach(), *torch.autograd.grad(out, [double, w], weight.double())]

    def run(wanted):
        fuse_if(wanted, [module])
        given = x.clone().requires_grad_()
        out = module(given)
        assert ("Norm" in type(out.grad_fn).__name__) == wanted
        return [out.detach(), *torch.autograd.grad(out, [given, module.weight], weight)]

    plain, ours, again = run(False), run(True), run(True)
    for a, b, c, truth in zip(ours, plain, again, exact, strict=True):
        assert torch.equal(a, c)
        assert (a.double() - truth).norm() < 1.1 * (b.double() - truth).norm() + 1e-4 * truth.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [8960, 14336, 1001])
def test_swiglu_on_cuda_is_as_exact_as_transformers(dtype, width):
    gate, up, grad = torch.randn(3, 700, width, device="cuda", dtype=dtype)

    def results(function, *given):
        inputs = [x.clone().requires_grad_() for x in given]
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out))]

    def plain(g, u):
        return nn.functional.silu(g) * u

    exact = results(plain, gate.double(), up.double())
    ours = results(lambda g, u: fl._SwiGLU.apply(g, u, fl._serving(g)), gate, up)
    for a, b, truth in zip(ours, results(plain, gate, up), exact, strict=True):
        assert (a.double() - truth).norm() < 1.1 * (b.double() - truth).norm() + 1e-4 * truth.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 2, 128), (32, 8, 128), (9, 3, 64), (5, 1, 96)])
def test_rotary_on_cuda_gives_the_bits_of_transformers(dtype, heads, kv_heads, dim):
    q, k = (torch.randn(2, 700, n, dim, device="cuda", dtype=dtype).transpose(1, 2) for n in (heads, kv_heads))
    angle = torch.randn(2, 700, dim // 2, device="cuda").repeat(1, 1, 2)
    table = angle.cos().to(dtype), angle.sin().to(dtype)
    found = []
    for run in (llama.apply_rotary_pos_emb, lambda *x: fl._rotate(llama.apply_rotary_pos_emb, *x)):
        inputs = [x.clone().requires_grad_() for x in (q, k)]
        outs = run(*inputs, *table)
        found.append([*(o.detach() for o in outs), *torch.autograd.grad(outs, inputs, [q.sin(), k.sin()])])
    assert "Rotary" in type(outs[0].grad_fn).__name__
    for i, (ours, theirs) in enumerate(zip(found[1], found[0], strict=True)):
        assert torch.equal(ours, theirs) or i > 1
        assert gap(ours, theirs) < limit(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["bfloat16", "float16", "autocast"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3_text"])
def test_a_whole_model_on_cuda_is_as_near_to_float32_as_it_was(mode, kind):
    dtype = torch.float32 if mode == "autocast" else getattr(torch, mode)
    context = torch.autocast("cuda", torch.bfloat16) if mode == "autocast" else nullcontext()
    model = made(kind, hidden_size=256, intermediate_size=700, head_dim=64)
    ids = tokens(4, 60)
    exact = step(model, ids)
    model = model.to(dtype)
    with context:
        plain = step(model, ids)
        assert fuse(model)["norms"] >= 5
        ours = step(model, ids)
    assert len(ours) == len(plain) == len(exact)
    for a, b, truth in zip(ours, plain, exact, strict=True):
        assert (a.double() - truth.double()).norm() < 2 * (b.double() - truth.double()).norm() + 1e-2 * truth.norm()


@pytest.mark.gpu
def test_the_kernels_are_captured_in_a_cuda_graph():
    layer = made("llama", hidden_size=256).bfloat16().model.layers[0].eval()
    assert fuse(layer) == {"norms": 2, "gated": 1, "rotary": 1}
    x = torch.randn(1, 33, 256, device="cuda", dtype=torch.bfloat16)
    table = torch.randn(2, 1, 33, 64, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, 4, 33, 64, device="cuda", dtype=torch.bfloat16)

    def run():
        return layer.mlp(layer.input_layernorm(x)), *fl._rotate(llama.apply_rotary_pos_emb, q, q, *table)

    with torch.no_grad():
        expected = [y.clone() for y in run()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(found, expected, strict=True):
        assert gap(a, b) < 1e-2
