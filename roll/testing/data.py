"""Checks of curricula and chat templates that users bring."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from roll.config.user_code.calls import OwnCode
from roll.core.types import Prompt
from roll.data.curriculum import Curriculum as Running
from roll.data.own.curriculum import Curriculum
from roll.data.own.template import ChatTemplate
from roll.testing.rules import case, require

RATES = (None, 0.0, 0.25, 0.5, 1.0)
EPOCHS = 3
ANSWER = "It is 42."


def check_curriculum(part: Curriculum, *, extra: Mapping[str, Any] | None = None) -> None:
    """Raise AssertionError, which names the prompt, if a curriculum breaks a rule: chances are from
    0 to 1, and the same at each call; factors of sources are above zero.

    Args:
        extra: columns of the prompts that the curriculum reads.
    """
    prompt = Prompt("check:0", tuple(range(40)), "What is 6 * 7?", "42", "default", extra or {})
    for rate in RATES:
        with case(f"a prompt with pass rate {rate}"):
            first, second = ([_taken(part, prompt, rate) for _ in range(EPOCHS)] for _ in range(2))
        require(first == second, f"two calls for a prompt with pass rate {rate} differ")
        running = _running(part, prompt, rate)
        with case(f"a source with pass rate {rate}"):
            running.source_preference("check")


def _running(part: Curriculum, prompt: Prompt, rate: float | None) -> Running:
    settings = part.model_copy(update={"sources": True})
    known = {} if rate is None else {prompt.id: rate}
    sources = {} if rate is None else {"check": rate}
    return Running(settings, seed=0, rates=known, source_rates=sources)


def _taken(part: Curriculum, prompt: Prompt, rate: float | None) -> list[bool]:
    """Return whether the prompt is taken in some epochs of the first steps."""
    running, taken = _running(part, prompt, rate), []
    for epoch in range(EPOCHS):
        taken.append(running.takes(prompt, epoch))
        running.end_step()
    return taken


def check_chat_template(part: ChatTemplate, *, conversation: Sequence[Any] | None = None) -> None:
    """Raise AssertionError, which names the rule, if a chat template breaks one.

    The rules: a conversation is rendered the same at each call, and is left as it is; its text
    begins with that of its first messages, as the policy saw them; what the assistant says is in
    it, unchanged.

    Args:
        conversation: messages, the last one of the assistant; a question and an answer by default.
    """
    messages = list(conversation or [{"role": "user", "content": "What is 6 * 7?"}])
    if conversation is None:
        messages.append({"role": "assistant", "content": ANSWER})
    code, before = OwnCode(part, "data.chat_template"), copy.deepcopy(messages)

    def text(count: int, *, asks: bool) -> str:
        with case(f"the first {count} messages"):
            found = code.call(part.render, "", messages[:count], asks=asks)
            code.require(isinstance(found, str), f"{found!r:.60}", "a text")
        return found

    whole, question = text(len(messages), asks=False), text(len(messages) - 1, asks=True)
    require(text(len(messages), asks=False) == whole, "two calls render different texts")
    require(messages == before, "the template writes into the messages")
    answer = str(messages[-1]["content"])
    require(answer in whole, f"the answer {answer!r} is not in the text {whole!r}")
    require(
        whole.startswith(question + answer),
        f"the policy sees {question!r} and answers {answer!r}; rendered with the answer it reads "
        f"{whole!r}, which must begin with the two",
    )
