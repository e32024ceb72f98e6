"""The environment `tools`: from the question over calls and their results to the answer."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from roll.config.sections.environment import EnvironmentConfig
from roll.core.errors import ConfigError, EnvironmentFailedError
from roll.core.types import Message
from roll.data.chat.turns import Turns
from roll.envs.api import Action, Hearing, messages_of
from roll.envs.host import EnvHost
from roll.envs.loading import load_env
from roll.envs.observed import Observed
from roll.envs.tools.environment import Tools
from roll.envs.tools.mcp_servers import close_shared
from tests.unit.data.test_chat_templates import byte_tokenizer, settings_of

ROW = {"prompt": "What is 17 * 23?", "answer": "391"}
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "17 * 23"}}</tool_call>'
OH = "<tool_call>oh</tool_call>"
SERVER = '''
import os
import sys
from mcp import MCPError
from mcp.server import MCPServer

server = MCPServer("shop")
prices = {"pear": 3}


@server.tool()
def price(good: str) -> int:
    """Tells the price of a good."""
    return prices[good]


@server.tool()
def reprice(good: str, to: int) -> str:
    """Changes a price."""
    prices[good] = to
    return "changed"


@server.tool()
def stumble() -> str:
    """Fails inside of the server."""
    raise MCPError(-32603, "the shelf is broken")


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(3)


if sys.argv[1:]:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
'''


def play(env: Tools, *actions: str, row: Any = None) -> list[Any]:
    """The answers of `reset` and of each `step`."""

    async def main() -> list[Any]:
        try:
            seen: list[Any] = [await env.reset(seed=1, options=ROW if row is None else row)]
            for action in actions:
                seen.append(await env.step(action))
            return seen
        finally:
            await env.close()

    return asyncio.run(main())


def test_a_call_gets_its_result_and_the_turn_without_one_is_the_answer() -> None:
    (said, info), first, last = play(Tools(["calculator"], score="number"), CALL, "It is 391.")
    assert said == [Message("user", ROW["prompt"])]
    (tool,) = info["tools"]
    assert tool["function"]["name"] == "calculator"
    assert first[0] == [Message("tool", "391", "calculator", "000000001")]
    assert first[1:4] == (0.0, False, False)
    assert last[1:4] == (1.0, True, False)
    counts = {"tool_calls": 1, "malformed": 0, "tool_errors": 0, "cut_turns": 0}
    assert last[4] == {**counts, "malformed_rate": 0.0, "success": 1.0}


def test_mistakes_are_told_counted_and_cost_what_the_run_says() -> None:
    env = Tools(["calculator"], malformed_penalty=0.25)
    wrong = CALL.replace("17 * 23", "17 * x")
    _, first, last = play(env, f"{OH}{CALL}{wrong}{CALL.replace('calculator', 'calculate')}", "390")
    texts = [message.content for message in first[0]]
    assert texts[0].startswith("Error: the call is not valid JSON")
    assert texts[1] == "391"
    assert texts[2].startswith("Error: 'x' is no part") or "no part" in texts[2]
    assert texts[3].startswith("Error: there is no tool 'calculate'; did you mean")
    assert len({message.call_id for message in first[0]}) == 4
    assert first[1] == -0.25
    assert last[1] == 0.0
    assert (last[4]["tool_calls"], last[4]["malformed"], last[4]["tool_errors"]) == (4, 1, 2)
    assert last[4]["malformed_rate"] == 0.25


def test_no_call_is_taken_from_a_turn_that_was_cut() -> None:
    _, first, last = play(Tools(["calculator"]), Action(CALL, cut=True), Action("391"))
    assert "cut off" in first[0]
    assert not first[2]
    assert (last[4]["cut_turns"], last[4]["tool_calls"], last[1]) == (1, 0, 1.0)


def test_the_tool_finish_gives_the_answer() -> None:
    call = '<tool_call>{"name": "finish", "arguments": {"answer": "391"}}</tool_call>'
    _, last = play(Tools(["calculator", "finish"]), f"{CALL}{call}")
    assert last[1:3] == (1.0, True)
    assert last[4]["tool_calls"] == 2


def test_calls_beyond_the_limit_are_refused_and_long_results_cut() -> None:
    env = Tools(["calculator"], limits={"calls": 1, "result_tokens": 10})
    big = CALL.replace("17 * 23", "10 ** 500")
    _, first, second = play(env, big + CALL, CALL)
    assert "characters left out" in first[0][0].content
    assert "all 1 calls are used up" in first[0][1].content
    assert "all 1 calls are used up" in second[0][0].content


@pytest.mark.parametrize(
    ("score", "answer", "right", "reward"),
    [
        ("exact", " 391\n", "391", 1.0),
        ("exact", "It is 391.", "391", 0.0),
        ("number", "It is 391.", "391", 1.0),
        ("number", "391.0", "#### 391", 1.0),
        ("number", "390 or 391", "391", 0.0),
        ("math", "So \\boxed{391}.", "391", 1.0),
        ("math", "So \\boxed{390}.", "391", 0.0),
        ("none", "391", "391", 0.0),
    ],
)
def test_the_answer_is_scored(score: str, answer: str, right: str, reward: float) -> None:
    row = {"prompt": "?", "answer": right}
    assert play(Tools(["calculator"], score=score), answer, row=row)[-1][1] == reward


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"tools": ["calculator"], "format": "hermse"}, "did you mean 'hermes'"),
        ({"tools": ["calculator"], "score": "exakt"}, "did you mean 'exact'"),
        ({"tools": ["calculator"], "limits": {"call": 3}}, "unknown limit 'call'"),
        (
            {"tools": ["calculator"], "limits": {"calls": 0}},
            "calls is 0; expected a whole number ab",
        ),
        ({"tools": ["calculator"], "limits": {"calls": 3.5}}, "calls is 3.5; expected a whole"),
        ({"tools": ["calculator"], "limits": {"calls": 8.0}}, "calls is 8.0; expected a whole"),
        ({"tools": ["calculator"], "limits": {"result_tokens": 1.5}}, "result_tokens is 1.5; exp"),
        ({"tools": ["calculator"], "limits": {"call_s": "2"}}, "call_s is '2'; expected a number"),
        ({"tools": ["calculator"], "limits": {"call_s": float("inf")}}, "call_s is inf; expected"),
        (
            {"tools": ["python"], "sandbox": {"limits": {"processes": 3.5}}},
            "sandbox.limits: processes: expected a whole number above 0, got 3.5",
        ),
        ({"tools": ["python"], "sandbox": {"limits": {"cpu": 3}}}, "sandbox.limits: .*'cpu'"),
    ],
)
def test_settings_that_cannot_work_are_refused(kwargs: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Tools(**kwargs)


@pytest.mark.parametrize(
    ("tools", "row", "why"),
    [
        (["calculator", "calculator"], ROW, "two of them have the name 'calculator'"),
        (["calculator"], {}, "needs rows with a question"),
        (["calculator"], {"prompt": "?"}, "no `answer`"),
    ],
)
def test_rows_and_tools_that_cannot_work_are_refused(tools: Any, row: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        play(Tools(tools), row=row)


def mistral(shown: str, work: Callable[[EnvHost], Any]) -> Any:
    """What `work` returns with a host of tools whose calls are marked by a special token."""
    tokenizer = byte_tokenizer("mistral_small_3_1")
    tokenizer.add_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])

    async def main() -> Any:
        kwargs = {"tools": ["calculator"], "format": "mistral"}
        config = EnvironmentConfig.model_validate(
            {"env": "tools", "special_tokens": shown, "kwargs": kwargs}
        )
        make = load_env("calc", config)
        host = EnvHost("calc", config, make, Turns(tokenizer, settings_of(), frozenset({1})))
        try:
            return await work(host)
        finally:
            await host.shut()

    return asyncio.run(main())


async def one_call(host: EnvHost) -> Sequence[Observed]:
    turns = host.turns
    await host.open("e", 1, ROW)
    text = '[TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "1+1"}}]'
    tokens = array("i", turns.tokenizer([text], add_special_tokens=False)["input_ids"][0])
    return [await host.act("e", array("i", [*tokens, 1]), 1), await host.act("e", "391", 1)]


def test_marks_that_are_special_tokens_are_seen_where_the_run_shows_them() -> None:
    called, ended = mistral("show", one_call)
    assert called.info["tool_calls"] == 1
    assert called.text == "2"
    assert ended.reward == 1.0


def test_marks_that_are_hidden_end_the_run_with_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"marks calls by '\[TOOL_CALLS\]'.*special_tokens: show"):
        mistral("hide", one_call)


def test_marks_that_are_no_special_tokens_need_no_setting() -> None:
    Tools(["calculator"]).listen(Hearing(byte_tokenizer("qwen3"), special_tokens=False))


@pytest.fixture
def server(tmp_path: Path) -> list[str]:
    pytest.importorskip("mcp")
    (tmp_path / "shop.py").write_text(SERVER)
    return [sys.executable, str(tmp_path / "shop.py")]


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_tools_of_a_server_over_stdio(server: list[str]) -> None:
    settings = {"command": server, "shared": False, "tools": ["price", "reprice", "leave"]}
    env = Tools([{"mcp": settings}])
    (_, info), *turns = play(
        env,
        called("price", good="pear"),
        called("reprice", good="pear", to=5),
        called("price", good="pear"),
        called("price", good="plum"),
        called("price"),
    )
    assert [tool["function"]["name"] for tool in info["tools"]] == ["price", "reprice", "leave"]
    assert info["tools"][0]["function"]["description"] == "Tells the price of a good."
    said = [turn[0][0].content for turn in turns]
    assert said[:3] == ["3", "changed", "5"]
    assert said[3].startswith("Error: ")
    assert said[4].startswith("Error: ")
    assert turns[-1][4]["tool_errors"] == 2


def test_tools_of_a_server_over_http_are_shared_by_episodes(server: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*server, str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("running on" in line for line in process.stderr), "it ended before it served"
        settings = {"url": f"http://127.0.0.1:{port}/mcp", "tools": ["price", "reprice"]}

        async def episode(*actions: str) -> list[str]:
            env = Tools([{"mcp": settings}])
            try:
                await env.reset(seed=1, options=ROW)
                answers = [await env.step(action) for action in actions]
                return [messages_of(answer[0])[0].content for answer in answers]
            finally:
                await env.close()

        async def main() -> list[list[str]]:
            try:
                first = await episode(called("reprice", good="pear", to=7))
                each = (episode(called("price", good="pear")) for _ in range(5))
                return [first, *await asyncio.gather(*each)]
            finally:
                await close_shared()

        assert asyncio.run(main()) == [["changed"], *[["7"]] * 5]
    finally:
        process.kill()
        process.wait()


def test_a_server_that_dies_ends_the_episode_as_failed(server: list[str]) -> None:
    env = Tools([{"mcp": {"command": server, "shared": False}}])
    with pytest.raises(EnvironmentFailedError, match="MCP server"):
        play(env, called("leave"), called("price", good="pear"))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (called("price", good="\ud83d"), "half of a surrogate pair"),
        (called("price", good={"\udc00": 1}), "half of a surrogate pair"),
        (called("stumble"), "Error: the shelf is broken"),
    ],
)
def test_a_call_that_fails_leaves_the_server_to_the_next(
    server: list[str], call: str, told: str
) -> None:
    env = Tools([{"mcp": {"command": server, "shared": False}}])
    _, first, second = play(env, call, called("price", good="pear"))
    assert told in first[0][0].content
    assert first[4]["tool_errors"] == 1
    assert second[0][0].content == "3"


class Gateway(BaseHTTPRequestHandler):
    """Speaks for a server until a tool is called, when it says that the server is gone."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        told: dict[str, Any] = {"error": {"code": -32601, "message": "no such method"}}
        if asked["method"] == "initialize":
            version = asked["params"]["protocolVersion"]
            info = {"name": "shop", "version": "1"}
            told = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
            told = {"result": told}
        elif asked["method"] == "tools/list":
            told = {"result": {"tools": [{"name": "price", "inputSchema": {"type": "object"}}]}}
        body = json.dumps({"jsonrpc": "2.0", "id": asked.get("id"), **told}).encode()
        status = 200 if "id" in asked else 202
        if asked["method"] == "tools/call":
            status, body = 502, b"Bad Gateway"
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if status == 502 else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_server_that_is_gone_behind_its_gateway_ends_the_episode_as_failed() -> None:
    pytest.importorskip("mcp")
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as gateway:
        threading.Thread(target=gateway.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{gateway.server_port}/mcp"
        env = Tools([{"mcp": {"url": url, "shared": False}}])
        with pytest.raises(EnvironmentFailedError, match="returned an error response"):
            play(env, called("price", good="pear"))
        gateway.shutdown()


def test_a_server_that_does_not_start_says_why() -> None:
    pytest.importorskip("mcp")
    env = Tools([{"mcp": {"command": ["no-such-program"], "shared": False}}])
    with pytest.raises(EnvironmentFailedError, match="no-such-program"):
        play(env)
