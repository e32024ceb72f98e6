"""Selection of what training changes of a model: all of it, some of its parts, or an adapter."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from roll.config.sections.model import ModelConfig
from roll.models import lora
from roll.models.vision import parts


def select_trained(
    model: PreTrainedModel, config: ModelConfig, *, trainable: bool, new_head: nn.Module | None
) -> None:
    """Let gradients be computed for what `config` trains, and insert its adapter.

    Args:
        trainable: False: nothing is trained, and no adapter is inserted.
        new_head: head that is trained even if the model has an adapter; None without such a head.

    Raises:
        ConfigError: see `lora.insert_adapter` and `parts.freeze`.
    """
    model.requires_grad_(trainable)
    if not trainable:
        return
    if config.lora is not None:
        lora.insert_adapter(model, config.lora, also=new_head)
    parts.freeze(model, config.freeze)
