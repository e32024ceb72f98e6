"""Counts what vLLM's workers prefill; vLLM itself tells of a prompt once it is read to its end."""

from __future__ import annotations

from typing import Any


class PrefillCounter:
    """Mixed into vLLM's worker; `model_runner` is the worker's."""

    model_runner: Any
    _roll_prefilled: int = 0

    def roll_count_prefill(self) -> None:
        """Begin to count."""
        execute = self.model_runner.execute_model

        def counted(scheduled: Any, *rest: Any, **options: Any) -> Any:
            self._roll_prefilled += prefilled_by(scheduled)
            return execute(scheduled, *rest, **options)

        self.model_runner.execute_model = counted

    def roll_prefilled_tokens(self) -> int:
        """Tokens since `roll_count_prefill`; answered between two steps of the model."""
        return self._roll_prefilled


def prefilled_by(scheduled: Any) -> int:
    """Tokens of a step, a vLLM `SchedulerOutput`, that are neither to be followed by a new one nor
    a guess at it. What the prefix cache holds is not scheduled."""
    guesses = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
    sequences = len(scheduled.num_scheduled_tokens)
    tokens: int = scheduled.total_num_scheduled_tokens
    return tokens - sequences - guesses
