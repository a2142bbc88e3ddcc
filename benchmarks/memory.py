"""Peak memory and time of each phase of PPO iterations, on one GPU, of models with true shapes and random weights.

    python benchmarks/memory.py --grid                                     # what `lit-ppo plan` is tested against
    python benchmarks/memory.py --preset examples/presets/8b-12gb.yaml --cap 12GB --iterations 20
    python benchmarks/memory.py --preset examples/presets/7b-full-4x24gb.yaml --rank-of 4

Everything runs through the Trainer and `PPOLightningModule`. The grid builds its models on the device; its rows are
appended to `memory_grid.jsonl`, with the whole configuration. Those that are there are skipped, but for errors and rows
that had something `beside` them (GiB of an earlier run, which their peaks include). A preset runs from its YAML as it
stands, through `lit-ppo fit`, but for its sources: these are folders with a model of the same shape, written once to
`--scratch`. `--cap` is a hard limit of torch's allocator (GB are 1e9 bytes). `--rank-of N` is rank 0 of N under FSDP2
in a fake process group, whose collectives do nothing: true memory (the communication library's buffers apart),
meaningless numbers.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks._iteration_rows import read  # noqa: E402
from benchmarks.rollout import SHAPES  # noqa: E402
from lit_ppo import PPOLightningModule, PromptDataModule  # noqa: E402

GIB = 2**30
SOURCES = {
    "meta-llama/Llama-3.1-8B-Instruct": "8B",
    "Qwen/Qwen2-7B": "7B",
    "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2": "8B",
    "Qwen/Qwen2.5-1.5B-Instruct": "1.5B",
}
"""Shapes of the presets' sources; a reward model that is not named is made in the shape of the actor."""


class Recorder(Callback):
    """Keeps, of every iteration and phase: peak bytes allocated and reserved, bytes held at its start, seconds."""

    last: Recorder | None = None
    """The newest one: a YAML makes it, where nobody can hand it out."""

    def __init__(self) -> None:
        type(self).last = self
        self.iterations: list[dict[str, dict[str, float]]] = []
        self.metrics: list[dict[str, float]] = []
        self.load_peak = 0
        self._start: tuple[str, float, int] | None = None

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        reset_peak()

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.load_peak = peak("allocated")
        pl_module.phase_listeners.append(self._phase)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.iterations.append({})

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Let go of what Lightning, before `on_fit_end`, copies to the host: it takes longer than the iterations."""
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
        for parameter in pl_module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.new_empty(0)

    def _phase(self, name: str | None) -> None:
        if name is not None:
            self._start = name, time.perf_counter(), held()
        elif self._start is not None and self.iterations:
            phase, began, before = self._start
            self.iterations[-1][phase] = {
                "allocated": peak("allocated"),
                "reserved": peak("reserved"),
                "before": before,
                "after": held(),
                "seconds": time.perf_counter() - began,
            }

    def summary(self) -> dict[str, Any]:
        """Return peaks in GiB over all iterations, and times of the fastest, by phase."""
        phases = {name: [i[name] for i in self.iterations if name in i] for name in ("rollout", "score", "update")}
        found: dict[str, Any] = {
            key: {n: round(max(p[key] for p in ps) / GIB, 4) for n, ps in phases.items() if ps}
            for key in ("allocated", "reserved", "before", "after")
        }
        found["first"] = {n: round(ps[0]["allocated"] / GIB, 4) for n, ps in phases.items() if ps}
        found["last"] = {n: round(ps[-1]["allocated"] / GIB, 4) for n, ps in phases.items() if ps}
        found["seconds"] = {n: round(min(p["seconds"] for p in ps), 3) for n, ps in phases.items() if ps}
        found["load"] = round(self.load_peak / GIB, 4)
        found["iterations"] = len(self.metrics)
        if len(self.iterations) > 2:
            second, last = (max(p["allocated"] for p in self.iterations[i].values()) for i in (1, -1))
            found["growth_mib"] = round((last - second) / 2**20, 2)
        if self.metrics:
            found["tokens_per_s"] = round(self.metrics[-1].get("rollout/tokens_per_s", 0))
            found["ratio_first_step"] = self.metrics[-1].get("policy/ratio_first_step")
            found["skipped_steps"] = sum(m.get("optim/skipped_steps", 0) for m in self.metrics)
        return found


# ----------------------------------------------------------------------------------------------------------- the grid


def case(
    shape: str,
    kind: str,
    prompt: int,
    new: int,
    rows: int,
    micro: int,
    *,
    checkpointing: bool = False,
    engine: str = "hf",
    precision: str = "bf16-true",
    reward_model: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return a run: its name, and its configuration as a YAML would have it.

    Args:
        shape: Of all models.
        kind: full, lora (separate models), shared (adapters on one trunk), nf4 (the same on a 4-bit trunk).
        prompt: Tokens of each prompt.
        new: Tokens of each response.
        rows: Prompts of an iteration.
        micro: Sequences in one forward and backward.
        checkpointing: Recompute activations.
        engine: `ppo.rollout_engine`.
        precision: The trainer's.
        reward_model: Shape of a reward model, kept in NF4; None: a function.
        options: More of the module's, by dotted name, with `__` for the dots.
    """
    model: dict[str, Any] = {
        "actor": shape,
        "reward": reward_model or "lit_ppo.rewards.rules.length_penalty",
        "sampling": {"max_new_tokens": new, "temperature": 1.0, "stop_tokens": []},
        "ppo": {"epochs": 1, "micro_batch_size": micro, "rollout_engine": engine, "fused_layers": True},
    }
    if kind != "full":
        model["lora"] = {"r": 16}
        model["layout"] = "separate" if kind == "lora" else "shared"
    callbacks: list[dict[str, Any]] = []
    if checkpointing:
        callbacks.append({"class_path": "GradientCheckpointing"})
    quantized = ["actor"] * (kind == "nf4") + ["reward"] * (reward_model is not None)
    if quantized:
        init = {"modules": quantized, "probe": False, "while_loading": False}
        callbacks.append({"class_path": "QuantizeModules", "init_args": init})
    words = [shape, kind, f"{prompt}+{new}", f"{rows}x{micro}"]
    words += ["checkpointing"] * checkpointing + [engine] * (engine != "hf") + [precision] * (precision != "bf16-true")
    words += [f"reward {reward_model}"] * (reward_model is not None)
    for name, value in options.items():
        group, _, key = name.rpartition("__")
        (model.setdefault(group, {}) if group else model)[key] = value
        words.append(f"{key}={value}")
    return {
        "name": " ".join(words),
        "config": {
            "model": model,
            "data": {"batch_size": rows, "max_prompt_length": prompt},
            "trainer": {"precision": precision, "callbacks": callbacks},
        },
    }


def grid() -> list[dict[str, Any]]:
    """Return the runs: sizes, ways to train, lengths from 512 to 4,096, what is recomputed, how a batch is cut."""
    return [
        case("135M", "full", 480, 32, 8, 8),
        case("135M", "full", 480, 32, 8, 8, checkpointing=True),
        case("135M", "full", 2016, 32, 8, 4),
        case("135M", "full", 4064, 32, 4, 2),
        case("135M", "full", 4064, 32, 8, 8, checkpointing=True),
        case("135M", "full", 480, 32, 8, 8, precision="32-true"),
        case("135M", "lora", 992, 32, 8, 4),
        case("135M", "shared", 2016, 32, 8, 4, checkpointing=True),
        case("135M", "full", 256, 256, 64, 16, engine="graph"),
        case("1.5B", "full", 480, 32, 8, 4),
        case("1.5B", "full", 480, 32, 8, 4, checkpointing=True),
        case("1.5B", "full", 992, 32, 8, 8, checkpointing=True),
        case("1.5B", "full", 2016, 32, 4, 2, checkpointing=True),
        case("1.5B", "full", 2016, 32, 8, 4),
        case("1.5B", "full", 4064, 32, 2, 1),
        case("1.5B", "full", 4064, 32, 4, 4, checkpointing=True),
        case("1.5B", "full", 128, 384, 64, 16, engine="graph", checkpointing=True),
        case("1.5B", "full", 480, 32, 8, 4, checkpointing=True, ppo__advantage="reinforce_pp"),
        case("1.5B", "full", 480, 32, 8, 4, checkpointing=True, optim__state="8bit", optim__rounding="stochastic"),
        case(
            "1.5B",
            "full",
            128,
            384,
            64,
            16,
            engine="graph",
            checkpointing=True,
            optim__state="8bit",
            optim__rounding="stochastic",
        ),
        case(
            "1.5B",
            "full",
            992,
            32,
            8,
            4,
            checkpointing=True,
            ppo__sequential_roles=True,
            optim__state="8bit",
            optim__rounding="stochastic",
        ),
        case(
            "1.5B",
            "full",
            992,
            32,
            8,
            4,
            ppo__sequential_roles=True,
            optim__state="8bit",
            optim__rounding="stochastic",
            optim__paged=True,
        ),
        case("1.5B", "lora", 480, 32, 8, 4),
        case("1.5B", "shared", 992, 32, 8, 4),
        case("1.5B", "shared", 2016, 32, 8, 2),
        case("1.5B", "nf4", 992, 32, 8, 4, checkpointing=True),
        case("1.5B", "nf4", 2016, 32, 8, 2),
        case("1.5B", "nf4", 128, 384, 32, 8, engine="graph"),
        case("8B", "shared", 496, 16, 8, 4),
        case("8B", "shared", 1008, 16, 4, 2),
        case("8B", "shared", 2032, 16, 2, 1),
        case("8B", "shared", 2032, 16, 4, 2, checkpointing=True),
        case("8B", "nf4", 496, 16, 8, 4),
        case("8B", "nf4", 1008, 16, 4, 2, checkpointing=True),
        case("8B", "nf4", 2032, 16, 4, 2, checkpointing=True),
        case("8B", "nf4", 4080, 16, 2, 1, checkpointing=True),
        case("8B", "nf4", 1008, 16, 4, 1),
        case("8B", "lora", 496, 16, 4, 2, checkpointing=True),
        case("8B", "shared", 256, 256, 16, 4, engine="graph", checkpointing=True),
        case(
            "8B",
            "nf4",
            1024,
            128,
            8,
            1,
            engine="graph",
            checkpointing=True,
            ppo__sequential_roles=True,
            optim__state="8bit",
        ),
        case("8B", "nf4", 496, 16, 4, 2, checkpointing=True, reward_model="8B"),
    ]


def small(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a case on tiny models and short texts, to try it out without a GPU."""
    entry = copy.deepcopy(entry)
    model = entry["config"]["model"]
    model["actor"] = "tiny"
    model["reward"] = "tiny" if model["reward"] in SHAPES else model["reward"]
    model["sampling"]["max_new_tokens"] = 4
    entry["config"]["data"]["max_prompt_length"] //= 32
    return entry


def run_case(config: dict[str, Any], device: str, iterations: int) -> dict[str, Any]:
    """Run a configuration on models built in place; return what was measured.

    Args:
        config: As `case` returns it.
        device: cuda, or cpu (where nothing of memory is measured).
        iterations: PPO iterations.
    """
    import lit_ppo.callbacks

    config = copy.deepcopy(config)
    options, data, settings = config["model"], config["data"], config["trainer"]
    words = tokenizer()
    dtype = torch.float32 if settings["precision"] == "32-true" else torch.bfloat16
    shape = options.pop("actor")
    if options["reward"] in SHAPES:
        reward = model_of(options["reward"], device, dtype, classifier=True)
        reward.tokenizer = words
        options["reward"] = reward
    actor = model_of(shape, device, dtype)
    module = PPOLightningModule(actor=actor, tokenizer=words, **options)
    recorder = Recorder()
    callbacks = [
        getattr(lit_ppo.callbacks, c["class_path"])(**c.get("init_args", {})) for c in settings.pop("callbacks")
    ]
    trainer = Trainer(
        accelerator="gpu" if device == "cuda" else "cpu", devices=1, max_epochs=1, limit_train_batches=iterations,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, recorder], **settings,
    )  # fmt: skip
    prompts = texts(data["batch_size"] * iterations, data["max_prompt_length"])
    trainer.fit(module, PromptDataModule(prompts, **data))
    return recorder.summary()


def run_grid(args: argparse.Namespace) -> None:
    """Run every case of the grid that has no row yet; a case that fails is written down with its error."""
    path = args.output / "memory_grid.jsonl"
    rows = read(path)
    there = {row["name"] for row in rows if not {"error", "beside"} & row.keys()}
    start = time.perf_counter()
    for entry in [small(e) for e in grid()] if args.shape == "tiny" else grid():
        if entry["name"] in there or (args.only and args.only not in entry["name"]):
            continue
        if args.minutes and time.perf_counter() - start > 60 * args.minutes:
            print("The time is up; the same command goes on from here.", flush=True)
            break
        began = time.perf_counter()
        row = dict(entry)
        with quietly(args.verbose):
            try:
                row["measured"] = run_case(entry["config"], args.device, args.iterations or 2)
            except Exception as error:
                traceback.print_exc()
                row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        free()
        shapes = {entry["config"]["model"]["actor"], entry["config"]["model"]["reward"]} & SHAPES.keys()
        row["models"] = {name: {"model_type": _config(name).model_type, **SHAPES[name][1]} for name in sorted(shapes)}
        row |= about(args) | {"wall_s": round(time.perf_counter() - began, 1)}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        result = row.get("error") or row["measured"]["allocated"]
        print(f"{entry['name']}: {result} in {row['wall_s']} s", flush=True)


# -------------------------------------------------------------------------------------------------------- the presets


def run_preset(args: argparse.Namespace) -> dict[str, Any]:
    """Run a preset under a cap; return what was measured.

    Args:
        args: The command line.
    """
    import yaml

    from benchmarks.memory import Recorder as Recording
    from lit_ppo.cli import main as cli

    text = yaml.safe_load(Path(args.preset).read_text())
    data = text["data"]
    lengths = data["max_prompt_length"]
    scratch = args.scratch / "lit-ppo-memory"
    prompts = scratch / f"prompts-{data['batch_size']}-{lengths}.jsonl"
    scratch.mkdir(parents=True, exist_ok=True)
    rows = texts(data["batch_size"] * args.iterations, lengths)
    prompts.write_text("".join(json.dumps({"prompt": row, "keyword": row.split()[0]}) + "\n" for row in rows))
    shutil.rmtree(scratch / "outputs", ignore_errors=True)
    argv = ["fit", "--config", str(sourced(text, scratch, args))]
    argv += ["--trainer.callbacks+=benchmarks.memory.Recorder", "--trainer.enable_progress_bar=false"]
    argv += [f"--data.train={prompts}", f"--trainer.limit_train_batches={args.iterations}", "--trainer.max_epochs=1"]
    argv += ["--trainer.enable_checkpointing=false", "--trainer.logger=false"]
    argv += [f"--trainer.default_root_dir={scratch / 'outputs'}", *args.override]
    free()
    if args.cap and args.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap / total))
    start = time.perf_counter()
    code = cli(argv)
    recorder = Recording.last
    if code or recorder is None or not recorder.metrics:
        raise RuntimeError(f"`lit-ppo {' '.join(argv)}` ended with {code}.")
    row: dict[str, Any] = {"preset": str(args.preset), "cap": args.cap, "rank_of": args.rank_of}
    row["measured"] = recorder.summary()
    row["reserved_peak_gib"] = max(row["measured"]["reserved"].values(), default=0)
    seconds = [sum(p["seconds"] for p in i.values()) for i in recorder.iterations]
    row["iteration_s"] = round(sorted(seconds)[len(seconds) // 2], 2)
    row["wall_s"] = round(time.perf_counter() - start, 1)
    return row


def sourced(text: dict[str, Any], scratch: Path, args: argparse.Namespace) -> Path:
    """Write the preset with folders in place of its sources; return the new file."""

    def role(value: Any, classifier: bool) -> Any:
        source = value if isinstance(value, str) else value.get("source")
        if source is None or (classifier and source.startswith(("lit_ppo.", "examples."))):
            return value
        shape = args.shape or SOURCES.get(source) or actor_shape
        path = folder(shape, scratch, args.device, classifier=classifier)
        return path if isinstance(value, str) else {**value, "source": path}

    model = text["model"]
    actor = model["actor"] if isinstance(model["actor"], str) else model["actor"]["source"]
    actor_shape = args.shape or SOURCES.get(actor)
    for name in ("actor", "critic", "reference"):
        if model.get(name) is not None:
            model[name] = role(model[name], False)
    rewards = model["reward"] if isinstance(model["reward"], list) else [model["reward"]]
    model["reward"] = [role(reward, True) for reward in rewards]
    if args.rank_of:
        strategy = {"data_parallel_size": args.rank_of, "tensor_parallel_size": 1}
        text["trainer"] |= {
            "devices": 1,
            "strategy": {"class_path": "benchmarks.fake_ranks.FakeRanks", "init_args": strategy},
        }
    path = scratch / f"{Path(args.preset).stem}.yaml"
    import yaml

    path.write_text(yaml.safe_dump(text))
    return path


def folder(shape: str, scratch: Path, device: str, *, classifier: bool) -> str:
    """Write a model of that shape and a tokenizer, once; return the folder."""
    path = scratch / f"{shape}{'-reward' if classifier else ''}"
    if not (path / "tokenizer.json").is_file():
        model = model_of(shape, device, torch.bfloat16, classifier=classifier)
        model.save_pretrained(path)
        tokenizer().save_pretrained(path)
        del model
        free()
    return str(path)


# -------------------------------------------------------------------------------------------------------------- parts


def model_of(shape: str, device: str, dtype: torch.dtype, *, classifier: bool = False) -> Any:
    """Make a model with random weights where it will be used."""
    import transformers

    config = _config(shape)
    kind = transformers.AutoModelForCausalLM
    if classifier:
        config.num_labels = 1
        kind = transformers.AutoModelForSequenceClassification
    torch.manual_seed(0)
    with torch.device(device):
        return kind.from_config(config, dtype=dtype).eval()


def _config(shape: str) -> Any:
    import transformers

    kind, fields = SHAPES[shape]
    return getattr(transformers, kind)(**fields, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def tokenizer() -> Any:
    """Make a byte-level tokenizer without merges; it knows fewer tokens than the models have.

    Whatever class transformers takes for a family (Qwen2's is always its own), each letter is one token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<pad>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def texts(count: int, length: int) -> list[str]:
    """Return prompts of exactly so many tokens, all different."""
    return [f"{i} {'the quick brown fox ' * (length // 20 + 1)}"[:length] for i in range(count)]


def about(args: argparse.Namespace) -> dict[str, str]:
    """Return what a row says of where it comes from."""
    import transformers

    hardware = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    return {
        "hardware": hardware,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": str(datetime.date.today()),
    }


def peak(kind: str) -> int:
    """Return the most bytes allocated or reserved since the last reset."""
    return getattr(torch.cuda, f"max_memory_{kind}")() if torch.cuda.is_available() else 0


def reset_peak() -> None:
    """Forget the peak."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def held() -> int:
    """Return the bytes allocated now."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def free() -> None:
    """Give back what nobody holds; the last recorder holds a trainer, and so its models."""
    Recorder.last = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def quietly(verbose: bool) -> Iterator[None]:
    """Keep Lightning's and our own messages back."""
    import contextlib
    import io
    import logging
    import warnings

    if verbose:
        yield
        return
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def size(text: str) -> int:
    """Parse a size: 12GB, 11.5GiB."""
    for unit, factor in (("GiB", 2**30), ("GB", 10**9)):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    raise argparse.ArgumentTypeError(f"{text!r} is no size. Write 12GB (1e9 bytes each) or 11.5GiB.")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--grid", action="store_true", help="run the grid")
    work.add_argument("--preset", type=Path, help="run a YAML")
    parser.add_argument("--only", help="of the grid, the rows whose name has this in it")
    parser.add_argument("--minutes", type=float, help="start no row of the grid after this")
    parser.add_argument("--cap", type=size, help="hard limit of the allocator, such as 12GB")
    parser.add_argument("--iterations", type=int, default=None, help="default: 2 in the grid, 3 of a preset")
    parser.add_argument("--rank-of", type=int, default=None, help="be rank 0 of so many under FSDP2")
    parser.add_argument("--shape", choices=list(SHAPES), help="in place of the presets' shapes")
    parser.add_argument("--override", action="append", default=[], help="an option of `lit-ppo fit`; repeatable")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    shm = Path("/dev/shm")
    parser.add_argument("--scratch", type=Path, default=shm if shm.is_dir() else Path(tempfile.gettempdir()))
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure; write rows."""
    args = parse(argv)
    if args.grid:
        run_grid(args)
        return
    args.iterations = args.iterations or 3
    try:
        row = run_preset(args)
    except Exception as error:
        row = {"preset": str(args.preset), "cap": args.cap, "error": f"{type(error).__name__}: {error}"[:2000]}
        traceback.print_exc()
    row |= about(args) | {"overrides": args.override}
    args.output.mkdir(parents=True, exist_ok=True)
    with (args.output / "memory_presets.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1), flush=True)


if __name__ == "__main__":
    main()
