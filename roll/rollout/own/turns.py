"""Groups whose responses a class of the user's makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from roll.config.user_code.calls import OwnCode
from roll.core.completion import Completion
from roll.rollout.own.bases import RolloutLoop
from roll.rollout.own.writing import Writing
from roll.rollout.single_turn import SingleTurn, UnfinishedGroup
from roll.rollout.types import ScoredSample

KEY = "rollout.loop"


@dataclass(frozen=True)
class OwnTurns(SingleTurn):
    """Producer of groups whose responses a loop of the user's makes."""

    loop: RolloutLoop = field(kw_only=True)
    encode: Callable[[str], Sequence[int]] = field(kw_only=True)
    """Function that returns the tokens of a text, without special ones around it."""

    async def _siblings(self, group: UnfinishedGroup) -> list[ScoredSample]:
        """Let the loop make the responses of a group; score them.

        Raises:
            RollError: the user's code fails, or returns something else than was wanted.
        """
        wanted, prompt = self.samples_per_prompt, group.prompt
        writing = Writing(
            prompt,
            wanted,
            self.tag_sampling.get(prompt.tag, self.sampling),
            group.name,
            self.fleet,
            group.seed,
            self.request_timeout_s,
            self.encode,
            self.decode,
        )
        code, about = OwnCode(self.loop, KEY), f" for prompt {prompt.id}"
        found = await code.wait(code.call(self.loop.responses, about, writing), about)
        responses = list(found) if isinstance(found, list | tuple) else []
        kept = len(responses) == wanted and all(isinstance(r, Completion) for r in responses)
        told = f"{len(responses)} responses" if responses else f"{found!r:.60}"
        code.require(kept, f"{told}{about}", f"a list of {wanted} Completions")
        longest = max(map(len, responses))
        most = writing.sampling.max_new_tokens
        code.require(
            longest <= most,
            f"a response of {longest} tokens{about}",
            f"at most sampling.max_new_tokens = {most}, which may be raised",
        )
        return await self._scored(group, responses, range(wanted))
