"""Thoughts and answers: which part of a response is said after the thinking.

Families mark their thoughts in different ways, and some open the thought in the prompt, so that the
response alone does not show that it is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

MARK_TOKENS = (*(mark for pair in MARKS for mark in pair), CHANNEL, "<|message|>", *_CHANNEL_ENDS)
"""What a tokenizer may hold as special tokens, and a response's text must show all the same."""


def final_text(response: str, *, prompt: str = "") -> str | None:
    """Return what a response says after its thoughts, or None where they never end.

    Args:
        prompt: rendered by the chat template; where it ends in an open thought, the response begins
            in one.

    Example: final_text("2+2 is 4</think> 4", prompt="...<think>\\n") == " 4"
    """
    if CHANNEL in response:
        _, found, final = response.rpartition(FINAL)
        if not found:
            return None
        ends = [place for mark in _CHANNEL_ENDS if (place := final.find(mark)) >= 0]
        return final[: min(ends, default=len(final))]
    begins_inside = prompt.rstrip()
    for opens, closes in MARKS:
        before, closed, after = response.rpartition(closes)
        if opens in after or (not closed and begins_inside.endswith(opens)):
            return None
        response = after if closed else before + after
    return response


def final_part(sample: Sample) -> str | None:
    """Return what a sample says after its thoughts, or None where they never end."""
    return final_text(sample.response_text, prompt=sample.prompt.text)


def decode_with_marks(
    tokens: Sequence[int], marks: dict[int, str], decode: Callable[[Sequence[int]], str]
) -> str:
    """Return the text of a response with the marks of thoughts, which `decode` may leave out.

    Args:
        marks: those of `MARK_TOKENS` that are special tokens, by id.
        decode: tokens to text without special tokens.
    """
    pieces, start = [], 0
    for place, token in enumerate(tokens):
        if token in marks:
            pieces += [decode(tokens[start:place]), marks[token]]
            start = place + 1
    return "".join([*pieces, decode(tokens[start:])]) if pieces else decode(tokens)
