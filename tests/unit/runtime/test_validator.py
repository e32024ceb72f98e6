"""Validation over scripted engines: bounded, stopped by the first error, which stays itself."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from roll.config.sections.lifecycle import ValidationConfig
from roll.core.errors import EngineError
from roll.runtime.reward_router import RewardRouter
from roll.runtime.validator import Validator, answer_key
from tests.fakes import ScriptedEngine, group, prompt, single_turn


def validator(engine: ScriptedEngine, *, prompts: int, max_in_flight: int) -> Validator:
    return Validator(
        config=ValidationConfig(samples_per_prompt=2),
        sets={"held_out": tuple(prompt(f"p{i}") for i in range(prompts))},
        run_group=single_turn(engine).run,
        begin_step=lambda expected: None,
        reward_router=RewardRouter({}),
        extract=lambda sample: sample.response_text,
        max_in_flight=max_in_flight,
    )


def test_no_more_groups_run_at_once_than_allowed() -> None:
    engine = ScriptedEngine(turns=lambda request: 5)
    scores = asyncio.run(validator(engine, prompts=20, max_in_flight=3).run(0))
    assert engine.peak == 3
    assert len(engine.seen) == 20
    assert 0 <= scores["val/held_out/mean@1"] <= 1


def test_the_first_error_is_raised_as_itself_and_ends_the_rest() -> None:
    engine = ScriptedEngine(
        turns=lambda request: 3 if "/p2" in request.id else None,
        fails=lambda request: "/p2" in request.id,
    )

    async def run() -> set[object]:
        with pytest.raises(EngineError, match=r"engine died on .*/p2"):
            async with asyncio.timeout(10):
                await validator(engine, prompts=20, max_in_flight=4).run(0)
        return set(asyncio.all_tasks() - {asyncio.current_task()})

    assert asyncio.run(run()) == set()
    assert len(engine.seen) <= 5  # the failed one made room for one more
    assert not engine.running


def test_generation_goes_on_while_the_rewards_begin_a_step() -> None:
    """Training may run ahead on the same event loop; rewards are other processes."""
    engine, alive, heard = ScriptedEngine(turns=lambda request: 1), threading.Event(), list[bool]()

    async def run() -> None:
        asyncio.get_running_loop().call_later(0.05, alive.set)
        made = validator(engine, prompts=1, max_in_flight=1)
        await replace(made, begin_step=lambda expected: heard.append(alive.wait(5))).run(0)

    asyncio.run(run())
    assert heard == [True]


@pytest.mark.parametrize(
    ("tag", "response", "key"),
    [
        ("math", "so it is 3 or \\boxed{7}", "7"),
        ("math", " I do not know ", "I do not know"),
        ("code", " print(7) # not 8 ", "print(7) # not 8"),
        ("code", "  ", None),
    ],
)
def test_only_mathematics_has_a_final_answer_to_vote_on(
    tag: str, response: str, key: str | None
) -> None:
    [one] = group("a", [1.0], texts=[response], tag=tag).samples
    assert answer_key(one.sample, math_tags={"math"}) == key
