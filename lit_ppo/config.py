"""Typed configuration: one dataclass per concern, a docstring per field, checked when constructed.

Nothing here imports a model library, so that a bad value is reported before any weight is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from lit_ppo.options import at_least, at_most, check_types
from lit_ppo.options import choice as choice
from lit_ppo.options import from_dict as from_dict

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")
AGGREGATIONS = (
    "token_mean",
    "token_sum",
    "seq_mean_token_sum",
    "seq_mean_token_mean",
    "seq_mean_token_sum_norm",
)
ADVANTAGES = ("gae", "grpo", "rloo", "reinforce_pp")
SCHEDULES = ("linear", "cosine", "constant")
LAYOUTS = ("separate", "shared")
QUANTIZE = ("none", "nf4", "fp4", "int8")
QUANTIZE_EMBEDDINGS = ("none", "int8")
ENGINES = ("auto", "hf", "graph")


@dataclass
class SamplingConfig:
    """How responses are sampled. The defaults sample the whole vocabulary, as PPO's ratio assumes."""

    max_new_tokens: int = 128
    """Longest response, in tokens; a response that reaches it without a stop token counts as truncated."""
    temperature: float = 0.7
    """Divides the logits in sampling and in every log-prob. 0 is greedy: allowed for validation, not for training."""
    top_k: int = 0
    """Sample from the k likeliest tokens only; 0 is off. Anything but 0 makes the measured KL biased, even negative."""
    top_p: float = 1.0
    """Nucleus sampling; 1 is off. Same caveat as `top_k`."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest; 0 is off. Same caveat as `top_k`."""
    samples_per_prompt: int = 1
    """Responses sampled for each prompt. Group-relative advantages (`grpo`, `rloo`) need at least 2."""
    suppress_tokens: list[int | str] | None = None
    """Tokens (ids, or their text in the vocabulary) that are never sampled; left out of every log-prob alike."""
    stop_tokens: list[int | str] | None = None
    """Tokens that end a response. None: the tokenizer's EOS and those of the model's generation config."""
    stop_strings: list[str] | None = None
    """Texts that end a response, wherever its tokens complete one; the text stays part of the response."""
    entropy: bool = False
    """Measure the entropy of the distribution that each token is drawn from (nats; tempered, not truncated), logged per
    token as `rollout/entropy` (`val/entropy` of `eval_sampling`)."""

    def __post_init__(self) -> None:
        """Check every value."""
        me = "sampling"
        check_types(me, self)
        at_least(me, "max_new_tokens", self.max_new_tokens, 1)
        at_least(me, "temperature", self.temperature, 0)
        at_least(me, "top_k", self.top_k, 0)
        at_least(me, "top_p", self.top_p, 0, strict=True)
        at_most(me, "top_p", self.top_p, 1)
        at_least(me, "min_p", self.min_p, 0)
        at_most(me, "min_p", self.min_p, 1)
        at_least(me, "samples_per_prompt", self.samples_per_prompt, 1)
        strings: Any = self.stop_strings
        if strings is not None and not (isinstance(strings, list) and all(isinstance(s, str) and s for s in strings)):
            raise ValueError(f"`sampling.stop_strings={strings!r}` must be a list of texts, none empty.")

    @property
    def truncates(self) -> bool:
        """Whether the sampler draws from less than the whole vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass
class RoleConfig:
    """Where one of the models (actor, critic, reference) comes from and how it is held."""

    source: str | None = None
    """Folder or Hugging Face id. None: taken from the actor (reference), or from the reward model or actor (critic)."""
    dtype: str = "auto"
    """float32, bfloat16, float16, float64. auto: the trainer's true precision if it has one, else float32 where these
    very weights are trained and bfloat16 for frozen ones on CUDA; but a reference without a source of its own has the
    actor's, so that the KL of an untouched policy is exactly 0."""
    attn_implementation: str | None = None
    """Passed to transformers (sdpa, eager, flash_attention_2, ...). None: its default."""
    device: str | None = None
    """Frozen roles only: a device such as "cpu" or "cuda:1". None: the rank's own device."""
    device_map: str | dict[str, Any] | None = None
    """Frozen roles only: spread over several devices as transformers does: "auto", "balanced", or a device for each
    part by name (needs accelerate). None: on one."""
    quantize: str = "none"
    """none, nf4, fp4 or int8: hold frozen weights in 4 or 8 bits, quantized while they are loaded. Of the actor and the
    critic it is the trunk under the adapters (needs `lora`). Heads and embeddings stay as they are."""
    quantize_embeddings: str = "none"
    """none or int8: hold the embeddings, of the input and of the output, as int8 rows with a scale each. They are then
    frozen: of the actor and the critic it needs `lora`."""
    sharded: bool | None = None
    """Frozen roles only, under FSDP: cut over the ranks as trained roles are, or whole on each. None: cut, unless
    quantized or with a `device` of its own."""
    trust_remote_code: bool = False
    """Run model code that comes with the weights. Off unless you ask for it by name."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""

    def __post_init__(self) -> None:
        """Check every value."""
        check_types("role", self)
        choice("role", "dtype", self.dtype, DTYPES)
        choice("role", "quantize", self.quantize, QUANTIZE)
        choice("role", "quantize_embeddings", self.quantize_embeddings, QUANTIZE_EMBEDDINGS)
        check_revision("role", self)


def check_revision(owner: str, config: Any) -> None:
    """Raise if a folder is asked for one of its revisions."""
    if config.revision is not None and config.source and Path(config.source).is_dir():
        raise ValueError(
            f"`{owner}.revision={config.revision!r}` has no effect on {config.source!r}, which is a folder. Leave it "
            "out."
        )


@dataclass
class LoRAConfig:
    """Low-rank adapters on a frozen trunk (https://arxiv.org/abs/2106.09685)."""

    r: int = 16
    """Rank of the update."""
    alpha: float = 32
    """The update is scaled by alpha / r."""
    target_modules: list[str] | str = "all-linear"
    """Names of the layers that get an adapter, or "all-linear" (heads are never adapted)."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead (https://arxiv.org/abs/2312.03732)."""

    def __post_init__(self) -> None:
        """Check every value."""
        check_types("lora", self)
        at_least("lora", "r", self.r, 1)
        at_least("lora", "alpha", self.alpha, 0, strict=True)

    @property
    def scale(self) -> float:
        """Factor of the update."""
        return self.alpha / (self.r**0.5 if self.use_rslora else self.r)


@dataclass
class PPOConfig:
    """The algorithm. Defaults follow "The N+ implementation details of RLHF with PPO" (arXiv 2403.17031)."""

    epochs: int = 4
    """Passes over each rollout batch."""
    minibatches: int = 1
    """Optimizer steps per pass; must divide the number of episodes of a batch."""
    micro_batch_size: int | None = None
    """Sequences in one forward and backward. None: the whole minibatch. Changes memory and speed, not the gradient."""
    micro_batch_tokens: int | None = None
    """Instead of `micro_batch_size`: real tokens, of prompt and response, in one forward and backward, in the score
    phase too. A longer sequence is a micro-batch of its own."""
    packing: bool = True
    """Run the real tokens of a micro-batch as one row, without padding. A model that cannot runs padded, with a line
    that says why."""
    fused_layers: bool = True
    """On CUDA, in 16 bits or mixed precision: norms, SwiGLU and rotary embeddings as one kernel each, for modules whose
    own code computes what the kernels do (docs/packing.md). False: transformers' modules as they are."""
    score_batch_size: int | None = None
    """Sequences in one forward of the score phase. None: as `micro_batch_size` (then the first ratio is exactly 1)."""
    rollout_batch_size: int | None = None
    """Sequences generated at once. None: all. The sampling noise does not depend on it."""
    rollout_engine: str = "auto"
    """hf: transformers' `generate`, anywhere. graph: captured decode steps, many times faster on CUDA. auto: graph on
    CUDA if it can serve the model, else hf, with a line that says why."""
    rollout_prefill_tokens: int = 32768
    """Prompt tokens that the graph engine reads in one forward, longer prompts in pieces. Fewer take less memory."""
    advantage: str = "gae"
    """gae, or without a critic: grpo, rloo, reinforce_pp."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """GAE's lambda."""
    clip: float = 0.2
    """The ratio is clipped to [1 - clip, 1 + clip_high]."""
    clip_high: float | None = None
    """Upper clip range; None: as `clip`."""
    dual_clip: float | None = None
    """Bound on the loss where the advantage is negative, > 1 (arXiv 1912.09729); None is off."""
    value_clip: float | None = 0.2
    """Values move at most this far from their old value before the loss stops rewarding it; None is off."""
    vf_coef: float = 0.1
    """Weight of the value loss. With Adam and a group of its own it acts only through epsilon and clipping."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    kl_coef: float = 0.05
    """KL penalty inside the reward. 0: the reference is not loaded unless `log_kl` or `kl_loss_coef` needs it."""
    kl_estimator: str = "k1"
    """k1, abs, k2, k3 (http://joschu.net/blog/kl-approx.html)."""
    kl_target: float | None = None
    """Turns on the adaptive controller (Ziegler 2019, who used 6): the KL per sequence that it holds."""
    kl_horizon: int = 10_000
    """Episodes over which the adaptive controller acts."""
    kl_loss_coef: float = 0.0
    """KL penalty inside the loss, differentiable."""
    kl_loss_estimator: str = "k2"
    """As `kl_estimator`, but not k1 or abs: their expected on-policy gradient is not the KL's."""
    log_kl: bool = False
    """Load and run the reference just to chart the KL."""
    loss_aggregation: str = "token_mean"
    """token_mean, token_sum, seq_mean_token_sum, seq_mean_token_mean, seq_mean_token_sum_norm."""
    whiten_advantages: bool = True
    """Zero mean, unit variance over all response tokens of the global batch (gae only)."""
    whiten_rewards: bool = False
    """Scale the KL-adjusted token rewards to unit variance, keeping their mean."""
    score_clip: float | None = None
    """Clip scores to [-score_clip, score_clip]; None is off."""
    scale_scores: bool = False
    """Divide scores by their running standard deviation."""
    missing_eos_penalty: float = 0.0
    """Subtracted from the score of a response with no stop token."""
    bootstrap_truncated: bool = False
    """A response cut by its length continues with the critic's value at the cut instead of 0."""
    target_kl: float | None = None
    """Stop the epochs of an iteration once the approximate KL to the old policy passes this; None is off."""
    critic_warmup_iterations: int = 0
    """Iterations at the start in which only the critic learns."""
    max_grad_norm: float | None = 1.0
    """Gradient norm of each role is clipped to this; None is off."""
    old_logprobs: str = "forward"
    """forward: recomputed in the score phase, so that the first ratio is 1. rollout: the sampler's own, saving that
    forward; the first ratio then is off by `rollout/logprob_gap`, measured on the first micro-batch."""
    sequential_roles: bool = False
    """Within a minibatch, finish the actor's backward and step before the critic's begin: one role's gradients and
    activations at a time. Same result; `on_before_optimizer_step` fires for each of the two."""

    def __post_init__(self) -> None:
        """Check every value and every pair that cannot go together."""
        me = "ppo"
        check_types(me, self)
        at_least(me, "epochs", self.epochs, 1)
        at_least(me, "minibatches", self.minibatches, 1)
        for name in (
            "micro_batch_size",
            "micro_batch_tokens",
            "score_batch_size",
            "rollout_batch_size",
            "rollout_prefill_tokens",
        ):
            at_least(me, name, getattr(self, name), 1)
        for name in ("micro_batch_size", "score_batch_size"):
            if self.micro_batch_tokens is not None and getattr(self, name) is not None:
                raise ValueError(
                    f"`ppo.micro_batch_tokens={self.micro_batch_tokens}` cuts batches by tokens, and `ppo.{name}="
                    f"{getattr(self, name)}` by sequences. Leave one of the two out."
                )
        choice(me, "old_logprobs", self.old_logprobs, ("forward", "rollout"))
        choice(me, "rollout_engine", self.rollout_engine, ENGINES)
        if self.rollout_engine == "hf" and self.rollout_prefill_tokens != PPOConfig.rollout_prefill_tokens:
            raise ValueError(
                f"`ppo.rollout_prefill_tokens={self.rollout_prefill_tokens}` is of the graph engine, and `ppo."
                "rollout_engine='hf'` reads the prompts of a batch at once. Leave it out, or lower "
                "`ppo.rollout_batch_size`."
            )
        choice(me, "advantage", self.advantage, ADVANTAGES)
        choice(me, "loss_aggregation", self.loss_aggregation, AGGREGATIONS)
        choice(me, "kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        choice(me, "kl_loss_estimator", self.kl_loss_estimator, KL_ESTIMATORS)
        for name in ("gamma", "lam"):
            at_least(me, name, getattr(self, name), 0)
            at_most(me, name, getattr(self, name), 1)
        at_least(me, "clip", self.clip, 0, strict=True)
        at_most(me, "clip", self.clip, 1, "A ratio is never below 0.")
        for name in ("clip_high", "value_clip", "score_clip", "kl_target", "target_kl", "max_grad_norm"):
            at_least(me, name, getattr(self, name), 0, strict=True, why="Leave it out (null) to turn it off.")
        at_least(me, "dual_clip", self.dual_clip, 1, strict=True, why="Leave it out (null) to turn it off.")
        for name in ("vf_coef", "entropy_coef", "kl_coef", "kl_loss_coef", "missing_eos_penalty"):
            at_least(me, name, getattr(self, name), 0)
        at_least(me, "kl_horizon", self.kl_horizon, 1)
        at_least(me, "critic_warmup_iterations", self.critic_warmup_iterations, 0)
        if self.kl_loss_estimator in ("k1", "abs"):
            raise ValueError(
                f"`ppo.kl_loss_estimator={self.kl_loss_estimator!r}` cannot be a loss: its expected gradient on the "
                "policy's own samples is not the KL's (for k1 it is zero). Use 'k2', 'k3' or 'k1+'."
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("`ppo.kl_target` adapts `ppo.kl_coef`, which is 0 and would stay 0. Start it above 0.")
        if not self.has_critic:
            for name, off in (("bootstrap_truncated", False), ("critic_warmup_iterations", 0)):
                if getattr(self, name) != off:
                    raise ValueError(f"`ppo.{name}` needs a critic, and `ppo.advantage={self.advantage!r}` has none.")

    @property
    def has_critic(self) -> bool:
        """Whether the advantage estimator uses a value model."""
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether anything uses the reference model."""
        return self.kl_coef > 0 or self.kl_loss_coef > 0 or self.log_kl


@dataclass
class AdamConfig:
    """AdamW, and a schedule that moves once an iteration: what every stage has."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates."""
    eps: float = 1e-5
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    state: str = "float32"
    """Adam's moments: float32 (8 bytes a parameter), or 8bit (2 bytes; matrices of 4096 elements or more)."""
    rounding: str = "master"
    """How small updates of bfloat16 weights are kept: master (a float32 copy of each), or stochastic (none; each weight
    is rounded up or down by chance, in proportion). Without effect on float32 weights."""
    paged: bool = False
    """Keep the optimizer's state in pinned CPU memory, on the GPU only around the step. CUDA alone."""
    schedule: str = "linear"
    """linear or cosine to 0 at the last iteration, or constant."""
    warmup_iterations: int = 0
    """Iterations over which the learning rate rises from 0."""
    total_iterations: int | None = None
    """Length of the schedule; None: as many iterations as this fit will run."""

    def __post_init__(self) -> None:
        """Check every value."""
        me = "optim"
        check_types(me, self)
        at_least(me, "weight_decay", self.weight_decay, 0)
        at_least(me, "eps", self.eps, 0, strict=True)
        betas: Any = self.betas
        if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(isinstance(b, Real) for b in betas):
            raise ValueError(f"`optim.betas={betas!r}` must be two numbers, such as (0.9, 0.999).")
        for beta in betas:
            at_least(me, "betas", beta, 0)
            if beta >= 1:
                raise ValueError(f"`optim.betas={betas!r}` must be below 1.")
        choice(me, "state", self.state, ("float32", "8bit"))
        choice(me, "rounding", self.rounding, ("master", "stochastic"))
        choice(me, "schedule", self.schedule, SCHEDULES)
        at_least(me, "warmup_iterations", self.warmup_iterations, 0)
        at_least(me, "total_iterations", self.total_iterations, 1)


@dataclass
class OptimConfig(AdamConfig):
    """One AdamW with a parameter group per role of PPO."""

    actor_lr: float = 3e-6
    """Learning rate of the policy (its adapters, with LoRA)."""
    critic_lr: float | None = None
    """Learning rate of the value model; None: as `actor_lr`."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        for name in ("actor_lr", "critic_lr"):
            at_least("optim", name, getattr(self, name), 0)
