"""Where a Hugging Face model keeps the tensors of its checkpoint."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor
from transformers import PreTrainedModel

from roll.models.saved import Bundle, Saved
from roll.weight_sync.manifest import TensorMeta


class WeightMemory:
    """The memory of a model on any device, by the names of its checkpoint."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor of the checkpoint that the model has."""
        return {
            tensor.name: tuple(tensor.shape)
            for bundle in self._saved.bundles
            for tensor in bundle.saved
        }

    @cached_property
    def optional(self) -> frozenset[str]:
        """Those that are a second name of another (tied); they may come or stay away."""
        seen: set[int] = set()
        tied = set()
        for name, tensor in self._own.items():
            if tensor.data_ptr() in seen:
                tied.add(name)
            seen.add(tensor.data_ptr())
        return frozenset(
            tensor.name
            for bundle in self._saved.bundles
            if tied.issuperset(bundle.sources)
            for tensor in bundle.saved
        )

    def place(self, meta: TensorMeta) -> Tensor | None:
        """The memory that a push can write a tensor into; None: `take` has to be given it."""
        bundle = self._bundles[meta.name]
        if not bundle.are_runs:
            return None
        place = self._run(bundle, meta.name)
        fits = place.dtype == meta.torch_dtype and place.device.type == "cpu"
        return place if fits else None

    def take(self, name: str, tensor: Tensor) -> None:
        """Write a tensor that has come; one that lies in its place already stays."""
        bundle = self._bundles[name]
        if not bundle.are_runs:
            self._saved.put_back(bundle, name, tensor, self._own)
            return
        place = self._run(bundle, name)
        if place.data_ptr() != tensor.data_ptr():
            place.copy_(tensor)

    @property
    def _own(self) -> dict[str, Tensor]:
        """Looked up each time, as moving a model to another device gives it new tensors."""
        own: dict[str, Tensor] = self._model.state_dict()
        return own

    @cached_property
    def _saved(self) -> Saved:
        return Saved(self._model, {name: t.shape for name, t in self._own.items()})

    @cached_property
    def _bundles(self) -> dict[str, Bundle]:
        """The bundle of each tensor of the checkpoint."""
        return {tensor.name: b for b in self._saved.bundles for tensor in b.saved}

    def _run(self, bundle: Bundle, name: str) -> Tensor:
        (source,) = bundle.sources
        (tensor,) = (tensor for tensor in bundle.saved if tensor.name == name)
        assert tensor.first is not None
        flat = self._own[source].view(-1)
        return flat[tensor.first :][: tensor.shape.numel()].view(tensor.shape)
