"""`Tools`: the environment in which the policy answers a question with the help of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from typing import Any

from roll.config.errors import nearest
from roll.core.errors import ConfigError
from roll.core.types import Message
from roll.data.chat.templates import PromptTokenizer
from roll.envs.api import Action, Hearing, Observation, encodable, finite
from roll.envs.tools.api import ToldToolkit, Tool
from roll.envs.tools.cutting import cut_to
from roll.envs.tools.formats.api import Malformed, Parsed
from roll.envs.tools.formats.loading import check_marks, load_format, told_format
from roll.envs.tools.loading import load_kits
from roll.envs.tools.running import Result, run_calls
from roll.envs.tools.scoring import SCORES

_CUT = "Your turn was cut off at its limit of tokens, so nothing of it was done."


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits of calls."""

    calls: int = 32
    """Calls of an episode; later ones get an error as result."""
    result_tokens: int = 512
    """Tokens of one result; longer ones are cut."""
    call_s: float = 20.0
    """Time of a call, in seconds. Keep it below `step_timeout_s`, at which the episode fails. Both
    leave out searches in `corpora` of the run."""


def limits_of(settings: Mapping[str, float]) -> ToolLimits:
    """Return the limits with these settings; ConfigError for one that is unknown or no limit."""
    defaults = ToolLimits()
    known = {each.name for each in fields(ToolLimits)}
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(
                f"limits: unknown limit {name!r}{nearest(name, known)} (known: "
                f"{', '.join(sorted(known))})"
            )
        whole = isinstance(getattr(defaults, name), int)
        number = None if isinstance(value, bool) or (whole and type(value) is not int) else value
        if (finite(number) or 0) <= 0:
            kind = "whole number" if whole else "number"
            raise ConfigError(f"limits.{name} is {value!r}; expected a {kind} above 0")
    return ToolLimits(**settings)  # type: ignore[arg-type]  # checked above


class Tools:
    """Environment of one task: a question, tools, and an answer that is known.

    A turn with calls gets their results. A turn without a call is the answer, and ends the episode,
    as the tool `finish` does.
    """

    def __init__(
        self,
        tools: Sequence[str | Mapping[str, Any]],
        format: str = "hermes",
        *,
        score: str = "exact",
        system: str = "",
        describe: bool = True,
        malformed_penalty: float = 0.0,
        limits: Mapping[str, float] | None = None,
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the arguments; nothing is started yet.

        Args:
            tools: tools of the policy; see `load_kits`.
            format: format in which the policy writes calls; see `load_format`.
            score: how the answer is compared with the one of the task, one of `SCORES`.
            system: system message before the question; empty for none.
            describe: whether the policy is told which tools there are.
            malformed_penalty: reward that each malformed call costs.
            limits: limits other than the defaults; see `ToolLimits`.
            sandbox: settings of the sandbox, for tools that run there.

        Raises:
            ConfigError: a tool, format or score does not exist.
        """
        self._kits = [make() for make in load_kits(tools, sandbox or {})]
        self._format_name, self._format, self._score = format, load_format(format), SCORES[score]
        self._system, self._describe = system, describe
        self._limits, self._penalty = limits_of(limits or {}), malformed_penalty
        self._tokenizer: PromptTokenizer | None = None
        self._tools: dict[str, Tool] = {}
        self._right = ""
        self._opened: list[Any] = []
        self._counts = {"tool_calls": 0, "malformed": 0, "tool_errors": 0, "cut_turns": 0}
        self._number = 0
        """Number of calls that have got an id."""

    def listen(self, hearing: Hearing) -> None:
        """Keep the tokenizer, and let tools listen; see `ToldEnv`.

        Raises:
            ConfigError: a mark of the format is a special token, and the run hides those.
        """
        self._tokenizer = hearing.tokenizer
        for kit in self._kits:
            if isinstance(kit, ToldToolkit):
                kit.listen(hearing)
        if not hearing.special_tokens:
            check_marks(self._format_name, hearing.tokenizer)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Open the tools; return the question.

        Raises:
            ConfigError: two tools have the same name, or the row has no question or no answer.
        """
        row = options or {}
        question, right = row.get("prompt"), row.get("answer")
        if not isinstance(question, str) or not question:
            raise ConfigError("the environment `tools` needs rows with a question (`prompt`)")
        if right is None and self._score is not SCORES["none"]:
            raise ConfigError("the row has no `answer`; add one, or set `score: none`")
        self._right = "" if right is None else str(right)
        for kit in self._kits:
            self._opened.append(kit)
            for tool in await kit.open(row):
                if tool.name in self._tools:
                    raise ConfigError(f"tools: two of them have the name {tool.name!r}")
                self._tools[tool.name] = tool
        said = [Message("system", self._system)] if self._system else []
        described = [tool.description_for_templates for tool in self._tools.values()]
        if self._tokenizer is not None:
            self._format = told_format(self._format, self._tokenizer, described)
        return [*said, Message("user", question)], {"tools": described if self._describe else []}

    async def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Run the calls of a turn, or take the turn as the answer."""
        if isinstance(action, Action) and action.cut:
            self._counts["cut_turns"] += 1
            return _CUT, 0.0, False, False, self._info()
        parsed = self._format.parse(action)
        if not parsed.calls:
            return self._ended(parsed.text, 0.0)
        results = await self._results(parsed)
        malformed = sum(isinstance(call, Malformed) for call in parsed.calls)
        self._counts["tool_calls"] += len(results)
        self._counts["malformed"] += malformed
        self._counts["tool_errors"] += sum(result.failed for result in results) - malformed
        cost = -self._penalty * malformed
        end = next((result for result in results if result.ends), None)
        if end is not None:
            return self._ended(end.text, cost)
        return [self._message(result) for result in results], cost, False, False, self._info()

    async def close(self) -> None:
        """Close all tools, also if one of them fails to close."""
        async with AsyncExitStack() as stack:
            for kit in self._opened:
                stack.push_async_callback(kit.close)

    async def _results(self, parsed: Parsed) -> list[Result]:
        """Return the results of the calls; those beyond the limit get an error."""
        room = max(0, self._limits.calls - self._counts["tool_calls"])
        results = await run_calls(parsed.calls[:room], self._tools, self._limits.call_s)
        for call in parsed.calls[room:]:
            told = f"Error: all {self._limits.calls} calls are used up; answer without a tool"
            results.append(Result(call.name or "unknown", told, failed=True))
        return results

    def _message(self, result: Result) -> Message:
        """Return a result as the message of a tool, cut to its limit and with a new id."""
        self._number += 1
        text = cut_to(encodable(result.text), self._limits.result_tokens, self._tokenizer)
        return Message("tool", text, name=result.name, call_id=f"{self._number:09d}")

    def _ended(self, answer: str, cost: float) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Return the last step: the score of the answer plus `cost`, which is 0 or below."""
        right = self._score(answer, self._right)
        return "", right + cost, True, False, self._info() | {"success": right}

    def _info(self) -> dict[str, Any]:
        """Return the counts so far, `malformed_rate` once there are calls, and `success` 0."""
        calls = self._counts["tool_calls"]
        rate = {"malformed_rate": self._counts["malformed"] / calls} if calls else {}
        return {**self._counts, **rate, "success": 0.0}
