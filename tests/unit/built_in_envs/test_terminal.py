"""Mending programs in a shell: the tests see the file and nothing else."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from roll.config.sections.environment import EnvironmentConfig
from roll.data.chat.turns import Turns
from roll.envs.built_in.code.programs import PROGRAMS
from roll.envs.built_in.code.terminal import Terminal
from roll.envs.contract import check_env
from roll.envs.host import EnvHost
from roll.envs.loading import load_env
from roll.envs.observed import Observed
from roll.sandbox import NoLevelError, Sandbox
from tests.tiny import char_tokenizer
from tests.unit.built_in_envs.test_fix_code import ROW
from tests.unit.data.test_chat_templates import settings_of

RIGHT = {program.right.__name__: inspect.getsource(program.right) for program in PROGRAMS}


def isolated() -> bool:
    """Whether programs can be locked in here."""
    try:
        return Sandbox(level="namespaces").level == "namespaces"
    except NoLevelError:
        return False


def mender() -> Callable[[str], str]:
    """A policy that knows the right programs."""

    def act(said: str) -> str:
        name = re.findall(r"Tests call `(.+?)`", said)[0]
        return f"```sh\ncat > program.py <<'END'\n{RIGHT[name]}\nEND\n```"

    return act


@pytest.mark.skipif(not isolated(), reason="commands that nobody expects need a sandbox")
def test_it_keeps_the_contract_and_right_programs_pass() -> None:
    check_env(
        Terminal,
        kwargs={"level": "namespaces"},
        solver=mender,
        seeds=range(2),
        max_turns=3,
        actions=["cat program.py", "rm program.py", "echo 'x = 1' > program.py"],
        reward_range=(0, 1),
        timeout_s=60,
    )


def played(*commands: str, row: dict[str, Any] | None = None) -> list[Any]:
    """The answers to commands, for the task of the row."""

    async def play() -> list[Any]:
        env = Terminal(level="none")
        try:
            await env.reset(seed=1, options=row or ROW)
            return [await env.step(command) for command in commands]
        finally:
            await env.close()

    return asyncio.run(asyncio.wait_for(play(), 60))


def test_a_program_is_mended_step_by_step() -> None:
    found = played(
        "cat program.py",
        "```sh\nsed -i 's/return/return 1 +/' program.py\n```",
        "I try this:\n```sh\nsed -i 's/1 + a - b/a + b/' program.py\n```",
    )
    said, rewards, ended = [one[0] for one in found], [one[1] for one in found], found[-1][2]
    assert said[0] == "def add(a, b):\n    return a - b"
    assert "of 4 tests pass." in said[1]
    assert said[2] == "[nothing printed]\n4 of 4 tests pass."
    assert (rewards, ended) == ([0, 0, 1], True)
    assert found[-1][-1]["success"]
    assert found[-1][-1]["tests_passed"] == 1


def test_files_of_a_row_are_there() -> None:
    first, second = played("cat notes/a.txt", "ls", row=ROW | {"files": {"notes/a.txt": "hint"}})
    assert first[0] == "hint"
    assert second[0].split() == ["notes", "program.py"]


def test_a_session_that_begins_anew_is_told_and_is_no_part_of_the_program() -> None:
    flood, shown, mended = played("yes", "cat program.py", "sed -i 's/a - b/a + b/' program.py")
    assert "[a new session: earlier variables and files are lost]" in flood[0]
    assert "SyntaxError" not in flood[0] + shown[0]
    assert shown[0].startswith("def add(a, b):\n    return a - b")
    assert flood[-1]["state"] == "def add(a, b):\n    return a - b"
    assert (mended[1], mended[2]) == (1.0, True)


@pytest.mark.slow
def test_a_command_that_waits_is_ended_before_the_step_and_the_episode_goes_on() -> None:
    config = EnvironmentConfig(env="terminal", kwargs={"level": "none"})

    async def play() -> list[Observed]:
        turns = Turns(char_tokenizer(), settings_of(), frozenset({1}))
        host = EnvHost("t", config, load_env("t", config), turns)
        try:
            await host.open("e", 1, ROW)
            commands = ("sleep 100", "sed -i 's/a - b/a + b/' program.py")
            return [await host.act("e", command, 1) for command in commands]
        finally:
            await host.shut()

    waits, mended = asyncio.run(asyncio.wait_for(play(), 100))
    assert "took longer than 10 s" in waits.text
    assert "a new session" in waits.text
    assert (waits.reward, waits.over) == (0.0, False)
    assert (mended.reward, mended.terminated) == (1.0, True)


def test_a_turn_without_a_command_and_a_lost_file_are_told() -> None:
    empty, gone, back = played(
        "``` \n```", "rm program.py", "echo 'def add(a, b): return a + b' > program.py"
    )
    assert empty[0] == "There is no command."
    assert empty[-1]["invalid"] == 1
    assert "program.py cannot be read: FileNotFoundError" in gone[0]
    assert "0 of 4 tests pass" in gone[0]
    assert "SyntaxError" not in gone[0], "the message is not judged as the program"
    assert back[1] == 1.0
