"""`check_env` and `roll env try` find environments that break a rule, and only those."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from roll.cli import app
from roll.envs.contract import check_env


class Doors:
    """One of three doors leads out; a wrong one ends the episode."""

    def __init__(self, **script: Callable[..., Any]) -> None:
        self.script = script
        self.closed = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.dice = random.Random(seed)
        self.right = str(self.dice.randint(1, 3))
        if "reset" in self.script:
            return self.script["reset"](self)
        return f"Before you are doors. One of the two, {self.right} or 4, leads out.", {}

    def step(self, action: str) -> Any:
        if "step" in self.script:
            return self.script["step"](self, action)
        won = self.right in action
        return "A wall.", float(won), won, False, {"success": won, "state": "doors"}

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed += 1
        if "close" in self.script:
            self.script["close"](self)


class WaitingDoors(Doors):
    """The same, `async`."""

    async def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(seed=seed, options=options)

    async def step(self, action: str) -> Any:
        return super().step(action)


class PanicError(BaseException):
    """What libraries in Rust raise."""


def looking() -> Callable[[str], str]:
    """A policy that reads which door it is."""
    return lambda said: (re.findall(r"\d", said) or ["1"])[0]


@pytest.mark.parametrize("kind", [Doors, WaitingDoors])
def test_an_environment_that_keeps_the_rules_passes(kind: type[Doors]) -> None:
    trial = check_env(kind, solver=looking, reward_range=(0, 1), seeds=range(8))
    assert (trial.tasks, trial.seeds) == (3, 8)
    assert [one.success for one in trial.episodes["solver"]] == [1.0] * 8
    assert [len(one.turns) for one in trial.episodes["empty"]] == [16] * 8
    assert trial.episodes["random"][0].actions != trial.episodes["random"][1].actions


count = itertools.count()


def counting(env: Doors, action: str) -> Any:
    return f"turn {next(count)}", 0.0, False, False, {}


def raising(env: Doors, action: str) -> Any:
    if "9999" in action:
        int(action)
    return "go", 0.0, False, False, {}


def saying(*answer: Any) -> Callable[..., Any]:
    return lambda env, *_: answer


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"step": counting}, r"determinism, seed 0: turn 1, .*follow from `seed` alone"),
        ({"reset": lambda _: (f"task {next(count)}", {})}, "use `seed` alone"),
        (
            {"step": raising},
            r"hostile action \(a very long number\), seed 0: step raised ValueError",
        ),
        ({"reset": saying("go")}, r"reset: expected \(observation, info\), found"),
        ({"reset": saying(None, {})}, "an observation must be a text or messages"),
        ({"step": saying("go", 1.0, True)}, "step: expected gymnasium's five results"),
        ({"step": saying("go", "much", False, False, {})}, "finite number, found 'much'"),
        ({"step": saying("go", float("nan"), False, False, {})}, "finite number, found nan"),
        ({"step": saying("go", 0.0, False, False, [])}, "`info` must be a dict, found list"),
        ({"step": saying("go", 0.0, False, False, {"n": float("inf")})}, "is not finite"),
        ({"step": saying("go", 0.0, False, False, {"state": [1]})}, "text or a whole number"),
        ({"step": saying("go", 10**400, False, False, {})}, "finite number, found 1000"),
        ({"step": saying("go", 1e39, False, False, {})}, "step: the reward must lie between"),
        ({"step": saying("go", 10**5000, False, False, {})}, "found int that cannot be shown"),
        ({"step": saying("go", 0.0, False, False, {"n": 10**400})}, "is not finite"),
        ({"step": saying(10**5000, 0.0, False, False, {})}, "step: Exceeds the limit"),
        ({"step": saying("go", 2.0, True, False, {})}, "is 2, outside of 0 to 1"),
        ({"step": saying("go", 0.0, True, False, {})}, "solver policy.*: not solved after 1 turns"),
        ({"close": lambda env: env.nothing}, "close raised AttributeError"),
        ({"step": saying("x" * 5 * 10**6, 0.0, False, False, {})}, "at most 4,194,304 characters"),
    ],
)
def test_each_broken_rule_is_told(script: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_env(Doors, kwargs=script, solver=looking, reward_range=(0, 1), seeds=range(2))


@pytest.mark.parametrize("kind", [Doors, WaitingDoors])
@pytest.mark.parametrize("error", [KeyboardInterrupt, StopIteration, PanicError])
def test_an_error_that_no_loop_passes_on_is_told(
    kind: type[Doors], error: type[BaseException]
) -> None:
    def step(env: Doors, action: str) -> Any:
        raise error("index")

    with pytest.raises(AssertionError, match=rf"step raised .*{error.__name__}"):
        check_env(kind, kwargs={"step": step}, seeds=[1], timeout_s=10)


def test_what_is_no_environment_is_told() -> None:
    with pytest.raises(AssertionError, match=r"making it: NoneType None has no method `reset`"):
        check_env(lambda: None, seeds=[1])  # type: ignore[arg-type,return-value]


def test_arrays_in_info_are_no_difference_and_numbers_of_numpy_are_numbers() -> None:
    def step(env: Doors, action: str) -> Any:
        return (
            "go",
            np.float32(1),
            np.bool_(True),
            False,
            {"board": np.ones(9), "success": np.True_},
        )

    trial = check_env(Doors, kwargs={"step": step}, seeds=[1])
    assert [one.success for one in trial.episodes["random"]] == [1.0]


def test_a_broken_rule_at_one_seed_leaves_the_others_paired_with_their_own_episodes() -> None:
    def reset(env: Any) -> Any:
        if env.seed == 0:
            raise ValueError("no door")
        return f"door {env.seed}", {}

    class Numbered(Doors):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.seed = seed
            return super().reset(seed=seed, options=options)

    with pytest.raises(AssertionError) as broken:
        check_env(Numbered, kwargs={"reset": reset}, seeds=range(3))
    assert "the same seed begins with" not in str(broken.value)
    assert {line.partition(": ")[2] for line in str(broken.value).splitlines()} == {
        "reset raised ValueError: no door"
    }


def test_state_shared_by_episodes_is_found() -> None:
    shared = []

    def step(env: Doors, action: str) -> Any:
        shared.append(env)
        return f"{sum(each is not env for each in shared[-2:])}", 0.0, False, False, {}

    with pytest.raises(AssertionError, match="determinism"):
        check_env(Doors, kwargs={"step": step}, seeds=[1])


def test_a_call_that_hangs_ends_at_the_limit() -> None:
    let_go = threading.Event()
    try:
        kwargs = {"step": lambda *_: let_go.wait(30)}
        with pytest.raises(AssertionError, match=r"step did not end within 0.05 s") as broken:
            check_env(Doors, kwargs=kwargs, seeds=[1], timeout_s=0.05)
        assert "was not tried, because 8 calls have not returned" in str(broken.value)
        assert "making it did not end" not in str(broken.value)
    finally:
        let_go.set()


def test_the_command_prints_a_table_and_what_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Path(__file__).read_text()
    kept = text[: text.index("class WaitingDoors")]
    (tmp_path / "my_doors.py").write_text(
        kept + "class Leaving(Doors):\n    def step(self, action): raise SystemExit(3)\n"
    )
    monkeypatch.chdir(tmp_path)
    good = CliRunner().invoke(app, ["env", "try", "my_doors:Doors", "--seeds", "3"])
    assert good.exit_code == 0, good.output
    assert "empty" in good.output
    assert "3 seeds" in good.output
    bad = CliRunner().invoke(app, ["env", "try", "my_doors:Leaving"])
    assert bad.exit_code == 1
    assert "broken: empty policy, seed 0: step raised SystemExit: 3" in bad.output
    unknown = CliRunner().invoke(app, ["env", "try", "frozen_lak"])
    assert unknown.exit_code == 2
    assert "did you mean 'frozen_lake'" in unknown.output
    wrong = CliRunner().invoke(app, ["env", "try", "frozen_lake", "--kwargs", "[1]"])
    assert (wrong.exit_code, "expected a JSON object" in wrong.output) == (2, True)
