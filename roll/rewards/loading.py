"""Loading of the function that `fn` of a reward config names, with checks before the run starts."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Protocol, get_type_hints, runtime_checkable

from pydantic import TypeAdapter

from roll.config.errors import nearest
from roll.config.user_code.arguments import check_types, typed
from roll.config.user_code.import_path import load_object
from roll.core.errors import ConfigError
from roll.core.step_rewards import MAX_NUMBER, require_reward
from roll.core.types import Sample
from roll.rewards.api import Reward, RewardContext
from roll.rewards.built_in import CHECKS, REWARDS
from roll.rewards.steps import check_steps, finite_steps


@runtime_checkable
class _ArrayLike(Protocol):
    def item(self) -> Any: ...


RESERVED_PARTS = frozenset({"mean", "error_rate", "timeout_rate"})
"""Names that parts must not have, because the pool logs its own metrics under them."""


Work = Sample | Sequence[Sample]
"""What a reward function gets: a sample, or all samples of a group."""


@dataclass(frozen=True, slots=True)
class BoundReward:
    """Reward function with its keyword arguments and context bound."""

    call: Callable[[Any], Any]
    """Function that returns the value of the user's function, or an awaitable of this value if
    `is_async`; `result` turns the value into a `Reward`."""
    is_async: bool

    def result(self, work: Work, value: Any) -> Any:
        """Return the reward of a sample, or the list of rewards of a group, for the value that
        `call` returned; TypeError or ValueError as of `normalise`."""
        if isinstance(work, Sample):
            return check_steps(normalise(value), work)
        rewards = normalise_group(value, len(work))
        return [check_steps(one, sample) for one, sample in zip(rewards, work, strict=True)]


def load_reward(fn: str, kwargs: Mapping[str, Any], ctx: RewardContext) -> BoundReward:
    """Find a reward function and bind its arguments.

    Args:
        fn: name in `REWARDS`, or import path `package.module:function`.
        kwargs: `kwargs` of the config.
        ctx: context, passed to the function if it has a parameter `ctx`.

    Raises:
        ConfigError: the function does not exist, does not take these arguments, or is annotated
            with other types; of a built-in reward also: the arguments do not fit together.
    """
    if ":" in fn:
        function = load_object(fn)
    elif fn in REWARDS:
        return _bind_built_in(fn, kwargs, ctx)
    else:
        raise ConfigError(
            f"rewards.{ctx.name}.fn: unknown reward {fn!r}{nearest(fn, REWARDS)} (built in: "
            f"{', '.join(REWARDS)}; a function of your own reads 'package.module:function')"
        )
    bound = bind_reward(function, kwargs, ctx, label=fn)
    check_types(function, kwargs, f"rewards.{ctx.name}.kwargs")
    return bound


def _bind_built_in(name: str, kwargs: Mapping[str, Any], ctx: RewardContext) -> BoundReward:
    """Bind a built-in reward; ConfigError if a value of `kwargs` has another type than its
    parameter, or the values do not fit together."""
    where = f"rewards.{ctx.name}.kwargs"
    bind_reward(REWARDS[name], kwargs, ctx, label=name)
    types = get_type_hints(REWARDS[name])
    values = {
        key: typed(TypeAdapter(types[key]), value, f"{where}.{key}")
        for key, value in kwargs.items()
    }
    if name in CHECKS:
        try:
            CHECKS[name](**values)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return bind_reward(REWARDS[name], values, ctx, label=name)


def bind_reward(
    function: Any, kwargs: Mapping[str, Any], ctx: RewardContext, *, label: str
) -> BoundReward:
    """Check the signature of a function and bind `kwargs` and `ctx`.

    Args:
        function: reward function.
        kwargs, ctx: see `load_reward`.
        label: name of the function in error messages.

    Raises:
        ConfigError: `function` is not a function, or does not take these arguments.
    """
    where = f"rewards.{ctx.name}"
    parameters = _parameters(function, where, label)
    _check_parameters(parameters, kwargs, where, label)
    bound = dict(kwargs)
    if any(p.name == "ctx" for p in parameters[1:]):
        bound["ctx"] = ctx

    def call(work: Work) -> Any:
        with _no_exit():
            return function(work, **bound)

    async def call_async(work: Work) -> Any:
        with _no_exit():
            return await function(work, **bound)

    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
    return BoundReward(call_async if is_async else call, is_async)


@contextmanager
def _no_exit() -> Iterator[None]:
    """Turn SystemExit into RuntimeError; no `except Exception` catches SystemExit, so it would end
    the worker."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"the reward called sys.exit({error.code!r})") from error


def normalise(value: Any) -> Reward:
    """Convert the value that a reward function returned into a `Reward` with finite floats.

    Raises:
        TypeError: the score or a part is not a number.
        ValueError: the score or a part is not finite, or a part has a reserved name.
    """
    if isinstance(value, Awaitable):
        if inspect.iscoroutine(value):
            value.close()
        raise TypeError("returned an awaitable; declare the function with `async def`")
    reward = value if isinstance(value, Reward) else Reward(score=value)
    score = require_reward(_finite(reward.score, "score"), "score")
    parts = {name: _finite(part, f"part {name!r}") for name, part in reward.parts.items()}
    reserved = RESERVED_PARTS & parts.keys()
    if reserved:
        raise ValueError(f"part {min(reserved)!r} has the name of a metric; rename it")
    return finite_steps(replace(reward, score=score, parts=parts))


def normalise_group(value: Any, number: int) -> list[Reward]:
    """Convert the value that a group reward returned into a list of `number` rewards.

    Raises:
        TypeError, ValueError: the value is no list of so many rewards; or as of `normalise`.
    """
    if isinstance(value, Awaitable):
        normalise(value)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(
            f"must return a list of {number} rewards, one for each sample of the group; found "
            f"{type(value).__name__} {repr(value)[:60]}"
        )
    if len(value) != number:
        raise ValueError(f"returned {len(value)} rewards for a group of {number} samples")
    return [normalise(each) for each in value]


def _finite(value: Any, what: str) -> float:
    """Return a number, bool or array of one element as a float; TypeError for anything else,
    ValueError if not finite. Messages begin with `what`."""
    # Accept a NumPy bool and a tensor of one element, which are no instances of `Real`.
    if not isinstance(value, Real) and isinstance(value, _ArrayLike):
        value = value.item()
    if value is None:
        raise TypeError(f"{what} is None; is a `return` missing?")
    if not isinstance(value, Real):
        raise TypeError(
            f"{what} must be a number, found {type(value).__name__} {repr(value)[:60]}; return a "
            "Reward, a number or a bool"
        )
    return require_reward(float(value), what, MAX_NUMBER)


def _parameters(function: Any, where: str, label: str) -> list[inspect.Parameter]:
    """Return the parameters of a function; ConfigError if it is no function or has no signature."""
    if inspect.isclass(function):
        raise ConfigError(f"{where}.fn: {label} is a class; write it under `worker`, not `fn`")
    if not callable(function):
        raise ConfigError(f"{where}.fn: {label} is a {type(function).__name__}, not a function")
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        raise ConfigError(
            f"{where}.fn: {label} has no readable signature; wrap it in a function"
        ) from None


def _check_parameters(
    parameters: list[inspect.Parameter], kwargs: Mapping[str, Any], where: str, label: str
) -> None:
    """Raise ConfigError unless the function takes a sample first and `kwargs` fill its other
    parameters."""
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
