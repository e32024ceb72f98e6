"""Episodes of several players, all of whom are the policy: a conversation and a sample of each."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll.config import load_config
from roll.config.sections.environment import EnvironmentConfig
from roll.core.completion import NOBODY, FinishReason
from roll.core.errors import ConfigError, EnvironmentFailedError
from roll.core.types import GenerateRequest, Prompt, SamplingParams
from roll.data.chat.turns import Turns
from roll.envs.built_in.boards.self_play import SelfPlay
from roll.envs.contract import check_env
from roll.envs.host import EnvHost
from roll.envs.seats import Seats
from roll.rollout.assemble import assemble
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.replica import Replica
from roll.rollout.serialization import from_plain, to_plain
from roll.rollout.types import Group, GroupTask, ScoredSample
from tests.episodes import Writer, played
from tests.pipelines.test_agentic import task as task_file
from tests.tiny import char_tokenizer
from tests.unit.data.test_chat_templates import settings_of

END = 1
WON_BY_FIRST = "5 1 3 2 7"
"""Moves of a game: the first player wins by a diagonal."""


def game(*moves: str, name: str = "tic_tac_toe", **kwargs: int) -> list[Any]:
    env = SelfPlay(name, False, **kwargs)  # type: ignore[arg-type]  # a test gives a wrong one
    return [env.reset(seed=0), *(env.step(move) for move in moves)]


def test_each_player_sees_its_own_pieces_as_x() -> None:
    seen = game("5", "1", "3")
    assert [answer[0] for answer in seen] == [
        "1 2 3\n4 5 6\n7 8 9",
        "1 2 3\n4 O 6\n7 8 9",
        "O 2 3\n4 X 6\n7 8 9",
        "X 2 O\n4 O 6\n7 8 9",
    ]
    assert [answer[-1]["seat"] for answer in seen] == [0, 1, 0, 1]


def test_the_winner_gets_1_and_the_other_the_opposite() -> None:
    *_, (_, reward, over, cut, info) = game(*WON_BY_FIRST.split())
    assert (reward, over, cut, info["rewards"]) == (1.0, True, False, {1: -1.0})
    assert (info["success"], info["first_won"], info["drawn"]) == (True, True, False)
    *_, (_, reward, over, _, info) = game(*["1", "2", "3", "5", "8", "4", "6", "9", "7"])
    assert (reward, over, info["drawn"]) == (0.0, True, True)
    assert "rewards" not in info


@pytest.mark.parametrize("most", [1, 3])
def test_turns_without_a_move_lose_for_their_player_alone(most: int) -> None:
    turns = ("none", "5", "10")[:most]
    *before, (_, reward, over, _, info) = game("5", *turns, max_invalid=most)
    assert not any(answer[2] for answer in before[1:])
    assert (reward, over, "rewards" in info) == (-1.0, True, False)
    assert (info["invalid"], info["success"], info["drawn"]) == (most, False, False)
    with pytest.raises(ValueError, match="max_invalid = 0 must be at least 1"):
        game(max_invalid=0)


@pytest.mark.parametrize("name", ["tic_tac_toe", "connect_four"])
def test_a_game_may_begin_with_random_moves_of_the_seed(name: str) -> None:
    lengths, boards = set(), set()
    for seed in range(200):
        env = SelfPlay(game=name, rules=False, opening=5)  # type: ignore[arg-type]  # any text
        shown, info = env.reset(seed=seed)
        again = SelfPlay(game=name, rules=False, opening=5)  # type: ignore[arg-type]  # as above
        assert again.reset(seed=seed)[0] == shown
        own, other = info["state"].count("X"), info["state"].count("O")
        assert other - own in (0, 1), "whoever has the next turn has no more pieces"
        assert info["seat"] == 0
        assert not info["success"]
        lengths.add(own + other)
        boards.add(shown)
    assert lengths == set(range(6))
    assert len(boards) > 50


def test_no_random_move_wins() -> None:
    lines = ("012", "345", "678", "036", "147", "258", "048", "246")
    for seed in range(500):
        _, info = SelfPlay(rules=False, opening=5).reset(seed=seed)
        signs = [{info["state"][int(field)] for field in line} for line in lines]
        assert {"X"} not in signs, seed
        assert {"O"} not in signs, seed


def test_an_opening_that_may_end_the_game_is_refused() -> None:
    with pytest.raises(ValueError, match="opening = 6 must be from 0 to 5"):
        SelfPlay(opening=6)


def test_connect_four_is_played_in_columns() -> None:
    *_, (shown, reward, over, _, info) = game(
        *["1", "2", "1", "2", "1", "2", "1"], name="connect_four"
    )
    assert (reward, over, info["first_won"]) == (1.0, True, True)
    assert shown.startswith("1 2 3 4 5 6 7\n_ _")
    with pytest.raises(ValueError, match="game = 'chess' must be"):
        game(name="chess")


@pytest.mark.parametrize("name", ["tic_tac_toe", "connect_four"])
def test_it_keeps_the_rules_of_environments(name: str) -> None:
    check_env(SelfPlay, kwargs={"game": name}, reward_range=(-1, 1))


def episodes(moves: str, make: Any = None, samples: int = 2, **config: Any) -> Group:
    """A group of games in which the policy makes these moves."""
    settings = EnvironmentConfig(
        env="self_play", **{"seats": 2, "max_turns": 9, "special_tokens": "show", **config}
    )
    turns = Turns(char_tokenizer(), settings_of(), frozenset({END}))
    written = [char_tokenizer().encode(move) for move in moves.split()]

    def answer(request: GenerateRequest) -> tuple[list[int], FinishReason]:
        return [*written[int(request.id.rpartition(".")[2])], END], FinishReason.STOP

    async def play() -> Group:
        host = EnvHost("pair", settings, make or (lambda: SelfPlay(rules=False)), turns)
        task = GroupTask(Prompt("pair:3", (), "", "", "pair", {"seed": 3}), 0)
        sampling = SamplingParams(temperature=1.0, max_new_tokens=8)
        return await played(
            Writer(answer),
            host,
            task,
            sampling=sampling,
            max_tokens=1000,
            samples_per_prompt=samples,
        )

    def as_text(one: ScoredSample) -> ScoredSample:
        text = char_tokenizer().decode(
            [*one.sample.prompt.tokens, *one.sample.completion.tokens], skip_special_tokens=False
        )
        return replace(one, parts=one.parts | {"text": text})

    group = asyncio.run(play())
    return replace(group, samples=tuple(map(as_text, group.samples)))


@pytest.mark.parametrize("seed", [4, 5])
def test_an_opponent_writes_the_turns_of_the_other_player(seed: int) -> None:
    """The seed of the task says which player is the policy."""
    config = EnvironmentConfig(
        env="self_play",
        seats=2,
        trained_seats="one",
        opponent="past",
        max_turns=9,
        special_tokens="show",
    )
    turns = Turns(char_tokenizer(), settings_of(), frozenset({END}))
    written = [char_tokenizer().encode(move) for move in WON_BY_FIRST.split()]

    def answer(request: GenerateRequest) -> tuple[list[int], FinishReason]:
        return [*written[int(request.id.rpartition(".")[2])], END], FinishReason.STOP

    policy, other = Writer(answer), Writer(answer, version=3)
    task = GroupTask(Prompt("pair:4", (), "", "", "pair", {"seed": seed}), 0)

    async def play() -> Group:
        host = EnvHost("pair", config, lambda: SelfPlay(rules=False), turns)
        fleets = {"past": Fleet([Replica(0, other, 64)])}
        return await played(policy, host, task, opponents=fleets, samples_per_prompt=2)

    group = asyncio.run(play())
    mine = seed % 2
    assert [one.seat for one in group.samples] == [mine, mine]
    assert [one.reward for one in group.samples] == [1.0 if mine == 0 else -1.0] * 2
    for engine, seat in ((policy, mine), (other, 1 - mine)):
        numbers = sorted(int(request.id.rpartition(".")[2]) for request in engine.requests)
        assert numbers == sorted([*range(seat, 5, 2)] * 2)
    for one in group.samples:
        assert set(one.sample.completion.versions) <= {policy.version, NOBODY}


@pytest.mark.parametrize(
    ("environment", "opponents", "message"),
    [
        ({"opponent": "pst"}, {"past": {"every": 2}}, "no opponent 'pst'; did you mean 'past'"),
        ({}, {"past": {"every": 2}}, "opponents.past: no environment names it"),
        ({"opponent": "past"}, {"past": {}}, "exactly one of `model`"),
        ({"opponent": "past"}, {"past": {"every": 2, "model": {"path": "m"}}}, "exactly one of"),
        ({"opponent": "past", "trained_seats": "all"}, {"past": {"every": 2}}, "not trained; set"),
        ({"opponent": "past"}, {"past": {"every": 2, "pool": "x"}}, "opponents.past.pool: no pool"),
        (
            {"opponent": "past"},
            {"past": {"every": 1, "strategy": {"kind": "vllm", "sleep_level": 2}}},
            "opponents.past.strategy.sleep_level: 2 drops the weights in each step",
        ),
    ],
)
def test_opponents_and_the_environments_that_name_them_must_fit(
    environment: dict[str, Any], opponents: dict[str, Any], message: str, tmp_path: Path
) -> None:
    engine = {"pool": "all", "strategy": {"kind": "hf"}}
    game = {"env": "test_run_envs:Duel", "seats": 2, "trained_seats": "one", **environment}
    given = {name: {**engine, **own} for name, own in opponents.items()}
    path = task_file(tmp_path, environment=game, opponents=given, validation={})
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert message in str(error.value)


def test_an_adapter_that_is_served_as_it_is_reaches_no_opponent(tmp_path: Path) -> None:
    game = {"seats": 2, "trained_seats": "one", "opponent": "past"}
    engine = {"pool": "all", "strategy": {"kind": "vllm", "max_lora_rank": 8}}
    lora = {"rank": 8, "alpha": 8, "serve": "adapter"}
    path = task_file(
        tmp_path,
        environment=game,
        model={"path": "m", "lora": lora},
        actor_infer=engine,
        opponents={"past": {**engine, "every": 2}},
    )
    with pytest.raises(ConfigError, match=r"opponents\.past\.every: an opponent gets the merged"):
        load_config(path)


def test_each_player_is_a_sample_with_its_own_words_and_reward() -> None:
    first, second = episodes(WON_BY_FIRST).samples
    assert (first.sample.id, second.sample.id) == ("0/pair:3/0/0", "0/pair:3/0/1")
    assert (first.seat, first.reward, second.seat, second.reward) == (0, 1.0, 1, -1.0)
    assert (len(first.turns), len(second.turns)) == (3, 2)
    end = char_tokenizer().decode([END], skip_special_tokens=False)
    said = [part.partition(end)[0] for part in str(first.parts["text"]).split("<assistant>")[1:]]
    assert said == ["5", "3", "7"]
    said = [part.partition(end)[0] for part in str(second.parts["text"]).split("<assistant>")[1:]]
    assert said == ["1", "2"]
    shown = "<user>1 2 3\n4 <pad> 6\n7 8 9<assistant>1"  # the tokenizer has no O
    assert str(second.parts["text"]).startswith(shown)
    assert "seat" not in {name.partition("/")[2] for name in first.parts}


def test_players_are_compared_with_those_of_the_same_side() -> None:
    group = episodes(WON_BY_FIRST, samples=4)
    assert [one.seat for one in group.samples] == [0, 1, 0, 1]
    table = assemble([group, group])
    assert table.group_ids.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    plain = [replace(one, parts={}) for one in group.samples]
    again = from_plain(kept(to_plain(replace(group, samples=tuple(plain)))), lambda _: group.prompt)
    assert [one.seat for one in again.samples] == [0, 1, 0, 1]


def kept(row: dict[str, Any]) -> dict[str, Any]:
    """A group as a checkpoint keeps it."""
    samples = [{**each, "written": each["written"]()} for each in row["samples"]]
    return {**row, "samples": samples}


def test_one_player_may_be_trained_alone() -> None:
    group = episodes(WON_BY_FIRST, trained_seats="one")
    assert [(one.seat, one.reward) for one in group.samples] == [(1, -1.0), (1, -1.0)]


class Broken(SelfPlay):
    """Names a player that there is not."""

    def step(self, action: str) -> Any:
        *rest, info = super().step(action)
        return (*rest, {**info, "seat": 2})


def test_a_player_that_there_is_not_is_a_failure_that_says_so() -> None:
    with pytest.raises(
        EnvironmentFailedError, match=r"info\['seat'\] = 2 is none of the 2 players"
    ):
        episodes(WON_BY_FIRST, make=lambda: Broken(rules=False))
    with pytest.raises(
        EnvironmentFailedError, match=r"info\['seat'\] = 1 is none of the 1 players"
    ):
        episodes(WON_BY_FIRST, seats=1)


def test_environments_of_one_player_may_say_seat_of_other_things() -> None:
    seats = Seats(1)
    assert seats.begins({"seat": "window"})
    assert not seats.begins({"seat": None})
    with pytest.raises(ValueError, match="is none of the 2 players"):
        Seats(2).begins({"seat": "window"})


class Ended(SelfPlay):
    """Ends before the second player had a turn."""

    def step(self, action: str) -> Any:
        return "over", 1.0, True, False, {"rewards": {1: -1.0}}


def test_a_player_without_a_turn_has_a_sample_that_is_not_trained() -> None:
    first, second = episodes("5", make=lambda: Ended(rules=False)).samples
    assert first.reward == 1.0
    assert second.failed == ("pair",)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"rewards": [1]}, r"info\['rewards'\] must map players to numbers"),
        ({"rewards": {5: 1.0}}, r"gives player 5 1.0; expected players 0 to 1"),
        ({"rewards": {1: float("nan")}}, r"gives player 1 nan"),
    ],
)
def test_wrong_rewards_of_players_are_failures(info: dict[str, Any], message: str) -> None:
    class Wrong(SelfPlay):
        def step(self, action: str) -> Any:
            return "go on", 0.0, False, False, info

    with pytest.raises(EnvironmentFailedError, match=message):
        episodes("5", make=lambda: Wrong(rules=False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seats": 3}, "data.samples_per_prompt: a game of environments.words gives 3 samples"),
        ({"seats": 2}, "validation.sets.held_out.tag: in environments.words the policy plays"),
        ({"trained_seats": "one"}, "`trained_seats: one` goes with several `seats`"),
        ({"env": None, "agent": "a:b", "seats": 2}, "`seats` is for `env`"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(task_file(tmp_path, environment=changes))


def test_a_reward_of_the_player_who_acted_is_refused_among_those_of_the_others() -> None:
    """It would be paid twice, as of environments that return the rewards of all players."""
    seats = Seats(2, current=1)
    assert seats.rewards({"rewards": {0: -1.0}}) == {0: -1.0}
    with pytest.raises(ValueError, match=r"gives player 1, who acted, 1.0; name the other players"):
        seats.rewards({"rewards": {0: -1.0, 1: 1.0}})
