"""Environments behind HTTP, by the contract in docs/environment.openapi.yaml: `http://host:port`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from roll.envs.adapters.servers.client import Connection, address, field, headers_of

CONTRACT = 1
"""Version of the contract."""


def prepare(
    name: str, kwargs: Mapping[str, Any], api_key_env: str | None = None
) -> Callable[[], HttpEnv]:
    """Return the function that makes the environment of one episode.

    Args:
        name: address of the server.
        kwargs: sent with `reset`.
        api_key_env: environment variable with the key of the server.

    Raises:
        AdapterError: the address is none, or there is no key.
    """
    url, headers = address("", name), headers_of(api_key_env)
    return lambda: HttpEnv(Connection(url, headers), kwargs)


class HttpEnv:
    """Episode of a server."""

    def __init__(self, connection: Connection, kwargs: Mapping[str, Any]) -> None:
        """Take the connection of this episode; `kwargs` are sent with `reset`."""
        self._connection = connection
        self._kwargs = dict(kwargs)
        self._base = {"contract": CONTRACT, "episode": uuid.uuid4().hex}
        self._turn = 0
        self._begun = False

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin the episode at the server; ServerError if it does not answer as the contract
        says."""
        self._begun = True
        task = {"seed": seed, "options": options or {}, "kwargs": self._kwargs}
        answer = await self._connection.post("/reset", {**self._base, **task})
        where = f"{self._connection.url}/reset"
        return answer.get("observation"), field(where, answer, "info", dict, {})

    async def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Send a turn to the server; ServerError if it does not answer as the contract says."""
        call = {**self._base, "turn": self._turn, "action": action}
        self._turn += 1
        answer = await self._connection.post("/step", call)
        where = f"{self._connection.url}/step"
        return (
            answer.get("observation"),
            float(field(where, answer, "reward", float)),
            field(where, answer, "terminated", bool),
            field(where, answer, "truncated", bool, False),
            field(where, answer, "info", dict, {}),
        )

    async def close(self) -> None:
        """End the episode at the server, if it has begun, and close the connection."""
        try:
            if self._begun:
                await self._connection.post("/close", self._base)
        finally:
            await self._connection.close()
