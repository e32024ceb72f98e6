"""Metrics with a type that says how values are merged: `Mean`, `Sum`, `Max` or `Last`.

The type of a value defines the reduction across micro-batches, ranks and replicas, so names need no
convention. `Metrics.concat` merges metrics of equal names; `a | b` joins sets without common names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self


class Metric(Protocol):
    """Intermediate state of one number, which can be merged with the state of other parts."""

    def merge(self, other: Self) -> Self:
        """Return the state of both parts together; `other` is the later part."""
        ...

    def value(self) -> float:
        """Return the final number."""
        ...


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean, 0 without weight."""

    total: float
    """Sum of value times weight."""
    weight: float = 1.0
    """Sum of the weights."""

    def merge(self, other: Self) -> Self:
        return type(self)(self.total + other.total, self.weight + other.weight)

    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum over all parts."""

    total: float
    """Sum of this part."""

    def merge(self, other: Self) -> Self:
        return type(self)(self.total + other.total)

    def value(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value of all parts."""

    largest: float
    """Largest value of this part."""

    def merge(self, other: Self) -> Self:
        return type(self)(max(self.largest, other.largest))

    def value(self) -> float:
        return self.largest


@dataclass(frozen=True, slots=True)
class Last:
    """The newest value; for values that are equal on all ranks (learning rate, gradient norm)."""

    newest: float
    """Newest value of this part."""

    def merge(self, other: Self) -> Self:
        return other

    def value(self) -> float:
        return self.newest


class Metrics(Mapping[str, Metric]):
    """An immutable mapping from names to metrics."""

    def __init__(self, values: Mapping[str, Metric] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, name: str) -> Metric:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __or__(self, other: Mapping[str, Metric]) -> Metrics:
        """Join two sets of metrics without common names.

        Raises:
            ValueError: a name is in both sets; use `concat` to merge.
        """
        both = self._values.keys() & other.keys()
        if both:
            raise ValueError(f"metrics named twice: {', '.join(sorted(both))}")
        return Metrics({**self._values, **other})

    def __repr__(self) -> str:
        return f"Metrics({self._values!r})"

    @classmethod
    def concat(cls, parts: Sequence[Metrics]) -> Metrics:
        """Merge all parts, in order. Metrics of equal names are merged as their type defines."""
        merged: dict[str, Metric] = {}
        for part in parts:
            for name, metric in part.items():
                merged[name] = merged[name].merge(metric) if name in merged else metric
        return cls(merged)

    def prefixed(self, prefix: str) -> Metrics:
        """Return the same metrics under the names `<prefix>/<name>`."""
        return Metrics({f"{prefix}/{name}": metric for name, metric in self.items()})

    def values_by_name(self) -> dict[str, float]:
        """Return the final number of each metric, sorted by name."""
        return {name: self._values[name].value() for name in sorted(self._values)}
