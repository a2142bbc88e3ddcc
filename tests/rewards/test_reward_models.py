import re
from pathlib import Path

import pytest
import torch
from tiny_rewards import CHATML, RESPONSES, SIZES, build_model, bytes_tokenizer, pieces_tokenizer
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from lit_ppo.rewards import ModelReward, RewardError, build_rewards

TEXTS = ["the film was" + " " * bool(r) + r for r in RESPONSES]


def loaded(source, **options):
    rewards = build_rewards({"source": source, **options} if isinstance(source, str) else source)
    rewards.load("cpu")
    return rewards


def one_by_one(folder, tokenizer, texts):
    """Score each text alone and unpadded, the head at its last token, by transformers' own classes."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    scores = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            if hasattr(model, "score"):
                hidden = getattr(model, model.base_model_prefix)(ids).last_hidden_state
                scores.append(model.score(hidden[0, -1]).item())
            else:
                scores.append(model(ids).logits.item())
    return torch.tensor(scores)


@pytest.mark.parametrize("pad", [None, "<|end|>", "<|pad|>"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_decoders_are_read_at_the_last_real_token_whatever_the_padding(kind, pad, save, roll, policy_tokenizer):
    tokenizer = bytes_tokenizer(pad=pad)
    folder = save(kind, tokenizer, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    rollout = roll()
    wanted = one_by_one(folder, tokenizer, TEXTS)
    assert wanted.unique().numel() == len(TEXTS)
    for size in (1, 2, 64):
        scores = loaded(folder, batch_size=size).score(rollout, policy_tokenizer)
        torch.testing.assert_close(scores.total, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scores.parts["rm"], wanted, atol=1e-5, rtol=1e-5)


def test_an_end_token_that_is_also_the_padding_is_read_where_the_text_has_it(save, roll, policy_tokenizer):
    tokenizer = bytes_tokenizer(pad="<|end|>", template="{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}")
    folder = save("llama", tokenizer, pad_token_id=tokenizer.pad_token_id)
    chats = [[{"role": "user", "content": "the film was"}]] * len(RESPONSES)
    texts = [f"the film was<|end|>{r}<|end|>" for r in RESPONSES]
    assert tokenizer(texts[0])["input_ids"][-1] == tokenizer.pad_token_id
    scores = loaded(folder).score(roll(messages=chats), policy_tokenizer)
    torch.testing.assert_close(scores.total, one_by_one(folder, tokenizer, texts), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_encoders_pool_as_they_were_trained_to(kind, save, roll, policy_tokenizer):
    folder = save(kind)
    wanted = one_by_one(folder, pieces_tokenizer(), TEXTS)
    for size in (1, 64):
        total = loaded(folder, batch_size=size).score(roll(), policy_tokenizer).total
        torch.testing.assert_close(total, wanted, atol=1e-5, rtol=1e-5)


def test_heads_of_another_kind_are_given_texts_of_one_length(save, roll, policy_tokenizer):
    from transformers import FNetConfig, FNetForSequenceClassification

    torch.manual_seed(0)
    config = FNetConfig(**SIZES, type_vocab_size=2)  # it has no attention mask: padding changes its output
    reward = ModelReward(FNetForSequenceClassification(config), pieces_tokenizer())
    rewards = loaded(reward)
    together = rewards.score(roll(), policy_tokenizer).total
    alone = torch.cat([rewards.score(roll([r]), policy_tokenizer).total for r in RESPONSES])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_decoders_that_can_only_pool_by_the_pad_id_are_refused():
    from transformers import ModernBertDecoderConfig, ModernBertDecoderForSequenceClassification

    config = ModernBertDecoderConfig(
        **SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
    )
    reward = ModelReward(ModernBertDecoderForSequenceClassification(config), bytes_tokenizer())
    with pytest.raises(RewardError, match="modernbert-decoder models are not supported: they pool by the pad id"):
        loaded(reward)


def test_the_text_is_the_prompt_without_special_tokens_and_the_response(save, roll, policy_tokenizer):
    folder = save("llama")
    plain = loaded(folder).score(roll(), policy_tokenizer).total
    marked = roll()
    marked.prompts.text = ["<s>the film was</s>"] * len(RESPONSES)
    torch.testing.assert_close(loaded(folder).score(marked, policy_tokenizer).total, plain)


def test_special_tokens_that_are_only_marked_as_such_are_removed_too(roll):
    from lit_ppo.rewards import Samples

    tokenizer = bytes_tokenizer(pad="<|pad|>")  # <|im_start|> is none of its named tokens
    rollout = roll(["a"])
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n")
    rollout.prompts.ids, rollout.prompts.lengths = torch.tensor([ids]), torch.tensor([len(ids)])
    rollout.prompts.text = ["<|im_start|>user\nhi<|im_end|>\n"]
    rollout.ids, rollout.lengths = torch.tensor([tokenizer.encode("good<|im_end|>")]), torch.tensor([2])
    rollout.lengths[0] = rollout.ids.shape[1]
    samples = Samples.from_rollout(rollout, tokenizer)
    assert samples.plain_prompts == ["user\nhi\n"]
    assert samples.responses == ["good"]
    assert samples.prompts == ["<|im_start|>user\nhi<|im_end|>\n"]


CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "the film was"}]


def rendered(*turns):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


@pytest.mark.parametrize("use", [None, True])
def test_a_chat_is_rendered_with_the_reward_models_template(use, save, roll, policy_tokenizer):
    tokenizer = bytes_tokenizer(template=CHATML, bos=True)  # the template writes no BOS, so there is none
    folder = save("llama", tokenizer)
    texts = [rendered(("system", "be kind"), ("user", "the film was"), ("assistant", r)) for r in RESPONSES]
    wanted = one_by_one(folder, lambda text: tokenizer(text, add_special_tokens=False), texts)
    rollout = roll(messages=[CHAT] * len(RESPONSES))
    scores = loaded(folder, use_chat_template=use).score(rollout, policy_tokenizer)
    torch.testing.assert_close(scores.total, wanted, atol=1e-5, rtol=1e-5)


def test_use_chat_template_true_makes_a_plain_prompt_the_users_turn_and_false_never_renders(
    save, roll, policy_tokenizer
):
    tokenizer = bytes_tokenizer(template=CHATML, bos=True)
    folder = save("llama", tokenizer)
    texts = [rendered(("user", "the film was"), ("assistant", r)) for r in RESPONSES]
    wanted = one_by_one(folder, lambda text: tokenizer(text, add_special_tokens=False), texts)
    total = loaded(folder, use_chat_template=True).score(roll(), policy_tokenizer).total
    torch.testing.assert_close(total, wanted, atol=1e-5, rtol=1e-5)

    plain = one_by_one(folder, tokenizer, TEXTS)  # with its BOS
    for use, messages in ((None, None), (False, [CHAT] * len(RESPONSES))):
        total = loaded(folder, use_chat_template=use).score(roll(messages=messages), policy_tokenizer).total
        torch.testing.assert_close(total, plain, atol=1e-5, rtol=1e-5)


def test_a_response_goes_on_with_a_turn_that_the_prompt_began(save, roll, policy_tokenizer):
    tokenizer = bytes_tokenizer(template=CHATML)
    folder = save("llama", tokenizer)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the film was"}]
    wanted = one_by_one(folder, tokenizer, [rendered(("user", "hi"), ("assistant", "the film was awful"))])
    total = loaded(folder).score(roll(["awful"], messages=[chat]), policy_tokenizer).total
    torch.testing.assert_close(total, wanted, atol=1e-5, rtol=1e-5)


def test_a_template_that_fails_names_the_sample(save, roll, policy_tokenizer):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    rewards = loaded(save("llama", bytes_tokenizer(template=template)))
    with pytest.raises(RewardError, match=r"`rm`: its chat template failed on sample 0 .*no system turn"):
        rewards.score(roll(["a"], messages=[CHAT]), policy_tokenizer)


@pytest.mark.parametrize(
    ("kind", "options", "limit"),
    [
        ("gpt2", {"max_position_embeddings": 24}, 24),
        ("bert", {"max_position_embeddings": 24}, 24),
        ("roberta", {"max_position_embeddings": 26}, 24),  # its positions start behind the padding index
        ("llama", {"max_position_embeddings": 24}, 24),
    ],
)
def test_a_text_longer_than_the_context_loses_its_start_but_not_its_special_token(
    kind, options, limit, save, roll, policy_tokenizer
):
    tokenizer = pieces_tokenizer() if "ert" in kind else bytes_tokenizer(bos=True)
    folder = save(kind, tokenizer, **options)
    long = " ".join(["+"] * 40 + ["good"])
    ids = tokenizer("the film was " + long)["input_ids"]
    assert len(ids) > limit
    front = tokenizer.cls_token_id if "ert" in kind else tokenizer.bos_token_id
    assert ids[0] == front
    wanted = one_by_one(folder, lambda text: {"input_ids": [front, *ids[-(limit - 1) :]]}, [""])
    rewards = loaded(folder)
    with pytest.warns(UserWarning, match=rf"longer than its context of {limit} tokens lose the start .* \(1 of 2 in"):
        scores = rewards.score(roll([long, "good"]), policy_tokenizer)
    torch.testing.assert_close(scores.total[:1], wanted, atol=1e-5, rtol=1e-5)
    assert scores.truncated == {"rm": 1}
    rewards.score(roll([long, "good"]), policy_tokenizer)  # a second warning would be an error here
    assert rewards.score(roll(["good"]), policy_tokenizer).truncated == {"rm": 0}


def test_max_length_and_the_tokenizers_own_limit_cut_too(save, roll, policy_tokenizer):
    tokenizer = bytes_tokenizer()
    tokenizer.model_max_length = 8
    folder = save("llama", tokenizer)
    for options, limit in (({}, 8), ({"max_length": 5}, 5), ({"max_length": 1}, 1), ({"max_length": 12}, 12)):
        rewards = loaded(folder, **options)
        text = "the film was good good good good good good good good good good good good good good"
        ids = tokenizer(text, verbose=False)["input_ids"]
        wanted = one_by_one(folder, lambda text, end=ids[-limit:]: {"input_ids": end}, [""])
        with pytest.warns(UserWarning, match=f"context of {limit} tokens"):
            total = rewards.score(roll([text[len("the film was ") :]]), policy_tokenizer).total
        torch.testing.assert_close(total, wanted, atol=1e-5, rtol=1e-5)


def test_max_length_beyond_what_the_model_can_index_is_refused(save):
    folder = save("gpt2", max_position_embeddings=24)
    with pytest.raises(RewardError, match="`max_length=25` is longer than its context of 24 tokens"):
        build_rewards({"source": folder, "max_length": 25}).check()


def test_a_token_outside_the_models_vocabulary_is_named_before_it_is_looked_up(save, roll, policy_tokenizer):
    rewards = loaded(save("llama", vocab_size=100))
    with pytest.raises(RewardError, match=r"makes token \d+, but the model has 100.*First seen in sample 0"):
        rewards.score(roll(), policy_tokenizer)


def test_a_pad_token_outside_the_models_vocabulary_does_no_harm(roll, policy_tokenizer):
    tokenizer, added = bytes_tokenizer(), bytes_tokenizer()
    model = build_model("llama", vocab_size=len(tokenizer))
    added.add_special_tokens({"pad_token": "<new>"})
    assert added.pad_token_id >= model.config.vocab_size
    total = loaded((model, added)).score(roll(), policy_tokenizer).total
    alone = [loaded((model, tokenizer)).score(roll([r]), policy_tokenizer).total for r in RESPONSES]
    torch.testing.assert_close(total, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_an_empty_text_is_read_as_a_single_bos(save, roll, policy_tokenizer):
    tokenizer = bytes_tokenizer()
    folder = save("llama", tokenizer)
    rollout = roll(["", "awful"], prompt="")
    wanted = one_by_one(folder, tokenizer, ["<|bos|>", "awful"])
    torch.testing.assert_close(loaded(folder).score(rollout, policy_tokenizer).total, wanted, atol=1e-5, rtol=1e-5)
    tokenizer.bos_token = tokenizer.eos_token = None
    bare = loaded(ModelReward(build_model("llama"), tokenizer))
    with pytest.raises(RewardError, match="a text is empty, and its tokenizer has none of bos_token_id"):
        bare.score(rollout, policy_tokenizer)


def test_the_same_tokenizer_as_the_policys(save, roll, policy_tokenizer):
    folder = save("llama", policy_tokenizer)
    wanted = one_by_one(folder, policy_tokenizer, TEXTS)
    torch.testing.assert_close(loaded(folder).score(roll(), policy_tokenizer).total, wanted, atol=1e-5, rtol=1e-5)


def test_models_are_frozen_in_eval_mode_and_in_float32_on_the_cpu(save, roll, policy_tokenizer):
    rewards = build_rewards(save("llama"))
    assert rewards.models == {}
    with pytest.raises(RewardError, match="its model is not loaded"):
        rewards.score(roll(), policy_tokenizer)
    rewards.load("cpu")
    model = rewards.models["rm"]
    rewards.load("cpu")
    assert rewards.models["rm"] is model
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not rewards.score(roll(), policy_tokenizer).total.requires_grad


def test_dtype_applies_to_all_but_the_head(save, roll, policy_tokenizer):
    folder = save("llama")
    exact = loaded(folder).score(roll(), policy_tokenizer).total
    rewards = loaded(folder, dtype="bfloat16")
    model = rewards.models["rm"]
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert model.score.weight.dtype == torch.float32
    scores = rewards.score(roll(), policy_tokenizer).total
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, scores.bfloat16().float())
    torch.testing.assert_close(scores, exact, atol=0.1, rtol=0.1)


def test_the_precision_of_the_trainer_is_not_the_reward_models(save, roll, policy_tokenizer):
    rewards = loaded(save("llama"))
    wanted = rewards.score(roll(), policy_tokenizer).total
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total = rewards.score(roll(), policy_tokenizer).total
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(total, wanted, atol=1e-6, rtol=1e-6)


def test_weights_load_under_a_callers_contexts(save, roll, policy_tokenizer):
    folder = save("llama")
    with torch.inference_mode(), torch.device("meta"):
        rewards = loaded(folder)
    assert not next(rewards.models["rm"].parameters()).is_inference()
    wanted = loaded(folder).score(roll(), policy_tokenizer).total
    torch.testing.assert_close(rewards.score(roll(), policy_tokenizer).total, wanted)


def test_a_module_comes_with_its_tokenizer(roll, policy_tokenizer):
    tokenizer, model = bytes_tokenizer(), build_model("gpt2", resid_pdrop=0.5)
    assert model.train().training
    named = build_model("gpt2")
    named.tokenizer = tokenizer
    for spec in ((model, tokenizer), [model, tokenizer], ModelReward(model, tokenizer), named):
        rewards = loaded(spec)
        assert list(rewards.models) == ["GPT2ForSequenceClassification"]
        (module,) = rewards.models.values()
        assert not module.training
        assert not any(p.requires_grad for p in module.parameters())
        first = rewards.score(roll(), policy_tokenizer).total
        assert torch.equal(first, rewards.score(roll(), policy_tokenizer).total)  # dropout is off
        assert (first != 0).all()


def test_modules_that_cannot_be_reward_models_are_refused():
    with pytest.raises(TypeError, match="has no tokenizer: pass `ModelReward"):
        build_rewards(build_model("llama"))
    with pytest.raises(TypeError, match="`Linear` is a Linear, not a transformers sequence-classification model"):
        build_rewards(torch.nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"`reward.dtype='bfloat16'` has no effect on a reward model that is already"):
        ModelReward(build_model("llama"), bytes_tokenizer(), dtype="bfloat16")
    with pytest.raises(ValueError, match=r"`reward.timeout=3` has no effect on a reward model"):
        ModelReward("owner/name", timeout=3)
    with pytest.raises(TypeError, match="uses the tokenizer saved there"):
        ModelReward("owner/name", bytes_tokenizer())


def test_more_than_one_label_is_refused_before_weights_are_read(save):
    rewards = build_rewards(save("bert", num_labels=3))
    with pytest.raises(RewardError, match=r"`config.num_labels` is 3 \(BertForSequenceClassification\).*num_labels=1"):
        rewards.check()
    given = build_rewards((build_model("llama", num_labels=2), bytes_tokenizer()))
    with pytest.raises(RewardError, match=r"`config.num_labels` is 2"):
        given.check()


def test_a_language_model_is_refused(tmp_path):
    options = {k: v for k, v in SIZES.items() if k != "num_labels"}
    LlamaForCausalLM(LlamaConfig(**options)).save_pretrained(tmp_path / "lm")
    bytes_tokenizer().save_pretrained(tmp_path / "lm")
    with pytest.raises(RewardError, match=r"`lm`: `config.num_labels` is 2 \(LlamaForCausalLM\)"):
        build_rewards(str(tmp_path / "lm")).check()
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "lm")
    with pytest.raises(
        RewardError, match=r"its weights lack score.weight, which would be random. Is this a trained reward model"
    ):
        build_rewards(str(tmp_path / "lm")).load("cpu")


def test_incomplete_folders_say_what_is_missing(save, tmp_path):
    folder = Path(save("llama"))
    (folder / "model.safetensors").rename(tmp_path / "away")
    with pytest.raises(RewardError, match=r"has no weights \(\*.safetensors\), only \['config.json'"):
        build_rewards(str(folder)).check()
    (tmp_path / "away").rename(folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(RewardError, match=r"no model and tokenizer could be read from it, a folder: "):
        build_rewards(str(folder)).check()
    (folder / "config.json").unlink()
    with pytest.raises(RewardError, match=re.escape("has no config.json; it holds model.safetensors. Give the folder")):
        build_rewards(str(folder)).check()


def test_a_chat_template_that_is_not_there_cannot_be_asked_for(save):
    with pytest.raises(RewardError, match="`use_chat_template` is set, but its tokenizer has no chat template"):
        build_rewards({"source": save("llama"), "use_chat_template": True}).check()


def test_a_hub_id_that_cannot_be_had_names_itself(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    rewards = build_rewards("no-such-owner/no-such-model")
    for ask in (rewards.check, lambda: rewards.load("cpu")):
        with pytest.raises(RewardError, match=r"no-such-owner/no-such-model.* which is not a folder here, as a hub id"):
            ask()


def test_check_reads_no_weights(save):
    folder = save("llama")
    Path(folder, "model.safetensors").write_bytes(b"not weights")
    rewards = build_rewards(folder)
    rewards.check()
    with pytest.raises(RewardError, match="its weights could not be loaded"):
        rewards.load("cpu")


def test_models_run_on_the_device_of_their_own(save):
    folder = save("llama")
    rewards = build_rewards({"source": folder, "device": "cpu"})
    assert rewards.rewards[0].source == folder
    rewards.load("meta")
    assert next(rewards.models["rm"].parameters()).device.type == "cpu"
    other = build_rewards(save("gpt2", folder="other"), default_device="cpu")
    other.load()
    assert next(other.models["other"].parameters()).device.type == "cpu"


def test_the_attention_implementation_is_handed_on(save, roll, policy_tokenizer):
    folder = save("llama")
    eager = loaded(folder, attn_implementation="eager")
    assert eager.models["rm"].config._attn_implementation == "eager"
    wanted = loaded(folder).score(roll(), policy_tokenizer).total
    torch.testing.assert_close(eager.score(roll(), policy_tokenizer).total, wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(RewardError, match=r"its weights could not be loaded: .*flash_typo"):
        loaded(folder, attn_implementation="flash_typo")


def lora(model, **options):
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **options))
    return wrapped.eval()


PEFT_WARNS = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


@PEFT_WARNS
def test_a_lora_module_is_scored_with_its_adapter(roll, policy_tokenizer):
    tokenizer = bytes_tokenizer()
    bare = loaded((build_model("llama"), tokenizer)).score(roll(), policy_tokenizer).total
    wrapped = lora(build_model("llama"), task_type="SEQ_CLS")
    total = loaded((wrapped, tokenizer)).score(roll(), policy_tokenizer).total
    merged = loaded((wrapped.merge_and_unload(), tokenizer)).score(roll(), policy_tokenizer).total
    assert (total - bare).abs().max() > 1e-2
    torch.testing.assert_close(total, merged, atol=1e-5, rtol=1e-5)


@PEFT_WARNS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_adapter_brings_its_head_and_finds_its_base(dtype, tmp_path, roll, policy_tokenizer):
    options = {k: v for k, v in SIZES.items() if k != "num_labels"}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**options)).save_pretrained(tmp_path / "lm")  # without a head
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=1)
    wrapped = lora(base, task_type="SEQ_CLS")
    torch.nn.init.normal_(wrapped.base_model.model.score.modules_to_save["default"].weight)
    wrapped.save_pretrained(tmp_path / "adapter")
    bytes_tokenizer().save_pretrained(tmp_path / "adapter")
    rewards = build_rewards({"source": str(tmp_path / "adapter"), "dtype": dtype})
    assert rewards.rewards[0].source is None
    rewards.check()
    rewards.load("cpu")
    wanted = loaded((wrapped.merge_and_unload(), bytes_tokenizer())).score(roll(), policy_tokenizer).total
    close = 1e-5 if dtype == "float32" else 0.1
    torch.testing.assert_close(rewards.score(roll(), policy_tokenizer).total, wanted, atol=close, rtol=close)


@PEFT_WARNS
def test_an_adapter_without_a_head_is_refused(tmp_path):
    options = {k: v for k, v in SIZES.items() if k != "num_labels"}
    LlamaForCausalLM(LlamaConfig(**options)).save_pretrained(tmp_path / "lm")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=1)
    lora(base).save_pretrained(tmp_path / "adapter")
    bytes_tokenizer().save_pretrained(tmp_path / "adapter")
    with pytest.raises(RewardError, match=r"is an adapter without a head \(`modules_to_save`\), and .*lm' under it"):
        build_rewards(str(tmp_path / "adapter")).check()


def test_weights_that_are_saved_quantized_stay_where_they_are_put(save, roll, policy_tokenizer):
    from transformers import BitsAndBytesConfig

    folder = save("llama", hidden_size=64, intermediate_size=64, num_key_value_heads=4)
    exact = loaded(folder).score(roll(), policy_tokenizer).total
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForSequenceClassification.from_pretrained(folder, quantization_config=config)
    given = loaded((model, bytes_tokenizer())).score(roll(), policy_tokenizer).total
    model.save_pretrained(folder + "-nf4")
    bytes_tokenizer().save_pretrained(folder + "-nf4")
    rewards = loaded(folder + "-nf4", dtype="float32")
    rewards.load("meta")  # would lose them if it moved them
    total = rewards.score(roll(), policy_tokenizer).total
    torch.testing.assert_close(total, given, atol=0.05, rtol=0.05)
    assert 0 < (total - exact).abs().max() < exact.abs().max()
