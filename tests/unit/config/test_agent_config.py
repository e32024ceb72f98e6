"""Settings of agentic runs: none is ignored, and what a run writes down can be run itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from roll.config import load_config
from roll.config.errors import ConfigError
from roll.config.sections.environment import EnvironmentConfig, TaskSource
from roll.envs.answers import numbers_of
from roll.envs.loading import check_env
from tests.pipelines.test_agentic import task


@pytest.mark.parametrize("environment", [{}, {"env": None, "agent": "test_run_agent:run"}])
def test_the_config_that_a_run_writes_down_can_be_run_itself(
    environment: dict[str, Any], tmp_path: Path
) -> None:
    config = load_config(task(tmp_path, environment=environment)).config
    again = tmp_path / "config.yaml"
    again.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    assert load_config(again).config == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit": 3}, "`limit` is for a file of tasks, not for `seeds`"),
        ({"split": "test"}, "`split` is for a file of tasks"),
        ({"columns": {"tag": "level"}}, "`columns` is for a file of tasks"),
        ({"system": "Be brief."}, "`system` is put before prompts"),
    ],
)
def test_a_setting_that_tasks_made_of_seeds_do_not_have_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        TaskSource.model_validate({"seeds": 5, **settings})


def test_a_file_of_tasks_has_the_settings_of_files_but_no_system_message() -> None:
    assert TaskSource(path="a.jsonl", limit=3, split="test").limit == 3
    with pytest.raises(ValidationError, match="`system` is put before prompts"):
        TaskSource(path="a.jsonl", system="Be brief.")


def test_agents_are_not_held_back_and_a_limit_on_them_is_refused() -> None:
    with pytest.raises(ValidationError, match="`concurrency` is for `env`"):
        EnvironmentConfig(agent="a:b", concurrency=4)
    assert EnvironmentConfig(env="frozen_lake", concurrency=4).concurrency == 4


def test_a_limit_of_prompts_is_refused_where_episodes_have_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an episode has one limit"):
        load_config(task(tmp_path), ["data.max_prompt_tokens=5"])


def test_pictures_are_refused_where_episodes_have_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.pictures: episodes have no pictures"):
        load_config(task(tmp_path), ["data.pictures.workers=1"])
    with pytest.raises(ValidationError, match="take no pictures"):
        TaskSource.model_validate({"path": "a.jsonl", "columns": {"images": "images"}})


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_a_curriculum_takes_the_rewards_of_environments(tmp_path: Path) -> None:
    assert load_config(task(tmp_path), ["data.curriculum={}"]).config is not None


def test_every_tag_is_asked_for_an_advantage_that_names_rewards(tmp_path: Path) -> None:
    told = refused(task(tmp_path), "domains.words.advantage.kind=gdpo")
    assert "domains.words.advantage.kind: gdpo normalises each of `rewards`" in told


def test_tags_of_a_column_are_those_of_environments(tmp_path: Path) -> None:
    rows = tmp_path / "tasks.jsonl"
    rows.write_text('{"kind": "words"}\n')
    column = f"data.sources=[{{path: {rows}, columns: {{tag: kind}}}}]"
    path = task(tmp_path)
    assert load_config(path, [column, "domains={words: {}}"]).config is not None
    told = refused(path, column, "domains={wrds: {}}")
    assert "no reward or environment takes the tag 'wrds'; did you mean 'words'?" in told


@pytest.mark.parametrize("own", [False, True])
def test_a_penalty_knows_the_limit_of_episodes(own: bool, tmp_path: Path) -> None:
    """A tag's `max_new_tokens` is that of a turn."""
    where = "domains.words" if own else "algorithm"
    penalty = f"{where}.reward_shaping=[{{kind: overlong_penalty, max_tokens: 40}}]"
    limits = ["data.max_episode_tokens=50", "domains.words.sampling.max_new_tokens=4"]
    assert load_config(task(tmp_path), [penalty, *limits]).config is not None
    late = penalty.replace("40", "100")
    assert "no response is long enough" in refused(task(tmp_path), late, *limits)
    unnamed = f"{where}.reward_shaping=[{{kind: overlong_penalty}}]"
    assert load_config(task(tmp_path), [unnamed, *limits]).config is not None


@pytest.mark.parametrize("advantage", ["gigpo", "turn_gae"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("reward_shaping=[{kind: scale, factor: 0.1}]", "algorithm.reward_shaping.0: scale"),
        ("reward_shaping=[{kind: clip, high: 1.0}]", "algorithm.reward_shaping.0: clip"),
        (
            "reward_shaping=[{kind: normalize, mean: group, std: none}]",
            "algorithm.reward_shaping.0: normalize",
        ),
        ("kl_in_reward={}", "algorithm.kl_in_reward: "),
    ],
)
def test_what_changes_the_rewards_of_all_turns_is_refused_beside_advantages_of_turns(
    change: str, told: str, advantage: str, tmp_path: Path
) -> None:
    """Else the last turn would get what the total has beyond its turns: of 1, 1, 1 and a scale of
    0.1 it would get -1.7."""
    kind, change = f"algorithm.advantage.kind={advantage}", f"algorithm.{change}"
    assert told in refused(task(tmp_path), kind, change)


def test_one_critic_does_not_learn_from_tags_that_do_not_ask_it(tmp_path: Path) -> None:
    told = refused(task(tmp_path), "domains.words.advantage.kind=turn_gae")
    assert "turn_gae beside grpo of the run: the critic of turn_gae learns from all" in told


@pytest.mark.parametrize("rows", ["rows=turns", "history=fork"])
@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ("{model: {path: scores}}", "rewards.own.model: a reward model reads one row"),
        ("{fn: length, kwargs: {longest: 9}}", "rewards.own.kwargs.unit: `tokens` are those of"),
    ],
)
def test_rewards_of_tokens_are_refused_where_these_are_in_several_rows(
    reward: str, told: str, rows: str, tmp_path: Path
) -> None:
    """They see the first row: episodes that differ in their third turn would be worth the same."""
    own = reward.replace("{", "{tags: [words], pool: all, ", 1)
    if "length" in reward:
        own = own.replace("pool: all, ", "")
    named = f"rewards={{own: {own}}}"
    assert load_config(task(tmp_path), [named]).config is not None
    assert told in refused(task(tmp_path), named, f"environments.words.{rows}")


def test_groups_are_those_of_one_player(tmp_path: Path) -> None:
    """Each player's samples are compared with one another, not with those of the other player."""
    seats = ["environments.words.seats=2", "validation.sets=null"]
    told = refused(task(tmp_path), *seats)
    assert "compares the samples of one prompt and needs at least 2 of each player" in told
    more = [*seats, "data.samples_per_prompt=4"]
    assert load_config(task(tmp_path), more).config is not None
    pass_k = "algorithm.advantage={kind: pass_k, k: 3}"
    assert "3 of 2 samples per prompt of each player" in refused(task(tmp_path), *more, pass_k)


@pytest.mark.parametrize(
    "kind", ["scale, factor: 0.1", "clip, high: 1.0", "normalize, mean: batch, std: none"]
)
def test_what_does_not_change_the_rewards_of_turns_is_refused_beside_them(
    kind: str, tmp_path: Path
) -> None:
    path = task(tmp_path, environment={"credit": "turns"})
    shaping = f"reward_shaping=[{{kind: {kind}}}]"
    for key in ("algorithm", "domains.words"):
        told = refused(path, f"{key}.{shaping}")
        assert f"{key}.reward_shaping.0: with environments.words.credit: turns" in told
    of_others = [f"algorithm.{shaping}", "domains.words.reward_shaping=[]"]
    assert load_config(path, of_others).config is not None
    assert load_config(task(tmp_path), [f"algorithm.{shaping}"]).config is not None


def test_rewards_of_turns_that_nothing_reads_are_refused(tmp_path: Path) -> None:
    path = task(tmp_path, environment={"credit": "turns"})
    teacher = "teachers={t: {pool: all, model: {path: model}, tags: [words]}}"
    told = refused(path, teacher, "algorithm.advantage={kind: distill}")
    assert "environments.words.credit: distill with mix = 0" in told
    told = refused(path, teacher, "algorithm.loss=[{kind: distill}]")
    assert "environments.words.credit: changes advantages, which distill does not read" in told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("rollout.siblings=separate", "rollout.siblings: episodes of a task are played separately"),
        (
            "rollout={in_flight: restart, max_staleness: 1}",
            "rollout.in_flight: restart begins a request anew",
        ),
    ],
)
def test_a_choice_that_episodes_do_not_have_is_refused(
    change: str, told: str, tmp_path: Path
) -> None:
    assert told in refused(task(tmp_path), change)


def test_redundant_episodes_need_no_other_setting(tmp_path: Path) -> None:
    assert load_config(task(tmp_path), ["rollout.redundant_samples=1"]).config is not None


def test_a_limit_of_memory_needs_a_process_for_each_episode() -> None:
    with pytest.raises(ValidationError, match="`memory_gb` are for `env`"):
        EnvironmentConfig(agent="a:b", memory_gb=1.0)
    for env in ("frozen_lake", "a:B"):
        with pytest.raises(ConfigError, match=r"environments\.x\.memory_gb: limits the process"):
            check_env("environments.x", EnvironmentConfig(env=env, memory_gb=1.0))
    check_env("environments.x", EnvironmentConfig(env="a:B", memory_gb=1.0, process=True))


def test_rewards_and_environments_have_names_of_their_own(tmp_path: Path) -> None:
    own = "rewards={words: {fn: exact, tags: [words]}}"
    assert "rewards.words: an environment has this name, too" in refused(task(tmp_path), own)


def test_a_number_of_an_environment_is_not_taken_for_the_mean_of_its_rewards() -> None:
    found = numbers_of({"mean": 2.0, "moves": 3, "state": "a"})
    assert found == {"info_mean": 2.0, "moves": 3.0}
