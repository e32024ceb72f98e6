"""Environments of verifiers that have `load_environment`: `verifiers:NAME`.

Such an environment asks a model itself. Here the model is the policy: a request of the environment
suspends it and ends the policy's wait, and the policy's next turn answers the request.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from .errors import AdapterError

TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
    "provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n"
    "</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
"""How Qwen's chat template presents tools; what is read back is in the same form."""


def prepare(
    name: str, kwargs: Mapping[str, Any], split: str = "train"
) -> Callable[[], VerifiersEnv]:
    """Return the function that makes the environment of one episode; load its data set.

    Args:
        name: name of the environment, an installed package; or a module.
        kwargs: arguments of its `load_environment`.
        split: `train` or `eval`, the rows that seeds count. A task with a `prompt` of its own is
            played as it is.

    Raises:
        AdapterError: this version of verifiers has no such environments.
    """
    import verifiers

    load = getattr(verifiers, "load_environment", None)
    if load is None:
        raise AdapterError(
            f"verifiers {verifiers.__version__} has no load_environment; install a version that "
            "has it (pip install 'verifiers<0.4'), or let its agents ask the endpoint of the "
            "episode (environments.NAME.agent)"
        )
    if split not in ("train", "eval"):
        raise AdapterError(f"adapter.split: found {split!r}; expected train or eval")
    env = load(name, **kwargs)
    rows = env.get_dataset() if split == "train" else env.get_eval_dataset()
    return lambda: VerifiersEnv(env, rows)


class VerifiersEnv:
    """Rollout of an environment of verifiers."""

    def __init__(self, env: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take an environment, which all episodes share, and the rows that seeds count."""
        self._env = env
        self._rows = rows
        self._client: Any = None
        self._rollout: asyncio.Future[Any] | None = None
        self._known: list[dict[str, str]] = []
        """Conversation as the policy knows it."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Start the rollout of a row, and return the messages of its first request to the policy.

        The rollout is a task on the event loop of the caller, which `close` ends.

        Args:
            seed: number of the row in the data set, modulo its length, if there are no `options`.
            options: columns of the row to play.

        Raises:
            RuntimeError: the rollout ended before it asked the policy.
        """
        row = _row(options) if options else dict(self._rows[(seed or 0) % len(self._rows)])
        row.setdefault("example_id", seed or 0)
        self._client = _client()
        self._rollout = asyncio.ensure_future(
            self._env.run_rollout(row, self._client, "policy", {})
        )
        if not await self._asks():
            raise RuntimeError(f"it ended before it asked the policy: {_error(self._result())}")
        return self._news(), {}

    async def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Answer the request of the rollout, and return its next one.

        At the end of the rollout it returns an empty text, the reward, and the metrics as `info`;
        before, the reward is 0.

        Raises:
            RuntimeError: the rollout failed, or its request does not go on with the conversation.
        """
        content, calls = _read_calls(action) if self._client.tools else (action, [])
        self._known.append({"role": "assistant", "content": content})
        self._client.answer(content, calls)
        if await self._asks():
            return self._news(), 0.0, False, False, {}
        result = self._result()
        if _error(result):
            raise RuntimeError(_error(result))
        truncated = bool(result.get("is_truncated", False))
        reward = float(result.get("reward") or 0.0)
        return "", reward, not truncated, truncated, dict(result.get("metrics") or {})

    async def close(self) -> None:
        """Cancel the rollout and wait for its end; do nothing before `reset`."""
        if self._rollout is not None:
            self._rollout.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._rollout

    async def _asks(self) -> bool:
        """Wait for the next request; return False if the rollout has ended instead."""
        assert self._rollout is not None
        asked = asyncio.ensure_future(self._client.asked.wait())
        await asyncio.wait([asked, self._rollout], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        return bool(self._client.asked.is_set())

    def _result(self) -> Mapping[str, Any]:
        """Return the output of the rollout; raise what it raised."""
        assert self._rollout is not None
        result: Mapping[str, Any] = self._rollout.result()
        return result

    def _news(self) -> list[dict[str, str]]:
        """Return the messages of a request that the policy does not know.

        Raises:
            RuntimeError: the request does not go on with the conversation.
        """
        asked = [_plain(message) for message in self._client.messages]
        if self._client.tools:
            asked = _with_tools(asked, self._client.tools)
        known, news = asked[: len(self._known)], asked[len(self._known) :]
        if known != self._known or not news or any(m["role"] == "assistant" for m in news):
            raise RuntimeError(
                "its next request does not go on with the conversation (another agent, a summary, "
                "or a changed history); such environments can ask the endpoint of the episode "
                "(environments.NAME.agent)"
            )
        self._known = asked
        return news


def _client() -> Any:
    """Return a client of verifiers whose answers come from outside."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class PolicyClient(Client):  # type: ignore[misc]  # verifiers may be missing
        """Client that hands out each request, and waits for its answer."""

        def __init__(self) -> None:
            super().__init__(None)
            self.asked = asyncio.Event()
            self.messages: list[Any] = []
            self.tools: list[Any] = []
            self._answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def answer(self, content: str, calls: list[dict[str, str]]) -> None:
            """Answer the request that waits; a call has `name`, and `arguments` as JSON text."""
            self.asked.clear()
            made = [ToolCall(id=f"call_{uuid.uuid4().hex}", **call) for call in calls]
            message = ResponseMessage(
                content=content,
                tool_calls=made or None,
                finish_reason="tool_calls" if made else "stop",
                is_truncated=False,
            )
            waiting, self._answer = self._answer, asyncio.get_running_loop().create_future()
            waiting.set_result(
                Response(
                    id=uuid.uuid4().hex, created=int(time.time()), model="policy", message=message
                )
            )

        async def get_response(self, prompt: Any, *_: Any, tools: Any = None, **__: Any) -> Any:
            """Hand out a request of verifiers, and wait for its answer; RuntimeError if another one
            waits."""
            if self.asked.is_set():
                raise RuntimeError("it asks the policy twice at once, which an episode cannot")
            self.messages, self.tools = list(prompt), list(tools or [])
            answer = self._answer
            self.asked.set()
            return await answer

        def setup_client(self, config: Any) -> Any: ...

        async def to_native_tool(self, tool: Any) -> Any: ...

        async def to_native_prompt(self, messages: Any) -> Any: ...

        async def get_native_response(self, *_: Any, **__: Any) -> Any: ...

        async def raise_from_native_response(self, response: Any) -> None: ...

        async def from_native_response(self, response: Any) -> Any: ...

        async def close(self) -> None: ...

    return PolicyClient()


def _row(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the input of a rollout that the columns of a data row are."""
    row = dict(options)
    if isinstance(row.get("prompt"), str):
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    return row


def _plain(message: Any) -> dict[str, str]:
    """Return a message of verifiers as role and text. What a tool answers is a message of the
    user, in the form of Qwen's chat template."""
    role, content = _item(message, "role"), _item(message, "content")
    if isinstance(content, (list, tuple)):
        content = "".join(str(_item(part, "text")) for part in content)
    text = str(content or "")
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    return {"role": str(role), "content": text}


def _item(value: Any, key: str) -> Any:
    """Return the value of a key, or of an attribute of an object; None if it is missing."""
    return value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)


def _with_tools(messages: list[dict[str, str]], tools: Sequence[Any]) -> list[dict[str, str]]:
    """Return messages whose system message presents the tools."""
    lines = []
    for tool in tools:
        told = {key: _item(tool, key) for key in ("name", "description", "parameters")}
        lines.append(json.dumps({"type": "function", "function": told}))
    text = TOOLS.format(tools="\n".join(lines))
    if messages and messages[0]["role"] == "system":
        text = f"{messages[0]['content']}\n\n{text}"
        messages = messages[1:]
    return [{"role": "system", "content": text}, *messages]


def _read_calls(text: str) -> tuple[str, list[dict[str, str]]]:
    """Return the text of a turn, and its tool calls. A call that is no JSON object is none."""
    calls = []
    *ended, _ = text.split("</tool_call>")
    for part in ended:
        _, opened, found = part.partition("<tool_call>")
        if not opened:
            continue
        try:
            call = json.loads(found)
            arguments = call.get("arguments", {})
            calls.append({"name": str(call["name"]), "arguments": json.dumps(arguments)})
        except (ValueError, KeyError, AttributeError, RecursionError):
            continue
    return text, calls


def _error(result: Mapping[str, Any]) -> str:
    """Return the error of a rollout; empty if it has none."""
    error = result.get("error")
    return "" if error is None else str(error)
