"""Nouns of the lowest layer: batches, metrics, registries, timers."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.config.errors import ConfigError
from roll.config.user_code.import_path import load_object
from roll.core.batch import Batch, tensor
from roll.core.batches import TokenBatch, TokenColumn
from roll.core.metrics import Last, Max, Mean, Metrics, Sum
from roll.core.registry import Registry
from roll.core.timing import Timers
from tests.tiny import rollout_batch


@dataclass(frozen=True, kw_only=True)
class Small(Batch):
    tokens: Tensor = tensor("BT", required=True)
    names: list[str]
    versions: Tensor | None = tensor("BT", pad=-1)
    score: Tensor | None = tensor("B")


def make(rows: int, length: int, *, first: int = 0, optional: bool = True) -> Small:
    """Rows whose every value says which row and position it was."""
    row = torch.arange(first, first + rows)
    tokens = row[:, None] * 100 + torch.arange(length)[None] + 1
    return Small(
        tokens=tokens,
        names=[str(r) for r in row.tolist()],
        versions=tokens * 2 if optional else None,
        score=row / 2 if optional else None,
    )


def same(left: Batch, right: Batch) -> bool:
    for spec in fields(left):
        a, b = getattr(left, spec.name), getattr(right, spec.name)
        equal = torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        if not equal:
            return False
    return True


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_splitting_and_joining_again_changes_nothing(
    parts: int, each: int, length: int, optional: bool
) -> None:
    batch = make(parts * each, length, optional=optional)
    pieces = batch.split(parts)
    assert [len(piece) for piece in pieces] == [each] * parts
    assert same(Small.concat(pieces), batch)


def test_a_batch_that_does_not_divide_names_sizes_that_do() -> None:
    with pytest.raises(ValueError, match="7 samples do not divide into 3 equal parts; 6 or 9 do"):
        make(7, 2).split(3)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=4))
def test_joining_pads_the_token_axis_with_the_value_of_each_field(
    shapes: list[tuple[int, int]],
) -> None:
    parts = [make(rows, length, first=10 * i) for i, (rows, length) in enumerate(shapes)]
    joined = Small.concat(parts)
    longest = max(length for _, length in shapes)
    expected_tokens: list[list[int]] = []
    expected_versions: list[list[int]] = []
    for part in parts:
        assert part.versions is not None
        for row in part.tokens.tolist():
            expected_tokens.append(row + [0] * (longest - len(row)))
        for row in part.versions.tolist():
            expected_versions.append(row + [-1] * (longest - len(row)))
    assert joined.tokens.tolist() == expected_tokens
    assert joined.versions is not None
    assert joined.versions.tolist() == expected_versions
    assert joined.names == [name for part in parts for name in part.names]


@given(st.lists(st.integers(0, 5), max_size=8))
def test_selected_rows_are_those_named_in_that_order(index: list[int]) -> None:
    batch = make(6, 3)
    chosen = batch.select(index)
    assert chosen.names == [batch.names[i] for i in index]
    assert chosen.tokens.tolist() == [batch.tokens[i].tolist() for i in index]


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))
def test_trimming_cuts_the_token_axis_and_no_other(rows: int, length: int, kept: int) -> None:
    batch = make(rows, length)
    trimmed = batch.trim(kept)
    assert batch.versions is not None
    assert trimmed.versions is not None
    assert torch.equal(trimmed.tokens, batch.tokens[:, :kept])
    assert torch.equal(trimmed.versions, batch.versions[:, :kept])
    assert trimmed.names == batch.names
    assert trimmed.score is batch.score


def test_mistakes_in_a_batch_name_the_field() -> None:
    with pytest.raises(ValueError, match=r"Small.names has shape 1; expected axes B with B = 2"):
        Small(tokens=torch.zeros(2, 3), names=["a"])
    with pytest.raises(ValueError, match=r"Small.score has shape \(2, 1\); expected axes B"):
        Small(tokens=torch.zeros(2, 3), names=["a", "b"], score=torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"Small\.versions is missing in 1 of 2 parts"):
        Small.concat([make(1, 2), make(1, 2, optional=False)])
    with pytest.raises(ValueError, match="at least one part"):
        Small.concat([])
    with pytest.raises(ValueError, match=r"Small\.score is not set; run the judge first"):
        make(1, 2, optional=False).require("score", made_by="the judge")


def sent(batch: Batch, *, out_of_band: bool) -> Any:
    """The batch at its receiver. Buffers can only be read, as in Ray's object store."""
    beside: list[pickle.PickleBuffer] = []
    keep = beside.append if out_of_band else None
    message = pickle.dumps(batch, protocol=5, buffer_callback=keep)
    buffers = [memoryview(bytes(each.raw())) for each in beside]
    return pickle.loads(message, buffers=buffers)


@pytest.mark.parametrize("out_of_band", [True, False])
def test_a_batch_arrives_as_it_was_and_can_be_changed(out_of_band: bool) -> None:
    batch = rollout_batch(4)
    part = batch.split(2)[1]
    part = part.trim(int(part.lengths.max()))
    tokens = part.tokens.clone()
    found = sent(part, out_of_band=out_of_band)
    assert type(found) is type(batch)
    for spec in fields(part):
        before, after = getattr(part, spec.name), getattr(found, spec.name)
        if isinstance(before, torch.Tensor):
            assert after.dtype == before.dtype
            assert torch.equal(after, before)
            after.zero_()
        else:
            assert after == before
    assert torch.equal(part.tokens, tokens), "the sender's memory was changed"


@dataclass(frozen=True, kw_only=True)
class Versioned(TokenBatch):
    versions: Tensor = tensor("BT", pad=-1, required=True)


def test_padding_is_not_sent_and_comes_back_as_declared() -> None:
    lengths = torch.tensor([900, 3, 0, 7])
    tokens, versions = torch.full((4, 1000), 5), torch.full((4, 1000), 6)
    batch = Versioned(tokens=tokens, lengths=lengths, versions=versions)
    assert len(pickle.dumps(batch, protocol=5)) < 910 * (8 + 8) + 1000
    found = sent(batch, out_of_band=True)
    real_BT = torch.arange(900) < lengths[:, None]
    assert torch.equal(found.tokens, torch.where(real_BT, 5, 0))
    assert torch.equal(found.versions, torch.where(real_BT, 6, -1))
    with pytest.raises(ValueError, match="a row has 900 positions, axis T only 10"):
        pickle.dumps(batch.trim(10))


@dataclass(frozen=True, kw_only=True)
class Deep(TokenBatch):
    scores: Tensor = tensor("BTR", pad=-1, required=True)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_an_axis_after_that_of_the_tokens_is_sent_with_them(rows: int) -> None:
    lengths = torch.tensor([4, 0, 2][:rows], dtype=torch.long)
    scores = torch.arange(rows * 5 * 3.0).reshape(rows, 5, 3)
    batch = Deep(tokens=torch.ones(rows, 5).long(), lengths=lengths, scores=scores)
    found = sent(batch, out_of_band=True)
    width = 4 if rows else 0
    real_BT = torch.arange(width) < lengths[:, None]
    assert torch.equal(found.scores, torch.where(real_BT[..., None], scores[:, :width], -1.0))


def test_a_column_is_as_wide_as_the_batch_whose_rows_it_describes() -> None:
    batch = rollout_batch(4)
    column = TokenColumn(lengths=batch.lengths, values=torch.rand(batch.tokens.shape))
    real_BT = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    joined = TokenColumn.concat([sent(part, out_of_band=True) for part in column.split(2)])
    assert torch.equal(joined.aligned(batch), column.values * real_BT)


def test_a_part_of_a_large_batch_is_sent_without_the_rest() -> None:
    batch = TokenBatch(tokens=torch.ones(1000, 64).long(), lengths=torch.full((1000,), 64))
    part = batch.split(100)[7]
    assert len(pickle.dumps(part, protocol=5)) < 1.2 * 10 * 64 * 8
    beside: list[pickle.PickleBuffer] = []
    message = pickle.dumps(part, protocol=5, buffer_callback=beside.append)
    assert len(message) < 1000, "the numbers are in the message, which costs further copies"


def test_tensors_that_numpy_does_not_know_are_sent_as_they_are() -> None:
    batch = rollout_batch(2)
    rewards = torch.tensor([0.5, 0.25]).bfloat16()
    values = torch.rand(batch.tokens.shape).bfloat16()
    half = replace(batch, rewards=rewards, values=values)
    found = pickle.loads(pickle.dumps(half, protocol=5))
    assert torch.equal(found.values, values[:, : int(batch.lengths.max())])
    assert found.values.shape == found.tokens.shape
    assert found.rewards.dtype == torch.bfloat16
    assert torch.equal(found.rewards, rewards)


NUMBERS = st.integers(-1000, 1000).map(float)
METRICS = st.one_of(
    st.lists(st.builds(Mean, NUMBERS, NUMBERS.map(abs)), min_size=3, max_size=3),
    st.lists(st.builds(Sum, NUMBERS), min_size=3, max_size=3),
    st.lists(st.builds(Max, NUMBERS), min_size=3, max_size=3),
    st.lists(st.builds(Last, NUMBERS), min_size=3, max_size=3),
)


@given(METRICS)
def test_it_does_not_matter_in_which_groups_metrics_are_merged(three: list[Any]) -> None:
    a, b, c = (Metrics({"x": metric}) for metric in three)
    at_once = Metrics.concat([a, b, c])["x"]
    assert at_once == Metrics.concat([Metrics.concat([a, b]), c])["x"]
    assert at_once == Metrics.concat([a, Metrics.concat([b, c])])["x"]


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 9)), min_size=1, max_size=6))
def test_a_merged_mean_is_the_mean_of_everything(parts: list[tuple[float, int]]) -> None:
    merged = Metrics.concat([Metrics({"x": Mean(value * n, n)}) for value, n in parts])
    every = [value for value, n in parts for _ in range(n)]
    expected = math.fsum(every) / len(every) if every else 0.0
    assert merged.values_by_name() == {"x": pytest.approx(expected)}


def test_each_kind_of_metric_merges_in_its_own_way() -> None:
    one = Metrics({"sum": Sum(1), "max": Max(5), "last": Last(1)})
    two = Metrics({"sum": Sum(2), "max": Max(3), "last": Last(2), "only": Sum(7)})
    merged = Metrics.concat([one, two]).values_by_name()
    assert merged == {"last": 2, "max": 5, "only": 7, "sum": 3}
    assert list(merged) == sorted(merged)


def test_joining_metrics_of_the_same_name_is_refused() -> None:
    with pytest.raises(ValueError, match="named twice: x"):
        Metrics({"x": Sum(1)}) | Metrics({"x": Sum(2), "y": Sum(3)})


def test_a_registry_lists_what_it_knows_and_refuses_duplicates() -> None:
    things: Registry[int] = Registry("thing")
    things.register("first")(1)
    things.register("second")(2)
    assert (things["first"], list(things), "third" in things) == (1, ["first", "second"], False)
    with pytest.raises(
        ConfigError, match=r"unknown thing 'frist'; did you mean 'first'\? \(known: first, second\)"
    ):
        things["frist"]
    with pytest.raises(ValueError, match="thing 'first' is registered twice"):
        things.register("first")(3)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_colon", "must read 'package.module:name'"),
        ("roll.nowhere:f", "no module named 'roll.nowhere'"),
        ("math:sqr", r"math has no 'sqr'; did you mean 'sqrt'\?"),
    ],
)
def test_an_import_path_that_leads_nowhere_says_why(path: str, message: str) -> None:
    assert load_object("math:sqrt") is math.sqrt
    with pytest.raises(ConfigError, match=message):
        load_object(path)


def test_timers_add_up_and_start_anew_when_taken() -> None:
    timers = Timers()
    timers.add("rollout", 1.5)
    timers.add("rollout", 0.5)
    with pytest.raises(KeyError), timers.timed("train"):
        raise KeyError
    assert timers.seconds("train") > 0  # also when the phase failed
    taken = timers.take().values_by_name()
    assert taken["time/rollout_s"] == 2.0
    assert set(taken) == {"time/rollout_s", "time/train_s"}
    assert dict(timers.take()) == {}
    assert timers.seconds("rollout") == 0.0
