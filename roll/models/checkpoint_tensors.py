"""Conversion between the tensors of a model in memory and those of its checkpoint.

transformers may store a model in memory otherwise than in files: all experts of a layer in one
tensor, or parts of the model under other names. The conversion to the names and shapes of the files
is that of `save_pretrained`. It runs once on tensors without values, which record their origin.
After that, the weights can be converted in parts, without gathering the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Tensor of the checkpoint."""

    name: str
    shape: torch.Size
    first: int | None
    """Index of its first element in the flattened source, if this tensor is a contiguous run of
    elements of a single tensor of the model; None otherwise."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tensors of the model, and the tensors of the checkpoint that are made of exactly these."""

    sources: tuple[str, ...]
    """Names of the tensors in the model."""
    saved: tuple[SavedTensor, ...]
    """Tensors of the checkpoint, in memory order if they are runs of the source."""

    @property
    def are_runs(self) -> bool:
        """True if each saved tensor is a contiguous run of elements of the only source."""
        return all(tensor.first is not None for tensor in self.saved)


class CheckpointLayout:
    """Relation between the tensors of a model and the tensors of its checkpoint.

    Args:
        model: model whose own conversion is used.
        shapes: shapes of the model's tensors, by name.
    """

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> None:
        empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        self._model: Any = _WholeModel(model, empty)
        traced = {name: _Traced.of(name, tensor) for name, tensor in empty.items()}
        storages = {tensor.untyped_storage()._cdata: name for name, tensor in empty.items()}
        found: dict[frozenset[str], list[SavedTensor]] = {}
        for name, tensor in self.convert(traced).items():
            assert isinstance(tensor, _Traced)
            source = storages.get(tensor.untyped_storage()._cdata)
            is_run = source is not None and tensor.is_contiguous()
            first = int(tensor.storage_offset()) if is_run else None
            saved = SavedTensor(name, torch.Size(tensor.shape), first)
            found.setdefault(tensor.origins, []).append(saved)
        self.bundles = _in_order(_merge_by_common_source(found), list(shapes))

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert whole tensors of the model to tensors of the checkpoint, by name.

        Args:
            tensors: all sources of one or more bundles.
        """
        return revert_weight_conversion(self._model, dict(tensors))

    def to_checkpoint(self, bundle: Bundle, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Yield the saved tensors of a bundle, in the order of the bundle.

        The yielded tensors may share memory with the sources.

        Args:
            tensors: whole sources of the bundle, by name.
        """
        if bundle.are_runs:
            (source,) = (tensors[name].reshape(-1) for name in bundle.sources)
            for saved in bundle.saved:
                assert saved.first is not None
                yield source[saved.first :][: saved.shape.numel()].view(saved.shape)
            return
        converted = self.convert({name: tensors[name] for name in bundle.sources})
        for saved in bundle.saved:
            yield converted.pop(saved.name)

    def elements(self, bundle: Bundle, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Return the numbers of the elements that make each saved tensor, for `copy_into_model`.

        This needs 8 bytes and a conversion for each element of the whole bundle.

        Args:
            shapes: shapes of the bundle's sources, by name.

        Returns:
            Int64 tensors in the shapes of the saved tensors, by name. The elements of the sources
            are numbered from 0, one source after the other.
        """
        begin = 0
        numbers = {}
        for source in bundle.sources:
            count = shapes[source].numel()
            numbers[source] = torch.arange(begin, begin + count).view(shapes[source])
            begin += count
        return self.convert(numbers)


def copy_into_model(
    bundle: Bundle, wanted: Tensor, value: Tensor, own: Mapping[str, Tensor]
) -> None:
    """Copy a tensor of the checkpoint into the tensors of the model.

    Args:
        bundle: bundle of the tensor.
        wanted: numbers of the tensor's elements, from `CheckpointLayout.elements`.
        value: the tensor of the checkpoint.
        own: the model's tensors by name, contiguous.
    """
    wanted = wanted.reshape(-1)
    begin = 0
    for source in bundle.sources:
        target = own[source].view(-1)
        here = (wanted >= begin) & (wanted < begin + len(target))
        places = (wanted[here] - begin).to(target.device)
        target[places] = value.reshape(-1)[here.to(value.device)].to(target)
        begin += len(target)


class _WholeModel:
    """A model whose parameters have their whole shapes, also where a rank holds parts of them.

    Some conversions transpose a tensor if its shape is not that of the model's parameter. ZeRO-3
    leaves parameters without elements.
    """

    def __init__(self, model: PreTrainedModel, whole: Mapping[str, Tensor]) -> None:
        self._model = model
        self._whole = whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> Tensor:
        """Return a parameter, without values if its whole shape is known."""
        return self._whole[name] if name in self._whole else self._model.get_parameter(name)


class _Traced(Tensor):
    """Tensor without values that records the names of the tensors it was made of."""

    origins: frozenset[str]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> _Traced:
        """Return a view of `tensor` whose only origin is `name`."""
        traced = tensor.as_subclass(cls)
        traced.origins = frozenset({name})
        return traced

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; its results get the origins of all its arguments. Copies are skipped."""
        if func in (Tensor.contiguous, Tensor.clone):
            return args[0]  # without values, a copy equals the original
        # `view` may fail without the copy that was skipped above.
        func = Tensor.reshape if func is Tensor.view else func
        result = super().__torch_function__(func, types, args, kwargs or {})
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, cls)]
        if made:
            given = (x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
            origins = frozenset[str]().union(*(tensor.origins for tensor in given))
            for tensor in made:
                tensor.origins = origins
        return result


def _merge_by_common_source(
    found: Mapping[frozenset[str], Iterable[SavedTensor]],
) -> list[tuple[frozenset[str], list[SavedTensor]]]:
    """Merge groups of saved tensors that have a source in common."""
    joined: list[tuple[frozenset[str], list[SavedTensor]]] = []
    for sources, saved in found.items():
        apart = [each for each in joined if not each[0] & sources]
        for others, theirs in (each for each in joined if each[0] & sources):
            sources, saved = sources | others, [*theirs, *saved]
        joined = [*apart, (sources, list(saved))]
    return joined


def _in_order(
    bundles: Iterable[tuple[frozenset[str], list[SavedTensor]]], names: list[str]
) -> tuple[Bundle, ...]:
    """Return bundles in the order of the model's tensors, and their runs in memory order."""
    place = {name: i for i, name in enumerate(names)}
    ordered = [
        Bundle(
            tuple(sorted(sources, key=place.__getitem__)),
            tuple(sorted(saved, key=lambda tensor: tensor.first or 0)),
        )
        for sources, saved in bundles
    ]
    return tuple(sorted(ordered, key=lambda bundle: place[bundle.sources[0]]))
