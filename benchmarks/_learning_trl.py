"""The other side of learning.py: TRL's PPO on the same model, prompts, reward and options.

TRL is no dependency: `pip install trl==1.12.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19` beside lit-ppo.
What is done so that it learns as well as it can, and on the same numbers:

- Its reward is a model that is read at each sequence's last token. `TextReward` is such a model: it decodes the
  response and puts what the reward function says of it at every position, so its score is the very number.
- It finds lengths by looking for the pad token, so the pad must not be the EOS, as it is in many chat models: pads are
  a special token that the chat template never writes.
- Its value model starts with a head of zeros, as lit-ppo's does; its policy generates with no more options than these.
- Minibatches are whole forwards (no micro-batches): it averages losses over micro-batches, whatever their tokens, and
  with accumulation it would step once an epoch, however many minibatches are asked for.
- Scoring and generation take a whole batch at once.

Adam's epsilon is 1e-8 on both sides, its default. It clips no gradient, though its arguments say 1.0.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class TextReward(nn.Module):
    """A reward function as TRL asks for a reward model: a backbone, and a head on its last hidden state.

    A response is what follows the opening of the assistant's turn, which each prompt ends with.

    Args:
        function: Maps B texts to B numbers.
        tokenizer: The policy's.
        opening: Tokens of that opening.
    """

    base_model_prefix = "backbone"

    def __init__(self, function: Callable[[list[str]], list[float]], tokenizer: Any, opening: Sequence[int]) -> None:
        super().__init__()
        self.function, self.tokenizer, self.opening = function, tokenizer, list(opening)
        self.score = nn.Identity()
        self.lengths: list[float] = []
        """Mean tokens of a response, the EOS included, of each batch."""

    def check(self, prompts: list[list[int]]) -> None:
        """Raise unless every prompt has the opening once, at its end."""
        size = len(self.opening)
        for ids in prompts:
            if [i for i in range(len(ids)) if ids[i : i + size] == self.opening] != [len(ids) - size]:
                raise ValueError(f"A prompt must end with {self.opening}, and have it nowhere else: {ids}.")

    def backbone(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        """Return (B, L, 1) "hidden states": each row's reward at each of its positions."""
        responses = []
        for ids, real in zip(input_ids.tolist(), attention_mask.tolist(), strict=True):
            kept = [token for token, there in zip(ids, real, strict=True) if there]
            responses.append(kept[self._end_of_prompt(kept) :])
        self.lengths.append(sum(map(len, responses)) / len(responses))
        scores = torch.tensor(self.function(self.tokenizer.batch_decode(responses, skip_special_tokens=True)))
        return SimpleNamespace(hidden_states=[scores.to(input_ids.device)[:, None, None].expand(*input_ids.shape, 1)])

    def _end_of_prompt(self, ids: list[int]) -> int:
        size = len(self.opening)
        return next(i for i in range(size, len(ids) + 1) if ids[i - size : i] == self.opening)


class OutOfTime(Exception):
    """The time limit, thrown out of TRL's loop, which looks at no other sign."""


def separate_pad(tokenizer: Any) -> None:
    """Make the pad a special token that means nothing else."""
    taken = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token}
    if tokenizer.pad_token is None or tokenizer.pad_token in taken:
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        free = [token for token in added if token not in taken and token not in tokenizer.chat_template]
        if not free:
            raise ValueError("The tokenizer has no special token to spare for padding.")
        tokenizer.pad_token = free[-1]
    tokenizer.padding_side = "left"


def train(
    model: str, prompts: Any, tokenizer: Any, opening: list[int], reward: Callable[[list[str]], list[float]], run: Any
) -> tuple[Any, list[dict[str, float]], bool]:
    """Train with TRL's PPO.

    Args:
        model: Folder.
        prompts: `lit_ppo.experience.Prompts`.
        tokenizer: Whose pad is not its EOS.
        opening: Tokens that open the assistant's turn.
        reward: Of B responses.
        run: `learning.Run`.

    Returns:
        The policy, the curve, and whether the budget was reached before the time limit.
    """
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        GenerationConfig,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    options = run.options
    policy, reference = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    policy.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id
    )
    value = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    nn.init.zeros_(value.score.weight)
    if run.checkpointing:  # its own argument is never applied
        for trained in (policy, value):
            trained.gradient_checkpointing_enable({"use_reentrant": False})

    rows = [ids[-n:] for ids, n in zip(prompts.ids.tolist(), prompts.lengths.tolist(), strict=True)]
    judge = TextReward(reward, tokenizer, opening)
    judge.check(rows)
    dataset = Dataset.from_dict({"input_ids": rows})
    curve: list[dict[str, float]] = []

    class Record(TrainerCallback):
        started = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "objective/kl" in logs:
                seconds = time.perf_counter() - self.started
                point = {"episode": logs["episode"], "seconds": seconds, "reward": logs["objective/scores"]}
                curve.append(point | {"kl": logs["objective/kl"], "length": judge.lengths[-1]})
                run.say(curve[-1])
                if seconds > run.time_limit and logs["episode"] < run.budget:
                    raise OutOfTime

    with tempfile.TemporaryDirectory() as folder:
        args = PPOConfig(
            output_dir=folder,
            seed=run.seed,
            total_episodes=run.budget,
            per_device_train_batch_size=options.batch_size,
            gradient_accumulation_steps=1,
            local_rollout_forward_batch_size=options.batch_size,
            num_ppo_epochs=options.epochs,
            num_mini_batches=options.minibatches,
            response_length=options.new_tokens,
            temperature=options.temperature,
            stop_token="eos",
            kl_coef=options.kl_coef,
            cliprange=options.clip,
            cliprange_value=options.value_clip,
            vf_coef=options.vf_coef,
            gamma=options.gamma,
            lam=options.lam,
            whiten_rewards=False,
            learning_rate=options.lr,
            lr_scheduler_type="linear",
            adam_epsilon=options.eps,
            bf16=False,
            use_cpu=run.device == "cpu",
            gradient_checkpointing=False,
            num_sample_generations=0,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = PPOTrainer(
            args=args,
            processing_class=tokenizer,
            model=policy,
            ref_model=reference,
            reward_model=judge,
            value_model=value,
            train_dataset=dataset,
            eval_dataset=dataset.select(range(8)),
            callbacks=[Record()],
        )
        complete = True
        try:
            trainer.train()
        except OutOfTime:
            complete = False
    if run.checkpointing:
        policy.gradient_checkpointing_disable()
        policy.config.use_cache = True
    return policy, curve, complete
