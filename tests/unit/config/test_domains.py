"""Settings of single tags: what is computed apart, and what a mistake is told."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms import build_advantage, build_shaping
from roll.config.algorithm import AlgorithmConfig
from roll.config.errors import ConfigError
from roll.config.rlvr import RlvrConfig
from roll.config.sections.domain import DomainConfig
from roll.config.sections.sampling import SamplingConfig
from roll.core.batches import RolloutBatch
from roll.core.completion import Completion
from roll.core.types import GenerateRequest, Prompt, Sample, SamplingParams
from roll.distributed.local import LocalLauncher
from roll.rollout.assemble import assemble, rollout_metrics
from roll.rollout.filters import build_filters
from roll.rollout.types import Group, GroupTask, ScoredSample
from roll.runtime.reward_router import RewardRouter
from tests.fakes import SAMPLING, ScriptedEngine, group, prompt, single_turn
from tests.rlvr_file import error, loaded
from tests.tiny import rollout_batch
from tests.unit.rewards.test_left_out import scored
from tests.unit.rewards.test_reward_router import hosted, sample

TAGS = ["math", "math", "code", "code", "chat", "chat"] * 2
"""Tag of each row of a batch of 12; neighbours are siblings."""


def batch(seed: int = 0) -> RolloutBatch:
    """Three tags, two groups of two samples each; rewards of every row are different."""
    made = scored(rollout_batch(12, seed=seed))
    rewards_B = torch.rand(12, generator=torch.Generator().manual_seed(seed))
    pairs = torch.arange(12) // 2
    return replace(made, tags=TAGS, rewards=rewards_B, group_ids=pairs)


def domains(**by_tag: dict[str, Any]) -> dict[str, DomainConfig]:
    return {tag: DomainConfig.model_validate_json(_json(one)) for tag, one in by_tag.items()}


def _json(value: Any) -> str:
    return json.dumps(value)


def learned(
    rows: RolloutBatch, algorithm: dict[str, Any], own: dict[str, DomainConfig] | None = None
) -> tuple[RolloutBatch, dict[str, float]]:
    config = AlgorithmConfig.model_validate_json(_json(algorithm))
    shaping = build_shaping(config, max_new_tokens=12, domains=own)
    found, metrics = shaping.add_advantages(rows, build_advantage(config))
    return found, metrics.values_by_name()


ADVANTAGES: list[dict[str, Any]] = [
    {"kind": "grpo"},
    {"kind": "grpo", "std": "batch"},
    {"kind": "rloo"},
    {"kind": "reinforce", "baseline": "batch", "gamma": 0.9},
    {"kind": "reinforce_pp"},
    {"kind": "remax"},
    {"kind": "gdpo"},
]
SHAPINGS: list[list[dict[str, Any]]] = [
    [],
    [{"kind": "scale", "factor": 3.0}],
    [{"kind": "normalize", "mean": "batch", "std": "batch"}],
]


@given(
    st.sampled_from(ADVANTAGES),
    st.sampled_from(ADVANTAGES),
    st.sampled_from(SHAPINGS),
    st.integers(0, 50),
)
@settings(max_examples=30)
def test_a_tag_with_settings_of_its_own_is_a_step_of_its_own(
    run: dict[str, Any], own: dict[str, Any], shaping: list[dict[str, Any]], seed: int
) -> None:
    rows = batch(seed)
    found, _ = learned(
        rows, {"advantage": run}, domains(code={"advantage": own, "reward_shaping": shaping})
    )
    assert found.advantages is not None
    for tags, algorithm in (
        (("code",), {"advantage": own, "reward_shaping": shaping}),
        (("math", "chat"), {"advantage": run}),
    ):
        mine = torch.tensor([i for i, tag in enumerate(TAGS) if tag in tags])
        alone, _ = learned(rows.select(mine), algorithm)
        assert alone.advantages is not None
        assert torch.equal(found.advantages[mine], alone.advantages)


def test_masks_weights_and_whitening_still_know_all_tags() -> None:
    rows = batch()
    algorithm = {
        "advantage": {"kind": "rloo"},
        "masks": [{"kind": "difficulty", "low": 0.2, "high": 0.8}],
        "sample_weights": [{"kind": "length"}],
        "advantage_shaping": [{"kind": "whiten"}],
    }
    same = domains(code={"advantage": {"kind": "rloo"}}, math={"reward_shaping": []})
    together, _ = learned(rows, algorithm)
    apart, _ = learned(rows, algorithm, same)
    for name in ("advantages", "loss_mask", "sample_weights"):
        assert torch.equal(getattr(apart, name), getattr(together, name))


def test_a_tag_normalises_with_moments_of_its_own_that_are_saved() -> None:
    running = {"kind": "normalize", "mean": "running", "std": "running"}
    config = AlgorithmConfig.model_validate_json(_json({"advantage": {"kind": "reinforce"}}))
    own = domains(code={"reward_shaping": [running]})
    first, second = (build_shaping(config, max_new_tokens=12, domains=own) for _ in range(2))
    _, metrics = first.add_advantages(batch(1), build_advantage(config))
    second.load(first.state())
    assert first.state()["tag/code/reward/normalize"]["count"] == 4
    assert "tag/code/shaping/reward/normalize/running_mean" in metrics
    after, _ = first.add_advantages(batch(2), build_advantage(config))
    again, _ = second.add_advantages(batch(2), build_advantage(config))
    assert after.advantages is not None
    assert again.advantages is not None
    assert torch.equal(after.advantages, again.advantages)


def test_failed_samples_of_a_tag_are_left_out() -> None:
    rows = replace(batch(), has_reward=torch.tensor([i not in (2, 3, 8) for i in range(12)]))
    found, metrics = learned(rows, {}, domains(code={"advantage": {"kind": "rloo"}}))
    assert found.advantages is not None
    assert not found.advantages[[2, 3, 8]].any()
    assert not found.advantages[9].any()  # alone in its group
    assert metrics["tag/code/advantage_abs_mean"] == 0


def test_each_tag_reports_its_advantages() -> None:
    found, metrics = learned(batch(), {})
    assert found.advantages is not None
    code = torch.tensor([tag == "code" for tag in TAGS])
    mask = found.loss_mask[code]
    expected = found.advantages[code].abs()[mask].double().mean().item()
    assert metrics["tag/code/advantage_abs_mean"] == pytest.approx(expected)
    assert metrics["tag/code/trained_tokens_fraction"] == pytest.approx(
        mask.sum().item() / found.loss_mask.sum().item()
    )


class _Compared(str):
    """Tag that counts how often it is compared."""

    times = 0

    def __eq__(self, other: object) -> bool:
        _Compared.times += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_many_tags_are_not_compared_with_every_sample() -> None:
    rows = replace(batch(), tags=[_Compared(f"tag {i % 6}") for i in range(12)])
    _, metrics = learned(rows, {})
    assert metrics["tag/tag 5/trained_tokens_fraction"] > 0
    assert _Compared.times <= 12


def _group(tag: str, rewards: list[float], baseline: float | None = None) -> Group:
    asked = Prompt(id=f"{tag}:0", tokens=(1,), text="?", answer="", tag=tag)
    samples = [
        ScoredSample(replace_prompt(sample(tag), asked, i), r, by_name={"one": r, "other": 1.0})
        for i, r in enumerate(rewards)
    ]
    greedy = None if baseline is None else replace(samples[0], reward=baseline)
    return Group(asked, tuple(samples), 0, baseline=greedy)


def replace_prompt(one: Sample, asked: Prompt, number: int) -> Sample:
    return Sample(f"0/{asked.id}/{number}", f"0/{asked.id}", asked, one.completion)


def test_the_table_has_weights_temperatures_and_baselines_of_each_tag() -> None:
    weights = {"math": {"one": 1.0, "other": 0.5}, "code": {"one": 2.0, "other": 0.0}}
    groups = [_group("math", [1.0, 0.0], baseline=0.5), _group("code", [0.0, 1.0])]
    table = assemble(groups, weights.__getitem__, {"math": 0.7, "code": 1.2}.__getitem__)
    assert table.reward_weights is not None
    assert table.reward_weights.tolist() == [[1.0, 0.5]] * 2 + [[2.0, 0.0]] * 2
    assert table.temperatures is not None
    torch.testing.assert_close(table.temperatures, torch.tensor([0.7, 0.7, 1.2, 1.2]))
    assert table.baseline_rewards is not None
    assert table.baseline_rewards[:2].tolist() == [0.5, 0.5]
    assert all(math.isnan(each) for each in table.baseline_rewards[2:].tolist())


def test_a_reward_counts_by_the_weight_that_the_tag_gives_it() -> None:
    async def both() -> list[float]:
        scored = await router.score([sample("math")]) + await router.score([sample("code")])
        return [one.reward for one in scored]

    with LocalLauncher() as launcher:
        one, _ = hosted(launcher, "one", "math", "code")
        weights = {"math": {"one": 3.0}, "code": {"one": 0.5}}
        router = RewardRouter({"one": one}, weights.__getitem__)
        assert asyncio.run(both()) == [3.0, 0.5]


def test_a_tag_is_filtered_by_its_own_filters_only() -> None:
    own = domains(code={"filters": []}, chat={"filters": [{"kind": "mean_reward", "high": 0.5}]})
    equal = [{"kind": "equal_rewards"}]
    config = DomainConfig.model_validate_json(_json({"filters": equal}))
    (judge,) = build_filters(config.filters or (), own)

    def reason(tag: str, rewards: list[float]) -> str | None:
        return judge(_group(tag, rewards))

    assert reason("math", [1.0, 1.0]) == "all rewards equal to 1"
    assert reason("code", [1.0, 1.0]) is None
    assert reason("chat", [1.0, 1.0]) == "mean reward at least 0.5"
    assert reason("chat", [0.2, 0.2]) is None


def test_prompts_are_sampled_as_their_tag_says() -> None:
    seen: list[tuple[str, SamplingParams]] = []

    class Notes(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> list[Completion]:
            seen.append((request.id, request.sampling))
            return await super().generate(request)

    warm = replace(SAMPLING, temperature=1.3, max_new_tokens=5)
    turn = single_turn(Notes(), tag_sampling={"warm": warm}, tag_greedy={"warm": True})
    for tag in ("warm", "other"):
        asked = replace(prompt(tag), tag=tag)
        made = asyncio.run(turn.run(GroupTask(asked, 0)))
        assert (made.baseline is not None) == (tag == "warm")
    found = dict(seen)
    assert found["0/warm"] == warm
    assert found["0/warm/greedy"] == replace(warm, temperature=0.0)
    assert found["0/other"] == SAMPLING
    assert len(found) == 3


def test_what_a_domain_leaves_out_is_as_in_the_run() -> None:
    run = SamplingConfig(temperature=0.8, max_new_tokens=99, stop=("x",))
    own = domains(code={"sampling": {"temperature": 1.1}})["code"]
    assert own.sampling.over(run) == run.model_copy(update={"temperature": 1.1})


KNOWN = ["domains={sort: {rewards: {sort: 2.0}}}"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("domains={sorted: {}}", "domains.sorted: no source has the tag 'sorted'; did you mean"),
        (
            "domains.sort.rewrds={sort: 1}",
            "domains.sort.rewrds = {'sort': 1}: unknown key; did you",
        ),
        ("domains.sort.rewards={srt: 1.0}", "domains.sort.rewards.srt: no reward 'srt'; did you"),
        ("domains.sort.sampling.temprature=1", "unknown key; did you mean 'temperature'?"),
        ("domains.sort.advantage.kind=grp", "domains.sort.advantage.kind = 'grp': unknown"),
        ("domains.sort.filters=[{kind: equal}]", "domains.sort.filters.0.kind = 'equal': unknown"),
        ("domains.sort.advantage.kind=prime", "the process_reward of prime learns from all"),
        ("domains.sort.advantage.kind=gae", "gae beside grpo of the run: the critic of gae"),
        ("domains.sort.advantage={kind: pass_k, k: 8}", "domains.sort.advantage.k: 8 of 8 samples"),
        ("domains.sort.sampling.temperature=0", "domains.sort.sampling.temperature = 0"),
        ("domains.sort.advantage.kind=distill", "teachers: distill of domains.sort needs"),
    ],
)
def test_a_mistake_is_told_with_its_key(run_file: Path, change: str, told: str) -> None:
    assert told in error(run_file, change)


def test_a_limit_that_a_penalty_would_not_know_is_refused(run_file: Path) -> None:
    changes = [
        "algorithm.reward_shaping=[{kind: overlong_penalty}]",
        "domains.sort.sampling.max_new_tokens=64",
    ]
    assert "domains.sort.sampling.max_new_tokens: algorithm.reward_shaping.0" in error(
        run_file, *changes
    )
    own = "domains.sort.reward_shaping=[{kind: overlong_penalty}]"
    config = loaded(run_file, *changes, own)
    assert config.longest_response == 1024
    assert config.temperature("sort") == 1.0


def test_tags_of_a_column_are_those_that_rewards_take(run_file: Path) -> None:
    column = "data.sources=[{path: a.jsonl, columns: {tag: kind}}]"
    config = loaded(run_file, column, *KNOWN, "domains.sort.sampling.max_new_tokens=7")
    assert [config.max_response_tokens_of(tag) for tag in ("sort", "other")] == [7, 1024]
    assert loaded(run_file, column, *KNOWN).reward_weights("sort") == {"sort": 2.0}
    assert "no reward takes the tag 'srt'; did you mean 'sort'?" in error(
        run_file, column, "domains={srt: {}}"
    )


def test_a_resolved_config_means_the_same(run_file: Path) -> None:
    changes = ["sampling.max_new_tokens=77", "domains.sort.sampling.temperature=0.5"]
    config = loaded(run_file, *changes)
    again = RlvrConfig.model_validate_json(config.model_dump_json())
    assert again == config
    assert again.domain_sampling["sort"].max_new_tokens == 77


def test_an_inherited_domain_can_be_dropped(tmp_path: Path, run_file: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("defaults: [run.yaml]\ndomains: {sort: null}\n")
    run_file.write_text(run_file.read_text() + "domains: {sort: {filters: []}}\n")
    assert loaded(run_file).domains
    assert not loaded(child).domains


def test_a_weight_for_a_reward_that_does_not_score_the_tag_is_refused(run_file: Path) -> None:
    changes = [
        "data.sources=[{path: a.jsonl, tag: sort}, {path: b.jsonl, tag: other}]",
        "rewards.other={fn: exact, tags: [other]}",
        "domains.sort.rewards={other: 1.0}",
    ]
    with pytest.raises(ConfigError, match=r"domains\.sort\.rewards\.other: the reward does not"):
        loaded(run_file, *changes)


def test_groups_of_several_tags_are_counted_apart() -> None:
    groups = [_group("math", [1.0, 1.0]), _group("code", [0.0, 1.0])]
    found = rollout_metrics(groups, current_version=0).values_by_name()
    assert found["tag/math/samples_fraction"] == 0.5
    assert found["tag/math/groups/equal_rewards_fraction"] == 1.0
    assert found["tag/code/groups/equal_rewards_fraction"] == 0.0
    alone = rollout_metrics([group("a", [0.0, 1.0])], current_version=0)
    assert not [name for name in alone if name.startswith("tag/")]


def test_without_rewards_the_advantages_of_all_tags_must_do_without(run_file: Path) -> None:
    changes = [
        "rewards.sort=null",
        "teachers.large={pool: all, model: {path: other}, tags: [sort]}",
        "data.sources=[{path: a.jsonl, tag: sort}]",
        "algorithm.advantage.kind=distill",
    ]
    assert loaded(run_file, *changes).rewards == {}
    told = error(run_file, *changes, "domains.sort.advantage.kind=gdpo")
    assert "follows the advantage gdpo of domains.sort, which is made of rewards" in told
    assert "domains.sort.advantage.kind: gdpo reads rewards, and there are none" in told
