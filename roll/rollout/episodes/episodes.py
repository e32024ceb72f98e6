"""Episodes: the policy and an environment take turns, and each episode becomes one sample, or one
of each player.

Tokens are the truth: a row of the sample is the sequence of the tokens that the policy wrote and of
those of the environment's messages in between. Nothing that is trained is tokenized again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from roll.config.sections.environment import EnvironmentConfig
from roll.core.completion import Completion, FinishReason, Written
from roll.core.errors import EnvironmentFailedError
from roll.core.step_rewards import require_reward, weighted_sum
from roll.core.types import GenerateRequest, Prompt, SamplingParams
from roll.data.tasks import seed_of
from roll.envs.observed import Observed
from roll.rewards.thinking import final_text
from roll.rollout.async_utils import SharedTimeout, first_done
from roll.rollout.episodes.failed import FailedEpisodes
from roll.rollout.episodes.record import Record, branch_points
from roll.rollout.episodes.results import (
    End,
    samples_of,
    samples_of_episode,
    trained_seats,
    without_reward,
)
from roll.rollout.episodes.transcript import Transcript
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.single_turn import REWARD_TIMEOUT_S, group_seed
from roll.rollout.types import (
    Group,
    GroupTask,
    GroupTiming,
    Score,
    ScoredSample,
    ScoreGroup,
)

logger = logging.getLogger(__name__)


class Hosts(Protocol):
    """Workers that host the episodes of one environment."""

    name: str
    """Name of the environment in the config."""
    config: EnvironmentConfig

    async def open(self, episode: str, seed: int, prompt: Prompt) -> Observed:
        """Begin an episode; return what its environment says first.

        Raises:
            EnvironmentFailedError: it raised, took too long, or its worker died.
        """
        ...

    async def act(
        self,
        episode: str,
        action: str | array[int],
        last: int | None,
        wrote: array[int] | None = None,
    ) -> Observed:
        """Give a turn to the environment of an episode that was opened; raises as `open` does.

        Args:
            action: text of the turn; or its tokens, if the environment sees special tokens.
            last: last token of the turn; None if the turn was cut.
            wrote: all tokens of the turn, if the chat template may rewrite it (`history: fork`), or
                an agent is told their number.
        """
        ...

    def close(self, episode: str) -> None:
        """End an episode, without waiting for it; ignore one that does not run."""
        ...


@dataclass(frozen=True)
class Episodes:
    """Producer of groups of episodes; the scheduler has many calls of `run` under way. The episodes
    of a group begin with the same seed."""

    fleet: Fleet
    decode: Callable[[Sequence[int]], str]
    """Function that turns the token ids of a turn into text without special tokens; called for
    turns that several replicas wrote."""
    hosts: Mapping[str, Hosts]
    """Tag -> hosts of the environment in which tasks with this tag are played."""
    failed: FailedEpisodes
    sampling: SamplingParams
    """Parameters of every turn; `max_new_tokens` limits one turn."""
    tag_sampling: Mapping[str, SamplingParams]
    """The same for the tasks with these tags, in place of `sampling`."""
    max_tokens: int
    """Largest number of tokens of an episode, its opening included."""
    samples_per_prompt: int
    seed: int
    """Seed of the run."""
    request_timeout_s: float
    """Time in which a request must make some progress on its replica, in seconds."""
    score: Mapping[str, Score] = field(default_factory=dict)
    """Tag -> function that adds the run's rewards to those of the environment; tags without rewards
    are missing."""
    score_group: ScoreGroup | None = None
    """Function that adds the rewards that see all episodes of a group."""
    redundant: int = 0
    """Number of episodes of a group beyond `samples_per_prompt`; those that end first are used. If
    episodes branch, so many in each of the two waves."""
    opponents: Mapping[str, Fleet] = field(default_factory=dict)
    """Name of an opponent -> engines that write its turns."""
    branching: bool = False
    """Whether episodes branch where the environment's `branching` says so."""
    reward_timeout_s: float = REWARD_TIMEOUT_S
    """Time limit for the rewards of the episodes of a group; see `SingleTurn.reward_timeout_s`."""
    _reward_limit: SharedTimeout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_reward_limit", SharedTimeout(self.reward_timeout_s))

    async def run(self, task: GroupTask) -> Group:
        """Play and score the episodes of a task.

        Raises:
            EnvironmentFailedError: more episodes failed than allowed.
            WaitTimeoutError, EngineError: see `Fleet.generate`; or the rewards took too long.
            RewardError: a reward failed more often than allowed.
        """
        clock = asyncio.get_running_loop().time
        started_s, prompt = clock(), task.prompt
        samples = [one for played in await self._all(task) for one in played.samples]
        played_s = clock()
        # There is nothing to judge of an episode that failed: its score would be that of no text.
        scored = iter(await self._scored(task, [one for one in samples if not one.failed]))
        samples = [one if one.failed else next(scored) for one in samples]
        timing = GroupTiming(started_s, played_s, clock())
        return Group(prompt, tuple(samples), task.step, timing)

    async def _scored(self, task: GroupTask, samples: list[ScoredSample]) -> list[ScoredSample]:
        """Return episodes of a group with the run's rewards added; the errors are those of
        `run`."""
        what = f"the rewards of group {task.group_id}"
        if samples and (score := self.score.get(task.prompt.tag)) is not None:
            with self._reward_limit.naming(what):
                extra = await score([one.sample for one in samples])
            samples = [_added(one, more) for one, more in zip(samples, extra, strict=True)]
        if samples and self.score_group is not None:
            with self._reward_limit.naming(what):
                samples = await self.score_group(samples)
        return samples

    async def _all(self, task: GroupTask) -> list[_Played]:
        """Play the episodes of a task: all at once; or first those that others then branch off."""
        config = self.hosts[task.prompt.tag].config
        wanted = whole = self.samples_per_prompt // samples_of(config)
        branching = config.branching if self.branching else None
        if branching is not None:
            whole = min(branching.whole, wanted)
        begun = whole + self.redundant
        first = await first_done([self._episode(task, i) for i in range(begun)], whole)
        if branching is None or whole == wanted:
            return first
        others = wanted - whole + self.redundant
        records = [one.record for one in first if one.samples[0].has_reward]
        # In a thread: the tokens of long episodes take their time.
        points = await asyncio.to_thread(branch_points, records, branching, others)
        starts: list[Record | None] = [records[i].before(number) for i, number in points]
        starts += [None] * (others - len(starts))
        later = [self._episode(task, begun + i, start) for i, start in enumerate(starts)]
        return first + await first_done(later, wanted - whole)

    async def _episode(self, task: GroupTask, index: int, start: Record | None = None) -> _Played:
        """Play one episode of a task. After a failure of the environment it begins again, or is
        replayed and goes on; after the last try it has no reward.

        Args:
            index: number of the episode in its group.
            start: turns of another episode with which it begins.
        """
        prompt, name = task.prompt, f"{task.group_id}/{index}"
        hosts = self.hosts[prompt.tag]
        failure, record = "", start or Record(name)
        for attempt in range(hosts.config.max_tries):
            try:
                played = await self._play(hosts, task, name, attempt, record)
            except EnvironmentFailedError as error:
                failure = str(error)
                logger.warning("episode %s failed: %s", name, failure)
            else:
                self.failed.count(hosts.name, None)
                return _Played(played, record)
            if hosts.config.replay:
                record.forget_unanswered()
            else:
                record = Record(name)
        self.failed.count(hosts.name, f"episode {name}: {failure}")
        return _Played(without_reward(name, task, hosts.name, hosts.config), record)

    async def _play(
        self, hosts: Hosts, task: GroupTask, name: str, attempt: int, record: Record
    ) -> list[ScoredSample]:
        """Play an episode once, and close its environment; return its samples.

        Args:
            name: id of the episode.
            attempt: number of earlier tries of this episode.
            record: turns that are replayed first; it gets those that follow.

        Raises:
            EnvironmentFailedError: the environment failed, or leaves no room for a turn.
        """
        episode = f"{name}~{attempt}" if attempt else name
        prompt = task.prompt
        sampling = self.tag_sampling.get(prompt.tag, self.sampling)
        try:
            seed = seed_of(prompt, run_seed=self.seed)
            first = await hosts.open(episode, seed, prompt)
            record.begins(first, hosts.name)
            played = [self._begun(hosts, first)]
            fleets = self._fleets(hosts.config, seed)
            last, truncated = await self._turns(hosts, episode, played, record, sampling, fleets)
        finally:
            hosts.close(episode)
        shared = (record.shared, record.shared_tokens)
        end = End(hosts.name, hosts.config, last.info, truncated, attempt, *shared)
        samples = samples_of_episode(played, end, name, task, seed)
        try:
            for one in samples:
                for reward in (*one.by_name.values(), *(turn.reward for turn in one.turns)):
                    require_reward(reward, "the reward of an episode or of a turn")
        except ValueError as error:
            raise EnvironmentFailedError(f"environment {hosts.name!r}: {error}") from None
        return samples

    def _begun(
        self, hosts: Hosts, first: Observed, follows: Transcript | None = None
    ) -> Transcript:
        """Return a row that begins; EnvironmentFailedError if it has no room for a turn.

        Args:
            first: what the row begins with.
            follows: row before it of the same conversation.
        """
        if len(first.tokens) >= self.max_tokens:
            raise EnvironmentFailedError(
                f"environment {hosts.name!r} begins with {len(first.tokens)} tokens, and an "
                f"episode has at most data.max_episode_tokens = {self.max_tokens}"
            )
        texts = [] if follows is None else [first.text]
        return Transcript(first.tokens, first.text, first.seat, follows, texts=texts)

    async def _turns(
        self,
        hosts: Hosts,
        episode: str,
        played: list[Transcript],
        record: Record,
        sampling: SamplingParams,
        fleets: Sequence[Fleet],
    ) -> tuple[Observed, bool]:
        """Let policy and environment take turns until the episode ends.

        Args:
            episode: name of the open episode.
            played: rows of the episode, of which the first has begun; others are added.
            record: how it has begun, and turns that are replayed; it gets those that follow.
            sampling: parameters of each turn.
            fleets: engines that write the turns of each player.

        Returns:
            The last answer of the environment, and whether a limit ended the episode.
        """
        config, heard = hosts.config, record.first
        assert heard is not None, "it has begun"
        clock = asyncio.get_running_loop().time
        ends_s = clock() + (config.episode_timeout_s or math.inf)
        for number in range(config.max_turns):
            current = played[heard.row]
            room = self.max_tokens - current.length
            limit = min(sampling.max_new_tokens, room)
            asked = min(limit, heard.max_new_tokens or limit)  # by an agent, for this turn alone
            if number == len(record.turns):
                stop = (*sampling.stop, *heard.stop)
                request = GenerateRequest(
                    f"{episode}.{number}",
                    current.context(),
                    replace(sampling, max_new_tokens=asked, stop=stop),
                    seed=group_seed(self.seed, f"{episode}.{number}"),
                )
                fleet = fleets[heard.seat]
                record.turns.append(await self._written(fleet, request, record.session))
            turn, written = record.turns[number], record.turns[number].content.get()
            current.wrote(written, turn.versions, heard.state, number)
            cut = turn.finish is FinishReason.LENGTH
            if cut and asked == limit and (limit == room or config.cut_turn == "end"):
                return heard, True
            last = written.tokens[-1] if written.tokens and not cut else None
            action = _action(written, config, heard.prompt_end)
            told = config.history == "fork" or config.agent is not None
            wrote = written.tokens if told else None
            heard = await hosts.act(episode, action, last, wrote)
            record.answered(number, heard, hosts.name)
            _pay(heard, current, played)
            if heard.over or number == config.max_turns - 1 or clock() >= ends_s:
                return heard, not heard.terminated
            if not self._goes_on(hosts, heard, played):
                return heard, True
        raise AssertionError("the last turn returns")

    def _goes_on(self, hosts: Hosts, heard: Observed, played: list[Transcript]) -> bool:
        """Add what an environment says to the rows of an episode; return False if its conversation,
        which may be a new one, has no room for a further turn."""
        if heard.row < len(played):
            continued = played[heard.row]
            if continued.length + len(heard.tokens) >= self.max_tokens:
                return False
            continued.heard(heard)
            return True
        if len(heard.tokens) >= self.max_tokens:
            return False
        follows = None if heard.follows is None else played[heard.follows]
        played.append(self._begun(hosts, heard, follows))
        return True

    def _fleets(self, config: EnvironmentConfig, seed: int) -> list[Fleet]:
        """Return the engines that write the turns of each player, in an episode of this seed."""
        if config.opponent is None:
            return [self.fleet] * config.seats
        other, own = self.opponents[config.opponent], trained_seats(config, seed)
        return [self.fleet if seat in own else other for seat in range(config.seats)]

    async def _written(self, fleet: Fleet, request: GenerateRequest, session: str) -> Completion:
        """Let engines write a turn; return it with its tokens and their text, which are fetched if
        they are elsewhere."""
        (turn,) = await fleet.generate(request, session=session, timeout_s=self.request_timeout_s)
        content = turn.content
        written = content if isinstance(content, Written) else await asyncio.to_thread(content.get)
        if written.text is None:
            written = replace(written, text=self.decode(written.tokens))
        return replace(turn, content=written)


@dataclass(frozen=True, slots=True)
class _Played:
    """Episode that has ended."""

    samples: list[ScoredSample]
    record: Record


def _action(written: Written, config: EnvironmentConfig, prompt_end: str) -> str | array[int]:
    """Return what the environment sees of a turn: its tokens if `special_tokens` is `show`, else
    its text, without the thought if `thoughts` is `hide`. If the thought does not end, this text is
    empty.

    Args:
        prompt_end: end of the text before the turn, which may open a thought.
    """
    if config.special_tokens == "show":
        return written.tokens
    text = written.text or ""
    return text if config.thoughts == "show" else (final_text(text, prompt=prompt_end) or "")


def _pay(heard: Observed, current: Transcript, played: Sequence[Transcript]) -> None:
    """Give the rewards of a turn: to the row that it is in, and to the latest turns of the other
    players."""
    current.paid(heard.reward)
    latest = {row.seat: row for row in played if row.turns}
    for seat, reward in heard.rewards.items():
        if seat in latest:
            latest[seat].paid_later(reward)


def _added(one: ScoredSample, more: ScoredSample) -> ScoredSample:
    """Return an episode with the scores of further rewards: rewards and steps are added, names and
    failures joined."""
    return replace(
        one,
        reward=one.reward + more.reward,
        parts=one.parts | more.parts,
        by_name=one.by_name | more.by_name,
        failed=(*one.failed, *more.failed),
        steps=weighted_sum([(1.0, one.steps), (1.0, more.steps)]),
    )
