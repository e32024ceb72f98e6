"""The benchmark of the data path, with scripted models in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.data_path import Step, markdown, measure, missed, row
from benchmarks.driver_meter import PARTS, Peaks
from benchmarks.scripted_run import (
    FIRST_TOKEN,
    VOCABULARY,
    Script,
    run_config,
    scripted_completion,
    scripted_length,
)
from benchmarks.simulation.lengths import LogNormal
from roll.config.rlvr import RlvrConfig
from roll.core.completion import FinishReason
from roll.distributed.local import LocalLauncher
from roll.rollout.single_turn import group_seed

SCRIPT = Script(LogNormal(8.0), longest=32)
STEP = Step(
    samples=4,
    tokens=1000,
    seconds=2.0,
    cpu_s=dict.fromkeys(PARTS, 1e-6),
    waiting_s=0.0,
    pickle_s=0.0,
    unpickle_s=0.0,
    sent=dict.fromkeys(PARTS, 400),
    received=dict.fromkeys(PARTS, 200),
    peaks=Peaks(1, 2, 3, 4),
)


def test_completions_have_the_drawn_lengths_and_are_cut_at_the_longest() -> None:
    found = {seed: scripted_completion(seed, 7, SCRIPT) for seed in range(200)}
    for seed, one in found.items():
        length = scripted_length(seed, SCRIPT)
        assert len(one.tokens) == len(one.logprobs) == len(one.versions) == length
        assert (one.finish is FinishReason.LENGTH) == (length == SCRIPT.longest)
        assert all(FIRST_TOKEN <= token < VOCABULARY for token in one.tokens)
        assert set(one.versions) == {7}
        assert max(one.logprobs) <= 0
    lengths = sorted(len(one.tokens) for one in found.values())
    assert 6 <= lengths[len(lengths) // 2] <= 10
    assert 1 <= lengths[0] < 4
    assert lengths[-1] == SCRIPT.longest
    assert scripted_completion(3, 7, SCRIPT) == found[3]


def test_a_row_measures_whole_steps_of_the_real_pipeline(tmp_path: Path) -> None:
    config = RlvrConfig.model_validate(
        run_config(
            tmp_path,
            samples=16,
            siblings=4,
            prompt_tokens=12,
            longest=SCRIPT.longest,
            replicas=1,
            ranks=1,
            steps=2,
        )
    )
    with LocalLauncher() as launcher:
        steps = measure(config, SCRIPT, launcher, idle_s=0.1)
    prompts = [f"prompts:{i}" for i in range(4)]
    assert len(steps) == config.max_steps
    for number, step in enumerate(steps):
        seeds = [group_seed(config.seed, f"{number}/{name}") for name in prompts]
        assert step.tokens == sum(
            scripted_length(seed + i, SCRIPT) for seed in seeds for i in range(4)
        )
        assert set(step.cpu_s) == set(PARTS)
        assert min(step.cpu_s.values()) >= 0
        assert 0 < step.peaks.anonymous <= step.peaks.resident
    assert "| 16 |" in markdown([row(steps)])


def test_a_row_is_the_median_of_the_later_steps_and_the_largest_peak_of_all() -> None:
    first = replace(STEP, seconds=9.0, peaks=Peaks(10, 1, 1, 1))
    last = replace(STEP, seconds=4.0, sent=dict.fromkeys(PARTS, 600))
    found = row([first, STEP, last])
    assert found.seconds == 3.0
    assert found.sent == dict.fromkeys(PARTS, 500)
    assert found.peaks == Peaks(10, 2, 3, 4)
    assert row([first]).seconds == 9.0


def test_the_goals_are_nanoseconds_per_token_and_bytes_per_sample() -> None:
    assert STEP.cpu_ns == pytest.approx(6.0)
    assert STEP.bytes_per_sample == pytest.approx(900.0)
    assert [text.split(" ns")[0] for text in missed(STEP)] == ["6.0"]
    assert missed(replace(STEP, tokens=2000)) == []
    assert missed(replace(STEP, waiting_s=1e-6)) == [], "what waiting costs is not the tokens'"
    assert missed(replace(STEP, waiting_s=0.9e-6))
    (text,) = missed(replace(STEP, tokens=2000, sent=dict.fromkeys(PARTS, 500)))
    assert text.startswith("1,050 bytes per sample")
