"""Dialogues -> tokens, and which of them are trained.

What stands before a trained turn is exactly what the model would be asked to continue: no token
straddles the border between them, as none does when a model writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from roll.config.data import TemplateConfig, TextDataConfig
from roll.core.errors import DataError
from roll.core.types import Message
from roll.data.dialogues import Dialogue
from roll.data.templates import PromptTokenizer, apply_template


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is trained, or not, as a whole."""

    text: str
    trained: bool
    ends: bool = False
    """An end-of-sequence token follows, which the text does not hold."""
    begins: bool = False
    """Plain text that a tokenizer begins with its special tokens."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens, and the half-open ranges of those that are trained, ascending.

    Example: TokenSequence((5, 6, 7, 1), ((2, 4),)) trains the last two of four tokens.
    """

    tokens: tuple[int, ...]
    trained: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_before(self) -> int:
        """Tokens before the first trained one."""
        return self.trained[0][0]

    def without_start(self, count: int) -> TokenSequence:
        """Without the first `count` tokens, none of which is trained."""
        moved = tuple((start - count, stop - count) for start, stop in self.trained)
        return TokenSequence(self.tokens[count:], moved)

    def without_end(self, length: int) -> TokenSequence:
        """The first `length` tokens."""
        kept = tuple((a, min(b, length)) for a, b in self.trained if a < length)
        return TokenSequence(self.tokens[:length], kept)


class NothingToLearnError(DataError):
    """A dialogue in which nothing is trained; its row is left out and counted."""


def pieces(
    dialogue: Dialogue,
    tokenizer: PromptTokenizer,
    template: TemplateConfig,
    *,
    system: str | None,
    place: str,
    last_turn_only: bool = False,
) -> list[Piece]:
    """The text of a dialogue, in order, up to the end of its last trained turn.

    Raises:
        NothingToLearnError: no turn of the assistant, or an empty one.
        DataError: the template refuses it, or does not render turns one after the other.
    """
    turns = [turn for turn in dialogue.after if turn.role == "assistant"]
    if not turns:
        raise NothingToLearnError("no turn of the assistant to learn")
    if any(not turn.content.strip() for turn in (turns[-1:] if last_turn_only else turns)):
        raise NothingToLearnError("an empty answer")
    if not template.chat_template:
        return _plain(dialogue, system, place)
    before = dialogue.before
    if system is not None:
        if (*before, *dialogue.after)[0].role == "system":
            raise DataError(
                f"{place}: begins with a system message, and its source sets `system`; keep one "
                "of the two"
            )
        before = (Message(role="system", content=system), *before)
    return list(_rendered(before, dialogue.after, tokenizer, template, place, last_turn_only))


def tokenized(
    dialogues: Sequence[Sequence[Piece]], tokenizer: PromptTokenizer, eos_token: int | None
) -> list[TokenSequence]:
    """The tokens of each dialogue.

    Raises:
        DataError: a piece needs an end-of-sequence token, and there is none.
    """
    alone = _ids([(piece.text, piece.begins) for each in dialogues for piece in each], tokenizer)
    growing = _ids(
        [
            ("".join(piece.text for piece in each[: i + 1]), each[0].begins)
            for each in dialogues
            for i in range(len(each))
        ],
        tokenizer,
    )
    own, whole = iter(alone), iter(growing)
    made = []
    for each in dialogues:
        tokens: list[int] = []
        trained: list[tuple[int, int]] = []
        so_far: list[int] = []
        for piece in each:
            start, longer, by_itself = len(tokens), next(whole), next(own)
            # Some tokenizers begin every text with a token that its continuation does not have.
            continues = longer[: len(so_far)] == so_far
            tokens += longer[len(so_far) :] if continues else by_itself
            so_far = longer
            if piece.ends:
                if eos_token is None:
                    raise DataError(
                        "the tokenizer has no end-of-sequence token, and the text of a response "
                        "does not end with one either: it would never end"
                    )
                tokens.append(eos_token)
            if piece.trained:
                trained.append((start, len(tokens)))
        made.append(TokenSequence(tuple(tokens), tuple(trained)))
    return made


def _ids(texts: Sequence[tuple[str, bool]], tokenizer: PromptTokenizer) -> list[list[int]]:
    """Tokens of each text, with the tokenizer's special ones where it says so."""
    ids: list[list[int]] = [[] for _ in texts]
    for special in (False, True):
        chosen = [i for i, (text, begins) in enumerate(texts) if begins == special]
        if chosen:
            found = tokenizer([texts[i][0] for i in chosen], add_special_tokens=special)
            for i, tokens in zip(chosen, found["input_ids"], strict=True):
                ids[i] = list(tokens)
    return ids


def _rendered(
    before: Sequence[Message],
    after: Sequence[Message],
    tokenizer: PromptTokenizer,
    template: TemplateConfig,
    place: str,
    last_turn_only: bool,
) -> Iterator[Piece]:
    messages = [*before, *after]
    turns = [i for i in range(len(before), len(messages)) if messages[i].role == "assistant"]
    # Nothing asks for a turn that comes first, so no model would be asked to write it.
    turns = [turn for turn in turns if turn]
    if not turns:
        raise NothingToLearnError("an answer that nothing asks for")
    turns = turns[-1:] if last_turn_only else turns
    advice = _ADVICE if isinstance(template, TextDataConfig) else _ADVICE_OF_PAIRS

    def render(count: int, *, asks: bool) -> str:
        return apply_template(messages[:count], tokenizer, template, place, asks=asks)

    whole = render(turns[-1] + 1, asks=False)
    done = 0
    for turn in turns:
        prompt, through = render(turn, asks=True), render(turn + 1, asks=False)
        if not whole.startswith(prompt):
            raise DataError(
                f"{place}: the chat template does not render turn {turn} as it asks for it: the "
                f"prompt ends with {prompt[-40:]!r}, the conversation goes on with "
                f"{whole[_common(whole, prompt) :][:40]!r}; {advice}"
            )
        if not whole.startswith(through):
            raise DataError(
                f"{place}: the chat template renders turn {turn} in another way when later turns "
                f"follow; {advice}"
            )
        written = through.rstrip()
        yield Piece(whole[done : len(prompt)], trained=False)
        yield Piece(
            whole[len(prompt) : len(written)],
            trained=True,
            # A template that marks no end of a turn would teach a model never to stop.
            ends=written.endswith(messages[turn].content.rstrip()),
        )
        done = len(written)


_ADVICE_OF_PAIRS = (
    "set data.chat_template_kwargs, or another chat template (tokenizer.chat_template)"
)
_ADVICE = f"set data.train_on: last_assistant, or {_ADVICE_OF_PAIRS[4:]}"


def _common(a: str, b: str) -> int:
    """Characters that both begin with."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return sum(1 for _ in same)


def _plain(dialogue: Dialogue, system: str | None, place: str) -> list[Piece]:
    if system is not None:
        raise DataError(
            "`system` needs a chat template; remove it or set `data.chat_template: true`"
        )
    if len(dialogue.before) > 1 or len(dialogue.after) > 1:
        raise DataError(
            f"{place}: a conversation needs a chat template; set `data.chat_template: true` or use "
            "columns of text"
        )
    text = "".join(message.content for message in dialogue.before)
    # Also where the text is empty: what begins every sequence begins this one.
    return [
        Piece(text, trained=False, begins=True),
        Piece(dialogue.after[0].content, trained=True, ends=True),
    ]


def check_template(tokenizer: Any, template: TemplateConfig) -> int | None:
    """The end-of-sequence token, if there is one.

    Raises:
        DataError: the tokenizer lacks the chat template that is asked for.
    """
    if template.chat_template and not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template; set `data.chat_template: false` to take texts as "
            "they are, or use an instruction-tuned model"
        )
    return None if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
