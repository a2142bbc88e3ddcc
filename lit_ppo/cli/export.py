"""`lit-ppo export`."""

from __future__ import annotations

import argparse
from typing import Any


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the options.

    Args:
        argv: The command and its options.
    """
    parser = argparse.ArgumentParser(
        prog="lit-ppo export",
        description="Turn a checkpoint into a folder with weights, tokenizer, generation config and chat template. "
        "It loads in plain transformers; adapters load in PEFT, or with --merge in plain transformers.",
    )
    parser.add_argument("--ckpt", required=True, metavar="PATH", help="A checkpoint, or the folder of a run.")
    parser.add_argument("--to", required=True, metavar="DIR", help="The folder; must not exist, or be empty.")
    parser.add_argument(
        "--role",
        choices=["actor", "critic", "reward"],
        help="Which model (default: the policy, or the reward model where that is what was trained).",
    )
    parser.add_argument("--merge", action="store_true", help="Add the adapter to the trunk's weights.")
    parser.add_argument("--overwrite", action="store_true", help="Replace an earlier export.")
    return parser.parse_args(argv[1:])


def run(argv: list[str], **_: Any) -> None:
    """Export a model of a checkpoint.

    Args:
        argv: The command and its options.
    """
    args = parse(argv)
    from lit_ppo.export import export, load_module, load_policy, read_checkpoint
    from lit_ppo.hf_folder import check_target

    check_target(args.to, overwrite=args.overwrite)
    stage = read_checkpoint(args.ckpt)["lit_ppo"].get("stage", "ppo")
    role = args.role or ("reward" if stage == "reward" else "actor")
    module = load_policy(args.ckpt) if role == "actor" and stage != "reward" else load_module(args.ckpt)
    folder = export(module, args.to, role=role, merge=args.merge, overwrite=args.overwrite)
    print(f"{role} written to {folder}")
