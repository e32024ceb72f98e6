"""The twelve sick runs, each with the settings that make it ill and the alarms that name it, and
ten healthy ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.sick.launchers import CoolerEngine, SlowSecond
from roll.workers.infer import InferWorker


def reward(name: str, *, tag: str = "task") -> dict[str, Any]:
    return {"fn": f"benchmarks.sick.rewards:{name}", "tags": [tag]}


def judged_by(training: str, held_out: str) -> dict[str, Any]:
    """Return settings of a run that is paid by one reward and validated by another."""
    rewards = {"paid": reward(training), "wanted": reward(held_out, tag="wanted")}
    return {"rewards": rewards, "validation": {"sets": {"held_out": {"tag": "wanted"}}}}


@dataclass(frozen=True)
class Case:
    """A run, and the alarms that it must raise."""

    name: str
    alarms: tuple[str, ...]
    """Names of the rules; empty: healthy."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from those of a healthy run."""
    answers: tuple[str, ...] = ()
    """Answers of the rows of training, in turn; empty: any."""
    engine: type[InferWorker] = InferWorker
    replicas: int = 1
    seed: int = 0


SICK = (
    Case(
        "entropy collapse",
        ("entropy_collapse",),
        {
            "rewards": {"tie_break": reward("tie_break")},
            "actor_train": {"optimizer": {"lr": 2e-3}},
            "max_steps": 30,
        },
    ),
    Case(
        "length explosion",
        ("reward_hacked", "length_explosion"),
        {
            **judged_by("longest", "even"),
            "sampling": {"max_new_tokens": 24, "temperature": 2.0},
        },
    ),
    Case("constant reward", ("constant_reward",), {"rewards": {"one": reward("always_one")}}),
    Case(
        "hacked reward",
        ("reward_hacked",),
        {
            **judged_by("eights", "even_and_different"),
            "actor_train": {"optimizer": {"lr": 1.5e-3}},
            "max_steps": 30,
        },
    ),
    Case("engine and trainer apart", ("engine_mismatch",), engine=CoolerEngine),
    Case(
        "learning rate 100 times too high",
        ("updates_too_far",),
        {"actor_train": {"optimizer": {"lr": 5e-2}}},
    ),
    Case("truncation", ("truncated",), {"sampling": {"max_new_tokens": 5}}),
    Case(
        "dead filter",
        ("dead_filter",),
        {
            "rewards": {"even": reward("even_if_possible")},
            "rollout": {"filters": [{"kind": "equal_rewards"}], "max_prompts_factor": 40},
            "data": {"prompts_per_step": 3},
        },
        answers=("possible", *["impossible"] * 9),
    ),
    Case(
        "stale samples",
        ("stale_samples",),
        {
            "pools": {"all": "0", "infer": "1"},
            "actor_infer": {"pool": "infer"},
            "actor_train": {"optimizer": {"lr": 1.5e-3}, "epochs": 2},
            "rollout": {"max_staleness": 8},
        },
    ),
    Case("slow replica", ("slow_replica",), engine=SlowSecond, replicas=2),
    Case(
        "leaking reward",
        ("reward_leaks",),
        {
            "rewards": {"same": reward("same_places")},
            "actor_train": {"optimizer": {"lr": 1.5e-3}},
        },
        answers=("77777",),
    ),
    Case("not a number", ("not_finite",), {"actor_train": {"optimizer": {"lr": 1e30}}}),
)

PRESETS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo", "lite_ppo")
WELL = (
    *(
        Case(f"healthy, {name}", (), {"algorithm": {"preset": name}}, seed=i)
        for i, name in enumerate(PRESETS)
    ),
    Case("healthy, two updates a step", (), {"actor_train": {"samples_per_update": 32}}, seed=7),
    Case(
        "healthy, one step stale",
        (),
        {
            "pools": {"all": "0", "infer": "1"},
            "actor_infer": {"pool": "infer"},
            "rollout": {"max_staleness": 1},
            "algorithm": {"preset": "grpo", "correction": {"weight": {"upper": 2.0}}},
        },
        seed=8,
    ),
    Case("healthy, two replicas", (), replicas=2, seed=9),
)
"""Healthy runs: other algorithms, updates, staleness and replicas, each with a seed of its own."""
