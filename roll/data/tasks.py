"""Loading of tasks: seeds or rows, from which environments begin episodes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from roll.config.sections.environment import TaskSource
from roll.core.types import Prompt
from roll.data.columns import PromptRow, map_task
from roll.data.datasets import Dataset, Source, SourceReport, fingerprint, identity, named_sources
from roll.data.preparation.parts import lies_in, no_rows
from roll.data.sources import read_source


def load_tasks(sources: Sequence[TaskSource] | Mapping[str, TaskSource]) -> Dataset[Prompt]:
    """Return the tasks of all sources. A task is a prompt without tokens: what the policy reads
    first, its environment says.

    Args:
        sources: training sources, or validation sets by name; ids of tasks then begin with it.

    Raises:
        DataError: a file cannot be read, none of its rows lies in the source's part, or a row has
            a column `seed` that is no seed.
    """
    loaded = tuple(source_tasks(name, each) for name, each in _named(sources).items())
    reports = tuple(
        SourceReport(each.name, len(each.items), len(each.items), 0, 0) for each in loaded
    )
    return Dataset(loaded, reports, fingerprint(loaded, identity))


def source_tasks(name: str, source: TaskSource) -> Source[Prompt]:
    """Return the tasks of one source: its seeds, or the rows of its file; DataError as in
    `load_tasks`."""
    if source.seeds is not None:
        seeds = range(source.first_seed, source.first_seed + source.seeds)
        items = tuple(
            Prompt(f"{name}:{seed}", (), "", "", source.tag, {"seed": seed}) for seed in seeds
        )
    else:
        rows = read_source(source, map_task)
        items = tuple(
            Prompt(f"{name}:{number}", (), _question(row), row.answer, row.tag, row.extra)
            for number, row in enumerate(rows)
            if source.part is None or lies_in(source.part, row.asked)
        )
        if not items:
            raise no_rows(str(source.path), source.part, len(rows))
    return Source(name, source.weight, items)


def _question(row: PromptRow) -> str:
    """Return the text of a row's question; of a conversation, its last message."""
    return row.prompt if row.prompt is not None else (row.messages or ())[-1].content


def _named(sources: Sequence[TaskSource] | Mapping[str, TaskSource]) -> dict[str, TaskSource]:
    """Return sources by name; one without a file has the name of its tag."""
    if isinstance(sources, Mapping):
        return dict(sources)
    placed = [each if each.path else each.model_copy(update={"path": each.tag}) for each in sources]
    names = list(named_sources(placed))
    return dict(zip(names, sources, strict=True))


def options_of(task: Prompt) -> dict[str, Any]:
    """Return what an environment gets of a task as `options`: the columns of its row, without a
    column `seed`; nothing for a task that is a seed."""
    columns = {key: value for key, value in task.extra.items() if key != "seed"}
    row = {"prompt": task.text, "answer": task.answer} if task.text else {}
    return row | columns


def seed_of(task: Prompt, *, run_seed: int) -> int:
    """Return the seed with which an environment begins a task.

    This is `seed` of the task, as a whole number, if it has one: its own seed, or the column of
    this name, which `map_task` has checked. Otherwise it follows from `run_seed` and the task's id.
    It has at most 31 bits, because gymnasium takes no more.
    """
    if "seed" in task.extra:
        return int(task.extra["seed"])
    text = f"{run_seed}/{task.id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1
