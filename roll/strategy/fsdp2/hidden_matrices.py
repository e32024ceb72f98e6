"""The matrices inside the layers of a model, which Muon trains."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from roll.core.errors import ConfigError


def hidden_matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """List the trained matrices inside of what Hugging Face declares as units: the decoder layers,
    and those of a vision tower.

    Tables of embeddings and convolutions are no matrices in this sense: they map no space to
    another.

    Raises:
        ConfigError: a layer keeps several matrices in one tensor, such as those of all experts; or
            there is no matrix to train.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    units = set(model._no_split_modules or ())
    found: dict[int, nn.Parameter] = {}
    for layer in model.modules():
        # FSDP has put a class of its own over that of a layer.
        if units.isdisjoint(base.__name__ for base in type(layer).__mro__):
            continue
        for module in layer.modules():
            if isinstance(module, nn.Embedding | _ConvNd):
                continue
            for p in module.parameters(recurse=False):
                if p.requires_grad and p.dim() > 2:
                    raise ConfigError(
                        f"optimizer.kind: muon trains matrices, and {names[id(p)]} has the shape "
                        f"{tuple(p.shape)}: several matrices in one tensor, such as all experts of "
                        "a layer; use optimizer.kind: adamw"
                    )
                if p.requires_grad and p.dim() == 2:
                    found[id(p)] = p
    if not found:
        raise ConfigError(
            "optimizer.kind: muon trains the matrices inside the layers, and none of them is "
            "trained; use optimizer.kind: adamw"
        )
    return list(found.values())
