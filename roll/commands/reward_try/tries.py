"""Runs of the rewards of a run file on responses, without the policy.

The rewards run as in a run, but in this process: with their time limits, child processes, judges
and servers. Only the share of failures has no limit.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from roll.commands.reward_try.own_judges import OwnJudges
from roll.commands.reward_try.responses import (
    Response,
    made_responses,
    read_responses,
    rows_needed,
    with_labels,
)
from roll.config.errors import RollError
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.config.sections.data import SourceConfig
from roll.config.sections.reward import RewardConfig
from roll.config.sections.roles import Role
from roll.core.errors import ConfigError, DataError
from roll.core.types import Prompt, Sample, WorkerSpec
from roll.data.chat.templates import DatedTokenizer
from roll.data.datasets import named_sources, source_prompts
from roll.models.load import load_tokenizer
from roll.platform.machine import cores
from roll.rewards.execution.counters import Scored
from roll.workers.reward import RewardWorker
from roll.workers.reward_classes import reward_recipe

ROWS = 20
"""Number of rows that are tried where no file of responses is given."""
SPARE = 8
"""Number of further rows of each source, whose answers serve as wrong ones."""
AT_ONCE = 8
"""Number of samples, or groups, that a reward scores at once."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A response with what a reward made of it."""

    response: Response
    scored: Scored
    latency_s: float
    """Time that the sample, or its group, took, in seconds."""


@dataclass(frozen=True, slots=True)
class RewardTry:
    """Results of one reward."""

    name: str
    config: RewardConfig
    tried: list[Tried]
    stopped: str | None = None
    """Error that would stop a run; None if there was none."""

    @property
    def failures(self) -> list[Tried]:
        """Responses on which the reward failed, also those to which `on_error` gives a score."""
        return [one for one in self.tried if one.scored.failure is not None]

    @property
    def would_stop_a_run(self) -> bool:
        """True if the reward fails more often than its `max_error_rate` allows."""
        allowed = self.config.max_error_rate * len(self.tried)
        return self.stopped is not None or len(self.failures) > allowed + 1e-9


def try_rewards_on(
    config: RunConfig,
    folder: Path,
    *,
    rows: int | None = None,
    responses: Path | None = None,
    against: Path | None = None,
) -> list[RewardTry]:
    """Run each reward on the responses to rows with its tags.

    Args:
        config: run with rewards.
        folder: folder of the user's modules, which a reward may name.
        rows: number of rows, or of lines of `responses`; None: `ROWS`, or all lines.
        responses: file of responses (`read_responses`); None: responses are made.
        against: file with labels of the responses; None: those in `responses`, if there are any.

    Raises:
        ConfigError: the run has no rewards, or one of them cannot be made.
        DataError: a file cannot be used.
    """
    if not isinstance(config, RlvrBase) or not config.rewards:
        raise ConfigError(f"the run (pipeline {config.pipeline}) has no `rewards` to try")
    found = _responses(config, rows, responses)
    if against is not None:
        found = with_labels(found, against, rows)
    return score_responses(config, folder, found)


def score_responses(
    config: RlvrBase, folder: Path, responses: Sequence[Response]
) -> list[RewardTry]:
    """Run each reward of a run on the responses with its tags.

    Args:
        folder: folder of the user's modules, which a reward may name.

    Raises:
        ConfigError: a reward cannot be made.
    """
    sys.path.insert(0, str(folder))
    try:
        return asyncio.run(_try_all(config, responses))
    finally:
        sys.path.remove(str(folder))


def _responses(config: RlvrBase, rows: int | None, file: Path | None) -> list[Response]:
    """Return the responses of a file, or made ones to the first rows of the sources.

    Args:
        rows: number of lines of the file, or of rows; None: all lines, or `ROWS` rows.
        file: JSONL file of responses; None: responses are made.

    Raises:
        DataError: the file or a source cannot be used.
    """
    dated = DatedTokenizer(load_tokenizer(config.train_model), datetime.now())
    sources = named_sources(config.data.sources)
    if file is not None:
        # Rollouts of a validation have rows of its sets.
        sources |= config.validation.sets if _names_set(file, config.validation.sets) else {}
        needed = rows_needed(file, rows)
        parts = [_first(name, one, needed, config, dated) for name, one in sources.items()]
        return read_responses(file, [row for part in parts for row in part], dated, rows)
    wanted = rows or ROWS
    each = -(-wanted // len(sources))
    parts = [_first(name, one, each + SPARE, config, dated) for name, one in sources.items()]
    chosen = [row for part in parts for row in part[:each]][:wanted]
    return made_responses(chosen, [row for part in parts for row in part], dated)


def _first(
    name: str, source: SourceConfig, rows: int, config: RlvrBase, tokenizer: DatedTokenizer
) -> tuple[Prompt, ...]:
    """Return the first rows of a source, without those that are too long."""
    limit = rows if source.limit is None else min(rows, source.limit)
    first = source.model_copy(update={"limit": limit})
    return tuple(source_prompts(name, first, config.data, tokenizer)[0].items)


def _names_set(file: Path, sets: Mapping[str, Any]) -> bool:
    """Return whether the text of a file of responses holds the id of a row of one of the validation
    sets `sets`, by name."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return any(f'"{name}:' in text or f"/{name}:" in text for name in sets)


async def _try_all(config: RlvrBase, responses: Sequence[Response]) -> list[RewardTry]:
    """Try each reward on the responses of its tags, one reward after another; then end the
    engines of judges."""
    results, engines = [], OwnJudges(config)
    try:
        for name, reward in config.rewards.items():
            taken = [one for one in responses if one.sample.tag in reward.tags]
            results.append(await _try_one(name, reward, config, taken, engines))
    finally:
        await engines.close()
    return results


async def _try_one(
    name: str,
    config: RewardConfig,
    run: RlvrBase,
    responses: Sequence[Response],
    engines: OwnJudges,
) -> RewardTry:
    """Run one reward on its responses; `engines` answer for judges on devices of the run.

    Raises:
        DataError: the reward compares responses to one prompt, and each prompt has one.
    """
    groups = _works(responses, whole_groups=config.per == "group")
    compares = config.per == "group" and config.judge is not None
    if compares and groups and max(map(len, groups)) < 2:
        raise DataError(
            f"rewards.{name}: compares the responses to a prompt, and no prompt has several; give "
            "a line several `responses`, or several lines the same `id`"
        )
    lenient = config.model_copy(update={"max_error_rate": 1.0})
    worker_class, arguments = reward_recipe(name, lenient, run.judges)
    own = cores()
    spec = WorkerSpec(Role.REWARD, 0, 1, (0,), own, 0, "127.0.0.1:0", 0, "cpu", label=name)
    worker = worker_class(spec, *arguments)
    tried: list[Tried] = []
    stopped = None
    try:
        await worker.start()
        if config.process:
            await worker.use_tokenizer(run.train_model)
        await worker.begin_step(max(1, len(responses)))
        room = asyncio.Semaphore(min(AT_ONCE, config.concurrency))
        async with engines.answering(worker):
            found = await asyncio.gather(*(_score(worker, room, group) for group in groups))
        tried = [one for group in found for one in group]
    except RollError as error:
        if isinstance(error, ConfigError):
            raise
        stopped = str(error)
    finally:
        await worker.close()
    return RewardTry(name, config, tried, stopped)


def _works(responses: Sequence[Response], *, whole_groups: bool) -> list[list[Response]]:
    """Return the responses that are scored together: each alone, or all to the same row."""
    if not whole_groups:
        return [[one] for one in responses]
    by_group = sorted(responses, key=lambda one: one.sample.group)
    return [list(group) for _, group in groupby(by_group, key=lambda one: one.sample.group)]


async def _score(
    worker: RewardWorker, room: asyncio.Semaphore, group: Sequence[Response]
) -> list[Tried]:
    """Score the responses of `group` in one call of the worker, when `room` has a free place. Each
    gets the time of the call as latency."""
    clock = asyncio.get_running_loop().time
    samples: list[Sample] = [one.sample for one in group]
    async with room:
        begun_s = clock()
        if worker.config.per == "group":
            [scored] = await worker.score_groups([samples])
        else:
            scored = await worker.score_samples(samples)
        took_s = clock() - begun_s
    return [Tried(one, each, took_s) for one, each in zip(group, scored, strict=True)]
