"""Episodes of agents that begin or end while the endpoint starts, or while requests wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from roll.config.sections.environment import EnvironmentConfig
from roll.data.chat.turns import Turns
from roll.envs.agents.api import AgentTask
from roll.envs.agents.host import AgentHost
from tests.tiny import char_tokenizer
from tests.unit.data.test_chat_templates import settings_of
from tests.unit.episodes.test_agent_host import END, ask, text, user


async def agent(task: AgentTask) -> float:
    await ask(task, [user("go")])
    return 1.0


def hosted(
    work: Callable[[AgentHost], Coroutine[Any, Any, Any]],
    agent: Callable[[AgentTask], Any] = agent,
) -> Any:
    """What `work` returns with a host whose endpoint has not started."""

    async def main() -> Any:
        turns = Turns(char_tokenizer(), settings_of(), frozenset({END}))
        host = AgentHost("helper", EnvironmentConfig(agent="a:b"), agent, turns)
        try:
            return await asyncio.wait_for(work(host), 20)
        finally:
            await host.shut()

    return asyncio.run(main())


def test_all_agents_that_begin_at_once_know_the_endpoint() -> None:
    async def work(host: AgentHost) -> list[Any]:
        begun = [host.open(f"e{i}", i, {}) for i in range(8)]
        return await asyncio.gather(*begun, return_exceptions=True)

    assert [text(each) for each in hosted(work)] == ["<user>go<assistant>"] * 8


def test_an_agent_that_is_given_up_while_the_endpoint_starts_does_not_run() -> None:
    async def work(host: AgentHost) -> tuple[Any, int]:
        begun = asyncio.ensure_future(host.open("e", 1, {}))
        await asyncio.sleep(0)
        await host.close("e")
        [found] = await asyncio.gather(begun, return_exceptions=True)
        return found, len(host._running)

    found, running = hosted(work)
    assert "was ended before it began" in str(found)
    assert running == 0


def test_a_request_whose_client_has_gone_costs_no_turn() -> None:
    begun, waits = threading.Event(), threading.Event()

    async def impatient(task: AgentTask) -> float:
        first = asyncio.create_task(ask(task, [user("first")]))
        assert await asyncio.to_thread(begun.wait, 10)
        late = asyncio.create_task(ask(task, [user("late")]))
        assert await asyncio.to_thread(waits.wait, 10)
        late.cancel()
        return float(await first == "a" and await ask(task, [user("last")]) == "b")

    async def work(host: AgentHost) -> tuple[Any, Any]:
        await host.open("e", 1, {})
        begun.set()
        while host._running["e"].requests.empty():
            await asyncio.sleep(0.01)
        waits.set()
        await asyncio.sleep(1)  # the client goes meanwhile
        return await host.act("e", "a", END), await host.act("e", "b", END)

    second, last = hosted(work, impatient)
    assert text(second) == "<user>last<assistant>"
    assert (last.terminated, last.reward) == (True, 1.0)


def test_an_agent_that_has_ended_gets_its_reward_though_its_requests_wait() -> None:
    waits = threading.Event()

    async def careless(task: AgentTask) -> float:
        asked = [asyncio.create_task(ask(task, [user(f"{i}")])) for i in range(3)]
        assert await asyncio.to_thread(waits.wait, 10)
        for each in asked:
            each.add_done_callback(lambda task: task.cancelled() or task.exception())
        return 0.5

    async def work(host: AgentHost) -> Any:
        await host.open("e", 1, {})
        running = host._running["e"]
        while running.requests.empty():
            await asyncio.sleep(0.01)
        waits.set()
        assert running.agent is not None
        await asyncio.wait([running.agent.ended])
        return await host.act("e", "a", END)

    last = hosted(work, careless)
    assert (last.terminated, last.reward) == (True, 0.5)
