"""Calls that a parser of vLLM reads (`format: vllm:NAME`), for families without a format here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from roll.config.errors import nearest
from roll.core.errors import ConfigError
from roll.data.chat.templates import DatedTokenizer, PromptTokenizer
from roll.envs.tools.formats.api import Call, Format, Malformed, Parsed, arguments_of
from roll.strategy.available import status

PREFIX = "vllm:"
"""Beginning of the names of these formats."""


@dataclass(frozen=True, slots=True)
class VllmFormat:
    """Format that a parser of vLLM reads.

    Most of these parsers take a call that they cannot read for text, so the turn is an answer. They
    need the tokenizer of the policy and the tools: see `told`.

    Raises:
        ConfigError: vLLM is not installed, or has no such parser.
    """

    name: str
    """Name of the parser, as vLLM's option `--tool-call-parser` has it."""
    tokenizer: Any = None
    tools: tuple[Mapping[str, Any], ...] = ()
    marks: tuple[str, ...] = field(default=(), init=False)
    """None are known: vLLM's parsers see all special tokens."""

    def __post_init__(self) -> None:
        """Raise ConfigError if vLLM is not installed, or has no such parser."""
        found = status("vllm")
        if not found.ok:
            raise ConfigError(f"format {PREFIX}{self.name}: {found.advice}")
        self._parser_class()

    def told(self, tokenizer: PromptTokenizer, tools: Sequence[Mapping[str, Any]]) -> Format:
        """Return the format for turns in which the policy may call these tools.

        Args:
            tokenizer: tokenizer of the policy.
            tools: descriptions of the tools, as chat templates take them. Parsers of formats whose
                arguments are texts read their types there.

        Raises:
            ConfigError: the parser does not fit the tokenizer, or vLLM reads this format in another
                way, not by a parser of turns.
        """
        own: Any = tokenizer.tokenizer if isinstance(tokenizer, DatedTokenizer) else tokenizer
        told = replace(self, tokenizer=_cached(own), tools=tuple(tools))
        try:
            told._extracted("")
        except Exception as error:  # a border: any kind, of any family's parser
            raise ConfigError(
                f"format {PREFIX}{self.name}: vLLM's parser does not read the turns of this model "
                f"({type(error).__name__}: {error}); name the parser of its family, or a format of "
                "roll, such as `harmony`"
            ) from error
        return told

    def parse(self, text: str) -> Parsed:
        """Take apart a turn; see `Format.parse`. What the parser raises is a malformed call."""
        try:
            found = self._extracted(text)
        except Exception as error:  # noqa: BLE001  # a border: any kind, of any family's parser
            reason = f"the calls cannot be read: {type(error).__name__}: {error}"
            return Parsed("", (Malformed(text, reason),))
        calls: tuple[Call | Malformed, ...] = tuple(
            arguments_of(call.function.name, call.function.arguments, text)
            for call in found.tool_calls
        )
        if found.tools_called and not calls:
            calls = (Malformed(text, "the marks of a call hold no call"),)
        return Parsed((found.content or "").strip(), calls)

    def _extracted(self, text: str) -> Any:
        """Return what a new parser finds in a turn: parsers keep what they have read."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(
            model="policy",
            messages=[{"role": "user", "content": ""}],
            tools=[dict(each) for each in self.tools] or None,
        )
        parser = self._parser_class()(self.tokenizer, request.tools)
        return parser.extract_tool_calls(text, request)

    def _parser_class(self) -> Any:
        """Return the class of the parser; ConfigError if vLLM has none of this name."""
        from vllm.tool_parsers import ToolParserManager

        # vLLM logs each call that it cannot read, with a traceback; early in a run that is most.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        try:
            return ToolParserManager.get_tool_parser(self.name)
        except KeyError:
            known = sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers})
            raise ConfigError(
                f"format {PREFIX}{self.name}: vLLM has no parser {self.name!r}"
                f"{nearest(self.name, known)} (known: {', '.join(known)})"
            ) from None


@lru_cache(maxsize=4)
def _cached(tokenizer: Any) -> Any:
    """Return a tokenizer that keeps its vocabulary, which each new parser asks for."""
    from vllm.tokenizers.hf import get_cached_tokenizer

    return get_cached_tokenizer(tokenizer)
