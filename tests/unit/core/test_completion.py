"""Completions and the runs of their weight versions, against plain lists."""

from __future__ import annotations

import pickle
from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.core.completion import Completion, FinishReason, VersionRuns

VERSIONS = st.lists(st.integers(0, 3), max_size=20)


def canonical(runs: VersionRuns) -> bool:
    return all(count > 0 for _, count in runs.runs) and all(
        one[0] != other[0] for one, other in pairwise(runs.runs)
    )


@given(VERSIONS, VERSIONS, st.integers(0, 25), st.integers(0, 25))
def test_runs_are_what_a_list_of_versions_is(
    first: list[int], then: list[int], begin: int, end: int
) -> None:
    runs = VersionRuns.of_tokens(first)
    assert (list(runs), len(runs)) == (first, len(first))
    assert list(runs + VersionRuns.of_tokens(then)) == first + then
    assert list(runs.part(begin, end)) == first[begin:end]
    assert runs.oldest == min(first, default=None)
    assert runs.newest == max(first, default=None)
    for one in (runs, runs + VersionRuns.of_tokens(then), runs.part(begin, end)):
        assert canonical(one)
        assert one == VersionRuns.of_tokens(list(one)), "equal versions, equal runs"


@given(VERSIONS.map(sorted), st.integers(0, 25))
def test_runs_from_the_starts_that_engines_report(versions: list[int], begin: int) -> None:
    starts = [(v, versions.index(v)) for v in dict.fromkeys(versions)]
    runs = VersionRuns.of_starts(starts, len(versions), begin=begin)
    assert list(runs) == versions[begin:]
    assert canonical(runs)


def test_an_engine_that_reports_no_versions_gives_none() -> None:
    assert VersionRuns.of_starts([], 5) == VersionRuns()


@given(VERSIONS, st.integers(0, 20))
def test_parts_of_a_completion_add_up_to_it(versions: list[int], cut: int) -> None:
    tokens = range(len(versions))
    whole = Completion.of(tokens, (-0.5 * t for t in tokens), versions, FinishReason.STOP)
    cut = min(cut, len(whole))
    first, then = whole.part(0, cut), whole.part(cut)
    assert (len(first), len(then)) == (cut, len(whole) - cut)
    assert first + then == whole
    assert list(then.tokens) == list(tokens)[cut:]
    assert list(then.logprobs) == [-0.5 * t for t in tokens][cut:]
    assert list(then.versions) == versions[cut:]
    assert pickle.loads(pickle.dumps(whole)) == whole


def test_a_token_takes_eight_bytes_on_the_way() -> None:
    count = 10_000
    whole = Completion.of(range(count), [-0.5] * count, [3] * count, FinishReason.LENGTH)
    assert len(pickle.dumps(whole)) < 8 * count + 1000


@pytest.mark.parametrize(
    ("tokens", "logprobs", "versions", "sizes"),
    [(2, 1, 2, "2 tokens, 1 log-probs and 2 v"), (1, 1, 0, "1 tokens, 1 log-probs and 0 v")],
)
def test_columns_of_other_lengths_are_refused(
    tokens: int, logprobs: int, versions: int, sizes: str
) -> None:
    with pytest.raises(ValueError, match=sizes):
        Completion.of(
            array("i", [1] * tokens),
            array("f", [0.0] * logprobs),
            VersionRuns.of_tokens([0] * versions),
            FinishReason.STOP,
        )
