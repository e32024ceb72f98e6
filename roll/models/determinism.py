"""Training mode without randomness, apart from the dropout of an adapter.

In training mode, some models add noise to their routers or draw experts at random, and a nested
config may set dropout under any name. But without an update between them, two passes over the same
tokens must give the probability ratio 1.
"""

from __future__ import annotations

from torch import nn

from roll.models import lora


def train_without(model: nn.Module) -> None:
    """Put the model in evaluation mode, except for the modules that need training mode.

    These are layers with gradient checkpointing, which has no effect in evaluation mode, and the
    dropout of adapters.
    """
    model.eval()
    for module in model.modules():
        if module.__dict__.get("gradient_checkpointing", False):
            module.training = True
    for dropout in lora.dropouts(model):
        dropout.train()
