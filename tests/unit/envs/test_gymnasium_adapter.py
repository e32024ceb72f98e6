"""Environments of gymnasium, by name: observations to text, actions out of text."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

gymnasium = pytest.importorskip("gymnasium", reason="pip install -r requirements/agents.txt")

from roll.config.sections.environment import EnvironmentConfig  # noqa: E402
from roll.core.errors import ConfigError  # noqa: E402
from roll.envs.loading import load_env  # noqa: E402


def made(env: str, **config: Any) -> Any:
    return load_env("g", EnvironmentConfig(env=f"gymnasium:{env}", **config))()


def told(space: dict[str, Any], adapter: dict[str, Any] | None = None, **more: Any) -> Any:
    kwargs = {"space": space, **more}
    return made("tests.unit.envs.gym_envs:told", kwargs=kwargs, adapter=adapter or {})


def test_frozen_lake_is_played_by_name_as_gymnasium_plays_it() -> None:
    env = made("FrozenLake-v1", kwargs={"is_slippery": False})
    real = gymnasium.make("FrozenLake-v1", is_slippery=False)
    text, info = env.reset(seed=3)
    place, _ = real.reset(seed=3)
    assert text == "Answer with one of: left, down, right, up.\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert info == {"state": str(place), "prob": 1, "invalid": 0}
    for action in (1, 1, 2, 2, 1, 2):
        name = ("left", "down", "right", "up")[action]
        text, reward, terminated, truncated, info = env.step(f"I go {name.upper()}.")
        place, expected, *ends, _ = real.step(action)
        assert [reward, terminated, truncated, info["state"]] == [expected, *ends, str(place)]
        assert text.replace("[", "").replace("]", "").endswith("SFFF\nFHFH\nFFFH\nHFFG")
    assert (reward, terminated) == (1.0, True)
    env.close()


def test_the_same_seed_gives_the_same_episode() -> None:
    texts = []
    for seed in (5, 5, 6):
        env = made("Blackjack-v1")
        texts.append([env.reset(seed=seed)[0], env.step("hit")[0], env.step("hit")[0]])
    assert texts[0] == texts[1] != texts[2]


def test_a_turn_without_an_action_is_counted_and_answered_and_not_played() -> None:
    env = told({"Discrete": {"n": 3}}, {"invalid_reward": -0.1})
    assert env.reset(seed=1)[0] == "Answer with one number from 0 to 2.\nbegin"
    for count, action in enumerate(("", "three", "3", "-1", "1.5", "x2y", "1" * 5000), start=1):
        text, reward, terminated, truncated, info = env.step(action)
        assert text == "This is no action. Answer with one number from 0 to 2.\nbegin"
        assert [reward, terminated, truncated, info["invalid"]] == [-0.1, False, False, count]
    assert env.step("not 1 but 2.")[0] == "2"
    assert env.step("?")[0].endswith("\n2"), "it is shown again what it has seen"


@pytest.mark.parametrize(
    ("space", "adapter", "good", "action", "bad"),
    [
        ({"Discrete": {"n": 3, "start": -1}}, {}, "-1", "-1", "2"),
        ({"Discrete": {"n": 2}}, {"actions": ["go", "go on"]}, "I Go On!", "1", "ago"),
        ({"Discrete": {"n": 2}}, {"pattern": "<a>(.*?)</a>"}, "0 <a>1</a> 0", "1", "1"),
        ({"Text": {"max_length": 4, "charset": "abc "}}, {}, "abba\n", "'abba'", "abcabc"),
        (
            {"MultiDiscrete": {"nvec": [3, 4]}},
            {},
            "9, then 2 and 3.",
            "array([2, 3])",
            "2, 4",
        ),
        ({"MultiBinary": {"n": 3}}, {}, "1 0 1", "array([1, 0, 1], dtype=int8)", "1 0"),
        ({"Tuple": [{"Discrete": {"n": 2}}] * 2}, {}, "1, 0", "(1, 0)", "1, 2"),
        (
            {"Box": {"low": -1, "high": 1, "shape": [2]}},
            {},
            "0.5 and -1e0",
            "array([ 0.5, -1. ], dtype=float32)",
            "0.5 and 2",
        ),
    ],
)
def test_actions_of_each_space(
    space: dict[str, Any], adapter: dict[str, Any], good: str, action: str, bad: str
) -> None:
    env = told(space, adapter)
    env.reset(seed=1)
    env.step("9" * 5000)
    env.step("{" * 5000)
    env.reset(seed=1)
    assert env.step(good)[0] == action
    _, reward, _, _, info = env.step(good)
    assert (reward, info["count"]) == (0.5, 3)
    assert type(info["count"]) is int
    assert env.step(bad)[0].startswith("This is no action. Answer with ")


@pytest.mark.parametrize(
    ("observation", "say", "text"),
    [
        ({"Discrete": {"n": 9}}, 7, "7"),
        ({"Box": {"low": 0, "high": 1, "shape": [2]}}, [0.25, 1 / 3], "[0.25, 0.3333]"),
        ({"Tuple": [{"Discrete": {"n": 9}}] * 2}, (1, True), "[1, True]"),
        ({"Dict": {"at": {"Discrete": {"n": 9}}}}, {"at": 3}, "at: 3"),
    ],
)
def test_observations_of_each_space(observation: dict[str, Any], say: Any, text: str) -> None:
    env = told({"Discrete": {"n": 2}}, {"instructions": ""}, observation=observation, say=say)
    assert env.reset(seed=1)[0] == text


def test_wrappers_are_put_around_it() -> None:
    paths = ["tests.unit.envs.gym_envs:Shouting"]
    limit = {"path": "gymnasium.wrappers:TimeLimit", "kwargs": {"max_episode_steps": 1}}
    env = told({"Discrete": {"n": 2}}, {"wrappers": [*paths, limit]})
    assert env.reset(seed=1)[0].endswith("\nBEGIN")
    assert env.step("1")[3], "truncated by its limit"


@pytest.mark.filterwarnings("ignore:.*out of date:DeprecationWarning")
def test_all_environments_of_gymnasium_with_few_actions_name_them() -> None:
    own = ("gymnasium.envs.toy_text", "gymnasium.envs.classic_control")
    ids = [id for id, each in gymnasium.registry.items() if str(each.entry_point).startswith(own)]
    assert {"FrozenLake8x8-v1", "CliffWalkingSlippery-v1", "CartPole-v0"} <= set(ids)
    for id in ids:
        with closing(gymnasium.make(id)) as env:
            discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
        with closing(made(id)) as env:
            opening, _ = env.reset(seed=0)
        assert opening.startswith("Answer with one of: ") == discrete, id


@pytest.mark.parametrize(
    ("wrapper", "action", "wanted"),
    [("Worded", "down", "a text of"), ("Halved", "1", "one number from 0 to 1")],
)
def test_actions_of_a_wrapper_have_no_names_of_the_environment_in_it(
    wrapper: str, action: str, wanted: str
) -> None:
    adapter = {"wrappers": [f"tests.unit.envs.gym_envs:{wrapper}"]}
    env = made("FrozenLake-v1", kwargs={"is_slippery": False}, adapter=adapter)
    assert env.reset(seed=1)[0].startswith(f"Answer with {wanted}")
    assert env.step(action)[0].endswith("SFFF\n[F]HFH\nFFFH\nHFFG")


def test_a_wrapper_with_a_path_needs_no_arguments() -> None:
    entry = {"path": "tests.unit.envs.gym_envs:Shouting"}
    env = told({"Discrete": {"n": 2}}, {"wrappers": [entry, {**entry, "kwargs": None}]})
    assert env.reset(seed=1)[0].endswith("\nBEGIN")


def test_rows_come_as_options_and_seeds_alone_as_none() -> None:
    env = told({"Discrete": {"n": 2}})
    assert env.reset(seed=1, options={"prompt": "p"})[1]["options"] == "{'prompt': 'p'}"
    assert env.reset(seed=1, options={})[1]["options"] == "None"


@pytest.mark.parametrize(
    ("env", "config", "message"),
    [
        ("FrozenLake-v9", {}, "environments.g: gymnasium: "),
        ("FrozenLake-v1", {"kwargs": {"sise": 4}}, "unexpected keyword argument 'sise'"),
        ("FrozenLake-v1", {"kwargs": {"num_envs": 4}}, "a vector environment plays several"),
        (
            "tests.unit.envs.gym_envs:several",
            {},
            "a vector environment plays several games at once",
        ),
        ("FrozenLake-v1", {"adapter": {"shows": 1}}, r"adapter: unknown key 'shows' \(known: act"),
        ("FrozenLake-v1", {"adapter": {"actions": ["a"]}}, "found 1 names .a.; the environment"),
        ("CartPole-v1", {"adapter": {"show": "ansi"}}, "CartPole-v1 has no render_mode ansi"),
        ("CartPole-v1", {"adapter": {"wrappers": ["gymnasium:No"]}}, "there is no 'gymnasium:No'"),
        (
            "CartPole-v1",
            {"adapter": {"wrappers": [{"kwargs": {}}]}},
            r"wrappers: expected an import path, or .*, found \{'kwargs': \{\}\}",
        ),
        ("CartPole-v1", {"adapter": {"wrappers": [3]}}, "wrappers: expected .* found 3"),
        ("", {}, "has no name; for example gymnasium:FrozenLake-v1"),
        (
            "tests.unit.envs.gym_envs:told",
            {
                "kwargs": {
                    "space": {"Discrete": {"n": 2}},
                    "observation": {"Box": {"low": 0, "high": 1, "shape": [84, 84]}},
                }
            },
            "observations have 7056 numbers",
        ),
        (
            "tests.unit.envs.gym_envs:told",
            {"kwargs": {"space": {"Dict": {"a": {"Discrete": {"n": 2}}}}}},
            "actions of the space Dict cannot be written as text",
        ),
    ],
)
def test_what_text_is_no_use_for_is_refused(env: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(env, **config)
