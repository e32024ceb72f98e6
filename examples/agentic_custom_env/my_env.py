"""An environment with a tool, to copy: a caller asks for phone numbers, which only the tool knows.

python -m pytest examples/agentic_custom_env/test_my_env.py tries it without a model.
"""

from __future__ import annotations

import random
from typing import Any

from roll.envs.tools.formats.api import Call
from roll.envs.tools.formats.loading import FORMATS

NAMES = ("bako", "dine", "futo", "gami", "kelo", "lusa", "mori", "nebu", "pati", "rogo", "sika")
TOOL = {
    "type": "function",
    "function": {
        "name": "phone",
        "description": "Tells the phone number of a person.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
}


class PhoneBook:
    """A question about one person. A turn with a call gets its result; one without is the answer.

    Args:
        format: format in which the model writes calls.
        describe: tell the policy which tool there is. The tiny model of the example knows it.
    """

    def __init__(self, format: str = "hermes", describe: bool = True) -> None:
        self.format = FORMATS[format]
        self.describe = describe

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode: the same seed must give the same task."""
        dice = random.Random(seed)
        self.numbers = {name: str(dice.randint(100, 9999)) for name in NAMES}
        self.asked = dice.choice(NAMES)
        self.calls = self.malformed = 0
        return f"phone of {self.asked}", {"tools": [TOOL] if self.describe else []}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a turn of the policy; no text may make this raise."""
        calls = self.format.parse(action).calls
        if not calls:
            right = action.strip() == self.numbers[self.asked]
            return "", float(right), True, False, self._info(success=right)
        results = []
        for call in calls:
            self.calls += 1
            results.append({"role": "tool", "name": "phone", "content": self._result(call)})
        return results, 0.0, False, False, self._info(success=False)

    def close(self) -> None:
        """Release what `reset` has opened; here nothing."""

    def _result(self, call: Any) -> str:
        """Return what the policy is told: mistakes, too, so that it can do better."""
        if not isinstance(call, Call):
            self.malformed += 1
            return f"Error: {call.reason}"
        if call.name != "phone":
            return f"Error: there is no tool {call.name!r} (there are: phone)"
        name = str(call.arguments.get("name"))
        return self.numbers.get(name, f"Error: nobody is called {name!r}")

    def _info(self, *, success: bool) -> dict[str, Any]:
        """Return numbers that become metrics, and the state for algorithms that compare turns."""
        state = f"{self.asked} {self.calls}"
        return {
            "success": success,
            "calls": self.calls,
            "malformed": self.malformed,
            "state": state,
        }
