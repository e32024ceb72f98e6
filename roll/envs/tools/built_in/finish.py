"""The tool `finish`: gives the answer and ends the episode."""

from __future__ import annotations


def finish(answer: str) -> str:
    """Gives the final answer and ends the conversation.

    Args:
        answer: the final answer.
    """
    return answer
