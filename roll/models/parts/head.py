"""Last layer of a model: what makes logits, or a value, of hidden states."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from roll.core.errors import ConfigError
from roll.models.vision.parts import language_model

_REFUSED = (
    "output_multiplier_scale",
    "lm_head_multiplier",
    "logits_mup_width_multiplier",
    "unpadded_vocab_size",
)
"""Keys of configs that change logits in ways that `Head` does not describe."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Keys of configs that bound logits."""


@dataclass(frozen=True, slots=True)
class Head:
    """Last layer of a language model: `logits = (hidden @ weight^T + bias) / divisor`."""

    module: nn.Module
    divisor: float
    cap: float | None = None
    """Bound of the product before it is divided, `cap * tanh(product / cap)`; None: no bound."""

    @property
    def weight_VD(self) -> Tensor:
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias_V(self) -> Tensor | None:
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, Tensor) else None


def split_head(model: PreTrainedModel) -> tuple[nn.Module, Head]:
    """Split a causal LM into backbone (token ids to hidden states) and head (states to logits).

    The backbone of a model that reads pictures is its language model.

    Raises:
        ConfigError: the model has no separate output head, or transforms its logits in a way that
            the chunked log-probs do not support.
    """
    backbone = model.base_model
    module = model.get_output_embeddings()
    kind = model.config.model_type
    if backbone is model or module is None:
        raise ConfigError(f"model type {kind!r} has no separate output head; use another model")
    known = {*backbone.parameters(), *module.parameters()}
    further = [name for name, parameter in model.named_parameters() if parameter not in known]
    if further:
        raise ConfigError(
            f"model type {kind!r} has {further[0]!r} beside its backbone and its output head, "
            "whose product would not be the model's logits; use another model"
        )
    divisor, cap = divisor_and_cap(model.config)
    return language_model(model), Head(module, divisor, cap)


def divisor_and_cap(config: PreTrainedConfig) -> tuple[float, float | None]:
    """Return what a model makes of the product of hidden states and weight, as `Head` describes it.

    Args:
        config: that of the whole model.

    Raises:
        ConfigError: the logits are changed in another way, or a number is not above zero.
    """
    of_text = config.get_text_config()
    return _divisor(config.model_type, of_text), _logit_cap(of_text)


def _divisor(kind: str, config: PreTrainedConfig) -> float:
    """Return the number by which the product of states and weight is divided.

    Args:
        kind: type of the whole model, for the message.
        config: that of the language model.

    Raises:
        ConfigError: the logits are changed in another way, or the number is not above zero.
    """
    divisor = 1.0
    for name, value in config.to_dict().items():
        if value is None or (isinstance(value, float | int) and value in (0, 1)):
            continue
        if name in _REFUSED:
            raise ConfigError(f"model type {kind!r} sets {name}: {value}, which is not supported")
        if name == "logit_scale" or (name == "logits_scaling" and _multiplies(config)):
            divisor /= value
        elif name == "logits_scaling":
            divisor *= value
    if config.model_type == "minicpm3":
        divisor *= config.logits_scaling  # calculated, so `to_dict` lacks it
    if not math.isfinite(divisor) or divisor <= 0:
        raise ConfigError(f"model type {kind!r} scales its logits by 1/{divisor}; expected above 0")
    return divisor


def _multiplies(config: PreTrainedConfig) -> bool:
    """Return whether a model multiplies its logits by `logits_scaling`; the others divide."""
    return config.model_type == "hyperclovax"


def _logit_cap(config: PreTrainedConfig) -> float | None:
    """Return the bound of the logits, None if there is none.

    Raises:
        ConfigError: it is not above zero.
    """
    values = config.to_dict()
    names = [name for name in _CAPS if values.get(name)]
    for name in names:
        if values[name] < 0:
            raise ConfigError(f"{config.model_type} has {name}: {values[name]}; expected above 0")
    return float(values[names[0]]) if names else None


def split_value_head(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """Split a classifier into backbone (token ids to hidden states) and head (states to a number).

    Raises:
        ConfigError: the head of the classifier is neither called `score` nor `classifier`.
    """
    for name in ("score", "classifier"):
        head = model._modules.get(name)
        if head is not None and model.base_model is not model:
            return model.base_model, head
    kind = model.config.model_type
    raise ConfigError(f"model type {kind!r} has no head for values; use another model")
