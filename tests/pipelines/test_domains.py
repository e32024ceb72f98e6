"""Runs whose tags have settings of their own, with tokens on the driver and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.core.errors import DataError
from tests.runs import run_local, without_times, write_task

CODE = {
    "rewards": {"digits": 2.0},
    "reward_shaping": [{"kind": "scale", "factor": 2.0}],
    "advantage": {"kind": "rloo"},
    "filters": [{"kind": "mean_reward", "low": -1.0, "high": 10.0}],
    "sampling": {"temperature": 0.6, "max_new_tokens": 5},
}


def task(folder: Path, **changes: Any) -> Path:
    """Two sources of one file, with the tags `math` and `code`."""
    data = str(folder / "train.jsonl")
    return write_task(
        folder,
        **{
            "max_steps": 2,
            "validation": {"every": 1, "sets": {"code": {"path": data, "tag": "code", "limit": 2}}},
            "checkpoint": {"export_hf": False},
            "data": {
                "sources": [{"path": data, "tag": "math"}, {"path": data, "tag": "code"}],
                "prompts_per_step": 4,
                "samples_per_prompt": 4,
                "max_prompt_tokens": 32,
            },
            "rewards": {"digits": {"fn": "test_run_rewards:digits", "tags": ["math", "code"]}},
            "sampling": {"max_new_tokens": 12, "temperature": 1.4},
        }
        | changes,
    )


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_each_tag_of_a_run_has_its_settings(tmp_path: Path, gamma: float) -> None:
    path = task(
        tmp_path,
        domains={"code": CODE},
        algorithm={
            "advantage": {"kind": "reinforce", "gamma": gamma},
            "loss": [{"kind": "ppo_clip"}, {"kind": "kl", "coef": 0.001}],
        },
    )
    first, *_ = run_local(path)
    # Log-probs of trainer and engine agree at both temperatures only if each row has its own.
    assert first["mismatch/logprob_abs_max"] < 1e-4
    assert first["tag/code/response_tokens/mean"] <= 5
    assert first["tag/math/response_tokens/mean"] > 5
    assert first["tag/code/samples_fraction"] == 0.5
    assert first["tag/code/rejected_groups"] == 0
    assert first["kl/ref"] == pytest.approx(0, abs=1e-6)
    assert first["val/code/mean@1"] >= 0


def test_a_tag_that_changes_nothing_changes_no_number(tmp_path: Path) -> None:
    plain = run_local(task(tmp_path / "one"))
    same = run_local(task(tmp_path / "one", domains={"code": {}}, output_dir=str(tmp_path / "two")))
    assert [without_times(one) for one in plain] == [without_times(one) for one in same]


def test_a_curriculum_and_moments_of_a_tag_survive_a_resume(tmp_path: Path) -> None:
    path = task(tmp_path, max_steps=6, validation={}, checkpoint={"every": 3, "export_hf": False})
    data = "data.curriculum={pass_score: 0.2, low: 0.3, high: 0.6, sources: true, outside: 0.05}"
    running = {**CODE, "reward_shaping": [{"kind": "normalize", "mean": "running", "std": "none"}]}
    path.write_text(path.read_text().replace("tag: code", "tag: code\n    limit: 4"))
    changes = [data, f"domains={ {'code': running} }"]
    straight = run_local(path, [*changes, f"output_dir={tmp_path / 'straight'}"])
    halves = tmp_path / "halves"
    run_local(path, [*changes, f"output_dir={halves}"])
    (halves / "checkpoints" / "step_000006").rename(tmp_path / "gone")
    resumed = run_local(path, [*changes, f"output_dir={halves}"])
    for one, other in zip(straight, resumed, strict=True):
        assert without_times(one) == without_times(other)
    last = straight[-2]
    assert sum(record.get("curriculum/skipped_prompts", 0) for record in straight) > 0
    assert 4 < last["curriculum/known_prompts"] <= 20
    plain = run_local(path, [changes[1], f"output_dir={tmp_path / 'plain'}"])
    assert plain[-2]["reward/mean"] != last["reward/mean"]


def test_a_tag_that_no_prompt_has_is_refused_where_tags_come_from_a_column(tmp_path: Path) -> None:
    path = task(tmp_path, domains={"other": {}})
    source = {"path": str(tmp_path / "train.jsonl"), "columns": {"tag": "answer"}, "limit": 1}
    tags = "rewards.digits.tags=[code, other, '1']"
    with pytest.raises(DataError, match=r"domains\.other: no training prompt has the tag"):
        run_local(path, [f"data.sources=[{source}]", tags])
