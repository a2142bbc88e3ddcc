"""Log-probs and values of response tokens, against the obvious computation with all logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from lit_ppo.config import LoRAConfig, RoleConfig
from lit_ppo.experience import Rollout
from lit_ppo.roles import logprobs as lp
from lit_ppo.roles.adapters import POLICY, VALUE, active_adapter, adapter_aware, add_adapters, tuner_layers
from lit_ppo.roles.build import build_roles, plan_roles
from lit_ppo.roles.loading import critic_from, disable_dropout, fingerprint
from lit_ppo.roles.model import RoleModel, RoleView
from lit_ppo.roles.names import saved_names


def rollout(count: int = 6, width: int = 5, pad: int = 0) -> Rollout:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, width + 1, (count,), generator=generator)
    lengths[0] = width
    ids = torch.randint(3, tiny.VOCAB, (count, width), generator=generator)
    mask = torch.arange(width) < lengths[:, None]
    zeros = torch.zeros(count, width)
    return Rollout(tiny.prompts(count, pad), torch.where(mask, ids, pad), lengths, lengths < width, zeros)


def naive(model: nn.Module, batch: Rollout, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of each row alone, unpadded, from full logits in float64."""
    logprobs, entropies = torch.zeros(batch.ids.shape), torch.zeros(batch.ids.shape)
    for i in range(len(batch)):
        n, r = int(batch.prompts.lengths[i]), int(batch.lengths[i])
        ids = torch.cat([batch.prompts.ids[i, -n:], batch.ids[i, :r]])[None]
        logits = model(input_ids=ids).logits[0].double() / temperature
        table = logits.log_softmax(-1)
        for t in range(r):
            logprobs[i, t] = table[n - 1 + t, ids[0, n + t]]
            entropies[i, t] = -(table[n - 1 + t].exp() * table[n - 1 + t]).sum()
    return logprobs, entropies


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 17),
    vocab=st.integers(2, 37),
    rows=st.integers(1, 9),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    suppressed=st.booleans(),
)
def test_chunked_log_probs_equal_the_naive_ones_in_value_and_gradient(tokens, vocab, rows, temperature, suppressed):
    generator = torch.Generator().manual_seed(tokens * 100 + vocab)
    hidden = torch.randn(tokens, 8, generator=generator, requires_grad=True)
    head = nn.Linear(8, vocab, bias=False)
    targets = torch.randint(0, vocab - 1, (tokens,), generator=generator)
    suppress = torch.tensor([vocab - 1]) if suppressed else None

    logits = head(hidden) / (temperature or 1.0)
    if suppressed:
        logits = logits.index_fill(-1, torch.tensor([vocab - 1]), float("-inf"))
    table = logits.log_softmax(-1)
    probs = table.exp()
    expected_entropy = -(probs * torch.where(probs > 0, table, 0.0)).sum(-1)
    expected = table.gather(-1, targets[:, None])[:, 0]
    weights = torch.randn(tokens, generator=generator)
    expected_grads = torch.autograd.grad((expected * weights + expected_entropy).sum(), [hidden, head.weight])

    got, entropy = lp.token_logprobs(
        hidden,
        targets,
        head,
        temperature=temperature,
        suppress=suppress,
        entropy=True,
        chunk_elements=rows * vocab,
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-4, atol=1e-5)
    grads = torch.autograd.grad((got * weights + entropy).sum(), [hidden, head.weight])
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        again, _ = lp.token_logprobs(hidden, targets, head, temperature=temperature, suppress=suppress)
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5)


def test_no_tensor_of_all_logits_is_ever_held():
    hidden, head = torch.randn(1000, 8, requires_grad=True), nn.Linear(8, 512, bias=False)
    largest = 0

    def pack(x):
        nonlocal largest
        largest = max(largest, x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result, _ = lp.token_logprobs(
            hidden, torch.zeros(1000, dtype=torch.long), head, entropy=True, chunk_elements=50 * 512
        )
        result.sum().backward()
    assert largest <= 50 * 512  # one chunk, not 1000 * 512


def test_a_bf16_head_is_computed_in_float32_from_its_logits():
    hidden, head = torch.randn(5, 8).bfloat16(), nn.Linear(8, 11).bfloat16()
    got, entropy = lp.token_logprobs(hidden, torch.arange(5), head, entropy=True)
    assert got.dtype == entropy.dtype == torch.float32
    expected = head(hidden).float().log_softmax(-1)[torch.arange(5), torch.arange(5)]
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", list(tiny.CONFIGS))
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_padded_log_probs_equal_those_of_each_row_alone(kind, temperature):
    model, batch = tiny.model(kind), rollout()
    view = RoleView(RoleModel(model), "logprobs")
    with torch.no_grad():
        got, entropy = view(batch, temperature=temperature, entropy=True)
        expected, expected_entropy = naive(model, batch, temperature)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-4, atol=1e-5)
    assert not got[~batch.mask].any()


def test_what_is_under_the_padding_changes_nothing():
    model, batch, other = tiny.model(), rollout(pad=0), rollout(pad=2)
    assert not torch.equal(batch.prompts.ids, other.prompts.ids)
    view = RoleView(RoleModel(model), "logprobs")
    with torch.no_grad():
        assert torch.equal(view(batch)[0], view(other)[0])


def test_values_are_those_before_each_token():
    """V_t may depend on the prompt and on tokens before t, and on nothing later."""
    critic = critic_from(tiny.model())
    nn.init.normal_(critic.score.weight)
    view, batch = RoleView(RoleModel(critic), "values"), rollout(width=5)
    with torch.no_grad():
        values, none = view(batch)
        assert none is None
        for t in range(5):
            ids = batch.ids.clone()
            ids[:, t:] = 7  # what is emitted at t and after
            changed, _ = view(replace(batch, ids=ids))
            torch.testing.assert_close(changed[:, : t + 1], values[:, : t + 1])
            live = batch.mask[:, t + 1 :].any()
            assert not live or not torch.allclose(changed[:, t + 1 :], values[:, t + 1 :])
        row, n = 0, int(batch.prompts.lengths[0])
        hidden = critic.model(input_ids=batch.prompts.ids[:1, -n:]).last_hidden_state
        torch.testing.assert_close(values[row, 0], critic.score(hidden[0, -1])[0])


def test_a_critic_made_from_the_policy_starts_at_zero_and_its_trunk_is_a_copy():
    model = tiny.model("qwen2-tied")
    critic = critic_from(model)
    values, _ = RoleView(RoleModel(critic), "values")(rollout())
    assert not values.any()
    for ours, theirs in zip(critic.model.parameters(), model.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()


def test_dropout_is_off_even_in_train_mode():
    config = tiny.CONFIGS["llama"].__class__(**{**tiny.CONFIGS["llama"].to_dict(), "attention_dropout": 0.5})
    model = type(tiny.model())(config)
    model.extra = nn.Dropout(0.5)
    view, batch = RoleView(RoleModel(model), "logprobs"), rollout()
    model.train()
    with torch.no_grad():
        assert not torch.equal(view(batch)[0], view(batch)[0])  # the test can fail
        disable_dropout(model)
        assert torch.equal(view(batch)[0], view(batch)[0])


@pytest.fixture
def shared():
    plan = plan_roles(
        actor=tiny.model(),
        critic=None,
        reference=None,
        critic_start=None,
        layout="shared",
        lora=LoRAConfig(r=4),
        has_critic=True,
        has_reference=True,
        seed=0,
    )
    roles = build_roles(plan, torch.device("cpu"))
    for name, parameter in roles.actor.store.named_parameters():
        if "lora_B" in name or "value_head" in name:
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    return roles


def test_a_shared_trunk_gives_three_different_roles(shared):
    batch = rollout()
    bare = RoleView(RoleModel(tiny.model()), "logprobs")
    with torch.no_grad():
        torch.testing.assert_close(shared.reference(batch)[0], bare(batch)[0])
        assert not torch.allclose(shared.actor(batch)[0], bare(batch)[0])
    names = {role: [n for n, _ in named] for role, named in shared.trained().items()}
    assert not set(names["actor"]) & set(names["critic"])
    assert all(f".{POLICY}." in n for n in names["actor"])
    assert "value_head.weight" in names["critic"]
    assert all(f".{VALUE}." in n or n == "value_head.weight" for n in names["critic"])
    assert all(p.requires_grad for named in shared.trained().values() for _, p in named)
    frozen = [n for n, p in shared.actor.store.named_parameters() if not p.requires_grad]
    assert frozen
    assert not set(frozen) & saved_names(shared.actor.store)


def joint_gradients(shared, batch: Rollout) -> dict[str, torch.Tensor]:
    store = shared.actor.store
    store.zero_grad(set_to_none=True)
    loss = shared.actor(batch)[0].sum() + shared.critic(batch)[0].square().sum()
    loss.backward()
    return {n: p.grad.clone() for n, p in store.named_parameters() if p.grad is not None}


def test_a_joint_backward_through_both_adapters_equals_two_single_ones(shared):
    batch, store = rollout(), shared.actor.store
    joint = joint_gradients(shared, batch)
    single: dict[str, torch.Tensor] = {}
    for view, reduce in ((shared.actor, lambda x: x.sum()), (shared.critic, lambda x: x.square().sum())):
        store.zero_grad(set_to_none=True)
        reduce(view(batch)[0]).backward()
        single |= {n: p.grad.clone() for n, p in store.named_parameters() if p.grad is not None and p.grad.any()}
    assert set(single) == {n for n, g in joint.items() if g.any()}
    for name, gradient in single.items():
        torch.testing.assert_close(joint[name], gradient)


def test_a_recompute_uses_the_adapter_of_its_forward(shared):
    batch, store = rollout(), shared.actor.store
    expected = joint_gradients(shared, batch)
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # the new and the old one
    next(getattr(store.base, name) for name in names if hasattr(store.base, name))({"use_reentrant": False})
    layers = [m for m in store.modules() if hasattr(m, "_gradient_checkpointing_func")]
    assert layers
    store.train()

    def use(function):
        for layer in layers:
            layer._gradient_checkpointing_func = function

    use(lambda f, *a: checkpoint(f, *a, use_reentrant=False))
    wrong = joint_gradients(shared, batch)  # the recompute of the policy runs with the value adapter, or none
    assert any(not torch.allclose(wrong[n], g) for n, g in expected.items())
    use(store.checkpoint_wrapper_hook(lambda f, *a: checkpoint(f, *a, use_reentrant=False)))
    right = joint_gradients(shared, batch)
    for name, gradient in expected.items():
        torch.testing.assert_close(right[name], gradient)


def test_the_adapter_that_was_on_comes_back_after_an_error():
    model = add_adapters(tiny.model(), LoRAConfig(r=2), [POLICY, VALUE], seed=0)
    layers = tuner_layers(model)
    with active_adapter(layers, VALUE):
        with pytest.raises(RuntimeError, match="inside"), active_adapter(layers, None):
            raise RuntimeError("inside")
        assert layers[0]._active_adapter == [VALUE]
        assert not layers[0]._disable_adapters
    assert adapter_aware(lambda f, *a: f(*a), layers)(lambda x: x + 1, 1) == 2


def test_a_lora_critic_trains_its_head_and_adapters():
    plan = plan_roles(
        actor=tiny.folder(),
        critic=None,
        reference=None,
        critic_start=None,
        layout="separate",
        lora=LoRAConfig(r=2),
        has_critic=True,
        has_reference=True,
        seed=0,
    )
    roles = build_roles(plan, torch.device("cpu"))
    names = [n for n, _ in roles.trained()["critic"]]
    assert any(n.endswith("score.weight") for n in names)
    assert not any("score" in n and "lora_" in n for n in names)
    assert roles.reference is not None
    assert roles.reference.store is roles.actor.store
    loss = (roles.critic(rollout())[0] - 1).square().sum()
    loss.backward()
    assert {n for n, p in roles.trained()["critic"] if p.grad is not None and p.grad.any()}


def test_adapters_start_with_the_same_numbers_whatever_the_default_dtype():
    """`bf16-true` builds models with bfloat16 as the default: the adapters are drawn in float32 all the same."""
    one, other = {}, {}
    for found, dtype in ((one, torch.float32), (other, torch.bfloat16)):
        model = tiny.model()
        torch.set_default_dtype(dtype)
        wrapped = add_adapters(model, LoRAConfig(r=4), [POLICY], seed=3)
        found |= {name: p.detach().float() for name, p in wrapped.named_parameters() if "lora_A" in name}
        torch.set_default_dtype(torch.float32)
    assert one
    for name, drawn in one.items():
        torch.testing.assert_close(other[name], drawn, rtol=2**-8, atol=0)


def test_lora_on_layers_that_do_not_exist_names_those_that_do():
    with pytest.raises(ValueError, match=r"`lora.target_modules=\['q_prj'\]` does not fit .*q_proj"):
        add_adapters(tiny.model(), LoRAConfig(target_modules=["q_prj"]), [POLICY], seed=0)


def test_the_critic_starts_from_a_reward_model_of_the_same_architecture_only():
    same, other = tiny.folder("llama", labels=1, seed=3), tiny.folder("qwen2", labels=1)
    for start, expected in ((same, same), (other, None)):
        plan = plan_roles(
            actor=tiny.folder("llama"),
            critic=None,
            reference=None,
            critic_start=RoleConfig(start),
            layout="separate",
            lora=None,
            has_critic=True,
            has_reference=False,
            seed=0,
        )
        assert (None if plan.critic is None else plan.critic.source) == expected
    roles = build_roles(replace(plan, critic=RoleConfig(source=same)), torch.device("cpu"))
    assert roles.critic is not None
    assert roles.critic.store.model.score.weight.any()  # a reward model's head is kept


GEMMA = tiny.SHAPE | {"head_dim": 8}
SQUASHED = {
    "gemma": transformers.GemmaConfig(**GEMMA),
    "gemma2": transformers.Gemma2Config(**GEMMA, final_logit_softcapping=2.0, attn_implementation="eager"),
    "cohere": transformers.CohereConfig(**tiny.SHAPE, logit_scale=0.25),
    "granite": transformers.GraniteConfig(**tiny.SHAPE, logits_scaling=0.5),
}


@pytest.mark.parametrize("kind", list(SQUASHED))
def test_logits_that_are_scaled_or_capped_are_so_in_log_probs(kind):
    model, batch = sharp(AutoModelForCausalLM.from_config(SQUASHED[kind])), rollout()
    store = RoleModel(model)
    store.check_head("actor")
    with torch.no_grad():
        got, entropy = RoleView(store, "logprobs")(batch, temperature=0.7, entropy=True)
        expected, expected_entropy = naive(model, batch, 0.7)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-4, atol=1e-5)


def sharp(model):
    """Weights large enough for a cap or a scale to matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    return model.eval()


def test_an_architecture_that_changes_its_logits_in_another_way_is_refused():
    class Squared(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * output.logits.abs()
            return output

    with pytest.raises(ValueError, match=r"`actor` is a Squared, whose logits are not .* changed in another way"):
        RoleModel(sharp(Squared(tiny.CONFIGS["llama"]))).check_head("actor")
    RoleModel(tiny.model()).check_head("actor")


def test_a_fingerprint_tells_weights_apart_and_not_dtypes():
    model = tiny.model()
    mark = fingerprint(model.named_parameters())
    assert fingerprint(tiny.model().named_parameters()) == mark
    assert fingerprint(tiny.model().bfloat16().named_parameters()) == mark
    assert fingerprint(tiny.model(seed=1).named_parameters()) != mark
