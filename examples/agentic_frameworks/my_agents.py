"""Agents of two frameworks, which ask the policy at the endpoint of their episode."""

from __future__ import annotations

from agents import (
    Agent,
    AgentsException,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI
from smolagents import CodeAgent, OpenAIModel

from roll.envs.agents.api import AgentTask
from roll.envs.tools.built_in.calculator import calculator


@function_tool
def python(code: str) -> str:
    """Computes an expression in Python.

    Args:
        code: the expression.
    """
    return calculator(code)


async def openai_agents(task: AgentTask) -> float:
    """Answer with the help of a function, which the framework calls when the policy asks for it."""
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        model = OpenAIChatCompletionsModel(model=task.model, openai_client=client)
        agent = Agent(name="clerk", model=model, tools=[python])
        quiet = RunConfig(tracing_disabled=True)
        try:
            done = await Runner.run(agent, task.options["prompt"], run_config=quiet, max_turns=3)
        except AgentsException:  # no such tool, or too many turns: a mistake of the policy
            return 0.0
    return float(done.final_output == task.options["answer"])


def smolagents(task: AgentTask) -> dict[str, float]:
    """Answer with a program that the policy writes, which the framework runs."""
    model = OpenAIModel(model_id=task.model, api_base=task.base_url, api_key=task.api_key)
    agent = CodeAgent(tools=[], model=model, max_steps=1, verbosity_level=0)
    answer = agent.run(task.options["prompt"])
    failed = any(getattr(step, "error", None) for step in agent.memory.steps)
    return {"reward": float(str(answer) == task.options["answer"]), "failed": float(failed)}
