"""A judge behind an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.config.sections.services.judge import JudgedConfig, UrlJudgeConfig
from roll.rewards.judge.question import Answer, Question
from roll.rewards.service.client import JsonClient, Reply, ServiceError


class UrlJudge:
    """Implementation of `Judge` by `/chat/completions`."""

    def __init__(self, config: UrlJudgeConfig, asked: JudgedConfig, client: JsonClient) -> None:
        """Prepare the judge.

        Args:
            config: server and model.
            asked: what the reward asks it.
            client: takes the requests; `open` and `close` are passed on to it.
        """
        self._config = config
        self._client = client
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        self._fields = {
            "model": config.model,
            "temperature": asked.temperature,
            "max_tokens": asked.max_new_tokens,
        }
        self.identity = self._fields | {"grammar": config.grammar, "body": config.body}

    async def open(self) -> None:
        """Open the connections."""
        await self._client.open()

    async def ask(self, question: Question) -> Answer:
        """Answer a question; ServiceError if the server gives no usable answer."""
        message = {"role": "user", "content": question.text}
        fields = {**self._fields, "messages": [message], "seed": question.seed}
        if question.schema is not None and self._config.grammar != "none":
            fields["response_format"] = self._format(question.schema)
        fields |= self._config.body
        payload = {name: value for name, value in fields.items() if value is not None}
        return self._answer(await self._client.post(self._url, payload))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _format(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return `response_format` for answers that fit the schema."""
        if self._config.grammar == "json_object":
            return {"type": "json_object"}
        named = {"name": "verdict", "strict": True, "schema": schema}
        return {"type": "json_schema", "json_schema": named}

    def _answer(self, reply: Reply) -> Answer:
        """Return what the server has answered; ServiceError if it is no answer of a chat."""
        try:
            choice = reply.value["choices"][0]
            text, finish = choice["message"]["content"], choice.get("finish_reason")
            refusal = choice["message"].get("refusal")
        except (LookupError, TypeError, AttributeError):
            text, finish, refusal = None, None, None
        if not isinstance(text, str):
            said = f"it refuses: {refusal!r:.200}" if refusal else f"found {reply.value!r:.200}"
            raise ServiceError(
                f"{self._url}: the answer has no text at choices[0].message.content; {said}"
            )
        usage = reply.value.get("usage")
        read, written = (_count(usage, name) for name in ("prompt_tokens", "completion_tokens"))
        prices, cost = self._config.prices, None
        if prices is not None and read is not None and written is not None:
            cost = (read * prices.input + written * prices.output) / 1e6
        return Answer(
            text,
            complete=finish != "length",
            input_tokens=read,
            output_tokens=written,
            latency_s=reply.latency_s,
            tries=reply.tries,
            cost=cost,
        )


def _count(usage: Any, name: str) -> int | None:
    """Return a number of tokens; None if the server does not tell it."""
    found = usage.get(name) if isinstance(usage, dict) else None
    return found if type(found) is int and found >= 0 else None
