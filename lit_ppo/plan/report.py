"""The forecast as people read it."""

from __future__ import annotations

from lit_ppo.plan.cards import CARDS, CONTEXT, Gpus, computes_bf16
from lit_ppo.plan.forecast import GIB, Forecast
from lit_ppo.plan.levers import Lever
from lit_ppo.plan.setup import Setup

TIGHT = 0.05
"""Share of a card within which the forecast may be wrong."""


def report(forecast: Forecast, gpus: Gpus, found: list[Lever] | None, title: str) -> str:
    """Return phases, verdict, levers and cards as text.

    Args:
        forecast: Of the run.
        gpus: The cards that it is for.
        found: What would save memory; None: not looked for.
        title: Names the configuration.
    """
    s = forecast.setup
    spread = {"one": "one device", "ddp": "DDP", "fsdp": "FSDP"}[s.family]
    lines = [
        f"{title} on {gpus.count} x {gpus.name} ({gpus.usable / GIB:.1f} GiB usable each), {spread}; {work(s)}.",
        "",
        "phase      peak, GiB   of which",
    ]
    worst = max(forecast.phases, key=lambda name: forecast.phases[name].total)
    for name, phase in forecast.phases.items():
        parts = sorted(phase.parts.items(), key=lambda part: -part[1])
        text = ", ".join(f"{key} {size / GIB:.2f}" for key, size in parts if size >= 0.005 * GIB)
        lines.append(f"{name + (' *' if name == worst else ''):<10} {phase.total / GIB:>9.2f}   {text}")
    lines += ["", verdict(forecast.peak, gpus)]
    lines += [f"Note: {note}" for note in s.notes]
    asked = s.in_bf16
    if asked and not gpus.bf16:
        fix = "trainer.precision: 16-mixed" if s.precision.startswith("bf16") else "dtype: float16 for these roles"
        lines.append(
            f"But {gpus.name} only emulates bfloat16, slowly, and without our kernels; it is asked for by "
            f"{', '.join(asked)}. Instead: {fix}, and plan again."
        )
    if found:
        lines += ["", "lever                                            saves, GiB   then, GiB   cost"]
        lines += [f"{x.line:<48} {x.saved / GIB:>10.2f} {x.peak / GIB:>11.2f}   {x.cost}" for x in found]
    known = sorted(CARDS.items(), key=lambda card: card[1])
    roomy = [name for name, size in known if forecast.peak <= (size - CONTEXT) * GIB * (1 - TIGHT)]
    fitting = [name for name in roomy if not asked or computes_bf16(name)]
    rest = f", and {len(fitting) - 4} larger ones" if len(fitting) > 4 else ""
    lines += ["", f"Cards that it fits: {', '.join(fitting[:4]) or 'none that is known'}{rest}."]
    if lacking := [name for name in roomy if name not in fitting]:
        lines.append(f"Large enough, but without the bfloat16 that this asks for: {', '.join(lacking)}.")
    return "\n".join(lines)


def work(s: Setup) -> str:
    """Say what a rank computes."""
    if s.stage == "ppo":
        long, many = f"sequences of {s.prompt:,} + {s.sampling.max_new_tokens:,} tokens", "a rank and iteration"
    else:
        what = "pairs of texts" if s.stage == "reward" else "texts"
        long, many = f"{what} of {s.longest:,} tokens", "a rank and step"
    return f"{long}, {s.episodes} {many}, micro-batches of {s.micro}"


def verdict(peak: int, gpus: Gpus) -> str:
    """Say whether a peak fits a card."""
    numbers = f"{peak / GIB:.2f} of {gpus.usable / GIB:.2f} GiB"
    if peak > gpus.usable:
        return f"Does not fit: {numbers}, {(peak - gpus.usable) / GIB:.2f} GiB too much."
    if peak > gpus.usable * (1 - TIGHT):
        return f"Tight: {numbers}. The forecast may be off by as much as is left."
    return f"Fits: {numbers}."
