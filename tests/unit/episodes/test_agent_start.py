"""Episodes of agents that begin, and end, while the endpoint starts."""

from __future__ import annotations

import asyncio
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


def hosted(work: Callable[[AgentHost], Coroutine[Any, Any, Any]]) -> Any:
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
