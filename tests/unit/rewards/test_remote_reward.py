"""A server computes rewards: by its contract, in batches, with what it leaves out asked again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from aiohttp import web

from roll.config.sections.reward import RewardConfig
from roll.config.sections.roles import Role
from roll.core.types import Sample, WorkerSpec
from roll.rewards.contract import sample_of
from roll.rewards.execution.counters import Scored
from roll.workers.services.remote import RemoteReward
from tests.services import serving

SPEC = WorkerSpec(Role.REWARD, 0, 1, (), (), 0, "127.0.0.1:1", 0, "cpu", label="rules")
CONTRACT = yaml.safe_load(
    (Path(__file__).parents[3] / "docs" / "remote_reward.openapi.yaml").read_text()
)
Answer = Callable[[dict[str, Any]], Any]


def _fits(value: Any, schema: str) -> None:
    """Check a value against a schema of the contract."""
    whole = {"$ref": f"#/components/schemas/{schema}", "components": CONTRACT["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


def _samples(*responses: str, group: str = "g", **extra: Any) -> list[Sample]:
    return [
        replace(sample_of(text, answer="42", extra=extra), id=f"{group}/{i}", group=group)
        for i, text in enumerate(responses)
    ]


class Server:
    """A server of rewards whose answers a function gives."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.calls: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    async def __call__(self, request: web.Request) -> web.Response:
        call = json.loads(await request.read())
        _fits(call, "Call")
        self.calls.append(call)
        self.keys.append(request.headers.get("Authorization"))
        return web.json_response(self.answer(call))

    @property
    def sizes(self) -> list[int]:
        return [len(call["samples"]) for call in self.calls]


def _score(
    handler: Callable[[web.Request], Awaitable[web.Response]],
    works: Sequence[Any],
    *,
    kwargs: Any = None,
    **remote: Any,
) -> list[Any]:
    """Scores of samples, or of groups; a text is the reason of a failure."""
    grouped = not isinstance(works[0], Sample)

    async def run() -> list[Any]:
        async with serving(handler) as url:
            config = RewardConfig.model_validate(
                {
                    "remote": {"url": f"{url}/score", **remote},
                    "per": "group" if grouped else "sample",
                    "kwargs": kwargs or {},
                    "max_error_rate": 1.0,
                }
            )
            worker = RemoteReward(SPEC, "rules", config, key="secret")
            worker._calls.window_s = 0.2  # a busy machine divides batches otherwise
            await worker.start()
            try:
                await worker.begin_step(100)
                if grouped:
                    found = await worker.score_groups(list(works))
                    return [[_told(one) for one in group] for group in found]
                return [_told(one) for one in await worker.score_samples(list(works))]
            finally:
                await worker.close()

    return asyncio.run(run())


def _told(scored: Scored) -> float | str:
    return scored.reward.score if scored.reward is not None else str(scored.failure)


def _length(call: dict[str, Any]) -> dict[str, Any]:
    rewards = [
        {"id": one["id"], "score": len(one["response"]), "parts": {"chars": len(one["response"])}}
        for one in call["samples"]
    ]
    _fits({"rewards": rewards}, "Answer")
    return {"rewards": rewards[::-1]}


def test_samples_go_in_batches_and_rewards_come_by_id() -> None:
    server = Server(_length)
    works = _samples(*("a" * n for n in range(10)), level=3, day=date(2026, 1, 2), gap=float("nan"))
    assert _score(server, works, batch_size=4, kwargs={"strict": True}) == [*range(10)]
    assert sorted(server.sizes) == [2, 4, 4]
    [call] = [call for call in server.calls if call["samples"][0]["id"] == "g/0"]
    assert (call["reward"], call["per"], call["kwargs"]) == ("rules", "sample", {"strict": True})
    first = call["samples"][3]
    assert (first["id"], first["group"], first["response"]) == ("g/3", "g", "aaa")
    assert first["extra"] == {"level": 3, "day": "2026-01-02", "gap": None}
    assert server.keys[0] == "Bearer secret"


def test_a_call_has_whole_groups() -> None:
    server = Server(_length)
    groups = [_samples("a", "bb", "ccc", group=name) for name in "xyz"]
    assert _score(server, groups, batch_size=2) == [[1, 2, 3]] * 3
    assert sorted(server.sizes) == [3, 6]
    assert {call["per"] for call in server.calls} == {"group"}


def test_what_an_answer_leaves_out_is_asked_for_again_and_groups_as_a_whole() -> None:
    def half(call: dict[str, Any]) -> dict[str, Any]:
        rewards = _length(call)["rewards"]
        return {"rewards": rewards[: (len(rewards) + 1) // 2]}

    server = Server(half)
    assert _score(server, _samples("a", "bb", "ccc", "dddd")) == [1, 2, 3, 4]
    assert server.sizes == [4, 2, 1]
    stubborn = Server(half)
    groups = [_samples("a", "bb", group=name) for name in "xy"]
    found = _score(stubborn, groups, tries=2)
    assert stubborn.sizes == [4, 2]
    assert found[1] == [1, 2], "answers come from the back, so the last group was complete"
    assert all("no reward came for this sample in 2 calls" in one for one in found[0])


def test_a_failure_of_one_sample_is_its_own() -> None:
    odd: dict[str, Any] = {
        "b": {"error": "no such rule"},
        "c": {"score": "7"},
        "d": {"score": None},
        "e": {"score": 1, "parts": {"chars": "many"}},
        "f": {"score": 1, "parts": {"mean": 1}},
        "g": {"score": 1, "parts": [1]},
        "h": {},
        "i": {"score": 10**400},
    }

    def answer(call: dict[str, Any]) -> dict[str, Any]:
        samples = call["samples"]
        return {
            "rewards": [{"id": s["id"], **odd.get(s["response"], {"score": 1})} for s in samples]
        }

    first, *others = _score(Server(answer), _samples("a", *odd))
    assert first == 1
    assert "the server says: no such rule" in others[0]
    assert len(others) == 8
    assert all("RemoteFailure: " in str(one) for one in others)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {"rewards": None},
        {"rewards": [7]},
        {"rewards": [{"score": 1}]},
        {"rewards": [{"id": "other", "score": 1}]},
        {"rewards": [{"id": "g/0", "score": 1}, {"id": "g/0", "score": 0}]},
    ],
)
def test_an_answer_that_breaks_the_contract_fails_the_call(answer: Any) -> None:
    server = Server(lambda call: answer)
    found = _score(server, _samples("a", "b"))
    assert all("ServiceError: http://127.0.0.1:" in one for one in found)
    assert len(server.calls) == 1


def test_a_server_that_fails_for_a_while_costs_no_sample() -> None:
    server, failures = Server(_length), [503]

    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=failures.pop()) if failures else await server(request)

    assert _score(handler, _samples("a", "b")) == [1, 1]
