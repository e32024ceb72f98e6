"""`RewardRouter`: sends samples to the rewards of their tags, and adds up the weighted scores."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle

from roll.config.sections.reward import RewardConfig
from roll.core.errors import DataError
from roll.core.metrics import Last, Metric, Metrics
from roll.core.pickling import Columns
from roll.core.step_rewards import StepRewards, weighted_sum
from roll.core.timing import BusyTime
from roll.core.types import Sample
from roll.distributed.cluster import Cluster
from roll.rewards.execution.counters import Purpose, Scored
from roll.rollout.async_utils import SharedTimeout
from roll.rollout.rpc_batching import BatchedCalls
from roll.rollout.types import ScoredSample
from roll.workers.reward import RewardWorker


@dataclass(frozen=True, slots=True)
class RewardCluster:
    """Reward with the workers that compute it."""

    config: RewardConfig
    cluster: Cluster[RewardWorker]


@dataclass
class RewardRouter:
    """Router of samples to the rewards of their tags. The workers of one reward take calls in turn
    (round-robin)."""

    rewards: Mapping[str, RewardCluster]
    weights: Callable[[str], Mapping[str, float]] | None = None
    """Function that returns the weight of each reward for a tag; None: the `weight` of the config
    for every tag."""
    limits_s: Mapping[str, float] = field(default_factory=dict)
    """Name of a reward -> time limit of a call, in seconds; a reward that is missing has none."""
    _limits: dict[str, SharedTimeout] = field(init=False)
    _takes: dict[str, frozenset[str]] = field(init=False)
    """Tags that each reward takes: a config may name thousands."""
    _lanes: dict[tuple[str, Purpose], Iterator[BatchedCalls[Sample, Scored]]] = field(init=False)
    """Name of a reward of samples and purpose -> endless round-robin iterator over the reward's
    workers. Each worker is behind a `BatchedCalls`, which joins calls that come at almost the same
    time."""

    _group_lanes: dict[tuple[str, Purpose], Iterator[BatchedCalls[list[Sample], list[Scored]]]] = (
        field(init=False)
    )
    """The same for the rewards of groups."""

    _busy: dict[str, BusyTime] = field(init=False)
    """Time in which each reward has samples of training."""

    _known: dict[str, Mapping[str, float]] = field(default_factory=dict, init=False)
    """Tag that was asked for before -> weight of each reward."""

    def __post_init__(self) -> None:
        self._busy = {name: BusyTime() for name in self.rewards}
        self._takes = {name: frozenset(one.config.tags) for name, one in self.rewards.items()}
        self._limits = {
            name: SharedTimeout(self.limits_s.get(name, math.inf)) for name in self.rewards
        }
        per = {name: hosted.config.per for name, hosted in self.rewards.items()}
        self._lanes = {
            (name, purpose): cycle(_lanes(hosted, purpose))
            for name, hosted in self.rewards.items()
            for purpose in Purpose
            if per[name] == "sample"
        }
        self._group_lanes = {
            (name, purpose): cycle(_group_lanes(hosted, purpose))
            for name, hosted in self.rewards.items()
            for purpose in Purpose
            if per[name] == "group"
        }

    @property
    def scores_groups(self) -> bool:
        """True if a reward sees all samples of a group."""
        return bool(self._group_lanes)

    def begin_step(
        self, samples_by_tag: Mapping[str, float], purpose: Purpose = Purpose.TRAINING
    ) -> None:
        """Open new error budgets for one purpose; those of the other purpose stay as they are.

        Args:
            samples_by_tag: tag -> expected number of samples. The budget of a reward depends on the
                samples that are routed to it, and each of its workers gets an equal part.
            purpose: training or validation.
        """
        pending = []
        for busy in self._busy.values() if purpose is Purpose.TRAINING else ():
            busy.restart()
        for name, hosted in self.rewards.items():
            routed = sum(samples_by_tag.get(tag, 0.0) for tag in self._takes[name])
            expected = max(1, math.ceil(round(routed / hosted.cluster.world_size, 6)))
            pending.append(hosted.cluster.submit(RewardWorker.begin_step, expected, purpose))
        for answer in pending:
            answer.result()

    async def score(
        self, samples: list[Sample], purpose: Purpose = Purpose.TRAINING
    ) -> list[ScoredSample]:
        """Return the scored samples, in order; each has the weighted sum of its rewards' scores,
        without the rewards that see whole groups.

        This method is called once per finished request, with its samples. A sample on which a
        reward failed has no reward, unless the setting `on_error` of that reward names a score.

        Raises:
            RewardError: a reward failed more often than its error budget allows.
            WaitTimeoutError: a reward took longer than its limit of `limits_s`.
            DataError: there are rewards, but none takes the tag of a sample.
        """
        names = [
            name
            for name, tags in self._takes.items()
            if (name, purpose) in self._lanes and any(sample.tag in tags for sample in samples)
        ]
        columns = await asyncio.gather(*(self._ask(name, samples, purpose) for name in names))
        verdicts = dict(zip(names, columns, strict=True))
        return [self._total(i, sample, verdicts) for i, sample in enumerate(samples)]

    async def score_group(
        self, samples: Sequence[ScoredSample], purpose: Purpose = Purpose.TRAINING
    ) -> list[ScoredSample]:
        """Return the samples of one group, in order, with the scores of the rewards that see all of
        them added. Such a reward gets every sample, also one on which another reward failed.

        Raises:
            RewardError: a reward failed more often than its error budget allows.
            WaitTimeoutError: a reward took longer than its limit of `limits_s`.
        """
        group = [one.sample for one in samples]
        names = [
            name
            for name, tags in self._takes.items()
            if (name, purpose) in self._group_lanes and group[0].tag in tags
        ]
        asked = (self._ask_group(name, group, purpose) for name in names)
        answers = await asyncio.gather(*asked)
        scored = list(samples)
        for name, [column] in zip(names, answers, strict=True):
            scored = [
                self._added(name, one, each) for one, each in zip(scored, column, strict=True)
            ]
        return scored

    def _added(self, name: str, one: ScoredSample, by_group: Scored) -> ScoredSample:
        """Return the sample with the score of one more reward, or with its failure."""
        reward = by_group.reward
        if reward is None:
            return replace(one, failed=(*one.failed, name))
        weight = self._weights(one.sample)[name]
        return replace(
            one,
            reward=one.reward + reward.score * weight,
            steps=weighted_sum([(1.0, one.steps), (weight, by_group.steps)]),
            parts=one.parts | {f"{name}/{part}": v for part, v in reward.parts.items()},
            by_name=one.by_name | {name: reward.score},
        )

    async def _ask(self, name: str, samples: list[Sample], purpose: Purpose) -> dict[int, Scored]:
        """Return index -> score by the reward `name`, for those samples whose tag it takes."""
        lane, tags = next(self._lanes[name, purpose]), self._takes[name]
        wanted = [i for i, sample in enumerate(samples) if sample.tag in tags]
        with self._timed(name, purpose), self._limits[name].naming(f"reward {name!r}"):
            scored = await lane.ask([samples[i] for i in wanted])
        return dict(zip(wanted, scored, strict=True))

    async def _ask_group(
        self, name: str, group: list[Sample], purpose: Purpose
    ) -> list[list[Scored]]:
        """Return the scores of the samples of one group by the reward `name`, as a list of one."""
        lane = next(self._group_lanes[name, purpose])
        with self._timed(name, purpose), self._limits[name].naming(f"reward {name!r}"):
            return await lane.ask([group])

    def _timed(self, name: str, purpose: Purpose) -> AbstractContextManager[None]:
        """Count the time of the block as time in which the reward is at work in training."""
        return self._busy[name].working() if purpose is Purpose.TRAINING else nullcontext()

    def _total(
        self, row: int, sample: Sample, verdicts: Mapping[str, Mapping[int, Scored]]
    ) -> ScoredSample:
        """Add up the weighted scores of a sample and name failed rewards, which add nothing;
        DataError if no reward takes its tag."""
        weights = self._weights(sample)
        reward = 0.0
        parts: dict[str, float] = {}
        by_name: dict[str, float] = {}
        failed: list[str] = []
        steps: list[tuple[float, StepRewards | None]] = []
        for name, column in verdicts.items():
            scored = column.get(row)
            if scored is None:
                continue
            if scored.reward is None:
                failed.append(name)
                continue
            reward += scored.reward.score * weights[name]
            by_name[name] = scored.reward.score
            parts |= {f"{name}/{part}": value for part, value in scored.reward.parts.items()}
            steps.append((weights[name], scored.steps))
        return ScoredSample(
            sample=sample,
            steps=weighted_sum(steps),
            reward=reward,
            parts=parts,
            by_name=by_name,
            failed=tuple(failed),
        )

    def _weights(self, sample: Sample) -> Mapping[str, float]:
        """Return the factor of each reward in the total of samples with this tag; DataError if no
        reward takes the tag."""
        tag = sample.tag
        if tag in self._known:
            return self._known[tag]
        if self.rewards and not any(tag in tags for tags in self._takes.values()):
            raise DataError(
                f"sample {sample.id} has the tag {tag!r}, which no reward takes; add it to "
                "the `tags` of a reward"
            )
        if self.weights is None:
            found: Mapping[str, float] = {
                name: hosted.config.weight for name, hosted in self.rewards.items()
            }
        else:
            found = self.weights(tag)
        self._known[tag] = found
        return found

    def take_rates(self, purpose: Purpose = Purpose.TRAINING) -> Metrics:
        """Return `reward/<name>/error_rate` and `timeout_rate` of the samples scored for `purpose`
        since the last call; of training also `rewards/<name>/queue_s`, `run_s` and
        `share_of_step`, the share of the time since `begin_step` in which the reward was at
        work."""
        found: dict[str, Metric] = {}
        for name, hosted in self.rewards.items():
            answers = hosted.cluster.call_each(RewardWorker.take_metrics, purpose)
            for key, metric in Metrics.concat(answers).items():
                timed = key.startswith(f"rewards/{name}/") and purpose is Purpose.TRAINING
                if timed or key.endswith(("/error_rate", "/timeout_rate")):
                    found[key] = metric
            if purpose is Purpose.TRAINING:
                found[f"rewards/{name}/share_of_step"] = Last(self._busy[name].share())
        return Metrics(found)


def _lanes(hosted: RewardCluster, purpose: Purpose) -> list[BatchedCalls[Sample, Scored]]:
    """Return, for each worker of the reward, the function that scores samples, behind a
    `BatchedCalls`."""

    def ask(rank: int, samples: list[Sample]) -> Awaitable[list[Scored]]:
        return hosted.cluster.ask(rank, RewardWorker.score_samples, Columns(samples), purpose)

    return [BatchedCalls(partial(ask, rank)) for rank in range(hosted.cluster.world_size)]


def _group_lanes(
    hosted: RewardCluster, purpose: Purpose
) -> list[BatchedCalls[list[Sample], list[Scored]]]:
    """Return, for each worker of the reward, the function that scores groups, behind a
    `BatchedCalls`."""

    def ask(rank: int, groups: list[list[Sample]]) -> Awaitable[list[list[Scored]]]:
        each: list[list[Sample]] = [Columns(group) for group in groups]
        return hosted.cluster.ask(rank, RewardWorker.score_groups, each, purpose)

    return [BatchedCalls(partial(ask, rank)) for rank in range(hosted.cluster.world_size)]
