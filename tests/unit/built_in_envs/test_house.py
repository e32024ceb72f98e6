"""The house: a policy that searches it can do every task, and commands do what they say."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from roll.envs.built_in.text.house import TextHouse
from roll.envs.built_in.text.rooms import KINDS, House, Task
from roll.envs.contract import check_env

WITH = {"hot": "heat {} with microwave 1", "cold": "cool {} with fridge 1"}
WITH["clean"] = "clean {} with sinkbasin 1"


def tidier() -> Callable[[str], str]:
    """A policy that looks everywhere for what it needs, and then does what is asked."""
    plan: list[str] = []
    task: dict[str, Any] = {}
    unseen: list[str] = []
    found: dict[str, str] = {}
    here = [""]

    def begin(said: str) -> None:
        unseen.extend(re.findall(r"[a-z]+ \d+", said.split("room with ")[1].split(".")[0]))
        told = re.findall(r"Your task: (.*)\.", said)[0]
        look = re.fullmatch(r"look at (\w+) under the (\w+)", told)
        put = re.fullmatch(r"put (an?|two) (?:(hot|cold|clean) )?(\w+) (?:in|on) (\w+)", told)
        if look:
            task.update(things=[look[1]], lamp=True, state=None)
        else:
            assert put, told
            count = 2 if put[1] == "two" else 1
            task.update(things=[put[3]] * count, lamp=False, state=put[2], target=put[4])
        task["furniture"] = list(unseen)

    def deliver(thing: str, place: str) -> None:
        plan.extend([f"go to {place}", f"open {place}", f"take {thing} from {place}"])
        if task["state"]:
            command = WITH[task["state"]].format(thing)
            plan.extend([f"go to {command.split(' with ')[1]}", command])
        if task["lamp"]:
            plan.extend([f"go to {found['desklamp 1']}", "use desklamp 1"])
            return
        goal = next(each for each in task["furniture"] if each.startswith(task["target"] + " "))
        plan.extend([f"go to {goal}", f"open {goal}", f"put {thing} on {goal}"])

    def act(said: str) -> str:
        if not task:
            begin(said)
        for things in re.findall(r"(?:In|On) it: (.*)\.", said):
            found.update(dict.fromkeys(re.findall(r"[a-z]+ \d+", things), here[0]))
        wanted = [each for each in found if each.split()[0] in task["things"]]
        ready = len(wanted) >= len(task["things"]) and (not task["lamp"] or "desklamp 1" in found)
        if not plan and "It is closed" in said:
            return f"open {here[0]}"
        if not plan and ready:
            for thing in wanted[: len(task["things"])]:
                deliver(thing, found[thing])
        if not plan:
            plan.append(f"go to {unseen.pop(0)}")
        command = plan.pop(0)
        if command.startswith("go to "):
            here[0] = command.removeprefix("go to ")
        return f"I think I should do this.\n> {command}"

    return act


@pytest.mark.parametrize("kind", KINDS)
def test_every_task_can_be_done(kind: str) -> None:
    trial = check_env(
        TextHouse,
        kwargs={"tasks": [kind]},
        solver=tidier,
        seeds=range(8),
        max_turns=60,
        actions=["look", "inventory", "go to fridge 1", "open fridge 1", "use desklamp 1"],
        reward_range=(0, 1),
    )
    assert trial.tasks == 8
    assert all(one.reward == 0 for one in trial.episodes["empty"])


def small(kind: str, thing: str, target: str) -> TextHouse:
    """A house that the test knows."""
    env = TextHouse(tasks=[kind])
    env.reset(seed=0)
    furniture = ("cabinet 1", "desk 1", "microwave 1", "fridge 1", "sinkbasin 1")
    places = {"mug 1": "cabinet 1", "mug 2": "desk 1", "desklamp 1": "desk 1", "cup 1": "desk 1"}
    env._house, env._task = House(furniture, places), Task(kind, thing, target)
    return env


def said(env: TextHouse, *commands: str) -> list[str]:
    return [env.step(command)[0] for command in commands]


def test_commands_do_what_they_say() -> None:
    env = small("heat", "mug", "desk")
    assert said(
        env,
        "look",
        "take mug 1 from cabinet 1",
        "go to cabinet 1",
        "take mug 1 from cabinet 1",
        "open cabinet 1",
        "open cabinet 1",
        "Take the Mug 1 from Cabinet 1.",
        "inventory",
        "close cabinet 1",
        "put mug 1 in cabinet 1",
        "heat mug 1 with microwave 1",
        "go to microwave 1",
        "go to microwave 1",
        "cool mug 1 with microwave 1",
        "heat mug 1 with microwave 1",
        "go to desk 1",
        "take cup 1 from desk 1",
    ) == [
        "You are in the middle of the room, with cabinet 1, desk 1, microwave 1, fridge 1, "
        "sinkbasin 1.",
        "Nothing happens.",
        "You are at cabinet 1. It is closed.",
        "Nothing happens.",
        "You open cabinet 1. In it: mug 1.",
        "Nothing happens.",
        "You take mug 1 from cabinet 1.",
        "You hold mug 1.",
        "You close cabinet 1.",
        "Nothing happens.",
        "Nothing happens.",
        "You are at microwave 1. It is closed.",
        "Nothing happens.",
        "Nothing happens.",
        "You heat mug 1 with microwave 1.",
        "You are at desk 1. On it: cup 1, desklamp 1, mug 2.",
        "Nothing happens.",
    ]
    text, reward, over, cut, info = env.step("put mug 1 in/on desk 1")
    assert (text, reward, over, cut) == ("You put mug 1 on desk 1.", 1.0, True, False)
    assert (info["success"], info["invalid"]) == (True, 0)
    assert env.step("look")[2]


@pytest.mark.parametrize(
    ("kind", "thing", "target", "commands"),
    [
        ("look", "mug", "desklamp", "go to desk 1; take mug 2 from desk 1; use desklamp 1"),
        (
            "place",
            "cup",
            "cabinet",
            "go to desk 1; take cup 1 from desk 1; go to cabinet 1; open cabinet 1; "
            "put cup 1 in cabinet 1",
        ),
        (
            "two",
            "mug",
            "desk",
            "go to cabinet 1; open cabinet 1; take mug 1 from cabinet 1; go to desk 1; "
            "put mug 1 on desk 1",
        ),
        (
            "clean",
            "cup",
            "desk",
            "go to desk 1; take cup 1 from desk 1; go to sinkbasin 1; "
            "clean cup 1 with sinkbasin 1; go to desk 1; put cup 1 on desk 1",
        ),
    ],
)
def test_a_task_is_done_at_its_last_command_and_not_before(
    kind: str, thing: str, target: str, commands: str
) -> None:
    env = small(kind, thing, target)
    ends = [env.step(command)[1:3] for command in commands.split("; ")]
    assert ends == [(0.0, False)] * (len(ends) - 1) + [(1.0, True)]


def test_the_lamp_stays_and_its_light_does_not_follow() -> None:
    env = small("look", "mug", "desklamp")
    env.step("go to desk 1")
    assert env.step("take desklamp 1 from desk 1")[0] == "Nothing happens."
    env.step("use desklamp 1")
    for command in ("go to cabinet 1", "open cabinet 1", "take mug 1 from cabinet 1"):
        assert not env.step(command)[2]
    env.step("go to desk 1")
    assert env.step("use desklamp 1")[2]


def test_the_last_command_counts_and_other_words_are_told() -> None:
    env = small("place", "cup", "cabinet")
    assert env.step("go to desk 1\nor rather\naction: go to cabinet 1\nwell")[0].startswith(
        "You are at cabinet 1"
    )
    text, _, _, _, info = env.step("I could go to desk 1")
    assert (text, info["invalid"]) == ("That is no command.", 1)


def test_tasks_that_nobody_knows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tasks = \['dance'\] must be some of place, heat"):
        TextHouse(tasks=["dance"])
