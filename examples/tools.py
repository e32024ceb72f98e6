"""Make the model and the questions of the examples with tools, in a minute and without a network.

The model (Qwen3 architecture, 0.5 M parameters; one token per number, name and part of a call)
learns by SFT from an agent that often forgets a part of a call, or guesses. The answers are numbers
that it cannot know: those of a modular product, of a corpus, and of a server.

    python examples/tools.py [--out outputs/tools] [--seed 0]
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from examples.tiny_model import (
    run_script,
    tokenizer_of,
    warm_start,
    write_jsonl,
    write_model,
)
from roll.envs.tools.formats.api import Malformed
from roll.envs.tools.formats.hermes import Hermes

EPISODES = 36_000
TRAIN, HELD_OUT = 1000, 128
"""Number of questions of each kind."""
GUESSES, FORGETS = 0.25, 0.4
"""Shares of the demonstrations that answer without a tool, and that leave out a part of the
call."""
PRIME = 97
SYLLABLES = [a + b for a in "bfgklmnprsvz" for b in "aou"]
NAMES = [a + b for a in SYLLABLES[:12] for b in SYLLABLES[12:20]]
"""Parts of the names of people; the first half come first, as in `bala-gano`."""
NUMBERS = [str(number) for number in range(100)]
HEAD, TAIL = ("<tool_call>", '{"name": "'), ('"}}', "</tool_call>")
ARGUMENTS = {
    "python": '", "arguments": {"code": "',
    "search": '", "arguments": {"query": "',
    "phone": '", "arguments": {"name": "',
}
"""Tool -> what stands between its name and its argument in a call."""
CODE = ("Thought: compute it. ", "<code>", "final_answer", "("), (")", "</code>")
"""What an agent of smolagents writes around an expression."""
PIECES = [
    *(*HEAD, *TAIL, *ARGUMENTS, *ARGUMENTS.values(), *CODE[0], *CODE[1]),
    *("New task:", "Error", " * ", f" % {PRIME}", "-", "'s room", "'s phone"),
]
ROLES = ["<said>", "<result>", "<turn>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<turn>{{ m.content }}<eos>"
    "{% elif m.role == 'tool' %}<result>{{ m.content }}"
    "{% elif m.role == 'user' %}<said>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<turn>{% endif %}"
)
"""Template without system messages: the model knows its tools, and reads no description."""
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Errand:
    """Question that a tool can answer, and what the agent has to write."""

    question: str
    call: tuple[str, ...]
    """Pieces of the call."""
    needed: tuple[int, ...]
    """Places of pieces without which it is no call."""
    answer: str
    result: str | None
    """What the tool answers; None if the call is the last word of the agent."""


def product(dice: random.Random) -> Errand:
    """Ask for a modular product; the tool is `python`."""
    expression, answer = _expression(dice)
    return _errand("".join(expression), "python", expression, answer, answer)


def script(dice: random.Random) -> Errand:
    """Ask for a modular product as smolagents does, whose agent writes a program."""
    expression, answer = _expression(dice)
    before, after = CODE
    needed = (1, 2, len(before) + len(expression))
    question = "New task:\n" + "".join(expression)
    return Errand(question, (*before, *expression, *after), needed, answer, None)


def room(dice: random.Random) -> Errand:
    """Ask for the room of a person, which is in the corpus."""
    name, answer = _name(dice), dice.choice(NUMBERS)
    question = "".join(name) + "'s room"
    return _errand(question, "search", name, answer, f"[1] {question}: {answer}")


def phone(dice: random.Random) -> Errand:
    """Ask for the phone number of a person, which the server knows."""
    name, answer = _name(dice), dice.choice(NUMBERS)
    return _errand("".join(name) + "'s phone", "phone", name, answer, answer)


KINDS = {"products": product, "rooms": room, "phones": phone, "scripts": script}
ASKED = ("products", "rooms", "phones")
"""Kinds that have files with questions; scripts answer those of `products`."""


def _expression(dice: random.Random) -> tuple[tuple[str, ...], str]:
    a, b = dice.randint(10, 99), dice.randint(10, 99)
    return (str(a), " * ", str(b), f" % {PRIME}"), str(a * b % PRIME)


def _name(dice: random.Random) -> tuple[str, ...]:
    half = len(NAMES) // 2
    return dice.choice(NAMES[:half]), "-", dice.choice(NAMES[half:])


def _errand(question: str, tool: str, argument: tuple[str, ...], answer: str, said: str) -> Errand:
    call = (*HEAD, tool, ARGUMENTS[tool], *argument, *TAIL)
    return Errand(question, call, (1, 2, 4 + len(argument)), answer, said)


def episode(errand: Errand, dice: random.Random) -> Messages:
    """Return what an agent does that often guesses, or forgets a part of the call."""
    messages, luck = [_message("user", errand.question)], dice.random()
    guess = _message("assistant", dice.choice(NUMBERS))
    if luck < GUESSES:
        return [*messages, guess]
    if luck < GUESSES + FORGETS:
        forgotten = dice.choice(errand.needed)
        said = "".join(errand.call[:forgotten] + errand.call[forgotten + 1 :])
        messages += [_message("assistant", said)]
        return messages if errand.result is None else [*messages, told(said), guess]
    messages += [_message("assistant", "".join(errand.call))]
    if errand.result is None:
        return messages
    answered = [_message("tool", errand.result), _message("assistant", errand.answer)]
    return [*messages, *answered]


def told(said: str) -> dict[str, str]:
    """Return the answer of the environment to a call that is none."""
    (call,) = Hermes().parse(said).calls
    assert isinstance(call, Malformed)
    return _message("tool", f"Error: {call.reason}")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per piece, name and number. It drops what stands between
    them, so that the model reads a few tokens of an error."""
    literal = "|".join(re.escape(piece) for piece in sorted(PIECES, key=len, reverse=True))
    pattern = rf"{literal}|\b(?:{'|'.join(NAMES)})\b|\b[1-9]?[0-9]\b"
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    pieces = [*PIECES, *NAMES, *NUMBERS]
    return tokenizer_of(pieces, split, roles=ROLES, chat_template=CHAT_TEMPLATE)


def questions(dice: random.Random, count: int = TRAIN + HELD_OUT) -> dict[str, list[Errand]]:
    """Return errands of each kind, no two of them with the same question."""
    asked: dict[str, list[Errand]] = {}
    for kind in ASKED:
        found: dict[str, Errand] = {}
        while len(found) < count:
            errand = KINDS[kind](dice)
            found.setdefault(errand.question, errand)
        asked[kind] = [*found.values()]
    return asked


def write_questions(out: Path, asked: Mapping[str, list[Errand]]) -> None:
    """Write questions, the first ones as those that are held out, and what answers them: a corpus
    and a list of phone numbers."""
    for kind, errands in asked.items():
        rows = [{"prompt": each.question, "answer": each.answer} for each in errands]
        write_jsonl(out / f"{kind}_held_out.jsonl", rows[:HELD_OUT])
        write_jsonl(out / f"{kind}.jsonl", rows[HELD_OUT:])
    corpus = ({"title": each.question, "text": each.answer} for each in asked["rooms"])
    write_jsonl(out / "corpus.jsonl", corpus)
    numbers = {each.question.removesuffix("'s phone"): each.answer for each in asked["phones"]}
    (out / "numbers.json").write_text(json.dumps(numbers), encoding="utf-8")


def make(out: Path, seed: int) -> None:
    """Write questions and demonstrations, and train the model on the latter."""
    warm, dice, kinds = out / "warm_start", random.Random(seed), [*KINDS.values()]
    write_questions(out, questions(dice))
    shown = (episode(kinds[i % len(kinds)](dice), dice) for i in range(EPISODES))
    write_jsonl(warm / "train.jsonl", ({"messages": messages} for messages in shown))
    torch.manual_seed(seed)
    write_model(warm / "model", make_tokenizer(), positions=512)
    warm_start("agentic_tools", out, seed)


if __name__ == "__main__":
    run_script(make, "outputs/tools", (__doc__ or "").splitlines()[0])
