"""Names and import paths to reward functions; signatures checked before the run."""

from typing import Any

import numpy as np
import pytest
import torch

from roll.core.errors import ConfigError
from roll.core.types import Sample
from roll.rewards.api import Reward, RewardContext
from roll.rewards.built_in import REWARDS
from roll.rewards.contract import sample_of
from roll.rewards.loading import bind_reward, load_reward, normalise
from roll.rewards.packages import optional_package

CTX = RewardContext(name="mine", seed=7)
HERE = "tests.unit.rewards.reward_functions"


def _load(fn: str, **kwargs: Any) -> Any:
    return load_reward(fn, kwargs, CTX).call(sample_of("four", answer="four"))


def test_built_in_names_and_import_paths_are_found() -> None:
    assert {"exact", "math"} < set(REWARDS)
    assert _load("exact") == 1.0
    assert _load(f"{HERE}:length", factor=0.5) == 2.0
    assert _load(f"{HERE}:stateful") is True


def test_async_functions_are_known_and_context_is_handed_on() -> None:
    bound = load_reward(f"{HERE}:length_async", {}, CTX)
    assert bound.is_async
    assert not load_reward(f"{HERE}:length", {}, CTX).is_async

    def second_is_context(sample: Sample, ctx: RewardContext) -> float:
        return float(ctx.seed)

    called = bind_reward(second_is_context, {}, CTX, label="x").call(sample_of("", answer=""))
    assert called == 7.0


@pytest.mark.parametrize(
    ("fn", "kwargs", "says"),
    [
        ("mth", {}, r"unknown reward 'mth'; did you mean 'math'\?"),
        (f"{HERE}:lenght", {}, "did you mean 'length'"),
        ("no_such_module:fn", {}, "no module named 'no_such_module'"),
        (f"{HERE}:length", {"facto": 2}, r"no parameter 'facto'; did you mean 'factor'\?"),
        (f"{HERE}:length", {"sample": 2}, "given by the framework"),
        (f"{HERE}:length_async", {"ctx": 2}, "given by the framework"),
        (f"{HERE}:Stateful", {}, "is a class; write it under `worker`"),
        (f"{HERE}:not_a_function", {}, "is a int, not a function"),
        ("ifeval", {"mod": "loose"}, r"no parameter 'mod'; did you mean 'mode'\?"),
        ("ifeval", {"mode": "lose"}, r"mine\.kwargs\.mode: found 'lose'; input should be 'strict'"),
    ],
)
def test_what_does_not_fit_is_a_config_error(fn: str, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_reward(fn, kwargs, CTX)


def test_a_missing_package_is_named_with_what_to_install() -> None:
    says = r"'some-package' is missing; without it no moon rises.*pip install 'roll\[rewards\]'"
    with pytest.raises(ConfigError, match=says):
        optional_package("no_such_module", "some-package", "moon rises")


def test_a_missing_argument_and_a_missing_sample_are_config_errors() -> None:
    def needs_more(sample: Sample, limit: int) -> float:
        return 0.0

    def takes_nothing() -> float:
        return 0.0

    with pytest.raises(ConfigError, match=r"rewards\.mine\.kwargs: f needs 'limit'"):
        bind_reward(needs_more, {}, CTX, label="f")
    with pytest.raises(ConfigError, match="must take the sample"):
        bind_reward(takes_nothing, {}, CTX, label="f")


@pytest.mark.parametrize(
    "value", [True, 1, 1.0, np.float32(1), np.bool_(True), torch.tensor(1.0), Reward(1)]
)
def test_numbers_of_every_kind_become_a_reward(value: Any) -> None:
    reward = normalise(value)
    assert reward == Reward(1.0)
    assert type(reward.score) is float


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (None, TypeError, "score is None; is a `return` missing"),
        ("1", TypeError, "found str '1'"),
        (float("nan"), ValueError, "score must be finite, found nan"),
        (-1e39, ValueError, r"score must lie between -1e\+15 and 1e\+15, found -1e\+39; scale it"),
        (Reward(0.0, {"x": 1e308}), ValueError, r"part 'x' must lie between .*, found 1e\+308"),
        (Reward(0.0, steps=[(1, 1e200)]), ValueError, "value of step 0 must lie between"),
        (Reward(0.0, {"x": float("inf")}), ValueError, "part 'x' must be finite"),
        (Reward(0.0, {"mean": 1.0}), ValueError, "part 'mean' has the name of a metric"),
    ],
)
def test_anything_else_is_refused(value: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        normalise(value)


def test_a_coroutine_of_a_plain_function_is_refused() -> None:
    async def verdict() -> float:
        return 1.0

    with pytest.raises(TypeError, match="async def"):
        normalise(verdict())
