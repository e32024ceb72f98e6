"""Episodes that branch off others at uncertain turns, and episodes that are replayed."""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from roll.config import load_config
from roll.config.errors import ConfigError
from roll.config.sections.environment import BranchingConfig, EnvironmentConfig
from roll.core.completion import NOBODY, Completion, FinishReason
from roll.core.errors import EnvironmentFailedError
from roll.core.types import GenerateRequest, Prompt
from roll.data.chat.turns import Turns
from roll.envs.built_in.boards.frozen_lake import FrozenLake
from roll.envs.host import EnvHost
from roll.envs.observed import Observed
from roll.rollout.assemble import assemble
from roll.rollout.episodes.failed import FailedEpisodes
from roll.rollout.episodes.record import Record, branch_points, entropy
from roll.rollout.serialization import from_plain, to_plain
from roll.rollout.types import Group, GroupTask, ScoredSample
from tests.episodes import Writer, episodes, played
from tests.fakes import from_disk
from tests.pipelines.test_agentic import task as task_file
from tests.tiny import char_tokenizer
from tests.unit.data.test_chat_templates import settings_of

TASK = GroupTask(Prompt("walk:3", (), "", "", "walk", {"seed": 3}), step=5)
END = 1


@dataclass
class Walk:
    """Deterministic environment: its answers depend on the turns of the episode alone."""

    config: EnvironmentConfig
    turns: int = 4
    trouble: Callable[[str, int], bool] = lambda episode, turn: False
    """Whether it raises at this turn of an episode."""
    noise: Callable[[], int] = lambda: 0
    """Number that is added to its answers."""
    name: str = "walk"
    heard: dict[str, list[str]] = field(default_factory=dict)

    async def open(self, episode: str, seed: int, prompt: Prompt) -> Observed:
        self.heard[episode] = []
        return Observed(array("i", [50, 51]), "begin", state="start")

    async def act(
        self,
        episode: str,
        action: str | array[int],
        last: int | None,
        wrote: array[int] | None = None,
    ) -> Observed:
        assert isinstance(action, str)
        heard = self.heard[episode]
        heard.append(action)
        if self.trouble(episode, len(heard)):
            raise EnvironmentFailedError("the board broke")
        place = sum(int(word) for turn in heard for word in turn.split()) + self.noise()
        over = len(heard) == self.turns
        said = array("i") if over else array("i", [60 + place % 7, 70 + place % 5])
        return Observed(said, str(place), reward=place / 8, terminated=over, state=str(place % 3))

    def close(self, episode: str) -> None: ...


def walk(whole: int | None, *, samples: int = 6, **more: Any) -> Walk:
    branching = None if whole is None else {"whole": whole, **more.pop("branching", {})}
    keys = {"env": "x", "tags": ("walk",), "replay": True, "branching": branching}
    config = EnvironmentConfig.model_validate(keys | more.pop("config", {}))
    return Walk(config, **more)


def drawn(request: GenerateRequest) -> random.Random:
    return random.Random(request.seed)


def writes(request: GenerateRequest) -> tuple[list[int], FinishReason]:
    """One to three tokens, which depend on the seed of the request alone."""
    dice = drawn(request)
    return [*(dice.randrange(2, 40) for _ in range(dice.randrange(1, 4))), END], FinishReason.STOP


def surprise(request: GenerateRequest) -> float:
    return -drawn(request).random() * 3 - 0.1


def group_of(hosts: Walk, writer: Writer | None = None, **options: Any) -> tuple[Group, Writer]:
    engine = writer or Writer(writes, logprob=surprise)
    options = {"branching": True, "samples_per_prompt": 6, **options}
    made = episodes(engine, hosts, **options)
    return asyncio.run(asyncio.wait_for(made.run(TASK), 30)), engine


def whole_row(one: ScoredSample) -> list[int]:
    return [*one.sample.prompt.tokens, *one.sample.completion.tokens]


def means(one: ScoredSample) -> list[float]:
    """Mean negative log-prob of each turn."""
    logprobs = one.sample.completion.logprobs
    return [
        -math.fsum(logprobs[turn.begin : turn.end]) / (turn.end - turn.begin) for turn in one.turns
    ]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 1000), st.sampled_from([-9.0, 0, 0.8]))
def test_branches_leave_the_most_uncertain_turns_and_fill_the_group(
    whole: int, width: int, seed: int, min_rise: float
) -> None:
    hosts = walk(whole, branching={"width": width, "min_rise": min_rise})
    group, engine = group_of(hosts, seed=seed)
    assert len(group.samples) == 6
    assert len({one.sample.id for one in group.samples}) == 6
    assert {one.sample.group for one in group.samples} == {"5/walk:3"}
    roots, others = group.samples[:whole], group.samples[whole:]
    assert all(one.parts["walk/shared_turns"] == 0 for one in roots)

    # Oracle: all later turns of the first episodes by the rise of their surprise.
    places = [
        (found[number] - found[0], root, number)
        for root, found in enumerate(map(means, roots))
        for number in range(1, len(found))
        if found[number] - found[0] > min_rise
    ]
    best = sorted(places, reverse=True)
    expected = [(root, number) for _, root, number in best for _ in range(width)][: 6 - whole]
    expected += [(-1, 0)] * (6 - whole - len(expected))
    for one, (root, number) in zip(others, expected, strict=True):
        assert one.parts["walk/shared_turns"] == number
        if not number:
            continue
        parent = roots[root]
        kept = parent.turns[number].begin
        completion, theirs = one.sample.completion, parent.sample.completion
        assert list(completion.tokens[:kept]) == list(theirs.tokens[:kept])
        assert list(completion.logprobs[:kept]) == list(theirs.logprobs[:kept])
        assert list(completion.versions)[:kept] == list(theirs.versions)[:kept]
        assert one.turns[:number] == parent.turns[:number]
        assert one.turns[number].state == parent.turns[number].state

    # The engine wrote each turn once, behind what stands before it in the samples.
    rows = [tuple(whole_row(one)) for one in group.samples]
    for request in engine.requests:
        tokens, _ = writes(request)
        said = (*request.prompt_tokens, *tokens)
        assert any(row[: len(said)] == said for row in rows)
    assert group.num_sampled_tokens == sum(len(writes(one)[0]) for one in engine.requests)
    turns = sum(len(one.turns) for one in group.samples)
    shared = sum(int(one.parts["walk/shared_turns"]) for one in group.samples)
    assert len(engine.requests) == turns - shared
    for one in group.samples:
        assert one.reward == pytest.approx(sum(turn.reward for turn in one.turns))


def test_a_branch_is_an_episode_of_its_own_for_advantages_and_checkpoints(tmp_path: Path) -> None:
    group, _ = group_of(walk(2, branching={"min_rise": -9}))
    again = from_plain(from_disk(to_plain(group), tmp_path), lambda _: TASK.prompt)
    assert [one.shared_tokens for one in again.samples] == [
        one.shared_tokens for one in group.samples
    ]
    assert again.num_sampled_tokens == group.num_sampled_tokens
    table = assemble([group])
    assert set(table.group_ids.tolist()) == {0}
    assert table.turns is not None
    # A shared turn is trained in each episode that has it.
    trained = table.trained_tokens().tolist()
    sampled = [sum(v != NOBODY for v in one.sample.completion.versions) for one in group.samples]
    assert trained == sampled


def test_branches_go_where_the_prefix_is_and_are_not_those_of_validation() -> None:
    sessions = list[str]()
    hosts = walk(1, branching={"min_rise": -9})
    made = episodes(Writer(writes, logprob=surprise), hosts, branching=True, samples_per_prompt=3)
    choose = made.fleet.routing.choose

    class Noting:
        def choose(self, session: str, loads: Any) -> Any:
            sessions.append(session)
            return choose(session, loads)

        def home(self, session: str) -> None:
            return None

    made.fleet.routing = Noting()
    asyncio.run(made.run(TASK))
    assert set(sessions) == {"5/walk:3/0"}
    group, _ = group_of(walk(1), branching=False)
    assert all(one.parts["walk/shared_turns"] == 0 for one in group.samples)


def test_spare_episodes_may_branch_too() -> None:
    group, _ = group_of(walk(2, branching={"min_rise": -9}), redundant=1)
    assert len(group.samples) == 6
    assert len({one.sample.id for one in group.samples}) == 6


def test_an_environment_that_answers_otherwise_cannot_be_replayed() -> None:
    dice = random.Random(0)
    hosts = walk(2, noise=lambda: dice.randrange(1000), branching={"min_rise": -9})
    with pytest.raises(
        EnvironmentFailedError, match=r"cannot be replayed: its answer to turn 1 was"
    ):
        group_of(hosts)
    group, _ = group_of(hosts, failed=FailedEpisodes({"walk": 1.0}))
    assert [one.has_reward for one in group.samples] == [True] * 2 + [False] * 4


@pytest.mark.parametrize("replay", [True, False])
def test_an_episode_whose_environment_fails_goes_on_behind_its_last_answer(replay: bool) -> None:
    hosts = walk(None, trouble=lambda episode, turn: "~" not in episode and turn == 3)
    if not replay:
        hosts.config = hosts.config.model_copy(update={"replay": False})
    group, engine = group_of(hosts, samples_per_prompt=1)
    (one,) = group.samples
    written = [request.id for request in engine.requests]
    first = [f"5/walk:3/0.{n}" for n in range(3)]
    again = [f"5/walk:3/0~1.{n}" for n in range(4)]
    assert written == first + (again[2:] if replay else again)
    assert one.parts["walk/restarts"] == 1
    assert one.shared_tokens == 0
    assert hosts.heard["5/walk:3/0~1"][:2] == hosts.heard["5/walk:3/0"][:2] or not replay
    kept = [writes(request)[0] for request in engine.requests]
    turns = kept[:2] + kept[3:] if replay else kept[3:]
    tokens = one.sample.completion.tokens
    assert [list(tokens[turn.begin : turn.end]) for turn in one.turns] == turns


def test_a_branch_of_a_real_environment_goes_on_in_the_state_that_it_left() -> None:
    """On frozen lake; the states are those of a walk by hand."""
    tokenizer = char_tokenizer()
    words = ["right", "down", "left", "up"]
    config = EnvironmentConfig.model_validate(
        {
            "env": "frozen_lake",
            "tags": ("walk",),
            "max_turns": 6,
            "replay": True,
            "special_tokens": "show",
            "branching": {"whole": 1, "min_rise": -9.0},
        }
    )

    def answer(request: GenerateRequest) -> tuple[list[int], FinishReason]:
        return [*tokenizer.encode(drawn(request).choice(words)), END], FinishReason.STOP

    async def run() -> Group:
        host = EnvHost(
            "walk", config, FrozenLake, Turns(tokenizer, settings_of(), frozenset({END}))
        )
        writer = Writer(answer, logprob=surprise)
        return await played(writer, host, TASK, branching=True, samples_per_prompt=5)

    group = asyncio.run(asyncio.wait_for(run(), 30))
    assert any(one.parts["walk/shared_turns"] for one in group.samples)
    for one in group.samples:
        env = FrozenLake()
        _, info = env.reset(seed=3)
        for turn in one.turns:
            assert turn.state == str(info["state"])
            moved = tokenizer.decode(list(one.sample.completion.tokens[turn.begin : turn.end - 1]))
            _, reward, *_, info = env.step(moved)
            assert turn.reward == reward


def turn_of(*logprobs: float) -> Completion:
    count = len(logprobs)
    return Completion.of([7] * count, logprobs, [0] * count, FinishReason.STOP)


def test_the_uncertainty_of_a_turn_is_that_of_its_first_tokens() -> None:
    assert entropy(turn_of(-1.0, -2.0, -9.0), 2) == pytest.approx(1.5)
    assert entropy(turn_of(), 2) == 0
    first, second = turn_of(-1.0), turn_of(-3.0)
    records = [Record("a", turns=[second, first, first]), Record("b", turns=[first, second])]
    found = branch_points(records, BranchingConfig(whole=2, width=2), 9)
    assert found == [(1, 1), (1, 1)]
    counts = Counter(branch_points(records, BranchingConfig(whole=2, min_rise=-5.0), 9))
    assert counts == {(1, 1): 1, (0, 1): 1, (0, 2): 1}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"branching": {"whole": 1}}, "set `replay: true`"),
        ({"branching": {"whole": 1}, "replay": True, "seats": 2}, "episodes of one player"),
        ({"env": None, "agent": "a:b", "replay": True}, "`replay` is for `env`"),
    ],
)
def test_what_cannot_be_replayed_does_not_branch(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EnvironmentConfig.model_validate({"env": "x", **keys})


def test_a_group_must_leave_some_episodes_to_branch_off(tmp_path: Path) -> None:
    path = task_file(tmp_path, environment={"replay": True, "branching": {"whole": 2}})
    with pytest.raises(ConfigError, match=r"branching\.whole: 2 of data\.samples_per_prompt = 2"):
        load_config(path)
