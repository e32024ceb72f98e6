"""Selection of what training changes of a model: all of it, all but frozen parameters, or an
adapter."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from roll.config.frozen import frozen_names, frozen_tensors, parts_in
from roll.config.sections.model import ModelConfig
from roll.models import lora
from roll.models.checkpoint_tensors import CheckpointLayout
from roll.models.vision.parts import require_parts


def select_trained(
    model: PreTrainedModel,
    config: ModelConfig,
    *,
    trainable: bool,
    new_head: nn.Module | None,
    seed: int,
) -> None:
    """Let gradients be computed for what `config` trains, and insert its adapter.

    Args:
        trainable: False: nothing is trained, and no adapter is inserted.
        new_head: head that is trained even if the model has an adapter; None without such a head.
        seed: seed of the adapter's first factors, see `lora.insert_adapter`.

    Raises:
        ConfigError: see `lora.insert_adapter` and `frozen_parameters`.
    """
    model.requires_grad_(trainable)
    if not trainable:
        return
    if config.lora is not None:
        lora.insert_adapter(model, config.lora, also=new_head, seed=seed)
    for parameter in frozen_parameters(model, config):
        parameter.requires_grad_(False)


def frozen_parameters(model: PreTrainedModel, config: ModelConfig) -> list[nn.Parameter]:
    """Return the parameters that `config.freeze` names; without it, none.

    Raises:
        ConfigError: the model has no such parts or parameters, nothing is left to train, or only
            some of the checkpoint's tensors that the model keeps as one are named.
    """
    if not config.freeze:
        return []
    if parts_in(config.freeze):
        require_parts(model.config, "model.freeze")
    own = dict(model.named_parameters())
    layout = CheckpointLayout(model, {name: value.shape for name, value in own.items()})
    names = [saved.name for bundle in layout.bundles for saved in bundle.saved]
    made_of = (
        (source, [saved.name for saved in bundle.saved])
        for bundle in layout.bundles
        for source in bundle.sources
    )
    frozen = frozen_tensors(made_of, frozen_names(names, config.freeze))
    return [own[name] for name in own if name in frozen]
