"""LoRA adapters (arXiv 2106.09685) in a Hugging Face model: insertion, switching off and saving.

The layers are those of PEFT, inserted into the model in place. The type of the model does not
change, and its own tensors keep their names, apart from an added `base_layer`, which `plain_name`
removes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.config.frozen import part_of
from roll.config.sections.model import LoraConfig
from roll.core.errors import ConfigError
from roll.models.vision.parts import require_parts, sees

ADAPTER = "default"
_BASE = ".base_layer"
_FACTORS = {f"lora_A.{ADAPTER}": "lora_A", f"lora_B.{ADAPTER}": "lora_B"}
HEADS = ("score", "classifier", "lm_head")
"""Names of layers that never get an adapter."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Change of a weight by an adapter: `scale * B @ A`, R rank, I inputs, O outputs."""

    a_RI: nn.Parameter
    b_OR: nn.Parameter
    scale: float


def seed_dropout(lora: LoraConfig, seed: int, rank: int) -> None:
    """Seed dropout, so that ranks and runs with different seeds drop different elements.

    Without dropout nothing happens. A resumed run restores its random state from the checkpoint
    afterwards, and so continues with the numbers of the interrupted run.
    """
    if lora.dropout:
        torch.manual_seed(seed + 2**32 * rank)


def insert_adapter(
    model: PreTrainedModel, lora: LoraConfig, *, also: nn.Module | None = None, seed: int = 0
) -> None:
    """Insert an adapter that does not change the model's output yet, and freeze the rest.

    Args:
        also: new head that is trained and saved as a whole; None if there is none.
        seed: seed of the first factors; the same on all ranks, so that they draw the same ones.

    Raises:
        ConfigError: an entry of `lora.targets` is not the name of a linear layer, or PEFT would
            adapt experts or a router; or `lora.parts` names parts that the model does not have.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    settings = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT divides by the rank, nothing else
        lora_dropout=lora.dropout,
        target_modules=_targets(model, lora),
        exclude_modules=list(HEADS),
    )
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model)
    for name, layer in _layers(model):
        if not isinstance(layer.base_layer, nn.Linear):
            raise ConfigError(
                f"model.lora.targets: PEFT would adapt {name}, the experts or the router of a "
                "mixture, which is not supported outside of kind: megatron; name linear layers, "
                "such as [q_proj, k_proj, v_proj, o_proj]"
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(factor in name for factor in _FACTORS))
    if also is not None:
        also.requires_grad_(True)


def _targets(model: PreTrainedModel, lora: LoraConfig) -> str | list[str]:
    """Return `lora.targets` for PEFT; raise ConfigError if an entry does not name a linear layer,
    or names a head (`HEADS`)."""
    divided = sees(model.config)
    if not divided and lora.parts != ("language",):
        require_parts(model.config, "model.lora.parts")
    if isinstance(lora.targets, str) and not divided:
        return lora.targets
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not (divided and part_of(name) not in lora.parts)
    ]
    linear = {_last(name) for name in layers}.difference(HEADS)
    wanted = linear if isinstance(lora.targets, str) else lora.targets
    for target in wanted:
        if target not in linear:
            raise ConfigError(
                f"model.lora.targets: no linear layer is called {target!r}, or it is a head (there "
                f"are: {', '.join(sorted(linear))})"
            )
    if not divided:
        return list(lora.targets)
    # Full names, because layers of different parts have the same last name.
    return [name for name in layers if _last(name) in wanted]


def _last(name: str) -> str:
    """Return the last part of a module's name."""
    return name.rpartition(".")[2]


def has_adapter(model: PreTrainedModel) -> bool:
    """Return whether an adapter was inserted, even if it is switched off now."""
    return next(_layers(model), None) is not None


@contextmanager
def adapter_disabled(model: PreTrainedModel) -> Iterator[None]:
    """Switch the adapter off within the context, so that the model computes as without it."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def identity(model: PreTrainedModel) -> dict[str, Any]:
    """Return base model and scales of the adapter; its checkpoint needs them besides the tensors.

    The result is empty if the model has no adapter.
    """
    scales = {name: layer.scaling[ADAPTER] for name, layer in _layers(model)}
    if not scales:
        return {}
    return {"adapter": {"base": Path(model.config._name_or_path).name, "scales": scales}}


def plain_name(name: str) -> str | None:
    """Return a tensor's name in the base model's checkpoint; None for tensors of the adapter."""
    if any(factor in name for factor in _FACTORS):
        return None
    return name.replace(_BASE, "")


def deltas(model: PreTrainedModel) -> dict[str, Delta]:
    """Return the adapter's change of each adapted weight, by the name of the weight in checkpoints
    of the model without the adapter. The changes hold the factors that are trained, no copies;
    without an adapter there are none."""
    return {
        f"{name}.weight": Delta(
            layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, layer.scaling[ADAPTER]
        )
        for name, layer in _layers(model)
    }


def save(
    path: Path, tensors: Mapping[str, Tensor], lora: LoraConfig, model: PreTrainedModel, base: str
) -> None:
    """Save the adapter to a folder that `peft.PeftModel.from_pretrained` can load.

    Args:
        path: folder, which is created if needed.
        tensors: trained tensors, by their names in `model`.
        base: path of the model that the adapter belongs to.
    """
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {peft_name(name): tensor.contiguous() for name, tensor in tensors.items()},
        path / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    # Full names where parts of the model have layers of the same last name.
    modules = sorted({name if sees(model.config) else _last(name) for name, _ in _layers(model)})
    heads = sorted({name.split(".")[0] for name in tensors if "lora_" not in name})
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": modules,
        "modules_to_save": heads or None,
        "task_type": "SEQ_CLS" if heads else "CAUSAL_LM",
        "bias": "none",
        "inference_mode": True,
    }
    (path / "adapter_config.json").write_text(json.dumps(settings, indent=2))


def peft_name(name: str) -> str:
    """Return the name in PEFT's files of a trained tensor."""
    for ours, theirs in _FACTORS.items():
        name = name.replace(ours, theirs)
    return f"base_model.model.{name}"


def dropouts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that drop elements of the adapter's inputs in training."""
    for _, layer in _layers(model):
        yield layer.lora_dropout


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the adapted layers with their names in the checkpoint of the base model."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module
