"""Rules that parts of several kinds must keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from roll.core.batch import Batch
from roll.core.errors import RollError

B = TypeVar("B", bound=Batch)

TOLERANCE = 1e-5
"""Largest difference between two results that should be equal, relative to the largest number:
sums in another order differ in their last bits."""


def require(kept: bool, broken: str) -> None:
    """Raise AssertionError with this text unless the rule is kept."""
    if not kept:
        raise AssertionError(broken)


@contextmanager
def case(what: str) -> Iterator[None]:
    """Raise AssertionError, which names the case, in place of an error of the part."""
    try:
        yield
    except RollError as error:
        raise AssertionError(f"{what}: {error}") from error


def require_equal(found: Tensor, expected: Tensor, broken: str) -> None:
    """Raise AssertionError with this text, and the first difference, unless both are equal up to
    `TOLERANCE`."""
    require(found.shape == expected.shape, f"{broken}: another shape")
    scale = max(1.0, expected.double().abs().max().item()) if expected.numel() else 1.0
    gaps = (found.double() - expected.double()).abs() / scale
    wrong = gaps > TOLERANCE
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{broken}: at {list(at)} {found[at].item():g} in place of {expected[at].item():g}"
        )


@contextmanager
def unchanged(batch: Batch, what: str) -> Iterator[None]:
    """Raise AssertionError if the block writes into a tensor of the batch."""
    tensors = {s.name: getattr(batch, s.name) for s in fields(batch)}
    before = {name: each.clone() for name, each in tensors.items() if isinstance(each, Tensor)}
    yield
    for name, copy in before.items():
        same = torch.equal(tensors[name].nan_to_num(), copy.nan_to_num())
        require(same, f"{what} wrote into `{name}`, which others read; make a new tensor")


def widened(batch: B, by: int) -> B:
    """Return the batch with this many more columns of padding."""
    return _each_column(batch, lambda column: torch.nn.functional.pad(column, [0, by]))


def littered(batch: B, mask_BT: Tensor) -> B:
    """Return the batch with large numbers in all float columns outside the mask."""
    return _each_column(
        batch,
        lambda column: column.masked_fill(~mask_BT, 1e3) if column.is_floating_point() else column,
    )


def _each_column(batch: B, change) -> B:  # type: ignore[no-untyped-def]
    """Return the batch with each `[B, T]` tensor changed."""
    changed = {}
    for spec in fields(batch):
        value = getattr(batch, spec.name)
        if isinstance(value, Tensor) and spec.metadata.get("axes") == "BT":
            changed[spec.name] = change(value)
    return replace(batch, **changed)
