"""Trial of an environment: episodes with policies that know nothing, and the rules that are
broken there."""

from __future__ import annotations

import asyncio
import inspect
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from roll.core.threads.bounded import gives_up
from roll.core.threads.daemon_threads import DaemonThreads, TooManyHungError
from roll.core.threads.user_errors import described, passable
from roll.envs.answers import reward_of, short
from roll.envs.api import Env, finite, messages_of, require_methods, without_package
from roll.envs.hostile_actions import HOSTILE

Policy = Callable[[str], str]
"""Function that turns an observation into an action."""

READ = ("rewards", "seat", "state", "tools")
"""Keys of `info` that mean something to a run and may be no number."""
RANDOM_WORDS = 3
"""Largest number of words in an action of the random policy."""


class _BrokenError(Exception):
    """Error: an environment breaks a rule; its text says how."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Answer of an environment to one action."""

    said: str
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated

    def equals(self, other: Turn) -> bool:
        """Return whether this is the same answer, in all that a run reads and in all texts and
        numbers of `info`. Two arrays there, for instance, need not be comparable."""

        def read(turn: Turn) -> object:
            plain = {key: without_package(value) for key, value in turn.info.items()}
            told = {
                key: value if isinstance(value, str | bool | int | float) else short(value)
                for key, value in plain.items()
                if key in READ or isinstance(value, str | bool | int | float)
            }
            return turn.said, turn.reward, turn.terminated, turn.truncated, told

        return read(self) == read(other)


@dataclass(slots=True)
class Episode:
    """One episode of a trial."""

    opening: str = ""
    """Text of the first observation."""
    actions: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reset_s: float = 0.0
    """Seconds that making and resetting the environment took."""
    step_s: list[float] = field(default_factory=list)
    """Seconds of each step."""

    @property
    def reward(self) -> float:
        return sum(turn.reward for turn in self.turns)

    @property
    def success(self) -> float | None:
        """`success` of the last turn; None if the environment does not tell."""
        return finite(self.turns[-1].info.get("success")) if self.turns else None


@dataclass(slots=True)
class EnvTrial:
    """Findings of a trial of an environment."""

    broken: list[str] = field(default_factory=list)
    """Rules that the environment breaks, each with an example; empty if it keeps all."""
    episodes: dict[str, list[Episode]] = field(default_factory=dict)
    """Episodes by the policy that played them."""
    tasks: int = 0
    """Number of different first observations."""
    seeds: int = 0
    """Number of seeds that were tried."""


@dataclass(eq=False)
class Trial:
    """One trial; see `try_env` for the fields."""

    make: Callable[[], Env]
    options: dict[str, Any]
    max_turns: int
    actions: tuple[str, ...]
    timeout_s: float
    threads: DaemonThreads = field(default_factory=lambda: DaemonThreads("env-try", max_hung=8))

    async def run(
        self,
        seeds: tuple[int, ...],
        solver: Callable[[], Policy] | None,
        reward_range: tuple[float, float] | None,
    ) -> EnvTrial:
        """Try every rule on every seed."""
        found = EnvTrial(seeds=len(seeds))
        random_ones: dict[int, Episode] = {}
        players: dict[str, Callable[[int], Policy]] = {
            "empty": lambda seed: lambda said: "",
            "random": self._random,
        }
        if solver is not None:
            players["solver"] = lambda seed: solver()
        for name, player in players.items():
            found.episodes[name] = []
            for seed in seeds:
                with _Noting(found, f"{name} policy, seed {seed}"):
                    played = await self._play(seed, player(seed))
                    found.episodes[name].append(played)
                    if name == "random":
                        random_ones[seed] = played
                    if name == "solver" and not played.success:
                        raise _BrokenError(_unsolved(played))
        for seed, first in random_ones.items():
            with _Noting(found, f"determinism, seed {seed}"):
                await self._again(seed, first)
        for seed in seeds[:2]:
            await self._hostile(seed, found)
        with _Noting(found, "closing"):
            await self._close(await self._made())
        openings = {each.opening for each in found.episodes["empty"]}
        found.tasks = len(openings)
        _check_range(found, reward_range)
        return found

    def _random(self, seed: int) -> Policy:
        """Return a policy that writes random allowed actions, or random words of what the
        environment said."""
        dice = random.Random(seed)

        def act(said: str) -> str:
            if self.actions and dice.random() < 0.7:
                return dice.choice(self.actions)
            words = re.findall(r"[^\s,;]+", said) or [""]
            return " ".join(dice.choice(words) for _ in range(dice.randint(1, RANDOM_WORDS)))

        return act

    async def _play(self, seed: int, policy: Policy) -> Episode:
        """Play one episode to its end, or to the last turn."""
        played = Episode()
        env = await self._opened(seed, played)
        try:
            heard = played.opening
            for _ in range(self.max_turns):
                turn = await self._step(env, policy(heard), played)
                heard = turn.said
                if turn.over:
                    break
        finally:
            await self._close(env)
        return played

    async def _again(self, seed: int, first: Episode) -> None:
        """Repeat an episode while another one runs beside it; _BrokenError if an answer differs."""
        second, beside = Episode(), Episode()
        env = await self._opened(seed, second)
        other = await self._opened(seed + 1, beside)
        try:
            if second.opening != first.opening:
                told = f"{first.opening!r:.80}, then {second.opening!r:.80}"
                raise _BrokenError(f"the same seed begins with {told}; use `seed` alone")
            for number, action in enumerate(first.actions):
                if not beside.turns or not beside.turns[-1].over:
                    await self._step(other, action, beside)
                turn, before = await self._step(env, action, second), first.turns[number]
                if not turn.equals(before):
                    raise _BrokenError(
                        f"turn {number + 1}, action {action!r:.60}: first {_told(before)}, then "
                        f"{_told(turn)}; random numbers must follow from `seed` alone"
                    )
        finally:
            await self._close(env)
            await self._close(other)

    async def _hostile(self, seed: int, found: EnvTrial) -> None:
        """Try each action of `HOSTILE` and `self.actions`, in an environment each, at most twice.
        A broken rule is noted in `found.broken`, and the next action is tried.
        """
        for what, action in (*HOSTILE.items(), *((repr(each), each) for each in self.actions)):
            with _Noting(found, f"hostile action ({what}), seed {seed}"):
                played = Episode()
                env = await self._opened(seed, played)
                try:
                    for _ in range(2):
                        if (await self._step(env, action, played)).over:
                            break
                finally:
                    await self._close(env)

    async def _made(self) -> Env:
        made, _ = await self._call("making it", self.make)
        try:
            require_methods(made)
        except TypeError as error:
            raise _BrokenError(f"making it: {error}") from None
        return made  # type: ignore[no-any-return]

    async def _opened(self, seed: int, played: Episode) -> Env:
        """Make and reset an environment; note what it says."""
        begun = time.perf_counter()
        env = await self._made()
        try:
            given = dict(self.options)
            answer, _ = await self._call("reset", partial(env.reset, seed=seed, options=given))
            played.reset_s = time.perf_counter() - begun
            said, info = _unpacked("reset", answer, 2)
            played.opening = _text("reset", said)
            _check_info("reset", info)
        except BaseException:
            await self._close(env)
            raise
        return env

    async def _step(self, env: Env, action: str, played: Episode) -> Turn:
        """Do one step, check the five results, and add them to the record `played`; _BrokenError if
        a rule is broken."""
        answer, took_s = await self._call("step", partial(env.step, action))
        said, reward, terminated, truncated, info = _unpacked("step", answer, 5)
        try:
            value = reward_of(reward)
        except ValueError as error:
            raise _BrokenError(f"step: {error}") from None
        over = bool(terminated) or bool(truncated)
        text = "" if over and not said else _text("step", said)
        _check_info("step", info)
        turn = Turn(text, value, bool(terminated), bool(truncated), dict(info))
        played.actions.append(action)
        played.turns.append(turn)
        played.step_s.append(took_s)
        return turn

    async def _close(self, env: Env) -> None:
        await self._call("close", env.close)

    async def _call(self, what: str, call: Callable[[], Any]) -> tuple[Any, float]:
        """Return the result of a call, plain or `async`, and the seconds that it took.

        _BrokenError if it raises an exception or takes too long; `what` names it in the message.
        """

        def timed() -> tuple[Any, float]:
            begun = time.perf_counter()
            return call(), time.perf_counter() - begun

        async def awaited() -> tuple[Any, float]:
            begun = time.perf_counter()
            try:
                return await call(), time.perf_counter() - begun
            except (KeyboardInterrupt, SystemExit) as error:  # they would end the event loop
                raise passable(error) from error

        of = call.func if isinstance(call, partial) else call
        try:
            if inspect.iscoroutinefunction(of):
                return await asyncio.wait_for(awaited(), self.timeout_s)
            return await self.threads.run(timed, self.timeout_s)  # type: ignore[no-any-return]
        except TimeoutError:
            raise _BrokenError(f"{what} did not end within {self.timeout_s:g} s") from None
        except TooManyHungError as error:
            raise _BrokenError(f"{what} was not tried, because {error}") from None
        except BaseException as error:
            if isinstance(error, GeneratorExit) or gives_up():
                raise
            raise _BrokenError(f"{what} raised {described(error)}") from error


class _Noting:
    """Context that notes a broken rule in a trial instead of raising; each rule once."""

    def __init__(self, found: EnvTrial, where: str) -> None:
        """Note broken rules in `found`, each after the text `where`."""
        self._found, self._where = found, where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, _BrokenError):
            return False
        if not any(line.endswith(str(error)) for line in self._found.broken):
            self._found.broken.append(f"{self._where}: {error}")
        return True


def _unpacked(what: str, answer: Any, size: int) -> tuple[Any, ...]:
    """Return the `size` results of `reset` or `step`; _BrokenError if they are not so many."""
    form = "(observation, info)" if size == 2 else "gymnasium's five results"
    if not isinstance(answer, tuple | list) or len(answer) != size:
        raise _BrokenError(f"{what}: expected {form}, found {short(answer)}")
    return tuple(answer)


def _text(what: str, said: Any) -> str:
    """Return an observation as text; _BrokenError if it is none."""
    try:
        return "\n".join(message.content for message in messages_of(said))
    except (TypeError, ValueError) as error:
        raise _BrokenError(f"{what}: {error}") from None


def _check_info(what: str, info: Any) -> None:
    """Raise _BrokenError unless `info` is a dict whose numbers are finite and whose `state` is a
    name."""
    if not isinstance(info, Mapping):
        raise _BrokenError(f"{what}: `info` must be a dict, found {type(info).__name__}")
    for key, value in info.items():
        if isinstance(value, bool | int | float) and finite(value) is None:
            raise _BrokenError(f"{what}: info[{key!r}] = {short(value)} is not finite")
    state = info.get("state")
    if state is not None and not isinstance(state, str | int):
        raise _BrokenError(
            f"{what}: info['state'] must be a text or a whole number, found {short(state)}"
        )


def _check_range(found: EnvTrial, reward_range: tuple[float, float] | None) -> None:
    """Note episodes whose reward lies outside of the range."""
    if reward_range is None:
        return
    lowest, highest = reward_range
    for name, episodes in found.episodes.items():
        for played in episodes:
            if not lowest - 1e-9 <= played.reward <= highest + 1e-9:
                found.broken.append(
                    f"{name} policy: the reward of an episode is {played.reward:g}, outside of "
                    f"{lowest:g} to {highest:g}"
                )
                return


def _unsolved(played: Episode) -> str:
    """Return how an episode ended that the solver should have solved."""
    last = played.turns[-1] if played.turns else None
    return f"not solved after {len(played.turns)} turns; it said last {_told(last)}"


def _told(turn: Turn | None) -> str:
    """Return a turn in words."""
    if turn is None:
        return "nothing"
    return f"{turn.said!r:.80} (reward {turn.reward:g}, over {turn.over}, {turn.info})"
