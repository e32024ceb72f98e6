"""Reload of weights with vLLM's own layer-wise reload, which unpacks, loads and repacks each layer.

Loading directly into the packed layers fails on CPUs, where they have oneDNN's layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from roll.core.errors import WeightSyncError
from roll.strategy.vllm.worker_side.direct_copies import DirectCopies
from roll.strategy.vllm.worker_side.experts import packing_experts


def reload_weights(model_runner: Any, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Load all tensors into the model of vLLM's `model_runner`.

    Raises:
        WeightSyncError: the tensors broke off, or vLLM failed to load one. The model then has a
            mixture of old and new weights, which another reload can replace.
    """
    model = model_runner.get_model()
    at = "before the first tensor"

    def noted() -> Iterator[tuple[str, Tensor]]:
        nonlocal at
        for name, tensor in tensors:
            at = f"at {name!r}"
            yield name, tensor
        at = "after the last tensor"

    try:
        with packing_experts(model), DirectCopies(model):
            model_runner.reload_weights(weights_iterator=noted())
    except Exception as error:
        _put_back(model, model_runner.model_config)
        if isinstance(error, WeightSyncError):
            raise
        raise WeightSyncError(
            f"vLLM could not load the weights, {at}: {type(error).__name__}: {error}"
        ) from error


def _put_back(model: nn.Module, model_config: Any) -> None:
    """Restore the old tensors of layers whose reload did not finish.

    Without this the layers would hang in the next forward pass, and the next reload would mistake
    their temporary tensors for the memory that kernels read.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import (
        _place_kernel_tensors,
        get_layerwise_info,
    )

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
            info.reset()
    finalize_layerwise_reload(model, model_config)
