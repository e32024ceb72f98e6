"""Environments behind servers: what a server says is checked, and what it does is contained."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from roll.config.sections.environment import EnvironmentConfig
from roll.core.errors import ConfigError
from roll.envs.adapters.servers.client import ServerError
from roll.envs.loading import load_env

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def played(
    routes: dict[str, Handler], work: Callable[[Any], Awaitable[Any]], prefix: str = "", **more: Any
) -> Any:
    """What `work` returns with an environment behind a real server with these routes."""

    async def main() -> Any:
        app = web.Application()
        for path, handler in routes.items():
            app.router.add_route("*", path, handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        config = EnvironmentConfig(env=f"{prefix}http://{host}:{port}", **more)
        env: Any = load_env("far", config)()
        try:
            return await asyncio.wait_for(work(env), 20)
        finally:
            await env.close()
            await runner.cleanup()

    return asyncio.run(main())


class Counting:
    """Server by the contract: counts the turns of each episode; the third one ends it."""

    def __init__(self, **script: Any) -> None:
        self.script = script
        """Answers that replace those to a path."""
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        self.closed: list[str] = []

    def routes(self) -> dict[str, Handler]:
        return {"/{path}": self.answer}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path, body = request.match_info["path"], await request.json()
        self.calls.append((path, body))
        self.keys.append(request.headers.get("Authorization"))
        if path in self.script:
            given = self.script[path]
            return await given(request) if callable(given) else web.json_response(given)
        if path == "close":
            self.closed.append(body["episode"])
            return web.json_response({})
        if path == "reset":
            return web.json_response({"observation": f"seed {body['seed']}", "info": {"n": 0}})
        turn = body["turn"] + 1
        said = {"observation": f"turn {turn}", "reward": 0.5, "terminated": turn == 3}
        return web.json_response({**said, "info": {"n": turn}})


async def whole(env: Any) -> list[Any]:
    seen = [await env.reset(seed=7, options={"prompt": "p", "at": {1}})]
    for _ in range(3):
        seen.append(await env.step("go"))
    return seen


def test_an_episode_goes_by_the_contract() -> None:
    server = Counting()
    seen = played(server.routes(), whole, kwargs={"size": 4}, adapter={"api_key_env": "PATH"})
    assert seen == [
        ("seed 7", {"n": 0}),
        ("turn 1", 0.5, False, False, {"n": 1}),
        ("turn 2", 0.5, False, False, {"n": 2}),
        ("turn 3", 0.5, True, False, {"n": 3}),
    ]
    paths = [path for path, _ in server.calls]
    assert paths == ["reset", "step", "step", "step", "close"]
    assert len({body["episode"] for _, body in server.calls}) == 1
    assert {body["contract"] for _, body in server.calls} == {1}
    assert server.calls[0][1]["options"] == {"prompt": "p", "at": "{1}"}
    assert server.calls[0][1]["kwargs"] == {"size": 4}
    assert server.calls[2][1] == {**server.calls[1][1], "turn": 1}
    assert set(server.keys) == {f"Bearer {os.environ['PATH']}"}
    assert len(server.closed) == 1


async def big(request: web.Request) -> web.StreamResponse:
    return web.json_response({"observation": "x" * 10 * 2**20, "reward": 0, "terminated": False})


async def broken(request: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="the board\nis broken")


async def elsewhere(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/other")


async def no_json(request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>")


async def cut(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b"{")
    assert request.transport is not None
    request.transport.abort()
    return response


DONE = {"observation": "x", "reward": 1, "terminated": True}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (big, "/step: the answer is larger than 4 MiB"),
        (broken, "/step: status 500: the board is broken"),
        (elsewhere, "/step: status 302"),
        (no_json, "/step: the answer is not JSON: <html>"),
        (cut, "/step: Client"),
        ([1], "/step: the answer is no JSON object"),
        ({**DONE, "reward": "much"}, r"/step: 'reward' is \"much\"; expected a number"),
        ({**DONE, "reward": True}, r"/step: 'reward' is true; expected a number"),
        ({**DONE, "reward": None}, r"/step: 'reward' is null; expected a number"),
        ({**DONE, "terminated": 1}, r"/step: 'terminated' is 1; expected a bool"),
        ({"reward": 1.0}, r"/step: 'terminated' is missing; expected a bool"),
        ({**DONE, "info": [1]}, r"/step: 'info' is \[1\]; expected a JSON object"),
    ],
)
def test_a_server_that_answers_wrong_fails_the_episode(answer: Any, message: str) -> None:
    server = Counting(step=answer)
    with pytest.raises(ServerError, match=message):
        played(server.routes(), whole)
    assert len(server.closed) == 1, "the server is told all the same"
    assert [path for path, _ in server.calls].count("step") == 1, "nothing is sent twice"


def test_a_server_that_hangs_is_left_at_the_limit() -> None:
    let_go = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        await let_go.wait()
        return web.json_response({})

    async def work(env: Any) -> None:
        await env.reset(seed=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.step("go"), 0.2)
        let_go.set()

    server = Counting(step=hang)
    played(server.routes(), work)
    assert len(server.closed) == 1


def test_a_server_that_is_not_there_is_named() -> None:
    async def work() -> None:
        env: Any = load_env("far", EnvironmentConfig(env="http://127.0.0.1:9"))()
        try:
            with pytest.raises(ServerError, match=r"127.0.0.1:9/reset: ClientConnector"):
                await env.reset(seed=1)
        finally:
            with pytest.raises(ServerError):
                await env.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"env": "http://"}, r"found the address 'http://'; expected http://host:port"),
        ({"env": "openenv:localhost:80"}, r"'localhost:80'; expected openenv:http://host:port"),
        ({"env": "nemo_gym:"}, "has no name; for example nemo_gym:http://localhost:8000"),
        (
            {"env": "http://a", "adapter": {"api_key_env": "NO_KEY"}},
            "the environment variable NO_KEY is not set",
        ),
        ({"env": "http://a", "adapter": {"key": "x"}}, r"unknown key 'key' \(known: api_key_env"),
        ({"env": "http://a", "python": "python3"}, "http asks a server; drop `python`"),
        ({"env": "http://a", "process": True}, "http asks a server; drop `process`"),
    ],
)
def test_mistakes_show_before_any_episode(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_env("far", EnvironmentConfig(**config))


class OpenEnvServer:
    """Server that speaks OpenEnv's protocol, with the action and the observations of a test."""

    def __init__(self, action: dict[str, Any], *answers: Any) -> None:
        self.action = action
        self.answers = list(answers)
        self.heard: list[dict[str, Any]] = []

    def routes(self) -> dict[str, Handler]:
        return {"/schema": self.schema, "/ws": self.talk}

    async def schema(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"action": self.action, "observation": {}, "state": {}})

    async def talk(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                self.heard.append(json.loads(message.data))
                if self.heard[-1]["type"] == "close":
                    break
                answer = self.answers.pop(0)
                if answer is None:
                    break
                await socket.send_json(answer)
        await socket.close()
        return socket


def observed(reward: Any = None, done: bool = False, **said: Any) -> dict[str, Any]:
    return {
        "type": "observation",
        "data": {"observation": said, "reward": reward, "done": done},
    }


def fields(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"properties": {"metadata": {"type": "object"}, **properties}, "required": required}


MESSAGE = fields(["message"], message={"type": "string"})


def test_an_episode_of_openenv() -> None:
    server = OpenEnvServer(
        MESSAGE,
        observed(echoed="begin", metadata={"a": 1}),
        observed(1, echoed="hello", length=5),
        observed(True, True, echoed="bye"),
    )

    async def work(env: Any) -> list[Any]:
        first = await env.reset(seed=3, options={"prompt": "p"})
        return [first, await env.step("hello"), await env.step("bye")]

    assert played(server.routes(), work, "openenv:", kwargs={"level": 2}) == [
        ("begin", {"invalid": 0}),
        ("echoed: hello\nlength: 5", 1.0, False, False, {"invalid": 0}),
        ("bye", 1.0, True, False, {"invalid": 0}),
    ]
    assert server.heard == [
        {"type": "reset", "data": {"prompt": "p", "level": 2, "seed": 3}},
        {"type": "step", "data": {"message": "hello"}},
        {"type": "step", "data": {"message": "bye"}},
        {"type": "close"},
    ]


@pytest.mark.parametrize(
    ("action", "adapter", "turn", "data"),
    [
        (fields([], move={"type": "integer"}), {}, "I move 2 or 3.", {"move": 3}),
        (fields([], move={"type": "integer"}), {}, "left", None),
        (fields([], move={"type": "number"}), {}, "9" * 5000, None),
        (
            fields(["a"], a={"type": "string"}, b={"type": "string"}),
            {"action": "b"},
            "x",
            {"b": "x"},
        ),
        (
            fields(["a", "b"], a={"enum": ["x", "y"]}, b={"type": "integer"}),
            {},
            'so: {"a": "x", "b": {"c": 1}} {',
            {"a": "x", "b": {"c": 1}},
        ),
        (fields(["a", "b"], a={"enum": ["x"]}, b={"type": "integer"}), {}, "a: x", None),
    ],
)
def test_turns_become_actions_of_openenv(
    action: dict[str, Any], adapter: dict[str, Any], turn: str, data: Any
) -> None:
    server = OpenEnvServer(action, observed(said="go"), observed(said="on"))

    async def work(env: Any) -> Any:
        await env.reset(seed=1)
        return await env.step(turn)

    text, *_, info = played(server.routes(), work, "openenv:", adapter=adapter)
    if data is None:
        assert text.startswith("This is no action. Answer with a ")
        assert text.endswith("\ngo")
        assert info == {"invalid": 1}
    else:
        assert server.heard[1] == {"type": "step", "data": data}


def refused(code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": "Invalid message"}}


def test_an_action_that_a_server_of_openenv_refuses_is_invalid_and_the_episode_goes_on() -> None:
    action = fields(["row", "column"], row={"type": "integer"}, column={"type": "integer"})
    server = OpenEnvServer(
        action, observed(said="go"), refused("VALIDATION_ERROR"), observed(1.0, True, said="on")
    )

    async def work(env: Any) -> Any:
        await env.reset(seed=1)
        return [await env.step('{"row": "x"}'), await env.step('{"row": 1, "column": 2}')]

    wrong, right = played(server.routes(), work, "openenv:")
    wanted = 'a JSON object {"row": integer, "column": integer}'
    told = f"This is no action. Answer with {wanted}.\ngo"
    assert wrong == (told, 0.0, False, False, {"invalid": 1})
    assert right == ("on", 1.0, True, False, {"invalid": 1})


@pytest.mark.parametrize("code", ["EXECUTION_ERROR", "INVALID_JSON"])
def test_other_errors_at_a_step_of_openenv_fail_the_episode(code: str) -> None:
    server = OpenEnvServer(MESSAGE, observed(said="go"), refused(code))

    async def work(env: Any) -> Any:
        await env.reset(seed=1)
        return await env.step("x")

    with pytest.raises(ServerError, match=code):
        played(server.routes(), work, "openenv:")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refused("VALIDATION_ERROR"), "VALIDATION_ERROR: Invalid message"),
        ({"type": "error", "data": {"code": "CAPACITY_REACHED"}}, "larger max_concurrent_envs"),
        ({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "no"}}, "ERROR: no"),
        (None, r"/ws: the server closed the connection \(code 1000\)"),
        (observed("much", said="x"), r"'reward' is \"much\"; expected a number"),
        (observed(said="x" * 5 * 2**20), "/ws: the answer is larger than 4 MiB"),
        ({"type": "observation", "data": {}}, "'observation' is missing"),
    ],
)
def test_an_openenv_server_that_answers_wrong_fails_the_episode(answer: Any, message: str) -> None:
    server = OpenEnvServer(MESSAGE, answer)
    with pytest.raises(ServerError, match=message):
        played(server.routes(), lambda env: env.reset(seed=1), "openenv:")


class GymServer:
    """Resources server of NeMo Gym: sessions by cookie."""

    def __init__(self, *paths: str) -> None:
        self.paths = paths
        self.calls: list[tuple[str, dict[str, Any], str | None]] = []

    def routes(self) -> dict[str, Handler]:
        return {"/openapi.json": self.openapi, "/{path}": self.answer}

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"paths": {path: {} for path in self.paths}})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path, body = request.match_info["path"], await request.json()
        self.calls.append((path, body, request.cookies.get("session")))
        said: dict[str, Any] = {"observation": None, "info": {}}
        if path == "step":
            text = body["response"]["output"][0]["content"][0]["text"]
            said = {"observation": f"not {text}", "reward": 0.5, "terminated": text == "4"}
        if path == "verify":
            said = {"reward": 1.0, "score": 3}
        response = web.json_response(said)
        response.set_cookie("session", "s1")
        return response


def test_an_episode_of_nemo_gym_in_turns() -> None:
    server = GymServer("/reset", "/step")
    row = {
        "responses_create_params": {"input": [{"role": "developer", "content": "Count."}]},
        "expected": "4",
    }

    async def work(env: Any) -> list[Any]:
        return [
            await env.reset(seed=1, options=row),
            await env.step("3"),
            await env.step("4"),
        ]

    assert played(server.routes(), work, "nemo_gym:") == [
        ([{"role": "system", "content": "Count."}], {}),
        ("not 3", 0.5, False, False, {}),
        ("not 4", 0.5, True, False, {}),
    ]
    assert [call[0] for call in server.calls] == ["reset", "step", "step"]
    assert [call[2] for call in server.calls] == [None, "s1", "s1"]
    assert server.calls[1][1]["expected"] == "4"


def test_an_episode_of_nemo_gym_with_one_answer() -> None:
    server = GymServer("/seed_session", "/verify")

    async def work(env: Any) -> list[Any]:
        return [await env.reset(seed=1, options={"prompt": "2 + 2?"}), await env.step("4")]

    first, last = played(server.routes(), work, "nemo_gym:")
    assert first == ([{"role": "user", "content": "2 + 2?"}], {})
    assert last == ("", 1.0, True, False, {"reward": 1.0, "score": 3})


def test_rows_of_nemo_gym_with_tools_are_refused() -> None:
    row = {"responses_create_params": {"input": "x", "tools": [{"name": "t"}]}}
    with pytest.raises(ServerError, match="the row has tools"):
        played(
            GymServer("/reset", "/step").routes(),
            lambda env: env.reset(seed=1, options=row),
            "nemo_gym:",
        )
