"""Weights that a model of vLLM copies into its parameters without their loaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

_COPY, _DATA = torch.Tensor.copy_, torch.Tensor.data.__get__  # type: ignore[attr-defined]


class DirectCopies(TorchFunctionMode):
    """Mode for the time of a reload that sends direct copies through the loaders of vLLM's reload.

    While a model is reloaded layer by layer, its parameters have no memory (they lie on the meta
    device), and their loaders keep what comes until a layer is complete. The model of gpt_oss
    copies its experts and sinks straight into the parameters: this would be lost without an error,
    and the layers would compute with their old weights.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _COPY and self._waits(args[0]):
            self._load(args[0], args[1])
            return args[0]
        if func == _DATA and self._waits(args[0]):
            return args[0]  # so that a copy into `parameter.data` is one into the parameter
        return func(*args, **kwargs or {})

    def _waits(self, tensor: Any) -> bool:
        """Return whether a tensor is a parameter that is being reloaded, outside of its loader."""
        from vllm.model_executor.model_loader.reload.meta import CopyCounter

        return (
            isinstance(tensor, nn.Parameter)
            and tensor.is_meta
            and not isinstance(_get_current_dispatch_mode(), CopyCounter)
        )

    def _load(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Give a value of the same shape to the reload of the parameter's layer."""
        from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        layer, name = next(
            (layer, name)
            for layer in self._model.modules()
            for name, each in layer.named_parameters(recurse=False)
            if each is parameter
        )
        loaded: Any = parameter
        loaded.weight_loader = default_weight_loader
        loaded.weight_loader = make_online_process_loader(layer, name)
        loaded.weight_loader(parameter, value)
