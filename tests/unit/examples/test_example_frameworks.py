"""The agents of the example of other frameworks, with a scripted policy."""

from __future__ import annotations

import json
from dataclasses import replace

from examples.agentic_frameworks.my_agents import openai_agents, smolagents
from roll.envs.agents.api import AgentTask
from tests.unit.episodes.test_agent_host import played, text

TASK = {"prompt": "17 * 43 % 97", "answer": "52"}


async def clerk(task: AgentTask) -> float:
    return await openai_agents(replace(task, options=TASK))


def programmer(task: AgentTask) -> dict[str, float]:
    return smolagents(replace(task, options=TASK))


def call(code: str, name: str = "python") -> str:
    said = json.dumps({"name": name, "arguments": {"code": code}})
    return f"<tool_call>{said}</tool_call>"


def test_openai_agents_runs_the_tool_and_takes_the_answer() -> None:
    first, second, last = played(clerk, call("17 * 43 % 97"), "52")
    assert text(first).endswith("<user>17 * 43 <pad> 97<assistant>"), "it does not know %"
    assert "52" in text(second)
    assert (second.row, last.reward, last.info["malformed_rate"]) == (0, 1.0, 0)


def test_openai_agents_gets_nothing_for_a_mistake() -> None:
    for wrong, malformed in (("<tool_call>oh</tool_call>", 1), (call("1", name="search"), 0)):
        last = played(clerk, wrong)[-1]
        assert (last.reward, last.info["malformed"]) == (0.0, malformed)


def test_smolagents_runs_the_program() -> None:
    program = "Thought: compute it. <code>final_answer(17 * 43 % 97)</code>"
    first, last = played(programmer, program)
    assert text(first).endswith("ew task:\n17 * 43 <pad> 97<assistant>")
    assert (last.reward, last.info["failed"]) == (1.0, 0.0)


def test_smolagents_asks_once_more_after_a_program_that_fails() -> None:
    *_, last = played(programmer, "<code>final_answer(17 * 43 % 97</code>", "53")
    assert (last.reward, last.info["failed"]) == (0.0, 1.0)
