"""Alarms name what is wrong with a run, and nothing is wrong with a healthy one."""

from __future__ import annotations

from typing import Any

import pytest

from roll.report.health.alarms import alarms
from roll.report.health.course import Course
from roll.report.health.rules import RULES
from tests.unit.output.scripted_runs import (
    SICK,
    SICK_TOO,
    STEPS,
    WELL,
    Curve,
    flat,
    jump,
    rising,
    run_records,
)

Records = list[dict[str, Any]]


@pytest.mark.parametrize(("illness", "records"), [*SICK.items(), *SICK_TOO.items()])
def test_a_sick_run_is_named_with_its_cause_and_nothing_else(
    illness: str, records: Records
) -> None:
    assert [alarm.rule for alarm in alarms(records, RULES)] == [illness]


@pytest.mark.parametrize("records", WELL.values(), ids=WELL.keys())
def test_a_healthy_run_raises_no_alarm(records: Records) -> None:
    assert alarms(records, RULES) == []


def test_every_rule_has_a_run_that_it_finds() -> None:
    assert {rule.name for rule in RULES} == SICK.keys() | SICK_TOO.keys()


def test_rules_explain_only_rules_that_come_later() -> None:
    names = [rule.name for rule in RULES]
    for place, rule in enumerate(RULES):
        assert set(rule.explains) <= set(names[place + 1 :]), rule.name


def test_an_alarm_says_since_when() -> None:
    (collapse,) = alarms(SICK["entropy_collapse"], RULES)
    assert collapse.since == round(0.3 * STEPS)
    assert "entropy fell by 96 % from step 36 on" in collapse.text


def test_two_illnesses_are_both_named() -> None:
    records = run_records(
        {"truncated_fraction": lambda t: 0.3, "reward/math/error_rate": lambda t: 0.2}
    )
    assert {alarm.rule for alarm in alarms(records, RULES)} == {"truncated", "reward_fails"}


def test_a_condition_holds_since_the_step_after_which_it_never_ends() -> None:
    values = [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    course = Course([{"step": s, "time/step_s": 1.0, "x": v} for s, v in enumerate(values)])
    # Medians of five: the value of a step counts with two neighbours on each side.
    assert course.since_above("x", 1) == 10
    assert course.since_below("x", 0) is None


def test_a_policy_that_a_single_update_broke_is_told_from_a_constant_reward() -> None:
    broken: dict[str, Curve | None] = {
        "reward/mean": lambda t: 0.5 if t == 0 else 0.0,
        "groups/equal_rewards_fraction": lambda t: 0.0 if t == 0 else 1.0,
    }
    (alarm,) = alarms(run_records(broken, held_out=jump(0.5, 0.0, 0.01)), RULES)
    assert alarm.rule == "updates_too_far"
    assert "its reward fell from 0.4" in alarm.text


@pytest.mark.parametrize(("held_out", "raised"), [(flat(0.3), True), (rising(0.3, 0.6), False)])
def test_length_that_is_paid_for_is_an_alarm_if_no_held_out_score_gains_by_it(
    held_out: Curve, raised: bool
) -> None:
    longer = run_records({"response_tokens/mean": rising(120, 900, 1)}, held_out=held_out)
    assert ("length_explosion" in {alarm.rule for alarm in alarms(longer, RULES)}) is raised


def test_a_policy_that_stale_samples_have_ruined_is_not_called_one_with_large_updates() -> None:
    ruined: dict[str, Curve | None] = {
        "reward/mean": jump(0.5, 0.0, 0.6),
        "staleness/mean": flat(7.0),
        "staleness/max": flat(8.0),
        "mismatch/logprob_abs_mean": jump(0.6, 0.002, 0.7),
    }
    found = alarms(run_records(ruined, held_out=flat(0.0)), RULES)
    assert [alarm.rule for alarm in found] == ["stale_samples"]
