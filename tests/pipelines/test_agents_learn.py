"""Agents of two real frameworks learn through the endpoint: a random model comes to write what its
agents are paid for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.test_agentic import task
from tests.runs import run_local

AGENTS = '''
"""Agents that are paid for the share of digits in what the policy says."""
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner
from openai import AsyncOpenAI
from smolagents import CodeAgent, OpenAIModel
from smolagents.agents import EMPTY_PROMPT_TEMPLATES


def share(text):
    return sum(c.isdigit() for c in text) / max(1, len(text))


async def _openai_agents(task, kind):
    made = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
    agent = Agent(name="a", model=kind(model=task.model, openai_client=made))
    quiet = RunConfig(tracing_disabled=True)
    first = await Runner.run(agent, f"add {task.seed}", run_config=quiet)
    more = [*first.to_input_list(), {"role": "user", "content": "and now"}]
    second = await Runner.run(agent, more, run_config=quiet)
    return share(first.final_output + second.final_output)


async def chat(task):
    return await _openai_agents(task, OpenAIChatCompletionsModel)


async def responses(task):
    return await _openai_agents(task, OpenAIResponsesModel)


def smolagents(task):
    model = OpenAIModel(model_id=task.model, api_base=task.base_url, api_key=task.api_key)
    templates = EMPTY_PROMPT_TEMPLATES | {"system_prompt": "go"}
    agent = CodeAgent([], model, prompt_templates=templates, max_steps=1, verbosity_level=0)
    agent.run(f"add {task.seed}")
    return share("".join(step.model_output or "" for step in agent.memory.steps[1:]))
'''


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["chat", "responses", "smolagents"])
def test_agents_of_real_frameworks_learn(tmp_path: Path, agent: str) -> None:
    (tmp_path / "test_run_frameworks.py").write_text(AGENTS)
    environment: dict[str, Any] = {
        "env": None,
        "agent": f"test_run_frameworks:{agent}",
        "cut_turn": "go_on",
        "step_timeout_s": 120,
    }
    path = task(
        tmp_path,
        environment=environment,
        validation={},
        data={
            "sources": [{"seeds": 50, "tag": "words"}],
            "prompts_per_step": 4,
            "samples_per_prompt": 8,
            "max_episode_tokens": 1500,
        },
        actor_train={"pool": "all", "optimizer": {"lr": 0.01, "warmup_steps": 2}},
        checkpoint={"every": 100},
    )
    records = run_local(path, ["max_steps=12"])
    rewards = [record["reward/mean"] for record in records if "loss/total" in record]
    assert max(record.get("mismatch/logprob_abs_max", 0.0) for record in records) < 1e-4
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
