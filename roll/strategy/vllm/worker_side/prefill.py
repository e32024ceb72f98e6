"""A count of the tokens that vLLM's workers prefill.

vLLM itself reports a prompt only when all of it has been prefilled.
"""

from __future__ import annotations

from typing import Any


class PrefillCounter:
    """Part of `RollWorker` that counts prefilled tokens; the worker provides `model_runner`."""

    model_runner: Any
    _roll_prefilled: int = 0

    def roll_count_prefill(self) -> None:
        """Begin to count, by a wrapper around the model runner's `execute_model`."""
        execute = self.model_runner.execute_model

        def counted(scheduled: Any, *rest: Any, **options: Any) -> Any:
            self._roll_prefilled += prefilled_by(scheduled)
            return execute(scheduled, *rest, **options)

        self.model_runner.execute_model = counted

    def roll_prefilled_tokens(self) -> int:
        """Return the tokens prefilled since `roll_count_prefill`; runs between two model steps."""
        return self._roll_prefilled


def prefilled_by(scheduled: Any) -> int:
    """Count the tokens that one step prefills.

    The count leaves out one token per sequence, from which the next token is sampled, and the
    guesses of speculative decoding. Tokens in the prefix cache are not scheduled at all.

    Args:
        scheduled: vLLM's `SchedulerOutput` of the step.
    """
    guesses = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
    sequences = len(scheduled.num_scheduled_tokens)
    tokens: int = scheduled.total_num_scheduled_tokens
    return tokens - sequences - guesses
