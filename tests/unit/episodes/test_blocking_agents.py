"""Agents that block: neither the endpoint nor a time limit may wait for them."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from openai import OpenAI

from roll.config.sections.environment import EnvironmentConfig
from roll.core.errors import EnvironmentFailedError, HostSpentError
from roll.data.chat.turns import Turns
from roll.envs.agents.api import AgentTask
from roll.envs.agents.host import AgentHost
from roll.envs.agents.running import AgentRunner
from roll.envs.observed import Observed
from tests.tiny import char_tokenizer
from tests.unit.data.test_chat_templates import settings_of
from tests.unit.episodes.test_agent_host import END, ask, user

TASK = AgentTask("http://nowhere", "key", "policy", 0, {})


def hosted(agent: Any, work: Callable[[AgentHost], Coroutine[Any, Any, Any]], **config: Any) -> Any:
    """What `work` returns with a host of agents."""

    async def main() -> Any:
        turns = Turns(char_tokenizer(), settings_of(), frozenset({END}))
        host = AgentHost("helper", EnvironmentConfig(agent="a:b", **config), agent, turns)
        try:
            return await asyncio.wait_for(work(host), 20)
        finally:
            await asyncio.wait_for(host.shut(), 20)

    return asyncio.run(main())


async def whole(host: AgentHost, name: str) -> Observed:
    """The end of an episode whose agent asks once."""
    await host.open(name, 1, {})
    end = await host.act(name, "yes", END)
    await host.close(name)
    return end


def ask_and_block(task: AgentTask) -> str:
    """Ask with a client that is not `async`; it waits for at most 10 s."""
    plain = OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0, timeout=10)
    made = plain.chat.completions.create(model="any", messages=[user("go")])  # type: ignore[list-item]
    return str(made.choices[0].message.content)


async def blocking(task: AgentTask) -> float:
    return float(ask_and_block(task) == "yes")


def test_an_async_agent_may_ask_with_a_client_that_blocks() -> None:
    assert hosted(blocking, lambda host: whole(host, "e")).reward == 1.0


def test_async_agents_whose_clients_block_have_their_turns_one_after_another() -> None:
    async def work(host: AgentHost) -> list[Observed]:
        return await asyncio.gather(*(whole(host, f"e{i}") for i in range(3)))

    assert [end.reward for end in hosted(blocking, work)] == [1.0] * 3


@pytest.mark.parametrize("asks", [False, True])
def test_an_async_agent_that_blocks_for_ever_costs_its_episode_and_no_later_one(asks: bool) -> None:
    let_go, blocks = threading.Event(), [True, False, False]

    async def agent(task: AgentTask) -> float:
        forever = blocks.pop(0)
        if asks or not forever:
            await ask(task, [user("go")])
        if forever:
            let_go.wait(15)
        return 1.0

    async def work(host: AgentHost) -> list[Observed]:
        begun = time.monotonic()
        with pytest.raises(EnvironmentFailedError, match=r"within 0\.3 s; .* `async` but blocks"):
            await whole(host, "blocks")
        await host.close("blocks")
        assert time.monotonic() - begun < 8
        return [await whole(host, "next"), await whole(host, "last")]

    try:
        limits = {"reset_timeout_s": 5.0 if asks else 0.3, "step_timeout_s": 0.3 if asks else 5.0}
        assert [end.reward for end in hosted(agent, work, **limits)] == [1.0, 1.0]
    finally:
        let_go.set()


def test_an_agent_that_waits_is_not_said_to_block() -> None:
    async def agent(task: AgentTask) -> None:
        await ask(task, [user("go")])
        await asyncio.sleep(60)

    with pytest.raises(EnvironmentFailedError, match=r"nor ended within 0\.3 s$"):
        hosted(agent, lambda host: whole(host, "e"), step_timeout_s=0.3)


def test_an_agent_that_is_ended_has_time_to_clean_up() -> None:
    cleaned: list[str] = []

    async def agent(task: AgentTask) -> None:
        try:
            await ask(task, [user("go")])
        finally:
            await asyncio.sleep(0.2)
            cleaned.append("up")

    async def work(host: AgentHost) -> None:
        await host.open("closed", 1, {})
        await host.close("closed")
        assert cleaned == ["up"]
        await host.open("open", 1, {})

    hosted(agent, work)
    assert cleaned == ["up", "up"]


def test_what_an_agent_raises_after_its_episode_is_no_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def agent(task: AgentTask) -> None:
        try:
            await ask(task, [user("go")])
        except asyncio.CancelledError:
            raise ValueError("the answer never came") from None

    async def work(host: AgentHost) -> None:
        await host.open("e", 1, {})

    hosted(agent, work)
    gc.collect()
    assert "the answer never came" not in caplog.text


def test_plain_agents_that_hang_keep_others_from_beginning_once_there_are_too_many() -> None:
    let_go = threading.Event()

    def agent(task: AgentTask) -> float:
        return float(let_go.wait(15))

    async def main() -> None:
        runner = AgentRunner("helper", agent, max_hung=2)
        for _ in range(2):
            run = runner.begin(TASK, lambda: True)
            await asyncio.sleep(0.05)
            run.ended.cancel()
            await asyncio.wait([run.ended])
        with pytest.raises(HostSpentError, match="no agent can begin: 2 calls have not"):
            await runner.begin(TASK, lambda: True).ended
        await runner.close()

    try:
        asyncio.run(main())
    finally:
        let_go.set()


def test_event_loops_of_agents_are_blocked_until_there_are_too_many() -> None:
    let_go = threading.Event()

    async def agent(task: AgentTask) -> float:
        return float(let_go.wait(15))

    async def main() -> None:
        runner = AgentRunner("helper", agent, max_blocked=1)
        first = runner.begin(TASK, lambda: True)
        assert "`async` but blocks" in await runner.why_late(first, 0.1)
        second = runner.begin(TASK, lambda: True)
        with pytest.raises(HostSpentError, match="agents block 2 event loops"):
            await runner.why_late(second, 0.1)
        let_go.set()
        assert await first.ended == await second.ended == 1.0
        await runner.close()

    try:
        asyncio.run(main())
    finally:
        let_go.set()
