"""`EnvHost`: runs the environments of many episodes at once, and renders what they say."""

from __future__ import annotations

import asyncio
import inspect
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from roll.config.sections.environment import EnvironmentConfig
from roll.core.errors import EnvironmentFailedError, HostSpentError, RollError
from roll.core.threads.bounded import BlockedLoopError, gives_up, run_bounded
from roll.core.threads.daemon_threads import DaemonThreads, TooManyHungError
from roll.core.threads.loop_thread import LoopThread
from roll.core.threads.pauses import Pauses
from roll.core.threads.user_errors import described
from roll.core.types import Message
from roll.data.chat.turns import Turns
from roll.envs.answers import NEW_CONTEXT, numbers_of, reward_of, state_of, unpacked
from roll.envs.api import (
    Action,
    Env,
    Hearing,
    Search,
    ToldEnv,
    messages_of,
    require_methods,
)
from roll.envs.contexts import Context, check_history
from roll.envs.hearing import heard
from roll.envs.observed import Observed
from roll.envs.running_episode import Player, RunningEpisode
from roll.envs.searching import paused_search
from roll.envs.seats import Seats
from roll.rewards.thinking import opened_thought

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_HUNG_THREADS = 32
"""Number of calls that may hang in a thread of one host; once this many hang, every call fails."""
CLOSE_TIMEOUT_S = 10.0
"""Time limit for closing an environment, in seconds."""


@dataclass(eq=False)
class EnvHost:
    """Environments of running episodes, by the name of the episode; all calls come from one event
    loop. Calls of one episode must not overlap."""

    name: str
    """Name of the environment in the config."""
    config: EnvironmentConfig
    make: Callable[[], Env]
    turns: Turns
    search: Search | None = None
    """Function that searches the `corpora` of the run, for environments that listen."""
    _running: dict[str, RunningEpisode] = field(default_factory=dict, init=False)
    _opening: dict[str, bool] = field(default_factory=dict, init=False)
    """Whether each episode that begins just now is still wanted."""
    _closing: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    """Ends of environments that were made too late."""
    _threads: DaemonThreads = field(init=False)
    _loop: LoopThread | None = field(default=None, init=False)
    """Event loop of environments with `async` methods."""
    _room: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        """Raise ConfigError if the chat template cannot do what `history` asks."""
        check_history(self.name, self.config, self.turns)
        self._threads = DaemonThreads(f"env-{self.name}", max_hung=MAX_HUNG_THREADS)
        self._room = asyncio.Semaphore(self.config.concurrency)

    async def open(self, episode: str, seed: int, options: Mapping[str, Any]) -> Observed:
        """Make the environment of an episode and reset it; its answer begins the conversation.

        Raises:
            EnvironmentFailedError: it raised, took too long, or answered what is no observation.
        """
        self._opening[episode] = True
        try:
            return await self._open(episode, seed, options)
        finally:
            if not self._opening.pop(episode):
                await self._end(episode)

    async def _open(self, episode: str, seed: int, options: Mapping[str, Any]) -> Observed:
        """Do what `open` does, for as long as the episode is wanted."""
        limit_s = self.config.reset_timeout_s

        async def begin() -> tuple[RunningEpisode, Any]:
            """Make the environment and tell it the tokenizer if it wants it; return the episode,
            and the answer of `reset`."""
            env = await self._call(
                "making the environment", self.make, limit_s, late=self._close_soon()
            )
            self._read("making the environment", env, require_methods)
            searches = Pauses()
            made = self._running[episode] = RunningEpisode(env, Seats(self.config.seats), searches)
            self._require_wanted(episode)
            self._tell(env, searches)
            return made, await self._call(
                "reset",
                lambda: env.reset(seed=seed, options=dict(options)),
                limit_s,
                of=env.reset,
                pauses=searches,
            )

        async with self._room:
            self._require_wanted(episode)
            running, answer = await begin()
        first = self._read("reset", answer, lambda found: self._opened(found, running))
        running.prompt_end = first.prompt_end
        return first

    def _tell(self, env: Env, searches: Pauses) -> None:
        """Tell an environment how it hears the policy, if it wants to know.

        Raises:
            ConfigError: it cannot work in this way.
            EnvironmentFailedError: it raised another error.
        """
        shown = self.config.special_tokens == "show"
        hearing = Hearing(self.turns.tokenizer, shown, paused_search(self.search, searches))
        try:
            if isinstance(env, ToldEnv):
                env.listen(hearing)
        except RollError:
            raise
        except Exception as error:  # it is code of the user
            raise EnvironmentFailedError(
                f"environment {self.name!r}: listen raised {described(error)}; a method of this "
                "name gets a `Hearing` (roll/envs/api.py): rename one that means another thing"
            ) from error

    def _require_wanted(self, episode: str) -> None:
        """Raise EnvironmentFailedError if `close` was called for an episode that begins."""
        if not self._opening[episode]:
            raise EnvironmentFailedError(
                f"environment {self.name!r}: episode {episode} was ended before it began"
            )

    async def act(
        self,
        episode: str,
        action: str | array[int],
        last: int | None,
        wrote: array[int] | None = None,
    ) -> Observed:
        """Give a turn of the policy to the environment of an episode.

        Args:
            episode: name of the episode.
            action: text of the turn; or its tokens, if the environment sees special tokens.
            last: last token of the turn; None if the turn was cut.
            wrote: all tokens of the turn; needed with `history: fork`.

        Raises:
            EnvironmentFailedError: as for `open`; or no such episode runs here.
        """
        running = self._running.get(episode)
        if running is None:
            raise EnvironmentFailedError(
                f"environment {self.name!r} does not run episode {episode}; its worker has been "
                "replaced"
            )
        text = heard(action, self.turns, self.config, running.prompt_end)
        env, told = running.env, Action(text, cut=last is None)
        async with self._room:
            answer = await self._call(
                "step",
                lambda: env.step(told),
                self.config.step_timeout_s,
                of=env.step,
                pauses=running.searches,
            )
        if running.player.context is not None:
            assert wrote is not None
            running.player.context.wrote(wrote)
            said = opened_thought(running.prompt_end) + self.turns.said(wrote)
            running.player.said.append(Message("assistant", said))
        running.seats.wrote(last)
        observed = self._read("step", answer, lambda found: self._stepped(found, running))
        running.prompt_end = observed.prompt_end
        return observed

    async def close(self, episode: str) -> None:
        """End an episode and close its environment; log what goes wrong there. Ignore an unknown
        episode.

        If the episode begins just now, `open` ends it: its caller has given it up, but the worker
        goes on to make its environment, and nobody would close that.
        """
        if episode in self._opening:
            self._opening[episode] = False
        else:
            await self._end(episode)

    async def _end(self, episode: str) -> None:
        """Do what `close` does for an episode that has begun."""
        running = self._running.pop(episode, None)
        if running is None:
            return
        await self._close(running.env)

    async def _close(self, env: Env) -> None:
        """Close an environment; log what goes wrong there."""
        try:
            await self._call("close", env.close, CLOSE_TIMEOUT_S)
        except EnvironmentFailedError as error:
            logger.warning("%s", error)

    def _close_soon(self) -> Callable[[Env], None]:
        """Return a function for other threads that has an environment closed."""
        loop = asyncio.get_running_loop()

        def begin(env: Env) -> None:
            task = loop.create_task(self._close(env))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

        def close(env: Env) -> None:
            with suppress(RuntimeError):  # the loop has ended, and this process will
                loop.call_soon_threadsafe(begin, env)

        return close

    async def shut(self) -> None:
        """Close all environments."""
        await asyncio.gather(*(self._end(episode) for episode in list(self._running)))
        await asyncio.gather(*self._closing)
        self._threads.close()
        if self._loop is not None:
            with suppress(Exception):
                self._loop.close()

    async def _call(
        self,
        what: str,
        call: Callable[[], Any],
        limit_s: float,
        of: Any = None,
        late: Callable[[Any], None] | None = None,
        pauses: Pauses | None = None,
    ) -> Any:
        """Run a plain call in a thread, or an `async` one on the loop of such environments.

        Args:
            what: what is done, for messages.
            call: function that does it.
            limit_s: time limit in seconds.
            of: method that `call` calls; by default `call` itself.
            late: function for the result of a plain call that comes too late.
            pauses: waits that do not count against the limit.

        Raises:
            EnvironmentFailedError: the call raised an exception, or did not end in time.
            HostSpentError: nor would any later call here.
        """
        name = f"environment {self.name!r}: {what}"
        try:
            if inspect.iscoroutinefunction(call if of is None else of):
                if self._loop is None:
                    self._loop = LoopThread(f"env-{self.name}", cancel_timeout_s=0.2)
                return await run_bounded(self._loop, call, limit_s, pauses)
            return await self._threads.run(call, limit_s, late=late, pauses=pauses)
        except TimeoutError as error:
            why = f" ({error})" if str(error) else ""
            raise EnvironmentFailedError(f"{name} did not end within {limit_s:g} s{why}") from None
        except BlockedLoopError as error:
            raise HostSpentError(f"{name} did not end within {limit_s:g} s ({error})") from None
        except TooManyHungError as error:
            raise HostSpentError(f"{name} cannot begin: {error}") from None
        except RollError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and gives_up():
                raise  # by the caller; any other would pass for the end of the run
            raise EnvironmentFailedError(f"{name} raised {described(error)}") from error

    def _read(self, what: str, answer: Any, read: Callable[[Any], T]) -> T:
        """Return what an environment answered, checked by `read`.

        EnvironmentFailedError if it has a wrong form; `what` names the method in the message.
        """
        try:
            return read(answer)
        except Exception as error:  # noqa: BLE001  # methods of the environment's objects run here
            told = error if isinstance(error, TypeError | ValueError) else described(error)
            raise EnvironmentFailedError(
                f"environment {self.name!r}: the result of {what} is wrong: {told}"
            ) from None

    def _opened(self, answer: Any, running: RunningEpisode) -> Observed:
        """Return the first observation of an episode, and set in its `seats` who begins; TypeError
        or ValueError if it has a wrong form."""
        said, info = unpacked(answer, "(observation, info)", 2)
        messages = self._said(said, running.seats)
        running.seats.begins(info)
        tokens, text = self._begun(running, messages, info.get("tools", ()))
        return Observed(
            tokens,
            text,
            prompt_end=self.turns.prompt_end(tokens),
            info=numbers_of(info),
            state=state_of(info),
            seat=running.seats.current,
        )

    def _begun(
        self, running: RunningEpisode, messages: Sequence[Message], tools: Any
    ) -> tuple[array[int], str]:
        """Begin a context of the current player; return its tokens and their text."""
        tokens, text = self.turns.opening(messages, tools)
        context = Context(self.turns, tokens) if self.config.history == "fork" else None
        running.players[running.seats.current] = Player(tools, list(messages), context)
        return tokens, text

    def _replied(
        self, running: RunningEpisode, messages: Sequence[Message]
    ) -> tuple[array[int], int | None]:
        """Return the tokens with which the conversation of the current player goes on; and if they
        begin a new row, the one before it."""
        player, seats = running.player, running.seats
        if player.context is None:
            return self.turns.reply(messages, last=seats.last), None
        player.said += messages
        tokens, anew = player.context.next(
            messages, player.said, last=seats.last, tools=player.tools
        )
        follows = seats.row if anew else None
        if anew:
            seats.begin_row()
        return tokens, follows

    def _said(self, said: Any, seats: Seats) -> tuple[Message, ...]:
        """Return an observation as messages; before the last turn, with the last word."""
        messages = messages_of(said)
        if not self.config.last_word or seats.turns != self.config.max_turns - 1:
            return messages
        asked = f"{messages[-1].content}\n\n{self.config.last_word}"
        return (*messages[:-1], replace(messages[-1], content=asked))

    def _stepped(self, answer: Any, running: RunningEpisode) -> Observed:
        """Return what an environment answered to a turn of the current player; TypeError or
        ValueError if it has a wrong form."""
        form = "(observation, reward, terminated, truncated, info)"
        said, reward, terminated, truncated, info = unpacked(answer, form, 5)
        over, value = bool(terminated) or bool(truncated), reward_of(reward)
        seats = running.seats
        messages = () if over and not said else self._said(said, seats)
        text = "\n".join(message.content for message in messages)
        rewards, begins = seats.rewards(info), False if over else seats.begins(info)
        forgets = self.config.history == "forget" or bool(info.get(NEW_CONTEXT))
        anew, tokens = begins or forgets, array("i")
        follows: int | None = None
        if over:
            pass
        elif begins:
            tokens, text = self._begun(running, messages, info.get("tools", ()))
        elif anew:
            follows = seats.row
            seats.begin_row()
            tools = info.get("tools", running.player.tools)
            tokens, _ = self._begun(running, messages, tools)
        else:
            tokens, follows = self._replied(running, messages)
        return Observed(
            tokens=tokens,
            text=text,
            prompt_end=self.turns.prompt_end(tokens),
            reward=value,
            terminated=bool(terminated),
            truncated=bool(truncated),
            info=numbers_of(info),
            state=state_of(info),
            row=seats.row,
            follows=follows,
            seat=seats.current,
            rewards=rewards,
        )
