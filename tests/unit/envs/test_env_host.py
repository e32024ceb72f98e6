"""Environments in their host: whatever they do, every episode has an end that says why."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import torch

from roll.config.sections.environment import EnvironmentConfig
from roll.core.errors import ConfigError, EnvironmentFailedError, HostSpentError
from roll.core.types import Message
from roll.data.chat.turns import Turns
from roll.envs.host import EnvHost
from roll.envs.loading import load_env
from roll.envs.observed import Observed
from tests.tiny import char_tokenizer
from tests.unit.data.test_chat_templates import settings_of


class Echo:
    """Says what it hears; the third turn ends the episode. `script` replaces single methods."""

    def __init__(self, **script: Callable[..., Any]) -> None:
        self.script = script
        self.turns = 0
        self.closed = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if "reset" in self.script:
            return self.script["reset"](seed, options)
        return f"seed {seed}", {"state": 1}

    def step(self, action: str) -> Any:
        self.turns += 1
        if "step" in self.script:
            return self.script["step"](action)
        return f"you said {action}", 0.5, self.turns == 3, False, {"turn": self.turns, "why": "x"}

    def close(self) -> None:
        self.closed += 1
        if "close" in self.script:
            self.script["close"]()


class Waiting(Echo):
    """The same, `async`."""

    async def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        await asyncio.sleep(0)
        return super().reset(seed=seed, options=options)

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        return super().step(action)

    async def close(self) -> None:  # type: ignore[override]
        super().close()


def played(work: Callable[[EnvHost], Coroutine[Any, Any, Any]], env: Any, **config: Any) -> Any:
    """What `work` returns with a host of environments that are all `env`."""

    async def main() -> Any:
        host = EnvHost(
            "echo",
            EnvironmentConfig(env="echo", **config),
            env if callable(env) else lambda: env,
            Turns(char_tokenizer(), settings_of(), frozenset({1})),
        )
        try:
            return await asyncio.wait_for(work(host), 20)
        finally:
            await host.shut()

    return asyncio.run(main())


async def whole(host: EnvHost) -> list[Observed]:
    """All answers of an episode."""
    seen = [await host.open("e", 7, {"prompt": "p"})]
    while not seen[-1].over:
        seen.append(await host.act("e", "go", 1))
    await host.close("e")
    return seen


@pytest.mark.parametrize("kind", [Echo, Waiting])
def test_an_episode_runs_from_reset_to_close(kind: type[Echo]) -> None:
    env = kind()
    first, *rest = played(whole, env)
    read = char_tokenizer().decode
    assert read(first.tokens) == "<user>seed 7<assistant>"
    assert (first.text, first.state, first.reward) == (read(first.tokens), "1", 0.0)
    assert [one.reward for one in rest] == [0.5] * 3
    assert read(rest[0].tokens) == "<user>you said go<assistant>"
    assert not rest[-1].tokens, "nobody reads what comes after the end"
    assert rest[-1].terminated
    assert rest[-1].info == {"turn": 3.0}
    assert env.closed == 1


def test_the_row_of_a_task_comes_as_options() -> None:
    seen = []

    def reset(seed: Any, options: Any) -> Any:
        seen.append((seed, options))
        return "go", {}

    env = Echo(reset=reset)
    played(lambda host: host.open("e", 3, {"answer": "4"}), env)
    assert seen == [(3, {"answer": "4"})]


def test_messages_are_rendered_by_their_roles() -> None:
    env = Echo(
        reset=lambda seed, options: ([{"role": "user", "content": "a"}, Message("user", "b")], {})
    )
    first = played(lambda host: host.open("e", 3, {}), env)
    assert char_tokenizer().decode(first.tokens) == "<user>a<user>b<assistant>"


@pytest.mark.parametrize(("max_turns", "asked"), [(1, [0]), (2, [1]), (3, [2]), (9, [])])
def test_the_last_word_is_asked_for_before_the_last_turn(max_turns: int, asked: list[int]) -> None:
    seen = played(whole, Echo(), max_turns=max_turns, last_word="now")
    texts = [char_tokenizer().decode(one.tokens) for one in seen[:-1]]
    assert [i for i, text in enumerate(texts) if text.endswith("now<assistant>")] == asked
    assert texts[0].startswith("<user>seed 7")


class Odd:
    """Value that has no truth."""

    def __bool__(self) -> bool:
        raise RuntimeError("odd truth")


class OddInfo(dict[str, Any]):
    """Dictionary without items."""

    def items(self) -> Any:
        raise LookupError("odd items")


def raising(*_: Any) -> Any:
    raise ValueError("the board is broken")


def leaving(*_: Any) -> Any:
    raise SystemExit(3)


class PanicError(BaseException):
    """What libraries in Rust raise, such as polars."""


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def error_of(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def cancelled(*_: Any) -> Any:
    raise asyncio.CancelledError("lost")


def cancelled_elsewhere(*_: Any) -> Any:
    raise concurrent.futures.CancelledError


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"reset": raising}, r"'echo': reset raised ValueError: the board is broken"),
        ({"step": raising}, r"step raised ValueError: the board is broken"),
        ({"step": leaving}, r"step raised SystemExit: 3"),
        ({"step": error_of(PanicError("index"))}, "step raised PanicError: index"),
        ({"step": error_of(KeyboardInterrupt())}, "step raised KeyboardInterrupt"),
        ({"reset": error_of(SilentError())}, "raised SilentError: its text cannot be made"),
        (
            {"step": error_of(ValueError("x" * 10**6))},
            r"raised ValueError: x{2000} \.\.\. x{2000}$",
        ),
        ({"step": error_of(StopIteration())}, "step raised .*StopIteration"),
        ({"step": cancelled}, r"step raised CancelledError"),
        ({"reset": cancelled_elsewhere}, r"reset raised CancelledError"),
        ({"reset": lambda *_: "go"}, r"result of reset is wrong: expected \(observation, info\)"),
        ({"reset": lambda *_: (None, {})}, r"an observation must be a text or messages"),
        ({"step": lambda _: ("go", 1.0, True)}, r"result of step is wrong: expected"),
        ({"step": lambda _: ("go", float("nan"), False, False, {})}, "a finite number, found nan"),
        (
            {"step": lambda _: ("go", 1e39, False, False, {})},
            "the reward must lie between -1e.15 and",
        ),
        ({"step": lambda _: ("go", "much", False, False, {})}, "a finite number, found 'much'"),
        ({"step": lambda _: ("go", None, False, False, {})}, "a finite number, found None"),
        ({"step": lambda _: (b"go", 0.0, False, False, {})}, "text or messages, found bytes b'go'"),
        ({"step": lambda _: ("x" * 5 * 10**6, 0.0, False, False, {})}, "at most 4,194,304 char"),
        ({"step": lambda _: ("go", 0.0, False, False, None)}, "`info` must be a dict"),
        ({"step": lambda _: (3, 0.0, False, False, {})}, "found int 3"),
        ({"step": lambda _: ("go", 10**400, False, False, {})}, "a finite number, found 1000"),
        ({"step": lambda _: ("go", 10**5000, False, False, {})}, "found int that cannot be shown"),
        ({"step": lambda _: ("go", 0.0, Odd(), False, {})}, r"step is wrong: .*odd truth"),
        ({"step": lambda _: ("go", 0.0, False, False, OddInfo(a=1))}, "is wrong: .*odd items"),
        ({"reset": lambda *_: (10**5000, {})}, "result of reset is wrong: Exceeds the limit"),
    ],
)
@pytest.mark.parametrize("kind", [Echo, Waiting])
def test_what_an_environment_does_wrong_is_said(
    kind: type[Echo], script: dict[str, Any], message: str
) -> None:
    env = kind(**script)
    with pytest.raises(EnvironmentFailedError, match=message):
        played(whole, env)
    assert env.closed == 1, "it is closed all the same"


def test_what_is_no_environment_is_said() -> None:
    class Half:
        def reset(self) -> None: ...

    for made, message in ((None, "no method `reset`"), (Half(), "no method `step`")):
        with pytest.raises(EnvironmentFailedError, match=f"making the environment .*{message}"):
            played(lambda host: host.open("e", 1, {}), lambda made=made: made)


def test_a_listen_that_means_another_thing_fails_its_episode() -> None:
    class Server(Echo):
        def listen(self) -> None: ...

    with pytest.raises(EnvironmentFailedError, match=r"listen raised TypeError: .*; a method of"):
        played(whole, Server())


def test_an_end_by_stop_iteration_does_not_wait_for_the_time_limit() -> None:
    rows = iter(["one"])
    env = Echo(step=lambda _: (next(rows), 0.0, False, False, {}))
    begun_s = time.monotonic()
    with pytest.raises(EnvironmentFailedError, match="step raised StopIteration"):
        played(whole, env, step_timeout_s=15)
    assert time.monotonic() - begun_s < 10


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    info = {
        "won": np.bool_(True),
        "n": np.int64(3),
        "t": torch.tensor(0.5),
        "grid": np.ones((2, 2)),
    }
    env = Echo(step=lambda _: ("", np.float32(0.5), np.bool_(True), torch.tensor(False), info))
    end = played(whole, env)[-1]
    assert (end.reward, end.terminated, end.truncated) == (0.5, True, False)
    assert end.info == {"won": 1.0, "n": 3.0, "t": 0.5}


def test_only_numbers_that_are_finite_as_floats_are_kept_of_info() -> None:
    info = {
        "huge": 10**400,
        "large": 1e308,
        "inf": float("inf"),
        "nan": float("nan"),
        "won": True,
        "text": "x",
    }
    end = ("", -(2**40), True, False, {**info, "a": 2})
    env = Echo(reset=lambda *_: ("go", info), step=lambda _: end)
    first, last = played(whole, env)
    assert first.info == {"won": 1.0}
    assert last.info == {"won": 1.0, "a": 2.0}
    assert last.reward == -(2.0**40)


def test_an_environment_that_hangs_ends_at_its_limit_and_others_go_on() -> None:
    let_go = threading.Event()
    slow = Echo(step=lambda _: let_go.wait(30))
    envs = iter([slow, Echo()])

    async def both(host: EnvHost) -> list[Observed]:
        await host.open("slow", 1, {})
        begun = time.monotonic()
        with pytest.raises(EnvironmentFailedError, match=r"step did not end within 1 s"):
            await host.act("slow", "go", 1)
        assert time.monotonic() - begun < 5
        return await whole(host)

    try:
        assert played(both, lambda: next(envs), step_timeout_s=1)[-1].terminated
    finally:
        let_go.set()


def test_an_async_environment_that_blocks_its_loop_is_told_from_one_that_waits() -> None:
    class Blocking(Waiting):
        async def step(self, action: str) -> Any:
            time.sleep(1.5)

    with pytest.raises(HostSpentError, match="no other coroutine had a turn"):
        played(whole, Blocking(), step_timeout_s=0.2)


@pytest.mark.parametrize("kind", [Echo, Waiting])
def test_a_call_whose_caller_gives_it_up_is_no_failure(kind: type[Echo]) -> None:
    class Slow(Waiting):
        async def step(self, action: str) -> Any:
            await asyncio.sleep(9)

    let_go = threading.Event()
    env = Slow() if kind is Waiting else Echo(step=lambda _: let_go.wait(9))

    async def work(host: EnvHost) -> None:
        await host.open("e", 1, {})
        acting = asyncio.ensure_future(host.act("e", "go", 1))
        await asyncio.sleep(0.05)
        acting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acting

    try:
        played(work, env)
    finally:
        let_go.set()


def test_a_failure_to_close_costs_no_episode() -> None:
    assert played(whole, Echo(close=raising))[-1].terminated


def test_an_episode_that_nobody_opened_here_is_refused() -> None:
    with pytest.raises(EnvironmentFailedError, match="does not run episode e; its worker has been"):
        played(lambda host: host.act("e", "go", 1), Echo())


@pytest.mark.parametrize("stage", ["make", "reset"])
def test_an_episode_that_is_given_up_while_it_begins_leaves_no_environment(stage: str) -> None:
    """The policy gives up spare episodes, and those of stale groups, whose calls run on here."""
    begun, let_go, made, order = threading.Event(), threading.Event(), list[Echo](), list[str]()

    def reset(seed: Any, options: Any) -> Any:
        if stage == "reset":
            begun.set()
            let_go.wait(10)
        order.append("reset")
        return "go", {}

    def make() -> Echo:
        if stage == "make":
            begun.set()
            let_go.wait(10)
        made.append(Echo(reset=reset, close=lambda: order.append("close")))
        return made[-1]

    async def work(host: EnvHost) -> list[Any]:
        opened = [asyncio.ensure_future(host.open(name, 1, {})) for name in ("runs", "waits")]
        await asyncio.to_thread(begun.wait, 10)
        for name in ("runs", "waits"):
            await host.close(name)
        let_go.set()
        found = await asyncio.gather(*opened, return_exceptions=True)
        assert [env.closed for env in made] == [1], "before the host itself ends"
        return found

    ended = played(work, make, concurrency=1)
    refused = ended if stage == "make" else ended[1:]
    assert all("was ended before it began" in str(one) for one in refused)
    assert order == (["close"] if stage == "make" else ["reset", "close"])


@pytest.mark.parametrize("kind", [Echo, Waiting])
def test_an_environment_that_is_made_too_late_is_closed(kind: type[Echo]) -> None:
    let_go, env = threading.Event(), kind()

    def make() -> Echo:
        let_go.wait(10)
        return env

    async def work(host: EnvHost) -> None:
        with pytest.raises(EnvironmentFailedError, match=r"making the .* within 0\.05 s"):
            await host.open("e", 1, {})
        assert not env.closed
        let_go.set()
        while not env.closed:
            await asyncio.sleep(0.001)

    played(work, make, reset_timeout_s=0.05)
    assert env.closed == 1


def test_no_more_calls_run_at_once_than_allowed() -> None:
    lock, running, peak = threading.Lock(), [0], [0]

    def step(_: str) -> Any:
        with lock:
            running[0] += 1
            peak[0] = max(peak[0], running[0])
        time.sleep(0.01)
        with lock:
            running[0] -= 1
        return "go", 0.0, True, False, {}

    async def many(host: EnvHost) -> None:
        await asyncio.gather(*(host.open(f"e{i}", i, {}) for i in range(12)))
        await asyncio.gather(*(host.act(f"e{i}", "go", 1) for i in range(12)))

    played(many, lambda: Echo(step=step), concurrency=3)
    assert peak[0] == 3


def test_a_host_counts_what_processes_do_wrong_as_failures_of_episodes() -> None:
    async def work(host: EnvHost) -> None:
        for action, message in (("hang", "step did not end within 1 s"), ("kill", "SIGKILL")):
            await host.open("bad", 1, {})
            with pytest.raises(EnvironmentFailedError, match=message):
                await host.act("bad", action, 1)
            await host.close("bad")

    settings = EnvironmentConfig(env="tests.unit.envs.hostile_envs:Hostile", process=True)
    played(work, load_env("echo", settings), step_timeout_s=1)


@pytest.mark.parametrize(
    ("env", "kwargs", "message"),
    [
        ("frozen_lak", {}, "unknown environment 'frozen_lak'; did you mean 'frozen_lake'"),
        ("frozen_lake", {"sise": 4}, "environments.lake.kwargs: .*'sise'.*; its arguments: size"),
        ("tests.nowhere:Env", {}, "no module named"),
        ("tests.unit.envs.test_env_host:ERRORS", {}, "has no 'ERRORS'"),
        ("roll.core.types:Message", {"role": "a", "content": "b"}, "has no method `reset`"),
    ],
)
def test_an_environment_that_cannot_work_is_refused(
    env: str, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_env("lake", EnvironmentConfig(env=env, kwargs=kwargs))
