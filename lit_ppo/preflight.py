"""Everything that is checked before a weight is loaded, and what is derived from the configuration alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lit_ppo.checks import check_columns, check_devices, check_effect
from lit_ppo.config import LAYOUTS, LoRAConfig, PPOConfig, RoleConfig, SamplingConfig, choice, from_dict
from lit_ppo.data import PromptDataModule
from lit_ppo.experience import Prompts
from lit_ppo.output import check_output
from lit_ppo.ranks import check_device, check_same, gather
from lit_ppo.roles.build import RolePlan, check_source, plan_roles, read_config
from lit_ppo.roles.sources import context_length, load_tokenizer
from lit_ppo.roles.spread import named_devices
from lit_ppo.rollout.base import Sampling, resolve_sampling

if TYPE_CHECKING:
    from lit_ppo.base import Harness
    from lit_ppo.harness import PPOHarness

NEAR_GREEDY = 0.01
"""Temperature of validation where none is given."""


def eval_sampling(train: SamplingConfig, given: SamplingConfig | dict[str, Any] | None) -> SamplingConfig:
    """Return how evaluation samples: as given, or as training does, but near-greedy and once a prompt."""
    if given is not None:
        return from_dict(SamplingConfig, given)
    return replace(train, temperature=NEAR_GREEDY, samples_per_prompt=1, entropy=False)


def check_options(sampling: SamplingConfig, ppo: PPOConfig, layout: str, lora: LoRAConfig | None) -> None:
    """Check pairs of options that live in different dataclasses.

    Raises:
        ValueError: They contradict each other.
    """
    choice("", "layout", layout, LAYOUTS)
    if sampling.temperature == 0:
        raise ValueError(
            "`sampling.temperature=0` is greedy decoding: nothing is explored and every log-prob is 0 or -inf. "
            "Train with a temperature above 0 (0.7 is usual); `eval_sampling` may be greedy."
        )
    if sampling.truncates:
        rank_zero_warn(
            "`sampling.top_k`, `top_p` or `min_p` draw from less than the whole vocabulary, while log-probs are those "
            "of the whole: the measured KL is then biased and may be negative, and the first ratio is off-policy."
        )
    if ppo.advantage == "rloo" and sampling.samples_per_prompt < 2:
        raise ValueError(
            f'`ppo.advantage="rloo"` compares samples of the same prompt: `sampling.samples_per_prompt='
            f"{sampling.samples_per_prompt}` must be at least 2."
        )
    if ppo.advantage == "grpo" and sampling.samples_per_prompt < 2:
        rank_zero_warn(
            '`ppo.advantage="grpo"` with `sampling.samples_per_prompt=1` has no group to compare with: the advantage '
            "is the score itself. Use 4 to 16."
        )
    if layout == "shared" and lora is None:
        raise ValueError('`layout="shared"` keeps policy and value as adapters on one trunk: give `lora` too.')


def check_run(module: PPOHarness, stage: str) -> None:
    """Check sources, tokenizer, lengths, batch arithmetic and the trainer's options; load no weights.

    Args:
        module: Attached to its trainer.
        stage: fit, validate, test or predict.

    Raises:
        ValueError: What is wrong, and what to change.
    """
    trainer: Any = module.trainer
    ppo, stage = module.ppo, str(getattr(stage, "value", stage))  # Lightning passes an enum
    if stage != "predict":
        if module.rewards is None:
            raise ValueError(f"`reward` is missing: `{stage}` needs at least one source of reward.")
        module.rewards.check()
    role_plan = plan(module)
    for reward in module.trunk_rewards:
        if stage == "predict":
            reward.check()
        asked = module.role_load_kwargs
        reward.check_trunk(role_plan, module.tokenizer, asked.get(module.rewards.role(reward), asked.get("reward", {})))
    check_devices(module)
    vocab = role_plan.config.get_text_config().vocab_size
    if len(module.tokenizer) > vocab:
        raise ValueError(
            f"`tokenizer` knows {len(module.tokenizer)} tokens and the actor {vocab}: ids above that would be out of "
            "range. Use the actor's own tokenizer, or resize its embeddings first."
        )
    for config in (module.sampling_config, module.eval_sampling_config):
        sampling = resolved(module, config)
        if not sampling.stop.numel():
            none = "is empty" if config.stop_tokens == [] else "is not set, and the tokenizer has no EOS token"
            rank_zero_warn(
                f"`sampling.stop_tokens` {none}: every response will run to `max_new_tokens={sampling.max_new_tokens}`."
            )
    if isinstance(trainer.datamodule, PromptDataModule):
        check_columns(module, trainer.datamodule, stage)
    longest = getattr(trainer.datamodule, "longest_prompt", None)
    if longest is not None:
        check_length(module, longest, train=stage == "fit")
    if stage != "fit":
        return
    check_effect(module)
    if isinstance(trainer.datamodule, PromptDataModule):
        loader, samples = trainer.datamodule.train_dataloader(), module.sampling_config.samples_per_prompt
        last = 0 if loader.drop_last else len(loader.prompts) % loader.batch_size
        for prompts in (loader.batch_size, last):
            check_batch(module, prompts * samples)
        check_warmup(module, len(loader))
    if module.optim.schedule != "constant" and module.optim.total_iterations is None and endless(trainer):
        raise ValueError(
            f'`optim.schedule="{module.optim.schedule}"` ends at the last iteration, but this fit has no end: '
            "set `max_epochs` or `max_steps`, `optim.total_iterations`, or `schedule: constant`."
        )
    if trainer.log_every_n_steps == 50:  # Lightning's default, made for steps that take milliseconds
        trainer.log_every_n_steps = 1
    check_output(trainer, ppo)


def check_ranks(module: PPOHarness) -> None:
    """Check that every rank runs the same thing, and that no role is put where another rank computes.

    Raises:
        ValueError: On every rank: what differs, or the device that is taken.
    """
    trainer: Any = module.trainer
    names = ("max_epochs", "max_steps", "limit_train_batches", "limit_val_batches", "val_check_interval", "precision")
    settings = {name: getattr(trainer, name, None) for name in names}
    settings |= dict(module.hparams)
    describe = getattr(trainer.datamodule, "describe", dict)
    settings |= {f"{type(trainer.datamodule).__name__}.{key}": value for key, value in describe().items()}
    check_same(settings)
    config = plan(module).reference
    held = {"reference": config} if isinstance(config, RoleConfig) else {}
    held |= {f"reward {r.name}": r.config for r in (() if module.rewards is None else module.rewards.rewards)}
    ours = getattr(trainer.strategy, "parallel_devices", None) or []
    for name, options in held.items():
        check_device(f"{name}.device", options.device, ours)
        if len(ours) > 1 and isinstance(options.device_map, str) and not named_devices(options.device_map):
            raise ValueError(
                f"`{name}.device_map={options.device_map!r}` would take part of every GPU, also of those that the "
                "other ranks train on. Name a device that no rank uses for each part, or leave it out."
            )
        for device in named_devices(options.device_map):
            check_device(f"{name}.device_map", device, ours)


def check_batch(module: PPOHarness, episodes: int) -> None:
    """Check that the minibatches divide the batch.

    Args:
        module: Has the options.
        episodes: Responses of an iteration, over all ranks.
    """
    n = module.ppo.minibatches
    if episodes % n:
        divisors = [d for d in range(1, episodes + 1) if episodes % d == 0 and d <= 2 * n]
        raise ValueError(
            f"`ppo.minibatches={n}` does not divide the {episodes} episodes of an iteration (prompts x "
            f"`sampling.samples_per_prompt`). Use one of {divisors}, or another `batch_size`."
        )


def check_warmup(module: Harness, batches: int) -> None:
    """Check that the learning rate's warm-up ends within the fit.

    Args:
        module: Has the options.
        batches: Iterations of an epoch, unless the trainer limits them further.
    """
    warmup, length = module.optim.warmup_iterations, module.optim.total_iterations
    if not warmup:
        return
    if length is None and not endless(module.trainer):
        length = total_iterations(module, batches)
    if length is not None and warmup >= length:
        raise ValueError(
            f"`optim.warmup_iterations={warmup}` is as long as the run of {length} iterations, or longer: the learning "
            "rate would never be reached. Shorten it, or train longer."
        )


def check_length(module: PPOHarness, longest: int, *, train: bool) -> None:
    """Check that a prompt and its response fit the actor's context.

    Args:
        module: Has the options.
        longest: Tokens of the longest prompt.
        train: Whether responses are sampled for training, too; else for evaluation alone.
    """
    context = context_length(plan(module).config.get_text_config())
    trained, evaluated = module.sampling_config.max_new_tokens, module.eval_sampling_config.max_new_tokens
    new = max(trained, evaluated) if train else evaluated
    if context is None or longest + new <= context:
        return
    option = f"{'' if new == trained else 'eval_'}sampling.max_new_tokens"
    fixes = []
    if context > new:
        fixes.append(f"set `max_prompt_length` of PromptDataModule to at most {context - new}")
    if context > longest:
        fixes.append(f"lower `{option}` to at most {context - longest}")
    raise ValueError(
        f"A prompt of {longest} tokens and `{option}={new}` exceed the actor's context of {context} tokens: "
        f"{' or '.join(fixes) or 'each alone fills it, so shorten both'}."
    )


def endless(trainer: Any) -> bool:
    """Whether neither `max_epochs` nor `max_steps` ends the fit."""
    return trainer.max_steps == -1 and trainer.max_epochs in (None, -1)


def total_iterations(module: Harness, batches: int | None = None) -> int:
    """Return how many iterations the schedule spans: as configured, or as many as this fit will run.

    Args:
        module: Attached to its trainer.
        batches: Iterations of an epoch; None: the trainer knows by now.
    """
    if module.optim.total_iterations is not None:
        return module.optim.total_iterations
    trainer = module.trainer
    ends = []
    if trainer.max_epochs not in (None, -1):
        ends.append(trainer.max_epochs * (trainer.num_training_batches if batches is None else batches))
    if trainer.max_steps != -1 and not (ends and module.varies):
        # With a target KL an iteration may take fewer steps, and then there are more of them than this.
        ends.append(-(-trainer.max_steps // module.updates))
    return max(1, int(min(ends)))


def true_dtype(module: Harness) -> torch.dtype | None:
    """Return what the trainer's precision makes of every trained weight: a dtype for `bf16-true` and its like."""
    names = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
    return None if module._trainer is None else names.get(module.trainer.precision)


def plan(module: PPOHarness) -> RolePlan:
    """Return what will be loaded, checked once."""
    if "plan" not in module.cache:
        start = None
        if module.rewards is not None:
            model = next((r for r in module.rewards.rewards if getattr(r, "source", None) is not None), None)
            if model is not None:
                model.check()  # else the critic, which may start from it, would be blamed
                given = model.config
                start = RoleConfig(model.source, trust_remote_code=given.trust_remote_code, revision=given.revision)
        module.cache["plan"] = plan_roles(
            **module.sources,
            critic_start=start,
            layout=module.layout,
            lora=module.lora,
            has_critic=module.ppo.has_critic,
            has_reference=module.ppo.needs_reference,
            seed=module.seed,
        )
    return module.cache["plan"]


def load_own_tokenizer(module: Harness, given: Any) -> Any:
    """Load the tokenizer of what is trained.

    Args:
        module: Knows the sources.
        given: A path or id, or None: beside the first source.

    Raises:
        ValueError: There is none.
    """
    if isinstance(given, str):
        return load_tokenizer(given)
    role = next(iter(module.sources))
    source = check_source(role, module.sources[role])
    if source is None or (isinstance(source, RoleConfig) and source.source is None):
        raise ValueError(f"`{role}` is missing: give a folder, a Hugging Face id, or a transformers model.")
    read_config(role, source)  # if there is nothing at all, that is the better explanation
    if isinstance(source, nn.Module):
        path = getattr(source, "name_or_path", "")
        if not path:
            raise ValueError(f"`{role}` is a model without a path, so its tokenizer is unknown: pass `tokenizer=`.")
        return load_tokenizer(path)
    assert source.source is not None
    return load_tokenizer(source.source, trust_remote_code=source.trust_remote_code, revision=source.revision)


def resolved(module: PPOHarness, config: SamplingConfig) -> Sampling:
    """Return sampling options as token ids, looked up once."""
    key = f"sampling {config}"
    if key not in module.cache:
        module.cache[key] = resolve_sampling(config, module.tokenizer, plan(module).config, generation_config(module))
    return module.cache[key]


def generation_config(module: PPOHarness) -> Any:
    """Read the actor's generation config, which may name more stop tokens; None if it has none."""
    from transformers import GenerationConfig

    actor = plan(module).actor
    if isinstance(actor, nn.Module):
        return getattr(actor, "generation_config", None)
    try:
        return GenerationConfig.from_pretrained(actor.source, revision=actor.revision or "main")
    except OSError:
        return None


def as_prompts(batch: Any, module: PPOHarness) -> Prompts:
    """Accept what PromptDataModule yields, or rows and columns of strings from any other loader.

    Args:
        batch: `Prompts`; or a list of rows; or a dict of columns with `prompt` among them.
        module: Has the tokenizer.

    Raises:
        TypeError: None of these.
    """
    from lit_ppo.data.encode import encode

    if not isinstance(batch, Prompts):
        if isinstance(batch, dict):
            names = list(batch)
            batch = [dict(zip(names, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        if not isinstance(batch, (list, tuple)):
            raise TypeError(
                f"A batch is a {type(batch).__name__}. Use PromptDataModule, or a loader that yields lists of prompts "
                "or dicts of columns with `prompt` among them."
            )
        batch = encode(list(batch), module.tokenizer).to(module.device)
        batch.index += sum(gather(len(batch))[: module.global_rank])  # numbers over all ranks
    if len(batch):
        train = module._trainer is not None and module.trainer.training
        check_length(module, int(batch.lengths.max()), train=train)
    return batch
