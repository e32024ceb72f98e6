"""The `fn` of a reward config -> a function of one sample, checked before the run starts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from roll.config.errors import nearest
from roll.core.errors import ConfigError
from roll.core.registry import Registry, load_object
from roll.core.types import Sample
from roll.rewards.api import Reward, RewardContext
from roll.rewards.math.reward import math_reward, start_checkers
from roll.rewards.text import exact_reward


@runtime_checkable
class _ArrayLike(Protocol):
    def item(self) -> Any: ...


REWARDS: Registry[Callable[..., Any]] = Registry("reward")
"""Built-in rewards by the name that `fn` may hold."""
REWARDS.register("math")(math_reward)
REWARDS.register("exact")(exact_reward)

PREPARE: dict[str, Callable[[], None]] = {"math": start_checkers}
"""What a built-in reward does once before the first sample; may take seconds."""

RESERVED_PARTS = frozenset({"mean", "error_rate", "timeout_rate"})
"""Metric names that the pool writes itself, under the same prefix as the parts."""


@dataclass(frozen=True, slots=True)
class BoundReward:
    """A reward with its keyword arguments and context in place."""

    call: Callable[[Sample], Any]
    """Returns what the user returns, or an awaitable of it; `normalise` makes a `Reward` of it."""
    is_async: bool


def load_reward(fn: str, kwargs: Mapping[str, Any], ctx: RewardContext) -> BoundReward:
    """Find a reward function and bind its arguments.

    Args:
        fn: a name in `REWARDS`, or `package.module:function`.
        kwargs: `kwargs` of the config.
        ctx: handed on if the function takes `ctx`.

    Raises:
        ConfigError: no such function, or it does not take these arguments.
    """
    if ":" in fn:
        function = load_object(fn)
    elif fn in REWARDS:
        function = REWARDS[fn]
    else:
        raise ConfigError(
            f"rewards.{ctx.name}.fn: unknown reward {fn!r}{nearest(fn, REWARDS)} (built in: "
            f"{', '.join(REWARDS)}; a function of your own reads 'package.module:function')"
        )
    return bind_reward(function, kwargs, ctx, label=fn)


def bind_reward(
    function: Any, kwargs: Mapping[str, Any], ctx: RewardContext, *, label: str
) -> BoundReward:
    """Check a function's signature against `kwargs` and bind it; see `load_reward`."""
    where = f"rewards.{ctx.name}"
    if inspect.isclass(function):
        raise ConfigError(f"{where}.fn: {label} is a class; write it under `worker`, not `fn`")
    if not callable(function):
        raise ConfigError(f"{where}.fn: {label} is a {type(function).__name__}, not a function")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        raise ConfigError(
            f"{where}.fn: {label} has no readable signature; wrap it in a function"
        ) from None
    takes_ctx = any(p.name == "ctx" for p in parameters[1:])
    _check_parameters(parameters, kwargs, where, label)
    bound = dict(kwargs)
    if takes_ctx:
        bound["ctx"] = ctx

    def call(sample: Sample) -> Any:
        with _no_exit():
            return function(sample, **bound)

    async def call_async(sample: Sample) -> Any:
        with _no_exit():
            return await function(sample, **bound)

    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
    return BoundReward(call_async if is_async else call, is_async)


@contextmanager
def _no_exit() -> Iterator[None]:
    """A SystemExit would pass every `except Exception` and end the worker."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"the reward called sys.exit({error.code!r})") from error


def normalise(value: Any) -> Reward:
    """What a reward function returned, as a `Reward` of finite floats.

    Raises:
        ValueError, TypeError: it is something else; the message says what was found.
    """
    if isinstance(value, Awaitable):
        if inspect.iscoroutine(value):
            value.close()
        raise TypeError("returned an awaitable; declare the function with `async def`")
    reward = value if isinstance(value, Reward) else Reward(score=value)
    parts = {name: _finite(part, f"part {name!r}") for name, part in reward.parts.items()}
    reserved = RESERVED_PARTS & parts.keys()
    if reserved:
        raise ValueError(f"part {min(reserved)!r} has the name of a metric; rename it")
    return Reward(_finite(reward.score, "score"), parts)


def _finite(value: Any, what: str) -> float:
    # A NumPy bool and a tensor of one element are numbers to their authors.
    if not isinstance(value, Real) and isinstance(value, _ArrayLike):
        value = value.item()
    if value is None:
        raise TypeError(f"{what} is None; is a `return` missing?")
    if not isinstance(value, Real):
        raise TypeError(
            f"{what} must be a number, found {type(value).__name__} {repr(value)[:60]}; return a "
            "Reward, a number or a bool"
        )
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, found {number}")
    return number


def _check_parameters(
    parameters: list[inspect.Parameter], kwargs: Mapping[str, Any], where: str, label: str
) -> None:
    first_kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    if not parameters or parameters[0].kind not in first_kinds:
        raise ConfigError(f"{where}.fn: {label} must take the sample as its first parameter")
    open_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in parameters[1:] if p.kind not in open_kinds and p.name != "ctx"]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    known = [p.name for p in named]
    for name in kwargs:
        if name == "ctx" or name == parameters[0].name:
            raise ConfigError(f"{where}.kwargs: {name!r} is given by the framework; remove it")
        if name not in known and not takes_any:
            raise ConfigError(
                f"{where}.kwargs: {label} has no parameter {name!r}{nearest(name, known)} "
                f"(parameters: {', '.join(known) or 'none'})"
            )
    for parameter in named:
        if parameter.default is inspect.Parameter.empty and parameter.name not in kwargs:
            raise ConfigError(
                f"{where}.kwargs: {label} needs {parameter.name!r}; give it a value there"
            )
