"""Choice of the attention kernel of a run's models where the run file says `attention: auto`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import metadata
from typing import TypeVar

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from roll.config.run import RunConfig
from roll.config.sections.engines import HfEngineConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import row_cuts
from roll.config.sections.training import InferRole
from roll.models.kernels.attention import window_in_mask
from roll.models.load import load_config
from roll.platform.machine import gpu_capability

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=RunConfig)
_PACKAGES = {"flash_attention_3": "flash-attn-3", "flash_attention_2": "flash-attn"}
"""Kernel -> the package that has it, in order of preference."""
_LEAST = {"flash_attention_3": 9.0, "flash_attention_2": 8.0}
"""Kernel -> the lowest compute capability of GPUs that run it."""
_MOST = {"flash_attention_3": 9.0, "flash_attention_2": float("inf")}
"""Kernel -> the highest one; FlashAttention 3 is written for Hopper."""
_WIDEST_HEAD = 256
"""Largest size of a head that the kernels compute."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Devices and packages with which a machine computes attention."""

    platform: str
    """`cpu` or `cuda`."""
    capability: float | None
    """Compute capability of its GPUs, the lowest one; None: not known."""
    packages: frozenset[str]
    """Packages with kernels that are installed."""


def offer_of(platform: str) -> Offer:
    """Return what this machine has. Its GPUs and packages stand for those of all nodes."""
    installed = frozenset(name for name in _PACKAGES.values() if _is_installed(name))
    return Offer(platform, gpu_capability() if platform == "cuda" else None, installed)


def choose(
    model: ModelConfig, config: PreTrainedConfig, offer: Offer, rows: str = ""
) -> tuple[str, str]:
    """Return a kernel for a model whose `attention` is `auto`, and the reason.

    Args:
        config: the model's own config.
        rows: key that gives ranks slices of rows; empty if every rank has whole rows.
    """
    if offer.platform != "cuda":
        return "sdpa", "there is no GPU"
    if rows:
        return "sdpa", f"{rows} makes slices of rows"
    if why := _unsuited(model, config):
        return "sdpa", why
    if offer.capability is None:
        return "sdpa", "nvidia-smi tells no compute capability here"
    for kernel, package in _PACKAGES.items():
        if package in offer.packages and _LEAST[kernel] <= offer.capability <= _MOST[kernel]:
            return kernel, f"{package} is installed, GPUs of capability {offer.capability}"
    has = ", ".join(sorted(offer.packages)) or "none"
    return "sdpa", f"no package for GPUs of capability {offer.capability} (installed: {has})"


def settle_attention(config: C, platform: str) -> C:
    """Return the config of a run with a kernel in place of each `attention: auto`, and log it.

    Args:
        platform: `cpu` or `cuda`, of the workers.

    Raises:
        ConfigError: the config of a model cannot be read.
    """
    if not any(model.attention == "auto" for model in config.models.values()):
        return config
    offer = offer_of(platform)

    def settled(key: str, model: ModelConfig) -> ModelConfig:
        if model.attention != "auto":
            return model
        dtype = _engine_dtype(config, key) or model.dtype
        read = model.model_copy(update={"dtype": dtype})
        kernel, why = choose(read, load_config(model), offer, _cut_by(config, key))
        logger.info("%s.attention: auto is %s (%s)", key, kernel, why)
        return model.model_copy(update={"attention": kernel})

    return config.with_models(settled)


def _unsuited(model: ModelConfig, config: PreTrainedConfig) -> str:
    """Return why FlashAttention does not compute a model; empty if it does."""
    if model.dtype != "bfloat16":
        return f"FlashAttention computes in bfloat16, the dtype is {model.dtype}"
    text = config.get_text_config()
    made = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    made = made or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if made is None or not made._supports_flash_attn:
        return f"transformers computes no {config.model_type} with it"
    if made._compatible_flash_implementations is not None:
        return f"a {config.model_type} needs a kernel of its own"
    if window_in_mask(config) is not None:
        return f"a {config.model_type} has its window in a mask, which it does not read"
    # Of a model whose layers differ, the whole config has no width of heads, and says so loudly.
    parts = list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]
    width = max(
        getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
        for part in parts
    )
    if width > _WIDEST_HEAD:
        return f"heads of {width} are wider than {_WIDEST_HEAD}"
    return ""


def _cut_by(config: RunConfig, key: str) -> str:
    """Return the key of a role that uses a model and cuts its rows; empty without one.

    Args:
        key: key of the model.
    """
    for name, role in config.computing.items():
        own = f"{name}.model" if role.model is not None else None
        if own in (None, key) and (keys := row_cuts(role.strategy)):
            return f"{name}.strategy.{keys[0]}"
    return ""


def _engine_dtype(config: RunConfig, key: str) -> str | None:
    """Return the dtype in which the `hf` engine runs the policy, if it is not the model's own."""
    infer = config.roles.get("actor_infer")
    if key.count(".") > 1 or not isinstance(infer, InferRole):
        return None
    return infer.dtype if isinstance(infer.strategy, HfEngineConfig) else None


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
