"""Metrics that know how they merge.

A value carries its reduction as a type, so merging across micro-batches, ranks and replicas needs
no naming convention: `Metrics.concat` merges equal names, `a | b` joins disjoint ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self


class Metric(Protocol):
    """One named number in the making."""

    def merge(self, other: Self) -> Self: ...

    def value(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean; `total` is the sum of value times weight."""

    total: float
    weight: float = 1.0

    def merge(self, other: Self) -> Self:
        return type(self)(self.total + other.total, self.weight + other.weight)

    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0


@dataclass(frozen=True, slots=True)
class Sum:
    total: float

    def merge(self, other: Self) -> Self:
        return type(self)(self.total + other.total)

    def value(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    largest: float

    def merge(self, other: Self) -> Self:
        return type(self)(max(self.largest, other.largest))

    def value(self) -> float:
        return self.largest


@dataclass(frozen=True, slots=True)
class Last:
    """The newest value; the same on every rank (a learning rate, a gradient norm)."""

    newest: float

    def merge(self, other: Self) -> Self:
        return other

    def value(self) -> float:
        return self.newest


class Metrics(Mapping[str, Metric]):
    """Named metrics; immutable."""

    def __init__(self, values: Mapping[str, Metric] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, name: str) -> Metric:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __or__(self, other: Mapping[str, Metric]) -> Metrics:
        """Join two sets of different names.

        Raises:
            ValueError: a name is in both; use `concat` to merge.
        """
        both = self._values.keys() & other.keys()
        if both:
            raise ValueError(f"metrics named twice: {', '.join(sorted(both))}")
        return Metrics({**self._values, **other})

    def __repr__(self) -> str:
        return f"Metrics({self._values!r})"

    @classmethod
    def concat(cls, parts: Sequence[Metrics]) -> Metrics:
        """Merge equal names by their type, in order."""
        merged: dict[str, Metric] = {}
        for part in parts:
            for name, metric in part.items():
                merged[name] = merged[name].merge(metric) if name in merged else metric
        return cls(merged)

    def prefixed(self, prefix: str) -> Metrics:
        """The same metrics under `<prefix>/<name>`."""
        return Metrics({f"{prefix}/{name}": metric for name, metric in self.items()})

    def values_by_name(self) -> dict[str, float]:
        """The final numbers, sorted by name."""
        return {name: self._values[name].value() for name in sorted(self._values)}
