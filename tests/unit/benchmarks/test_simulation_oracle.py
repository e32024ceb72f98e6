"""The lower bound of the simulation, by hand."""

from __future__ import annotations

import pytest

from benchmarks.simulation.engine import PROMPT_TOKENS, EngineModel
from benchmarks.simulation.oracle import Oracle, StepWork

MODEL = EngineModel(
    capacity=4, knee=2, tokens_per_s=1.0, prefill_tokens_per_s=PROMPT_TOKENS, pause_s=1.0
)
"""A prompt's prefill takes one second of a replica, which writes two tokens a second."""


def test_a_synchronous_step_takes_its_longest_response_or_its_work() -> None:
    oracle = Oracle(replicas=2, model=MODEL, train_s=5.0, staleness=0)
    long = StepWork(tokens=80, longest=50, prompts=4)  # 80 / 4 + 4 / 2 = 22 s of work
    wide = StepWork(tokens=80, longest=10, prompts=4)
    assert oracle.begins_s([long, wide]) == pytest.approx([50, 50 + 5 + 1 + 22])
    assert oracle.makespan_s([long, wide]) == pytest.approx(78 + 6)


def test_with_staleness_the_work_of_later_steps_fills_the_wait_for_a_long_response() -> None:
    step = StepWork(tokens=80, longest=30, prompts=4)
    oracle = Oracle(replicas=2, model=MODEL, train_s=5.0, staleness=1)
    begins = oracle.begins_s([step] * 3)
    # Step 2 may begin with the weights that are there at 36, and its longest response could end at
    # 66; but the work of all three steps, with two pauses for new weights, takes longer.
    assert begins == pytest.approx([30, 2 * 22 + 1, 3 * 22 + 2])


def test_the_bound_never_falls_below_training_alone() -> None:
    step = StepWork(tokens=8, longest=2, prompts=1)
    oracle = Oracle(replicas=100, model=MODEL, train_s=50.0, staleness=4)
    assert oracle.makespan_s([step] * 10) == pytest.approx(2 + 10 * 51)
