"""Benchmark of learning with stale samples: the quickstart's task with staleness 0, 1, 2 and 4.

Runs with a staleness above 0 use importance weights as a correction. One more setting, with
staleness 4, has no correction. A setting passes if, with each seed, it reaches the accuracy of the
synchronous run within 1.5 times as many steps.

    python benchmarks/staleness_learn.py [--seeds 3] [--steps 12] [--docs docs]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.learning import ROOT, Job, curve, draw, make_tasks, records, run_all

FACTOR = 1.5
CORRECTION = {"weight": {"level": "token", "mode": "truncate", "upper": 2.0}}
SETTINGS: dict[str, tuple[int, bool]] = {
    "synchronous": (0, False),
    "staleness 1": (1, True),
    "staleness 2": (2, True),
    "staleness 4": (4, True),
    "4, uncorrected": (4, False),
}
"""Name of the setting -> `max_staleness`, and whether the run uses a correction."""


def job(name: str, seed: int, steps: int, folder: Path) -> Job:
    staleness, corrected = SETTINGS[name]
    algorithm: dict[str, Any] = {
        "advantage": {"kind": "grpo"},
        "loss": [{"kind": "ppo_clip"}],
        "aggregation": "token_mean",
    }
    if corrected:
        algorithm["correction"] = CORRECTION
    changes = {
        "algorithm": algorithm,
        "rollout": {"max_staleness": staleness},
        # The engines have their own devices, so that they generate while the policy trains.
        "pools": {"all": "0", "infer": "1"},
        "actor_infer": {"pool": "infer", "strategy": {"kind": "hf"}},
    }
    total = steps if staleness == 0 else int(FACTOR * steps)
    return Job(name.replace(" ", "_").replace(",", ""), seed, total, folder, 1, changes)


def reached(one: Job, goal: float) -> int | None:
    """Return the first step with an accuracy of at least `goal`; None if there is none."""
    return next((step for step, accuracy in curve(one) if accuracy >= goal), None)


def stale(one: Job) -> float:
    """Return the mean staleness of the trained tokens, in weight versions, over the second half of
    the run."""
    found = [r["staleness/mean"] for r in records(one) if "staleness/mean" in r]
    return statistics.fmean(found[len(found) // 2 :])


def table(by_name: dict[str, list[Job]], steps: int) -> tuple[str, bool]:
    """Return a table in Markdown, with one row per setting, and whether all settings with a
    correction passed.

    Args:
        by_name: name of the setting -> its runs, one per seed.
        steps: number of steps of a synchronous run.
    """
    goals = [curve(one)[-1][1] for one in by_name["synchronous"]]
    rows = [
        f"| setting | staleness, mean | accuracy after {steps} steps, each seed | steps to the "
        "synchronous accuracy |",
        "|---|---|---|---|",
    ]
    passed = True
    for name, jobs in by_name.items():
        after = [dict(curve(one))[steps] for one in jobs]
        took = [reached(one, goal) for one, goal in zip(jobs, goals, strict=True)]
        if SETTINGS[name][1]:
            passed = passed and None not in took
        rows.append(
            f"| {name} | {statistics.fmean(stale(one) for one in jobs):.2f} | "
            f"{', '.join(f'{value:.2f}' for value in after)} | "
            f"{', '.join('not in time' if t is None else str(t) for t in took)} |"
        )
    return "\n".join(rows), passed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/staleness_learn")
    parser.add_argument("--docs", type=Path, help="folder for the table and the picture")
    args = parser.parse_args()
    folder = args.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    make_tasks(folder, args.seeds)
    by_name = {
        name: [job(name, seed, args.steps, folder) for seed in range(args.seeds)]
        for name in SETTINGS
    }
    run_all([one for jobs in by_name.values() for one in jobs])
    text, passed = table(by_name, args.steps)
    print(text)
    if args.docs:

        def plot(axes: Any, name: str) -> None:
            for one in by_name[name]:
                axes.plot(*zip(*curve(one), strict=True), linewidth=1, marker="o", markersize=2)

        (args.docs / "staleness_learn.md").write_text(text + "\n")
        draw(list(SETTINGS), plot, args.docs / "staleness_learn.png")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
