"""Base of the chat templates that users bring; `roll.extend` exports it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from roll.config.sections.data import OwnTemplateConfig, RenderConfig


def users_template(data: RenderConfig) -> str | None:
    """Return the import path of the chat template that the user brings; None if there is none."""
    own: object = data.chat_template
    return own.kind if isinstance(own, ChatTemplate) else None


class ChatTemplate(OwnTemplateConfig, ABC):
    """Way from a conversation to the text that the model reads, in place of the tokenizer's
    template, for training and for validation. The tokenizer of the trained model keeps its own."""

    @abstractmethod
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        asks: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the text of a conversation, with all special tokens that the model needs.

        The text of a conversation must begin with that of its first messages, and what is before
        and after an answer of the assistant must not depend on the answer.

        Args:
            messages: at least one, with the keys `role` (system, user, assistant, tool) and
                `content` (a text; with pictures, a list of parts), and further ones of tools.
            asks: if True, the text ends where the assistant begins to write.
            tools: JSON schemas of the functions that the assistant may call.
        """
