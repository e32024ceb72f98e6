"""Trial of the parts that users bring, on made-up samples, before a run starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from roll.commands.trials.result import Trial
from roll.config.algorithm.needs import Choice, Need
from roll.config.errors import ConfigError
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.config.user_code.own import OwnPart


def try_parts(config: RunConfig, trial: Trial) -> None:
    """Try each part that the user brought: a part that fails, or whose result has a wrong shape, is
    not finite or has no gradient, is wrong; one that breaks another rule of `roll.testing` is
    remarked on.

    The folder of the user's modules must be on `sys.path`.

    Args:
        trial: results so far.
    """
    for key, part in own_parts(config):
        _try_part(key, part, trial)
    for i, tracker in enumerate(config.track.trackers):
        if ":" in tracker.kind:
            trial.told.append(
                f"track.trackers.{i}: {tracker.kind} can be made as the run file says; it is not "
                "made here, since it may write somewhere (roll.testing.check_tracker tries it)"
            )


def own_parts(config: RunConfig) -> Iterator[tuple[str, OwnPart]]:
    """Yield the parts of a run that the user brought, each with its key in the run file."""
    data: Any = getattr(config, "data", None)
    found: dict[str, object] = {"data.chat_template": getattr(data, "chat_template", None)}
    if isinstance(config, RlvrBase):
        algorithm = config.algorithm
        lists = {
            "algorithm.loss": algorithm.loss,
            "algorithm.masks": algorithm.masks,
            "algorithm.sample_weights": algorithm.sample_weights,
            "algorithm.advantage_shaping": algorithm.advantage_shaping,
            **config.reward_shapings,
            **config.filters,
        }
        found |= config.advantages
        for key, parts in lists.items():
            found |= {f"{key}.{i}": part for i, part in enumerate(parts)}
        found |= {"data.curriculum": config.data.curriculum, "rollout.loop": config.rollout.loop}
    for key, part in found.items():
        if isinstance(part, OwnPart):
            yield key, part


def _try_part(key: str, part: OwnPart, trial: Trial) -> None:
    """Try a part; add what was found to `trial`."""
    if isinstance(part, Choice) and Need.TURNS in part.all_needs:
        trial.untried.append(f"{key} (needs episodes)")
        return
    attempt, check = _checks(part)
    try:
        attempt(part)
    except AssertionError as error:
        trial.wrong.append(ConfigError(f"{key}: {part.kind} fails when it is tried:\n{error}"))
        return
    try:
        check(part)
    except AssertionError as error:
        trial.remarks.append(f"{key}: {part.kind} breaks a rule (docs/extend.md): {error}")
        return
    trial.told.append(f"{key}: {part.kind} keeps the rules of its kind")


def _checks(part: OwnPart) -> tuple[Callable[[Any], object], Callable[[Any], object]]:
    """Return what a part must pass, and what it should."""
    from roll import testing
    from roll.algorithms.own import bases, shaping
    from roll.data.own.curriculum import Curriculum
    from roll.data.own.template import ChatTemplate
    from roll.rollout.own.bases import Filter, RolloutLoop
    from roll.testing.advantages import try_advantage
    from roll.testing.losses import try_loss_term
    from roll.testing.shaping import try_reward_shaping

    table: list[tuple[Any, Callable[[Any], object], Callable[[Any], object]]] = [
        ((bases.Advantage, bases.SampleAdvantage), try_advantage, testing.check_advantage),
        (bases.LossTerm, try_loss_term, testing.check_loss_term),
        (shaping.RewardShaping, try_reward_shaping, testing.check_reward_shaping),
        (shaping.SampleMask, _nothing, testing.check_sample_mask),
        (shaping.SampleWeight, _nothing, testing.check_sample_weight),
        (shaping.AdvantageShaping, _nothing, testing.check_advantage_shaping),
        (Curriculum, _nothing, testing.check_curriculum),
        (ChatTemplate, _nothing, testing.check_chat_template),
        (Filter, _nothing, testing.check_filter),
        (RolloutLoop, _nothing, testing.check_rollout_loop),
    ]
    return next((attempt, check) for base, attempt, check in table if isinstance(part, base))


def _nothing(part: object) -> None:
    """Demand nothing."""
