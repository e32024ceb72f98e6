"""Rules between `domains` and the rest of a config; see `roll.config.checks.common`."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.agentic_base import AgenticBase
from roll.config.algorithm import OverlongPenaltyConfig
from roll.config.errors import nearest
from roll.config.rlvr_base import RlvrBase
from roll.config.sections.domain import DomainConfig
from roll.config.sections.roles import Role

_LEARNING_BESIDE = {
    "gae": Role.CRITIC,
    "turn_gae": Role.CRITIC,
    "prime": Role.PROCESS_REWARD,
}
"""Kind of advantage -> the role that it needs."""


def domain_problems(config: RlvrBase) -> Iterator[str]:
    """Yield the problems of `domains`, one line each, `key: problem and reason`."""
    for tag, domain in config.domains.items():
        yield from _tag(config, tag)
        yield from _weights(config, tag, domain)
        yield from _limit(config, tag, domain)
    yield from _learning_beside(config)


def _tag(config: RlvrBase, tag: str) -> Iterator[str]:
    """Yield a problem if no training prompt can have the tag. If tags come from a column, the tag
    is compared with those of rewards, teachers and environments, because those of the rows are not
    known."""
    sources = config.data.sources
    known = {each for reward in config.rewards.values() for each in reward.tags}
    known |= {each for teacher in config.teachers.values() for each in teacher.tags}
    what = "reward takes"
    if isinstance(config, AgenticBase):
        known |= {each for one in config.environments.values() for each in one.tags}
        what = "reward or environment takes"
    if all(source.columns.tag is None for source in sources):
        known, what = {source.tag for source in sources}, "source has"
    if tag not in known:
        yield (
            f"domains.{tag}: no {what} the tag {tag!r}{nearest(tag, known)} "
            f"(tags: {', '.join(sorted(known)) or 'none'})"
        )


def _weights(config: RlvrBase, tag: str, domain: DomainConfig) -> Iterator[str]:
    """Yield weights of rewards that do not exist, or that do not score the tag."""
    scoring = [name for name, reward in config.rewards.items() if tag in reward.tags]
    for name in domain.rewards:
        key = f"domains.{tag}.rewards.{name}"
        if name not in config.rewards:
            yield f"{key}: no reward {name!r}{nearest(name, scoring)} (rewards of this tag: " + (
                f"{', '.join(scoring) or 'none'})"
            )
        elif name not in scoring:
            yield (
                f"{key}: the reward does not score the tag {tag!r}; add it to rewards.{name}.tags, "
                "or drop the weight"
            )


def _limit(config: RlvrBase, tag: str, domain: DomainConfig) -> Iterator[str]:
    """Yield a problem if the tag has a `max_new_tokens` of its own while a length penalty of the
    run takes over the limit of the run."""
    own = config.max_response_tokens_of(tag)
    if own == config.max_response_tokens or domain.reward_shaping is not None:
        return
    for i, part in enumerate(config.algorithm.reward_shaping):
        if isinstance(part, OverlongPenaltyConfig) and part.max_tokens is None:
            yield (
                f"domains.{tag}.sampling.max_new_tokens: algorithm.reward_shaping.{i} penalizes "
                f"responses near sampling.max_new_tokens = {config.sampling.max_new_tokens}, which "
                f"is not the limit of this tag; set domains.{tag}.reward_shaping, or max_tokens "
                "of the penalty"
            )


def _learning_beside(config: RlvrBase) -> Iterator[str]:
    """Yield tags of which the estimator needs a role that learns beside the policy while that of
    the run does not, or the other way round: such a role learns from all samples."""
    run = config.algorithm.advantage.kind
    for tag, domain in config.domains.items():
        own = domain.advantage.kind if domain.advantage else run
        for kind, role in _LEARNING_BESIDE.items():
            if (own == kind) != (run == kind):
                yield (
                    f"domains.{tag}.advantage.kind: {own} beside {run} of the run: the {role} of "
                    f"{kind} learns from all samples; use {kind} for every tag (its settings may "
                    "differ) or for none"
                )
