"""Stop strings: where they are found, and that both engines end a response at the same token."""

from __future__ import annotations

import functools

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lit_ppo.config import SamplingConfig
from lit_ppo.roles.model import RoleModel, RoleView
from lit_ppo.rollout.base import Draw, resolve_sampling
from lit_ppo.rollout.graph import GraphEngine
from lit_ppo.rollout.hf import HFEngine
from lit_ppo.rollout.stop import StopStrings

LETTERS = ["a", "b", "ab", "abc", "c", " "]


@given(
    ids=st.lists(st.integers(0, 5), max_size=30), strings=st.lists(st.text("abc ", min_size=1, max_size=5), min_size=1)
)
def test_the_first_token_that_completes_a_string_is_found(ids, strings):
    def decode(some):
        return "".join(LETTERS[i] for i in some)

    found = StopStrings(strings, decode)
    wanted = next((n for n in range(1, len(ids) + 1) if any(s in decode(ids[:n]) for s in strings)), None)
    assert found.end(ids) == wanted
    known = 0
    for n in range(1, len(ids) + 1):  # token by token, as they are sampled
        if (end := found.end(ids[:n], known)) is not None:
            assert end == wanted
            break
        known = n
    else:
        assert wanted is None


@functools.cache
def byte_tokenizer(metaspace):
    """A byte-level tokenizer, whose tokens may begin or end within a character; or one that drops a leading space."""
    words = Tokenizer(models.BPE(byte_fallback=metaspace, unk_token="<unk>" if metaspace else None))
    if metaspace:
        words.pre_tokenizer = pre_tokenizers.Metaspace()
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        words.decoder, alphabet = decoders.Sequence(steps), [f"<0x{i:02X}>" for i in range(256)]
    else:
        words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": ["<unk>", *alphabet]} if metaspace else {"initial_alphabet": alphabet}
    words.train_from_iterator([TEXT] * 4, trainers.BpeTrainer(vocab_size=400, show_progress=False, **options))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>" if metaspace else None)


TEXT = "Human: Hallo, Gr\u00fc\u00dfe!\n\nAssistant: \u4f60\u597d\uff0c\u4e16\u754c\u3002 \U0001f642\U0001f643"
TEXT += " ### the end. The end."


@settings(deadline=None)
@given(data=st.data(), metaspace=st.booleans(), every=st.integers(1, 8))
def test_strings_are_found_in_the_pieces_of_real_tokenizers(data, metaspace, every):
    tokenizer = byte_tokenizer(metaspace)
    random = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    start = data.draw(st.integers(0, len(TEXT)))
    ids = random + tokenizer.encode(TEXT[start:], add_special_tokens=False)
    at = data.draw(st.integers(0, len(TEXT) - 1))
    strings = [
        TEXT[at : at + data.draw(st.integers(1, 6))],
        data.draw(st.sampled_from(["###", "\n\n", " The", "\u3002"])),
    ]
    wanted = next((n for n in range(1, len(ids) + 1) if any(s in tokenizer.decode(ids[:n]) for s in strings)), None)
    found, known, end = StopStrings(strings, tokenizer.decode), 0, None
    for n in [*range(every, len(ids), every), len(ids)]:  # as the host looks
        end = found.end(ids[:n], known)
        if end is not None:
            break
        known = n
    assert end == wanted


@pytest.mark.parametrize(("rows", "behind"), [(64, 0), (4, 0), (4, 1), (3, 2)])
def test_engines_end_at_the_same_token(rows, behind):
    model, prompts = tiny.model(scale=1.0), tiny.prompts(24)
    config = SamplingConfig(
        max_new_tokens=40, temperature=1.0, stop_tokens=["w5"], stop_strings=["w7", "w3 w", "w10 w11", "w2"],
        entropy=True,
    )  # fmt: skip
    options = resolve_sampling(config, tiny.tokenizer(), model.config, model.generation_config)
    view, draw = RoleView(RoleModel(model), "logprobs"), Draw(3, 1)
    theirs = HFEngine(view).generate(prompts, options, draw)
    ours = GraphEngine(view, max_rows=rows, read_behind=behind).generate(prompts, options, draw)
    assert torch.equal(ours.lengths, theirs.lengths)
    assert torch.equal(ours.stopped, theirs.stopped)
    assert torch.equal(ours.ids[ours.mask], theirs.ids[theirs.mask])
    assert not ours.logprobs[~ours.mask].any()
    torch.testing.assert_close(ours.entropy, theirs.entropy, rtol=1e-4, atol=1e-4)
    decode = tiny.tokenizer().decode
    ends = [
        any(s in decode(ids[:n]) for s in config.stop_strings) for ids, n in zip(ours.ids, ours.lengths, strict=True)
    ]
    assert sum(ends) > 3
    for ids, n in zip(ours.ids, ours.lengths, strict=True):
        assert not any(s in decode(ids[: n - 1]) for s in config.stop_strings)


def test_a_bad_list_is_refused():
    for bad in ("###", [""], [3]):
        with pytest.raises(ValueError, match="stop_strings"):
            SamplingConfig(stop_strings=bad)
