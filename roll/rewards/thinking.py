"""Separation of a response into its thoughts and the final text after them.

Model families mark their thoughts in different ways. Some chat templates put the opening mark into
the prompt, so that the response alone does not show that it begins with a thought.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

MARKS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, QwQ, GLM-4.5, Nemotron, Phi-4-reasoning
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker, Sky-T1
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("<unused94>", "<unused95>"),  # MedGemma
    ("<|channel>", "<channel|>"),  # Gemma 4
)
"""Pairs of marks: the first opens a thought, the second closes it."""

CHANNEL, FINAL = "<|channel|>", "<|channel|>final<|message|>"
"""Marks of gpt-oss, which writes its thoughts and its final text into channels: the beginning of
any channel, and the beginning of the final one."""
_CHANNEL_ENDS = ("<|end|>", "<|return|>", "<|start|>")

MARK_TOKENS = tuple(mark for pair in MARKS for mark in pair)
"""Marks that the text of a response must show even if they are special tokens of the tokenizer."""
CHANNEL_TOKENS = (CHANNEL, "<|message|>", *_CHANNEL_ENDS)
"""The same for the channels of gpt-oss. In a tokenizer without `CHANNEL` these tokens have other
meanings: `<|end|>` ends a turn of Phi-3."""
_OPENINGS = frozenset(opens for opens, _ in MARKS)
_BEGINS = {opens: re.compile(rf"(?:\A|\n)[ \t]*{re.escape(opens)}") for opens in _OPENINGS}
_CHANNEL_BEGINS = re.compile(r"\A\s*<\|channel\|>|<\|channel\|>[^<\n]*<\|message\|>")

_ANALYSIS = re.compile(
    r"(?:\A\s*|<\|start\|>assistant)<\|channel\|>analysis<\|message\|>"
    r".*?(?:<\|end\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
"""Message of gpt-oss in the channel of thoughts, without a recipient."""


def final_text(response: str, *, prompt: str = "") -> str | None:
    """Return the text of a response after its thoughts, or None if a thought does not end.

    An opening mark opens a thought only at the beginning of a line or of the text after a thought.
    Elsewhere the response only mentions the mark.

    Args:
        response: text of the response, with the marks.
        prompt: text of the prompt as the chat template renders it. If it ends with an opening mark,
            the response begins inside a thought.

    Example: final_text("2+2 is 4</think> 4", prompt="...<think>\\n") == " 4"
    """
    if CHANNEL in response and _CHANNEL_BEGINS.search(response):
        _, found, final = response.rpartition(FINAL)
        if not found:
            return None
        ends = [place for mark in _CHANNEL_ENDS if (place := final.find(mark)) >= 0]
        return final[: min(ends, default=len(final))]
    begins_inside = prompt.rstrip()
    for opens, closes in MARKS:
        before, closed, after = response.rpartition(closes)
        # `in` first: an episode asks this for each turn, and most texts have none of the marks.
        begins = opens in after and _BEGINS[opens].search(after)
        if begins or (not closed and begins_inside.endswith(opens)):
            return None
        response = after if closed else before + after
    return response


def opened_thought(prompt: str) -> str:
    """Return the end of a prompt from the mark on that opens a thought there; empty if the prompt
    ends outside of a thought.

    Example: opened_thought("Which way?<think>\\n") == "<think>\\n"
    """
    text = prompt.rstrip()
    begins = (len(text) - len(opens) for opens in _OPENINGS if text.endswith(opens))
    return prompt[min(begins, default=len(prompt)) :]


def without_thoughts(response: str, *, prompt: str = "") -> str | None:
    """Return a response with its special tokens and without its thoughts, or None if a thought does
    not end.

    This is `final_text`, but of the channels of gpt-oss only the thoughts are left out: calls of
    tools are in another channel than the final text.
    """
    if _CHANNEL_BEGINS.search(response):
        return _ANALYSIS.sub("", response)
    return final_text(response, prompt=prompt)


def marks_to_show(special: Mapping[str, int]) -> dict[int, str]:
    """Return the marks, by token id, that the text of a response must show; `special` has the token
    id of each special token of the tokenizer."""
    shown = (*MARK_TOKENS, *CHANNEL_TOKENS) if CHANNEL in special else MARK_TOKENS
    return {special[mark]: mark for mark in shown if mark in special}


def decode_with_marks(
    tokens: Sequence[int], marks: Mapping[int, str], decode: Callable[[Sequence[int]], str]
) -> str:
    """Return the text of a response with the marks of thoughts, which `decode` may leave out.

    An opening mark is put at the beginning of a line, because as a special token it opens a thought
    and is not a mention. Marks that end a channel are left out at the end of the text.

    Args:
        tokens: token ids of the response.
        marks: result of `marks_to_show`.
        decode: function that turns token ids into text without special tokens.
    """
    if marks.keys().isdisjoint(tokens):
        return decode(tokens)
    pieces: list[str] = []
    start = 0
    for place, token in enumerate(tokens):
        if token in marks:
            before = decode(tokens[start:place])
            said = before or (pieces[-1] if pieces else "")
            opens = marks[token] in _OPENINGS and said and not said.endswith("\n")
            pieces += [before, "\n" if opens else "", marks[token]]
            start = place + 1
    pieces.append(decode(tokens[start:]))
    while pieces and (not pieces[-1] or pieces[-1] in _CHANNEL_ENDS):
        pieces.pop()
    return "".join(pieces)
