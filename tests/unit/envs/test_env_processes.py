"""Episodes in processes of their own: whatever one does, it ends alone."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll.config.sections.environment import EnvironmentConfig
from roll.core.errors import ConfigError, EnvironmentFailedError
from roll.envs.answers import state_of
from roll.envs.api import Action, messages_of
from roll.envs.loading import load_env
from roll.envs.processes.env import EnvProcesses, ProcessEnv
from tests.unit.envs import hostile_envs

HERE = "tests.unit.envs.hostile_envs"


def processes(env: str = "Hostile", **config: Any) -> EnvProcesses:
    path = env if env == "frozen_lake" or ":" in env else f"{HERE}:{env}"
    settings = {"env": path, "process": True, **config}
    made = load_env("echo", EnvironmentConfig(**settings))
    assert isinstance(made, EnvProcesses)
    return made


def gone(pid: int, limit_s: float = 10.0) -> bool:
    """Whether a process ends within the limit; a zombie counts as ended."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


async def begun(make: Callable[[], ProcessEnv], seed: int = 1) -> tuple[ProcessEnv, str, int]:
    """An episode that has begun, its first observation, and its process."""
    env = make()
    text, info = await env.reset(seed=seed, options={"answer": 4})
    return env, text, int(info["pid"])


@pytest.mark.parametrize("env", ["Guess", "Waiting"])
def test_episodes_at_once_have_dice_of_their_own(env: str) -> None:
    """Packages that draw from the random state of the process would mix them up in threads."""
    make = processes(env)

    async def work() -> None:
        (one, first, pid), (other, second, _) = await begun(make, 7), await begun(make, 7)
        assert first == second
        for action in ("x", "y", "stop"):
            here, there = await asyncio.gather(one.step(action), other.step(action))
            assert here == there
            assert list(here)[1:] == [0.5, action == "stop", False, {"n": 1}]
        await one.close()
        await other.close()
        assert gone(pid)

    asyncio.run(work())


def test_all_that_a_run_reads_leaves_the_process_as_it_is() -> None:
    async def work() -> tuple[Any, ...]:
        here, there = hostile_envs.Telling(), processes("Telling")()
        action = Action("go", cut=True)
        found = await there.reset(seed=1), await there.step(action), await there.step("go")
        await there.close()
        return (here.reset(seed=1), here.step(action)), found

    (begun, stepped), (first, second, third) = asyncio.run(work())
    info = begun[1]
    assert first == [begun[0], {"seat": 0, "tools": info["tools"], "state": state_of(info)}]
    (message,) = messages_of(second[0])
    assert (message.role, message.content, message.name, message.call_id) == (
        *("tool", "42", "add", "c1"),
    )
    assert second[-1] == {key: stepped[-1][key] for key in ("rewards", "state", "cut")}
    assert third[-1]["cut"] is False
    assert second[1:4] == list(stepped[1:4])


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise", "environment 'echo': step raised ValueError: the board is broken"),
        ("leave", "step raised SystemExit: 3"),
        ("leak", r"step raised MemoryError|its process ended \(signal"),
        ("kill", r"step: its process ended \(signal SIGKILL\)"),
        ("crash", r"step: its process ended \(signal SIGABRT\)"),
        ("shout", r"step raised ValueError: the answer has 10.0 MiB; at most 4 MiB are taken"),
        ("object", "step raised TypeError: object <.*> is neither text nor a number"),
        ("hang", ""),
        ("loop", ""),
    ],
)
def test_what_one_episode_does_wrong_ends_it_alone(action: str, message: str) -> None:
    make = processes(memory_gb=0.2)

    async def work() -> None:
        (bad, first, pid), (good, _, _) = await begun(make), await begun(make)
        if message:
            with pytest.raises(EnvironmentFailedError, match=message):
                await bad.step(action)
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(bad.step(action), 0.2)
            assert gone(pid), "it is killed at its limit, not when it is closed"
        assert (await good.step("go"))[0].startswith("go ")
        await bad.close()
        assert gone(pid)
        assert (await begun(make))[1] == first

    asyncio.run(work())


def test_an_environment_that_cannot_be_made_fails_its_episode() -> None:
    with pytest.raises(EnvironmentFailedError, match="reset raised OSError: no board in the box"):
        asyncio.run(begun(processes("broken")))


def test_what_an_environment_prints_is_no_part_of_its_answers() -> None:
    async def work() -> str:
        env, _, _ = await begun(processes())
        return str((await env.step("print"))[0])

    assert asyncio.run(work()).startswith("print ")


def test_a_close_that_hangs_is_killed() -> None:
    async def work() -> int:
        env, _, pid = await begun(processes("Slow"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.close(), 0.2)
        return pid

    assert gone(asyncio.run(work()))


def test_processes_that_an_environment_started_end_with_its_episode(tmp_path: Path) -> None:
    async def work() -> None:
        env, _, _ = await begun(processes(kwargs={"folder": str(tmp_path)}))
        await env.step("child")
        await env.close()

    asyncio.run(work())
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_template_that_dies_is_started_again() -> None:
    make = processes()

    async def work() -> None:
        env, first, pid = await begun(make)
        template = int(Path(f"/proc/{pid}/stat").read_text().split()[3])
        os.kill(template, signal.SIGKILL)
        assert gone(pid)
        with pytest.raises(EnvironmentFailedError, match="its process ended"):
            await env.step("go")
        assert gone(template)
        assert (await begun(make))[1] == first

    asyncio.run(work())


def test_a_template_ends_with_the_function_that_makes_episodes() -> None:
    pid = asyncio.run(begun(processes()))[2]
    template = int(Path(f"/proc/{pid}/stat").read_text().split()[3])
    gc.collect()
    assert gone(template)
    assert gone(pid)


RUN = """
import asyncio, sys
from roll.config.sections.environment import EnvironmentConfig
from roll.envs.loading import load_env
async def work():
    name = "tests.unit.envs.hostile_envs:Hostile"
    env = load_env("e", EnvironmentConfig(env=name, process=True))()
    _, info = await env.reset(seed=1)
    print(info["pid"], flush=True)
    await env.step("loop")
asyncio.run(work())
"""


def test_episodes_die_with_their_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    assert gone(pid)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"env": "tests.nowhere:Env"}, r"no module named 'tests.nowhere'"),
        (
            {"env": "tests.nowhere:Env", "python": sys.executable},
            r"ModuleNotFoundError: No module named 'tests.nowhere'; install it there \(",
        ),
        ({"python": "/no/python"}, r"environments.echo.python: /no/python is no program"),
        ({"python": "/bin/false"}, r"ended with code 1 while it imported the environment"),
        ({"env": "frozen_lake", "python": sys.executable}, r"frozen_lake is built in"),
        ({"adapter": {"show": "ansi"}}, r"environments.echo.adapter: .* has no adapter"),
    ],
)
def test_mistakes_show_before_any_episode(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processes(**config)


def test_python_without_processes_is_refused() -> None:
    with pytest.raises(ValueError, match="drop `process: false`"):
        EnvironmentConfig(env="a:B", python="python3", process=False)


def test_built_in_environments_may_have_processes() -> None:
    make = load_env("lake", EnvironmentConfig(env="frozen_lake", process=True))
    assert isinstance(make, EnvProcesses)
    here = load_env("lake", EnvironmentConfig(env="frozen_lake"))()
    assert tuple(asyncio.run(make().reset(seed=3))) == here.reset(seed=3)
