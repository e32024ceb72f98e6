"""`Env`: what users write to make an environment. It has the signature of gymnasium, which most
existing environments have already."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

from roll.core.step_rewards import MAX_NUMBER
from roll.core.types import Message
from roll.data.chat.templates import PromptTokenizer

Said = Message | Mapping[str, Any]
"""A message, or a mapping with its `role` and `content`."""
Observation = str | Said | Sequence[Said]
"""What an environment says: a text, which is a message of the user; or messages."""
Opening = tuple[Observation, dict[str, Any]]
"""First observation of an episode, and `info`."""
Step = tuple[Observation, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated, and `info`."""


Search = Callable[[str, str, int], Awaitable[list[str]]]
"""Function that returns passages of one of the `corpora` of a run, the nearest to a query first.
Its arguments are the name of the corpus, the query, and the number of passages.
EnvironmentFailedError if it gets no answer."""


MAX_OBSERVATION_CHARS = 4 * 2**20
"""Largest number of characters of an observation. While its tokens are made, no time limit fires in
the worker. Processes and servers of environments give answers of as many bytes at most."""


class Action(str):
    """Text that the policy wrote in one turn; it also says whether the turn was cut."""

    cut: bool

    def __new__(cls, text: str, *, cut: bool = False) -> Self:
        made = super().__new__(cls, text)
        made.cut = cut
        return made


@dataclass(frozen=True, slots=True)
class Hearing:
    """Facts about the way in which an environment hears the policy."""

    tokenizer: PromptTokenizer
    """Tokenizer of the policy."""
    special_tokens: bool
    """Whether actions hold special tokens, as the run says."""
    search: Search | None = None
    """Function that searches the `corpora` of the run; None where there is no run."""


@runtime_checkable
class ToldEnv(Protocol):
    """Environment that is told how it hears the policy."""

    def listen(self, hearing: Hearing) -> None:
        """Take note of how the policy is heard. It is called once, before `reset`, and must not
        wait.

        Raises:
            ConfigError: the environment cannot work in this way. It ends the run.
        """
        ...


class Env(Protocol):
    """Environment of one episode. It is built for the episode and closed after it.

    The methods may be plain or `async`. Plain ones run in a thread, one call at a time. A method
    that raises, or takes longer than its time limit, ends the episode as failed: it is counted and
    not trained on, and never scored 0.
    """

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Opening | Awaitable[Opening]:
        """Begin the episode; called once.

        Args:
            seed: seed of everything random. Episodes of one group get the same seed, and must begin
                with the same task.
            options: columns of the data row of this task, such as `prompt` and `answer`; empty if
                tasks are seeds alone.

        Returns:
            The first observation; and `info`, see `step`. `tools` in this `info` is a list of
            tools that the policy may call, as chat templates take them (JSON schemas).
        """
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Take what the policy wrote in one turn, without its thoughts.

        Args:
            action: the text, an `Action`.

        Returns:
            observation: what the environment answers; not shown to the policy if the episode ends.
            reward: reward of this turn. The reward of the episode is the sum over its turns.
            terminated: True if the episode is over by the rules of the environment.
            truncated: True if the environment ends the episode for another reason.
            info: what else there is to know. Numbers and bools in the `info` of the last turn are
                reported as metrics, such as `success`. `state` (a text or a number) names the state
                that the next turn begins in, for algorithms that compare turns. With `new_context`
                true, the observation begins a new context: the policy sees nothing of what was said
                before.
        """
        ...

    def close(self) -> Awaitable[None] | None:
        """Release all resources; called once, also after a failure."""
        ...


def messages_of(observation: Any) -> tuple[Message, ...]:
    """Return an observation as messages.

    A mapping with `role` and `content` is a message as well. Characters without UTF-8 become `?`;
    see `encodable`.

    Raises:
        TypeError: the observation is neither text nor messages.
        ValueError: it is longer than `MAX_OBSERVATION_CHARS`.
    """
    if isinstance(observation, str):
        observation = Message(role="user", content=observation)
    if isinstance(observation, Message | Mapping):
        observation = (observation,)
    several = isinstance(observation, Sequence) and not isinstance(observation, bytes | bytearray)
    if not several or not observation:
        raise TypeError(
            f"an observation must be a text or messages, found {type(observation).__name__} "
            f"{repr(observation)[:60]}"
        )
    messages = tuple(_message(each) for each in observation)
    if (size := sum(len(message.content) for message in messages)) > MAX_OBSERVATION_CHARS:
        raise ValueError(
            f"an observation must have at most {MAX_OBSERVATION_CHARS:,} characters, found "
            f"{size:,}; shorten it"
        )
    return messages


def require_methods(env: Any) -> None:
    """Raise TypeError if what a function has made is no environment."""
    for method in ("reset", "step", "close"):
        if not callable(getattr(env, method, None)):
            raise TypeError(
                f"{type(env).__name__} {repr(env)[:60]} has no method `{method}`; see "
                "roll/envs/api.py"
            )


def without_package(value: Any) -> Any:
    """Return a number or bool of numpy or torch as Python's; any other value as it is."""
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and hasattr(value, "item"):
        with suppress(ValueError, RuntimeError):  # it has several numbers
            return value.item()
    return value


def finite(value: Any) -> float | None:
    """Return a number or bool as a float, also one of numpy or torch; None for anything else, for
    what is not finite, and for what is beyond `MAX_NUMBER`."""
    value = without_package(value)
    if not isinstance(value, bool | int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= MAX_NUMBER else None


def encodable(text: str) -> str:
    """Return a text with `?` in place of each half of a surrogate pair. It has no UTF-8, and so no
    tokens; the episode would fail, and a policy that makes its program say one could so be rid of
    an episode that goes badly."""
    return text.encode("utf-8", "replace").decode()


def _message(value: Any) -> Message:
    """Return a message, or a mapping with its keys, as `Message` of characters that have UTF-8;
    TypeError for anything else."""
    if isinstance(value, Message):
        return replace(
            value,
            content=encodable(value.content),
            name=encodable(value.name),
            call_id=encodable(value.call_id),
            parts=tuple(encodable(x) if isinstance(x, str) else x for x in value.parts),
        )
    if (
        isinstance(value, Mapping)
        and {"role", "content"} <= value.keys() <= set(_KEYS)
        and all(isinstance(each, str) for each in value.values())
    ):
        texts: dict[str, Any] = {_KEYS[key]: encodable(each) for key, each in value.items()}
        return Message(**texts)
    raise TypeError(
        "a message must be {role, content}, with `name` and `tool_call_id` if the role is `tool`, "
        f"all of them text; found {repr(value)[:60]}"
    )


_KEYS = {"role": "role", "content": "content", "name": "name", "tool_call_id": "call_id"}
"""Keys of a message -> fields of `Message`."""
