"""Episodes: every token in its place, every limit with its end, every failure counted once."""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.config.sections.environment import EnvironmentConfig
from roll.core.completion import NOBODY, Completion, FinishReason
from roll.core.errors import EngineDiedError, EnvironmentFailedError, WaitTimeoutError
from roll.core.types import GenerateRequest, Prompt, Sample, SamplingParams
from roll.envs.observed import Observed
from roll.rollout.assemble import assemble, reward_metrics
from roll.rollout.dense import dense
from roll.rollout.episodes.failed import FailedEpisodes
from roll.rollout.evaluate import evaluate
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.replica import Replica
from roll.rollout.types import Group, GroupTask, ScoredSample
from tests.episodes import Writer, episodes

OPENING, END = array("i", [50, 51]), 1
TASK = GroupTask(Prompt("lake:3", (), "", "", "lake", {"seed": 3}), step=5)


@dataclass
class ScriptedHosts:
    """Environment whose answers a test writes; keeps books of what runs."""

    answers: Callable[[str, int, str], Observed]
    """Function of the episode, the number of the turn and the action."""
    config: EnvironmentConfig = field(
        default_factory=lambda: EnvironmentConfig(env="x", tags=("lake",))
    )
    name: str = "lake"
    opened: dict[str, int] = field(default_factory=dict)
    """Seed of each episode."""
    heard: dict[str, list[tuple[str, int | None]]] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    first: Observed = field(default_factory=lambda: Observed(OPENING, "the lake", state="begin"))

    async def open(self, episode: str, seed: int, prompt: Prompt) -> Observed:
        assert episode not in self.opened, "every episode begins once"
        self.opened[episode] = seed
        self.heard[episode] = []
        await asyncio.sleep(0)
        return self.first

    async def act(
        self,
        episode: str,
        action: str | array[int],
        last: int | None,
        wrote: array[int] | None = None,
    ) -> Observed:
        assert isinstance(action, str)
        assert episode in self.opened
        assert episode not in self.closed
        self.heard[episode].append((action, last))
        await asyncio.sleep(0)
        return self.answers(episode, len(self.heard[episode]), action)

    def close(self, episode: str) -> None:
        self.closed.append(episode)


def said(count: int, *, first: int = 60, **more: Any) -> Observed:
    return Observed(array("i", range(first, first + count)), "said", **more)


def over(**more: Any) -> Observed:
    return Observed(array("i"), "bye", terminated=True, **more)


def stops(*tokens: int) -> Callable[[GenerateRequest], tuple[list[int], FinishReason]]:
    return lambda request: ([*tokens, END], FinishReason.STOP)


def play(writer: Writer, hosts: ScriptedHosts, **options: Any) -> Group:
    settings: dict[str, Any] = {"failed": FailedEpisodes({"lake": 0.5}), "max_tokens": 100}
    sampling = SamplingParams(temperature=1.0, max_new_tokens=8)
    settings |= {"sampling": sampling, **options}
    return asyncio.run(episodes(writer, hosts, **settings).run(TASK))


def three_turns(episode: str, turn: int, action: str) -> Observed:
    return over(reward=1.0, info={"success": 1.0}) if turn == 3 else said(turn, reward=0.25)


def test_an_episode_is_the_sequence_of_what_was_written_and_said() -> None:
    writer, hosts = Writer(stops(9)), ScriptedHosts(three_turns)
    (one,) = play(writer, hosts).samples
    sample = one.sample
    assert sample.id == "5/lake:3/0"
    assert sample.prompt.tokens == (50, 51)
    assert list(sample.completion.tokens) == [9, END, 60, 9, END, 60, 61, 9, END]
    assert list(sample.completion.versions) == [7, 7, NOBODY, 7, 7, NOBODY, NOBODY, 7, 7]
    assert (
        list(sample.completion.logprobs) == [-0.25] * 2 + [0] + [-0.25] * 2 + [0, 0] + [-0.25] * 2
    )
    assert one.reward == 1.5
    assert one.by_name == {"lake": 1.5}
    assert one.parts == {
        "lake/turns": 3,
        "lake/truncated": 0,
        "lake/restarts": 0,
        "lake/success": 1,
    }
    assert not sample.truncated
    assert [(t.begin, t.end, t.reward) for t in one.turns] == [
        (0, 2, 0.25),
        (3, 5, 0.25),
        (7, 9, 1),
    ]
    assert one.turns[0].state == "begin"
    assert hosts.heard == {"5/lake:3/0": [("9 1", END)] * 3}
    assert hosts.opened == {"5/lake:3/0": 3}
    assert hosts.closed == ["5/lake:3/0"]
    prompts = [request.prompt_tokens for request in writer.requests]
    assert prompts[0] == (50, 51)
    assert all(b[: len(a)] == a for a, b in itertools.pairwise(prompts))
    assert len({request.seed for request in writer.requests}) == 3


def test_rewards_of_turns_belong_to_their_last_tokens_if_the_config_says_so() -> None:
    config = EnvironmentConfig.model_validate({"env": "x", "credit": "turns"})
    (one,) = play(Writer(stops(9)), ScriptedHosts(three_turns, config)).samples
    assert one.reward == 0
    assert one.steps is not None
    assert one.steps.pairs == ((2, 0.25), (5, 0.25), (9, 1.0))
    assert one.by_name == {"lake": 1.5}
    group = Group(TASK.prompt, (one,), 0)
    # Validation, filters and the curriculum see the outcome of the whole episode all the same.
    assert group.rewards == (1.5,)
    scores = evaluate([group], pass_score=1.0, extract=lambda sample: None)
    assert scores["mean@1"] == 1.5
    assert scores["pass@1"] == 1.0
    assert reward_metrics([one]).values_by_name()["reward/mean"] == 1.5
    table = assemble([group])
    batch = dense(table)
    for made in (table, batch):  # and so do masks, weights and thresholds
        assert made.turn_rewards is not None
        assert made.turn_rewards.tolist() == [1.5]
    assert batch.token_rewards is not None
    rewarded = batch.token_rewards[0].nonzero()[:, 0].tolist()
    assert rewarded == [3, 6, 10]
    assert batch.loss_mask[0][rewarded].all()


@pytest.mark.parametrize(
    ("cut_turn", "heard", "tokens"),
    [("end", [], [9] * 8), ("go_on", [("9 9 9 9 9 9 9 9", None)], [9] * 8)],
)
def test_a_turn_that_is_cut_ends_the_episode_or_goes_on_as_the_config_says(
    cut_turn: str, heard: list[Any], tokens: list[int]
) -> None:
    writer = Writer(lambda request: ([9] * 8, FinishReason.LENGTH))
    config = EnvironmentConfig.model_validate({"env": "x", "cut_turn": cut_turn, "max_turns": 1})
    hosts = ScriptedHosts(lambda *_: over(), config)
    (one,) = play(writer, hosts).samples
    assert list(hosts.heard.values()) == [heard]
    assert list(one.sample.completion.tokens) == tokens
    assert one.sample.truncated == (cut_turn == "end")
    assert one.has_reward


def test_too_many_turns_truncate() -> None:
    config = EnvironmentConfig(env="x", max_turns=4)
    hosts = ScriptedHosts(lambda *_: said(1), config)
    (one,) = play(Writer(stops(9)), hosts).samples
    assert one.sample.truncated
    assert len(one.turns) == 4


def test_the_turn_in_which_the_time_of_an_episode_passes_is_its_last() -> None:
    def slow(episode: str, turn: int, action: str) -> Observed:
        if turn == 2:
            time.sleep(0.2)
        return said(1, reward=0.25)

    config = EnvironmentConfig(env="x", max_turns=9, episode_timeout_s=0.15)
    (one,) = play(Writer(stops(9)), ScriptedHosts(slow, config)).samples
    assert one.sample.truncated
    assert (len(one.turns), one.reward) == (2, 0.5)


@pytest.mark.parametrize(("asked", "turns"), [(3, 3), (8, 1), (None, 1)])
def test_only_a_turn_that_reaches_the_limit_of_the_run_ends_the_episode(
    asked: int | None, turns: int
) -> None:
    """An agent may ask for less: what it then gets is cut, and it goes on."""
    writer = Writer(lambda request: ([9] * request.sampling.max_new_tokens, FinishReason.LENGTH))

    def answers(episode: str, turn: int, action: str) -> Observed:
        return over(reward=1.0) if turn == 3 else said(1, max_new_tokens=asked)

    hosts = ScriptedHosts(answers)
    hosts.first = said(2, max_new_tokens=asked)
    (one,) = play(writer, hosts).samples
    assert len(one.turns) == turns
    assert {request.sampling.max_new_tokens for request in writer.requests} == {asked or 8}
    assert one.sample.truncated == (turns == 1)


def test_the_context_is_never_longer_than_allowed_and_its_end_truncates() -> None:
    writer = Writer(
        lambda request: (
            ([9] * request.sampling.max_new_tokens, FinishReason.LENGTH)
            if request.sampling.max_new_tokens < 8
            else ([9, 9, END], FinishReason.STOP)
        )
    )
    (one,) = play(writer, ScriptedHosts(lambda *_: said(2)), max_tokens=30).samples
    assert one.sample.truncated
    assert 30 - 3 <= len(one.sample.prompt.tokens) + len(one.sample.completion) <= 30


def test_an_opening_that_leaves_no_room_is_a_failure_that_says_so() -> None:
    with pytest.raises(EnvironmentFailedError, match=r"begins with 2 tokens.*= 2"):
        play(
            Writer(stops(9)),
            ScriptedHosts(three_turns),
            max_tokens=2,
            failed=FailedEpisodes({"lake": 0.0}),
        )


def test_a_later_conversation_that_leaves_no_room_truncates_the_episode() -> None:
    def answers(episode: str, turn: int, action: str) -> Observed:
        return said(6, row=1, reward=0.25) if turn == 1 else over(reward=1.0)

    for room, turns in ((6, 1), (7, 2)):
        (one,) = play(Writer(stops(9)), ScriptedHosts(answers), max_tokens=room).samples
        assert one.has_reward
        assert (len(one.turns), one.sample.truncated) == (turns, turns == 1)


def test_an_environment_that_truncates_is_no_failure() -> None:
    (one,) = play(Writer(stops(9)), ScriptedHosts(lambda *_: said(0, truncated=True))).samples
    assert one.sample.truncated
    assert one.has_reward


def test_an_episode_whose_environment_fails_begins_again_as_another() -> None:
    def fails_first(episode: str, turn: int, action: str) -> Observed:
        if "~" not in episode and turn == 2:
            raise EnvironmentFailedError("the board is broken")
        return three_turns(episode, turn, action)

    hosts = ScriptedHosts(fails_first)
    (one,) = play(Writer(stops(9)), hosts).samples
    assert one.reward == 1.5
    assert one.sample.id == "5/lake:3/0"
    assert hosts.opened == {"5/lake:3/0": 3, "5/lake:3/0~1": 3}, "with the same task"
    assert sorted(hosts.closed) == ["5/lake:3/0", "5/lake:3/0~1"]


def test_after_the_last_try_an_episode_has_no_reward_and_is_counted() -> None:
    def broken(episode: str, turn: int, action: str) -> Observed:
        if episode.startswith("5/lake:3/0"):
            raise EnvironmentFailedError("the board is broken")
        return three_turns(episode, turn, action)

    hosts = ScriptedHosts(broken)
    first, second = play(Writer(stops(9)), hosts, samples_per_prompt=2).samples
    assert first.failed == ("lake",)
    assert not first.has_reward
    assert second.reward == 1.5
    assert sorted(hosts.closed) == sorted(hosts.opened)
    assert len(hosts.opened) == 4
    with pytest.raises(
        EnvironmentFailedError, match=r"failed in 1 of the first 1 episodes.*broken"
    ):
        play(Writer(stops(9)), ScriptedHosts(broken), failed=FailedEpisodes({"lake": 0.4}))


@pytest.mark.parametrize("rewards", [(1e308, 1e308), (1e39, -1e39), (0.0, -1e200)])
def test_rewards_with_which_a_step_cannot_compute_fail_their_episode(
    rewards: tuple[float, float],
) -> None:
    def answers(episode: str, turn: int, action: str) -> Observed:
        return said(1, reward=rewards[0]) if turn == 1 else over(reward=rewards[1])

    hosts = ScriptedHosts(answers)
    hosts.config = EnvironmentConfig(env="x", tags=("lake",), max_tries=1)
    failed = FailedEpisodes({"lake": 1.0})
    group = play(Writer(stops(9)), hosts, failed=failed)
    assert not any(one.has_reward for one in group.samples)


def test_the_rewards_of_the_run_judge_no_episode_that_failed() -> None:
    judged: list[str] = []

    def broken(episode: str, turn: int, action: str) -> Observed:
        if episode.startswith("5/lake:3/1"):
            raise EnvironmentFailedError("the board is broken")
        return three_turns(episode, turn, action)

    async def score(samples: list[Sample]) -> list[ScoredSample]:
        judged.extend(sample.id for sample in samples)
        return [ScoredSample(s, 0.25, by_name={"form": 0.25}) for s in samples]

    async def score_group(samples: Sequence[ScoredSample]) -> list[ScoredSample]:
        judged.extend(one.sample.id for one in samples)
        return [replace(one, reward=one.reward + len(samples)) for one in samples]

    hosts = ScriptedHosts(broken)
    how: dict[str, Any] = {"score": {"lake": score}, "score_group": score_group}
    group = play(Writer(stops(9)), hosts, samples_per_prompt=3, **how)
    assert [one.reward for one in group.samples] == [3.75, 0.0, 3.75]
    assert [one.failed for one in group.samples] == [(), ("lake",), ()]
    assert judged == ["5/lake:3/0", "5/lake:3/2"] * 2
    assert "form" not in group.samples[1].by_name


def test_the_rewards_of_the_run_are_added_to_those_of_the_environment() -> None:
    async def score(samples: list[Sample]) -> list[ScoredSample]:
        return [ScoredSample(s, 0.5, {"form/x": 1.0}, {"form": 0.5}) for s in samples]

    (one,) = play(Writer(stops(9)), ScriptedHosts(three_turns), score={"lake": score}).samples
    assert one.reward == 2.0
    assert one.by_name == {"lake": 1.5, "form": 0.5}
    assert len(one.turns) == 3


@pytest.mark.parametrize("which", ["score", "score_group"])
def test_rewards_that_never_end_name_the_group(which: str) -> None:
    async def never(samples: Sequence[Any]) -> list[ScoredSample]:
        await asyncio.sleep(60)
        return []

    late: Any = {"lake": never} if which == "score" else never
    hosts = ScriptedHosts(three_turns)
    with pytest.raises(WaitTimeoutError, match=r"rewards of group 5/lake:3 .* 0\.02 s"):
        play(Writer(stops(9)), hosts, reward_timeout_s=0.02, **{which: late})


def test_thoughts_are_hidden_from_the_environment_unless_it_may_see_them() -> None:
    for thoughts, seen in (("hide", " left"), ("show", "<think>a</think> left")):
        config = EnvironmentConfig.model_validate({"env": "x", "thoughts": thoughts})
        hosts = ScriptedHosts(lambda *_: over(), config)
        writer = Writer(stops(9))
        original = writer.generate

        async def without_text(request: GenerateRequest, made: Any = original) -> list[Completion]:
            (found,) = await made(request)
            return [Completion.of(found.tokens, found.logprobs, found.versions, found.finish)]

        writer.generate = without_text  # type: ignore[method-assign]
        play(writer, hosts, decode=lambda tokens: "<think>a</think> left")
        assert list(hosts.heard.values()) == [[(seen, END)]]


def test_a_cancelled_group_leaves_no_episode_open() -> None:
    hosts = ScriptedHosts(three_turns)
    stuck = asyncio.Event

    async def main() -> None:
        never = stuck()

        class Stuck(Writer):
            async def generate(self, request: GenerateRequest) -> list[Completion]:
                if request.id.endswith(".1"):
                    await never.wait()
                return await super().generate(request)

            async def abort(self, request_id: str) -> None:
                never.set()

        producer = episodes(Stuck(stops(9)), hosts, samples_per_prompt=3)
        task = asyncio.ensure_future(producer.run(TASK))
        for _ in range(30):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert len(hosts.opened) == 3
    assert sorted(hosts.closed) == sorted(hosts.opened)


def test_a_replica_that_dies_in_the_third_turn_costs_no_episode_and_no_token() -> None:
    calm, hosts = Writer(stops(9)), ScriptedHosts(three_turns)

    @dataclass
    class Mortal(Writer):
        """Engine that dies under the third turn of an episode, and then is gone."""

        dead: bool = False

        async def generate(self, request: GenerateRequest) -> list[Completion]:
            self.dead = self.dead or request.id.endswith(".2")
            if self.dead:
                raise EngineDiedError("the engine's process is gone")
            return await super().generate(request)

        async def abort(self, request_id: str) -> None:
            raise EngineDiedError("the engine's process is gone")

    mortal = Mortal(stops(9))
    fleet = Fleet([Replica(0, mortal, 64), Replica(1, calm, 64)])
    samples = play(mortal, hosts, fleet=fleet, samples_per_prompt=4).samples
    assert mortal.dead
    assert {request.id[-2:] for request in mortal.requests} <= {".0", ".1"}
    assert [one.reward for one in samples] == [1.5] * 4
    assert all(len(one.turns) == 3 for one in samples)
    whole = [9, END, 60, 9, END, 60, 61, 9, END]
    assert all(list(one.sample.completion.tokens) == whole for one in samples)
    assert sorted(hosts.closed) == sorted(hosts.opened)
    assert len(hosts.opened) == 4, "no episode began again"


def test_turns_of_one_episode_may_have_been_written_by_different_weights() -> None:
    writer = Writer(stops(9))

    def pushes(episode: str, turn: int, action: str) -> Observed:
        writer.version += 1
        return three_turns(episode, turn, action)

    (one,) = play(writer, ScriptedHosts(pushes)).samples
    versions = [7, 7, NOBODY, 8, 8, NOBODY, NOBODY, 9, 9]
    assert list(one.sample.completion.versions) == versions


TURN = st.tuples(st.lists(st.integers(2, 9), max_size=5), st.booleans(), st.integers(0, 6))


@settings(max_examples=60, deadline=None)
@given(st.lists(TURN, min_size=1, max_size=6), st.integers(20, 60), st.integers(1, 6))
def test_masks_cover_exactly_what_the_policy_wrote(
    script: list[tuple[list[int], bool, int]], max_tokens: int, max_turns: int
) -> None:
    """Whatever the turns are: tokens 2 to 9 and the end are the policy's, all others are not."""

    def write(request: GenerateRequest) -> tuple[list[int], FinishReason]:
        number = int(request.id.rpartition(".")[2])
        tokens, ends, _ = script[number % len(script)]
        room = request.sampling.max_new_tokens
        whole = [*tokens, END]
        return (
            (whole[:room], FinishReason.STOP)
            if ends and len(whole) <= room
            else ((tokens or [2])[:room], FinishReason.LENGTH)
        )

    def answer(episode: str, turn: int, action: str) -> Observed:
        return over() if turn > len(script) else said(script[turn - 1][2])

    config = EnvironmentConfig.model_validate(
        {"env": "x", "max_turns": max_turns, "cut_turn": "go_on"}
    )
    (one,) = play(Writer(write), ScriptedHosts(answer, config), max_tokens=max_tokens).samples
    completion = one.sample.completion
    own = [token < 10 for token in completion.tokens]
    assert own == [version != NOBODY for version in completion.versions]
    assert own == [logprob != 0 for logprob in completion.logprobs]
    assert own == [
        any(turn.begin <= i < turn.end for turn in one.turns) for i in range(len(completion))
    ]
    assert len(one.sample.prompt.tokens) + len(completion) <= max_tokens
    assert not completion.versions.runs or own[-1], "nothing follows the last turn"
    assert 1 <= len(one.turns) <= max_turns
