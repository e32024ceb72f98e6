"""Learning-rate schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.sections.training import OptimizerConfig
from roll.strategy.training.schedule import Schedule, lr_at


def rates(total: int, **settings: object) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, **settings})
    return [lr_at(step, config, total) for step in range(total)]


def test_constant_stays_at_the_peak() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warmup_is_linear_and_its_first_step_already_trains() -> None:
    assert rates(5, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_decay_reaches_its_floor_at_the_last_step() -> None:
    assert rates(5, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates(5, schedule="linear", min_lr_ratio=0.2)[-1] == pytest.approx(0.2)


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    assert rates(5, schedule="cosine") == pytest.approx(
        [1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6
    )
    assert rates(7, schedule="cosine", warmup_steps=2)[4] == pytest.approx(0.5)


def test_steps_after_the_last_stay_at_the_floor() -> None:
    config = OptimizerConfig(lr=1.0, schedule="linear", min_lr_ratio=0.1)
    assert lr_at(50, config, 5) == pytest.approx(0.1)


def test_decay_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="'cosine' needs the total number"):
        lr_at(0, OptimizerConfig(schedule="cosine"), None)


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 20),
    st.integers(1, 40),
    st.floats(0, 1),
)
def test_the_rate_rises_once_then_falls_and_stays_in_bounds(
    schedule: str, warmup: int, total: int, floor: float
) -> None:
    values = rates(total, schedule=schedule, warmup_steps=warmup, min_lr_ratio=floor)
    peak = min(warmup, total - 1)
    assert values[: peak + 1] == sorted(values[: peak + 1])
    assert values[peak:] == sorted(values[peak:], reverse=True)
    assert all(0 <= value <= 1 for value in values)


def test_a_schedule_counts_updates_and_goes_on_from_any() -> None:
    config = OptimizerConfig.model_validate({"lr": 1.0, "schedule": "linear"})
    schedule = Schedule(config, 5)
    assert [schedule.advance() for _ in range(5)] == rates(5, schedule="linear")
    schedule.updates = 2
    assert schedule.advance() == rates(5, schedule="linear")[2]
