"""The arithmetic example on a byte-level model that knows nothing: it runs, and what is held out is held out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import arithmetic  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer, as SmolLM2's is, without merges, and a tiny Llama."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("bytes")
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_it_runs_and_says_that_nothing_was_learned(folder, tmp_path, capsys):
    arguments = ["--model", folder, "--iterations", "2", "--batch-size", "8", "--out", str(tmp_path / "out")]
    assert arithmetic.main(arguments) == 1
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["iterations"] == 2
    assert result["episodes"] == 16
    assert [point["iteration"] for point in result["curve"]] == [0, 2, 2]
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "out" / "samples.md").read_text().splitlines()) == 2 + 24
    assert "512 held-out sums, greedy: 0.0% -> 0.0%" in capsys.readouterr().out


def test_what_is_held_out_is_not_trained_on_in_either_order():
    train, held_out, differences = arithmetic.problems(seed=0)
    assert len(train) + 2 * len(held_out) == pytest.approx(8100, abs=90)  # pairs of equal terms have one order
    assert len(held_out) == len(differences) == 512

    def terms(row):
        a, _, b, _ = row["prompt"].splitlines()[-1].split()
        return frozenset((int(a), int(b)))

    assert not {terms(row) for row in train} & {terms(row) for row in held_out}
    for row in train[:50]:
        assert sum(map(int, row["prompt"].splitlines()[-1].removesuffix(" =").split(" + "))) == int(row["answer"])
    assert all(int(row["answer"]) >= 0 for row in differences)
