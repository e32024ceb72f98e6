"""Functions that make groups, for training and for validation: of single turns, or of episodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from roll.config.algorithm import Need
from roll.config.rlvr_base import RlvrBase
from roll.config.sections.sampling import SamplingConfig
from roll.core.types import SamplingParams
from roll.rewards.execution.counters import Purpose
from roll.rollout.episodes.episodes import Episodes
from roll.rollout.episodes.failed import FailedEpisodes
from roll.rollout.episodes.results import samples_of
from roll.rollout.filters import without_dropped
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.own.bases import RolloutLoop
from roll.rollout.own.turns import OwnTurns
from roll.rollout.single_turn import REWARD_TIMEOUT_S, SingleTurn
from roll.rollout.types import Group, GroupTask, RunGroup, ScoreGroup
from roll.runtime.environments import ClusterHosts
from roll.runtime.pictures.maker import PictureMaker
from roll.runtime.reward_router import RewardRouter


def reward_timeout_s(config: RlvrBase) -> float:
    """Return the time limit for the rewards of one request, in seconds; none (infinity) if one
    waits for a device that training steps may take, however long these are."""
    limits_s = reward_limits_s(config)
    if len(limits_s) < len(config.rewards):
        return math.inf
    return max(limits_s.values(), default=REWARD_TIMEOUT_S)


def reward_limits_s(config: RlvrBase) -> dict[str, float]:
    """Return name -> time limit of a call, in seconds, of each reward that waits for no device:
    well above the limits that the reward has itself."""
    return {
        name: max(REWARD_TIMEOUT_S, 2 * (one.limit_s + (one.queue_timeout_s or 0.0)))
        for name, one in config.rewards.items()
        if one.model is None and (one.judge is None or one.judge.by not in config.cluster_judges)
    }


@dataclass(frozen=True)
class GroupMakers:
    """Makers of groups of single turns."""

    config: RlvrBase
    fleet: Fleet
    decode: Callable[[Sequence[int]], str]
    reward_router: RewardRouter
    pictures: PictureMaker | None = None
    """Maker of the patches of pictures; None if no prompt has pictures."""
    encode: Callable[[str], Sequence[int]] | None = None
    """Function that returns the tokens of a text, without special ones around it; needed only by
    rollout loops of the user's."""

    def training(self) -> RunGroup:
        """Return the function that makes a group to train on."""
        config = self.config
        run = self._make(
            config.sampling,
            config.domain_sampling,
            config.data.samples_per_prompt,
            Purpose.TRAINING,
            redundant=config.rollout.redundant_samples,
        )
        rules = config.rollout.drop

        async def run_and_drop(task: GroupTask) -> Group:
            return without_dropped(await run(task), rules)

        return run_and_drop if rules else run

    def fits(self, group: Group) -> bool:
        """Return whether a group is such as `training` makes, with the samples and the greedy
        response that its estimator needs."""
        greedy = self.config.needs_greedy(group.prompt.tag)
        whole = len(group.samples) == self.config.data.samples_per_prompt
        return whole and greedy == (group.baseline is not None)

    def validation(self) -> RunGroup:
        """Return the function that makes a group to validate on."""
        config, validation = self.config, self.config.validation
        return self._make(
            config.validation_sampling,
            {} if validation.sampling else config.domain_sampling,
            validation.samples_per_prompt,
            Purpose.VALIDATION,
        )

    def begin_step(
        self, samples_by_tag: Mapping[str, float], purpose: Purpose = Purpose.TRAINING
    ) -> None:
        """Begin to count failures anew, for a step with so many samples of each tag."""
        self.reward_router.begin_step(samples_by_tag, purpose)

    def _make(
        self,
        sampling: SamplingConfig,
        tag_sampling: Mapping[str, SamplingConfig],
        samples: int,
        purpose: Purpose,
        *,
        redundant: int = 0,
    ) -> RunGroup:
        """Return the function that makes groups with these settings.

        Args:
            sampling: sampling of all prompts but those with a tag in `tag_sampling`.
            tag_sampling: sampling of the prompts with these tags.
            samples: number of samples of a group.
            redundant: number of samples beyond those.
        """
        config, trains = self.config, purpose is Purpose.TRAINING
        make: Callable[..., SingleTurn] = SingleTurn
        if config.rollout.loop is not None:
            loop = config.rollout.loop.model_copy(deep=True)
            assert isinstance(loop, RolloutLoop), f"{loop.kind} is no rollout loop"
            assert self.encode is not None, "a rollout loop needs `encode`"
            make = partial(OwnTurns, loop=loop, encode=self.encode)
        return make(
            score=partial(self.reward_router.score, purpose=purpose),
            separate_siblings=config.rollout.siblings == "separate",
            greedy_baseline=trains and Need.GREEDY_BASELINE in config.algorithm.needs,
            tag_greedy={tag: config.needs_greedy(tag) for tag in config.domains if trains},
            with_patches=None
            if self.pictures is None
            else partial(self.pictures.prompt, counted=trains),
            **self._common(sampling, tag_sampling, samples, purpose, redundant),
        ).run

    def _common(
        self,
        sampling: SamplingConfig,
        tag_sampling: Mapping[str, SamplingConfig],
        samples: int,
        purpose: Purpose,
        redundant: int,
    ) -> dict[str, Any]:
        """Return the arguments that `SingleTurn` and `Episodes` have in common; see `_make`."""
        return {
            "fleet": self.fleet,
            "decode": self.decode,
            "score_group": self._score_group(purpose),
            "sampling": SamplingParams(**sampling.model_dump()),
            "tag_sampling": {
                tag: SamplingParams(**own.model_dump()) for tag, own in tag_sampling.items()
            },
            "samples_per_prompt": samples,
            "seed": self.config.seed,
            "request_timeout_s": self.config.rollout.request_timeout_s,
            "redundant": redundant,
            "reward_timeout_s": reward_timeout_s(self.config),
        }

    def _score_group(self, purpose: Purpose) -> ScoreGroup | None:
        """Return the function that adds the rewards of whole groups; None if the run has none."""
        if not self.reward_router.scores_groups:
            return None
        return partial(self.reward_router.score_group, purpose=purpose)


@dataclass(frozen=True)
class EpisodeMakers(GroupMakers):
    """Makers of groups of episodes."""

    hosts: Mapping[str, ClusterHosts] = field(kw_only=True)
    """Tag -> hosts of the environment of tasks with this tag."""
    opponents: Mapping[str, Fleet] = field(default_factory=dict)
    """Engines of each opponent, by name."""
    failed: dict[Purpose, FailedEpisodes] = field(init=False)
    """Counters of the episodes that failed, for training and for validation."""

    def __post_init__(self) -> None:
        limits = {hosts.name: hosts.config.max_error_rate for hosts in self.hosts.values()}
        failed = {purpose: FailedEpisodes(limits) for purpose in Purpose}
        object.__setattr__(self, "failed", failed)

    def begin_step(
        self, samples_by_tag: Mapping[str, float], purpose: Purpose = Purpose.TRAINING
    ) -> None:
        """Begin to count failures of rewards and of environments anew, for a step with so many
        samples of each tag."""
        super().begin_step(samples_by_tag, purpose)
        expected = Counter[str]()
        for tag, samples in samples_by_tag.items():
            hosts = self.hosts[tag]
            expected[hosts.name] += samples / samples_of(hosts.config)  # type: ignore[assignment]
        self.failed[purpose].begin_step(expected)

    def _make(
        self,
        sampling: SamplingConfig,
        tag_sampling: Mapping[str, SamplingConfig],
        samples: int,
        purpose: Purpose,
        *,
        redundant: int = 0,
    ) -> RunGroup:
        """Return the function that makes groups of episodes; the arguments are as in
        `GroupMakers._make`, with episodes in place of samples."""
        score = partial(self.reward_router.score, purpose=purpose)
        rewarded = {tag for reward in self.config.rewards.values() for tag in reward.tags}
        return Episodes(
            hosts=self.hosts,
            failed=self.failed[purpose],
            max_tokens=self.config.max_row_tokens,
            score=dict.fromkeys(rewarded, score),
            branching=purpose is Purpose.TRAINING,
            opponents=self.opponents,
            **self._common(sampling, tag_sampling, samples, purpose, redundant),
        ).run
