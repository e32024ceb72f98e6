"""Adapters against the real packages, each with an interpreter of its own."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from roll.config.sections.environment import EnvironmentConfig
from roll.core.errors import ConfigError, EnvironmentFailedError
from roll.envs.loading import load_env
from tests.packages.interpreters import interpreter_with

pytestmark = pytest.mark.slow  # packages are installed first
ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300


def loaded(env: str, **config: Any) -> Callable[[], Any]:
    return load_env("game", EnvironmentConfig(env=env, **config))


async def played(env: Any, *turns: str, seed: int = 3, **options: Any) -> list[Any]:
    """What an environment answers to a reset and to turns."""
    try:
        seen = [await env.reset(seed=seed, options=options)]
        for turn in turns:
            seen.append(await env.step(turn))
        return seen
    finally:
        await env.close()


def episode(make: Callable[[], Any], *turns: str, seed: int = 3, **options: Any) -> list[Any]:
    return asyncio.run(played(make(), *turns, seed=seed, **options))


def test_a_game_of_textarena_is_won_by_halving() -> None:
    python = interpreter_with("textarena==0.7.4")
    make = loaded("textarena:GuessTheNumber-v0", python=python)

    async def work() -> tuple[int, Any]:
        env, low, high = make(), 1, 20
        first, info = await env.reset(seed=11)
        assert "guess the number between 1 and 20" in first
        assert info == {"invalid": 0}
        text, *_, info = await env.step("[99]")
        assert "outside the range" in text
        assert info == {"invalid": 1}
        for turn in range(1, 10):
            guess = (low + high) // 2
            text, reward, terminated, truncated, info = await env.step(f"I say [{guess}]")
            if terminated:
                await env.close()
                return turn, (reward, truncated, info["success"], info["invalid"])
            assert "[GAME]" not in text, "each message once, without the history"
            assert text in ("The target number is higher.", "The target number is lower.")
            low, high = (guess + 1, high) if "higher" in text else (low, guess - 1)
        raise AssertionError("not found")

    turns, end = asyncio.run(work())
    assert end == (1.0, False, True, 1)
    assert turns <= 5
    assert asyncio.run(work())[0] == turns, "the seed decides the number"


def test_a_game_of_textarena_against_an_opponent() -> None:
    python = interpreter_with("textarena==0.7.4")
    with pytest.raises(ConfigError, match=r"refuses 1 players .* \(adapter: {players: 2, opp"):
        loaded("textarena:TicTacToe-v0", python=python)
    with pytest.raises(ConfigError, match=r"textarena has no 'TicTac-v0'"):
        loaded("textarena:TicTac-v0", python=python)
    adapter = {"players": 2, "opponent": "random", "seat": 1}
    make = loaded("textarena:TicTacToe-v0", python=python, adapter=adapter)

    async def work(seed: int) -> list[Any]:
        env = make()
        seen = [await env.reset(seed=seed)]
        assert seen[0][0].startswith("You are Player 1"), "the other one has begun"
        while len(seen) == 1 or not seen[-1][2]:
            free = re.findall(r"'\[(\d)\]'", seen[-1][0].rpartition("Available")[2])
            seen.append(await env.step(f"[{free[0]}]"))
        await env.close()
        return seen

    ends = [asyncio.run(work(seed))[-1] for seed in range(4)]
    assert {end[1] for end in ends} <= {-1.0, 0.0, 1.0}
    assert all(end[4]["success"] == (end[1] == 1.0) for end in ends)
    assert asyncio.run(work(2)) == asyncio.run(work(2)), "the opponent has the seed, too"


def test_a_game_of_gem() -> None:
    python = interpreter_with("gem-llm==0.1.0")
    make = loaded("gem:game:GuessTheNumber-v0-easy", python=python)
    first, *rest = episode(make, *(f"\\boxed{{{n}}}" for n in (5, 3, 8)))
    assert first[0].endswith("\nEnter your next guess.")
    assert "between 1 and 10" in first[0]
    assert all(isinstance(answer[1], float) for answer in rest)
    assert episode(make, "\\boxed{5}")[1] == rest[0]
    assert episode(make, "no guess")[1][1:4] == [-0.1, True, False]
    with pytest.raises(ConfigError, match=r"GEM has no 'game:GuessTheNumber-v7' \(it has game:"):
        loaded("gem:game:GuessTheNumber-v7", python=python)


def test_an_environment_of_skyrl_gym() -> None:
    python = interpreter_with("skyrl-gym==0.4.0")
    make = loaded("skyrl_gym:gsm8k_multi_turn", python=python)
    first, wrong, right = episode(
        make, "#### 3", "#### 4", prompt="2 + 2?", answer="4", max_turns=3
    )
    assert list(first) == [[{"role": "user", "content": "2 + 2?"}], {}]
    assert wrong[0][0]["content"].startswith("Please provide your step-by-step reasoning")
    assert wrong[1] == pytest.approx(0.2 / 3)
    assert right == [[], 1.0, True, False, {"steps": 2}]
    with pytest.raises(EnvironmentFailedError, match="the task has no prompt"):
        episode(make)


def test_environments_of_verifiers() -> None:
    python = interpreter_with("verifiers==0.1.14")
    make = loaded("verifiers:tests.packages.vf_guess", python=python)
    first, larger, won = episode(make, "1", "4", seed=3)
    assert list(first) == [[{"role": "user", "content": "Guess 1 to 9."}], {}]
    assert larger == [[{"role": "user", "content": "Larger."}], 0.0, False, False, {}]
    assert won[:4] == ["", 1.0, True, False]
    assert won[4]["right"] == 1.0
    tools = loaded("verifiers:tests.packages.vf_guess", python=python, kwargs={"tools": True})
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 3}}</tool_call>'
    first, answer, last = episode(tools, call, "4", seed=3)
    assert first[0][0]["role"] == "system"
    assert '"name": "add"' in first[0][0]["content"]
    assert answer[0] == [{"role": "user", "content": "<tool_response>\n4\n</tool_response>"}]
    assert (last[1], last[4]["total_tool_calls"]) == (1.0, 1.0)


OPENENV = """
import sys
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
class Say(Action):
    message: str
class Heard(Observation):
    echoed: str
class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.turns = 0
        return Heard(echoed=f"seed {seed}", reward=None, done=False)
    def step(self, action, timeout_s=None, **kwargs):
        self.turns += 1
        if action.message == "raise":
            raise ValueError("the echo is gone")
        return Heard(echoed=action.message, reward=0.5, done=self.turns == 2)
    @property
    def state(self):
        return State(episode_id="e", step_count=self.turns)
import uvicorn
app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=8)
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""


@contextmanager
def serving(python: str, program: str) -> Iterator[str]:
    """Address of a server, which is a program with its port as argument."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, "-c", program, str(port)], cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(f"{url}/openapi.json", timeout=5) as answer:
                    json.load(answer)
                break
            except OSError:
                assert process.poll() is None, "the server has ended"
                assert time.monotonic() < end, "the server does not answer"
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def test_a_server_of_openenv() -> None:
    python = interpreter_with("openenv-core==0.3.0")
    with serving(python, OPENENV) as url:
        make = loaded(f"openenv:{url}")

        async def work() -> list[list[Any]]:
            return await asyncio.gather(*(played(make(), "a", "b", seed=n) for n in range(4)))

        for seed, (first, one, two) in enumerate(asyncio.run(work())):
            assert first == (f"seed {seed}", {"invalid": 0})
            assert one == ("a", 0.5, False, False, {"invalid": 0})
            assert two == ("b", 0.5, True, False, {"invalid": 0})
        with pytest.raises(Exception, match="EXECUTION_ERROR: the echo is gone"):
            episode(make, "raise")


def test_gymnasium_with_an_interpreter_of_its_own_plays_the_same() -> None:
    pytest.importorskip("gymnasium", reason="pip install -r requirements/agents.txt")
    python = interpreter_with("gymnasium>=1.0,<2")
    far = loaded("gymnasium:Blackjack-v1", python=python)
    near = loaded("gymnasium:Blackjack-v1")()
    turns = ("hit", "what", "stick")
    here = [near.reset(seed=3), *(near.step(turn) for turn in turns)]
    assert [tuple(answer) for answer in episode(far, *turns)] == here
