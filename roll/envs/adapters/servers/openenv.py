"""Environments of OpenEnv, behind their server: `openenv:http://host:port`.

An episode is one WebSocket, as in OpenEnv's own client. Actions and observations are objects whose
fields the server tells (`/schema`), so a turn of the policy becomes an action without code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from roll.envs.adapters.servers.client import Connection, ServerError, address, field, headers_of

BASE_FIELDS = frozenset({"metadata", "done", "reward"})
"""Fields that all actions or observations have, and that are no part of what is said."""

MAX_DIGITS = 300
"""Longest number that is read; as a float it is finite."""


def prepare(
    name: str,
    kwargs: Mapping[str, Any],
    action: str | None = None,
    observation: str | None = None,
    instructions: str = "",
    api_key_env: str | None = None,
) -> Callable[[], OpenEnvEnv]:
    """Return the function that makes the environment of one episode.

    Args:
        name: address of the server.
        kwargs: arguments of `reset`, beside the seed and the columns of the row; the server drops
            those that its environment does not take.
        action: field of an action that gets the turn of the policy. By default the one field that
            an action must have, or the only one; if there are several, the policy writes a JSON
            object, whose fields the first observation names.
        observation: field of an observation that the policy reads; by default all, line by line.
        instructions: first sentences of the conversation.
        api_key_env: environment variable with the key of the server.

    Raises:
        AdapterError: the address is none, or there is no key.
    """
    url, headers = address("openenv:", name), headers_of(api_key_env)
    return lambda: OpenEnvEnv(
        Connection(url, headers), dict(kwargs), action, observation, instructions
    )


class _RefusedError(ServerError):
    """Error: fields of a message have values that the server does not take."""


class OpenEnvEnv:
    """Session of an OpenEnv server."""

    def __init__(
        self,
        connection: Connection,
        kwargs: Mapping[str, Any],
        action: str | None,
        observation: str | None,
        instructions: str,
    ) -> None:
        """Take the connection of this episode; the other arguments are those of `prepare`."""
        self._connection = connection
        self._kwargs = kwargs
        self._action = action
        self._observation = observation
        self._instructions = instructions
        self._fields: dict[str, Any] = {}
        """Schemas of the fields of an action."""
        self._seen = ""
        self._invalid = 0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin a session; `options` and `seed` are sent as arguments of the server's `reset`.

        Raises:
            ServerError: the server gives no usable answer, or actions have no field `action`.
        """
        await self._learn_action()
        task = {**(options or {}), **self._kwargs, "seed": seed}
        text, _, _ = await self._ask({"type": "reset", "data": task})
        wanted = "" if self._action is not None else f"Answer with {self._wanted}."
        parts = (self._instructions, wanted, text)
        return "\n".join(part for part in parts if part), {"invalid": 0}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send the action in a turn. A turn without one is not sent; it is counted in `invalid`, as
        one whose fields the server refuses.

        Raises:
            ServerError: the server gives no usable answer.
        """
        data = self._data(action)
        if data is not None:
            with suppress(_RefusedError):
                text, reward, done = await self._ask({"type": "step", "data": data})
                return text, reward, done, False, {"invalid": self._invalid}
        self._invalid += 1
        text = f"This is no action. Answer with {self._wanted}.\n{self._seen}"
        return text, 0.0, False, False, {"invalid": self._invalid}

    async def close(self) -> None:
        try:
            await self._connection.say({"type": "close"})
        finally:
            await self._connection.close()

    async def _learn_action(self) -> None:
        """Ask for the fields of an action, and choose the one that gets the turn. If there are
        several, none is chosen. ServerError if the chosen field does not exist."""
        schema = await self._connection.get("/schema")
        where = f"{self._connection.url}/schema"
        action = field(where, schema, "action", dict)
        fields = field(where, action, "properties", dict, {})
        self._fields = {key: each for key, each in fields.items() if key not in BASE_FIELDS}
        if self._action is not None and self._action not in self._fields:
            raise ServerError(
                f"adapter.action: an action has no field {self._action!r} (it has "
                f"{', '.join(self._fields) or 'none'})"
            )
        if self._action is None:
            needed = [key for key in action.get("required", ()) if key in self._fields]
            several = needed if needed else list(self._fields)
            self._action = several[0] if len(several) == 1 else None

    @property
    def _wanted(self) -> str:
        """Description of an action."""
        if self._action is not None:
            return f"a {_kind(self._fields[self._action])}"
        told = ", ".join(f'"{key}": {_kind(each)}' for key, each in self._fields.items())
        return f"a JSON object {{{told}}}"

    def _data(self, action: str) -> dict[str, Any] | None:
        """Return the action that a turn of the policy is; None if it is none."""
        if self._action is None:
            return _last_object(action)
        kind = _kind(self._fields[self._action])
        if kind not in ("integer", "number"):
            return {self._action: action}
        found = re.findall(r"-?\d+(?:\.\d+)?", action)
        if not found or len(found[-1]) > MAX_DIGITS or (kind == "integer" and "." in found[-1]):
            return None
        return {self._action: int(found[-1]) if kind == "integer" else float(found[-1])}

    async def _ask(self, message: Mapping[str, Any]) -> tuple[str, float, bool]:
        """Return text, reward and end of the observation that answers a message. ServerError if
        there is none; _RefusedError if fields of the message have wrong values."""
        where = f"{self._connection.url}/ws"
        answer = await self._connection.talk("/ws", message)
        data = field(where, answer, "data", dict, {})
        if answer.get("type") == "error":
            advice = ""
            if data.get("code") == "CAPACITY_REACHED":
                advice = "; start it with a larger max_concurrent_envs, one for each episode"
            refused = data.get("code") == "VALIDATION_ERROR"
            kind = _RefusedError if refused else ServerError
            raise kind(f"{where}: {data.get('code')}: {data.get('message')}{advice}")
        said = field(where, data, "observation", dict)
        reward = data.get("reward")
        if isinstance(reward, bool):  # OpenEnv's rewards may be bools
            data["reward"] = float(reward)
        self._seen = self._text(said)
        value = float(field(where, data, "reward", float, 0.0))
        return self._seen, value, field(where, data, "done", bool, False)

    def _text(self, said: Mapping[str, Any]) -> str:
        """Return an observation as text: one field, or all, line by line."""
        if self._observation is not None:
            if self._observation not in said:
                raise ServerError(
                    f"adapter.observation: an observation has no field {self._observation!r} (it "
                    f"has {', '.join(said)})"
                )
            return _plain(said[self._observation])
        told = {
            key: value
            for key, value in said.items()
            if key not in BASE_FIELDS and value not in (None, "", [], {})
        }
        if len(told) == 1:
            return _plain(next(iter(told.values())))
        return "\n".join(f"{key}: {_plain(value)}" for key, value in told.items())


def _kind(schema: Mapping[str, Any]) -> str:
    """Return the type of a field, or the values that it may have."""
    if "enum" in schema:
        return " | ".join(json.dumps(each) for each in schema["enum"])
    return str(schema.get("type", "value"))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _last_object(text: str) -> dict[str, Any] | None:
    """Return the last JSON object in a text that is inside of no other; None if there is none."""
    decoder = json.JSONDecoder()
    found: dict[str, Any] | None = None
    at = text.find("{")
    while at >= 0:
        try:
            found, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)
    return found
