"""Dialogues -> tokens, and which of them are trained.

What stands before a trained turn is exactly what the model would be asked to continue: no token
straddles the border between them, as none does when a model writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from roll.config.sections.data import TemplateConfig, TextDataConfig
from roll.core.errors import DataError
from roll.core.types import Message
from roll.data.chat.conversations import Conversation
from roll.data.chat.end_mark import common_start, end_mark
from roll.data.chat.inner_tokens import ids_of, inner_tokens
from roll.data.chat.templates import PromptTokenizer, apply_template


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is trained, or not, as a whole."""

    text: str
    trained: bool
    ends: bool = False
    """An end-of-sequence token follows, which the text does not hold."""
    begins: bool = False
    """Plain text that a tokenizer begins with its special tokens."""
    altered: bool = False
    """The chat template leaves out a part of what the row says here, or puts it another way."""


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
    """A conversation in which nothing is trained; its row is left out and counted."""


def pieces(
    conversation: Conversation,
    tokenizer: PromptTokenizer,
    template: TemplateConfig,
    *,
    system: str | None,
    place: str,
    last_turn_only: bool = False,
    mark: str | None = None,
) -> list[Piece]:
    """The text of a conversation, in order, up to the end of its last trained turn.

    Args:
        mark: `end_mark` of the template; left out: it is asked.

    Raises:
        NothingToLearnError: no turn of the assistant, or an empty one.
        DataError: the template refuses it, or does not render turns one after the other.
    """
    turns = [turn for turn in conversation.after if turn.role == "assistant"]
    if not turns:
        raise NothingToLearnError("no turn of the assistant to learn")
    if any(not turn.content.strip() for turn in (turns[-1:] if last_turn_only else turns)):
        raise NothingToLearnError("an empty answer")
    if not template.chat_template:
        return _plain(conversation, system, place)
    before = conversation.before
    if system is not None:
        if (*before, *conversation.after)[0].role == "system":
            raise DataError(
                f"{place}: begins with a system message, and its source sets `system`; keep one "
                "of the two"
            )
        before = (Message(role="system", content=system), *before)
    if mark is None:
        mark = end_mark(tokenizer, template)
    return list(
        _rendered(
            before, conversation.after, tokenizer, template, place, last_turn_only, mark.strip()
        )
    )


def tokenized(
    conversations: Sequence[Sequence[Piece]], tokenizer: PromptTokenizer, eos_token: int | None
) -> list[TokenSequence]:
    """The tokens of each conversation.

    Raises:
        DataError: a piece needs an end-of-sequence token, and there is none.
    """
    whole = iter(
        ids_of(
            [
                ("".join(piece.text for piece in each[: i + 1]), each[0].begins)
                for each in conversations
                for i in range(len(each))
            ],
            tokenizer,
        )
    )
    made = []
    for each in conversations:
        tokens: list[int] = []
        trained: list[tuple[int, int]] = []
        so_far: list[int] = []
        for piece in each:
            start, longer = len(tokens), next(whole)
            continues = longer[: len(so_far)] == so_far
            tokens += longer[len(so_far) :] if continues else inner_tokens(piece.text, tokenizer)
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


def _rendered(
    before: Sequence[Message],
    after: Sequence[Message],
    tokenizer: PromptTokenizer,
    template: TemplateConfig,
    place: str,
    last_turn_only: bool,
    mark: str,
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
                f"{whole[common_start(whole, prompt) :][:40]!r}; {advice}"
            )
        if not whole.startswith(through):
            raise DataError(
                f"{place}: the chat template renders turn {turn} in another way when later turns "
                f"follow; {advice}"
            )
        written = through.rstrip()
        answer, said = whole[len(prompt) : len(written)], messages[turn].content
        if not answer.removesuffix(mark).strip():
            raise NothingToLearnError("an answer that the chat template leaves out")
        yield Piece(whole[done : len(prompt)], trained=False)
        yield Piece(
            answer,
            trained=True,
            # A template that marks no end of a turn would teach a model never to stop.
            ends=not mark,
            altered=not _holds(prompt, answer, said),
        )
        done = len(written)


def _holds(prompt: str, answer: str, said: str) -> bool:
    """Whether all that was said is in the answer, or begins at the end of its prompt; templates may
    do with white space as they like."""
    wanted, found = _squeezed(said), _squeezed(answer)
    if wanted in found:
        return True
    asked = _squeezed(prompt[-2 * OPENING :])
    return any(
        found.startswith(wanted[n:]) and asked.endswith(wanted[:n])
        for n in range(1, min(len(wanted), OPENING))
    )


OPENING = 64
"""Characters of an answer that a prompt may hold already, such as `<think>`."""


def _squeezed(text: str) -> str:
    return "".join(text.split())


_ADVICE_OF_PAIRS = (
    "set data.chat_template_kwargs, or another chat template (tokenizer.chat_template)"
)
_ADVICE = f"set data.train_on: last_assistant, or {_ADVICE_OF_PAIRS[4:]}"


def _plain(conversation: Conversation, system: str | None, place: str) -> list[Piece]:
    if system is not None:
        raise DataError(
            "`system` needs a chat template; remove it or set `data.chat_template: true`"
        )
    if len(conversation.before) > 1 or len(conversation.after) > 1:
        raise DataError(
            f"{place}: a conversation needs a chat template; set `data.chat_template: true` or use "
            "columns of text"
        )
    text = "".join(message.content for message in conversation.before)
    # Also where the text is empty: what begins every sequence begins this one.
    return [
        Piece(text, trained=False, begins=True),
        Piece(conversation.after[0].content, trained=True, ends=True),
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
