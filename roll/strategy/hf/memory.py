"""Map from the tensors of a checkpoint to the memory of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from torch import Tensor
from transformers import PreTrainedModel

from roll.models.checkpoint_tensors import Bundle, CheckpointLayout, SavedTensor, copy_into_model
from roll.weight_sync.manifest import TensorMeta


class WeightMemory:
    """Memory of a model on any device, by the names of its checkpoint."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each checkpoint tensor that the model contains, by name."""
        return {
            tensor.name: tuple(tensor.shape)
            for bundle in self._saved.bundles
            for tensor in bundle.saved
        }

    @cached_property
    def optional(self) -> frozenset[str]:
        """Second names of tensors with several names (tied weights); a push may leave them out."""
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
        """Look up the memory for the tensors of one push.

        The result is valid until the model moves to another device.
        """
        return Places(self._saved, self._by_name, self._own)

    @property
    def _own(self) -> dict[str, Tensor]:
        """Tensors of the model. Not cached, as a move to another device creates new tensors."""
        own: dict[str, Tensor] = self._model.state_dict()
        return own

    @cached_property
    def _saved(self) -> CheckpointLayout:
        return CheckpointLayout(self._model, {name: t.shape for name, t in self._own.items()})

    @cached_property
    def _by_name(self) -> dict[str, tuple[Bundle, SavedTensor]]:
        """Each checkpoint tensor with its bundle, by name."""
        return {tensor.name: (b, tensor) for b in self._saved.bundles for tensor in b.saved}


class Places:
    """A model's memory during one push.

    Args:
        saved: how the checkpoint holds the model's tensors.
        by_name: the checkpoint tensors with their bundles, by name.
        own: the model's tensors, contiguous, looked up once at the beginning of the push.
    """

    def __init__(
        self,
        saved: CheckpointLayout,
        by_name: Mapping[str, tuple[Bundle, SavedTensor]],
        own: Mapping[str, Tensor],
    ) -> None:
        self._saved = saved
        self._by_name = by_name
        self._own = own
        self._elements: tuple[Bundle, dict[str, Tensor]] | None = None
        """Last bundle whose checkpoint tensors are not contiguous ranges, and its element indices
        (`CheckpointLayout.elements`). Tensors of one bundle arrive in sequence, so one entry
        suffices; the indices of all bundles would take more memory than the model."""

    def place(self, meta: TensorMeta) -> Tensor | None:
        """Return the model's memory for a tensor if a push can write directly into the memory.

        Otherwise return None: the tensor then has to be passed to `take`.
        """
        bundle, tensor = self._by_name[meta.name]
        if not bundle.are_runs:
            return None
        place = self._run(bundle, tensor)
        fits = place.dtype == meta.torch_dtype and place.device.type == "cpu"
        return place if fits else None

    def take(self, name: str, value: Tensor) -> None:
        """Write a received tensor into the model, unless the push has written it there directly."""
        bundle, tensor = self._by_name[name]
        if not bundle.are_runs:
            copy_into_model(bundle, self._elements_of(bundle)[name], value, self._own)
            return
        place = self._run(bundle, tensor)
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)

    def _run(self, bundle: Bundle, tensor: SavedTensor) -> Tensor:
        """Return the memory of a checkpoint tensor that is one range of a tensor of the model."""
        (source,) = bundle.sources
        assert tensor.first is not None
        flat = self._own[source].view(-1)
        return flat[tensor.first :][: tensor.shape.numel()].view(tensor.shape)

    def _elements_of(self, bundle: Bundle) -> dict[str, Tensor]:
        """Return `CheckpointLayout.elements` of a bundle; keep the result until the next bundle."""
        if self._elements is None or self._elements[0] is not bundle:
            self._elements = None  # frees the old indices before new ones are made
            shapes = {source: self._own[source].shape for source in bundle.sources}
            self._elements = bundle, self._saved.elements(bundle, shapes)
        return self._elements[1]
