"""Rules between rewards, judges and other parts of an RLVR config; see
`roll.config.checks.common`."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.errors import nearest
from roll.config.rlvr_base import RlvrBase
from roll.config.sections.services.judge import UrlJudgeConfig


def reward_problems(config: RlvrBase) -> Iterator[str]:
    """Yield the problems of rewards and judges."""
    yield from _pools(config)
    yield from _judges(config)
    yield from _grammars(config)
    yield from _comparisons(config)


def _pools(config: RlvrBase) -> Iterator[str]:
    """Yield rewards in unknown pools."""
    known = ", ".join(config.pools)
    for name, reward in config.rewards.items():
        if reward.pool is not None and reward.pool not in config.pools:
            hint = nearest(reward.pool, config.pools)
            yield f"rewards.{name}.pool: no pool {reward.pool!r}{hint} (pools: {known})"


def _judges(config: RlvrBase) -> Iterator[str]:
    """Yield unknown judges, judges that nobody asks, and limits too small to be shared."""
    known = ", ".join(config.judges) or "none"
    for name, reward in config.rewards.items():
        if reward.judge is not None and reward.judge.by not in config.judges:
            hint = nearest(reward.judge.by, config.judges)
            yield f"rewards.{name}.judge.by: no judge {reward.judge.by!r}{hint} (judges: {known})"
    for name, judge in config.judges.items():
        sharers = config.sharers(name)
        if not sharers:
            yield f"judges.{name}: no reward asks it (`judge.by`); add one, or drop the judge"
        elif isinstance(judge, UrlJudgeConfig) and judge.concurrency < sharers:
            yield (
                f"judges.{name}.concurrency: {judge.concurrency} calls at once cannot be shared "
                f"by {sharers} reward workers; use {sharers} or more"
            )


def _grammars(config: RlvrBase) -> Iterator[str]:
    """Yield judges with an adapter, and those whose engine cannot follow the grammar of a
    verdict."""
    for name, judge in config.cluster_judges.items():
        asking = [r.judge for r in config.rewards.values() if r.judge and r.judge.by == name]
        free = sorted({one.verdict.kind for one in asking} - {"number", "class"})
        if judge.model.lora is not None:
            yield f"judges.{name}.model.lora: a judge is not trained; drop it"
        if judge.grammar and free and judge.strategy.kind == "sglang":
            yield (
                f"judges.{name}.grammar: sglang follows no grammar here, and verdicts of kind "
                f"{free[0]} have one; set grammar false (answers of another form are then "
                "failures), or use vllm"
            )


def _comparisons(config: RlvrBase) -> Iterator[str]:
    """Yield judges that compare the samples of a prompt where there is only one."""
    validated = config.validation.sets.values()
    for name, reward in config.rewards.items():
        if reward.judge is None or reward.per != "group":
            continue
        if config.data.samples_per_prompt < 2:
            yield (
                f"data.samples_per_prompt: rewards.{name} compares the samples of a prompt; use 2 "
                "or more"
            )
        meets = any(one.columns.tag is not None or one.tag in reward.tags for one in validated)
        if meets and config.validation.samples_per_prompt < 2:
            yield (
                f"validation.samples_per_prompt: rewards.{name} compares the samples of a prompt, "
                "also in validation; use 2 or more"
            )
