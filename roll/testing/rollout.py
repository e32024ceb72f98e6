"""Checks of filters and rollout loops that users bring."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from roll.config.user_code.calls import OwnCode
from roll.core.completion import NOBODY, Completion, FinishReason
from roll.core.types import GenerateRequest, Prompt, Sample, SamplingParams
from roll.rollout.filters import build_filters
from roll.rollout.own.bases import Filter, RolloutLoop
from roll.rollout.own.writing import Writing
from roll.rollout.types import Group, ScoredSample
from roll.testing.rules import case, require

WANTED, LIMIT = 4, 32
REWARDS = ([0.0, 1.0, 0.5, 1.0], [0.0] * 4, [1.0] * 4, [-1e6, 1e6], [1.0])
"""Rewards of the groups that are tried."""


def check_filter(part: Filter) -> None:
    """Raise AssertionError, which names the group, if a filter breaks a rule: it returns a reason
    or None, the same at each call, also for groups with equal, huge, failed or single rewards."""
    [judge] = build_filters([part])  # type: ignore[list-item]
    for rewards in REWARDS:
        for failed in (False, True):
            group = _group(rewards, failed=failed)
            with case(f"a group with rewards {list(group.rewards)}"):
                first, second = judge(group), judge(group)
            require(first == second, f"two calls differ for rewards {list(group.rewards)}")


def _prompt() -> Prompt:
    return Prompt("check:0", (5, 6, 7), "What is 6 * 7?", "42", "default")


def _group(rewards: list[float], *, failed: bool) -> Group:
    done = Completion.of([8, 9], [-0.5, -0.5], [0, 0], FinishReason.STOP)
    samples = tuple(
        ScoredSample(
            Sample(f"0/check:0/{i}", "0/check:0", _prompt(), done, "42"),
            reward,
            failed=("broken",) if failed else (),
        )
        for i, reward in enumerate(rewards)
    )
    return Group(_prompt(), samples, 0)


@dataclass
class _Engine:
    """Writes random tokens, the same for the same request."""

    asked: list[GenerateRequest] = field(default_factory=list)

    async def generate(
        self, request: GenerateRequest, *, session: str, timeout_s: float
    ) -> list[Completion]:
        await asyncio.sleep(0)
        self.asked.append(request)
        found = []
        for i in range(request.n):
            draw = random.Random(f"{request.seed}/{i}/{list(request.prompt_tokens)}")
            size = draw.randint(1, request.sampling.max_new_tokens)
            cut = size == request.sampling.max_new_tokens
            found.append(
                Completion.of(
                    [draw.randint(4, 60) for _ in range(size)],
                    [-draw.random() for _ in range(size)],
                    [0] * size,
                    FinishReason.LENGTH if cut else FinishReason.STOP,
                )
            )
        return found


def check_rollout_loop(part: RolloutLoop) -> None:
    """Raise AssertionError, which names the rule, if a rollout loop breaks one.

    The rules, tried with an engine that writes random tokens: the loop returns as many responses as
    are wanted, each with at most `sampling.max_new_tokens` tokens, and with some that the policy
    wrote; the same again for the same seed.
    """
    first, second = (asyncio.run(_responses(part)) for _ in range(2))
    require(first == second, "the same seed gives other responses")


async def _responses(part: RolloutLoop) -> list[tuple[list[int], list[int]]]:
    """Return tokens and versions of the responses to a prompt, after checks."""
    engine = _Engine()
    sampling = SamplingParams(temperature=1.0, max_new_tokens=LIMIT)
    writing = Writing(
        _prompt(),
        WANTED,
        sampling,
        "0/check:0",
        engine,
        7,
        60.0,
        lambda text: [ord(letter) for letter in text],
        lambda tokens: "".join(map(chr, tokens)),
    )
    code = OwnCode(part, "rollout.loop")
    with case("a prompt"):
        found = await code.wait(code.call(part.responses, "", writing), "")
    require(
        isinstance(found, list | tuple) and len(found) == WANTED,
        f"{WANTED} responses are wanted, and the loop returned {found!r:.80}",
    )
    told = []
    for one in found:
        require(isinstance(one, Completion), f"a response is no Completion: {one!r:.60}")
        require(
            len(one) <= LIMIT,
            f"a response has {len(one)} tokens, and sampling.max_new_tokens is {LIMIT}; ask for "
            "fewer with `sampling=replace(writing.sampling, max_new_tokens=...)`",
        )
        versions = [version for version, count in one.versions.runs for _ in range(count)]
        require(any(v != NOBODY for v in versions), "a response has no token of the policy")
        told.append((list(one.tokens), versions))
    return told
