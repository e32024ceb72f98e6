"""LoRA adapters (arXiv 2106.09685) in a Hugging Face model: put in, switched off, told apart.

The layers are PEFT's, put into the model in place, so the model stays what it is: its own tensors
keep their names but for `base_layer` in them, which `plain_name` takes out.
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

from roll.config.sections.model import LoraConfig
from roll.core.errors import ConfigError

ADAPTER = "default"
_BASE = ".base_layer"
_FACTORS = {f"lora_A.{ADAPTER}": "lora_A", f"lora_B.{ADAPTER}": "lora_B"}
HEADS = ("score", "classifier", "lm_head")
"""Never adapted."""
_SEED = 20
"""Every rank draws the same factors, whatever it drew before."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What an adapter adds to a weight: `scale * B @ A`."""

    a_RI: nn.Parameter
    b_OR: nn.Parameter
    scale: float


def seed_dropout(lora: LoraConfig, seed: int, rank: int) -> None:
    """Let ranks, and runs of other seeds, drop other elements; a resumed run goes on drawing."""
    if lora.dropout:
        torch.manual_seed(seed + 2**32 * rank)


def put_in(model: PreTrainedModel, lora: LoraConfig, *, also: nn.Module | None = None) -> None:
    """Give the model an adapter that changes nothing yet, and freeze the rest.

    Args:
        also: a new head, which is trained and saved as a whole.

    Raises:
        ConfigError: `lora.targets` names no linear layer of the model.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    if isinstance(targets, list):
        linear = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        }.difference(HEADS)
        for target in targets:
            if target not in linear:
                raise ConfigError(
                    f"model.lora.targets: no linear layer is called {target!r} (there are: "
                    f"{', '.join(sorted(linear))})"
                )
    settings = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT divides by the rank, nothing else
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=list(HEADS),
    )
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
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


def has_adapter(model: PreTrainedModel) -> bool:
    return next(_layers(model), None) is not None


@contextmanager
def switched_off(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was before it had an adapter."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def identity(model: PreTrainedModel) -> dict[str, Any]:
    """What a checkpoint of an adapter must know besides its tensors; nothing without one."""
    scales = {name: layer.scaling[ADAPTER] for name, layer in _layers(model)}
    if not scales:
        return {}
    return {"adapter": {"base": Path(model.config._name_or_path).name, "scales": scales}}


def plain_name(name: str) -> str | None:
    """Name of a tensor in the checkpoint that the model was made of; None of an adapter's own."""
    if any(factor in name for factor in _FACTORS):
        return None
    return name.replace(_BASE, "")


def deltas(model: PreTrainedModel) -> dict[str, Delta]:
    """Name of each adapted weight -> what is added to it."""
    return {
        f"{name}.weight": Delta(
            layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, layer.scaling[ADAPTER]
        )
        for name, layer in _layers(model)
    }


def save(
    path: Path, tensors: Mapping[str, Tensor], lora: LoraConfig, model: PreTrainedModel, base: str
) -> None:
    """A folder that `peft.PeftModel.from_pretrained` loads.

    Args:
        tensors: what is trained, by the names in `model`.
        base: path of the model that the adapter belongs to.
    """
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {peft_name(name): tensor.contiguous() for name, tensor in tensors.items()},
        path / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    modules = sorted({name.rpartition(".")[2] for name, _ in _layers(model)})
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
    """Name in PEFT's files of a tensor that is trained with an adapter."""
    for ours, theirs in _FACTORS.items():
        name = name.replace(ours, theirs)
    return f"base_model.model.{name}"


def dropouts(model: nn.Module) -> Iterator[nn.Module]:
    """What drops elements of the adapter's inputs in training."""
    for _, layer in _layers(model):
        yield layer.lora_dropout


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Adapted layers, by the names they have in the checkpoint."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module
