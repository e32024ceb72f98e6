"""Tools of agents whose programs run on other hosts."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from roll.core.errors import ConfigError, EnvironmentFailedError
from roll.envs.built_in.code.fix_code import FixCode
from roll.envs.tools.loading import load_kits
from roll.sandbox import Sandbox
from roll.sandbox.remote.messages import TOKEN_VARIABLE
from tests.sandbox.serving import TOKEN, Served, as_piston, as_sandbox_fusion, served
from tests.services import serving_beside
from tests.unit.tools.test_tools import opened

pytestmark = pytest.mark.filterwarnings("ignore:.*level `none`")


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sandbox = Sandbox("none", workers=2)
    with sandbox, served(sandbox) as running:
        yield running


def at(*urls: str, **options: Any) -> dict[str, Any]:
    return {"level": "remote", "remote": {"urls": [*urls], **options}}


def test_tools_of_an_episode_share_a_session_at_a_host(server: Served) -> None:
    async def use(tools: Any) -> list[str]:
        said = [
            await tools["python"].call({"code": "x = 20\nprint('made')"}),
            await tools["python"].call({"code": "x + 1"}),
            await tools["write_file"].call({"path": "a/b.txt", "content": "it's\n{x}\n"}),
            await tools["shell"].call({"command": "cat a/b.txt given.txt"}),
            await tools["read_file"].call({"path": "given.txt"}),
            await tools["list_files"].call({}),
        ]
        assert len(server.server._sessions) == 1
        return said

    files = {"files": {"given.txt": "42"}}
    said = opened(["python", "shell", "files"], use, files, at(server.url))
    assert said[:3] == ["made", "21", "9 characters written"]
    assert said[3:5] == ["it's\n{x}\n42", "42"]
    assert set(said[5].split("\n")) >= {"a/b.txt", "given.txt"}
    assert server.server._sessions == {}


def test_a_lost_host_is_a_failure_of_the_episode() -> None:
    with Sandbox("strict", workers=1) as sandbox, served(sandbox) as short:

        async def use(tools: Any) -> None:
            assert await tools["python"].call({"code": "1 + 1"}) == "2"
            short.stop()
            await tools["python"].call({"code": "1 + 1"})

        with pytest.raises(EnvironmentFailedError, match="the sandbox does not work"):
            opened(["python"], use, None, at(short.url, patience_s=1))


def test_tools_that_the_level_of_a_host_does_not_allow_are_refused(server: Served) -> None:
    async def use(tools: Any) -> str:
        return str(await tools["python"].call({"code": "print(6 * 7)"}))

    with Sandbox("strict", workers=1) as sandbox, served(sandbox) as strict:
        with pytest.raises(ConfigError, match=f"the tools shell need .*{strict.url} has `strict`"):
            opened(["python", "shell"], use, None, at(server.url, strict.url))
        assert opened(["python"], use, None, at(strict.url)) == "42"


@pytest.mark.parametrize(
    ("sandbox", "why"),
    [
        (at("http://h", protocol="piston"), "piston has no sessions, which the tools python need"),
        ({"level": "remote"}, "sandbox: .*`remote` names the hosts"),
        ({"remote": {"urls": ["http://h"]}}, "sandbox: .*`remote` names the hosts"),
        (at("h:8700"), r"sandbox: remote: .*expected http://HOST:PORT"),
        ({"level": "remot"}, "sandbox: level: .*'remote'"),
        ({**at("http://h"), "preload": ["numpy"]}, "options of `roll sandbox serve`"),
    ],
)
def test_settings_that_cannot_work_are_refused(sandbox: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_kits(["python"], sandbox)[0]()


def test_no_host_is_a_mistake_of_the_settings() -> None:
    async def use(tools: Any) -> None: ...

    with pytest.raises(ConfigError, match="the level `remote` does not work"):
        opened(["python"], use, None, at("http://127.0.0.1:1", patience_s=1))


@pytest.mark.parametrize("protocol", ["roll", "sandbox_fusion", "piston"])
def test_programs_are_mended_at_hosts_of_all_protocols(protocol: str, server: Served) -> None:
    others = {"sandbox_fusion": as_sandbox_fusion, "piston": as_piston}
    row = {
        "code": "def add(a, b):\n    return a - b\n",
        "entry": "add",
        "tests": json.dumps([[[1, 2], 3], [[0, 0], 0]]),
    }

    def played(url: str) -> list[tuple[Any, ...]]:
        remote = {"urls": [url], "protocol": protocol}
        env = FixCode(level="remote", remote=remote, cpu_s=2)
        env.reset(seed=1, options=row)
        texts = ("return a * b", "import os; os._exit(0)", "return a + b")
        return [env.step(f"```python\ndef add(a, b):\n    {text}\n```") for text in texts]

    if protocol == "roll":
        wrong, ended, right = played(server.url)
    else:
        with serving_beside(others[protocol]) as url:
            wrong, ended, right = played(url)
    assert wrong[0].startswith("1 of 2 tests pass.")
    assert ended[0] == "0 of 2 tests pass. The program was ended early."
    assert right[:3] == ("2 of 2 tests pass.", 1.0, True)
