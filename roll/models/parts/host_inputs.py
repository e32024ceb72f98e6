"""Activation checkpointing of Hugging Face layers, whose saved inputs may lie in host memory."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from roll.core.errors import ConfigError

ON_DEVICE = 2
"""Number of inputs that stay on the device after the forward pass has gone on to the next layers:
those that are still being copied. The backward pass begins with them."""
_RECOMPUTES = "_gradient_checkpointing_func"
"""Attribute of the modules of transformers that are computed again: what they call for it."""


def checkpoint_layers(model: PreTrainedModel, device: torch.device, *, offload: bool) -> None:
    """Let the backward pass compute each layer again from its inputs, so that only these are kept.

    transformers can offload them, too, but its copies stop the layers.

    Args:
        device: where the model will be.
        offload: keep them in host memory.

    Raises:
        ConfigError: `offload`, and the model's own code keeps the inputs in a way of its own.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if not offload:
        return
    layers = [module for module in model.modules() if hasattr(module, _RECOMPUTES)]
    if not layers:
        raise ConfigError(
            f"strategy.offload_activations: the code of model type {model.config.model_type!r} "
            "recomputes its layers in a way of its own, which keeps their inputs on the device; "
            "leave offload_activations out"
        )
    inputs = HostInputs(torch.get_device_module(device), pinned=device.type != "cpu")
    for layer in layers:
        setattr(layer, _RECOMPUTES, partial(inputs.call, getattr(layer, _RECOMPUTES)))


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Input:
    """Input of a layer. The graph of the backward pass holds it in place of the tensor."""

    host: Tensor
    device: torch.device
    here: Tensor | None
    """The input on the device, as long as it is being copied from there or to there, and until it
    is needed."""
    version: int
    """Version of `here`, which PyTorch raises when a tensor is changed in place."""
    copied: Any
    """Event after the copy."""
    before: tuple[weakref.ref[_Input], ...]
    """Inputs of the layer before, which the backward pass needs next."""


class HostInputs:
    """The inputs of the layers of a model, in host memory from the forward pass until the backward
    pass needs them; on GPUs in pinned memory.

    Copies run on a stream of their own beside the layers: to the host while the next layers run,
    and back one layer ahead. No tensor is marked as used by that stream, because PyTorch would give
    its memory free only when the GPU is there, and the host is far ahead of it. Instead the stream
    of the layers waits for a copy before the tensor is dropped, which happens two layers later.

    Args:
        streams: PyTorch's module for the kind of device, such as `torch.cuda`.
        pinned: whether host memory is pinned, without which a copy holds the host up.
    """

    def __init__(self, streams: Any, *, pinned: bool) -> None:
        self._streams = streams
        self._copies: Any = streams.Stream()
        self._pinned = pinned
        self._leaving: deque[_Input] = deque()
        self._ahead: list[_Input] = []
        self._before: tuple[weakref.ref[_Input], ...] = ()
        self._own: list[weakref.ref[_Input]] = []

    def call(self, checkpoint: Callable[..., Any], function: nn.Module, *inputs: Any) -> Any:
        """Run a layer with its function for checkpointing. Tensors are saved only for its inputs:
        within, that function has hooks of its own."""
        self._before, self._own = tuple(self._own), []
        with saved_tensors_hooks(self._put, self._take):
            return checkpoint(function, *inputs)

    def _put(self, tensor: Tensor) -> _Input | Tensor:
        """Begin to copy an input to the host; let older copies end."""
        if not tensor.is_floating_point():
            return tensor  # positions and lengths: small, and the same for all layers
        self._drop_ahead()
        own = tensor.detach()
        host = torch.empty_like(own, device="cpu", pin_memory=self._pinned)
        copied = self._copy(own, host)
        kept = _Input(host, own.device, own, own._version, copied, self._before)
        self._own.append(weakref.ref(kept))
        self._leaving.append(kept)
        while len(self._leaving) > ON_DEVICE:
            self._drop(self._leaving.popleft())
        return kept

    def _take(self, kept: _Input | Tensor) -> Tensor:
        """Return an input on the device, and begin to copy those of the layer before."""
        if isinstance(kept, Tensor):
            return kept
        if kept in self._leaving:
            self._leaving.remove(kept)
        if kept in self._ahead:
            self._ahead.remove(kept)
        if kept.here is None:
            self._bring(kept)
        found = self._drop(kept)
        self._drop_ahead(kept)
        for ref in kept.before:
            one = ref()
            if one is not None and one.here is None:
                self._bring(one)
                self._ahead.append(one)
        return found

    def _bring(self, kept: _Input) -> None:
        """Begin to copy an input back to the device."""
        # Allocated on the stream of the layers, which also frees it.
        kept.here = torch.empty_like(kept.host, device=kept.device)
        kept.copied = self._copy(kept.host, kept.here)
        kept.version = kept.here._version

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        """Copy on the stream for copies what has been computed so far; return the event after."""
        self._copies.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._copies):
            target.copy_(source, non_blocking=True)
        return self._copies.record_event()

    def _drop(self, kept: _Input) -> Tensor:
        """Let go of an input on the device once its copy is done; return it."""
        found = kept.here
        assert found is not None
        self._streams.current_stream().wait_event(kept.copied)
        if found._version != kept.version:
            raise RuntimeError(
                "the input of a layer was changed in place while it was copied to host memory; "
                "leave offload_activations out for this model"
            )
        kept.here = None
        return found

    def _drop_ahead(self, beside: _Input | None = None) -> None:
        """Let go of what has been brought ahead, but not of inputs of the same layer as `beside`,
        or of the layer before it."""
        for kept in list(self._ahead):
            near = beside is not None and (
                kept.before is beside.before or any(ref() is kept for ref in beside.before)
            )
            if not near:
                self._ahead.remove(kept)
                self._drop(kept)
