"""`Writing`: a prompt and the ways to continue it, as a rollout loop of the user's gets them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from roll.config.sections.sampling import NOT_TRAINED, RESHAPING
from roll.core.completion import NOBODY, Completion, FinishReason, Written
from roll.core.errors import UserError
from roll.core.types import GenerateRequest, Prompt, SamplingParams
from roll.distributed.remote_contents import contents_here
from roll.rollout.single_turn import group_seed


class Generator(Protocol):
    """Writer of continuations: `Fleet`, in a run."""

    async def generate(
        self, request: GenerateRequest, *, session: str, timeout_s: float
    ) -> list[Completion]:
        """Return the continuations of a request; see `Fleet.generate`."""
        ...


@dataclass
class Writing:
    """The prompt of one group, and what its responses are made of."""

    prompt: Prompt
    """Prompt that is answered."""
    wanted: int
    """Number of responses."""
    sampling: SamplingParams
    """Sampling of the run for the tag of the prompt; `dataclasses.replace` changes a copy."""
    name: str
    """Name of the group, `<step>/<prompt id>`."""
    _fleet: Generator
    _seed: int
    _timeout_s: float
    _encode: Callable[[str], Sequence[int]]
    _decode: Callable[[Sequence[int]], str]
    _requests: int = field(default=0, init=False)

    async def generate(
        self,
        so_far: Completion | None = None,
        *,
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Return n continuations of the prompt, or of the prompt and `so_far`, without these.

        Args:
            so_far: beginning of a response, which the engine continues.
            n: number of continuations.
            sampling: sampling in place of that of the run.

        Raises:
            UserError: the sampling changes the distribution as no sampling of training may.
            RollError: the engine failed, or made no progress in time.
        """
        asked = sampling or self.sampling
        for name in RESHAPING:
            if getattr(asked, name) != getattr(self.sampling, name):
                raise UserError(f"rollout.loop: {name} {NOT_TRAINED}")
        number, self._requests = self._requests, self._requests + 1
        before = () if so_far is None else so_far.tokens
        request = GenerateRequest(
            f"{self.name}/own{number}",
            [*self.prompt.tokens, *before],
            asked,
            n,
            group_seed(self._seed, str(number)) if number else self._seed,
            self.prompt.pictures,
        )
        found = await self._fleet.generate(
            request, session=self.prompt.id, timeout_s=self._timeout_s
        )
        contents = [one.content for one in found]
        if not all(isinstance(content, Written) for content in contents):
            here = await asyncio.to_thread(contents_here, contents)
            found = [replace(one, content=own) for one, own in zip(found, here, strict=True)]
        return list(found)

    def given(self, text: str) -> Completion:
        """Return a text as a part of a response that the policy did not write: it is not trained
        on."""
        tokens = list(self._encode(text))
        return Completion.of(tokens, [0.0] * len(tokens), [NOBODY] * len(tokens), FinishReason.STOP)

    def text(self, part: Completion) -> str:
        """Return the text of a part of a response, without special tokens."""
        return self._decode(part.tokens)
