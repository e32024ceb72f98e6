"""Records of runs as short scripts: a healthy one, and what differs in others."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

STEPS = 120
Curve = Callable[[float], float]
"""Function of the share of the run that is done, 0 to 1."""


def rising(low: float, high: float, speed: float = 4.0) -> Curve:
    """Return a curve that goes from `low` to `high` and flattens."""
    return lambda t: low + (high - low) * (1 - math.exp(-speed * t)) / (1 - math.exp(-speed))


def flat(value: float) -> Curve:
    return lambda t: value


def jump(low: float, high: float, at: float = 0.4) -> Curve:
    """Return a curve that is `low`, and `high` from the share `at` of the run on."""
    return lambda t: high if t >= at else low


HEALTHY: dict[str, Curve] = {
    "reward/mean": rising(0.3, 0.85),
    "reward/math/mean": rising(0.3, 0.85),
    "reward/math/error_rate": flat(0.0),
    "reward/math/timeout_rate": flat(0.0),
    "entropy": rising(1.0, 0.45),
    "response_tokens/mean": rising(120, 140),
    "response_tokens/max": flat(512),
    "truncated_fraction": flat(0.01),
    "groups/equal_rewards_fraction": rising(0.2, 0.4),
    "kl/ref": rising(0.0, 0.05),
    "clip_fraction": flat(0.02),
    "approx_kl": flat(0.002),
    "grad_norm": flat(0.5),
    "loss/total": flat(0.01),
    "mismatch/logprob_abs_mean": flat(0.003),
    "mismatch/kl": flat(1e-5),
    "staleness/mean": flat(0.0),
    "staleness/max": flat(0.0),
    "rollout/started_groups": flat(32.0),
    "rollout/rejected_groups": flat(0.0),
    "rollout/aborted_groups": flat(0.0),
    "rollout/lost_replicas": flat(0.0),
    "rollout/moved_requests": flat(0.0),
    "perf/replicas_busy_min": flat(0.7),
    "perf/replicas_busy_max": flat(0.8),
    "perf/busiest_replica": lambda t: float(int(t * STEPS) % 4),
    "memory/rss_gb_max": rising(2.0, 2.2),
    "time/rollout_s": flat(6.0),
    "time/train_s": flat(3.0),
    "time/step_s": flat(10.0),
}
HELD_OUT = rising(0.3, 0.8)


def run_records(
    changed: dict[str, Curve | None] | None = None,
    *,
    held_out: Curve | None = HELD_OUT,
    steps: int = STEPS,
    seed: int = 0,
    noise: float = 0.03,
) -> list[dict[str, Any]]:
    """Return the records of a run.

    Args:
        changed: curves that replace those of a healthy run; None: the run has no such metric.
        held_out: score of a validation every ten steps; None: there is none.
        steps: number of steps.
        seed: seed of the noise.
        noise: standard deviation of the noise, as a share of each value.
    """
    chance = random.Random(seed)
    curves = {**HEALTHY, **(changed or {})}
    records = []
    for step in range(steps + 1):
        t = step / steps
        record: dict[str, Any] = {"step": step}
        if held_out is not None and step % 10 == 0:
            record["val/test/mean@1"] = held_out(t) + chance.gauss(0, 0.01)
        if step < steps:
            for name, curve in curves.items():
                if curve is not None:
                    exact = name.endswith(("/busiest_replica", "_groups", "/max", "_replicas"))
                    record[name] = curve(t) * (1 if exact else 1 + chance.gauss(0, noise))
            reward = record.get("reward/mean")
            if reward is not None and "reward/std" not in curves:
                inside = min(max(curves["reward/mean"](t), 0.0), 1.0)  # type: ignore[misc]
                record["reward/std"] = math.sqrt(inside * (1 - inside))
        records.append(record)
    return records


HARD = flat(0.3)
SICK: dict[str, list[dict[str, Any]]] = {
    "entropy_collapse": run_records(
        {"reward/mean": rising(0.3, 0.33), "entropy": lambda t: 1.0 if t < 0.3 else 0.04},
        held_out=HARD,
    ),
    "length_explosion": run_records(
        {"reward/mean": HARD, "response_tokens/mean": rising(120, 900, 1)}, held_out=HARD
    ),
    "constant_reward": run_records(
        {
            "reward/mean": flat(0.0),
            "reward/std": flat(0.0),
            "groups/equal_rewards_fraction": flat(1.0),
            "loss/total": flat(0.0),
            "grad_norm": flat(0.0),
        },
        held_out=flat(0.0),
    ),
    "reward_hacked": run_records(
        held_out=lambda t: 0.3 + 0.3 * t / 0.4 if t < 0.4 else 0.75 - 0.6 * t
    ),
    "engine_mismatch": run_records(
        {"reward/mean": rising(0.3, 0.1), "mismatch/logprob_abs_mean": jump(0.003, 0.4)},
        held_out=HARD,
    ),
    "updates_too_far": run_records(
        {
            "reward/mean": rising(0.3, 0.02, 20),
            "clip_fraction": jump(0.02, 0.6, 0.05),
            "approx_kl": jump(0.002, 1.5, 0.05),
            "kl/ref": rising(0.0, 9.0),
            "entropy": jump(1.0, 0.01, 0.2),
        },
        held_out=flat(0.05),
    ),
    "truncated": run_records({"truncated_fraction": rising(0.02, 0.4)}),
    "dead_filter": run_records({"rollout/rejected_groups": jump(5.0, 30.0)}),
    "stale_samples": run_records(
        {
            "reward/mean": HARD,
            "staleness/mean": flat(7.0),
            "staleness/max": flat(8.0),
            "mismatch/logprob_abs_mean": jump(0.05, 0.6),
        },
        held_out=HARD,
    ),
    "slow_replica": run_records(
        {
            "perf/replicas_busy_min": jump(0.7, 0.2),
            "perf/replicas_busy_max": jump(0.8, 0.98),
            "perf/busiest_replica": flat(3.0),
        }
    ),
    "reward_leaks": run_records({"reward/mean": rising(0.2, 0.99, 12)}, held_out=flat(0.2)),
    "not_finite": run_records(
        {
            "loss/total": jump(0.01, math.nan),
            "grad_norm": jump(0.5, math.nan),
            "reward/mean": jump(0.4, 0.0),
            "entropy": jump(1.0, math.nan),
        },
        held_out=HARD,
    ),
}
"""The name of a rule -> records of a run with that illness, and whatever follows from it."""

SICK_TOO: dict[str, list[dict[str, Any]]] = {
    "reward_fails": run_records({"reward/math/error_rate": flat(0.3)}),
    "reward_times_out": run_records({"reward/math/timeout_rate": jump(0.0, 0.2)}),
    "lost_replicas": run_records({"rollout/lost_replicas": lambda t: float(0.5 < t < 0.51)}),
    "memory_grows": run_records({"memory/rss_gb_max": lambda t: 2.0 + 6 * t}),
    "equal_groups": run_records(
        {"reward/mean": flat(0.02), "groups/equal_rewards_fraction": flat(0.8)}, held_out=flat(0.02)
    ),
}

WELL: dict[str, list[dict[str, Any]]] = {
    "plain": run_records(),
    "solved: low entropy, equal rewards": run_records(
        {
            "reward/mean": rising(0.5, 0.995),
            "entropy": rising(0.85, 0.02),
            "groups/equal_rewards_fraction": rising(0.05, 0.97),
        },
        held_out=rising(0.48, 0.97),
    ),
    "long thoughts that pay": run_records({"response_tokens/mean": rising(300, 2400, 1)}),
    "four steps stale": run_records(
        {
            "staleness/mean": flat(2.5),
            "staleness/max": flat(4.0),
            "mismatch/logprob_abs_mean": flat(0.04),
            "rollout/aborted_groups": flat(1.0),
        }
    ),
    "filter that rejects half": run_records({"rollout/rejected_groups": flat(16.0)}),
    "noisy": run_records({"reward/mean": rising(0.2, 0.5)}, held_out=rising(0.2, 0.5), noise=0.15),
    "five steps": run_records(steps=5),
    "good from the beginning": run_records(
        {
            "reward/mean": rising(0.9, 0.98),
            "entropy": rising(0.3, 0.05),
            "groups/equal_rewards_fraction": rising(0.6, 0.9),
        },
        held_out=rising(0.9, 0.97),
    ),
    "agents that learn to end": run_records(
        {"truncated_fraction": rising(0.4, 0.02), "response_tokens/mean": rising(60, 40)}
    ),
    "responses of very different lengths": run_records({"perf/replicas_busy_min": flat(0.2)}),
    "rows": run_records(
        {
            **dict.fromkeys(HEALTHY),
            "nll": rising(2.0, 0.9),
            "grad_norm": flat(1.0),
            "time/step_s": flat(1.0),
        },
        held_out=None,
    ),
    "bfloat16": run_records(
        {
            "mismatch/logprob_abs_mean": flat(0.02),
            "reward/mean": rising(-1.0, 0.5),
            "reward/std": flat(0.5),
        }
    ),
}
