"""Filters that reject finished groups not worth training on, which new prompts replace; and rules
that leave out single samples."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from roll.config.sections.domain import DomainConfig
from roll.config.sections.rollout import (
    CustomFilterConfig,
    DropConfig,
    EqualRewardsConfig,
    FilterConfig,
    MeanRewardConfig,
)
from roll.config.user_code.arguments import check_types
from roll.config.user_code.import_path import load_object
from roll.config.user_code.own import OwnPart
from roll.config.user_code.tracebacks import users_traceback
from roll.core.errors import ConfigError, RollError
from roll.rollout.own.bases import Filter
from roll.rollout.types import Group, GroupFilter, ScoredSample

NO_REWARD = "no sample has a reward: the rewards failed"
DROPPED = "rollout.drop"
"""Name that stands among the failed rewards of a sample which a rule leaves out."""


def without_dropped(group: Group, rules: Sequence[DropConfig]) -> Group:
    """Return a group in which the samples that one of the rules names have no reward."""
    samples = tuple(
        replace(one, failed=(*one.failed, DROPPED))
        if any(_hits(rule, one) for rule in rules)
        else one
        for one in group.samples
    )
    return replace(group, samples=samples)


def _hits(rule: DropConfig, scored: ScoredSample) -> bool:
    """Return whether a rule leaves a sample out."""
    value = scored.parts.get(rule.part, scored.by_name.get(rule.part))
    if value is None:
        return False
    too_high = rule.above is not None and value > rule.above
    return too_high or (rule.below is not None and value < rule.below)


def build_filters(
    configs: Sequence[FilterConfig], domains: Mapping[str, DomainConfig] | None = None
) -> list[GroupFilter]:
    """Build the filters of a run, in the order of the config; import user functions.

    If a domain has filters of its own, the result is one filter that asks those of the group's tag.

    Args:
        configs: filters of `rollout.filters`.
        domains: section `domains`, whose filters are asked in place of `configs` about groups of
            their tags.

    Raises:
        ConfigError: a user function does not exist or cannot be called with a group.
    """
    found = _build_all(configs, "rollout.filters")
    own = {
        tag: _build_all(domain.filters, f"domains.{tag}.filters")
        for tag, domain in (domains or {}).items()
        if domain.filters is not None
    }

    def judge(group: Group) -> str | None:
        chosen = own.get(group.prompt.tag, found)
        return next((reason for each in chosen if (reason := each(group)) is not None), None)

    return [judge] if own else found


def equal_rewards(group: Group) -> str | None:
    """Reject a group whose samples all have the same reward, or of which no sample has a reward.

    With equal rewards every advantage is zero (dynamic sampling of DAPO, arXiv 2503.14476).
    """
    if not group.rewards:
        return NO_REWARD
    return f"all rewards equal to {group.rewards[0]:g}" if group.equal_rewards else None


def mean_reward(group: Group, *, low: float, high: float) -> str | None:
    """Reject a group unless low < mean reward < high; reject it if no sample has a reward."""
    if not group.rewards:
        return NO_REWARD
    mean = math.fsum(group.rewards) / len(group.rewards)
    if mean <= low:
        return f"mean reward at most {low:g}"
    return f"mean reward at least {high:g}" if mean >= high else None


def custom_filter(fn: str, kwargs: Mapping[str, Any], *, key: str) -> GroupFilter:
    """Import a user function and return it as a filter.

    The filter raises RollError if the function raises an error, or returns any other value than
    described here.

    Args:
        fn: import path `package.module:function`. The function takes a Group and `kwargs`. It
            returns the reason of a rejection as a non-empty text or None to keep the group; or
            False to reject and True to keep.
        kwargs: keyword arguments of the function.
        key: place of the filter in the config, for error messages.

    Raises:
        ConfigError: the function does not exist, or cannot be called with a Group and `kwargs`.
    """
    try:
        function = load_object(fn)
    except ConfigError as error:
        raise ConfigError(f"{key}.fn: {error}") from None
    _check_call(function, fn, kwargs, key)

    return _judge(partial(function, **kwargs), fn, f"{key}.fn")


def _judge(function: Callable[[Group], Any], name: str, key: str) -> GroupFilter:
    """Return the filter that asks the user's function; see `custom_filter`.

    Args:
        name: import path of the function or class, for messages.
        key: key that names it in the run file, for messages.
    """

    def judge(group: Group) -> str | None:
        try:
            verdict = function(group)
        except Exception as error:
            raise RollError(
                f"{key}: {name} raised an error for the group of prompt {group.prompt.id}\n"
                f"{users_traceback(error)}"
            ) from error
        if verdict is None or verdict is True:
            return None
        if verdict is False:
            return f"{name} returned False"
        if isinstance(verdict, str) and verdict:
            return verdict
        raise RollError(
            f"{key}: {name} returned {verdict!r:.60} ({type(verdict).__name__}) for the group of "
            f"prompt {group.prompt.id}; return why it is rejected (a text) or None, or else True "
            "to keep it and False to reject it"
        )

    return judge


def _build_all(configs: Sequence[FilterConfig], key: str) -> list[GroupFilter]:
    """Return the filters of the list with this key in the config."""
    return [_build(config, f"{key}.{i}") for i, config in enumerate(configs)]


def _build(config: FilterConfig, key: str) -> GroupFilter:
    """Return the filter that a config describes; ConfigError if a custom function cannot be used as
    one."""
    if isinstance(config, OwnPart):
        assert isinstance(config, Filter), f"{config.kind} is no filter"
        return _judge(config.model_copy(deep=True), config.kind, key)
    match config:
        case EqualRewardsConfig():
            return equal_rewards
        case MeanRewardConfig():
            return partial(mean_reward, low=config.low, high=config.high)
        case CustomFilterConfig():
            return custom_filter(config.fn, config.kwargs, key=key)


def _check_call(function: Callable[..., Any], fn: str, kwargs: Mapping[str, Any], key: str) -> None:
    """Raise ConfigError unless a plain function takes a Group and `kwargs`; the function is not
    called.

    Args:
        fn: import path of the function, for the message.
        key: place of the filter in the config, for the message.
    """
    if not callable(function) or inspect.isclass(function):
        what = "a class" if inspect.isclass(function) else f"a {type(function).__name__}"
        raise ConfigError(f"{key}.fn: {fn} is {what}; name a function that takes a Group")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    ):
        raise ConfigError(f"{key}.fn: {fn} is `async`; a filter is a plain function")
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise ConfigError(
            f"{key}.fn: {fn} has no readable signature; wrap it in a function"
        ) from None
    try:
        signature.bind(None, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{key}: {fn} cannot be called with a Group and the kwargs "
            f"{sorted(kwargs) or 'none'}: {error}; its signature is {signature}"
        ) from None
    check_types(function, kwargs, f"{key}.kwargs")
