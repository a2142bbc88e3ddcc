"""Prompts: reading, checking, tokens, order, ranks, and resuming at every point a checkpoint can be written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lit_ppo.data import PromptDataModule, PromptLoader, encode
from lit_ppo.data.rows import Prompt

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings(
        "ignore:Using ModelCheckpoint with manual optimization"
    ),  # saving after the step is meant
]

WORDS = ["<s>", "</s>", "<pad>", "<unk>", "<user>", "<end>", "<assistant>", *(f"w{i}" for i in range(60))]
CHAT = "{{ bos_token }}{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"
TINY = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def make_tokenizer(single: str = "<s> $A", chat_template: str | None = CHAT, **special: str) -> Any:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = [word for word in single.split() if word.startswith("<")]
    backend.post_processor = processors.TemplateProcessing(single, None, [(name, WORDS.index(name)) for name in names])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template, **special)


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def words(count: int) -> list[str | dict[str, Any]]:
    return [f"w{i}" for i in range(count)]


class Recorder(LightningModule):
    """A module with manual optimization, like PPO's, that writes down what it is given."""

    def __init__(self, fail_at: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.automatic_optimization = False
        self.tokenizer = make_tokenizer()
        self.fail_at = fail_at
        self.seen: list[tuple[int, int, list[str]]] = []
        self.validated: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if (self.current_epoch, batch_idx) == self.fail_at:
            raise RuntimeError("the step failed")
        for _ in range(2):  # two optimizer steps an iteration
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.weight**2)
            optimizer.step()
        self.seen.append((self.current_epoch, batch_idx, batch.text))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += batch.text

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += batch.text

    def predict_step(self, batch: Any, batch_idx: int) -> list[str]:
        return batch.text

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: Recorder, data: PromptDataModule, ckpt: Any = None, **options: Any) -> Trainer:
    trainer = Trainer(**{**TINY, "num_sanity_val_steps": 0, **options})
    trainer.fit(module, datamodule=data, ckpt_path=ckpt, weights_only=True)
    return trainer


# ---- tokens


def test_strings_are_left_padded_with_one_bos() -> None:
    prompts = encode(["w1 w2 w3", {"prompt": "w4", "answer": 7}], make_tokenizer(pad_token="<pad>"))
    assert prompts.ids.tolist() == [ids("<s> w1 w2 w3"), ids("<pad> <pad> <s> w4")]
    assert prompts.ids.dtype == prompts.lengths.dtype == prompts.index.dtype == torch.long
    assert prompts.lengths.tolist() == [4, 2]
    assert prompts.mask.tolist() == [[True] * 4, [False, False, True, True]]
    assert prompts.index.tolist() == [0, 1]
    assert prompts.text == ["w1 w2 w3", "w4"]
    assert prompts.messages == [None, None]
    assert prompts.columns == [{}, {"answer": 7}]


@pytest.mark.parametrize(
    ("single", "want"),
    [
        ("$A", "w1 w2"),
        ("<s> $A </s>", "<s> w1 w2"),
        ("$A </s>", "w1 w2"),
        ("<s> <user> $A <end> </s>", "<s> <user> w1 w2"),
    ],
)
def test_only_the_special_tokens_in_front_are_kept(single: str, want: str) -> None:
    assert encode(["w1 w2"], make_tokenizer(single)).ids.tolist() == [ids(want)]


class Shifty(PreTrainedTokenizerFast):
    """Reads the text backwards when it adds special tokens."""

    def __call__(self, text: list[str], add_special_tokens: bool = True, **options: Any) -> Any:
        text = [t[::-1] for t in text] if add_special_tokens else text
        return super().__call__(text, add_special_tokens=add_special_tokens, **options)


def test_special_tokens_that_cannot_be_told_from_the_text_are_an_error() -> None:
    shifty = Shifty(tokenizer_object=make_tokenizer().backend_tokenizer, bos_token="<s>", unk_token="<unk>")
    with pytest.raises(ValueError, match=r"into \[8, 9\] without special tokens and into \[0, 3, 3\] with them"):
        encode(["w1 w2"], shifty)


def test_specials_written_in_the_text_stay_and_a_written_bos_is_not_doubled() -> None:
    prompts = encode(["<s> w1", "w1 </s>"], make_tokenizer("<s> $A </s>"))
    assert [row[-int(n) :] for row, n in zip(prompts.ids.tolist(), prompts.lengths, strict=True)] == [
        ids("<s> w1"),
        ids("<s> w1 </s>"),
    ]


def test_pad_is_the_eos_or_zero_without_a_pad_token_and_the_tokenizer_is_left_alone() -> None:
    tokenizer = make_tokenizer()
    before = tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map, tokenizer.padding_side
    assert encode(["w1", "w1 w2"], tokenizer).ids[0, 0] == WORDS.index("</s>")
    assert before == (tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map, tokenizer.padding_side)
    assert tokenizer.pad_token_id is None
    tokenizer.eos_token = None
    assert encode(["w1", "w1 w2"], tokenizer).ids[0, 0] == 0


def test_chats_are_rendered_by_the_template_without_a_second_bos() -> None:
    chat = [{"role": "user", "content": "w1 w2"}]
    prompts = encode([{"prompt": chat, "level": "easy"}], make_tokenizer("<s> $A </s>"))
    assert prompts.ids.tolist() == [ids("<s> <user> w1 w2 <end> <assistant>")]
    assert prompts.text == ["<s><user> w1 w2 <end> <assistant>"]
    assert prompts.messages == [chat]
    assert prompts.columns == [{"level": "easy"}]
    open_end = encode([{"prompt": chat}], make_tokenizer(), add_generation_prompt=False)
    assert open_end.ids.tolist() == [ids("<s> <user> w1 w2 <end>")]
    own = encode(
        [{"prompt": chat}, "w3"], make_tokenizer(chat_template=None), chat_template="{{ messages[0].content }}"
    )
    assert own.ids.tolist() == [ids("w1 w2"), ids("<s> w3")]


def test_chat_errors_name_the_row_and_the_way_out() -> None:
    row = {"prompt": [{"role": "user", "content": "w1"}]}
    with pytest.raises(ValueError, match=r"`rows\[1\]` is a chat, .* Set `chat_template`"):
        encode(["w1", row], make_tokenizer(chat_template=None))
    with pytest.raises(ValueError, match=r"`rows\[0\]`: the chat template refused the messages: no user"):
        encode([row], make_tokenizer(chat_template="{{ raise_exception('no user') }}"))


def test_encode_wants_tokens_and_an_index_for_each_row() -> None:
    assert encode(["w1", "w2"], make_tokenizer(), index=torch.tensor([7, 3])).index.tolist() == [7, 3]
    with pytest.raises(ValueError, match="`index` has 1 numbers for 2 rows"):
        encode(["w1", "w2"], make_tokenizer(), index=torch.tensor([0]))
    with pytest.raises(ValueError, match=r"`rows\[1\]`: the prompt '  ' has no tokens"):
        encode(["w1", "  "], make_tokenizer())
    with pytest.raises(ValueError, match="`rows` has no prompts"):
        encode([], make_tokenizer())


# ---- files


def write(path: Path, *lines: Any) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def texts(data: PromptDataModule, name: str = "train") -> list[str]:
    return [prompt.text for prompt in data._sets[name]]


def test_a_file_may_have_a_mark_blank_lines_and_any_line_break(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf"w1"\r\n\r\n{"prompt": "w2\xe2\x80\xa8w3"}\n   \n{"prompt": "caf\xc3\xa9"}')
    assert texts(PromptDataModule(str(path))) == ["w1", "w2\u2028w3", "café"]
    path.write_text('"w1"\n{"prompt": "é"}\n', encoding="utf-16")
    assert texts(PromptDataModule(str(path), encoding="utf-16")) == ["w1", "é"]
    assert texts(PromptDataModule(path, encoding="utf-16")) == ["w1", "é"]  # a Path works too


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ([], "`train='.*'` has no rows: it is empty"),
        (["", "  "], "`train='.*'` has no rows: it is empty"),
        ([{"prompt": "a"}, "", "{'prompt': 1}"], r"p.jsonl, line 3 is not JSON \(.* at column 2\): str .*prompt"),
        ([{"prompt": "a"}, '{"prompt": "a", "prompt": "b"}'], r"line 2 is not JSON \('prompt' stands twice"),
        (['"a"', "5"], r"line 2 is neither a string nor an object: int 5"),
        (["[", "]"], r"line 1 is not JSON .* Write one object a line"),
        (['[{"prompt": "a"}]'], r"line 1 is neither a string nor an object: list"),
        ([{"prompt": "a"}, {"text": "b", "id": 1}], r"line 2 has no column `prompt`; it has 'text', 'id'. Set"),
        ([{}], r"line 1 has no column `prompt`; it has none"),
        ([{"prompt": 5}], r"line 1: `prompt` is neither a string nor a list of chat messages: int 5"),
        ([{"prompt": {"role": "user"}}], r"line 1: `prompt` is neither a string"),
        ([{"prompt": None}], r"line 1: `prompt` is neither a string"),
        ([{"prompt": ""}], r"line 1: `prompt` is empty"),
        (['""'], r"line 1: `prompt` is empty"),
        ([{"prompt": []}], r"line 1: `prompt` is empty"),
        ([{"prompt": ["hi"]}], r"line 1: message 0 of `prompt` is not an object: str 'hi'"),
        (
            [{"prompt": [{"role": "user", "content": "a"}, {"role": "user", "text": "b"}]}],
            r"line 1: message 1 of `prompt`: `content` is missing \(it has 'role', 'text'\)",
        ),
        ([{"prompt": [{"content": "a"}]}], r"`role` is missing"),
        ([{"prompt": [{"role": "user", "content": ["a"]}]}], r"`content` is list \['a'\]. It must be a string"),
    ],
)
def test_bad_files_are_refused_when_constructed(tmp_path: Path, lines: list[Any], match: str) -> None:
    path = write(tmp_path / "p.jsonl", *lines)
    with pytest.raises((ValueError, TypeError), match=match):
        PromptDataModule(path)


@pytest.mark.parametrize(
    ("data", "encoding", "match"),
    [
        (b'"a"\n"caf\xe9"', "utf-8", r"line 2: byte 0xe9 at offset 8 cannot be read with `encoding='utf-8'`. Set"),
        ('"a"'.encode("utf-16"), "utf-8", r"line 1: byte 0x.. at offset 0 .* own, 'utf-16', or convert"),
        ('"a"'.encode("utf-16-le"), "utf-8", r"line 1 is not JSON .* It looks like another encoding than"),
        (b'"a"', "utf8mb4", r"`encoding='utf8mb4'` is unknown"),
        (b'"ab', "utf-16", r"line 1 is not JSON|cannot be read with `encoding='utf-16'`"),
    ],
)
def test_another_encoding_is_named(tmp_path: Path, data: bytes, encoding: str, match: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(data)
    with pytest.raises(ValueError, match=match):
        PromptDataModule(str(tmp_path / "p.jsonl"), encoding=encoding)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"`val='nowhere.jsonl'` is not a file \(looked in /"):
        PromptDataModule(words(2), val="nowhere.jsonl")
    with pytest.raises(FileNotFoundError, match=r"`train='.*'` is a folder, and no dataset that `save_to_disk`"):
        PromptDataModule(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"train": None}, "There are no prompts"),
        ({"train": []}, "`train` has no prompts"),
        ({"train": [5]}, r"`train\[0\]` is neither a string nor an object"),
        ({"train": {"prompt": "a"}}, "`train` must be a path to a JSONL, CSV or Parquet file, a dataset or a list"),
        ({"batch_size": "4"}, "`batch_size='4'` must be a whole number, and is a str"),
        ({"batch_size": 4.0}, "`batch_size=4.0` must be a whole number, and is a float"),
        ({"max_prompt_length": "9"}, "`max_prompt_length='9'` must be a whole number, and is a str"),
        ({"val_fraction": "half"}, "`val_fraction='half'` must be a number, and is a str"),
        ({"val_fraction": 1.0}, "`val_fraction=1` would be all of `train`. Give a share below 1, or 2 or more"),
        ({"batch_size": 0}, "`batch_size=0` must be at least 1"),
        ({"val_batch_size": 0}, "`val_batch_size=0` must be at least 1"),
        ({"max_prompt_length": 0}, "`max_prompt_length=0` must be at least 1"),
        ({"overlong": "truncate"}, "`overlong='truncate'` must be 'drop' or 'cut'"),
        ({"overlong": "cut"}, "`overlong='cut'` has no effect without `max_prompt_length`"),
        ({"chat_template": "chatml"}, "`chat_template='chatml'` has no Jinja"),
        ({"chat_template": "{{ 1 }}"}, "have no effect: every prompt is a plain string"),
        ({"add_generation_prompt": False}, "have no effect: every prompt is a plain string"),
        ({"val_fraction": 0.5, "val": ["w"]}, "`val_fraction=0.5` takes prompts from `train`"),
        ({"val_fraction": 0.5, "train": None, "test": ["w"]}, "`val_fraction=0.5` takes prompts from `train`"),
        ({"val_fraction": 10}, "`val_fraction=10` of 10 prompts is 10: `train` and `val` both need"),
        ({"val_fraction": 0.01}, "`val_fraction=0.01` of 10 prompts is 0"),
        ({"val_fraction": -1}, "`val_fraction=-1` of 10 prompts is -"),
        ({"val_fraction": 1.5}, "`val_fraction=1.5` must be a share below 1 or a whole number"),
    ],
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        PromptDataModule(**{"train": words(10), **options})


@pytest.mark.parametrize(("val_fraction", "held"), [(0.3, 3), (4, 4)])
def test_val_fraction_holds_out_the_same_prompts_each_time(val_fraction: float, held: int) -> None:
    data = PromptDataModule(words(10), val_fraction=val_fraction)
    assert len(texts(data, "val")) == held
    assert sorted(texts(data) + texts(data, "val")) == sorted(words(10))
    assert texts(data, "val") == texts(PromptDataModule(words(10), val_fraction=val_fraction), "val")
    assert len({tuple(texts(PromptDataModule(words(10), val_fraction=0.3, seed=s), "val")) for s in range(9)}) > 1


# ---- order and ranks


def loader(count: int, batch_size: int, **options: Any) -> PromptLoader:
    return PromptLoader([Prompt("", f"w{i}", None, {}, [i]) for i in range(count)], batch_size, **options)


sizes = st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(1, 5), st.integers(0, 3), st.integers(0, 2**40))


@given(sizes, st.booleans(), st.booleans())
def test_ranks_share_out_each_batch_and_every_prompt_comes_once(size: Any, shuffle: bool, drop_last: bool) -> None:
    count, batch_size, world_size, epoch, seed = size
    options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    progress = lambda: (epoch, 0)  # noqa: E731
    whole = list(loader(count, batch_size, progress=progress, **options))
    ranks = [
        list(loader(count, batch_size, progress=progress, rank=r, world_size=world_size, **options))
        for r in range(world_size)
    ]
    assert {len(batches) for batches in ranks} == {len(whole)} == {len(loader(count, batch_size, **options))}
    for batch, *shares in zip(whole, *ranks, strict=True):
        assert batch.index.tolist() == list(range(len(batch)))
        assert [text for share in shares for text in share.text] == batch.text
        assert [i for share in shares for i in share.index.tolist()] == batch.index.tolist()
        lengths = [len(share) for share in shares]
        assert max(lengths) - min(lengths) <= 1
        for share in shares:
            assert share.ids.shape[0] == len(share.lengths) == len(share.index) == len(share.columns)
    drawn = [text for batch in whole for text in batch.text]
    assert len(set(drawn)) == len(drawn) == (count // batch_size * batch_size if drop_last else count)
    if not shuffle:
        assert drawn == [f"w{i}" for i in range(len(drawn))]


@given(st.integers(1, 40), st.integers(0, 2**70), st.integers(0, 2**40))
def test_the_order_is_a_function_of_seed_and_epoch(count: int, seed: int, epoch: int) -> None:
    order = loader(count, 4, shuffle=True, seed=seed).order(epoch)
    assert sorted(order) == list(range(count))
    assert order == loader(count, 7, shuffle=True, seed=seed, rank=1, world_size=2).order(epoch)


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = [tuple(loader(40, 4, shuffle=True, seed=s).order(e)) for s in (0, 1, 2**32) for e in (0, 1, 2, 10)]
    assert len(set(orders)) == len(orders)
    assert orders[0] != tuple(range(40))


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 25), st.booleans())
def test_a_loader_goes_on_from_its_state(count: int, batch_size: int, stop: int, shuffle: bool) -> None:
    def draw(source: PromptLoader, number: int) -> list[list[str]]:
        drawn: list[list[str]] = []
        while len(drawn) < number:
            for batch in source:
                drawn.append(batch.text)
                if len(drawn) == number:
                    break
        return drawn

    first = loader(count, batch_size, shuffle=shuffle)
    want = draw(loader(count, batch_size, shuffle=shuffle), 40)
    got = draw(first, stop)
    second = loader(count, batch_size, shuffle=shuffle, rank=0, world_size=1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert got + draw(second, 40 - stop) == want


@pytest.mark.parametrize("change", [{"count": 11}, {"batch_size": 3}, {"seed": 1}, {"shuffle": False}])
def test_another_order_cannot_be_continued_within_an_epoch(change: dict[str, Any]) -> None:
    options = {"count": 12, "batch_size": 4, "seed": 0, "shuffle": True}
    first = loader(**options)
    next(iter(first))
    other = loader(**{**options, **change})
    other.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"within an epoch of .* cannot continue"):
        next(iter(other))
    first.epoch, first.batch = 1, 0  # at the end of an epoch it may change
    other.load_state_dict(first.state_dict())
    assert len(next(iter(other))) == other.batch_size


# ---- the Trainer


def test_fit_yields_every_prompt_once_an_epoch_in_new_orders() -> None:
    module, data = Recorder(), PromptDataModule(words(9), val=["w50", "w51", "w52"], batch_size=3, val_batch_size=2)
    fit(module, data, max_epochs=3)
    assert [place[:2] for place in module.seen] == [(e, b) for e in range(3) for b in range(3)]
    orders = [[text for e, _, batch in module.seen if e == epoch for text in batch] for epoch in range(3)]
    assert all(sorted(order) == sorted(words(9)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert module.validated == ["w50", "w51", "w52"] * 3
    assert (data.iterations_per_epoch, data.batch_size, data.longest_prompt) == (3, 3, 2)
    assert str(data) == "PromptDataModule(train: 9 prompts, val: 3 prompts)"


class SaveEverywhere(Callback):
    """Saves wherever ModelCheckpoint can, and notes how many batches had been seen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: dict[Path, int] = {}

    def save(self, trainer: Trainer, module: Recorder, hook: str) -> None:
        path = self.folder / f"{len(self.saved)}-{hook}.ckpt"
        trainer.save_checkpoint(path)
        self.saved[path] = len(module.seen)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.save(trainer, pl_module, "batch_end")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, pl_module, "validation_end")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, pl_module, "epoch_end")


@pytest.mark.parametrize(
    ("data", "options", "points", "twice"),
    [
        ({}, {"max_epochs": 3}, 9 + 3 + 3, True),
        ({}, {"max_steps": 14, "max_epochs": -1}, 7 + 2 + 3, True),
        ({}, {"max_steps": 14, "max_epochs": -1, "val_check_interval": 2}, 7 + 2 + 3, False),
        ({}, {"max_steps": 10, "limit_train_batches": 2}, 5 + 2 + 3, False),
        ({}, {"max_epochs": 3, "limit_train_batches": 2}, 6 + 3 + 3, False),
        ({}, {"max_epochs": 2, "val_check_interval": 1}, 6 + 6 + 2, False),
        ({}, {"max_epochs": 2, "val_check_interval": 2, "check_val_every_n_epoch": None}, 6 + 3 + 2, False),
        ({}, {"max_epochs": 3, "limit_val_batches": 0}, 9 + 3, False),
        ({"drop_last": False, "shuffle": False}, {"max_epochs": 2}, 8 + 2 + 2, False),
        ({}, {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}, 9 + 3 + 3, False),
    ],
)
def test_resuming_at_every_point_continues_with_the_next_batch(
    tmp_path: Path, data: dict[str, Any], options: dict[str, Any], points: int, twice: bool
) -> None:
    def run(ckpt: Path | None = None, folder: Path | None = None) -> tuple[Recorder, dict[Path, int]]:
        module, save = Recorder(), SaveEverywhere(folder or tmp_path)
        prompts = PromptDataModule(words(11), val=words(3), batch_size=3, val_batch_size=2, **data)
        fit(module, prompts, ckpt, callbacks=[save] if folder else [], **options)
        return module, save.saved

    whole, saved = run(folder=tmp_path / "whole")
    assert len(saved) == points
    for path, count in saved.items():
        once, again = run(path, tmp_path / path.stem if twice else None)
        assert once.seen == whole.seen[count:], path
        for second in list(again)[:3]:  # a run that was resumed is resumed as well
            assert run(second)[0].seen == whole.seen[count + again[second] :], (path, second)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # so that no later part sees an earlier one's files
def test_a_run_may_be_stopped_at_each_of_its_checkpoints(tmp_path: Path) -> None:
    whole, parts = Recorder(), []
    fit(whole, PromptDataModule(words(11), batch_size=3), max_epochs=3)
    ckpt = None
    for step in range(1, 10):
        module = Recorder()
        saver = ModelCheckpoint(tmp_path / str(step), every_n_train_steps=1, save_top_k=-1)

        class Stop(Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                trainer.should_stop = True

        data = PromptDataModule(words(11), batch_size=3)
        trainer = fit(module, data, ckpt, callbacks=[saver, Stop()], enable_checkpointing=True, max_epochs=3)
        ckpt = saver.best_model_path
        assert trainer.global_step == 2 * step
        parts += module.seen
    assert parts == whole.seen


@pytest.mark.parametrize("fail_at", [(0, 0), (0, 1), (0, 2), (1, 0), (1, 2)])
def test_a_step_that_failed_is_given_its_batch_again(tmp_path: Path, fail_at: tuple[int, int]) -> None:
    whole, broken, resumed = Recorder(), Recorder(fail_at), Recorder()
    options = {"max_epochs": 2}
    fit(whole, PromptDataModule(words(9), batch_size=3), **options)

    class Save(Callback):
        def on_exception(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "failed.ckpt")

    with pytest.raises(RuntimeError, match="the step failed"):
        fit(broken, PromptDataModule(words(9), batch_size=3), callbacks=[Save()], **options)
    fit(resumed, PromptDataModule(words(9), batch_size=3), ckpt=tmp_path / "failed.ckpt", **options)
    assert broken.seen + resumed.seen == whole.seen


def test_resuming_with_another_batch_size_within_an_epoch_is_an_error(tmp_path: Path) -> None:
    save = SaveEverywhere(tmp_path)
    fit(Recorder(), PromptDataModule(words(9), batch_size=3), max_steps=4, callbacks=[save])
    with pytest.raises(ValueError, match=r"within an epoch of \{'prompts': 9, 'batch_size': 3, .* cannot continue"):
        fit(Recorder(), PromptDataModule(words(9), batch_size=2), ckpt=tmp_path / "0-batch_end.ckpt", max_epochs=2)


def test_a_loader_in_hand_starts_at_the_beginning_and_leaves_the_trainer_alone() -> None:
    data = PromptDataModule(words(9), batch_size=3)
    module = Recorder()
    trainer = fit(module, data, max_epochs=2)
    before = str(trainer.fit_loop.state_dict())
    assert [batch.text for batch in data.train_dataloader()] == [batch for *_, batch in module.seen[:3]]
    assert str(trainer.fit_loop.state_dict()) == before


def test_a_second_fit_goes_on_and_overfitting_turns_the_shuffling_off() -> None:
    module, data = Recorder(), PromptDataModule(words(9), batch_size=3)
    trainer = fit(module, data, max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=data)
    whole = Recorder()
    fit(whole, data, max_epochs=2)
    assert module.seen == whole.seen
    overfit = Recorder()
    fit(overfit, PromptDataModule(words(9), val=words(2), batch_size=3), max_epochs=2, overfit_batches=1)
    assert [batch for *_, batch in overfit.seen] == [["w0", "w1", "w2"]] * 2


def test_validate_test_and_predict_take_their_own_sets_whole_and_in_order() -> None:
    module, trainer = Recorder(), Trainer(**TINY)
    data = PromptDataModule(val=words(5), test=words(3), val_batch_size=2)
    trainer.validate(module, data, verbose=False)
    assert module.validated == words(5)
    trainer.test(module, data, verbose=False)
    assert module.validated == words(5) + words(3)
    assert trainer.predict(module, data) == [["w0", "w1"], ["w2", "w3"], ["w4"]]
    assert trainer.predict(module, PromptDataModule(predict=words(1), val=words(5))) == [["w0"]]


def test_a_stage_without_prompts_and_a_module_without_a_tokenizer() -> None:
    data, trainer = PromptDataModule(words(3)), Trainer(**TINY, max_epochs=1)
    with pytest.raises(ValueError, match=r"`validate` needs prompts, .* Give `val` or `val_fraction`"):
        trainer.validate(Recorder(), data)
    with pytest.raises(ValueError, match=r"`test` needs prompts, .* Give `test`\."):
        trainer.test(Recorder(), data)
    with pytest.raises(ValueError, match=r"`predict` needs prompts, .* Give `predict` or `val`"):
        trainer.predict(Recorder(), data)
    with pytest.raises(ValueError, match=r"`fit` needs prompts, .* Give `train`"):
        trainer.fit(Recorder(), PromptDataModule(val=words(3)))
    module = Recorder()
    del module.tokenizer
    with pytest.raises(AttributeError, match=r"tokenizes with `Recorder.tokenizer`, which is missing"):
        trainer.fit(module, data)
    with pytest.raises(RuntimeError, match="The prompts of `train` are not tokenized yet"):
        _ = data.iterations_per_epoch
    with pytest.raises(RuntimeError, match="needs a Trainer"):
        PromptDataModule(words(3)).setup("fit")


LONG: list[str | dict[str, Any]] = ["w1 w2 w3 w4", "w5", {"prompt": [{"role": "user", "content": "w6 w7 w8"}], "n": 1}]


def test_longer_prompts_are_dropped_or_cut_and_counted_once() -> None:
    trainer = Trainer(**TINY)
    with pytest.warns(UserWarning, match=r"2 of 3 prompts of `predict` are longer than .*=4` tokens: dropped") as seen:
        trainer.predict(Recorder(), PromptDataModule(predict=LONG, max_prompt_length=4))
    assert sum(w.category is UserWarning for w in seen) == 1
    data = PromptDataModule(predict=LONG, max_prompt_length=4, overlong="cut")
    with pytest.warns(UserWarning, match=r"2 of 3 prompts .*`max_prompt_length=4` tokens: cut at the start") as seen:
        trainer.predict(Recorder(), data)
    assert sum(w.category is UserWarning for w in seen) == 1
    trainer.predict(Recorder(), PromptDataModule(predict=LONG, max_prompt_length=7))  # no warning
    (batch,) = data.predict_dataloader()
    rows = [ids[-n:] for ids, n in zip(batch.ids.tolist(), batch.lengths.tolist(), strict=True)]
    assert rows == [ids("<s> w2 w3 w4"), ids("<s> w5"), ids("<s> w8 <end> <assistant>")]
    assert batch.text == ["w2 w3 w4", "w5", "w8 <end> <assistant>"]
    assert batch.messages[2] == [{"role": "user", "content": "w6 w7 w8"}]
    data = PromptDataModule(predict=LONG, max_prompt_length=1, overlong="cut")
    with pytest.warns(UserWarning, match="3 of 3 prompts"):
        trainer.predict(Recorder(), data)
    assert next(iter(data.predict_dataloader())).ids.tolist() == [ids("w4"), ids("w5"), ids("<assistant>")]
    with pytest.raises(ValueError, match="All 3 prompts of `predict` are longer than `max_prompt_length=1`"):
        trainer.predict(Recorder(), PromptDataModule(predict=LONG, max_prompt_length=1))


def test_a_set_smaller_than_the_batch_is_the_batch() -> None:
    module, data = Recorder(), PromptDataModule(words(4), batch_size=64)
    with pytest.warns(UserWarning, match="`batch_size=64` is more than the 4 prompts of `train`: a batch is 4") as seen:
        fit(module, data, max_epochs=2)
    assert sum(w.category is UserWarning for w in seen) == 1
    assert [sorted(batch) for *_, batch in module.seen] == [words(4)] * 2
    assert (data.batch_size, data.iterations_per_epoch) == (4, 1)


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [3, 3]), (False, [3, 3, 2])])
def test_the_last_batch_is_dropped_or_kept_and_the_report_says_so(
    drop_last: bool, sizes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    module, data = Recorder(), PromptDataModule(words(8), batch_size=3, drop_last=drop_last)
    fit(module, data, max_epochs=1)
    assert [len(batch) for *_, batch in module.seen] == sizes
    assert data.iterations_per_epoch == len(sizes)
    rest = "2 left out (others each epoch)" if drop_last else "the last of 2"
    report = f"`train`: 8 prompts, 2 to 2 tokens long; iterations an epoch: {len(sizes)} of 3 prompts, {rest}"
    assert report in caplog.text


class Deal(Recorder):
    """Writes down what each rank was given."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_fit_end(self) -> None:
        seen = {"train": [batch for *_, batch in self.seen], "val": self.validated}
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(seen))


def test_two_ranks_share_the_prompts_even_when_one_has_none(tmp_path: Path) -> None:
    whole = Recorder()
    fit(whole, PromptDataModule(words(7), batch_size=3), max_epochs=2)
    data = PromptDataModule(words(7), val=words(3), batch_size=3, val_batch_size=1)
    fit(Deal(tmp_path), data, max_epochs=2, strategy="ddp_fork", devices=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert [a + b for a, b in zip(first["train"], second["train"], strict=True)] == [batch for *_, batch in whole.seen]
    assert {len(batch) for batch in first["train"]} == {1}
    assert (first["val"], second["val"]) == ([], words(3) * 2)


# ---- the command line


@pytest.mark.parametrize(
    ("train", "want"),
    [
        ("[w1, '5']", ["w1", "5"]),
        ("[{prompt: w1, n: 5}, w2]", ["w1", "w2"]),
        ("[{prompt: [{role: user, content: w1}], tags: [a]}]", [""]),
        ("FILE", ["w9"]),
    ],
)
def test_a_yaml_gives_a_file_or_the_prompts_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: str, want: list[str]
) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "w9"})
    config = write(tmp_path / "c.yaml", "data:", f"  train: {train.replace('FILE', path)}", "  batch_size: 1")
    monkeypatch.setattr("sys.argv", ["lit-ppo", "--config", config])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI's, not ours
    cli = LightningCLI(Recorder, PromptDataModule, save_config_callback=None, seed_everything_default=False, run=False)
    assert texts(cli.datamodule) == want


def test_a_yaml_with_numbers_for_prompts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path / "c.yaml", "data:", "  train: [1, 2]")
    monkeypatch.setattr("sys.argv", ["lit-ppo", "--config", config])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI's, not ours
    with pytest.raises(SystemExit):
        LightningCLI(Recorder, PromptDataModule, save_config_callback=None, seed_everything_default=False, run=False)
    assert "Given value: 1" in capsys.readouterr().err
