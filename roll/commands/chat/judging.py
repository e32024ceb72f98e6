"""`Judges`: the rewards of a run, which judge the answers of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.commands.reward_try.responses import Response
from roll.commands.reward_try.tries import score_responses
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.core.completion import Completion
from roll.core.errors import ConfigError
from roll.core.types import Prompt, Sample


@dataclass(frozen=True)
class Question:
    """A prompt with what a reward needs to judge an answer to it."""

    text: str
    answer: str = ""
    """Expected answer; empty: none is known."""
    tag: str | None = None
    """Tag of the rewards; None: that of the run's first source."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further columns, for the rewards."""


@dataclass(frozen=True)
class Verdict:
    """Result of one reward for an answer."""

    reward: str
    weight: float
    score: float | None
    """None if the reward failed."""
    parts: dict[str, float]
    failure: str | None


class Judges:
    """The rewards of a run.

    Args:
        config: settings of the run.
        folder: folder of the user's modules.

    Raises:
        ConfigError: the run has no rewards.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        if not isinstance(config, RlvrBase) or not config.rewards:
            raise ConfigError(
                f"--reward: the run (pipeline {config.pipeline}) has no rewards of single answers"
            )
        self._config, self._folder = config, folder

    @property
    def tag(self) -> str:
        """Tag of a question that names none."""
        return self._config.data.sources[0].tag

    def judge(
        self,
        question: Question,
        whole: str,
        prompt: Sequence[int],
        completion: Completion,
        text: str,
    ) -> list[Verdict]:
        """Return what each reward of the question's tag says.

        Args:
            whole: text of the prompt, as the template made it.
            prompt: its tokens.
            completion: tokens of the answer.
            text: text of the answer.

        Raises:
            ConfigError: no reward has the tag.
        """
        tag = question.tag or self.tag
        known = {name: one for name, one in self._config.rewards.items() if tag in one.tags}
        if not known:
            tags = sorted({tag for one in self._config.rewards.values() for tag in one.tags})
            raise ConfigError(f"no reward has the tag {tag!r} (known: {', '.join(tags)})")
        weights = self._config.reward_weights(tag)
        row = Prompt("chat:0", prompt, whole, question.answer, tag, question.extra)
        sample = Sample("0/chat:0/0", "0/chat:0", row, completion, text)
        tries = score_responses(self._config, self._folder, [Response(sample)])
        verdicts = []
        for one in tries:
            for tried in one.tried if one.name in known else ():
                scored = tried.scored.reward
                verdicts.append(
                    Verdict(
                        one.name,
                        weights[one.name],
                        None if scored is None else scored.score,
                        {} if scored is None else dict(scored.parts),
                        tried.scored.failure,
                    )
                )
            if one.stopped is not None and one.name in known:
                verdicts.append(Verdict(one.name, weights[one.name], None, {}, one.stopped))
        return verdicts


def as_data(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON holds it."""
    found: dict[str, Any] = {"score": verdict.score, "weight": verdict.weight}
    if verdict.parts:
        found["parts"] = verdict.parts
    if verdict.failure is not None:
        found["failure"] = verdict.failure
    return found
