"""What benchmarks/iteration.py measures, row by row, and the tables that it makes of the results."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

TRL = ("trl-shipped", "trl-helped")

CHECKPOINTING = {"callbacks.GradientCheckpointing": {}}
EIGHT_BIT = {"optim.state": "8bit", "optim.rounding": "stochastic"}
IN_TURN = {"ppo.sequential_roles": True}
QUANTIZED = {"quantize": ["reference", "reward"]}
PLAIN = {"precision": "bf16-true"}
ROWS: dict[str, dict[str, Any]] = {
    # Each row: options of the module by dotted name, `callbacks.NAME` with its arguments, and the trainer's precision.
    "plain": PLAIN,
    "lean": PLAIN | CHECKPOINTING | EIGHT_BIT | IN_TURN | QUANTIZED,
    "lean-reuse": PLAIN | CHECKPOINTING | EIGHT_BIT | IN_TURN | QUANTIZED | {"ppo.old_logprobs": "rollout"},
    "lean-offload": PLAIN | CHECKPOINTING | EIGHT_BIT | IN_TURN | QUANTIZED | {"callbacks.OffloadRoles": {}},
    "exact": PLAIN | CHECKPOINTING | IN_TURN,
    "exact-paged": PLAIN | CHECKPOINTING | IN_TURN | {"optim.paged": True},
}
LORA = {"layout": "shared", "lora.r": 16}
FLOAT32: dict[str, Any] = {"precision": "32-true", "ppo.packing": False, "ppo.fused_layers": False, "head": "naive"}
FULL = [
    ("plain", FLOAT32),
    ("+ bf16", {"precision": "bf16-true"}),
    ("+ checkpointing", CHECKPOINTING),
    ("+ packing", {"ppo.packing": True}),
    ("+ fused head", {"head": "fused"}),
    ("+ fused layers", {"ppo.fused_layers": True}),
    ("+ NF4 reward", {"quantize": ["reward"]}),
    ("+ 8-bit states", EIGHT_BIT),
    ("+ roles in turn", IN_TURN),
    ("+ LoRA trunk", LORA),
    ("+ offload", {"callbacks.OffloadRoles": {}}),
]
ADAPTERS = [
    *FULL[:2],
    ("+ LoRA trunk", LORA),
    *FULL[2:7],
    ("+ NF4 trunk", {"quantize": ["actor", "reward"]}),
    ("+ 8-bit states", EIGHT_BIT),
    ("+ offload", {"callbacks.OffloadRoles": {}}),
]
ABLATIONS = {"1.5B": FULL, "8B": ADAPTERS, "tiny": FULL}


# ---------------------------------------------------------------------------------------------------------- the rows


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what is asked for, as plain data: a table, a shape, a cell, a name and options each."""
    found = []
    if args.ablation:
        for shape in args.ablation:
            options: dict[str, Any] = {}
            cell = args.cells[0] if args.cells else {"8B": "32x256", "tiny": "8x16"}.get(shape, "64x256")
            for name, lever in ABLATIONS[shape]:
                if missing := lacking(lever := dict(lever)):
                    print(f"{shape} {name}: left out, as there is no {missing} here", flush=True)
                    continue
                options = options | lever
                found.append(row_of(args, "ablation", shape, cell, name, options))
        return found
    for shape in args.shapes:
        for cell in args.cells or ["64x256", "64x512", "256x256"]:
            for name in args.rows:
                found.append(row_of(args, "cells", shape, cell, name, ROWS.get(name, {})))
    return found


def row_of(
    args: argparse.Namespace, table: str, shape: str, cell: str, name: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Return a row to be measured."""
    row: dict[str, Any] = {"table": table, "shape": shape, "cell": cell, "name": name, "options": dict(options)}
    micro = args.micro or (4 if shape == "8B" else 8)
    row |= {"prompt": args.prompt, "varying": table == "ablation", "micro": micro, "device": args.device}
    row["iterations"] = args.iterations or (2 if name in TRL else 3)
    return row


def lacking(options: dict[str, Any]) -> str | None:
    """Return an option that this version does not have, if it is to be on; take those that would be off out."""
    import lit_ppo.callbacks
    from lit_ppo import config

    groups = {"ppo": config.PPOConfig, "optim": config.OptimConfig, "lora": config.LoRAConfig}
    for name, value in list(options.items()):
        group, _, key = name.partition(".")
        if group == "callbacks" and not hasattr(lit_ppo.callbacks, key):
            return name
        if group in groups and key not in {f.name for f in dataclasses.fields(groups[group])}:
            if value:
                return name
            del options[name]
    return None


def key_of(row: dict[str, Any]) -> str:
    """Return what makes two rows the same measurement."""
    names = ("table", "shape", "cell", "name", "options", "prompt", "micro", "device")
    return json.dumps([row[n] for n in names], sort_keys=True)


# ------------------------------------------------------------------------------------------------------- the tables


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; none, if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(folder: Path) -> None:
    """Write the tables of everything measured, the newest row of each."""
    rows = read(folder / "iteration.jsonl")
    latest = {(r["table"], r["shape"], r["cell"], r["name"]): r for r in rows}
    lines = [
        "# One PPO iteration",
        "",
        "Four models of true shape with random weights, one epoch, one minibatch. `python benchmarks/iteration.py`",
        "says in its first lines what is measured, and how.",
    ]
    columns = "| {} | what is on | s | rollout | score | update | peak GiB | reserved | tokens/s | MFU | busy |"
    for table, shape, cell in dict.fromkeys(key[:3] for key in latest):
        batch, new = cell.split("x")
        kind = "lever by lever, lengths vary" if table == "ablation" else "full fine-tuning of actor and critic"
        lines += ["", f"## {shape}: {batch} x {new} new tokens, {kind}", ""]
        lines += [columns.format("row"), "|---" * 11 + "|"]
        lines += [line_of(r) for k, r in latest.items() if k[:3] == (table, shape, cell)]
    made = {(r["hardware"], r["torch"], r["transformers"], r["date"]) for r in latest.values() if "hardware" in r}
    lines += ["", *(f"- {h}, torch {t}, transformers {v}, {d}" for h, t, v, d in sorted(made))]
    (folder / "iteration.md").write_text("\n".join(lines) + "\n")


def line_of(row: dict[str, Any]) -> str:
    """Return a row of a table."""
    on = described(row)
    if "error" in row:
        short = "out of memory" if "out of memory" in row["error"].lower() else row["error"]
        return f"| {row['name']} | {on} | {short} |" + " |" * 8
    m = row["measured"]
    busy = "" if m["busy"] is None else f"{m['busy']:.0%}"
    cells = [row["name"], on, *(f"{m[k]:.2f}" for k in ("seconds", "rollout_s", "score_s", "update_s"))]
    cells += [f"{m['peak_gib']:.1f}", f"{m['reserved_gib']:.1f}", f"{m['tokens_per_s']:,}", f"{m['mfu']:.0%}", busy]
    return "| " + " | ".join(cells) + " |"


def described(row: dict[str, Any]) -> str:
    """Say what a row has on, beside micro-batches."""
    if row["table"] == "ablation":
        return "" if row["name"] != "plain" else "float32, whole logits, padded"
    if row["name"] in TRL:
        return {"trl-shipped": "bf16 states", "trl-helped": "bf16 states, checkpointing, one rollout batch"}[
            row["name"]
        ]
    options = row["options"]
    state = "8-bit states, stochastic rounding" if "optim.state" in options else "float32 masters and moments"
    words = [state + (" in host memory" if options.get("optim.paged") else "")]
    words += ["checkpointing"] * ("callbacks.GradientCheckpointing" in options)
    words += ["one role at a time"] * ("ppo.sequential_roles" in options)
    words += ["idle models in host memory"] * ("callbacks.OffloadRoles" in options)
    words += ["the rollout's log-probs"] * ("ppo.old_logprobs" in options)
    words += [f"NF4 {' and '.join(options['quantize'])}"] if "quantize" in options else []
    return ", ".join(words)
