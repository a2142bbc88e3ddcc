"""One whole PPO iteration with four models: lit-ppo's settings side by side, TRL's PPO beside them, lever by lever.

    python benchmarks/iteration.py --shapes 1.5B --cells 64x256 64x512 256x256      # all rows
    python benchmarks/iteration.py --ablation 1.5B                                  # from plain, one lever at a time
    python benchmarks/iteration.py --report                                         # only write the tables

Policy, critic, reference and reward model have the true shape and random weights, made on the device: right for time
and memory, silent about learning. A cell is prompts x new tokens. Rows are one epoch of one minibatch, prompts of
`--prompt` tokens and responses of full length; in an ablation both vary (1:8, the responses a third of the longest in
the mean), since padding is one of its subjects. Each row is a process of its own; the first iteration warms up, and of
the others the median one counts. Model FLOP of the update are 6 (with adapters 4) a token and weight of the matrices of
actor and critic, the actor's head at the responses alone, the embedding and recomputation not; MFU is their share of
989 TFLOP/s. `busy` is the share of the time in which the driver saw a kernel run.

Rows are appended to `iteration.jsonl`; those that are there already are skipped. `trl-shipped` and `trl-helped` need
TRL 1.12 (`_iteration_trl.py` says how it is run); without it they are left out.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from lightning.pytorch import Trainer

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks._iteration_rows import ABLATIONS, ROWS, TRL, key_of, lacking, read, report, rows_of  # noqa: E402
from benchmarks.memory import GIB, Recorder, free, quietly  # noqa: E402
from benchmarks.rollout import SHAPES  # noqa: E402

PEAK_FLOP = 989e12
"""bf16 without sparsity, of one H100 or H200."""


def run(args: argparse.Namespace) -> None:
    """Measure each row in a process of its own; a row that fails is written down with its error."""
    path = args.output / "iteration.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    there = {key_of(r) for r in read(path)} if not args.again else set()
    start = time.perf_counter()
    for row in rows_of(args):
        title = f"{row['shape']} {row['cell']} {row['name']}"
        reason = lacking(row["options"])
        if row["name"] in TRL and importlib.util.find_spec("trl") is None:
            reason = "trl 1.12"
        if reason is not None:
            print(f"{title}: left out, as there is no {reason} here", flush=True)
            continue
        if key_of(row) in there:
            continue
        if args.minutes and time.perf_counter() - start > 60 * args.minutes:
            print("The time is up; the same command goes on from here.", flush=True)
            break
        began = time.perf_counter()
        row |= in_a_process(row, args)
        row["wall_s"] = round(time.perf_counter() - began, 1)
        row["date"] = str(datetime.date.today())
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        said = row.get("error")
        if said is None:
            m = row["measured"]
            said = f"{m['seconds']} s, {m['peak_gib']} GiB, {m['tokens_per_s']:,} tokens/s"
        print(f"{title}: {said} (in {row['wall_s']} s)", flush=True)


def in_a_process(row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Run a row by itself; return what it measured, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--child", json.dumps(row), "--result", str(result)]
        command += ["--verbose"] * args.verbose
        try:
            done = subprocess.run(
                command, cwd=folder, stdout=None if args.verbose else subprocess.DEVNULL, timeout=args.timeout,
                stderr=None if args.verbose else subprocess.PIPE, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {args.timeout} s"}
        if result.exists():
            found: dict[str, Any] = json.loads(result.read_text())
            return found
        last = (done.stderr or "").strip().splitlines()[-1:]
        return {"error": f"ended with {done.returncode}: {''.join(last)}"[:300]}


def child(row: dict[str, Any], result: Path, verbose: bool) -> None:
    """Measure one row here, and write it to a file."""
    import transformers

    cuda = row["device"] == "cuda"
    about = {
        "hardware": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    try:
        with quietly(verbose):
            if row["name"] in TRL:
                from benchmarks._iteration_trl import measure

                about["trl"], found = measure(row, models, Busy)
            else:
                found = measure_ours(row)
        about["measured"] = found | rates(row, found)  # type: ignore[assignment]
    except Exception as error:
        if verbose:
            raise
        about["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    result.write_text(json.dumps(about))


# ------------------------------------------------------------------------------------------------ what is measured


class Clock(Recorder):
    """Times whole iterations beside the phases, the first left to warm up."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.starts: list[float] = []
        self.busy = Busy(device)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if batch_idx == 0:
            free()  # what loading has left
        if batch_idx == 1:
            self.busy.start()
        self.starts.append(time.perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.starts.append(time.perf_counter())
        self.busy.stop()
        super().on_train_end(trainer, pl_module)

    def found(self) -> dict[str, Any]:
        """Return the median iteration after the first, and the peaks of all."""
        seconds = [b - a for a, b in zip(self.starts, self.starts[1:], strict=False)]
        measured = range(1, len(seconds)) if len(seconds) > 1 else range(1)
        number = sorted(measured, key=lambda i: seconds[i])[(len(measured) - 1) // 2]
        phases, metrics = self.iterations[number], self.metrics[number]
        peaks = {k: max(p[k] for i in self.iterations for p in i.values()) / GIB for k in ("allocated", "reserved")}
        by_phase = {n: round(max(i[n]["allocated"] for i in self.iterations) / GIB, 2) for n in phases}
        checks = ("policy/ratio_first_step", "objective/kl", "rollout/logprob_gap", "optim/skipped_steps")
        return {
            "seconds": round(seconds[number], 3),
            **{f"{n}_s": round(p["seconds"], 3) for n, p in phases.items()},
            "peak_gib": round(peaks["allocated"], 2),
            "reserved_gib": round(peaks["reserved"], 2),
            "phase_gib": by_phase,
            "load_gib": round(self.load_peak / GIB, 2),
            "response_tokens": round(metrics["rollout/length_mean"] * metrics["_batch"]),
            "prompt_tokens": metrics["_prompt_tokens"],
            "busy": self.busy.share,
            "first_s": round(seconds[0], 2),
            "checks": {n: metrics[n] for n in checks if n in metrics},
        }

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        super().on_train_batch_end(trainer, pl_module)
        self.metrics[-1] |= {"_batch": len(batch), "_prompt_tokens": int(batch.lengths.sum())}


def measure_ours(row: dict[str, Any]) -> dict[str, Any]:
    """Run the iterations of one of our rows."""
    import lit_ppo.callbacks
    from lit_ppo import PPOLightningModule, PromptDataModule

    options = dict(row["options"])
    precision, head = options.pop("precision"), options.pop("head", "fused")
    quantized = options.pop("quantize", [])
    batch, new = map(int, row["cell"].split("x"))
    groups: dict[str, dict[str, Any]] = {
        "ppo": {"epochs": 1, "micro_batch_size": row["micro"], "rollout_engine": "graph"},
        "optim": {"actor_lr": 1e-6, "schedule": "constant"},
        "callbacks": {},
    }
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        group, _, key = name.partition(".")
        if key:
            groups.setdefault(group, {})[key] = value
        else:
            arguments[group] = value
    callbacks = [getattr(lit_ppo.callbacks, name)(**given) for name, given in groups.pop("callbacks").items()]
    if quantized:
        callbacks.append(lit_ppo.callbacks.QuantizeModules(quantized, probe=False, while_loading=False))
    dtype = torch.float32 if precision == "32-true" else torch.bfloat16
    roles, words = models(row, dtype, ["actor", "reward"] if arguments.get("layout") == "shared" else None)
    roles["reward"].tokenizer = words
    if head == "naive":
        whole_logits(roles["actor"])
    vocabulary = roles["actor"].config.vocab_size
    module = PPOLightningModule(
        tokenizer=words, sampling={"max_new_tokens": new, "temperature": 1.0, "stop_tokens": stops(row, vocabulary)},
        **roles, **arguments, **groups,
    )  # fmt: skip
    clock = Clock(row["device"])
    trainer = Trainer(
        accelerator="gpu" if row["device"] == "cuda" else "cpu", devices=1, max_epochs=1, precision=precision,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, clock],
    )  # fmt: skip
    texts = [" ".join(map(word, ids)) for ids in prompts(row, vocabulary, batch * row["iterations"])]
    trainer.fit(module, PromptDataModule(texts, batch_size=batch))
    return clock.found()


def models(row: dict[str, Any], dtype: torch.dtype, roles: list[str] | None = None) -> tuple[dict[str, Any], Any]:
    """Make the models on the device, and a tokenizer that knows as many tokens as they do."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    kind, fields = SHAPES[row["shape"]]
    found = {}
    torch.manual_seed(0)
    for role in roles or ["actor", "critic", "reference", "reward"]:
        labels = {"num_labels": 1} if role in ("critic", "reward") else {}
        config = getattr(transformers, kind)(**fields, **labels, bos_token_id=2, eos_token_id=1, pad_token_id=0)
        auto = transformers.AutoModelForSequenceClassification if labels else transformers.AutoModelForCausalLM
        with torch.device(row["device"]):
            found[role] = auto.from_config(config, dtype=dtype).eval()
        found[role].requires_grad_(role in ("actor", "critic"))
    vocabulary = {word(i): i for i in range(fields["vocab_size"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    return found, transformers.PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)


def word(number: int) -> str:
    """Return the text of a token."""
    return ("<pad>", "<eos>", "<bos>", "<unk>")[number] if number < 4 else f"w{number}"


def prompts(row: dict[str, Any], vocabulary: int, count: int) -> list[list[int]]:
    """Return random prompts: of one length, or from a quarter of it to twice as long."""
    draw, length = random.Random(0), row["prompt"]
    lengths = [draw.randint(length // 4, length * 2) if row["varying"] else length for _ in range(count)]
    return [[draw.randrange(4, vocabulary) for _ in range(max(1, n))] for n in lengths]


def stops(row: dict[str, Any], vocabulary: int) -> list[int]:
    """Return tokens that end a response: none, or so many that the mean is about a third of the longest."""
    new = int(row["cell"].split("x")[1])
    count = round(vocabulary * 2.85 / new) if row["varying"] else 0
    return torch.linspace(4, vocabulary - 1, count).long().tolist() if count else []


def whole_logits(model: Any) -> None:
    """Have log-probs computed from the logits of all tokens at once, by plain autograd, for comparison."""
    from lit_ppo.roles import logprobs

    model.get_output_embeddings().register_forward_hook(lambda *_: None)  # a head with a hook is called as it is
    logprobs.token_logprobs.__kwdefaults__["chunk_elements"] = 2**62


class Busy(threading.Thread):
    """Asks the driver which share of the time a kernel ran, many times a second."""

    class _Rates(ctypes.Structure):
        _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))

    def __init__(self, device: str) -> None:
        super().__init__(daemon=True)
        self.seen: list[int] = []
        self._end = threading.Event()
        self._handle: Any = None
        if device != "cuda":
            return
        try:
            self._driver = ctypes.CDLL("libnvidia-ml.so.1")
            handle = ctypes.c_void_p()
            name = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
            failed = self._driver.nvmlInit_v2()
            failed = failed or self._driver.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))
            self._handle = None if failed else handle
        except (OSError, AttributeError):
            return

    def run(self) -> None:
        now = self._Rates()
        while self._handle is not None and not self._end.wait(0.02):
            if self._driver.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(now)) == 0:
                self.seen.append(now.gpu)

    def stop(self) -> None:
        self._end.set()

    @property
    def share(self) -> float | None:
        """Mean share, or None where the driver does not say."""
        return round(statistics.mean(self.seen) / 100, 3) if self.seen else None


def rates(row: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return tokens a second, and the share of the device's matrix rate that the update reaches."""
    import transformers

    kind, fields = SHAPES[row["shape"]]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields))
    head = model.get_output_embeddings().weight.numel()
    layers = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)) - head
    tokens = found["prompt_tokens"] + found["response_tokens"]
    each = 4 if "lora.r" in row["options"] else 6
    flop = each * (2 * layers * tokens + head * found["response_tokens"])
    return {
        "tokens_per_s": round(found["response_tokens"] / found["seconds"]),
        "update_flop": flop,
        "mfu": round(flop / found["update_s"] / PEAK_FLOP, 4),
    }


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1.5B"], choices=list(SHAPES))
    parser.add_argument("--cells", nargs="+", help="prompts x new tokens, such as 64x256")
    parser.add_argument("--rows", nargs="+", default=[*ROWS, *TRL], choices=[*ROWS, *TRL])
    parser.add_argument("--ablation", nargs="+", choices=list(ABLATIONS))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--micro", type=int, help="sequences in one forward and backward; default: 8, of an 8B 4")
    parser.add_argument("--iterations", type=int, help="the warm-up included; default: 3, of TRL 2")
    parser.add_argument("--minutes", type=float, help="start no row after this")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a row")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--report", action="store_true", help="only write the tables")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> None:
    """Measure what is asked for, and write the tables."""
    args = parser().parse_args(argv)
    args.output = args.output.resolve()
    if args.child:
        child(args.child, args.result, args.verbose)
        return
    if not args.report:
        run(args)
    report(args.output)


if __name__ == "__main__":
    main()
