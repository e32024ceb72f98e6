"""`Conversation`: the turns so far, as the model's own chat template makes a prompt of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll.config.sections.data import RenderConfig
from roll.core.errors import DataError
from roll.core.types import Message
from roll.data.chat.templates import PromptTokenizer, apply_template, tokenize_prompts


@dataclass
class Conversation:
    """Turns of a user and a model."""

    tokenizer: PromptTokenizer
    render: RenderConfig
    """Way from turns to text, as in the run. Without a chat template every line is a prompt of its
    own."""
    max_tokens: int
    """Largest number of tokens of the turns and an answer."""
    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.render.chat_template and not self.tokenizer.chat_template:
            raise DataError(
                "the model has no chat template, so it cannot talk; to continue texts, set "
                "data.chat_template=false"
            )
        self.say_first(self.system)

    def say_first(self, system: str | None) -> None:
        """Begin anew, with this system message; None: without one."""
        if system is not None and not self.render.chat_template:
            raise DataError("a system message needs a chat template")
        self.system, self.turns = system, []

    def prompt_of(self, text: str) -> tuple[str, tuple[int, ...]]:
        """Return text and tokens of the prompt that ends in this turn of the user. The turn does
        not count until `add` has added it.

        Raises:
            DataError: the template refuses it, or no token is left for an answer.
        """
        if self.render.chat_template:
            begin = [] if self.system is None else [Message(role="system", content=self.system)]
            turns = [*begin, *self.turns, Message(role="user", content=text)]
            whole = apply_template(
                turns, self.tokenizer, self.render, "the conversation", asks=True
            )
        else:
            whole = text
        [tokens] = tokenize_prompts([whole], self.tokenizer, self.render)
        if not tokens:
            raise DataError("the prompt has no tokens")
        if len(tokens) >= self.max_tokens:
            raise DataError(
                f"the conversation has {len(tokens)} tokens, and the model takes "
                f"{self.max_tokens} with its answer; /reset begins anew"
            )
        return whole, tokens

    def add(self, text: str, answer: str) -> None:
        """Add a turn of the user and the model's answer."""
        if self.render.chat_template:
            self.turns.append(Message(role="user", content=text))
            self.turns.append(Message(role="assistant", content=answer))
