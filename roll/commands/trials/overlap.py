"""Trial of `data.overlap`: training rows that are in validation sets, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from roll.commands.trials.result import Trial
from roll.config.errors import UserError
from roll.config.offline_base import OfflineConfig
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.config.sections.data import FileConfig
from roll.data import datasets, examples
from roll.data.datasets import Dataset, Source
from roll.data.preparation.overlap import judged, overlaps, without
from roll.data.sources import resolve_format
from roll.data.store.key import files_of, states_of
from roll.data.store.load import LARGE_BYTES
from roll.runtime.run_data import apart


def try_overlap(
    config: RunConfig,
    trial: Trial,
    rows: Mapping[str, Source[Any] | None],
    read: Callable[[str], Source[Any]],
    sources: Mapping[str, FileConfig],
) -> None:
    """Judge the overlap of training with validation by `data.overlap`, as the run does. Sources
    that a run keeps on disk are not read for this: it would take minutes.

    Args:
        rows: all rows of each source, by its key in the config; None: not all of them were read.
        read: function that reads all rows of the source with this key.
        sources: sources and validation sets that are on this machine, by the same keys.
    """
    assert isinstance(config, RlvrBase | OfflineConfig)
    train: list[Source[Any]] = []
    held: list[Source[Any]] = []
    try:
        for key, found in rows.items():
            if found is None and is_large(sources[key]):
                trial.untried.append(f"overlap of {key} (a large file: `roll data` looks at it)")
                continue
            (train if key.startswith("data.") else held).append(found or read(key))
        _judge(config, trial, _dataset(train), _dataset(held))
    except UserError as error:
        trial.wrong.append(error)


def _judge(
    config: RlvrBase | OfflineConfig, trial: Trial, train: Dataset[Any], held: Dataset[Any]
) -> None:
    """Note the overlap; DataError if the run would not start because of it."""
    if isinstance(config, RlvrBase):
        found = overlaps(train, apart(held, train), datasets.content_of)
    else:
        found = overlaps(train, held, examples.content_of)
    if not found:
        return
    rule = config.data.overlap
    trial.remarks.append(judged(found, rule))
    if rule == "drop":
        kept = without(train, found)
        gone = len(train) - sum(len(source.items) for source in kept)
        trial.remarks.append(f"data.overlap: {gone} training rows are left out")


def _dataset(sources: list[Source[Any]]) -> Dataset[Any]:
    return Dataset(tuple(sources), (), "")


def is_large(source: FileConfig) -> bool:
    """Return whether a run would keep the rows of a local source on disk."""
    assert resolve_format(source) != "hub"
    return sum(size for size, _ in states_of(files_of(source))) >= LARGE_BYTES
