"""Where a Hugging Face model keeps the tensors of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from torch import Tensor
from transformers import PreTrainedModel

from roll.models.checkpoint_tensors import Bundle, Saved, SavedTensor, put_back
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

    def places(self) -> Places:
        """Where to write the tensors of one push; holds until the model moves."""
        return Places(self._saved, self._by_name, self._own)

    @property
    def _own(self) -> dict[str, Tensor]:
        """Looked up each time, as moving a model to another device gives it new tensors."""
        own: dict[str, Tensor] = self._model.state_dict()
        return own

    @cached_property
    def _saved(self) -> Saved:
        return Saved(self._model, {name: t.shape for name, t in self._own.items()})

    @cached_property
    def _by_name(self) -> dict[str, tuple[Bundle, SavedTensor]]:
        """Each tensor of the checkpoint, with its bundle."""
        return {tensor.name: (b, tensor) for b in self._saved.bundles for tensor in b.saved}


class Places:
    """A model's memory during one push: all of the model is looked up once, at its beginning.

    Args:
        by_name: the tensors of the checkpoint.
        own: the model's tensors, contiguous.
    """

    def __init__(
        self,
        saved: Saved,
        by_name: Mapping[str, tuple[Bundle, SavedTensor]],
        own: Mapping[str, Tensor],
    ) -> None:
        self._saved = saved
        self._by_name = by_name
        self._own = own
        self._elements: tuple[Bundle, dict[str, Tensor]] | None = None
        """Of the last bundle that has no runs: those of one come one after the other, and those of
        all would take more memory than the model."""

    def place(self, meta: TensorMeta) -> Tensor | None:
        """The memory that a push can write a tensor into; None: `take` has to be given it."""
        bundle, tensor = self._by_name[meta.name]
        if not bundle.are_runs:
            return None
        place = self._run(bundle, tensor)
        fits = place.dtype == meta.torch_dtype and place.device.type == "cpu"
        return place if fits else None

    def take(self, name: str, value: Tensor) -> None:
        """Write a tensor that has come; one that lies in its place already stays."""
        bundle, tensor = self._by_name[name]
        if not bundle.are_runs:
            put_back(bundle, self._elements_of(bundle)[name], value, self._own)
            return
        place = self._run(bundle, tensor)
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)

    def _run(self, bundle: Bundle, tensor: SavedTensor) -> Tensor:
        (source,) = bundle.sources
        assert tensor.first is not None
        flat = self._own[source].view(-1)
        return flat[tensor.first :][: tensor.shape.numel()].view(tensor.shape)

    def _elements_of(self, bundle: Bundle) -> dict[str, Tensor]:
        if self._elements is None or self._elements[0] is not bundle:
            self._elements = None  # before the next are made
            shapes = {source: self._own[source].shape for source in bundle.sources}
            self._elements = bundle, self._saved.elements(bundle, shapes)
        return self._elements[1]
