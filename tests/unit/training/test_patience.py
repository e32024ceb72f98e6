"""When validations that no longer improve end a run."""

from __future__ import annotations

import json
import math

import pytest

from roll.config.sections.lifecycle import StopConfig
from roll.output_dir.patience import Patience

LOSS, REWARD = "val/t/loss", "val/t/mean@1"


def ends_at(values: list[float], metric: str = LOSS, **settings: object) -> int | None:
    """Number of values after which the run ends; the state is saved and read after each."""
    config = StopConfig.model_validate({"metric": metric, "patience": 2, **settings})
    patience = Patience(config, {})
    for step, value in enumerate(values):
        patience = Patience(config, json.loads(json.dumps(patience.state)))
        patience.see(step, {metric: value, "other": 1.0})
        if patience.end is not None:
            return step + 1
    return None


@pytest.mark.parametrize(
    ("values", "end"),
    [
        ([3.0, 2.0, 1.0, 0.5, 0.2], None),
        ([3.0, 2.0, 2.5, 2.1, 1.0], 4),
        ([3.0, 2.0, 2.5, 1.0, 1.1, 1.1], 6),
        ([3.0, 3.0, 3.0], 3),
        ([3.0, math.nan, math.inf], 3),
        ([math.nan, 3.0, 2.0, 1.0], None),
        ([math.nan, math.nan], 2),
    ],
)
def test_a_run_ends_after_so_many_values_that_are_not_better(
    values: list[float], end: int | None
) -> None:
    assert ends_at(values) == end


def test_the_direction_follows_from_the_metric_unless_it_is_told() -> None:
    rising = [1.0, 2.0, 3.0, 4.0]
    assert ends_at(rising) == 3
    assert ends_at(rising, REWARD) is None
    assert ends_at(rising, higher_is_better=True) is None
    assert ends_at(rising, REWARD, higher_is_better=False) == 3


def test_small_changes_do_not_count_and_do_not_add_up_to_nothing() -> None:
    falling = [3.0, 2.9, 2.8, 2.7, 2.6]
    assert ends_at(falling) is None
    assert ends_at(falling, min_change=0.5) == 3
    assert ends_at(falling, min_change=0.15) is None  # compared with the best, not with the last


def test_nothing_is_counted_without_a_value_or_without_a_setting() -> None:
    config = StopConfig(metric=LOSS, patience=1)
    patience = Patience(config, {})
    for step in range(5):
        patience.see(step, {"other": 1.0})
    assert patience.end is None
    patience = Patience(None, Patience(config, {}).state)
    patience.see(1, {LOSS: 1.0})
    assert (patience.end, patience.state) == (None, {})


def test_the_reason_names_metric_best_value_and_key() -> None:
    patience = Patience(StopConfig(metric=LOSS, patience=1), {})
    patience.see(10, {LOSS: 0.25})
    patience.see(20, {LOSS: 0.5})
    assert patience.end == (
        "val/t/loss has not improved in 1 validation (best 0.25 after 10 steps; validation.stop)"
    )


def test_another_metric_and_more_patience_begin_anew_and_go_on() -> None:
    patience = Patience(StopConfig(metric=LOSS, patience=1), {})
    for step, value in enumerate((1.0, 2.0)):
        patience.see(step, {LOSS: value})
    assert patience.end is not None
    assert Patience(StopConfig(metric=LOSS, patience=2), patience.state).end is None
    assert Patience(StopConfig(metric=REWARD, patience=1), patience.state).end is None
