"""`lit-ppo generate`."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the options.

    Args:
        argv: The command and its options.
    """
    parser = argparse.ArgumentParser(
        prog="lit-ppo generate",
        description="Sample responses with the policy of a checkpoint. What is not given is as in its `eval_sampling`.",
    )
    parser.add_argument("--ckpt", required=True, metavar="PATH", help="A checkpoint, or the folder of a run.")
    parser.add_argument(
        "--prompt", required=True, action="append", metavar="TEXT", help="May be repeated; - reads stdin, one a line."
    )
    parser.add_argument(
        "--chat", action="store_true", help="Give each prompt to the chat template as a user's message."
    )
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="Longest response, in tokens.")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy.")
    parser.add_argument(
        "--samples", type=int, metavar="N", dest="samples_per_prompt", help="Responses for each prompt."
    )
    parser.add_argument("--seed", type=int, metavar="N", help="Of the sampling noise.")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: cuda where there is one).")
    return parser.parse_args(argv[1:])


def run(argv: list[str], **_: Any) -> None:
    """Sample responses with the policy of a checkpoint.

    Args:
        argv: The command and its options.
    """
    args = parse(argv)
    given = [line for text in args.prompt for line in (sys.stdin.read().splitlines() if text == "-" else [text])]
    prompts: list[Any] = [text for text in given if text.strip()]
    if not prompts:
        raise ValueError("`--prompt` is empty: there is nothing to respond to.")

    import torch

    from lit_ppo.checks import check_device_exists
    from lit_ppo.export import load_policy
    from lit_ppo.preflight import as_prompts
    from lit_ppo.rollout.base import PREDICT
    from lit_ppo.summary import sample_rows

    names = ("max_new_tokens", "temperature", "samples_per_prompt")
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device_exists("--device", device)
    module = load_policy(args.ckpt, changes, args.seed).to(device)
    if args.chat:
        prompts = [{"prompt": [{"role": "user", "content": text}]} for text in prompts]
    sampling = module.eval_sampling
    batch = as_prompts(prompts, module).repeat(sampling.samples_per_prompt)
    rollout = module.generate(batch, sampling, PREDICT, 0)
    for row in sample_rows(rollout, None, module.tokenizer, limit=None):
        if len(rollout) > 1:
            print(f"> {row['prompt']}")
        print(row["response"])
