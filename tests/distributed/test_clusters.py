"""The same calls on Ray actors and in this process give the same answers and the same errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import torch

from roll.config.sections.roles import Role
from roll.core.batches import TokenBatch
from roll.core.errors import DataError, WaitTimeoutError, WorkerError
from roll.distributed.cluster import Cluster, Placement
from roll.distributed.local import LocalLauncher
from roll.distributed.on_ray.resources import ResourceManager
from tests.distributed.small_workers import Adder, Echo

TRAIN = Placement(Role.ACTOR_TRAIN, pool="pair", seed=3)
INFER = Placement(Role.ACTOR_INFER, pool="pair")


@pytest.fixture(scope="module")
def adders(launcher: ResourceManager | LocalLauncher) -> Iterator[Cluster[Adder]]:
    cluster = launcher.start(Adder, TRAIN, 5)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def echoes(launcher: ResourceManager | LocalLauncher) -> Iterator[Cluster[Echo]]:
    cluster = launcher.start(Echo, INFER)
    yield cluster
    cluster.close()


def some_batch() -> TokenBatch:
    return TokenBatch(tokens=torch.arange(8).reshape(4, 2), lengths=torch.full((4,), 2))


def test_a_batch_is_split_over_the_ranks_and_joined_in_order(adders: Cluster[Adder]) -> None:
    result = adders.call(Adder.add, some_batch())
    assert result.tokens.tolist() == [[5, 6], [7, 8], [109, 110], [111, 112]]
    assert adders.call(Adder.mean_length, some_batch()).values_by_name() == {"length": 2.0}


def test_workers_hand_each_other_values_that_the_driver_never_has(adders: Cluster[Adder]) -> None:
    remote_values = adders.call(Adder.pack_rows, some_batch()).remote_values
    opened = adders.call_each(Adder.open_rows, remote_values[::-1])
    assert opened == [some_batch().tokens.flip(0).tolist()] * 2


def test_each_rank_answers_call_each_in_rank_order(adders: Cluster[Adder]) -> None:
    assert adders.call_each(Adder.ping) == ["actor_train[0]", "actor_train[1]"]
    assert adders.call(Adder.ping) == "actor_train[0]"
    assert (adders.name, adders.world_size, adders.dp_size) == ("actor_train[0..1]", 2, 2)


def test_some_ranks_are_called_together_and_the_others_are_left_alone(
    echoes: Cluster[Echo],
) -> None:
    assert echoes.on([1]).call(Echo.echo, "d") == "actor_infer[1]: d"
    assert echoes.on([1, 0]).call_each(Echo.ping) == ["actor_infer[1]", "actor_infer[0]"]
    assert echoes.on([0]).submit(Echo.echo, "e").result() == "actor_infer[0]: e"
    assert [echoes.on(ranks).name for ranks in ([1], [0, 1], [1, 0])] == [
        "actor_infer[1]",
        "actor_infer[0..1]",
        "actor_infer[1,0]",
    ]
    with pytest.raises(WaitTimeoutError, match=r"waited 0.1 s for actor_infer\[1\].sleep"):
        echoes.on([1]).submit(Echo.sleep, 0.5).result(timeout_s=0.1)
    for ranks in ([], [2], [0, 0], [-1]):
        with pytest.raises(ValueError, match=r"actor_infer\[0..1\]: .* is not a list of some"):
            echoes.on(ranks)


def test_only_replaceable_workers_can_be_restarted(echoes: Cluster[Echo]) -> None:
    with pytest.raises(ValueError, match="only workers that are replaceable can be restarted"):
        echoes.restart(0)


def test_a_batch_is_not_split_over_some_ranks(adders: Cluster[Adder]) -> None:
    with pytest.raises(ValueError, match="split over all 2 data-parallel ranks, but only rank 1"):
        adders.on([1]).call(Adder.add, some_batch())


def test_a_submitted_call_can_be_collected_later_and_twice(adders: Cluster[Adder]) -> None:
    pending = adders.submit(Adder.sleep, (0.05, 0.1))
    assert pending.result() == 0
    assert pending.done()
    assert pending.result() == 0


def test_a_roll_error_keeps_its_type_and_message(adders: Cluster[Adder]) -> None:
    with pytest.raises(DataError) as caught:
        adders.call(Adder.raise_user_error)
    assert type(caught.value) is DataError
    assert str(caught.value) == "prompts.jsonl:3: no column 'answer'"


def test_an_asynchronous_worker_answers_call_and_ask_alike(echoes: Cluster[Echo]) -> None:
    assert echoes.call(Echo.echo, "a") == "actor_infer[0]: a"
    assert echoes.call_each(Echo.echo, "b") == ["actor_infer[0]: b", "actor_infer[1]: b"]
    assert asyncio.run(echoes.ask(1, Echo.echo, "c")) == "actor_infer[1]: c"


def test_calls_of_an_asynchronous_worker_overlap(echoes: Cluster[Echo]) -> None:
    async def open_what_others_wait_for() -> list[str]:
        waiting = [asyncio.ensure_future(echoes.ask(0, Echo.wait_for_gate)) for _ in range(50)]
        await asyncio.sleep(0.05)
        assert not any(each.done() for each in waiting)
        await echoes.ask(0, Echo.open_gate)
        async with asyncio.timeout(20):
            return await asyncio.gather(*waiting)

    assert asyncio.run(open_what_others_wait_for()) == ["open"] * 50


def test_a_cancelled_ask_is_cancelled_and_the_worker_still_answers(echoes: Cluster[Echo]) -> None:
    async def give_up() -> str:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await echoes.ask(0, Echo.sleep, 1.0)
        return await echoes.ask(0, Echo.echo, "still here")

    assert asyncio.run(give_up()) == "actor_infer[0]: still here"


def test_errors_of_asynchronous_methods_reach_the_asker(echoes: Cluster[Echo]) -> None:
    with pytest.raises(DataError, match="bad row"):
        asyncio.run(echoes.ask(0, Echo.fail, "user"))
    with pytest.raises(WorkerError, match=r"actor_infer\[1\].fail raised ValueError: bad luck"):
        asyncio.run(echoes.ask(1, Echo.fail, "other"))


def test_a_wait_that_runs_out_names_what_it_waited_for(echoes: Cluster[Echo]) -> None:
    pending = echoes.submit(Echo.sleep, 2.0)
    with pytest.raises(WaitTimeoutError, match=r"waited 0.1 s for actor_infer\[0..1\].sleep"):
        pending.result(timeout_s=0.1)
    pending.result(timeout_s=20)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [("user", DataError, "no such file"), ("bug", WorkerError, "KeyError")],
)
def test_an_error_of_a_constructor_reaches_the_driver(
    launcher: ResourceManager | LocalLauncher,
    kind: str,
    error: type[Exception],
    message: str,
) -> None:
    if isinstance(launcher, LocalLauncher) and kind == "bug":
        error, message = KeyError, "offset"  # in one process the traceback is there as it is
    with pytest.raises(error, match=message):
        launcher.start(Adder, TRAIN, 5, fail=kind)


@pytest.mark.alone
def test_an_ask_and_a_call_take_little_time(echoes: Cluster[Echo]) -> None:
    """A bound an order of magnitude above what is measured, for busy machines."""

    async def ask_often() -> float:
        await echoes.ask(0, Echo.echo, "warm")
        start = time.perf_counter()
        for _ in range(100):
            await echoes.ask(0, Echo.echo, "x")
        return (time.perf_counter() - start) / 100

    assert asyncio.run(ask_often()) < 0.015
