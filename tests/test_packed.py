"""Padding-free forwards against padded ones, architecture by architecture, in values and gradients."""

from __future__ import annotations

import copy
import functools

import pytest
import tiny
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from transformers import AutoModelForCausalLM

from lit_ppo.config import LoRAConfig
from lit_ppo.experience import Prompts, Rollout
from lit_ppo.roles import packed
from lit_ppo.roles.adapters import POLICY, VALUE, add_adapters
from lit_ppo.roles.attention import AttentionSpec, masked_attention, window_mask
from lit_ppo.roles.loading import critic_from
from lit_ppo.roles.model import RoleModel, RoleView
from lit_ppo.roles.packed import Layout, Packing

HEADS = tiny.SHAPE | {"head_dim": 8}
WINDOW = HEADS | {"sliding_window": 3}
CONFIGS = {
    **tiny.CONFIGS,
    "llama-eager": transformers.LlamaConfig(**tiny.SHAPE, attn_implementation="eager"),
    "mistral": transformers.MistralConfig(**tiny.SHAPE, sliding_window=3),
    "gemma": transformers.GemmaConfig(**HEADS),
    "gemma2": transformers.Gemma2Config(
        **WINDOW, attn_logit_softcapping=3.0, final_logit_softcapping=5.0, attn_implementation="eager"
    ),
    "gemma3": transformers.Gemma3TextConfig(**WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "gpt-neox": transformers.GPTNeoXConfig(
        **{k: v for k, v in tiny.SHAPE.items() if k != "num_key_value_heads"}, use_parallel_residual=True
    ),
    "phi": transformers.PhiConfig(**tiny.SHAPE),
    "gpt2": transformers.GPT2Config(
        vocab_size=tiny.VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "cohere": transformers.CohereConfig(**tiny.SHAPE, logit_scale=0.5),
    "granite": transformers.GraniteConfig(**tiny.SHAPE),
    "olmo2": transformers.Olmo2Config(**tiny.SHAPE),
    "phi3": transformers.Phi3Config(**tiny.SHAPE),
}


def make(kind: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model.eval()


def batch(rows: int = 5, width: int = 7, device: str = "cpu") -> Rollout:
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    lengths[0], lengths[-1] = width, 1
    ids = torch.randint(3, tiny.VOCAB, (rows, width), generator=g)
    stopped = lengths < width
    return Rollout(tiny.prompts(rows), ids, lengths, stopped, torch.zeros(rows, width)).to(device)


def outcome(view: RoleView, rollout: Rollout, **options):
    """Outputs, and the gradients of a random combination of them by name."""
    view.store.zero_grad(set_to_none=True)
    outputs = [x for x in view(rollout, **options) if x is not None]
    g = torch.Generator().manual_seed(2)
    sum((x * torch.randn(x.shape, generator=g).to(x.device)).sum() for x in outputs).backward()
    grads = {n: p.grad.clone() for n, p in view.store.named_parameters() if p.grad is not None}
    return [x.detach() for x in outputs], grads


def assert_close(ours, theirs, rtol=1e-4, atol=2e-5):
    for a, b in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
    assert set(ours[1]) == set(theirs[1])
    for name, gradient in theirs[1].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-3, atol=atol * max(1.0, scale), msg=name)


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_packed_equals_padded(kind):
    store = RoleModel(make(kind))
    view, rollout = RoleView(store, "logprobs"), batch()
    padded = outcome(view, rollout, entropy=True, temperature=0.7)
    assert store.pack() is None
    assert store.packing_fails() is None
    assert store.packs
    assert_close(outcome(view, rollout, entropy=True, temperature=0.7), padded)
    store.pad()
    assert_close(outcome(view, rollout, entropy=True, temperature=0.7), padded, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gpt-neox"])
def test_values_packed_equal_values_padded(kind):
    critic = critic_from(make(kind))
    torch.nn.init.normal_(critic.score.weight)
    store = RoleModel(critic)
    view = RoleView(store, "values")
    padded = outcome(view, batch())
    assert store.pack() is None
    assert_close(outcome(view, batch()), padded)


def shared_trunk():
    model = add_adapters(make("llama"), LoRAConfig(r=4), [POLICY, VALUE], seed=0)
    store = RoleModel(model, torch.nn.Linear(32, 1, bias=False))
    for name, parameter in store.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    return store


def test_a_shared_trunk_packed_equals_it_padded():
    store, rollout = shared_trunk(), batch()
    views = RoleView(store, "logprobs", POLICY), RoleView(store, "values", VALUE), RoleView(store, "logprobs", None)
    with torch.no_grad():
        reference = views[2](rollout)[0]
    padded = [outcome(view, rollout) for view in views[:2]]
    assert store.pack() is None
    assert store.packing_fails() is None
    for view, expected in zip(views, padded, strict=False):
        assert_close(outcome(view, rollout), expected)
    with torch.no_grad():
        torch.testing.assert_close(views[2](rollout)[0], reference, rtol=1e-4, atol=2e-5)


def test_a_trunk_in_four_bits_packed_equals_it_padded():
    pytest.importorskip("bitsandbytes")
    from lit_ppo.callbacks._bitsandbytes import linear_layers, quantize_

    model = make("llama").requires_grad_(False)
    options = dict(double_quant=True, compute_dtype=torch.float32, device=None, probe=False)
    quantize_(model, linear_layers(model, ["lm_head"]), mode="nf4", **options)
    store = RoleModel(add_adapters(model, LoRAConfig(r=4), [POLICY], seed=0))
    view = RoleView(store, "logprobs", POLICY)
    padded = outcome(view, batch())
    assert store.pack() is None
    assert store.packing_fails() is None
    assert_close(outcome(view, batch()), padded)


def switch_of_transformers(store):
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # the new and the old one
    next(getattr(store.base, name) for name in names if hasattr(store.base, name))({"use_reentrant": False})


def wrapper_of_torch(store):
    layers = store.base.model.layers
    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


@pytest.mark.parametrize("checkpointing", [switch_of_transformers, wrapper_of_torch])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_layers_that_are_recomputed_stay_packed(kind, checkpointing):
    store = RoleModel(make(kind))
    view = RoleView(store, "logprobs")
    expected = outcome(view, batch())
    store.train()
    assert store.pack() is None
    checkpointing(store)
    outputs, grads = outcome(view, batch())
    grads = {n.replace("._checkpoint_wrapped_module", ""): g for n, g in grads.items()}
    assert_close((outputs, grads), expected)


def test_a_row_does_not_depend_on_its_neighbours():
    store, rollout = RoleModel(make("llama")), batch(6)
    store.pack()
    view = RoleView(store, "logprobs")
    with torch.no_grad():
        whole = view(rollout)[0]
        for rows in ([0], [5, 2], [1, 3, 4]):
            part = rollout.part(torch.tensor(rows))
            got = view(part)[0]
            torch.testing.assert_close(got, whole[rows, : got.shape[1]], rtol=1e-4, atol=1e-5)


def test_padding_is_never_run():
    store, rollout, seen = RoleModel(make("llama")), batch(), []
    store.base.model.layers[0].register_forward_pre_hook(lambda m, args: seen.append(tuple(args[0].shape[:2])))
    store.pack()
    RoleView(store, "logprobs")(rollout)
    assert seen == [(1, int((rollout.prompts.lengths + rollout.lengths - 1).sum()))]


def test_generate_is_what_it_was():
    model, ids = make("llama"), torch.tensor([[0, 5, 9], [7, 8, 3]])
    options = dict(attention_mask=(ids > 0).long(), max_new_tokens=6, do_sample=False)
    expected = model.generate(ids, **options)
    own = model.config._attn_implementation.removeprefix(packed.PREFIX)  # tests share configurations
    RoleModel(model).pack()
    assert model.config._attn_implementation == packed.PREFIX + own
    assert torch.equal(model.generate(ids, **options), expected)
    assert packed.PREFIX not in model.config.to_json_string(use_diff=False)
    assert RoleModel(model).pack() is None  # a second time, and for a copy of the configuration
    assert model.config._attn_implementation == packed.PREFIX + own


def test_flash_attn_gets_the_borders_by_transformers_names(monkeypatch):
    """The package needs a GPU; what stands in for it here takes the same arguments."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def stand_in(module, q, k, v, attention_mask, *, scaling, cu_seq_lens_q, max_length_q, **options):
        assert attention_mask is None
        lengths = cu_seq_lens_q.diff().tolist()
        assert options["cu_seq_lens_k"] is cu_seq_lens_q
        assert options["max_length_k"] == max_length_q == max(lengths)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return packed._one_by_one(q, k, v, Packing(lengths, cu_seq_lens_q), AttentionSpec(scaling))[None], None

    store = RoleModel(make("llama"))
    view = RoleView(store, "logprobs")
    expected = outcome(view, batch())
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", stand_in)
    store.base.config._attn_implementation_internal = "flash_attention_2"
    assert store.pack() is None
    assert store.base.config._attn_implementation == "flash_attention_2"
    assert_close(outcome(view, batch()), expected)


@pytest.mark.gpu
def test_flash_attn_itself():
    pytest.importorskip("flash_attn")
    store = RoleModel(make("llama")).cuda().bfloat16()
    view, rollout = RoleView(store, "logprobs"), batch(8, 7, "cuda")
    store.pack()
    with torch.no_grad():
        expected = view(rollout)[0]
        store.base.set_attn_implementation("flash_attention_2")
        assert store.pack() is None
        assert store.packing_fails() is None
        assert (view(rollout)[0] - expected).norm() < 0.05 * expected.norm()


def test_mixed_precision_decides_the_dtype_of_attention(monkeypatch):
    store, dtypes = RoleModel(make("llama")), set()
    store.pack()
    attend = packed.masked_attention
    monkeypatch.setattr(packed, "masked_attention", lambda q, k, v, *a: dtypes.add(q.dtype) or attend(q, k, v, *a))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = RoleView(store, "logprobs")(batch())[0]
        store.pad()
        padded = RoleView(store, "logprobs")(batch())[0]
        store.pack()
        assert store.packing_fails() is None  # for rounding is no mistake
    assert dtypes == {torch.bfloat16}
    assert (mixed - padded).norm() < 0.05 * padded.norm()


# -------------------------------------------------------------------------------------- what cannot be packed


def test_an_architecture_without_the_interface_is_named():
    config = transformers.BloomConfig(vocab_size=tiny.VOCAB, hidden_size=32, n_layer=1, n_head=2)
    store = RoleModel(transformers.BloomForCausalLM(config))
    assert store.pack() == "its attention does not go through transformers' AttentionInterface"
    assert not store.packs


def test_an_attention_implementation_that_nobody_knows_is_named():
    model = make("llama")
    model.config._attn_implementation_internal = "made_up"
    assert "'made_up', which is not known" in RoleModel(model).pack()


def test_layers_that_mix_neighbours_are_found():
    model = make("llama")
    model.model.layers[0].register_forward_hook(lambda m, i, out: out + 0.1 * out.roll(1, dims=1))
    store = RoleModel(model)
    assert store.pack() is None
    assert "a sequence by" in store.packing_fails()


def test_attention_that_asks_for_what_ours_does_not_know_is_found():
    model = make("llama")
    attention = model.model.layers[0].self_attn
    attention.forward = functools.partial(attention.forward, s_aux=torch.zeros(4))
    store = RoleModel(model)
    assert store.pack() is None
    assert store.packing_fails() == "its attention uses `s_aux`"
    with pytest.raises(NotImplementedError, match="both directions"):
        AttentionSpec.of(torch.zeros(1, 8), {"is_causal": False})


# ------------------------------------------------------------------------------------------------ layout, attention


@given(sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=6), wider=st.integers(0, 2))
def test_the_layout_points_at_the_right_tokens(sizes, wider):
    width, response = max(p for p, _ in sizes) + wider, max(r for _, r in sizes) + wider
    ids = torch.arange(1, len(sizes) * (width + response) + 1).view(len(sizes), -1)
    p, r = torch.tensor(sizes).unbind(1)
    index = torch.arange(len(sizes))
    texts = {"text": [""] * len(sizes), "messages": [None] * len(sizes), "columns": [{}] * len(sizes)}
    prompts = Prompts(ids[:, :width], p, index, **texts)
    rollout = Rollout(prompts, ids[:, width:], r, r > 1, torch.zeros(len(sizes), response))
    for one in (rollout, rollout.measured()):
        layout = Layout.of(one)
        tokens = [ids[i, width - a : width + b - 1] for i, (a, b) in enumerate(sizes)]
        assert torch.equal(ids.flatten()[layout.tokens], torch.cat(tokens))
        assert layout.packing.lengths == [len(t) for t in tokens]
        assert layout.packing.bounds.tolist() == [sum(map(len, tokens[:i])) for i in range(len(tokens) + 1)]
        assert layout.positions.tolist() == [i for t in tokens for i in range(len(t))]
        before = torch.cat([ids[i, width - 1 : width + b - 1] for i, (_, b) in enumerate(sizes)])
        assert torch.equal(ids.flatten()[layout.tokens][layout.states], before)
        assert torch.equal(ids[:, :-1].flatten()[layout.padded_states], before)
        assert torch.equal(rollout.ids.flatten()[layout.cells], rollout.ids[rollout.mask])


def test_sizes_go_where_their_rows_go():
    rollout = batch(5).measured()
    sizes = rollout.on_host()
    assert sizes == list(zip(rollout.prompts.lengths.tolist(), rollout.lengths.tolist(), strict=True))
    assert rollout.select(torch.tensor([3, 1])).sizes == [sizes[3], sizes[1]]
    assert rollout.part(torch.tensor([4])).sizes == [sizes[4]]
    assert rollout.part(torch.tensor([], dtype=torch.long)).sizes == [(1, 1)]
    assert Rollout.cat([rollout, rollout]).on_host() == sizes * 2


def reference_attention(q, k, v, lengths, spec):
    """Each sequence alone, from the definition, in float64."""
    outs = []
    for qi, ki, vi in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        groups = qi.shape[1] // ki.shape[1]
        ki, vi = ki.repeat_interleave(groups, 1), vi.repeat_interleave(groups, 1)
        scores = torch.einsum("ihd,jhd->hij", qi, ki) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        i = torch.arange(len(qi), device=q.device)
        seen = i[:, None] >= i
        if spec.window is not None:
            seen &= i[:, None] - i < spec.window
        outs.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, float("-inf")).softmax(-1), vi))
    return torch.cat(outs)


SPECS = [AttentionSpec(0.3), AttentionSpec(0.3, window=4), AttentionSpec(0.3, softcap=1.0), AttentionSpec(0.3, 2, 1.0)]


def packed_case(lengths, heads, kv_heads, dim, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), h, dim) for h in (heads, kv_heads, kv_heads)]
    tensors = [torch.randn(s, generator=g).to(device, dtype).requires_grad_() for s in shapes]
    bounds = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32, device=device)
    return tensors, Packing(lengths, bounds)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_attention_within_each_sequence(spec, heads, kv_heads):
    tensors, packing = packed_case([1, 9, 4, 6], heads, kv_heads, 8)
    out = packed.attend(*tensors, packing, spec)
    expected = reference_attention(*tensors, packing.lengths, spec)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
    weights = torch.randn(out.shape)
    ours = torch.autograd.grad((out * weights).sum(), tensors)
    theirs = torch.autograd.grad((expected * weights).sum(), tensors)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)


def test_a_window_of_the_whole_sequence_needs_no_mask():
    device = torch.device("cpu")
    assert window_mask(5, None, device) is None
    assert window_mask(5, 5, device) is None
    assert window_mask(3, 2, device).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    q = torch.randn(1, 2, 5, 8)
    masked = masked_attention(q, q, q, window_mask(5, 4, device), AttentionSpec(1.0))
    torch.testing.assert_close(masked[:, :, :4], masked_attention(q, q, q, None, AttentionSpec(1.0))[:, :, :4])


@pytest.mark.parametrize("window", [None, 4])
def test_the_operator_of_the_gpu_takes_these_arguments_and_is_differentiable(window):
    """Shapes alone: on the meta device nothing is computed."""
    tensors, packing = packed_case([6, 1, 4], 4, 2, 64, torch.bfloat16, "meta")
    out = packed._flash(*tensors, packing, AttentionSpec(0.1, window))
    assert out.shape == tensors[0].shape
    grads = torch.autograd.grad(out.sum(), tensors)
    assert [g.shape for g in grads] == [x.shape for x in tensors]


# ---------------------------------------------------------------------------------------------------------- on CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 2, 128), (9, 3, 64), (4, 4, 80), (8, 2, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_on_cuda(dtype, heads, kv_heads, dim, spec):
    tensors, packing = packed_case([1, 300, 17, 129, 64], heads, kv_heads, dim, dtype, "cuda")
    assert packed._flash_serves(tensors[0], tensors[2], spec) == (dtype != torch.float32 and spec.softcap is None)
    out = packed.attend(*tensors, packing, spec)
    expected = reference_attention(*tensors, packing.lengths, spec)
    rounding = 1e-2 if spec.softcap is None else 5e-2  # capped scores are computed in the dtype
    limit = rounding if dtype != torch.float32 else 1e-3
    assert (out.double() - expected).norm() < limit * expected.norm()
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((out.double() * weights).sum(), tensors)
    theirs = torch.autograd.grad((expected * weights).sum(), tensors)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b.double()).norm() < 2 * limit * b.double().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [1, 2]])
def test_sequences_of_one_token_on_cuda(lengths):
    tensors, packing = packed_case(lengths, 6, 2, 64, torch.bfloat16, "cuda")
    out = packed.attend(*tensors, packing, AttentionSpec(0.125))
    expected = reference_attention(*tensors, lengths, AttentionSpec(0.125))
    assert (out.double() - expected).norm() < 1e-2 * expected.norm()
    ours = torch.autograd.grad(out.double().square().sum(), tensors)
    theirs = torch.autograd.grad(expected.square().sum(), tensors)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b.double()).norm() < 3e-2 * theirs[2].double().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "llama-eager"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_packed_on_cuda_equals_padded(kind, precision):
    """In bfloat16 both are about equally far from float32: neither is the other's reference."""
    torch.backends.cuda.matmul.allow_tf32 = False
    rollout = batch(8, 7, "cuda")
    exact = outcome(RoleView(RoleModel(make(kind).cuda()), "logprobs"), rollout, entropy=True)
    store = RoleModel(make(kind)).cuda().to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    view = RoleView(store, "logprobs")
    found = []
    for pack in (False, True):
        if pack:
            assert store.pack() is None
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
            assert store.packing_fails() is None
            found.append(outcome(view, rollout, entropy=True))
    if precision == "float32":
        assert_close(found[1], exact, rtol=1e-3, atol=1e-3)
        return
    errors = [float((f[0][0] - exact[0][0]).norm() / exact[0][0].norm()) for f in found]
    assert errors[1] < max(0.02, 2 * errors[0])
    for name in exact[1]:
        gaps = [float((f[1][name].float() - exact[1][name]).norm() / exact[1][name].norm()) for f in found]
        assert gaps[1] < max(0.1, 2 * gaps[0]), name


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [switch_of_transformers, wrapper_of_torch])
def test_recomputed_on_cuda(checkpointing):
    store = RoleModel(make("llama")).cuda().bfloat16().train()
    store.pack()
    view, rollout = RoleView(store, "logprobs"), batch(8, 7, "cuda")
    expected = outcome(view, rollout)
    checkpointing(store)
    outputs, grads = outcome(view, rollout)
    grads = {n.replace("._checkpoint_wrapped_module", ""): g for n, g in grads.items()}
    assert_close((outputs, grads), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_a_forward_and_backward_wait_for_the_device_nowhere():
    store, rollout = RoleModel(make("llama")).cuda().bfloat16(), batch(8, 7, "cuda").measured()
    store.pack()
    view = RoleView(store, "logprobs")
    view(rollout, entropy=True)[0].sum().backward()  # kernels are compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        part = rollout.trim()
        view(part, entropy=True)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
