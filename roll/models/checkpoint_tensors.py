"""A model's tensors as its checkpoint holds them.

transformers may keep a model otherwise than its files do: all experts of a layer in one tensor, or
parts of the model under other names. The way back is the model's own, the one that
`save_pretrained` takes. It is asked once, with tensors that have no values but tell where they come
from, so that weights can then leave part by part without being gathered.
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
    """A tensor of the checkpoint."""

    name: str
    shape: torch.Size
    first: int | None
    """Where it begins in the flattened tensor of the model that it is a run of elements of; None:
    it is no such run."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tensors of the model, and those of the checkpoint that are made of them and no others."""

    sources: tuple[str, ...]
    """Names in the model."""
    saved: tuple[SavedTensor, ...]

    @property
    def are_runs(self) -> bool:
        """Whether each saved tensor is a run of elements of the only source."""
        return all(tensor.first is not None for tensor in self.saved)


class Saved:
    """How the checkpoint of a model holds its tensors.

    Args:
        shapes: of the model's tensors, by name.
    """

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> None:
        self._model = model
        empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
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
        self.bundles = _in_order(_joined(found), list(shapes))

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors of the model, as the checkpoint holds them.

        Args:
            tensors: all sources of one bundle, or of several.
        """
        converted: dict[str, Tensor] = revert_weight_conversion(self._model, dict(tensors))
        return converted

    def take_apart(self, bundle: Bundle, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """The saved tensors of a bundle, in its order.

        Args:
            tensors: its sources, whole. What is yielded may share memory with them.
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
        """Which elements of the model each saved tensor of a bundle is made of, for `put_back`.

        Costs 8 bytes and a conversion for each element of the bundle, not of one saved tensor.

        Args:
            shapes: of the bundle's sources, by name.

        Returns:
            int64, by name and in the saved tensor's shape: the sources' elements are numbered one
            source after the other.
        """
        begin = 0
        numbers = {}
        for source in bundle.sources:
            count = shapes[source].numel()
            numbers[source] = torch.arange(begin, begin + count).view(shapes[source])
            begin += count
        return self.convert(numbers)


def put_back(bundle: Bundle, wanted: Tensor, value: Tensor, own: Mapping[str, Tensor]) -> None:
    """Write a tensor of the checkpoint where the model holds its elements.

    Args:
        wanted: the tensor's `elements`.
        own: the model's tensors, contiguous.
    """
    wanted = wanted.reshape(-1)
    begin = 0
    for source in bundle.sources:
        target = own[source].view(-1)
        here = (wanted >= begin) & (wanted < begin + len(target))
        places = (wanted[here] - begin).to(target.device)
        target[places] = value.reshape(-1)[here.to(value.device)].to(target)
        begin += len(target)


class _Traced(Tensor):
    """Has no values, but knows what it was made of."""

    origins: frozenset[str]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> _Traced:
        traced = tensor.as_subclass(cls)
        traced.origins = frozenset({name})
        return traced

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.contiguous, Tensor.clone):
            return args[0]  # the same elements: without values, a copy is what it is a copy of
        func = Tensor.reshape if func is Tensor.view else func  # it may be none for want of a copy
        result = super().__torch_function__(func, types, args, kwargs or {})
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, cls)]
        if made:
            given = (x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
            origins = frozenset[str]().union(*(tensor.origins for tensor in given))
            for tensor in made:
                tensor.origins = origins
        return result


def _joined(
    found: Mapping[frozenset[str], Iterable[SavedTensor]],
) -> list[tuple[frozenset[str], list[SavedTensor]]]:
    """The same with those put together that have a source in common."""
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
    """Bundles in the order of the model, runs in that of memory."""
    place = {name: i for i, name in enumerate(names)}
    ordered = [
        Bundle(
            tuple(sorted(sources, key=place.__getitem__)),
            tuple(sorted(saved, key=lambda tensor: tensor.first or 0)),
        )
        for sources, saved in bundles
    ]
    return tuple(sorted(ordered, key=lambda bundle: place[bundle.sources[0]]))
