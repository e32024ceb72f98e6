"""Learning-rate schedules, and which parameters decay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import optimization

from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.strategy.training import adamw
from roll.strategy.training.schedule import Schedule, lr_at


def rates(total: int, **settings: object) -> list[float]:
    config = AdamWConfig.model_validate({"lr": 1.0, **settings})
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
    config = AdamWConfig(lr=1.0, schedule="linear", min_lr_ratio=0.1)
    assert lr_at(50, config, 5) == pytest.approx(0.1)


def test_decay_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="'cosine' needs the total number"):
        lr_at(0, AdamWConfig(schedule="cosine"), None)


@given(
    st.sampled_from(["constant", "linear", "cosine", "inverse_sqrt", "wsd"]),
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
    config = AdamWConfig.model_validate({"lr": 1.0, "schedule": "linear"})
    schedule = Schedule(config, 5)
    assert [schedule.advance() for _ in range(5)] == rates(5, schedule="linear")
    schedule.updates = 2
    assert schedule.advance() == rates(5, schedule="linear")[2]
    assert schedule.with_peak(3.0) == 3 * rates(5, schedule="linear")[2]


def transformers_rates(make: Callable[..., Any], total: int, **settings: object) -> list[float]:
    """Rates of a schedule of transformers at peak 1. Its step 0 has the rate 0, which trains
    nothing; ours begins with its step 1."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = make(optimizer, **settings)
    found: list[float] = []
    for _ in range(total):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


DECAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "constant": (optimization.get_constant_schedule_with_warmup, {}),
    "linear": (optimization.get_linear_schedule_with_warmup, {"num_training_steps": 50}),
    "cosine": (
        optimization.get_cosine_with_min_lr_schedule_with_warmup,
        {"num_training_steps": 50, "min_lr_rate": 0.1},
    ),
    "inverse_sqrt": (optimization.get_inverse_sqrt_schedule, {}),
    "wsd": (
        partial(optimization.get_wsd_schedule, decay_type="linear"),
        {"num_training_steps": 50, "num_decay_steps": 10},
    ),
}
OURS: dict[str, dict[str, object]] = {
    "cosine": {"min_lr_ratio": 0.1},
    "wsd": {"decay_ratio": 0.2},
}


@pytest.mark.parametrize("warmup", [0, 1, 7, 30])
@pytest.mark.parametrize("schedule", DECAYS)
def test_rates_are_those_of_transformers_one_step_later(schedule: str, warmup: int) -> None:
    make, settings = DECAYS[schedule]
    expected = transformers_rates(make, 50, num_warmup_steps=warmup + 1, **settings)
    found = rates(50, schedule=schedule, warmup_steps=warmup, **OURS.get(schedule, {}))
    assert found == pytest.approx(expected, abs=1e-12)


def test_wsd_decays_to_its_floor_at_the_last_step() -> None:
    found = rates(10, schedule="wsd", decay_ratio=0.4, min_lr_ratio=0.2)
    assert found == pytest.approx([1.0] * 6 + [0.8, 0.6, 0.4, 0.2])


def test_warmup_and_decay_as_shares_are_rounded_up_but_not_by_binary_fractions() -> None:
    assert AdamWConfig(warmup_ratio=0.07).warmup(100) == 7
    assert AdamWConfig(warmup_ratio=0.05).warmup(30) == 2
    assert AdamWConfig(warmup_ratio=0.05).warmup(1) == 0
    assert AdamWConfig(warmup_ratio=0.95).warmup(10) == 9
    assert AdamWConfig(warmup_steps=3).warmup(None) == 3
    assert AdamWConfig(decay_ratio=0.07).decay(100) == 7
    assert AdamWConfig(decay_ratio=0.99).decay(3) == 2


@pytest.mark.parametrize("schedule", DECAYS)
def test_a_share_of_warmup_is_that_many_steps(schedule: str) -> None:
    assert rates(30, schedule=schedule, warmup_ratio=0.2) == rates(
        30, schedule=schedule, warmup_steps=6
    )


def test_a_share_of_a_run_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup_ratio needs the total number"):
        Schedule(AdamWConfig(warmup_ratio=0.1), None)


def test_the_inverse_root_stops_at_its_floor_and_needs_no_end() -> None:
    config = AdamWConfig(lr=1.0, schedule="inverse_sqrt", warmup_steps=3, min_lr_ratio=0.1)
    found = [lr_at(step, config, None) for step in (3, 15, 10_000)]
    assert found == pytest.approx([1.0, 0.5, 0.1])


def test_matrices_decay_and_vectors_do_not() -> None:
    shapes = {"matrix": (2, 3), "bias": (3,), "experts": (2, 2, 2), "scale": ()}
    params = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optimizer = torch.optim.AdamW(
        adamw.groups([*params.values()]), lr=0.5, **adamw.options(AdamWConfig(weight_decay=0.2))
    )
    for param in params.values():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    found = {name: param.detach().unique().item() for name, param in params.items()}
    decayed = pytest.approx(1 - 0.5 * 0.2)
    assert found == {"matrix": decayed, "bias": 1, "experts": decayed, "scale": 1}


@pytest.mark.parametrize("shape", [(2, 3), (3,)])
def test_a_group_without_parameters_is_left_out(shape: tuple[int, ...]) -> None:
    only = torch.nn.Parameter(torch.ones(shape))
    (group,) = adamw.groups([only])
    assert group["params"] == [only]
