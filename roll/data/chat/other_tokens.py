"""Rows of a student in the tokens of a teacher that has others, and which tokens stand together.

Both models have read the same text where a token of each begins at the same place of the text. Only
there their distributions of what comes next can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from roll.config.sections.data import TemplateConfig
from roll.core.batches import RetokenizedBatch, TrainBatch
from roll.core.errors import DataError
from roll.core.types import Message
from roll.data.chat.end_mark import common_start
from roll.data.chat.inner_tokens import ids_of, inner_tokens
from roll.data.chat.templates import DatedTokenizer, apply_template

BROKEN = "\ufffd"
"""Character that stands for bytes that are no character, such as a part of one."""

MOMENT = datetime(2000, 1, 1)
"""Date and time of the conversations with which chat templates are compared."""


class TokenTexts:
    """Texts of the tokens of a tokenizer, each behind another token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.calls = tokenizer, DatedTokenizer(tokenizer, MOMENT)
        # Some tokenizers drop a space at the start of what they decode, but not behind a token.
        self._anchor = ids_of([("a", False)], self.calls)[0][-1:]
        self._anchor_text = self._decoded(self._anchor)
        self._pieces: dict[int, str] = {}

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens that follow another token."""
        return self._decoded([*self._anchor, *tokens])[len(self._anchor_text) :]

    def first_text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens with which a row begins."""
        return self._decoded(tokens)

    def starts(self, tokens: Sequence[int]) -> list[int | None]:
        """Return the character of `text(tokens)` with which each token begins; None for a token
        that begins within a character. If the tokens do not make up the text one by one, only the
        first has a start."""
        starts: list[int | None] = []
        size, made = 0, ""
        for whole, run in groupby(tokens, key=lambda token: BROKEN not in self._piece(token)):
            several = list(run)
            if whole:
                for token in several:
                    starts.append(size)
                    size += len(self._piece(token))
                    made += self._piece(token)
            else:
                for group in self._characters(several):
                    starts += [size, *[None] * (len(group) - 1)]
                    made += self.text(group)
                    size = len(made)
        if made != self.text(tokens):
            return [0, *[None] * (len(tokens) - 1)]
        return starts

    def _characters(self, tokens: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield the shortest groups of tokens that are whole characters; tokens at the end that are
        none make one group."""
        start = 0
        for end in range(1, len(tokens) + 1):
            if BROKEN not in self.text(tokens[start:end]) or end == len(tokens):
                yield tokens[start:end]
                start = end

    def _piece(self, token: int) -> str:
        """Return the text of one token; it is kept."""
        if token not in self._pieces:
            self._pieces[token] = self.text([token])
        return self._pieces[token]

    def _decoded(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, special tokens included, without a change of its spaces."""
        return str(self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))


class OtherTokens:
    """Way of rows from the tokens of a student to those of a teacher.

    The text of a row is tokenized in parts: what is trained and what is not, as each model would
    get it, and without the tokens at which texts begin and end, which are those of each tokenizer.

    Args:
        student: tokenizer of the rows.
        teacher: tokenizer of the teacher, with an end-of-sequence token if the student has one.
        begins: token ids with which every text of the teacher begins.
    """

    def __init__(
        self,
        student: PreTrainedTokenizerBase,
        teacher: PreTrainedTokenizerBase,
        begins: Sequence[int],
    ) -> None:
        self.teacher = teacher
        self._own, self._theirs = TokenTexts(student), TokenTexts(teacher)
        self._begins = list(begins)

    def rows(self, batch: TrainBatch) -> RetokenizedBatch:
        """Return the texts of the rows in the teacher's tokens.

        Raises:
            DataError: a row has pictures.
        """
        if batch.pictures is not None and any(batch.pictures):
            raise DataError("rows have pictures, which only a teacher with the same tokens reads")
        made = [
            self._row(tokens[:length].tolist(), trained[:length].tolist())
            for tokens, trained, length in zip(
                batch.tokens, batch.loss_mask, batch.lengths.tolist(), strict=True
            )
        ]
        sizes = [len(tokens) for tokens, _ in made]
        tokens_BT = torch.zeros(len(made), max(sizes), dtype=torch.int64)
        mask_BT = torch.zeros(tokens_BT.shape, dtype=torch.bool)
        places: list[Tensor] = []
        for row, (tokens, pairs) in enumerate(made):
            tokens_BT[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            theirs_N, own_N = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
            mask_BT[row, theirs_N] = True
            places.append(own_N.clone())
        return RetokenizedBatch(
            tokens=tokens_BT,
            lengths=torch.tensor(sizes),
            loss_mask=mask_BT,
            student_positions=places,
        )

    def _row(
        self, tokens: Sequence[int], trained: Sequence[bool]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the teacher's tokens of a row, and pairs of places of a token in them and of a
        trained token of the student that begin together. A first token is in no pair: nothing
        predicts it."""
        made = list(self._begins)
        pairs: list[tuple[int, int]] = []
        for number, (start, part) in enumerate(self._parts(tokens, trained)):
            found, common = self._part(part, first=number == 0, trained=trained[start])
            pairs += [(len(made) + theirs, start + own) for theirs, own in common]
            made += found
        return made or [0], [(theirs, own) for theirs, own in pairs if theirs and own]

    def _parts(
        self, tokens: Sequence[int], trained: Sequence[bool]
    ) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield start and tokens of each part of a row: runs of trained or other tokens, and each
        end-of-sequence token alone. The student's token at the beginning is left out."""
        tokenizer, place = self._own.tokenizer, 0
        if tokens[:1] == [tokenizer.bos_token_id] != [tokenizer.eos_token_id]:
            place = 1
        kinds = (
            (at if tokens[at] == tokenizer.eos_token_id else -1, trained[at])
            for at in range(place, len(tokens))
        )
        for _, run in groupby(kinds):
            size = sum(1 for _ in run)
            yield place, tokens[place : place + size]
            place += size

    def _part(
        self, part: Sequence[int], *, first: bool, trained: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the teacher's tokens of a part, and pairs of places of tokens of both that begin
        together, ascending; none for a part that is not trained."""
        if part[0] == self._own.tokenizer.eos_token_id:
            return [self.teacher.eos_token_id], [(0, 0)] if trained else []
        if not trained:
            text = self._own.first_text(part) if first else self._own.text(part)
            if first:
                return ids_of([(text, False)], self._theirs.calls)[0], []
            return inner_tokens(text, self._theirs.calls), []
        text = self._own.text(part)
        theirs = inner_tokens(text, self._theirs.calls)
        if not theirs or self._theirs.text(theirs) != text:
            return theirs, [(0, 0)] if theirs else []  # the teacher changes the text
        places = {start: at for at, start in reversed([*enumerate(self._theirs.starts(theirs))])}
        pairs, seen = list[tuple[int, int]](), set[int]()
        for own, start in enumerate(self._own.starts(part)):
            if start is not None and start in places and start not in seen:
                seen.add(start)
                pairs.append((places[start], own))
        return theirs, pairs


def beginning(tokenizer: PreTrainedTokenizerBase, template: TemplateConfig) -> list[int]:
    """Return the token ids with which every text of a model begins: those that its chat template
    writes there, or without one, its tokenizer."""
    calls = DatedTokenizer(tokenizer, MOMENT)
    text = _probe(tokenizer, template) if template.chat_template else "a"
    begins = ids_of([(text, not template.chat_template)], calls)[0][:1]
    return begins if begins == [tokenizer.bos_token_id] else []


def check_same_text(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, template: TemplateConfig
) -> None:
    """Raise DataError unless the chat templates of both render the same text, apart from the tokens
    at which texts begin and end, and the teacher has a token at which texts end."""
    if teacher.eos_token_id is None:
        raise DataError("its tokenizer has no end-of-sequence token; it would teach no end")
    if not template.chat_template:
        return
    own, theirs = (_without_ends(each, _probe(each, template)) for each in (student, teacher))
    if own != theirs:
        at = max(0, common_start(own, theirs) - 10)
        raise DataError(
            f"its chat template renders {theirs[at : at + 40]!r} where the student's renders "
            f"{own[at : at + 40]!r}, and both must read the same text; give them one template "
            "(tokenizer.chat_template of a model), or set `data.chat_template: false`"
        )


def _probe(tokenizer: PreTrainedTokenizerBase, template: TemplateConfig) -> str:
    """Render a conversation of three turns."""
    turns = (("user", "How many?"), ("assistant", "Two."), ("user", "And then?"))
    messages = [Message(role=role, content=content) for role, content in turns]
    place, calls = "a conversation of three turns", DatedTokenizer(tokenizer, MOMENT)
    return apply_template(messages, calls, template, place, asks=True)


def _without_ends(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return the text without the token at its beginning, and one character for each token that
    ends a text."""
    text = text.removeprefix(str(tokenizer.bos_token)) if tokenizer.bos_token else text
    return text.replace(str(tokenizer.eos_token), "\0") if tokenizer.eos_token else text
