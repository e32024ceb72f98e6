"""Resources servers of NeMo Gym: `nemo_gym:http://host:port`.

Servers with `/reset` and `/step` (NeMo Gym's `GymnasiumServer`) play several turns. The others have
`/seed_session` and `/verify`, and see one answer.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from roll.envs.adapters.servers.client import Connection, ServerError, address, field, headers_of


def prepare(
    name: str, kwargs: Mapping[str, Any], api_key_env: str | None = None
) -> Callable[[], NemoGymEnv]:
    """Return the function that makes the environment of one episode.

    Args:
        name: address of the resources server.
        kwargs: fields of the calls, below the columns of the row. A row of NeMo Gym has
            `responses_create_params`; of any other, `prompt` becomes its `input`.
        api_key_env: environment variable with the key of the server.

    Raises:
        AdapterError: the address is none, or there is no key.
    """
    url, headers = address("nemo_gym:", name), headers_of(api_key_env)
    return lambda: NemoGymEnv(Connection(url, headers), kwargs)


class NemoGymEnv:
    """Session of a resources server."""

    def __init__(self, connection: Connection, kwargs: Mapping[str, Any]) -> None:
        """Take the connection of this episode; for `kwargs` see `prepare`."""
        self._connection = connection
        self._kwargs = kwargs
        self._row: dict[str, Any] = {}
        self._turns = False
        """True if the server plays turns."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin a session with the columns in `options`; `seed` is not sent.

        Returns the messages of the row, then what the server says.

        Raises:
            ServerError: there is no such server, the row has tools, or neither of them says a word.
        """
        self._row = _row({**self._kwargs, **(options or {})})
        where = f"{self._connection.url}/openapi.json"
        paths = field(where, await self._connection.get("/openapi.json"), "paths", dict)
        self._turns = "/step" in paths
        path = "/reset" if self._turns else "/seed_session"
        if path not in paths:
            raise ServerError(f"{self._connection.url} is no resources server: it has no {path}")
        answer = await self._connection.post(path, self._row)
        messages = _messages(self._row["responses_create_params"]["input"])
        if answer.get("observation"):
            messages.append({"role": "user", "content": answer["observation"]})
        if not messages:
            raise ServerError(f"{self._connection.url}: neither the row nor the server says a word")
        return messages, field(path, answer, "info", dict, {})

    async def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Send a turn of the policy; a server without turns gives its reward, and the episode ends.

        Raises:
            ServerError: the server gives no usable answer.
        """
        path = "/step" if self._turns else "/verify"
        where = f"{self._connection.url}{path}"
        call = {**self._row, "response": _response(action)}
        answer = await self._connection.post(path, call)
        reward = float(field(where, answer, "reward", float))
        if not self._turns:
            return "", reward, True, False, answer
        info = field(where, answer, "info", dict, {})
        terminated = field(where, answer, "terminated", bool, False)
        truncated = field(where, answer, "truncated", bool, False)
        outputs = [str(each.get("output", "")) for each in info.get("tool_outputs", ())]
        said = "\n".join(filter(None, [*outputs, answer.get("observation")]))
        if not said and not (terminated or truncated):
            raise ServerError(f"{where}: the episode goes on, but the server says nothing")
        return said, reward, terminated, truncated, info

    async def close(self) -> None:
        """Close the connection; the server ends sessions by itself."""
        await self._connection.close()


def _row(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row that is sent to a server of NeMo Gym: the columns of a data row.

    Without `responses_create_params`, it gets one whose `input` is the column `prompt`, or an empty
    text.

    Raises:
        ServerError: `responses_create_params` has tools.
    """
    if "responses_create_params" not in columns:
        return {**columns, "responses_create_params": {"input": columns.get("prompt", "")}}
    if columns["responses_create_params"].get("tools"):
        raise ServerError(
            "the row has tools, whose calls NeMo Gym expects as items of the model's answer; only "
            "rows without tools can be played"
        )
    return dict(columns)


def _messages(given: Any) -> list[dict[str, str]]:
    """Return the messages of a row's `input`, which is a text or a list of messages."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    found = []
    for each in given:
        content = each["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        role = "system" if each["role"] == "developer" else each["role"]
        found.append({"role": role, "content": content})
    return found


def _response(text: str) -> dict[str, Any]:
    """Return a turn of the policy as an answer of the Responses API."""
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": time.time(),
        "model": "policy",
        "output": [message],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }
