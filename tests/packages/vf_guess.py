"""Environments for verifiers, as its packages have them; imported by its own interpreter."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    """Says whether the number is larger or smaller."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        guess, number = int(messages[-1]["content"]), int(state["answer"])
        said = [vf.UserMessage(content="Larger." if guess < number else "Smaller.")]
        if guess == number:
            state["final_env_response"] = said
        return said


def load_environment(most: int = 9, tools: bool = False) -> Any:
    rows = [
        {"prompt": [{"role": "user", "content": f"Guess 1 to {most}."}], "answer": str(number)}
        for number in range(1, most + 1)
    ]

    def right(completion: Any, answer: str) -> float:
        said = [each["content"] for each in completion if each["role"] == "assistant"]
        return float(answer == said[-1])

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    rubric = vf.Rubric(funcs=[right])
    if tools:
        return vf.ToolEnv(dataset=Dataset.from_list(rows), rubric=rubric, tools=[add], max_turns=4)
    return Guess(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=5)
