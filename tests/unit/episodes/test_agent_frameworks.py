"""Agents of two real frameworks at the endpoint of an episode; the policy is scripted."""

from __future__ import annotations

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner
from smolagents import CodeAgent, OpenAIModel

from roll.envs.agents.api import AgentTask
from tests.unit.episodes.test_agent_host import client, played, text


async def openai_agent(task: AgentTask) -> float:
    """Asks twice, the second time with all that was said."""
    model = OpenAIChatCompletionsModel(model=task.model, openai_client=client(task))
    agent = Agent(name="adder", instructions="Be brief.", model=model)
    quiet = RunConfig(tracing_disabled=True)
    first = await Runner.run(agent, task.options["question"], run_config=quiet)
    more = [*first.to_input_list(), {"role": "user", "content": "sure?"}]
    second = await Runner.run(agent, more, run_config=quiet)  # type: ignore[arg-type]
    return float(first.final_output == "4" and second.final_output == "yes")


def code_agent(task: AgentTask) -> float:
    """Writes Python, runs it and answers with its result."""
    model = OpenAIModel(model_id=task.model, api_base=task.base_url, api_key=task.api_key)
    agent = CodeAgent(tools=[], model=model, max_steps=3, verbosity_level=0)
    return float(agent.run(task.options["question"]) == 4)


def test_openai_agents_continue_a_conversation() -> None:
    first, second, last = played(openai_agent, "4", "yes")
    assert "2+2" in text(first)
    assert (second.row, text(second)) == (0, "<user>sure?<assistant>")
    assert last.reward == 1.0


def test_smolagents_rewrites_what_was_said_so_each_turn_is_a_conversation() -> None:
    code = "Thought: add\n<code>\nx = 2 + 2\nprint(x)\n</code>"
    answer = "Thought: done\n<code>\nfinal_answer(x)\n</code>"
    first, second, last = played(code_agent, code, answer)
    assert "</code>" in first.stop
    assert (first.row, second.row) == (0, 1)
    assert "4" in text(second)
    assert last.reward == 1.0
