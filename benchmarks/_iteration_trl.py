"""The other side of iteration.py: TRL's PPO on the same models, prompts and lengths.

TRL is no dependency: `pip install trl==1.12.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19` beside lit-ppo.
How it is measured fairly: models are in bfloat16 already (its `bf16` flag does nothing to them), pad is not EOS, there
are no sample generations and no saves. `trl-shipped` is what its arguments give: 32 sequences generated and scored at
once, and `gradient_checkpointing=True`, which is never applied. `trl-helped` has checkpointing really on, by hand, in
the policy and the value model, and generates and scores the whole batch at once.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

GIB = 2**30


class Marks:
    """The beginning of each phase of each iteration, and the end."""

    def __init__(self, device: str, busy: Any) -> None:
        self.cuda, self.busy = device == "cuda", busy
        self.iterations: list[dict[str, float]] = []

    def mark(self, phase: str) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        if phase == "rollout":
            if len(self.iterations) == 1:
                self.busy.start()
            self.iterations.append({})
        self.iterations[-1].setdefault(phase, time.perf_counter())


def measure(
    row: dict[str, Any], models: Callable[..., tuple[dict[str, Any], Any]], busy: Callable[[str], Any]
) -> tuple[str, dict[str, Any]]:
    """Run the iterations of one of TRL's rows; return its version and what was measured.

    Args:
        row: What `iteration.py` asks for.
        models: Makes the four models and the tokenizer.
        busy: Makes what watches the device.
    """
    import trl
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    from benchmarks.iteration import prompts

    batch, new = map(int, row["cell"].split("x"))
    helped = row["name"] == "trl-helped"
    roles, words = models(row, torch.bfloat16)
    if helped:
        for role in ("actor", "critic"):
            roles[role].gradient_checkpointing_enable({"use_reentrant": False})
    texts = prompts(row, roles["actor"].config.vocab_size, batch * (row["iterations"] + 1))
    data = Dataset.from_dict({"input_ids": texts})
    micro = min(row["micro"], batch)
    with tempfile.TemporaryDirectory() as folder:
        args = PPOConfig(
            output_dir=folder, per_device_train_batch_size=micro, gradient_accumulation_steps=batch // micro,
            num_mini_batches=1, num_ppo_epochs=1, total_episodes=batch * row["iterations"], response_length=new,
            local_rollout_forward_batch_size=batch if helped else min(32, batch), stop_token="eos", report_to="none",
            num_sample_generations=0, learning_rate=1e-6, bf16=row["device"] == "cuda", save_strategy="no",
            gradient_checkpointing=True, logging_steps=1, use_cpu=row["device"] == "cpu",
        )  # fmt: skip
        trainer = PPOTrainer(
            args=args, processing_class=words, model=roles["actor"], ref_model=roles["reference"],
            reward_model=roles["reward"], value_model=roles["critic"], train_dataset=data,
            eval_dataset=data.select(range(min(8, batch))),
        )  # fmt: skip
        marks = Marks(row["device"], busy(row["device"]))
        generation, accumulate, log = ppo_trainer.batch_generation, trainer.accelerator.accumulate, trainer.log

        def generate(*given: Any, **options: Any) -> Any:
            marks.mark("rollout")
            done = generation(*given, **options)
            marks.mark("score")
            return done

        def accumulating(*given: Any) -> AbstractContextManager[Any]:
            if "update" not in marks.iterations[-1]:
                marks.mark("update")
            return accumulate(*given)

        def logging(*given: Any, **options: Any) -> None:
            if marks.iterations:
                marks.mark("end")
            log(*given, **options)

        ppo_trainer.batch_generation = generate
        trainer.accelerator.accumulate, trainer.log = accumulating, logging
        if marks.cuda:
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
        marks.busy.stop()
    whole = [i for i in marks.iterations if "end" in i]
    measured = sorted(whole[1:] or whole, key=lambda i: i["end"] - i["rollout"])
    middle = measured[(len(measured) - 1) // 2]
    first = whole[0]["end"] - whole[0]["rollout"]
    peaks = [getattr(torch.cuda, f"max_memory_{k}")() / GIB if marks.cuda else 0 for k in ("allocated", "reserved")]
    return trl.__version__, {
        "seconds": round(middle["end"] - middle["rollout"], 3),
        "rollout_s": round(middle["score"] - middle["rollout"], 3),
        "score_s": round(middle["update"] - middle["score"], 3),
        "update_s": round(middle["end"] - middle["update"], 3),
        "peak_gib": round(peaks[0], 2),
        "reserved_gib": round(peaks[1], 2),
        "response_tokens": batch * new,
        "prompt_tokens": sum(map(len, texts)) * batch // len(texts),
        "busy": marks.busy.share,
        "first_s": round(first, 2),
    }
