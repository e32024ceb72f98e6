"""Thoughts and answers: which part of a response is said after the thinking.

Families mark their thoughts in different ways, and some open the thought in the prompt, so that the
response alone does not show that it is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from roll.core.types import Sample

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
"""What opens and what closes a thought."""

CHANNEL, FINAL = "<|channel|>", "<|channel|>final<|message|>"
"""gpt-oss writes its thoughts and its answer into channels."""
_CHANNEL_ENDS = ("<|end|>", "<|return|>", "<|start|>")

MARK_TOKENS = tuple(mark for pair in MARKS for mark in pair)
"""What a tokenizer may hold as special tokens, and a response's text must show all the same."""
CHANNEL_TOKENS = (CHANNEL, "<|message|>", *_CHANNEL_ENDS)
"""Those of gpt-oss. Without `CHANNEL`, a tokenizer means other things by them: `<|end|>` ends the
turn of Phi-3."""
_OPENINGS = frozenset(opens for opens, _ in MARKS)
_BEGINS = {opens: re.compile(rf"(?:\A|\n)[ \t]*{re.escape(opens)}") for opens in _OPENINGS}
_CHANNEL_BEGINS = re.compile(r"\A\s*<\|channel\|>|<\|channel\|>[^<\n]*<\|message\|>")


def final_text(response: str, *, prompt: str = "") -> str | None:
    """Return what a response says after its thoughts, or None where they never end.

    An opening mark counts where a line begins with it, or what follows a thought; within a line it
    is only spoken of.

    Args:
        prompt: rendered by the chat template; where it ends in an open thought, the response begins
            in one.

    Example: final_text("2+2 is 4</think> 4", prompt="...<think>\\n") == " 4"
    """
    if _CHANNEL_BEGINS.search(response):
        _, found, final = response.rpartition(FINAL)
        if not found:
            return None
        ends = [place for mark in _CHANNEL_ENDS if (place := final.find(mark)) >= 0]
        return final[: min(ends, default=len(final))]
    begins_inside = prompt.rstrip()
    for opens, closes in MARKS:
        before, closed, after = response.rpartition(closes)
        if _BEGINS[opens].search(after) or (not closed and begins_inside.endswith(opens)):
            return None
        response = after if closed else before + after
    return response


def final_part(sample: Sample) -> str | None:
    """Return what a sample says after its thoughts, or None where they never end."""
    return final_text(sample.response_text, prompt=sample.prompt.text)


def marks_to_show(special: Mapping[str, int]) -> dict[int, str]:
    """Return the marks, by id, that the text of a response shows.

    Args:
        special: ids of a tokenizer's special tokens.
    """
    shown = (*MARK_TOKENS, *CHANNEL_TOKENS) if CHANNEL in special else MARK_TOKENS
    return {special[mark]: mark for mark in shown if mark in special}


def decode_with_marks(
    tokens: Sequence[int], marks: Mapping[int, str], decode: Callable[[Sequence[int]], str]
) -> str:
    """Return the text of a response with the marks of thoughts, which `decode` may leave out.

    What ends a turn is not shown at the end of the text, and an opening mark begins a line: it is a
    token of the model's, not words about it.

    Args:
        marks: what `marks_to_show` gave.
        decode: tokens to text without special tokens.
    """
    pieces: list[str] = []
    start = 0
    for place, token in enumerate(tokens):
        if token in marks:
            before = decode(tokens[start:place])
            said = before or (pieces[-1] if pieces else "")
            opens = marks[token] in _OPENINGS and said and not said.endswith("\n")
            pieces += [before, "\n" if opens else "", marks[token]]
            start = place + 1
    if not pieces:
        return decode(tokens)
    pieces.append(decode(tokens[start:]))
    while pieces and (not pieces[-1] or pieces[-1] in _CHANNEL_ENDS):
        pieces.pop()
    return "".join(pieces)
