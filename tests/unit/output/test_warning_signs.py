"""A dead run does not look healthy: what the console says when it begins, and at the end."""

from __future__ import annotations

from typing import Any

import pytest
from rich.text import Text

from roll.output_dir.summary import summarize
from roll.output_dir.trackers import step_line
from roll.output_dir.warning_signs import Lookout

HEALTHY: dict[str, Any] = {
    "time/step_s": 1.0,
    "loss/policy": 0.01,
    "loss/total": 0.01,
    "grad_norm": 0.3,
    "groups/equal_rewards_fraction": 0.5,
    "advantage/abs_mean": 0.8,
    "truncated_fraction": 0.1,
    "skipped_steps": 0.0,
    "reward/mean": 0.5,
}
DEAD: dict[str, dict[str, float]] = {
    "equal rewards": {"groups/equal_rewards_fraction": 1.0, "advantage/abs_mean": 0.0},
    "cut off": {"truncated_fraction": 1.0},
    "skip": {"skipped_steps": 1.0},
    "not finite": {"loss/total": float("nan")},
}


@pytest.mark.parametrize("word", DEAD)
def test_a_sign_is_said_once_when_it_begins_and_when_it_is_over(word: str) -> None:
    lookout = Lookout()
    said = [lookout.look(HEALTHY | change) for change in ({}, DEAD[word], DEAD[word], {}, {})]
    assert [len(each) for each in said] == [0, 1, 0, 1, 0]
    assert word in said[1][0]
    assert said[3][0].startswith("no longer")


def test_equal_rewards_are_no_sign_where_something_else_teaches() -> None:
    critic = HEALTHY | {"groups/equal_rewards_fraction": 1.0}
    teacher = {name: value for name, value in critic.items() if name != "loss/policy"}
    assert not Lookout().look(critic)
    assert not Lookout().look(teacher | {"advantage/abs_mean": 0.0})
    assert not Lookout().look({"val/t/mean@1": 0.5, "truncated_fraction": 1.0})


def of_run(*records: dict[str, Any]) -> str:
    numbered = [{"step": number} | record for number, record in enumerate(records)]
    found: str = summarize(numbered, status="finished", wall_s=1.0)["verdict"]
    return found


def test_the_verdict_of_a_dead_run_says_so() -> None:
    everything = DEAD["equal rewards"] | DEAD["cut off"] | DEAD["skip"]
    said = of_run(*[HEALTHY | everything] * 5)
    assert said.startswith("This run went wrong: in 5 of 5 steps all groups had equal rewards")
    assert "every response was cut off" in said
    assert "updates were skipped" in said


def test_the_verdict_of_a_healthy_run_is_its_validation() -> None:
    first, last = {"val/t/mean@1": 0.25}, {"val/t/mean@1": 0.75}
    assert of_run(HEALTHY | first, HEALTHY, last) == "val/t/mean@1 went from 0.250 to 0.750."
    some = of_run(HEALTHY | first, HEALTHY, HEALTHY | DEAD["cut off"], last)
    assert some.endswith("to 0.750; in 1 of 3 steps every response was cut off.")
    assert "without a validation" in of_run(HEALTHY)
    assert of_run() == "no step was done."


@pytest.mark.parametrize(
    ("first", "last", "told"),
    [(0.02, 0.0, "0.020 to 0.000"), (0.0, 0.0, "0.000 to 0.000"), (0.0, 0.1, ""), (1.0, 1.0, "")],
)
def test_a_score_that_rises_without_more_samples_that_pass_is_told(
    first: float, last: float, told: str
) -> None:
    score = [{"val/t/mean@1": value} for value in (0.11, 0.15)]
    passed = [{"val/t/pass@1": value} for value in (first, last)]
    said = of_run(HEALTHY | score[0] | passed[0], HEALTHY | score[1] | passed[1])
    assert said.startswith("val/t/mean@1 went from 0.110 to 0.150")
    assert (f"but pass@1 from {told}: not more samples" in said) == bool(told)


def test_the_parts_of_a_reward_are_in_the_line_of_a_step() -> None:
    parts = {"reward/mine/mean": 0.5, "reward/mine/right": 0.4, "reward/std": 0.1}
    parts |= {"reward/mine/error_rate": 0.0, "reward/mine/timeout_rate": 0.0}
    line = step_line(3, 60, HEALTHY | parts | {"reward/tag/a/mean": 0.5})
    assert "reward 0.500  (mine/right 0.400)  loss" in line, "the only reward is the mean"
    other = step_line(3, 60, HEALTHY | parts | {"reward/other/mean": 0.25})
    assert "(mine 0.500, mine/right 0.400, other 0.250)" in other
    weighted = step_line(3, 60, HEALTHY | parts | {"reward/mine/mean": 5.0})
    assert "(mine 5.000, mine/right 0.400)" in weighted
    assert "(" not in step_line(3, 60, HEALTHY | {"reward/math/mean": 0.5})


def test_names_with_brackets_are_shown_as_they_are() -> None:
    record = HEALTHY | {"val/[x]/mean@1": 0.5, "reward/[/b]/mean": 0.5, "reward/[/b]/part": 0.25}
    line = Text.from_markup(step_line(3, 60, record)).plain
    assert "val/[x]/mean@1 0.500" in line
    assert "([/b] 0.500, [/b]/part 0.250)" in line


def test_a_mismatch_says_how_old_the_tokens_are() -> None:
    stale = HEALTHY | {"mismatch/logprob_abs_max": 0.37, "staleness/max": 2.0}
    assert "mismatch 3.7e-01  (of tokens up to 2 versions old)" in step_line(3, 60, stale)
    assert "old" not in step_line(3, 60, stale | {"staleness/max": 0.0})
