"""Models out of lit-ppo: folders that load in plain transformers or PEFT."""

from __future__ import annotations

import copy
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_ppo.config import PPOConfig, SamplingConfig, choice, from_dict
from lit_ppo.hf_folder import check_target, no_bars, save_adapter, write_folder
from lit_ppo.roles.adapters import tuner_layers
from lit_ppo.roles.int8 import Int8Rows
from lit_ppo.roles.sources import first_line
from lit_ppo.sharding.folders import read_folder

if TYPE_CHECKING:
    from lit_ppo.base import Harness
    from lit_ppo.module import PPOLightningModule

ROLES = ("actor", "critic", "reward")
NO_REFERENCE: dict[str, Any] = {"kl_coef": 0.0, "kl_target": None, "kl_loss_coef": 0.0, "log_kl": False}
NO_CRITIC: dict[str, Any] = {"advantage": "reinforce_pp", "bootstrap_truncated": False, "critic_warmup_iterations": 0}


def export(
    module: Harness,
    directory: str | os.PathLike[str],
    role: str | None = None,
    merge: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write one of the trained models, with its tokenizer, generation config and chat template, to a folder.

    A fully trained model, or with `merge` an adapter added to its trunk, is what `from_pretrained` of transformers
    loads: `AutoModelForCausalLM` for the actor, `AutoModelForSequenceClassification` for critic and reward. An adapter
    alone, with the head of critic and reward, is what `PeftModel.from_pretrained` loads. The folder appears when it is
    complete. The module is not changed.

    Args:
        module: With its models loaded (by a fit, `load_policy` or `load_module`).
        directory: Where; must not exist, or be empty.
        role: "actor", "critic" or "reward". None: the policy of PPO and SFT, the reward model of RewardModule.
        merge: Add the adapter to the trunk's weights.
        overwrite: Replace an earlier export.

    Returns:
        The folder.

    Raises:
        ValueError: There is no such model, or it cannot be written in this form.
        FileExistsError: The folder is in use.
    """
    saved = {} if module.views is None else module.views.saved()
    role = next(iter(saved), "actor") if role is None else role
    choice("", "role", role, ROLES)
    if module.sharding.sharded:
        raise ValueError(
            "`module` is sharded: no rank has its weights whole. Save a checkpoint (`trainer.save_checkpoint`) and "
            "export that, on one machine: `lit-ppo export`."
        )
    view = saved.get(role)
    if view is None:
        why = (
            "`ppo.advantage` uses no critic"
            if role == "critic" and "actor" in saved
            else f"its stage is {module.stage}"
        )
        raise ValueError(
            f"`role={role!r}`: this module has none, as {why if saved else 'its models are not loaded yet'}."
        )
    target = Path(directory)
    source = getattr(view.store.base, "name_or_path", "")
    check_target(target, source, overwrite)
    adapted = view.adapter is not None
    if role == "critic" and module.layout == "shared":
        raise ValueError(
            '`role="critic"` is an adapter and a head on the actor\'s trunk (`layout: shared`), which no class of '
            "transformers loads. Only a critic of `layout: separate` can be exported."
        )
    if merge and not adapted:
        raise ValueError(f"`merge`: the {role} was trained without adapters. Leave it out.")

    def write(folder: Path) -> None:
        if not adapted or merge:
            model = merged(view.store.base, str(view.adapter)) if merge else view.store.model
            with module.finished(model):
                model.save_pretrained(folder)
        else:
            with module.finished(view.store.base):
                save_adapter(view.store.model, view.adapter, folder)
        module.tokenizer.save_pretrained(folder)

    with no_bars():
        return write_folder(target, write)


def merged(base: Any, adapter: str) -> Any:
    """Return a new model on the CPU with an adapter added to its trunk; the trunk itself is not touched.

    Args:
        base: A transformers model whose layers carry adapters.
        adapter: Which one.

    Raises:
        ValueError: The trunk is quantized, or the adapter is on one of two tied embeddings.
    """
    if any(isinstance(module, Int8Rows) for module in base.modules()):
        raise ValueError(
            "`merge`: the embeddings are in 8 bits (`quantize_embeddings`), and a merged model would keep their "
            "rounding. Export the adapter without `merge`, and merge it into the original model."
        )
    state: dict[str, torch.Tensor] = {}
    for name, tensor in base.state_dict().items():
        if "lora_" not in name:
            state[name.replace(".base_layer.", ".")] = tensor.detach().cpu()
    layers = {layer: name for name, layer in base.named_modules()}
    for layer in tuner_layers(base):
        if adapter not in {*layer.lora_A, *layer.lora_embedding_A}:  # it carries another one alone
            continue
        key = f"{layers[layer]}.weight"
        if not state[key].is_floating_point():
            raise ValueError(
                f"`merge`: the trunk is quantized ({layers[layer]} holds {state[key].dtype}), and adding to rounded "
                "weights would round again. Export the adapter without `merge`, and merge it into the original model."
            )
        delta = layer.get_delta_weight(adapter).detach().cpu()
        state[key] = (state[key].float() + delta.float()).to(state[key].dtype)
    if base.config.get_text_config().tie_word_embeddings:
        ends = (base.get_input_embeddings(), base.get_output_embeddings())
        if any(end in layers and end in tuner_layers(base) for end in ends if end is not None):
            raise ValueError(
                "`merge`: the adapter is on one of the two tied embeddings, which could then no longer be the same "
                "weights. Export the adapter without `merge`."
            )
    with torch.device("meta"):
        model = type(base)(copy.deepcopy(base.config))
    missing = model.load_state_dict(state, strict=False, assign=True).missing_keys
    model.tie_weights()
    left = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if left:
        raise ValueError(f"`merge`: {type(base).__name__} lacks the weights {', '.join(missing or left)}.")
    if getattr(base, "generation_config", None) is not None:
        model.generation_config = copy.deepcopy(base.generation_config)
    return model


def load_policy(
    path: str | os.PathLike[str], eval_sampling: dict[str, Any] | None = None, seed: int | None = None
) -> PPOLightningModule:
    """Load the actor alone from a checkpoint: no critic, no reference, no reward.

    Args:
        path: A checkpoint file of PPO or SFT, or the folder of a run, whose last one is taken.
        eval_sampling: Fields of SamplingConfig that replace the checkpoint's own for evaluation.
        seed: Of the sampling noise; None: the checkpoint's.

    Raises:
        ValueError: The file is no such checkpoint, or the model that it builds on is gone or another one.
        OSError: It cannot be read.
    """
    ckpt = read_checkpoint(path)
    stage, given = ckpt["lit_ppo"].get("stage", "ppo"), ckpt["hyper_parameters"]
    if stage == "reward":
        raise ValueError(f"`ckpt={str(path)!r}` is of a reward model, and this needs a policy: of SFT or PPO.")
    if stage == "sft":  # a policy like any other, without options for sampling
        given = {name: given[name] for name in ("actor", "tokenizer", "lora", "seed")}
        given |= {"eval_sampling": {}, "ppo": {}}
        ckpt = {**ckpt, "hyper_parameters": given, "lit_ppo": {**ckpt["lit_ppo"], "stage": "ppo"}}
    sampling = from_dict(SamplingConfig, {**given["eval_sampling"], **(eval_sampling or {})})
    changes: dict[str, Any] = {
        "reward": None,
        "critic": None,
        "ppo": NO_REFERENCE | NO_CRITIC | {"rollout_batch_size": given["ppo"].get("rollout_batch_size")},
        "sampling": {"max_new_tokens": sampling.max_new_tokens},
        "eval_sampling": asdict(sampling),
    }
    if seed is not None:
        changes["seed"] = seed
    return _build(ckpt, changes)


def load_module(path: str | os.PathLike[str]) -> Harness:
    """Load what was trained from a checkpoint: of PPO actor and critic, without the reference.

    Args:
        path: A checkpoint file, or the folder of a run, whose last one is taken.

    Raises:
        ValueError: The file is no such checkpoint, or the models that it builds on are gone or other ones.
        OSError: It cannot be read.
    """
    ckpt = read_checkpoint(path)
    if ckpt["lit_ppo"].get("stage", "ppo") != "ppo":
        return _build(ckpt, {})
    ppo = from_dict(PPOConfig, ckpt["hyper_parameters"]["ppo"])
    return _build(ckpt, {"ppo": asdict(ppo) | NO_REFERENCE})


def last_checkpoint(root: str | os.PathLike[str], option: str) -> Path:
    """Return the newest `last*.ckpt` anywhere under `root`.

    Args:
        root: The folder of one run or several.
        option: What asks, for the error.

    Raises:
        FileNotFoundError: There is none.
    """
    found = [path for path in Path(root).rglob("last*.ckpt") if path.exists()]  # a link may lead nowhere
    if not found:
        if (Path(root) / "config.json").is_file() or (Path(root) / "adapter_config.json").is_file():
            raise FileNotFoundError(
                f"`{option}`: {str(root)!r} is an exported model, for transformers or PEFT. Give a run's checkpoint."
            )
        raise FileNotFoundError(
            f"`{option}`: there is no last*.ckpt under {str(root)!r}. Give the file, or the folder of a run that has "
            "saved one (`ModelCheckpoint(save_last=True)`)."
        )
    return max(found, key=lambda path: path.stat().st_mtime)


def read_checkpoint(path: str | os.PathLike[str], option: str = "ckpt") -> dict[str, Any]:
    """Read a checkpoint; of a file, tensors are read when they are used.

    Args:
        path: A file, the folder of a sharded checkpoint, or that of a run, whose last one is taken.
        option: What asks, for the error.

    Raises:
        ValueError: It is no checkpoint of lit-ppo.
        OSError: It does not exist.
    """
    where = Path(path)
    if where.is_dir() and not (where / ".metadata").exists():
        where = last_checkpoint(where, option)
    if not where.exists():
        raise FileNotFoundError(f"`{option}={str(path)!r}` does not exist.")
    ckpt: Any
    try:
        if where.is_dir():
            ckpt = read_folder(where)
        else:
            ckpt = torch.load(where, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ValueError(f"`{option}={str(path)!r}` cannot be read as a checkpoint: {first_line(error)}") from error
    entries = ("lit_ppo", "hyper_parameters", "state_dict", "pytorch-lightning_version")
    absent = [name for name in entries if not isinstance(ckpt, dict) or name not in ckpt]
    if absent:
        raise ValueError(
            f"`{option}={str(path)!r}` was not written by lit-ppo (it has no `{'`, `'.join(absent)}`). Give "
            "a checkpoint that a fit with lit-ppo has saved."
        )
    found: dict[str, Any] = ckpt
    return found


def _build(ckpt: dict[str, Any], changes: dict[str, Any]) -> Any:
    """Build the module of a checkpoint with other arguments, and load those weights that it has."""
    from lit_ppo.module import PPOLightningModule
    from lit_ppo.stages import RewardModule, SFTModule

    classes: dict[str, type[Harness]] = {"ppo": PPOLightningModule, "sft": SFTModule, "reward": RewardModule}
    stage = ckpt["lit_ppo"].get("stage", "ppo")
    given = {**ckpt["hyper_parameters"], **({"reference": None} if stage == "ppo" else {}), **changes}
    source = "reward" if stage == "reward" else "actor"
    if given[source] is None:
        raise ValueError(
            "This checkpoint was trained from a model made in Python, whose source it does not know. Build the module "
            "in Python, load the checkpoint into it, and call `lit_ppo.export.export(module, directory)`."
        )
    module = classes[stage](**given)
    module.configure_model()
    for name, theirs in ckpt["lit_ppo"]["fingerprints"].items():
        ours = module.fingerprints.get(name)
        if ours is not None and ours != theirs:
            raise ValueError(
                f"The {name} at `{source}={given[source]!r}` is not the one that this checkpoint was trained on: its "
                "weights have changed. Restore the original there."
            )
    wanted = module.state_dict().keys()
    module.load_state_dict({key: value for key, value in ckpt["state_dict"].items() if key in wanted})
    if stage != "ppo":
        module.load_counters(ckpt["lit_ppo"])
    if template := ckpt.get("datamodule_hyper_parameters", {}).get("chat_template"):
        module.tokenizer.chat_template = template  # what it was trained with
    return module.eval()
