"""Workers of environments that are replaced, and do not start."""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from roll.config.sections.environment import EnvironmentConfig
from roll.config.sections.roles import Role
from roll.core.errors import EnvironmentFailedError, HostSpentError
from roll.core.types import WorkerSpec
from roll.data.chat.turns import Turns
from roll.distributed.cluster import Cluster, Placement
from roll.distributed.local import LocalLauncher
from roll.envs.api import Action
from roll.envs.host import MAX_HUNG_THREADS, EnvHost
from roll.envs.observed import Observed
from roll.runtime.environments import MAX_RESTARTS, SOUND_CALLS, ClusterHosts
from roll.workers.environment import EnvWorker
from tests.fakes import prompt
from tests.tiny import char_tokenizer
from tests.unit.data.test_chat_templates import settings_of


class Balky(EnvWorker):
    """The second one does not start."""

    def __init__(self, spec: WorkerSpec, trouble: str, starts: list[str]) -> None:
        super(EnvWorker, self).__init__(spec)
        self.host = self._guard = None
        self.trouble, self.starts = trouble, starts
        self.started = False

    async def start(self) -> None:
        self.starts.append(self.trouble)
        if len(self.starts) == 2 and self.trouble == "raises":
            raise OSError("no room for the tokenizer")
        if len(self.starts) == 2:
            await asyncio.sleep(60)
        self.started = True

    async def open(self, episode: str, seed: int, options: Mapping[str, Any]) -> Observed:
        assert self.started
        return Observed(array("i", [1]), "go")


@pytest.mark.parametrize("trouble", ["raises", "hangs"])
def test_a_worker_that_does_not_start_again_is_replaced_once_more(trouble: str) -> None:
    place = Placement(Role.ENVIRONMENT, pool="all", workers=1, replaceable=True)
    starts: list[str] = []
    with LocalLauncher(call_timeout_s=0.5) as launcher:
        cluster: Cluster[Any] = launcher.start(Balky, place, trouble, starts)
        cluster.call(EnvWorker.start)
        hosts = ClusterHosts("echo", EnvironmentConfig(env="echo"), cluster)
        cluster.end(0)
        opened = asyncio.run(asyncio.wait_for(hosts.open("e", 1, prompt("a:1")), 10))
    assert opened.text == "go"
    assert len(starts) == 3


class Seizing(Balky):
    """The first one blocks its event loop when an episode begins, and never ends this episode."""

    async def start(self) -> None:
        self.starts.append(self.trouble)

    async def open(self, episode: str, seed: int, options: Mapping[str, Any]) -> Observed:
        if len(self.starts) == 1:
            time.sleep(1.0)
            await asyncio.sleep(60)
        return Observed(array("i", [1]), "go")


class Busy(Balky):
    """Answers late, each time, and goes on to run its event loop."""

    async def open(self, episode: str, seed: int, options: Mapping[str, Any]) -> Observed:
        await asyncio.sleep(1.0)
        return Observed(array("i", [1]), "go")


class Sound(Balky):
    """Answers at once."""

    async def start(self) -> None: ...

    async def open(self, episode: str, seed: int, options: Mapping[str, Any]) -> Observed:
        return Observed(array("i", [1]), "go")


def watched(cluster: Cluster[Any]) -> ClusterHosts:
    config = EnvironmentConfig(env="echo", reset_timeout_s=0.1, step_timeout_s=0.1)
    return ClusterHosts("echo", config, cluster, silent_s=0.2)


def test_a_worker_whose_event_loop_hangs_is_replaced_and_a_busy_one_is_not() -> None:
    place = Placement(Role.ENVIRONMENT, pool="all", workers=1, replaceable=True)
    starts: list[str] = []

    async def main(hosts: ClusterHosts) -> str:
        with pytest.raises(EnvironmentFailedError, match="its worker died"):
            await hosts.open("e", 1, prompt("a:1"))
        return (await hosts.open("e~1", 1, prompt("a:1"))).text

    with LocalLauncher(call_timeout_s=5) as launcher:
        hanging: Cluster[Any] = launcher.start(Seizing, place, "", starts)
        hanging.call(EnvWorker.start)
        assert asyncio.run(asyncio.wait_for(main(watched(hanging)), 10)) == "go"
        assert len(starts) == 2
        busy: Cluster[Any] = launcher.start(Busy, place, "", [])
        opened = watched(busy).open("e", 1, prompt("a:1"))
        assert asyncio.run(asyncio.wait_for(opened, 10)).text == "go"
        assert not busy.lost


def test_a_call_that_begins_just_as_a_watch_ends_is_watched() -> None:
    async def ask(*_: object) -> None: ...

    async def main() -> None:
        hosts = watched(cast(Any, SimpleNamespace(world_size=1, lost=frozenset(), ask=ask)))
        with hosts._watched(0):
            pass
        await asyncio.sleep(0)  # the watch looks, and sees no call
        with hosts._watched(0):
            for _ in range(3):
                await asyncio.sleep(0)
            assert not hosts._watches[0].done()

    asyncio.run(main())


@pytest.mark.parametrize("answers", [0, SOUND_CALLS])
def test_only_workers_that_were_never_sound_use_up_their_restarts(answers: int) -> None:
    place = Placement(Role.ENVIRONMENT, pool="all", workers=1, replaceable=True)

    async def main(cluster: Cluster[Any]) -> None:
        hosts = ClusterHosts("echo", EnvironmentConfig(env="echo"), cluster)
        for _ in range(MAX_RESTARTS + 1):
            for number in range(answers):
                await hosts.open(f"e{number}", 0, prompt("a:1"))
            await asyncio.to_thread(cluster.end, 0)
            await hosts._living()

    with LocalLauncher(call_timeout_s=5) as launcher:
        cluster: Cluster[Any] = launcher.start(Sound, place, "", [])
        if answers:
            asyncio.run(main(cluster))
        else:
            with pytest.raises(EnvironmentFailedError, match="died 101 times before it had given"):
                asyncio.run(main(cluster))


class Hung(EnvWorker):
    """Hosts an environment whose `reset` hangs in the first worker, until it is let go."""

    def __init__(self, spec: WorkerSpec, starts: list[int], let_go: threading.Event) -> None:
        super(EnvWorker, self).__init__(spec)
        self._guard = self.host = None
        self.starts, self.let_go = starts, let_go

    async def start(self) -> None:
        self.starts.append(len(self.starts))
        hangs, let_go = len(self.starts) == 1, self.let_go

        class Waits:
            def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
                assert not hangs or let_go.wait(30)
                return "go", {}

            def step(self, action: Action) -> Any: ...

            def close(self) -> None: ...

        config = EnvironmentConfig(env="x", reset_timeout_s=0.1)
        self.host = EnvHost(
            "lake", config, cast(Any, Waits), Turns(char_tokenizer(), settings_of(), frozenset({1}))
        )


def test_a_worker_in_which_too_many_calls_hang_is_replaced() -> None:
    place = Placement(Role.ENVIRONMENT, pool="all", workers=1, replaceable=True)
    starts: list[int] = []
    let_go = threading.Event()

    async def main(hosts: ClusterHosts) -> str:
        for number in range(MAX_HUNG_THREADS):
            with pytest.raises(EnvironmentFailedError, match=r"did not end within 0\.1 s"):
                await hosts.open(f"e{number}", 1, prompt("a:1"))
        with pytest.raises(HostSpentError, match="cannot begin: 32 calls have not returned"):
            await hosts.open("late", 1, prompt("a:1"))
        return (await hosts.open("e", 1, prompt("a:1"))).text

    try:
        with LocalLauncher(call_timeout_s=5) as launcher:
            cluster: Cluster[Any] = launcher.start(Hung, place, starts, let_go)
            cluster.call(EnvWorker.start)
            hosts = ClusterHosts("lake", EnvironmentConfig(env="x"), cluster)
            assert "go" in asyncio.run(asyncio.wait_for(main(hosts), 30))
            assert len(starts) == 2
    finally:
        let_go.set()


def test_a_worker_takes_no_passages_that_the_one_before_it_asked_for() -> None:
    spec = WorkerSpec(Role.ENVIRONMENT, 0, 1, (0,), (0,), 0, "127.0.0.1:1", 0, "cpu", label="x")
    nothing: Any = None

    async def main() -> list[str]:
        both = [
            EnvWorker(spec, "x", EnvironmentConfig(env="x"), nothing, nothing, "") for _ in range(2)
        ]
        late, asked = [asyncio.ensure_future(each._search("c", "who?", 1)) for each in both]
        [[old], [new]] = [await each.take_queries() for each in both]
        await both[1].bring_passages([(old.id, ["of the worker before"])])
        await both[1].bring_passages([(new.id, ["its own"])])
        late.cancel()
        return await asked

    assert asyncio.run(main()) == ["its own"]


class Counting(EnvWorker):
    """Counts the episodes that are open in all workers; every third one does not begin."""

    def __init__(self, spec: WorkerSpec, opened: set[str], seen: list[int]) -> None:
        super(EnvWorker, self).__init__(spec)
        self.host = self._guard = None
        self.opened, self.seen = opened, seen

    async def start(self) -> None: ...

    async def open(self, episode: str, seed: int, options: Mapping[str, Any]) -> Observed:
        self.opened.add(episode)
        self.seen.append(len(self.opened))
        await asyncio.sleep(0.001)
        if seed % 3 == 2:
            raise EnvironmentFailedError("no board")
        return Observed(array("i", [1]), "go")

    async def end(self, episodes: list[str]) -> None:
        await asyncio.sleep(0.001)
        self.opened -= set(episodes)


def test_the_episodes_of_all_workers_together_are_limited() -> None:
    place = Placement(Role.ENVIRONMENT, pool="all", workers=2, replaceable=True)
    opened: set[str] = set()
    seen: list[int] = []

    async def play(hosts: ClusterHosts, number: int) -> None:
        try:
            with suppress(EnvironmentFailedError):
                await hosts.open(f"e{number}", number, prompt("a:1"))
                await asyncio.sleep(0.001)
        finally:
            hosts.close(f"e{number}")

    async def main(cluster: Cluster[Any]) -> None:
        hosts = ClusterHosts("echo", EnvironmentConfig(env="echo", max_episodes=3), cluster)
        episodes = [asyncio.ensure_future(play(hosts, number)) for number in range(24)]
        await asyncio.sleep(0)
        for waiting in episodes[10:14]:
            waiting.cancel()
        await asyncio.wait(episodes)
        assert max(seen) == 3
        assert len(seen) == 20, "those that were given up while they waited never began"
        before = len(seen)
        await asyncio.gather(*(play(hosts, 100 + number) for number in range(6)))
        assert len(seen) == before + 6, "no place is lost"
        assert max(seen) == 3

    with LocalLauncher(call_timeout_s=5) as launcher:
        cluster: Cluster[Any] = launcher.start(Counting, place, opened, seen)
        asyncio.run(asyncio.wait_for(main(cluster), 20))
