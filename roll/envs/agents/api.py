"""`AgentTask`: what the function that runs an agent gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AgentTask:
    """Task of one episode, and the endpoint at which the agent asks the policy.

    Example of a function that runs an agent:

        async def run(task: AgentTask) -> float:
            client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
            ...
            return 1.0 if solved else 0.0

    The function may be plain or `async`. It returns the reward of the episode; or a dict with
    `reward`, whose other numbers become metrics.
    """

    base_url: str
    """URL of the endpoint, such as `http://127.0.0.1:4711/v1`."""
    api_key: str
    """Key of this episode: the endpoint tells episodes apart by it."""
    model: str
    """Name to ask for; any name will do."""
    seed: int
    """Seed of everything random. Episodes of one group get the same."""
    options: Mapping[str, Any]
    """Columns of the data row of this task; empty if tasks are seeds alone."""
