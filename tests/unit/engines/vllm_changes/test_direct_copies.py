"""Models of vLLM that copy weights into their parameters without a loader, during a reload."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roll.strategy.vllm.worker_side.direct_copies import DirectCopies


class Layer(nn.Module):
    """A layer with parameters that are loaded in three ways."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("copied", "data", "loaded"):
            setattr(self, name, nn.Parameter(torch.zeros(2, 3), requires_grad=False))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        for name, weight in weights.items():
            parameter: Any = parameters[name]
            if name.endswith("copied"):
                parameter.copy_(weight)
            elif name.endswith("data"):
                parameter.data.copy_(weight)
            else:
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)


@pytest.mark.parametrize("order", [1, -1])
def test_weights_that_a_model_copies_itself_survive_a_reload(order: int) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    model = Model()
    config: Any = None  # read for layers of attention alone
    record_metadata_for_reloading(model)
    kept = dict(model.named_parameters())
    for push in (1.0, 2.0):
        weights = {name: torch.full((2, 3), push + i) for i, name in enumerate(kept)}
        initialize_layerwise_reload(model)
        with DirectCopies(model):
            model.load_weights(dict([*weights.items()][::order]))
        finalize_layerwise_reload(model, config)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, weights[name]), name
            assert parameter is kept[name], "kernels read this memory"
