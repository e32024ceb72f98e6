"""Calls to a service: tried again where that helps, within limits of time, size and number."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from roll.config.sections.services.service import ServiceConfig
from roll.rewards.service.client import MAX_ANSWER_BYTES, JsonClient, Reply, ServiceError
from roll.rewards.service.turns import Turns
from tests.services import serving

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _post(handler: Handler, calls: int = 1, key: str | None = None, **settings: Any) -> list[Any]:
    """Post `calls` times at once to a server; return replies and errors."""

    async def run() -> list[Any]:
        async with serving(handler) as url:
            client = JsonClient(ServiceConfig(url=url, **settings), key, first_wait_s=0.01)
            await client.open()
            try:
                posts = [client.post(f"{url}/call", {"number": n}) for n in range(calls)]
                return await asyncio.gather(*posts, return_exceptions=True)
            finally:
                await client.close()

    return asyncio.run(run())


def _failing(times: int, response: Callable[[], web.Response]) -> tuple[Handler, list[float]]:
    """A server that answers so for the first `times` times, and then well."""
    seen: list[float] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(time.monotonic())
        return response() if len(seen) <= times else web.json_response({"good": True})

    return handler, seen


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 529])
def test_an_overloaded_or_broken_service_is_asked_again(status: int) -> None:
    handler, seen = _failing(2, lambda: web.Response(status=status))
    [reply] = _post(handler)
    assert isinstance(reply, Reply)
    assert (reply.value, reply.tries, len(seen)) == ({"good": True}, 3, 3)


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 413, 422])
def test_a_refusal_is_final_and_tells_what_the_service_said(status: int) -> None:
    handler, seen = _failing(9, lambda: web.Response(status=status, text="no such\nmodel"))
    [error] = _post(handler, key="secret")
    assert isinstance(error, ServiceError)
    assert f"status {status}: no such model" in str(error)
    assert "secret" not in str(error)
    assert len(seen) == 1


def test_the_last_failure_is_told_with_the_number_of_tries() -> None:
    handler, seen = _failing(9, lambda: web.Response(status=500, text="out of memory"))
    [error] = _post(handler, tries=3)
    assert "status 500: out of memory (tried 3 times)" in str(error)
    assert len(seen) == 3


def test_retry_after_is_obeyed_by_all_calls() -> None:
    handler, seen = _failing(1, lambda: web.Response(status=429, headers={"Retry-After": "0.5"}))
    replies = _post(handler, calls=2, concurrency=1)
    assert [reply.tries for reply in replies] == [2, 1]
    assert seen[1] - seen[0] >= 0.5
    assert seen[2] >= seen[1]


def test_a_wait_of_an_hour_is_a_failure_that_tells_it() -> None:
    handler, seen = _failing(9, lambda: web.Response(status=429, headers={"Retry-After": "3600"}))
    [error] = _post(handler)
    assert "asks to wait 3600 s" in str(error)
    assert len(seen) == 1


@pytest.mark.parametrize("asked", ["soon", "Wed, 21 Oct 2015 07:28:00 GMT", "-5", "nan"])
def test_an_odd_retry_after_does_no_harm(asked: str) -> None:
    handler, _ = _failing(1, lambda: web.Response(status=503, headers={"Retry-After": asked}))
    [reply] = _post(handler)
    assert reply.tries == 2


def test_a_server_that_hangs_has_a_time_limit_per_try() -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    [error] = _post(handler, timeout_s=0.1, tries=2)
    assert "no answer within timeout_s = 0.1 (tried 2 times)" in str(error)


def test_a_server_that_drips_has_the_same_limit() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(600):
            await response.write(b" ")
            await asyncio.sleep(0.02)
        return response

    [error] = _post(handler, timeout_s=0.2, tries=1)
    assert "no answer within timeout_s = 0.2" in str(error)


@pytest.mark.parametrize("packed", [False, True])
def test_an_answer_of_many_megabytes_is_not_read_to_its_end(packed: bool) -> None:
    async def handler(request: web.Request) -> web.Response:
        response = web.Response(body=b'"' + b"a" * 3 * MAX_ANSWER_BYTES + b'"')
        if packed:
            response.enable_compression(web.ContentCoding.deflate)
        return response

    [error] = _post(handler)
    assert isinstance(error, ServiceError)
    assert "larger than 4 MiB" in str(error)


@pytest.mark.parametrize(
    "body",
    ["<html>", "", "NaN", "[" * 100_000, '{"a": 1} {"a": 2}', "\udcff"],
    ids=lambda body: repr(body[:12]),
)
def test_an_answer_that_is_no_json_is_asked_for_again(body: str) -> None:
    raw = body.encode(errors="surrogateescape")
    handler, seen = _failing(1, lambda: web.Response(body=raw))
    [reply] = _post(handler)
    assert (reply.value, len(seen)) == ({"good": True}, 2)


def test_a_server_that_is_not_there_is_a_failure() -> None:
    async def run() -> None:
        client = JsonClient(
            ServiceConfig(url="http://127.0.0.1:1", tries=2), None, first_wait_s=0.01
        )
        await client.open()
        with pytest.raises(ServiceError, match=r"ClientConnectorError.*\(tried 2 times\)"):
            await client.post("http://127.0.0.1:1/call", {})
        await client.close()

    asyncio.run(run())


def test_no_more_calls_are_under_way_than_allowed() -> None:
    running, most = 0, 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return web.json_response({})

    assert len(_post(handler, calls=20, concurrency=3)) == 20
    assert most == 3


def test_workers_share_the_limits_in_equal_parts() -> None:
    running, most = 0, 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return web.json_response({})

    async def run() -> None:
        async with serving(handler) as url:
            client = JsonClient(ServiceConfig(url=url, concurrency=6), sharers=3)
            await client.open()
            await asyncio.gather(*(client.post(f"{url}/call", {}) for _ in range(10)))
            await client.close()

    asyncio.run(run())
    assert most == 2


def test_a_key_is_sent_if_there_is_one() -> None:
    keys: list[str | None] = []

    async def handler(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization"))
        return web.json_response({})

    _post(handler, key="secret")
    _post(handler)
    assert keys == ["Bearer secret", None]


def test_tries_begin_at_equal_distances() -> None:
    async def run() -> list[float]:
        turns, clock = Turns(8, per_minute=60 / 0.05), asyncio.get_running_loop().time
        begun: list[float] = []

        async def one() -> None:
            async with turns.call():
                await turns.begin()
                begun.append(clock())

        await asyncio.gather(*(one() for _ in range(5)))
        return [later - begun[0] for later in begun]

    for place, after_s in enumerate(asyncio.run(run())):
        assert after_s >= 0.05 * place - 0.005


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"url": "example.com/v1"}, "must begin with http"),
        ({"url": "http://"}, "name a host"),
        ({"url": "https://me:pw@host/v1"}, "must not hold a password"),
        ({"url": "http://h", "api_key_env": "sk-123"}, "api_key_env"),
    ],
)
def test_addresses_and_keys_in_the_wrong_place_are_refused(settings: Any, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        ServiceConfig(**settings)
