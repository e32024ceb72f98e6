"""A training mode in which nothing but an adapter's dropout depends on chance.

Some models add noise to their routers in training mode, or draw experts, and dropout may be named
anywhere in a nested config. The ratio of two passes over the same tokens must be 1.
"""

from __future__ import annotations

from torch import nn

from roll.models import lora


def train_without(model: nn.Module) -> None:
    """Put the model in evaluation mode, but for what training needs: layers whose activations are
    computed again in the backward pass, which are so in training mode alone, and adapters."""
    model.eval()
    for module in model.modules():
        if module.__dict__.get("gradient_checkpointing", False):
            module.training = True
    for dropout in lora.dropouts(model):
        dropout.train()
