"""Environment with a tool, to copy: one of some coins is lighter, and the tool is a balance."""

from __future__ import annotations

import random
import re
from typing import Any

from roll.envs.api import Observation
from roll.envs.tools.api import ToolError
from roll.envs.tools.formats.loading import FORMATS
from roll.envs.tools.functions import tool_of
from roll.envs.tools.running import run_calls


class FakeCoin:
    """Game of one episode. A turn with calls gets their results; one without is the answer."""

    def __init__(self, coins: int = 9, format: str = "hermes") -> None:
        """Take the `kwargs` of the run file.

        Args:
            coins: number of coins.
            format: format in which the model writes calls.
        """
        self.coins = coins
        self.format = FORMATS[format]
        # Name, docstring and annotations of the method tell the policy what the tool does.
        self.tools = {"weigh": tool_of(self.weigh)}
        self.calls = self.mistakes = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin a task; all that is random comes from the seed."""
        self.fake = random.Random(seed).randint(1, self.coins)
        question = (
            f"One of {self.coins} coins is lighter than the others. Find out which with the "
            f"balance. Your answer is a number from 1 to {self.coins}."
        )
        tools = [tool.description_for_templates for tool in self.tools.values()]
        # The numbers are those of an episode whose first turn is cut off.
        return question, {"tools": tools, **self._info(False)}

    async def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take what the policy wrote in a turn. No text may make this raise."""
        calls = self.format.parse(action).calls
        if not calls:
            # Compared as text: Python refuses to read numbers of thousands of digits.
            right = re.findall(r"\d+", action)[-1:] == [str(self.fake)]
            return "", float(right), True, False, self._info(right)
        # Mistakes of the policy (no JSON, an unknown tool, wrong arguments) become results, too.
        results = await run_calls(calls, self.tools, timeout_s=5.0)
        said = []
        for result in results:
            self.calls += 1
            self.mistakes += result.failed
            said.append(
                {
                    "role": "tool",
                    "content": result.text,
                    "name": result.name,
                    "tool_call_id": f"{self.calls:09d}",
                }
            )
        return said, 0.0, False, False, self._info(False)

    def close(self) -> None:
        """Release what `reset` has opened; here nothing."""

    def weigh(self, left: list[int], right: list[int]) -> str:
        """Tell which of two groups of coins is lighter.

        Args:
            left: numbers of the coins in the left pan.
            right: numbers of the coins in the right pan.
        """
        both = {*left, *right}
        if len(both) < len(left) + len(right) or not both <= set(range(1, self.coins + 1)):
            raise ToolError(f"each coin, from 1 to {self.coins}, lies in one pan at most")
        if len(left) != len(right):
            return f"{'left' if len(left) < len(right) else 'right'} is lighter"
        if self.fake not in both:
            return "both weigh the same"
        return f"{'left' if self.fake in left else 'right'} is lighter"

    def _info(self, success: bool) -> dict[str, Any]:
        """Return numbers that become metrics, such as `reward/coins/success`."""
        return {"success": success, "calls": self.calls, "mistakes": self.mistakes}
