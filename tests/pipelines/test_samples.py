"""Steps whose tokens stay with the workers, and the same steps with all tokens on the driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.pipeline.rlvr import RlvrPipeline
from tests.runs import run_local, without_times, write_task

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"loss": [{"kind": "ppo_clip"}, {"kind": "kl", "coef": 0.001}]},
    "one update": {"old_logprobs": "auto", "loss": [{"kind": "pg"}]},
    "rloo, sequences": {"advantage": {"kind": "rloo"}, "aggregation": "sequence_mean"},
    "opo": {"advantage": {"kind": "opo"}, "aggregation": "constant"},
    "gdpo": {"advantage": {"kind": "gdpo"}},
    "reinforce": {"advantage": {"kind": "reinforce", "gamma": 1.0}},
    "remax": {"advantage": {"kind": "remax"}, "aggregation": "sequence_sum"},
    "shaped": {
        "reward_shaping": [
            {"kind": "length_penalty", "coef": 0.1},
            {"kind": "overlong_penalty", "buffer_tokens": 4},
        ],
        "masks": [{"kind": "overlong"}],
        "sample_weights": [{"kind": "length"}],
    },
}
TASK = {"max_steps": 2, "validation": {}, "checkpoint": {"export_hf": False}}


class WithTokens(RlvrPipeline):
    """Has all tokens on the driver, whatever the algorithm."""

    def open(self) -> None:
        super().open()
        assert not self.needs_tokens
        self.needs_tokens = True


@pytest.mark.parametrize("name", PRESETS)
def test_the_driver_needs_no_tokens_for_the_same_numbers(tmp_path: Path, name: str) -> None:
    algorithm = {"loss": [{"kind": "ppo_clip"}], **PRESETS[name]}
    path = write_task(tmp_path, algorithm=algorithm, **TASK)
    updates = [] if name == "one update" else ["actor_train.samples_per_update=8"]
    far = run_local(path, [f"output_dir={tmp_path / 'far'}", *updates])
    near = run_local(path, [f"output_dir={tmp_path / 'near'}", *updates], pipeline=WithTokens)
    assert far[0]["grad_norm"] > 0
    for one, other in zip(far, near, strict=True):
        assert without_times(one) == without_times(other)


@pytest.mark.parametrize(
    ("algorithm", "needed"),
    [
        ({}, False),
        ({"advantage": {"kind": "reinforce", "gamma": 0.9}}, True),
        ({"advantage": {"kind": "reinforce_pp"}}, True),
        ({"advantage_shaping": [{"kind": "whiten"}]}, True),
        ({"loss": [{"kind": "clip_cov"}]}, True),
        ({"old_logprobs": "rollout"}, True),
        ({"correction": {"weight": {"level": "token", "upper": 2.0}}}, True),
    ],
)
def test_the_driver_has_tokens_only_where_an_algorithm_computes_with_them(
    tmp_path: Path, algorithm: dict[str, Any], needed: bool
) -> None:
    seen: list[bool] = []

    class Opens(RlvrPipeline):
        def open(self) -> None:
            super().open()
            seen.append(self.needs_tokens)

    run_local(write_task(tmp_path, algorithm=algorithm, **{**TASK, "max_steps": 1}), pipeline=Opens)
    assert seen == [needed]
