"""What people see of a run: the metrics of an iteration, samples, and the effective configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from lit_ppo.algo.masked import explained_variance
from lit_ppo.experience import Rollout
from lit_ppo.metrics import Means, Sums
from lit_ppo.optim import state_bytes
from lit_ppo.rewards import Samples, Scores
from lit_ppo.speed import device_peak, rollout_floor, update_flop

if TYPE_CHECKING:
    from lit_ppo.base import Harness
    from lit_ppo.harness import PPOHarness


def record(
    module: PPOHarness,
    rollout: Rollout,
    scores: Scores,
    total: Tensor,
    old: Tensor,
    values: Tensor | None,
    returns: Tensor | None,
    mask: Tensor,
) -> None:
    """Add what a scored rollout says to the metrics.

    Args:
        module: Holds the metrics.
        rollout: B rows.
        scores: As the rewards gave them.
        total: (B,) scores as trained on.
        old: (B, R) old log-probs.
        values: (B, R) or None.
        returns: (B, R) or None.
        mask: (B, R) bool, response tokens of the kept samples.
    """
    means, n, world = module.means, len(rollout), module.trainer.world_size
    kept = total[scores.keep].double()
    means.add("objective/scores", kept.sum(), len(kept))
    means.add("objective/scores_sq", kept.square().sum(), len(kept))
    for name, part in scores.parts.items():
        means.add_mean(f"reward/{name}", part, scores.keep)
    lengths = rollout.lengths
    means.add("rollout/length_mean", lengths.sum(), n)
    means.add_max("rollout/length_max", lengths.max() if n else 0)
    means.add("rollout/eos_rate", rollout.stopped.sum(), n)
    means.add("rollout/truncated_rate", (~rollout.stopped).sum(), n)
    means.add("rollout/skipped_rate", (~scores.keep).sum(), n)
    means.add("val/num_eos_tokens", rollout.stopped.sum(), 1 / world)
    means.add("rollout/tokens", lengths.sum(), 1 / world)
    if rollout.entropy is not None:
        means.add("rollout/entropy", rollout.entropy.double().sum(), lengths.sum())
    if (peak := device_peak(lengths.device)) is not None:
        rows = module.engine.rows_at_once(min(n, module.ppo.rollout_batch_size or n))
        floor = rollout_floor(module.work["actor"], rollout.prompts.lengths.tolist(), lengths.tolist(), rows, peak)
        means.add("rollout/floor", floor, 1)
    for name, count in scores.truncated.items():
        means.add(f"reward/{name}_cut_rate", count, n)
    if values is not None and returns is not None and int(module.reduce(mask.sum())) > 1:
        means.add("critic/explained_var", explained_variance(values, returns, mask, module.reduce), 1)


def record_update(module: PPOHarness, stats: list[Sums], epoch_kl: Means) -> None:
    """Add what an optimizer step says to the metrics.

    Args:
        module: Holds the metrics.
        stats: Sums and counts by name, of each micro-batch.
        epoch_kl: Takes the approximate KL.
    """
    ratios = [micro["val/ratio"] for micro in stats if "val/ratio" in micro]
    if not module.updated and ratios:
        module.means.add("policy/ratio_first_step", sum(r for r, _ in ratios), sum(n for _, n in ratios))
    module.updated = True
    for micro in stats:
        for name, (total, count) in micro.items():
            module.means.add(name, total, count)
        if "policy/approxkl_avg" in micro:
            epoch_kl.add("kl", *micro["policy/approxkl_avg"])


def record_evaluation(means: Means, rollout: Rollout, scores: Scores) -> None:
    """Add a batch of held-out samples to the means of an evaluation."""
    means.add_mean("reward", scores.total, scores.keep)
    if len(scores.parts) > 1:
        for name, part in scores.parts.items():
            means.add_mean(f"reward_{name}", part, scores.keep)
    means.add("length_mean", rollout.lengths.sum(), len(rollout))
    means.add("eos_rate", rollout.stopped.sum(), len(rollout))
    if rollout.entropy is not None:
        means.add("entropy", rollout.entropy.double().sum(), rollout.lengths.sum())


def derive(metrics: dict[str, float], module: PPOHarness) -> None:
    """Finish the metrics of an iteration in place: what is made from sums, rates and the optimizer."""
    for mean, square, name, root in (
        ("objective/scores", "objective/scores_sq", "objective/scores_std", True),
        ("val/ratio", "val/ratio_sq", "val/ratio_var", False),
    ):
        if square in metrics:
            variance = max(metrics.pop(square) - metrics[mean] ** 2, 0.0)
            metrics[name] = variance**0.5 if root else variance
    metrics["rollout/tokens_per_s"] = metrics.pop("rollout/tokens") / max(metrics["time/rollout"], 1e-9)
    if "rollout/floor" in metrics:
        metrics["rollout/share_of_floor"] = metrics.pop("rollout/floor") / max(metrics["time/rollout"], 1e-9)
    if "update/tokens" in metrics:
        rate = metrics["update/tokens_per_s"] = metrics.pop("update/tokens") / max(metrics["time/update"], 1e-9)
        if (peak := device_peak(module.device)) is not None:
            works = [work for role, work in module.work.items() if role == "critic" or module.trains_actor]
            flop = update_flop(works, adapters=module.lora is not None)
            metrics["update/mfu"] = rate * flop / (peak.flops * module.trainer.world_size)
    for group in module.optimizers().param_groups:  # type: ignore[union-attr]
        metrics["lr" if group["name"] == "actor" else f"lr_{group['name']}"] = group["lr"]
    for name in [name for name, value in metrics.items() if value != value]:
        del metrics[name]  # NaN: nothing to explain, say


def sample_rows(rollout: Rollout, scores: Scores | None, tokenizer: Any, limit: int | None = 8) -> list[dict[str, Any]]:
    """Return rows for a table of samples: prompt, response, scores, and the prompt's other columns.

    A column that is called like one of ours becomes `data/<name>`.

    Args:
        rollout: B rows.
        scores: Or None, where nothing was scored.
        tokenizer: The policy's.
        limit: Rows at most; None: all.
    """
    rows = torch.arange(len(rollout) if limit is None else min(limit, len(rollout)))
    samples = Samples.from_rollout(rollout.select(rows), tokenizer)
    table = []
    for i in rows.tolist():
        row: dict[str, Any] = {
            "prompt": samples.plain_prompts[i],
            "response": samples.responses[i],
            "stopped": samples.stopped[i],
        }
        if rollout.entropy is not None:
            row["entropy"] = float(rollout.entropy[i].sum() / rollout.lengths[i])
        if scores is not None:
            row["reward"] = float(scores.total[i])
            row |= {f"reward/{name}": float(part[i]) for name, part in scores.parts.items()}
        table.append({(f"data/{name}" if name in row else name): v for name, v in samples.columns[i].items()} | row)
    return table


def role_modules(module: PPOHarness) -> dict[str, nn.Module]:
    """Return the models by role; roles that are views of one store give the same module."""
    if module.views is None:
        return {}
    found: dict[str, nn.Module] = {role: view.store for role, view in module.views.all().items()}
    for reward in () if module.rewards is None else module.rewards.rewards:
        if reward.model is not None:
            found[module.rewards.role(reward)] = reward.model
    return found


@rank_zero_only
def print_table(module: Harness, text: str) -> None:
    """Print the effective configuration: what is loaded, what is trained, and how a batch is cut.

    Args:
        module: With its models placed.
        text: Goes below the table.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title="lit-ppo", title_justify="left", header_style="bold")
    for column in ("role", "model", "parameters", "trained", "dtype", "device", "weights", "gradients", "optimizer"):
        left = column in ("role", "model", "dtype", "device")
        table.add_column(column, justify="left" if left else "right", no_wrap=column == "role")
    rewards: Any = getattr(module, "rewards", None)
    terms = rewards.rewards if rewards is not None else []
    weights = {r.name: "" if r.config.weight == 1 else f" x {r.config.weight:g}" for r in terms}
    models = {rewards.role(r): weights[r.name] for r in terms if r.model is not None}
    seen: dict[int, str] = {}
    trained = {role: [p for _, p in named] for role, named in module.trained.items()}
    for role, model in module.roles.items():
        parameters = list(model.parameters())
        base = getattr(model, "base", model)
        first = max(parameters, key=lambda p: p.numel())
        own = trained.get(role, [])
        state = sum(state_bytes(p, module.optim) for p in own)
        shared = seen.setdefault(id(model), role)
        table.add_row(
            role + models.get(role, ""),
            type(base).__name__ if shared == role else f"view of {shared}",
            f"{sum(p.numel() for p in parameters):,}" if shared == role else "",
            f"{sum(p.numel() for p in own):,}",
            str(first.dtype).removeprefix("torch."),
            str(first.device),
            in_bytes(sum(p.numel() * p.element_size() for p in parameters)) if shared == role else "",
            in_bytes(sum(p.numel() * p.element_size() for p in own)),
            in_bytes(state) + (" on the CPU" if module.optim.paged and state else ""),
        )
    for reward in terms:
        if reward.model is None:
            table.add_row(f"reward {reward.name}{weights[reward.name]}", "function", "", "", "", "cpu", "", "", "")
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)  # a log file: cut no names
    console.print(table)
    console.print(text, highlight=False)


def in_bytes(size: int) -> str:
    """Return a number of bytes as people read it; nothing for 0."""
    if not size:
        return ""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def batch_arithmetic(module: PPOHarness) -> str:
    """Say how prompts become optimizer steps."""
    ppo, samples = module.ppo, module.sampling_config.samples_per_prompt
    datamodule = getattr(module.trainer, "datamodule", None)
    prompts = getattr(datamodule, "batch_size", None)
    batch = "a batch of" if prompts is None else f"{prompts} prompts x {samples} samples = {prompts * samples}"
    micro = "whole minibatches" if ppo.micro_batch_size is None else f"micro-batches of {ppo.micro_batch_size}"
    if ppo.micro_batch_tokens is not None:
        micro = f"micro-batches of {ppo.micro_batch_tokens:,} tokens"
    kl = "no KL" if not ppo.needs_reference else f"KL {ppo.kl_estimator} x {module.kl.value:g}"
    if ppo.kl_target is not None:
        kl += f" (target {ppo.kl_target:g})"
    return (
        f"{batch} episodes an iteration, over {module.trainer.world_size} rank(s); {ppo.epochs} epochs x "
        f"{ppo.minibatches} minibatches = {ppo.epochs * ppo.minibatches} optimizer steps, in {micro}.\n"
        f"advantage {ppo.advantage}, {kl}; up to {module.sampling_config.max_new_tokens} new tokens at temperature "
        f"{module.sampling_config.temperature:g}; precision {module.trainer.precision}, seed {module.seed}."
    )
