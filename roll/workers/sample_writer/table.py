"""Conversion of samples into a table of Arrow, column by column."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike

from roll.core.completion import VersionRuns
from roll.core.types import Sample, Turn
from roll.output_dir.sample_files import schema
from roll.rollout.episodes.turn_texts import turn_texts
from roll.rollout.types import ScoredSample


def table_of(
    samples: Sequence[ScoredSample],
    *,
    step: int,
    split: str,
    sets: Sequence[str | None],
    baselines: Sequence[float | None],
    read: Callable[[Sequence[int]], str],
) -> Any:
    """Return samples as a table with the columns of `sample_files.schema`.

    Args:
        samples: samples whose tokens are here.
        step: number of the step, or of the steps before the validation.
        split: `train` or `validation`.
        sets: name of the validation set of each sample; None in training.
        baselines: reward of the greedy response to the prompt of each sample; see `SampleJob`.
        read: function that decodes token ids to text, for the turns of agents.
    """
    firsts = [scored.sample for scored in samples]
    columns = {
        "step": [step] * len(samples),
        "split": [split] * len(samples),
        "set": list(sets),
        **_named(samples),
        **_scores(samples),
        "baseline_reward": list(baselines),
        "turns": [_turns(one, read) if one.turns else None for one in samples],
        **_rows(firsts),
        "branches": _branches(samples),
    }
    wanted = schema()
    return pa.table([_column(columns[field.name], field.type) for field in wanted], schema=wanted)


def _named(samples: Sequence[ScoredSample]) -> dict[str, Any]:
    """Return the columns that say what a sample is of and how long it is."""
    firsts = [scored.sample for scored in samples]
    versions = [sample.completion.versions for sample in firsts]
    return {
        "id": [sample.id for sample in firsts],
        "group": [sample.group for sample in firsts],
        "prompt_id": [sample.prompt.id for sample in firsts],
        "tag": [sample.tag for sample in firsts],
        "seat": [scored.seat for scored in samples],
        "prompt": [sample.prompt.text for sample in firsts],
        "response": [sample.completion.text for sample in firsts],
        "ground_truth": [sample.answer for sample in firsts],
        "finish_reason": [sample.completion.finish.value for sample in firsts],
        "truncated": [sample.truncated for sample in firsts],
        "prompt_tokens": [len(sample.prompt.tokens) for sample in firsts],
        "response_tokens": [sample.num_response_tokens for sample in firsts],
        "logprob_mean": list(map(_logprob_mean, firsts)),
        "oldest_version": [runs.oldest for runs in versions],
        "newest_version": [runs.newest for runs in versions],
    }


def _scores(samples: Sequence[ScoredSample]) -> dict[str, Any]:
    """Return the columns of rewards and their parts."""
    return {
        "reward": [one.reward if one.has_reward else None for one in samples],
        "turn_reward": [one.turn_reward for one in samples],
        "rewards": [_pairs(one.by_name) for one in samples],
        "parts": [_pairs(one.parts) for one in samples],
        "failed_rewards": [list(one.failed) for one in samples],
        "step_rewards": [
            None
            if one.steps is None
            else [{"end": end, "reward": value} for end, value in one.steps.pairs]
            for one in samples
        ],
    }


def _turns(
    scored: ScoredSample, read: Callable[[Sequence[int]], str]
) -> list[dict[str, str | float | int]]:
    """Return an episode turn by turn, with the places of the policy's turns in its rows."""
    policy = iter(scored.turns)
    return [
        {**said, **_place(next(policy))} if said["by"] == "policy" else said
        for said in turn_texts(scored, read)
    ]


def _place(turn: Turn) -> dict[str, str | int]:
    """Return where the tokens of a turn are, and in which state of the environment it began."""
    return {"row": turn.row, "begin": turn.begin, "end": turn.end, "state": turn.state}


def _rows(rows: Sequence[Sample]) -> dict[str, Any]:
    """Return the columns of tokens, without a Python number for any token."""
    written = [row.completion.content.get() for row in rows]
    return {
        "prompt_ids": _lists([row.prompt.tokens for row in rows], np.int32),
        "response_ids": _lists([one.tokens for one in written], np.int32),
        "logprobs": _lists([one.logprobs for one in written], np.float32),
        "versions": [_runs(row.completion.versions) for row in rows],
    }


def _branches(samples: Sequence[ScoredSample]) -> Any:
    """Return the further rows of episodes; null for a sample that has none."""
    kind = schema().field("branches").type
    counts = [len(one.branches) for one in samples]
    if not any(counts):
        return pa.nulls(len(samples), kind)
    columns = _rows([row for one in samples for row in one.branches])
    rows = pa.StructArray.from_arrays(
        [_column(columns[field.name], field.type) for field in kind.value_type],
        fields=list(kind.value_type),
    )
    empty = pa.array([count == 0 for count in counts])
    return pa.ListArray.from_arrays(_offsets(counts), rows, type=kind, mask=empty)


def _lists(parts: Sequence[Iterable[Any]], dtype: DTypeLike) -> Any:
    """Return arrays of numbers as a column of lists. Those that are one object, as the prompts of
    siblings are, are converted once."""
    known = {key: np.asarray(part, dtype) for key, part in {id(one): one for one in parts}.items()}
    arrays = [known[id(part)] for part in parts]
    values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
    return pa.ListArray.from_arrays(_offsets([len(one) for one in arrays]), pa.array(values))


def _offsets(counts: Sequence[int]) -> Any:
    """Return where each list begins, and where the last one ends."""
    return pa.array(np.cumsum([0, *counts], dtype=np.int32))


def _column(values: Any, kind: Any) -> Any:
    """Return a column of this type. A text that is no valid Unicode gets its broken characters
    escaped, as `\\udc80`."""
    if isinstance(values, pa.Array):
        return values
    try:
        return pa.array(values, type=kind)
    except UnicodeEncodeError:
        whole = [one and one.encode("utf-8", "backslashreplace").decode() for one in values]
        return pa.array(whole, type=kind)


def _pairs(scores: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the entries of a map column."""
    return [(name, float(value)) for name, value in scores.items()]


def _runs(versions: VersionRuns) -> list[dict[str, int]]:
    """Return the weight versions of a row's tokens, as runs."""
    return [{"version": version, "tokens": count} for version, count in versions.runs]


def _logprob_mean(sample: Sample) -> float | None:
    """Return the mean log-prob of the tokens that the policy wrote; None if there are none."""
    sampled = sample.num_sampled_tokens
    return math.fsum(sample.completion.logprobs) / sampled if sampled else None
