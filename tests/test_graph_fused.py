"""The engine with its kernels and fused layers; in Triton's interpreter without CUDA. And how an engine is chosen."""

from __future__ import annotations

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, LlamaForCausalLM

from lit_ppo import PPOLightningModule
from lit_ppo.config import LoRAConfig, SamplingConfig
from lit_ppo.roles.adapters import POLICY, add_adapters
from lit_ppo.roles.model import RoleModel, RoleView, decoder_of
from lit_ppo.rollout.base import Draw, resolve_sampling
from lit_ppo.rollout.fused import FusedTrunk, _Adapted, _join, side_by_side
from lit_ppo.rollout.graph import GraphEngine, Unservable
from lit_ppo.rollout.hf import HFEngine
from lit_ppo.rollout.select import AutoEngine, build_engine
from lit_ppo.rollout.trunk import HFTrunk, our_attention, wobble

DRAW = Draw(seed=1, iteration=2)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def small(kind="llama"):
    """A model of one layer: the interpreter is slow."""
    config = tiny.CONFIGS[kind].__class__(
        **{**tiny.CONFIGS[kind].to_dict(), "num_hidden_layers": 1, "layer_types": None}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model.eval()


def setup(model, adapter=None, **options):
    policy = RoleView(RoleModel(model.to(DEVICE)), "logprobs", adapter)
    config = SamplingConfig(**({"max_new_tokens": 3, "temperature": 1.0} | options))
    return policy, resolve_sampling(config, tiny.tokenizer(), model.config, model.generation_config)


def assert_same(ours, theirs):
    assert torch.equal(ours.lengths, theirs.lengths)
    assert torch.equal(ours.ids[ours.mask], theirs.ids[theirs.mask])
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2-tied", "qwen3"])
def test_fused_layers_sample_what_generate_samples(kind):
    pytest.importorskip("triton")
    policy, options = setup(small(kind))
    prompts = tiny.prompts(3).to(DEVICE)
    engine = GraphEngine(policy, use_kernels=True, max_rows=2)
    ours = engine.generate(prompts, options, DRAW)
    assert isinstance(engine._trunk, FusedTrunk)
    assert_same(ours, HFEngine(policy).generate(prompts, options, DRAW))
    if kind != "llama" and DEVICE.type == "cpu":
        return  # the interpreter is slow
    with torch.no_grad():  # an update in place reaches the weights that lie side by side
        for parameter in policy.store.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    trunk = engine._trunk
    changed = engine.generate(prompts, options, DRAW)
    assert_same(changed, HFEngine(policy).generate(prompts, options, DRAW))
    assert engine._trunk is trunk
    assert changed.ids.shape != ours.ids.shape or not torch.equal(changed.ids, ours.ids)


def test_kernels_serve_layers_that_are_not_fused():
    """A model's own forward, with our attention, sampler and board in Triton: soft caps, windows, entropies."""
    pytest.importorskip("triton")
    from test_graph_engine import make

    policy, options = setup(make("gemma2", 2.0), entropy=True)
    prompts = tiny.prompts(3).to(DEVICE)
    engine = GraphEngine(policy, use_kernels=True, max_rows=2, prefill_tokens=2)
    ours, theirs = engine.generate(prompts, options, DRAW), HFEngine(policy).generate(prompts, options, DRAW)
    assert type(engine._trunk) is HFTrunk
    assert_same(ours, theirs)
    torch.testing.assert_close(ours.entropy, theirs.entropy, rtol=1e-4, atol=1e-4)


def test_adapters_are_fused_too():
    pytest.importorskip("triton")
    model = add_adapters(small(), LoRAConfig(r=4), [POLICY], seed=0)

    def move():
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()

    move()
    policy, options = setup(model, POLICY)
    prompts = tiny.prompts(2).to(DEVICE)
    engine = GraphEngine(policy, use_kernels=True)
    assert_same(engine.generate(prompts, options, DRAW), HFEngine(policy).generate(prompts, options, DRAW))
    trunk = engine._trunk
    assert isinstance(trunk, FusedTrunk)
    assert isinstance(trunk.layers[0].qkv, _Adapted)
    move()
    assert_same(engine.generate(prompts, options, DRAW), HFEngine(policy).generate(prompts, options, DRAW))
    assert engine._trunk is trunk


@pytest.mark.parametrize("merged", [False, True])
def test_merged_adapters_are_not_added_again(merged):
    model = add_adapters(tiny.model(scale=3.0), LoRAConfig(r=4), [POLICY], seed=0)
    policy, options = setup(model, POLICY)
    prompts = tiny.prompts(4).to(DEVICE)
    engine = GraphEngine(policy)
    first = engine.generate(prompts, options, DRAW)
    trunk = engine._trunk
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    expected = HFEngine(policy).generate(prompts, options, DRAW)
    if merged:
        model.merge_adapter()
    ours = engine.generate(prompts, options, DRAW)
    assert_same(ours, expected)
    assert (engine._trunk is trunk) != merged  # what was captured before the merge does not hold after it
    assert ours.ids.shape != first.ids.shape or not torch.equal(ours.ids, first.ids)


@pytest.mark.parametrize("adapter", [POLICY, None])
def test_a_projection_with_adapters_is_that_of_peft(adapter):
    model = add_adapters(tiny.model("qwen2"), LoRAConfig(r=4, use_rslora=True), [POLICY, "value"], seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    attention = model.get_base_model().model.layers[0].self_attn
    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    x = torch.randn(5, 32)
    with torch.no_grad(), RoleModel(model).using(adapter):
        expected = torch.cat([m(x) for m in modules], dim=1)
        torch.testing.assert_close(side_by_side(modules, adapter)(x), expected, rtol=1e-4, atol=1e-4)


def test_weights_side_by_side_stay_parameters_and_are_no_copy(tmp_path):
    layers = [torch.nn.Linear(4, n) for n in (3, 2, 5)]
    before = [layer.weight.detach().clone() for layer in layers]
    whole = _join([layer.weight for layer in layers])
    assert all(torch.equal(layer.weight, w) for layer, w in zip(layers, before, strict=True))
    assert whole.untyped_storage().data_ptr() == layers[2].weight.untyped_storage().data_ptr()
    again = _join([layer.weight for layer in layers])
    assert again.data_ptr() == whole.data_ptr()  # nothing moves the second time
    optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()], lr=0.1)
    torch.cat([layer(torch.ones(1, 4)) for layer in layers], 1).sum().backward()
    optimizer.step()
    assert torch.equal(whole, torch.cat([layer.weight for layer in layers]))
    torch.save([layer.state_dict() for layer in layers], tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(loaded[1]["weight"], layers[1].weight)


def test_weights_that_have_moved_are_found_again():
    policy, options = setup(tiny.model(scale=3.0))
    prompts = tiny.prompts(3).to(DEVICE)
    engine = GraphEngine(policy)
    engine.generate(prompts, options, DRAW)
    trunk = engine._trunk
    for parameter in policy.store.parameters():
        parameter.data = parameter.data.clone() * 1.1
    assert_same(engine.generate(prompts, options, DRAW), HFEngine(policy).generate(prompts, options, DRAW))
    assert engine._trunk is not trunk


def test_a_model_it_cannot_serve_is_refused_or_left_to_generate(monkeypatch, capsys):
    model = AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2, eos_token_id=2, bos_token_id=1)
    ).eval()
    policy, options = setup(model)
    prompts = tiny.prompts(3).to(DEVICE)
    with pytest.raises(Unservable, match=r"The graph engine cannot serve BloomForCausalLM: its attention does not go"):
        build_engine("graph", policy).generate(prompts, options, DRAW)
    said = []
    monkeypatch.setattr("lit_ppo.rollout.select.rank_zero_info", said.append)
    engine = AutoEngine(policy)
    engine.engine = GraphEngine(policy)  # as on CUDA
    for _ in range(2):
        ours = engine.generate(prompts, options, DRAW)
    assert_same(ours, HFEngine(policy).generate(prompts, options, DRAW))
    assert len(said) == 1
    assert "cannot serve BloomForCausalLM" in said[0]


def test_a_trunk_that_computes_something_else_is_found_out(monkeypatch):
    policy, options = setup(tiny.model(scale=3.0))
    inner = HFTrunk.logits
    monkeypatch.setattr(HFTrunk, "logits", lambda self, hidden: inner(self, hidden * 1.01) + 1)
    with pytest.raises(Unservable, match=r"its logits come out [\d.]+% off those of its own forward"):
        GraphEngine(policy).generate(tiny.prompts(2).to(DEVICE), options, DRAW)


def test_what_a_model_rounds_by_itself_is_not_held_against_a_trunk(monkeypatch):
    """As 4-bit weights do on CUDA, a model may round more than any fixed limit allows."""
    exact, half = (tiny.model(scale=3.0).to(DEVICE, dtype) for dtype in (torch.float32, torch.bfloat16))
    with torch.no_grad():
        for model, low, high in ((exact, 0.0, 1e-5), (half, 1e-3, 0.05)):
            with our_attention(model):
                assert low <= wobble(model) < high
        for error, own, served in ((0.06, 0.025, True), (0.06, 0.015, False)):
            monkeypatch.setattr("lit_ppo.rollout.graph.differs", lambda *_, error=error: error)
            monkeypatch.setattr("lit_ppo.rollout.graph.wobble", lambda *_, own=own: own)
            policy, options = setup(half)
            if served:
                GraphEngine(policy, use_kernels=False).generate(tiny.prompts(2).to(DEVICE), options, DRAW)
                continue
            with pytest.raises(Unservable, match=r"6.0% off those of its own forward, which rounds by 1.5%"):
                GraphEngine(policy, use_kernels=False).generate(tiny.prompts(2).to(DEVICE), options, DRAW)


def test_engines_by_name():
    policy, options = setup(tiny.model())
    assert isinstance(build_engine("hf", policy), HFEngine)
    assert isinstance(build_engine("graph", policy), GraphEngine)
    auto = build_engine("auto", policy)
    auto.wake()
    auto.generate(tiny.prompts(2).to(DEVICE), options, DRAW)
    auto.sleep()
    assert isinstance(auto.engine, GraphEngine if DEVICE.type == "cuda" else HFEngine)
    with pytest.raises(
        ValueError, match=r"`ppo.rollout_engine='grph'` must be one of 'auto', 'hf', 'graph'. Did you mean 'graph'"
    ):
        build_engine("grph", policy)


@pytest.mark.parametrize(("fused", "adapter"), [(False, None), (True, None), (True, POLICY)])
def test_a_four_bit_trunk_is_served(tmp_path, fused, adapter):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("triton")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    # Blocks of 64 weights are quantized together, and 32 outputs computed.
    shape = tiny.SHAPE | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config).eval()
    config = model.config
    if adapter is not None:
        model = add_adapters(model, LoRAConfig(r=4), [adapter], seed=0)
    policy = RoleView(RoleModel(model), "logprobs", adapter)
    options = resolve_sampling(SamplingConfig(max_new_tokens=2), tiny.tokenizer(), config, None)
    prompts = tiny.prompts(2).to(policy.device)
    engine = GraphEngine(policy, use_kernels=fused)
    ours = engine.generate(prompts, options, DRAW)
    assert_same(ours, HFEngine(policy).generate(prompts, options, DRAW))
    assert isinstance(engine._trunk, FusedTrunk) == fused


@pytest.fixture
def mesh():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def test_sharded_layers_that_cannot_be_fused_are_left_to_generate(mesh):
    from torch.distributed.fsdp import fully_shard

    policy, options = setup(tiny.model().cpu())
    fully_shard(policy.store.base, mesh=mesh)
    with pytest.raises(Unservable, match="its sharded layers cannot be fused"):
        GraphEngine(policy).generate(tiny.prompts(2), options, DRAW)


@pytest.mark.parametrize("adapter", [None, POLICY])
def test_gathered_weights_are_decoded_where_they_lie(mesh, adapter):
    pytest.importorskip("triton")
    from torch.distributed.fsdp import fully_shard

    from lit_ppo.sharding.fsdp2 import FSDP2

    model = small().cpu()
    if adapter is not None:
        model = add_adapters(model, LoRAConfig(r=4), [adapter], seed=0)
    policy = RoleView(RoleModel(model), "logprobs", adapter)
    config = SamplingConfig(max_new_tokens=3, temperature=1.0)
    options = resolve_sampling(config, tiny.tokenizer(), tiny.CONFIGS["llama"], None)
    prompts = tiny.prompts(2)
    expected = HFEngine(policy).generate(prompts, options, DRAW)
    for layer in (*decoder_of(policy.store.base).layers, policy.store):
        fully_shard(layer, mesh=mesh)
    engine, sharding = GraphEngine(policy, use_kernels=True), object.__new__(FSDP2)
    sharding.listeners = []
    for _ in range(2):
        with sharding.gathered(policy.store):
            before = [p.data_ptr() for p in policy.store.parameters()]
            assert_same(engine.generate(prompts, options, DRAW), expected)
            assert isinstance(engine._trunk, FusedTrunk)
            assert [p.data_ptr() for p in policy.store.parameters()] == before
            engine.sleep()
            assert engine._trunk is None


def test_memory_is_given_back_when_it_runs_out(monkeypatch):
    policy, options = setup(tiny.model(scale=3.0))
    prompts = tiny.prompts(3).to(DEVICE)
    engine = GraphEngine(policy)
    expected = engine.generate(prompts, options, DRAW)
    step = GraphEngine._step

    def fail(self, *args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(GraphEngine, "_step", fail)
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(prompts, options, DRAW)
    assert engine._cache is None
    monkeypatch.setattr(GraphEngine, "_step", step)
    assert_same(engine.generate(prompts, options, DRAW), expected)


def test_training_is_the_same_with_either_engine(tmp_path):
    weights = []
    for kind in ("hf", "graph"):
        module = PPOLightningModule(
            actor=tiny.folder(), reward=tiny.count_w1, sampling={"max_new_tokens": 6}, optim={"actor_lr": 1e-3},
            ppo={"rollout_engine": kind, "epochs": 1, "rollout_batch_size": 3},
        )  # fmt: skip
        tiny.fit(tmp_path, module)
        assert isinstance(module.engine, HFEngine if kind == "hf" else GraphEngine)
        weights.append(torch.cat([p.detach().flatten() for p in module.actor.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_graphs_are_captured_once_and_sample_what_is_trained():
    policy, options = setup(tiny.model("qwen2-tied", scale=3.0).bfloat16().cuda(), max_new_tokens=30)
    prompts = tiny.prompts(40).to("cuda")
    engine = GraphEngine(policy, max_rows=16)
    engine.generate(prompts, options, DRAW)
    assert isinstance(engine._trunk, FusedTrunk)
    for number in range(3):
        with torch.no_grad():  # an update in place
            for parameter in policy.store.parameters():
                parameter.mul_(1.01)
        rollout = engine.generate(prompts, options, Draw(seed=1, iteration=number))
        engine.sleep()
        with torch.no_grad():
            logprobs, _ = policy(rollout)
        gap = (logprobs - rollout.logprobs).abs()
        assert float(gap[rollout.mask].mean()) < 0.02
    assert engine.stats["captures"] == len(engine._graphs) > 0  # one for each bucket that a rollout came to
