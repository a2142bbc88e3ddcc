"""Peak memory by phase: what is held all along, and what each phase adds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from lit_ppo.optim import state_bytes
from lit_ppo.plan.held import Phase, Store, Units, stepping
from lit_ppo.plan.roles import HEADS, fake_model, fake_roles, kv_bytes, layers_of, pretend, weight_bytes
from lit_ppo.plan.setup import Model, Setup
from lit_ppo.plan.stand_ins import quantize
from lit_ppo.plan.trace import Step, prefill, rewarding, rows_of, sampling, scoring, training_step
from lit_ppo.roles.fused_layers import fuse_if
from lit_ppo.roles.model import RoleView
from lit_ppo.sharding.units import layers

PHASES = ("load", "rollout", "score", "update", "save")
"""Of PPO."""
BEFORE_PPO = ("load", "update", "validate", "save")
"""Of the stages before it."""
WORKSPACE = 128 * 2**20
"""What cuBLAS takes from torch's allocator on a recent GPU: 32 MiB a handle, for two libraries and two threads."""
KEPT = 0.1
"""Share of the card up to which the graph engine keeps its KV memory through the other phases."""
GIB = 2**30


class Forecast:
    """The peaks of a run. Traces are made when they are first needed, and kept.

    Args:
        setup: What decides the memory.
        traces: Of earlier forecasts, to share: levers change little.
    """

    def __init__(self, setup: Setup, traces: dict[Any, Any] | None = None) -> None:
        self.setup = setup
        self.traces: dict[Any, Any] = {} if traces is None else traces

    # ------------------------------------------------------------------------------------------------- what is held

    @cached_property
    def stores(self) -> dict[str, Store]:
        """Stores by the first role that views them; reward models too."""
        s, found = self.setup, {}
        for role, model in (("actor", s.actor), ("critic", s.critic), ("reference", s.reference)):
            if model is not None and not (role == "critic" and s.shared):
                found[role] = self._store(role, model)
        for name, (model, _) in s.rewards.items():
            found[name] = self._frozen(model)
        return found

    def _store(self, role: str, model: Model) -> Store:
        view, trained = self._view(role), self._trained(role)
        stack = [layer for _, _, layer in layers(view.store)]
        inside = {id(p) for p in stack[0].parameters()}
        others = inside.union(*({id(p) for p in layer.parameters()} for layer in stack))
        more = layers_of(model.config) - 1

        def total(count: Callable[[Any], int]) -> int:
            """One layer's share times the layers, and the rest."""
            return count(lambda p: id(p) not in others) + (1 + more) * count(lambda p: id(p) in inside)

        def weights(which: Callable[[Any], bool]) -> int:
            return weight_bytes(view.store, which)

        def gradients(which: Callable[[Any], bool]) -> int:
            return sum(p.numel() * p.element_size() for p in trained if which(p))

        def state(which: Callable[[Any], bool]) -> int:
            return sum(self._state(p) for p in trained if which(p))

        largest = max((p.numel() for p in trained), default=0)
        n = self.setup.ranks if self.setup.family == "fsdp" and model.sharded else 1
        if role == "reference" and model.quantize != "none":
            n = 1
        odd = {id(p) for p in trained if n > 1 and self.setup.flat and p.dtype != model.dtype}

        def share(count: Callable[[Any], int]) -> int:
            """What this rank holds: its part, and all of what FSDP1 does not cut."""
            whole = total(lambda which: count(lambda p: id(p) in odd and which(p)))
            return whole - (whole - total(count)) // n

        units = None
        if n > 1:
            head = view.store.base.get_output_embeddings()
            units = Units(
                root=weights(lambda p: id(p) not in others),
                layer=weights(lambda p: id(p) in inside),
                root_trained=gradients(lambda p: id(p) not in others),
                head_trained=0 if head is None else gradients(lambda p: p is head.weight),
                layer_trained=gradients(lambda p: id(p) in inside),
                ranks=n,
            )
        return Store(share(weights), share(gradients), share(state), -(-largest // n), units, total(weights))

    def _frozen(self, model: Model) -> Store:
        """A reward model, whole on each rank."""
        numbers = []
        for depth in (1, 2):
            made = fake_model(model, depth, classifier=True)
            if model.quantize != "none":
                made.packed = {id(layer.weight) for layer in quantize(made, HEADS)}
                made.mode = model.quantize
            numbers.append(weight_bytes(made))
        weights = numbers[0] + (numbers[1] - numbers[0]) * (layers_of(model.config) - 1)
        return Store(weights, 0, 0, 0, None, weights)

    def _name(self, role: str) -> str:
        """What the run calls a role."""
        return self.setup.role if role == "actor" else role

    def _view(self, role: str) -> Any:
        return self._roles().all()[self._name(role)]

    def _trained(self, role: str) -> list[Any]:
        groups = self._roles().trained()
        both = role == "actor" and self.setup.shared
        return [p for name in (("actor", "critic") if both else (self._name(role),)) for _, p in groups.get(name, ())]

    def _state(self, parameter: Any) -> int:
        return state_bytes(parameter, self.setup.optim)

    @property
    def depth(self) -> int:
        """Layers of what is traced."""
        return (1 if self.setup.lora is None else 2) + (self.setup.checkpointing or 1)

    def _roles(self) -> Any:
        s = self.setup
        key = (
            "roles",
            s.stage,
            self.depth,
            s.shared,
            repr((s.lora, [adapter.settings for adapter, _ in s.frozen])),
            s.precision,
            s.ppo.packing,
            s.ppo.fused_layers,
            *map(_key, (s.actor, s.critic, s.reference)),
        )
        if key not in self.traces:
            self.traces[key] = fake_roles(s, self.depth)
        return self.traces[key]

    # -------------------------------------------------------------------------------------------------- the traces

    def step(self, role: str) -> Step:
        """Trace a role's forward and backward."""
        s = self.setup
        if role == "critic" and s.shared:  # the same trunk with another adapter, and next to no head
            actor = self.step("actor")
            return Step(actor.kept, actor.peaks | {"forward": actor.kept, "head": actor.kept})
        key = ("step", role, *self._same(role), s.micro, s.prompt, s.sampling.max_new_tokens, s.checkpointing,
               s.offload_activations)  # fmt: skip
        if key not in self.traces:
            self.traces[key] = training_step(
                self._view(role),
                self._rows(s.micro),
                autocast=self.autocast,
                checkpoint=s.checkpointing,
                offload=s.offload_activations,
                options=self._asked(role),
            )
        return self.traces[key]

    def forward(self, role: str, rows: int) -> int:
        """Trace a role's forward without gradients."""
        s = self.setup
        key = ("score", role, *self._same(role), rows, s.prompt, s.sampling.max_new_tokens)
        if key not in self.traces:
            view, texts = self._view(role), self._rows(rows)
            self.traces[key] = scoring(view, texts, autocast=self.autocast, options=self._asked(role))
        return self.traces[key]

    def _rows(self, count: int) -> Any:
        """So many examples as long as they can get."""
        s = self.setup
        return rows_of(count * s.texts, s.prompt, s.sampling.max_new_tokens)

    def _asked(self, role: str) -> dict[str, Any]:
        """What a forward is asked for: the log-probs of PPO are tempered, and come with entropies."""
        tempered = self.setup.stage == "ppo" and self._view(role).output == "logprobs"
        return {"entropy": True, "temperature": 0.7} if tempered else {}

    def _same(self, role: str) -> tuple[Any, ...]:
        s = self.setup
        model = {"actor": s.actor, "critic": s.critic, "reference": s.reference or s.actor}[role]
        return (
            s.stage,
            _key(model),
            s.precision,
            repr((s.lora, [adapter.settings for adapter, _ in s.frozen])),
            s.shared,
        )

    @property
    def autocast(self) -> torch.dtype | None:
        """What forwards compute in, if that is another dtype than the weights'."""
        mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        return mixed.get(self.setup.precision)

    # -------------------------------------------------------------------------------------------------- the phases

    @cached_property
    def phases(self) -> dict[str, Phase]:
        """The peak of each phase."""
        names = PHASES if self.setup.stage == "ppo" else BEFORE_PPO
        return {name: getattr(self, f"_{name}")() for name in names}

    @property
    def peak(self) -> int:
        """The highest of them."""
        return max(phase.total for phase in self.phases.values())

    def _held(self, phase: str) -> dict[str, int]:
        """What is there before the phase does anything."""
        parts = self._resident(phase)
        kept = self.setup.family != "fsdp" and 0 < self._slots <= KEPT * self.setup.card
        return parts | ({"KV cache": self._slots} if kept and phase in ("score", "update", "save") else {})

    def _resident(self, phase: str) -> dict[str, int]:
        """Weights and optimizer state that are on the GPU in a phase."""
        s, parts = self.setup, {}
        frozen = ("load", "score")
        users = {"reference": frozen, "reward": frozen, "critic": ("load", "score", "update", "save")}
        models = {"actor": s.actor, "critic": s.critic, "reference": s.reference} | {
            n: m for n, (m, _) in s.rewards.items()
        }
        for name, store in self.stores.items():
            model = models[name]
            assert model is not None
            idle = model.offload and phase not in users.get(name.split(" ")[0], PHASES)
            idle = idle or (name == "actor" and s.offload_shards and phase == "rollout")
            if model.device is None and not idle:
                parts[f"weights {self._name(name)}"] = store.weights
        state = sum(store.state for store in self.stores.values())
        if state and not self._paged and not (s.offload_optimizer and phase not in ("update", "save")):
            parts["optimizer"] = state
        parts["workspace"] = WORKSPACE
        return parts

    @cached_property
    def _slots(self) -> int:
        """Bytes of the graph engine's KV memory, which it cuts to what is free; 0 with another engine."""
        s = self.setup
        if s.ppo.rollout_engine == "hf":
            return 0
        rows = max(1, min(s.ppo.rollout_batch_size or s.episodes, s.episodes))
        slots = rows if rows <= 256 else 256 + 64
        one = -(-s.length // 64) * 64 * kv_bytes(s.actor.config.get_text_config(), self.autocast or s.actor.dtype)
        free = (
            s.card - sum(self._resident("rollout").values()) - (self.stores["actor"].whole if s.family == "fsdp" else 0)
        )
        affordable = max(1, int(0.8 * free / one) - 1)
        if affordable < slots:
            s.notes.append(f"The rollout decodes {affordable} sequences at once: so many fit into the memory left.")
        return (min(slots, affordable) + 1) * one

    @property
    def _paged(self) -> bool:
        return self.setup.optim.paged

    def _load(self) -> Phase:
        parts = {name: size for name, size in self._held("load").items() if name.startswith("weights")}
        return Phase(parts)

    def _save(self) -> Phase:
        return Phase.worst(self._held("save"), [{"gathered": self._gathered("actor", "forward")}])

    def _gathered(self, role: str, moment: str) -> int:
        """What is gathered or reduced of a role, beside its shards."""
        units = self.stores["actor" if self.setup.shared and role == "critic" else role].units
        return 0 if units is None else units.at(moment)

    def _rollout(self) -> Phase:
        s, held, parts = self.setup, self._held("rollout"), dict[str, int]()
        store, config = self.stores["actor"], s.actor.config.get_text_config()
        moments = [parts]
        if store.units is not None:
            held["gathered actor"] = store.whole
            shards = {"weights actor": store.weights} if s.offload_shards else {}  # they leave once the whole is there
            moments.append(shards | {"gathered": store.units.layer})
        rows = max(1, min(s.ppo.rollout_batch_size or s.episodes, s.episodes))
        dtype = self.autocast or s.actor.dtype
        token = kv_bytes(config, dtype)
        layer = rows * token // layers_of(config)
        if s.ppo.rollout_engine == "hf":
            first = self._prefill(rows, s.prompt, cache=True) + (layers_of(config) - self.depth) * layer * s.prompt
            last = rows * s.length * token + max(layer * s.length // 2, self._sampled(rows, config.vocab_size, dtype))
            parts["KV cache"] = rows * token * (s.prompt if first > last else s.length)
            parts["decoding"] = max(first, last) - parts["KV cache"]
        else:
            parts["KV cache"] = self._slots
            tokens = min(rows * s.prompt, s.ppo.rollout_prefill_tokens)
            parts["decoding"] = self._prefill(1, tokens, cache=False)
        return Phase.worst(held, moments)

    def _prefill(self, rows: int, length: int, *, cache: bool) -> int:
        key = ("prefill", _key(self.setup.actor), self.depth, rows, length, cache)
        if key not in self.traces:
            made = pretend(fake_model(self.setup.actor, self.depth))
            if self.setup.actor.quantize != "none":
                quantize(made, HEADS)
            self.traces[key] = prefill(made, rows, length, cache=cache)
        return self.traces[key]

    def _sampled(self, rows: int, vocab: int, dtype: torch.dtype) -> int:
        key = ("sampling", rows, vocab, dtype, repr(self.setup.sampling))
        if key not in self.traces:
            self.traces[key] = sampling(rows, vocab, dtype, self.setup.sampling)
        return self.traces[key]

    def _score(self) -> Phase:
        s = self.setup
        rows = s.rows(s.ppo.score_batch_size or s.ppo.micro_batch_size, s.minibatch)
        roles = [r for r in ("actor", "critic", "reference") if r in self.stores or (r == "critic" and s.shared)]
        moments = [{"gathered": self._gathered(role, "begin")} for role in roles]
        moments += [{"gathered": self._gathered(r, "forward"), "activations": self.forward(r, rows)} for r in roles]
        for name, (model, options) in s.rewards.items():
            if model.device is None:
                moments.append({"activations": self._rewarded(name, model, min(options.batch_size, s.episodes))})
        trunk = self.stores["actor"]
        for adapter, options in s.frozen:  # a rollout's responses, on the whole trunk
            at_once = s.rows(s.ppo.score_batch_size or s.ppo.micro_batch_size, s.episodes)
            work = self._on_trunk(adapter.name, min(at_once, options.batch_size))
            moments.append({"activations": work, "gathered": 0 if trunk.units is None else trunk.whole})
        return Phase.worst(self._held("score"), moments)

    def _validate(self) -> Phase:
        moments = [{"gathered": self._gathered("actor", "begin")}]
        work = self.forward("actor", self.setup.micro)
        moments.append({"gathered": self._gathered("actor", "forward"), "activations": work})
        return Phase.worst(self._held("validate"), moments)

    def _rewarded(self, name: str, model: Model, rows: int) -> int:
        key = ("reward", name, _key(model), rows, self.setup.length)
        if key not in self.traces:
            made = pretend(fake_model(model, 2, classifier=True))
            fuse_if(self.setup.ppo.fused_layers, [made])
            if model.quantize != "none":
                quantize(made, HEADS)
            self.traces[key] = rewarding(made, rows, self.setup.length)
        return self.traces[key]

    def _on_trunk(self, adapter: str, rows: int) -> int:
        key = ("states", adapter, *self._same("actor"), rows, self.setup.length)
        if key not in self.traces:
            view = RoleView(self._roles().actor.store, "states", adapter)
            self.traces[key] = scoring(view, rows_of(rows, self.setup.length, 1), autocast=None, options={})
        return self.traces[key]

    def _update(self) -> Phase:
        s, held = self.setup, self._held("update")
        depths = {"actor": layers_of(s.actor.config)}
        roles = ["actor"]
        if s.critic is not None:
            roles.append("critic")
            depths["critic"] = layers_of(s.critic.config)
        gradients = {role: self._gradients(role) for role in roles}
        several = s.minibatch > s.micro
        moments: list[dict[str, int]] = []

        def moment(gradients: int, activations: int, gathered: int = 0) -> None:
            moments.append({"gradients": gradients, "activations": activations, "gathered": gathered})

        everything = sum(gradients.values())
        kept = roots = 0  # of the roles that have gone forward; FSDP keeps a root's weights for the backward
        if s.ppo.sequential_roles:
            for role in roles:
                step, n, own = self.step(role), depths[role], gradients[role]
                moment(own if several else 0, 0, self._gathered(role, "begin"))
                for segment, peak in step.peaks.items():
                    moment(own, peak.at(n), self._gathered(role, segment))
                moment(own, 0, self._gathered(role, "reduce"))
                moment(own, self._stepping(role))
        else:
            for role in roles:
                step, n, had = self.step(role), depths[role], everything if several else 0
                moment(had, kept, roots + self._gathered(role, "begin"))
                moment(had, kept + step.peaks["forward"].at(n), roots + self._gathered(role, "forward"))
                kept += step.kept.at(n)
                roots += self._root(role)
            done, alive = 0, kept
            for role in reversed(roles):  # the backward goes through the last forward first
                step, n, own = self.step(role), depths[role], gradients[role]
                alive -= step.kept.at(n)
                roots -= self._root(role)
                for segment in ("head", "top", "bottom"):
                    had = everything if several else done + (own if segment == "bottom" else 0)
                    moment(had, alive + step.peaks[segment].at(n), roots + self._gathered(role, segment))
                done += own
                roots += self._root(role, gradients=True)  # all roots are reduced when the whole backward is over
            for role in roles[: 1 if s.shared else None]:
                moment(everything, 0, roots - self._root(role, gradients=True) + self._gathered(role, "reduce"))
            moment(everything, max(self._stepping(role) for role in roles))
        return Phase.worst(held, moments)

    def _root(self, role: str, gradients: bool = False) -> int:
        units = None if self.setup.shared and role == "critic" else self.stores[role].units
        return 0 if units is None else units.root + gradients * units.root_trained

    def _gradients(self, role: str) -> int:
        if not self.setup.shared:
            return self.stores[role].trained
        return self.stores["actor"].trained // 2

    def _stepping(self, role: str) -> int:
        """What a step of the optimizer takes beside its state."""
        store = self.stores["actor" if self.setup.shared else role]
        return stepping(store, self.setup.optim, half=self.setup.precision in ("bf16-true", "16-true"))


def _key(model: Model | None) -> Any:
    return None if model is None else (id(model.config), model.dtype, model.quantize, model.embeddings)
