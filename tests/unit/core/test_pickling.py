"""Values that travel by their fields, and lists that travel by columns, arrive as they were."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle

from roll.core.completion import Completion, FinishReason, VersionRuns, Written
from roll.core.pickling import Columns, pickle_by_fields
from roll.core.types import Prompt, Sample
from roll.rewards.api import Reward
from roll.rewards.execution.counters import Scored

runs = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=3).map(
    lambda found: VersionRuns(tuple(found))
)
words = st.text(max_size=5)
prompts = st.builds(
    Prompt,
    words,
    st.tuples(st.integers()),
    words,
    words,
    words,
    st.dictionaries(words, st.integers(), max_size=2),
)
contents = st.builds(Written, st.just([1]), st.just([0.5]), st.none() | words)
completions = st.builds(Completion, contents, runs, st.sampled_from(FinishReason))
samples = st.builds(Sample, words, words, prompts, completions)
rewards = st.builds(Reward, st.floats(allow_nan=False), st.dictionaries(words, st.floats(0, 1)))
scores = st.builds(Scored, st.none() | rewards, st.none() | words, st.booleans())


@dataclass(frozen=True, slots=True)
class MarkedReward(Reward):
    """A class of a user's own."""

    mark: str = ""


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class One:
    """A class with a single field."""

    only: tuple[int, ...] = field(default=())


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
@given(st.lists(samples | scores | runs | st.integers(), max_size=6), st.data())
def test_any_list_arrives_as_it_was(
    dumps: object, values: list[object], data: st.DataObject
) -> None:
    assert callable(dumps)
    several = st.lists(st.sampled_from(values), max_size=8) if values else st.just([])
    repeated = data.draw(several)
    for sent in (values, repeated, [one for one in values if isinstance(one, Sample)]):
        found = pickle.loads(dumps(Columns(sent)))
        assert found == sent
        assert type(found) is list
        assert [type(one) for one in found] == [type(one) for one in sent]
        assert copy.copy(Columns(sent)) == copy.deepcopy(Columns(sent)) == sent


def test_what_is_one_object_before_is_one_object_afterwards() -> None:
    prompt = Prompt("s:1", (1, 2), "text", "answer", "tag")
    whole = Completion(Written([1], [0.5]), VersionRuns(((0, 1),)), FinishReason.STOP)  # type: ignore[arg-type]
    found = pickle.loads(
        pickle.dumps(Columns(Sample(str(i), "g", prompt, whole) for i in range(9)))
    )
    assert len({id(sample.prompt) for sample in found}) == 1
    assert len({id(sample.completion) for sample in found}) == 1
    assert [sample.id for sample in found] == [str(i) for i in range(9)]


def test_a_subclass_keeps_its_own_fields() -> None:
    sent = MarkedReward(0.5, {"a": 1.0}, mark="x")
    assert pickle.loads(pickle.dumps(sent)) == sent
    found = pickle.loads(pickle.dumps(Columns([sent, Reward(1.0)])))
    assert found == [sent, Reward(1.0)]
    assert type(found[0]) is MarkedReward


def test_a_class_with_one_field_is_no_special_case() -> None:
    sent = [One((1, 2)), One(()), One((3,))]
    assert pickle.loads(pickle.dumps(Columns(sent))) == sent
    assert pickle.loads(pickle.dumps(sent[0])) == sent[0]
