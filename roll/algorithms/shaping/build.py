"""Shaping of a step's batch on the driver, built from `algorithm:` in the config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from roll.algorithms.loss_interface import AdvantageEstimator, SampleEstimator
from roll.algorithms.registries import ADVANTAGES, PartRegistry
from roll.algorithms.shaping.domains import Division, Lesson, divisions, tag_metrics
from roll.algorithms.shaping.interface import (
    ADVANTAGE_SHAPINGS,
    MASKS,
    REWARD_SHAPINGS,
    SAMPLE_WEIGHTS,
    AdvantageShaping,
    RewardShaping,
    SampleMask,
    SampleWeight,
    Stateful,
)
from roll.algorithms.shaping.kl_in_reward import KlInReward
from roll.algorithms.shaping.overlong import EpisodePenalty
from roll.algorithms.shaping.rewards import Rewards
from roll.config.algorithm import AlgorithmConfig, OverlongPenaltyConfig
from roll.config.algorithm.shaping import RewardShapingConfig, ShapingConfig
from roll.config.sections.domain import DomainConfig
from roll.config.user_code.own import part_name
from roll.core.batches import RolloutBatch
from roll.core.errors import CheckpointError
from roll.core.metrics import Max, Mean, Metrics
from roll.core.sample_table import SampleTable

T = TypeVar("T")
S = TypeVar("S", RolloutBatch, SampleTable)


@dataclass(frozen=True)
class DefaultLimit:
    """Limit of an overlong penalty that names none: that of the samples."""

    tokens: int
    """Largest number of tokens of a response, or of an episode with what is said to it."""
    episodes: bool
    """True if samples are episodes, in which the limit of a tag is that of a turn."""

    def of(self, domain: DomainConfig) -> DefaultLimit:
        """Return the limit of the samples of a tag."""
        own = None if self.episodes else domain.sampling.max_new_tokens
        return replace(self, tokens=own or self.tokens)

    def fill(self, choice: RewardShapingConfig) -> RewardShapingConfig:
        """Return the choice with its limit."""
        return choice.within(self.tokens) if isinstance(choice, OverlongPenaltyConfig) else choice


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """Shaping of a step's batch, before and after its advantages are computed.

    `add_advantages` applies all of it. Parts are applied in the order of their mappings, and their
    metrics contain their names. Only running moments and an adaptive KL coefficient change from
    step to step; `state` returns both.

    The samples of a tag in `domains` have shaping of rewards and an estimator of their own, which
    know the samples of this tag only. Everything else knows all samples.
    """

    reward_parts: Mapping[str, RewardShaping] = field(default_factory=dict)
    mask_parts: Mapping[str, SampleMask] = field(default_factory=dict)
    weight_parts: Mapping[str, SampleWeight] = field(default_factory=dict)
    advantage_parts: Mapping[str, AdvantageShaping] = field(default_factory=dict)
    kl: KlInReward | None = None
    domains: Mapping[str, Lesson] = field(default_factory=dict)

    def needs_tokens(self, estimator: AdvantageEstimator) -> bool:
        """Return whether this shaping and the estimator compute with single tokens, so that they
        need a `RolloutBatch` in place of a `SampleTable`."""
        estimators = [estimator, *(lesson.estimator for lesson in self.domains.values())]
        by_sample = all(isinstance(each, SampleEstimator) and each.spreads for each in estimators)
        return not by_sample or self.kl is not None or bool(self.advantage_parts)

    def add_advantages(self, batch: S, estimator: AdvantageEstimator) -> tuple[S, Metrics]:
        """Return the batch to train on from a step's scored batch, and metrics. Call once per step.

        The order is: 1. shape the rewards; 2. compute advantages and returns from them; 3. compute
        masks and weights of samples from the unshaped rewards; 4. shape the advantages of the
        remaining tokens. A masked sample still counts in the statistics of its group and only loses
        its own loss. A sample without a reward does not count in any statistic.

        Args:
            batch: all samples of the step; a SampleTable only if `needs_tokens` is False.

        Raises:
            ValueError: the batch lacks something that the shaping or the estimator needs.
        """
        if batch.has_reward is None:
            found, metrics = self._add_advantages(batch, estimator)
            return found, metrics | tag_metrics(found)
        judged = batch.has_reward.nonzero()[:, 0]
        if not len(judged):
            return _without_advantages(batch), Metrics()
        found, metrics = self._add_advantages(
            replace(batch.select(judged), has_reward=None), estimator
        )
        return _among(batch, found, judged), metrics | tag_metrics(found)

    def _add_advantages(self, batch: S, estimator: AdvantageEstimator) -> tuple[S, Metrics]:
        """Shape rewards, estimate advantages, then apply masks, weights and advantage parts."""
        rewarded, metrics = self.rewards(batch)
        masked, seen = self.masks(batch)
        weighed, also_seen = self.weights(batch)
        metrics = metrics | seen | also_seen
        estimated = replace(
            self._estimated(rewarded, masked, estimator), sample_weights=weighed.sample_weights
        )
        if not self.advantage_parts:
            return estimated, metrics
        if isinstance(estimated, SampleTable):
            raise ValueError("advantage_shaping needs the tokens of the samples")
        shaped, last_seen = self.advantages(estimated)
        return shaped, metrics | last_seen

    def rewards(self, batch: S) -> tuple[S, Metrics]:
        """Return the batch with shaped `rewards`, `baseline_rewards` and `token_rewards`.

        `named_rewards` do not change: bounds, moments and penalties apply to the total reward,
        which is then no longer the weighted sum of the named rewards.
        """
        metrics = Metrics()
        shaped = batch
        if self.kl is not None:
            if isinstance(batch, SampleTable):
                raise ValueError("kl_in_reward needs the tokens of the samples")
            token_rewards_BT, metrics = self.kl(batch)
            shaped = replace(batch, token_rewards=token_rewards_BT)
        if not self.reward_parts and not any(one.reward_parts for one in self.domains.values()):
            return shaped, metrics
        baseline_B = batch.baseline_rewards
        rewards = Rewards(
            batch.require("rewards", made_by="assemble").double(),
            None if baseline_B is None else baseline_B.double(),
        )
        for division in divisions(batch.tags, self.domains):
            rewards, seen = self._shaped(rewards, batch, division)
            metrics = metrics | seen
        mean = Mean(rewards.total_B.sum().item(), len(batch))
        shaped = replace(
            shaped,
            rewards=rewards.total_B.float(),
            baseline_rewards=None if rewards.baseline_B is None else rewards.baseline_B.float(),
        )
        return shaped, metrics | {"shaping/reward/mean": mean}

    def _shaped(self, rewards: Rewards, batch: S, division: Division) -> tuple[Rewards, Metrics]:
        """Return the rewards with those of a division shaped, and the metrics of the shaping."""
        tag, metrics = division.tag, Metrics()
        parts = self.reward_parts if tag is None else self.domains[tag].reward_parts
        own, samples = rewards.map(division.part), division.of(batch) if parts else batch
        for name, part in parts.items():
            own, seen = part(own, samples)
            prefix = "" if tag is None else f"tag/{tag}/"
            metrics = metrics | _under(f"{prefix}shaping/reward/{name}", seen)
        baseline_B = None
        if rewards.baseline_B is not None and own.baseline_B is not None:
            baseline_B = division.put(own.baseline_B, into=rewards.baseline_B)
        return Rewards(division.put(own.total_B, into=rewards.total_B), baseline_B), metrics

    def _estimated(self, rewarded: S, kept: S, estimator: AdvantageEstimator) -> S:
        """Return `rewarded` with the advantages of those samples that are trained in `kept`, from
        the estimator of each tag in `domains` or, for other tags, from `estimator`."""
        if not self.domains:
            return _estimated(rewarded, kept, estimator)
        whole = rewarded
        for division in divisions(rewarded.tags, self.domains):
            tag, rows = division.tag, division.rows_N
            assert rows is not None
            own = estimator if tag is None else self.domains[tag].estimator
            found = _estimated(division.of(rewarded), division.of(kept), own)
            whole = _among(whole, found, rows)
        return whole

    def masks(self, batch: S) -> tuple[S, Metrics]:
        """Return the batch with fewer trained samples.

        Token weights must be computed afterwards, so that means are over the remaining tokens.
        """
        if not self.mask_parts:
            return batch, Metrics()
        keep_B = torch.ones(len(batch), dtype=torch.bool, device=batch.group_ids.device)
        seen: dict[str, Mean] = {}
        for name, part in self.mask_parts.items():
            passed_B = part(batch)
            seen[f"shaping/mask/{name}/masked_fraction"] = _share(~passed_B)
            keep_B = keep_B & passed_B
        seen["shaping/mask/masked_fraction"] = _share(~keep_B)
        return batch.keep(keep_B), Metrics(seen)

    def weights(self, batch: S) -> tuple[S, Metrics]:
        """Return the batch with the product of all sample weights as `sample_weights`."""
        if not self.weight_parts:
            return batch, Metrics()
        weights_B = torch.ones(len(batch), dtype=torch.float64, device=batch.group_ids.device)
        for part in self.weight_parts.values():
            weights_B = weights_B * part(batch)
        metrics = Metrics(
            {
                "shaping/weight/mean": Mean(weights_B.sum().item(), len(batch)),
                "shaping/weight/max": Max(weights_B.max().item()),
            }
        )
        return replace(batch, sample_weights=weights_B.float()), metrics

    def advantages(self, batch: RolloutBatch) -> tuple[RolloutBatch, Metrics]:
        """Return the batch with shaped `advantages`; `returns` do not change."""
        if not self.advantage_parts:
            return batch, Metrics()
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        metrics = Metrics()
        for name, part in self.advantage_parts.items():
            advantages_BT, seen = part(advantages_BT, batch.loss_mask)
            metrics = metrics | _under(f"shaping/advantage/{name}", seen)
        return replace(batch, advantages=advantages_BT), metrics

    def state(self) -> dict[str, dict[str, float]]:
        """Return the state for the checkpoint, plain JSON by part; empty if no part has a state."""
        return {name: state for name, part in self._stateful.items() if (state := part.state())}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`.

        Raises:
            CheckpointError: the state belongs to another list of shapings.
        """
        expected = self.state().keys()
        if state.keys() != expected:
            raise CheckpointError(
                f"the checkpoint remembers {_listed(state)} of reward shaping, the config asks for "
                f"{_listed(expected)}; restore algorithm.reward_shaping, algorithm.kl_in_reward and"
                " domains, or start anew with `resume: never` and another output_dir"
            )
        for name, of_part in state.items():
            self._stateful[name].load(of_part)

    @property
    def _stateful(self) -> dict[str, Stateful]:
        """Parts with a state, by their names in the checkpoint."""
        parts: dict[str, object] = {f"reward/{n}": part for n, part in self.reward_parts.items()}
        for tag, lesson in self.domains.items():
            parts |= {f"tag/{tag}/reward/{n}": part for n, part in lesson.reward_parts.items()}
        if self.kl is not None:
            parts["kl_in_reward"] = self.kl
        return {name: part for name, part in parts.items() if isinstance(part, Stateful)}


def _estimated(rewarded: S, kept: S, estimator: AdvantageEstimator) -> S:
    """Return `rewarded` with advantages, computed from all samples, of those samples that are
    trained in `kept`, the result of `masks`; those of other samples are 0."""
    if isinstance(rewarded, SampleTable):
        assert isinstance(estimator, SampleEstimator)
        advantages_B = estimator.per_sample(rewarded).float() * kept.trained
        return replace(rewarded, trained=kept.trained, advantages=advantages_B)
    found = estimator(rewarded)
    if kept.loss_mask is not rewarded.loss_mask:
        found = found.inside(kept.loss_mask)
    return replace(
        rewarded,
        loss_mask=kept.loss_mask,
        advantages=found.advantages_BT,
        returns=found.returns_BT,
    )


def _without_advantages(batch: S) -> S:
    """Return the batch with no token trained, and with advantages and returns of 0."""
    if isinstance(batch, SampleTable):
        return replace(
            batch,
            trained=torch.zeros_like(batch.trained),
            advantages=torch.zeros(len(batch), dtype=torch.float32),
        )
    zeros_BT = torch.zeros_like(batch.loss_mask, dtype=torch.float32)
    nobody = torch.zeros_like(batch.loss_mask)
    return replace(batch, loss_mask=nobody, advantages=zeros_BT, returns=zeros_BT)


def _among(batch: S, found: S, rows: Tensor) -> S:
    """Return `batch` with the tensors of `found`, which holds its rows `rows`, written to these
    rows.

    All other rows keep their values. In tensors that `batch` does not have they get zeros (ones in
    `sample_weights`). `has_reward` stays that of `batch`.
    """
    changed: dict[str, Any] = {}
    for spec in fields(batch):
        new: Any = getattr(found, spec.name)
        old: Any = getattr(batch, spec.name)
        if isinstance(new, Tensor) and spec.name != "has_reward":
            blank = torch.ones if spec.name == "sample_weights" else torch.zeros
            whole = (
                old.to(new.dtype, copy=True)
                if isinstance(old, Tensor)
                else blank((len(batch), *new.shape[1:]), dtype=new.dtype, device=new.device)
            )
            whole[rows] = new
            changed[spec.name] = whole
    return replace(batch, **changed)


def build_shaping(
    config: AlgorithmConfig,
    *,
    max_new_tokens: int,
    domains: Mapping[str, DomainConfig] | None = None,
    episodes: bool = False,
) -> Shaping:
    """Build all shaping of a run, in its initial state.

    Args:
        config: section `algorithm` of the config.
        max_new_tokens: limit of new tokens in the run's sampling, or of the tokens of an episode;
            default limit of an overlong penalty.
        domains: section `domains` of the config.
        episodes: True if samples are episodes, in which the limit of a tag is that of a turn.
    """
    kl, limit = config.kl_in_reward, DefaultLimit(max_new_tokens, episodes=episodes)
    return Shaping(
        reward_parts=_reward_parts(config.reward_shaping, limit, "algorithm.reward_shaping"),
        mask_parts=_build(MASKS, config.masks, "algorithm.masks"),
        weight_parts=_build(SAMPLE_WEIGHTS, config.sample_weights, "algorithm.sample_weights"),
        advantage_parts=_build(
            ADVANTAGE_SHAPINGS, config.advantage_shaping, "algorithm.advantage_shaping"
        ),
        kl=None if kl is None else KlInReward(kl),
        domains={
            tag: Lesson(
                _reward_parts(
                    config.reward_shaping if own.reward_shaping is None else own.reward_shaping,
                    limit.of(own),
                    "algorithm.reward_shaping"
                    if own.reward_shaping is None
                    else f"domains.{tag}.reward_shaping",
                ),
                ADVANTAGES.build(
                    own.advantage or config.advantage,
                    f"domains.{tag}.advantage" if own.advantage else "algorithm.advantage",
                ),
            )
            for tag, own in (domains or {}).items()
            if own.apart
        },
    )


def _reward_parts(
    configs: Sequence[RewardShapingConfig], limit: DefaultLimit, key: str
) -> dict[str, RewardShaping]:
    """Build the parts of reward shaping of the list with this key; `limit` is that of a penalty
    that names none."""
    filled = [limit.fill(choice) for choice in configs]
    parts = _build(REWARD_SHAPINGS, filled, key)
    for named, choice, name in zip(configs, filled, parts, strict=True):
        if limit.episodes and isinstance(choice, OverlongPenaltyConfig) and choice != named:
            parts[name] = EpisodePenalty(choice)
    return parts


def _build(registry: PartRegistry[T], configs: Sequence[ShapingConfig], key: str) -> dict[str, T]:
    """Build the parts of the list with this key, by `kind` (one's own: by class); the second part
    of a kind is named `<kind>_2`."""
    parts: dict[str, T] = {}
    seen: Counter[str] = Counter()
    for i, config in enumerate(configs):
        kind = part_name(config.kind)
        seen[kind] += 1
        name = kind if seen[kind] == 1 else f"{kind}_{seen[kind]}"
        parts[name] = registry.build(config, f"{key}.{i}")
    return parts


def _under(prefix: str, metrics: Metrics) -> dict[str, Any]:
    """Return the metrics with names that begin with `prefix` and a slash."""
    return {f"{prefix}/{name}": metric for name, metric in metrics.items()}


def _share(chosen_B: Tensor) -> Mean:
    """Return the share of samples that are chosen, bool `[B]`, as a metric."""
    return Mean(int(chosen_B.sum()), len(chosen_B))


def _listed(names: Any) -> str:
    """Return the names in alphabetical order; "nothing" if there are none."""
    return ", ".join(sorted(names)) or "nothing"
