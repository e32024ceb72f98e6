"""Programs in other languages than Python, at hosts that run them."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from roll.core.errors import ConfigError
from roll.rewards.api import Reward
from roll.rewards.code.running.languages import LANGUAGES
from roll.sandbox import Job, Limits, Sandbox, SandboxError, Status
from roll.sandbox.remote.dialects import DIALECTS
from tests.sandbox.serving import as_piston, as_sandbox_fusion
from tests.sandbox.test_code_reward import TEXTS, score
from tests.services import serving_beside

OTHERS = {"sandbox_fusion": as_sandbox_fusion, "piston": as_piston}


def judged(protocol: str, language: str, program: str, **kwargs: Any) -> Reward:
    """Score a program at a host; its wall time is what Piston's imitation allows."""
    with serving_beside(OTHERS[protocol]) as url:
        remote = {"urls": [url], "protocol": protocol}
        return score(
            f"```{LANGUAGES[language].labels[0]}\n{program}\n```",
            TEXTS,
            language=language,
            limits={"wall_s": 20},
            sandbox={"level": "remote", "remote": remote, "workers": 2},
            **kwargs,
        )


@pytest.mark.parametrize("protocol", OTHERS)
def test_shell_programs_run_at_hosts_of_others(protocol: str) -> None:
    hello = LANGUAGES["shell"].hello
    assert judged(protocol, "shell", hello).score == 1.0
    assert judged(protocol, "shell", hello.replace("+", "-"), score="share").score == 0.25
    broken = judged(protocol, "shell", f"{hello}\nexit 3")
    assert (broken.score, broken.parts["raised"]) == (0.0, 1.0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("protocol", OTHERS)
def test_programs_are_compiled_at_hosts_of_others(protocol: str) -> None:
    hello = LANGUAGES["cpp"].hello
    assert judged(protocol, "cpp", hello).score == 1.0
    assert judged(protocol, "cpp", hello.replace("a + b", "a - b"), score="share").score == 0.25
    broken = judged(protocol, "cpp", "int main() {", score="first_failure")
    assert broken.score == 0.0
    assert {name for name, value in broken.parts.items() if value} == set()


def test_every_language_has_its_name_at_both() -> None:
    for protocol in OTHERS:
        assert DIALECTS[protocol].languages.keys() == LANGUAGES.keys()
    assert DIALECTS["roll"].languages.keys() == {"python"}


@pytest.mark.parametrize("level", ["namespaces", "landlock", "strict", "none"])
@pytest.mark.filterwarnings("ignore:.*level `none`")
def test_levels_of_this_machine_refuse_them_with_advice(level: str) -> None:
    job = Job("echo 1", language="shell")
    with (
        Sandbox(level, workers=1) as sandbox,
        pytest.raises(ValueError, match=r"'shell' does not run at level .*SandboxFusion and Pis"),
    ):
        sandbox.run_now(job)


def test_hosts_of_roll_refuse_them_before_anything_runs() -> None:
    remote = {"urls": ["http://127.0.0.1:1"]}
    with pytest.raises(ConfigError, match="`roll sandbox serve` run Python only; programs in cpp"):
        score("", TEXTS, language="cpp", sandbox={"level": "remote", "remote": remote})


BUILT = {"code": 1, "signal": None, "stdout": "", "stderr": "main: expected ;", "status": None}
RAN = {"code": 127, "signal": None, "stdout": "", "stderr": "./a.out: not found"}


@pytest.mark.parametrize(
    ("protocol", "answer"),
    [
        ("piston", {"compile": BUILT}),
        ("piston", {"compile": BUILT, "run": RAN}),  # of versions before 2022
        ("piston", {"compile": {**BUILT, "code": None, "signal": "SIGKILL"}}),
        ("sandbox_fusion", {"status": "Failed", "compile_result": BUILT, "run_result": None}),
    ],
)
def test_what_a_compiler_refuses_has_not_run(protocol: str, answer: dict[str, Any]) -> None:
    outcome = DIALECTS[protocol].outcome(answer, Limits(), 1.0)
    assert (outcome.status, outcome.ok, outcome.exit_code) == (Status.NOT_BUILT, False, None)
    assert outcome.stderr == "main: expected ;"


def test_a_compiler_that_a_host_could_not_run_is_no_outcome() -> None:
    answer = {"compile": {**BUILT, "status": "XX", "message": "no space"}}
    with pytest.raises(SandboxError, match="could not compile: no space"):
        DIALECTS["piston"].outcome(answer, Limits(), 1.0)
    lost: dict[str, Any] = {
        "status": "SandboxError",
        "message": "full",
        "compile_result": {},
        "run_result": None,
    }
    with pytest.raises(SandboxError, match="could not run the program: full"):
        DIALECTS["sandbox_fusion"].outcome(lost, Limits(), 1.0)
