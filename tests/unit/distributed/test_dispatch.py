"""Scatter and gather, against sums and lists worked out by hand; typed calls, against mypy."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.core.batches import TokenBatch
from roll.core.metrics import Mean, Metrics
from roll.core.types import RankInfo
from roll.distributed.dispatch import BROADCAST, SHARD_BATCH, Call, dispatch, dispatch_of

REPOSITORY = Path(__file__).parents[3]


def token_batch(rows: int) -> TokenBatch:
    tokens = torch.arange(rows * 3).reshape(rows, 3)
    return TokenBatch(tokens=tokens, lengths=torch.full((rows,), 3))


def plain_ranks(count: int) -> list[RankInfo]:
    return [RankInfo(rank, rank, count, is_dp_leader=True) for rank in range(count)]


def tensor_parallel_ranks(dp_size: int, width: int) -> list[RankInfo]:
    """Neighbours share a part; the last of them leads."""
    return [
        RankInfo(rank, rank // width, dp_size, is_dp_leader=rank % width == width - 1)
        for rank in range(dp_size * width)
    ]


@settings(max_examples=40)
@given(dp_size=st.integers(1, 4), width=st.integers(1, 3), rows_each=st.integers(1, 3))
def test_shards_of_leaders_join_to_the_whole_batch_in_order(
    dp_size: int, width: int, rows_each: int
) -> None:
    ranks = tensor_parallel_ranks(dp_size, width)
    batch = token_batch(dp_size * rows_each)
    calls = SHARD_BATCH.scatter(ranks, Call((batch, "same"), {"also": batch}))
    assert [len(call.args[0]) for call in calls] == [rows_each] * len(ranks)
    assert {call.args[1] for call in calls} == {"same"}
    joined = SHARD_BATCH.gather(ranks, [call.kwargs["also"] for call in calls])
    assert torch.equal(joined.tokens, batch.tokens)


def test_results_of_ranks_that_do_not_lead_are_left_out() -> None:
    ranks = tensor_parallel_ranks(2, 2)
    results = [Metrics({"loss": Mean(value)}) for value in (100.0, 1.0, 100.0, 3.0)]
    assert SHARD_BATCH.gather(ranks, results).values_by_name() == {"loss": 2.0}


def test_leaders_are_joined_by_their_part_and_not_by_their_rank() -> None:
    ranks = [RankInfo(0, 1, 2, is_dp_leader=True), RankInfo(1, 0, 2, is_dp_leader=True)]
    batch = token_batch(2)
    shards = [call.args[0] for call in SHARD_BATCH.scatter(ranks, Call((batch,)))]
    assert torch.equal(shards[0].tokens, batch.tokens[1:])
    assert torch.equal(SHARD_BATCH.gather(ranks, shards).tokens, batch.tokens)


def test_strings_are_not_split_although_they_could_be() -> None:
    calls = SHARD_BATCH.scatter(plain_ranks(2), Call(("a b",)))
    assert [call.args for call in calls] == [("a b",), ("a b",)]


def test_none_from_every_leader_is_none() -> None:
    assert SHARD_BATCH.gather(plain_ranks(2), [None, None]) is None


@pytest.mark.parametrize("results", [[1, 2], [None, Metrics({})]])
def test_results_that_cannot_be_joined_are_named(results: list[object]) -> None:
    with pytest.raises(TypeError, match="concat"):
        SHARD_BATCH.gather(plain_ranks(2), results)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="5 samples do not divide into 2"):
        SHARD_BATCH.scatter(plain_ranks(2), Call((token_batch(5),)))


def test_broadcast_sends_the_same_call_and_returns_the_first_result() -> None:
    call = Call((1,), {"b": 2})
    assert BROADCAST.scatter(plain_ranks(3), call) == [call] * 3
    assert BROADCAST.gather(plain_ranks(3), ["a", "b", "c"]) == "a"


def test_a_marked_method_keeps_its_behaviour_and_an_unmarked_one_broadcasts() -> None:
    @dispatch(SHARD_BATCH)
    def double(number: int) -> int:
        return 2 * number

    assert double(4) == 8
    assert dispatch_of(double) is SHARD_BATCH
    assert dispatch_of(token_batch) is BROADCAST


SNIPPET = """
import asyncio
from roll.distributed.cluster import Cluster, Launcher, Placement
from roll.distributed.pending import Pending
from roll.distributed.worker import Worker
from roll.core.types import WorkerSpec

class Train(Worker):
    def __init__(self, spec: WorkerSpec, steps: int) -> None:
        super().__init__(spec)
    def train(self, steps: int) -> float:
        return 1.0
    async def generate(self, text: str) -> list[int]:
        return []

class Score(Worker):
    def score(self) -> str:
        return ""

def use(launcher: Launcher, place: Placement, cluster: Cluster[Train]) -> None:
    right: float = cluster.call(Train.train, 3)
    pending: Pending[float] = cluster.submit(Train.train, steps=3)
    awaited: list[int] = cluster.call(Train.generate, "x")
    each: list[list[int]] = cluster.call_each(Train.generate, "x")
    asked: list[int] = asyncio.run(cluster.ask(0, Train.generate, "x"))
    base: str = cluster.call(Train.ping)
    some: list[list[int]] = cluster.on([0]).call_each(Train.generate, "x")
    started: Cluster[Train] = launcher.start(Train, place, 3)
    cluster.call(Train.train, "oops")           # bad
    cluster.call(Train.trian, 3)                # bad
    cluster.call(Score.score)                   # bad
    cluster.submit(Train.train)                 # bad
    wrong: str = cluster.call(Train.train, 3)   # bad
    asyncio.run(cluster.ask(0, Train.generate, 5))  # bad
    asyncio.run(cluster.ask(0, Train.train, 5))  # bad
    launcher.start(Train, place, "three")       # bad
    cluster.on([0]).call(Score.score)           # bad
"""


@pytest.mark.slow
def test_wrong_arguments_misspelt_methods_and_other_roles_methods_are_type_errors(
    tmp_path: Path,
) -> None:
    # A new name each time: mypy remembers what it said of a module, and where that was then.
    file = tmp_path / f"snippet_{uuid.uuid4().hex}.py"
    file.write_text(SNIPPET)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--hide-error-context",
    ]
    command += ["--config-file", str(REPOSITORY / "pyproject.toml"), str(file)]
    told = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    prefix = f"{file}:"
    wrong = {
        int(line.split(":")[1])
        for line in told.stdout.splitlines()
        if line.startswith(prefix) and ": error:" in line
    }
    expected = {i for i, line in enumerate(SNIPPET.splitlines(), 1) if "# bad" in line}
    assert wrong == expected, told.stdout + told.stderr
