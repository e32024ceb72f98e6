"""Conversion of the rows of a source to tokenized prompts, with counts of rows left out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from roll.config.evaluation import QuestionData
from roll.config.sections.data import DataConfig, SourceConfig
from roll.core.errors import RowError
from roll.core.types import Prompt
from roll.data.chat.templates import PromptTokenizer, render_prompt, tokenize_prompts
from roll.data.chat.unknown_text import UnknownText, unknown_pieces
from roll.data.columns import PromptRow, RawRow
from roll.data.own.template import users_template
from roll.data.pictures.placeholders import Placeholders, expanded
from roll.data.preparation.parts import lies_in
from roll.data.store.making import (
    ROWS_AT_A_TIME,
    Encoded,
    Made,
    UnstorableError,
    is_json,
    mapped,
)
from roll.data.store.tally import Tally

MapRow = Callable[[RawRow, SourceConfig], PromptRow]
"""Function that converts a raw row by the columns of its source."""


@dataclass(frozen=True)
class PromptMaker:
    """Way from the raw rows of one source to prompts."""

    name: str
    source: SourceConfig
    data: DataConfig | QuestionData
    tokenizer: PromptTokenizer
    placeholders: Placeholders | None
    map_one: MapRow

    @property
    def identity(self) -> list[Any]:
        return ["map_row", self.data.model_dump(mode="json", include=IN_PROMPTS)]

    @property
    def template(self) -> str | None:
        return users_template(self.data)

    def make(self, raw: Iterable[RawRow], *, tokenizes: bool = True) -> Made[Prompt]:
        tally = Tally(UnknownText(self.tokenizer.unk_token))
        rendered = self._rendered(raw, tally)
        prompts: list[Prompt] = []
        while some := list(itertools.islice(rendered, ROWS_AT_A_TIME)):
            if tokenizes and not tally.mistakes:
                prompts += self._prompts(some, tally)
        return Made(prompts, tally)

    def _rendered(
        self, raw: Iterable[RawRow], tally: Tally
    ) -> Iterator[tuple[int, PromptRow, str]]:
        """Yield number, row and text of each prompt; note in `tally` what became of other rows."""
        source = self.source
        for number, row in mapped(raw, source, self.map_one, tally):
            if source.part is not None and not lies_in(source.part, row.asked):
                tally.elsewhere += 1
                continue
            if not tally.broken.is_sound(row.pictures):
                continue
            if source.columns.answer is not None and not row.answer.strip():
                tally.dropped.note(UNANSWERED, row.place, stays=True)
            try:
                text = render_prompt(row, self.tokenizer, self.data, source.system)
            except RowError as error:
                tally.mistakes.note(row.place, error)
                continue
            yield number, row, text

    def _prompts(
        self, rendered: Sequence[tuple[int, PromptRow, str]], tally: Tally
    ) -> Iterator[Prompt]:
        """Yield the prompts that are not too long; note in `tally` what became of all."""
        texts = [text for _, _, text in rendered]
        tokens = tokenize_prompts(texts, self.tokenizer, self.data)
        pieces = unknown_pieces(texts, tokens, self.tokenizer)
        for (number, row, text), ids, lost in zip(rendered, tokens, pieces, strict=True):
            tally.unknown.note(lost, row.place)
            found = tally.finished(row.place, self._prompt, number, row, text, ids, tally)
            if found is not None:
                yield found

    def _prompt(
        self, number: int, row: PromptRow, text: str, tokens: Sequence[int], tally: Tally
    ) -> Prompt | None:
        """Return the prompt of a rendered row with its tokens; None if it is too long. Errors are
        those of `expanded`, and RowError without tokens."""
        whole, pictures = expanded(tokens, row.pictures, self.placeholders, row.place)
        if not whole:
            raise RowError(f"{row.place}: the prompt has no tokens; give it a text")
        tally.lengths.append(len(whole))
        if len(whole) > self.data.max_prompt_tokens:
            return None
        row_id = f"{self.name}:{number}"
        return Prompt(row_id, whole, text, row.answer, row.tag, row.extra, pictures)

    def encode(self, row: Prompt) -> Encoded:
        extra = dict(row.extra)
        if row.pictures is not None or not is_json(extra):
            raise UnstorableError("pictures, or columns that JSON does not hold")
        more = json.dumps([row.text, row.answer, row.tag, extra])
        return Encoded([row.tokens], [[]], more, row.tag)

    def decode(self, row_id: str, encoded: Encoded) -> Prompt:
        return Prompt(row_id, tuple(encoded.tokens[0]), *json.loads(encoded.more))


IN_PROMPTS = {"chat_template", "chat_template_kwargs", "max_prompt_tokens"}
"""Settings of the data on which tokenized prompts depend."""


UNANSWERED = "an empty expected answer, kept nonetheless"
