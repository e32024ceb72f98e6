"""Conversion of conversations to tokens, with the ranges of the tokens that are trained.

The tokens before a trained turn are exactly the prompt that the model would get to write this turn.
No token crosses the border between prompt and turn, as in generation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.config.sections.data import TemplateConfig, TextDataConfig
from roll.core.errors import DataError, RowError
from roll.core.pictures import Pictures
from roll.core.types import Message
from roll.data.chat.beginnings import Beginning, with_beginnings
from roll.data.chat.conversations import Conversation
from roll.data.chat.end_mark import common_start, end_mark
from roll.data.chat.inner_tokens import ids_of, inner_tokens
from roll.data.chat.templates import PromptTokenizer, apply_template, sound_text, with_system
from roll.data.pictures.picture import Picture
from roll.data.pictures.placeholders import Placeholders


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a text that is trained as a whole, or not at all."""

    text: str
    trained: bool
    ends: bool = False
    """True if an end-of-sequence token, which is not in the text, must follow."""
    begins: bool = False
    """True for plain text to which the tokenizer adds its special tokens."""
    altered: bool = False
    """True if the chat template dropped or changed a part of the row's text here."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens, and the half-open ranges of the trained tokens, ascending.

    Example: TokenSequence((5, 6, 7, 1), ((2, 4),)) trains the last two of four tokens.
    """

    tokens: tuple[int, ...]
    trained: tuple[tuple[int, int], ...]
    pictures: Pictures | None = field(default=None, compare=False)
    """Pictures among the tokens; None without any. The address of their patches is another in each
    step, so it is not compared."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_before(self) -> int:
        """Number of tokens before the first trained token, which must exist."""
        return self.trained[0][0]

    def with_pictures(
        self, pictures: Sequence[Picture], placeholders: Placeholders, place: str
    ) -> TokenSequence:
        """Return the sequence with one placeholder for each merged patch of its pictures.

        Errors are those of `Placeholders.expanded`.

        Args:
            pictures: its pictures, each with one placeholder among the tokens, in order.
            place: file and row, for error messages.
        """
        tokens, found = placeholders.expanded(self.tokens, pictures, place)
        longer = [placeholders.processor.num_tokens(grid) - 1 for grid in found.grids]

        def moved(at: int) -> int:
            for start, more in zip(found.places, longer, strict=True):
                at += more if start < at else 0
            return at

        trained = tuple((moved(start), moved(stop)) for start, stop in self.trained)
        # Placeholders are most of the tokens: an object for each would take four times the room.
        known: dict[int, int] = {}
        shared = tuple(known.setdefault(token, token) for token in tokens)
        return TokenSequence(shared, trained, found)

    def without_start(self, count: int) -> TokenSequence:
        """Return the sequence without its first `count` tokens, none of which may be trained. One
        with pictures must not be cut."""
        assert self.pictures is None, "a picture would lose a part"
        moved = tuple((start - count, stop - count) for start, stop in self.trained)
        return TokenSequence(self.tokens[count:], moved)

    def without_end(self, length: int) -> TokenSequence:
        """Return the first `length` tokens as a sequence. All pictures must lie among them."""
        kept = tuple((a, min(b, length)) for a, b in self.trained if a < length)
        return TokenSequence(self.tokens[:length], kept, self.pictures)


class NothingToLearnError(DataError):
    """Error for a conversation without trained text; its row is left out and counted."""


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
    """Split the text of a conversation into pieces, up to the end of its last trained turn.

    Args:
        system: system message of the source; None if there is none.
        place: file and row, for error messages.
        last_turn_only: if True, only the last turn of the assistant is trained.
        mark: `end_mark` of the template; computed if left out.

    Raises:
        NothingToLearnError: an answer is missing, empty or dropped by the template.
        DataError: the template fails on the conversation, or does not render each turn as the
            unchanged continuation of its prompt; the conversation needs a chat template; or a text
            has half of a surrogate pair.
    """
    turns = [i for i, turn in enumerate(conversation.after) if turn.role == "assistant"]
    if not turns:
        raise NothingToLearnError("no turn of the assistant to learn")
    turns = turns[-1:] if last_turn_only else turns
    if any(not conversation.after[i].content.strip() for i in turns):
        raise NothingToLearnError("an empty answer")
    _check_pictures(conversation, turns, template, place)
    if not template.chat_template:
        return _sound(_plain(conversation, system, place), place)
    messages = with_system((*conversation.before, *conversation.after), system, place)
    mark = end_mark(tokenizer, template) if mark is None else mark
    num_before = len(messages) - len(conversation.after)
    # A first message has no prompt, so a model would never have to write it.
    trained = [num_before + i for i in turns if num_before + i]
    if not trained:
        raise NothingToLearnError("an answer that nothing asks for")
    return _sound(_rendered(messages, trained, tokenizer, template, place, mark.strip()), place)


def _sound(found: Iterable[Piece], place: str) -> list[Piece]:
    """Return pieces whose texts a tokenizer takes; RowError as in `sound_text`."""
    made = list(found)
    for piece in made:
        sound_text(piece.text, place)
    return made


def tokenized(
    conversations: Sequence[Sequence[Piece]], tokenizer: PromptTokenizer, eos_token: int | None
) -> list[TokenSequence]:
    """Tokenize each conversation.

    Args:
        conversations: pieces of each, at least one, as `pieces` returns them.
        eos_token: id that is put behind a piece with `ends`; None if the tokenizer has none.

    Raises:
        DataError: a piece needs an end-of-sequence token, but `eos_token` is None.
    """
    made = []
    for each, (whole, parts) in zip(conversations, _parts(conversations, tokenizer), strict=True):
        tokens: list[int] = []
        trained: list[tuple[int, int]] = []
        before = Beginning(0, ())
        for piece, part in zip(each, parts, strict=True):
            start, longer = len(tokens), [*whole[before.shared : part.shared], *part.rest]
            continues = longer[: len(before.rest)] == list(before.rest)
            new = longer[len(before.rest) :] if continues else inner_tokens(piece.text, tokenizer)
            tokens += new
            before = part
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


def _parts(
    conversations: Sequence[Sequence[Piece]], tokenizer: PromptTokenizer
) -> Iterator[tuple[Sequence[int], Sequence[Beginning]]]:
    """Yield the tokens of each conversation, and the beginning up to the end of each piece."""
    texts = ["".join(piece.text for piece in each) for each in conversations]
    ends = [list(itertools.accumulate(len(piece.text) for piece in each)) for each in conversations]
    if not any(each[0].begins for each in conversations):
        found = with_beginnings(texts, [each[:-1] for each in ends], tokenizer)
        for whole, parts in found:
            yield whole, [*parts, Beginning(len(whole), ())]
        return
    # Tokens that a tokenizer adds by itself may stand at both ends of a beginning.
    wanted = [(text[:end], True) for text, own in zip(texts, ends, strict=True) for end in own]
    ids = iter(ids_of(wanted, tokenizer))
    for own in ends:
        yield (), [Beginning(0, next(ids)) for _ in own]


def _rendered(
    messages: Sequence[Message],
    trained: Sequence[int],
    tokenizer: PromptTokenizer,
    template: TemplateConfig,
    place: str,
    mark: str,
) -> Iterator[Piece]:
    """Yield the text in the chat template, up to the end of the last trained turn; see `pieces`.

    Args:
        trained: numbers of the trained turns in `messages`, ascending, above 0.
        mark: `end_mark` of the template, without white space around it.
    """

    def render(count: int, *, asks: bool) -> str:
        return apply_template(messages[:count], tokenizer, template, place, asks=asks)

    whole = render(trained[-1] + 1, asks=False)
    done = 0
    for turn in trained:
        prompt = render(turn, asks=True)
        through = whole if turn == trained[-1] else render(turn + 1, asks=False)
        _check_unchanged(turn, prompt, through, whole, template, place)
        written = through.rstrip()
        answer = whole[len(prompt) : len(written)]
        if not answer.removesuffix(mark).strip():
            raise NothingToLearnError("an answer that the chat template leaves out")
        yield Piece(whole[done : len(prompt)], trained=False)
        altered = not _holds(prompt, answer, messages[turn].content)
        # Without a mark, the end-of-sequence token is what teaches the model to stop.
        yield Piece(answer, trained=True, ends=not mark, altered=altered)
        done = len(written)


def _check_unchanged(
    turn: int, prompt: str, through: str, whole: str, template: TemplateConfig, place: str
) -> None:
    """Raise DataError unless the rendered conversation `whole` begins with the rendered `prompt` of
    a turn, and with the rendered text `through` the end of this turn."""
    advice = _ADVICE if isinstance(template, TextDataConfig) else _ADVICE_OF_PAIRS
    if not whole.startswith(prompt):
        raise RowError(
            f"{place}: the chat template does not render turn {turn} as it asks for it: the prompt "
            f"ends with {prompt[-40:]!r}, the conversation goes on with "
            f"{whole[common_start(whole, prompt) :][:40]!r}; {advice}"
        )
    if not whole.startswith(through):
        raise RowError(
            f"{place}: the chat template renders turn {turn} in another way when later turns "
            f"follow; {advice}"
        )


def _holds(prompt: str, answer: str, said: str) -> bool:
    """Return True if the rendered text contains everything that the row says in this turn.

    The start of the turn may also be at the end of the prompt. White space is ignored, because
    templates may change it.

    Args:
        prompt: rendered text before the turn.
        answer: rendered text of the turn.
        said: text of the turn in the row.
    """
    wanted, found = _squeezed(said), _squeezed(answer)
    if wanted in found:
        return True
    asked = _squeezed(prompt[-2 * OPENING :])
    return any(
        found.startswith(wanted[n:]) and asked.endswith(wanted[:n])
        for n in range(1, min(len(wanted), OPENING))
    )


OPENING = 64
"""Bound on the characters of an answer that a prompt may already contain, such as `<think>`."""


def _squeezed(text: str) -> str:
    """Return the text without white space."""
    return "".join(text.split())


_ADVICE_OF_PAIRS = (
    "set data.chat_template_kwargs, or another chat template (tokenizer.chat_template)"
)
_ADVICE = f"set data.train_on: last_assistant, or {_ADVICE_OF_PAIRS[4:]}"


def _check_pictures(
    conversation: Conversation, turns: Sequence[int], template: TemplateConfig, place: str
) -> None:
    """Raise DataError if a trained turn holds a picture, or pictures come without a chat template.

    Args:
        turns: numbers of the trained turns in `conversation.after`.
    """
    if any(conversation.after[i].parts for i in turns):
        raise RowError(
            f"{place}: a turn of the assistant holds a picture, which no model writes; give it to "
            "the user, or train other turns (data.train_on)"
        )
    if conversation.pictures and not template.chat_template:
        raise RowError(
            f"{place}: pictures need a chat template, which says how the model marks them; set "
            "`data.chat_template: true`"
        )


def _plain(conversation: Conversation, system: str | None, place: str) -> list[Piece]:
    """Return prompt and response as pieces without a chat template; DataError if there is a system
    message, or more than one message on either side."""
    if system is not None:
        raise DataError(
            "`system` needs a chat template; remove it or set `data.chat_template: true`"
        )
    if len(conversation.before) > 1 or len(conversation.after) > 1:
        raise RowError(
            f"{place}: a conversation needs a chat template; set `data.chat_template: true` or use "
            "columns of text"
        )
    text = "".join(message.content for message in conversation.before)
    # Also if the text is empty, so that the sequence gets its beginning-of-sequence token.
    return [
        Piece(text, trained=False, begins=True),
        Piece(conversation.after[0].content, trained=True, ends=True),
    ]


def check_template(tokenizer: Any, template: TemplateConfig) -> int | None:
    """Check that the tokenizer has a chat template if one is needed; return its end-of-sequence id.

    The result is None if the tokenizer has no end-of-sequence token.

    Raises:
        DataError: `template.chat_template` is True, but the tokenizer has no chat template.
    """
    if template.chat_template is True and not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template; set `data.chat_template: false` to take texts as "
            "they are, or use an instruction-tuned model"
        )
    return None if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
