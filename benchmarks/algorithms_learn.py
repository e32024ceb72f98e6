"""Benchmark of learning with every preset: the quickstart's task, a fixed number of steps.

Each preset runs with three seeds. The script writes a table and a picture for the documentation. It
fails if a preset raises the held-out accuracy with any seed by less than 0.3.

    python benchmarks/algorithms_learn.py [--presets grpo,ppo] [--seeds 3] [--steps 12]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.learning import ROOT, Job, curve, draw, make_tasks, run_all

LIFT = 0.3
OTHER_SETTINGS: Mapping[str, tuple[dict[str, Any], str]] = {
    "ppo": (
        {"critic": {"pool": "all", "optimizer": {"lr": 1e-3}}},
        "critic lr 1e-3: its head is new and the run is short",
    ),
    "vapo": (
        {"critic": {"pool": "all", "optimizer": {"lr": 1e-3}, "warmup_steps": 2}},
        "critic lr 1e-3 and 2 warm-up steps instead of 50: the whole run has fewer",
    ),
}
"""Preset -> settings for this task that differ from those of its paper, and the reason as text."""


def job(preset: str, seed: int, steps: int, folder: Path) -> Job:
    """Return a run of the quickstart with the preset as its algorithm."""
    # With two updates per step, ratios differ from 1 and clipping has an effect.
    train = {
        "pool": "all",
        "strategy": {"kind": "fsdp2"},
        "optimizer": {"lr": 1.5e-4, "warmup_steps": 10},
        "samples_per_update": 256,
    }
    changes = {
        "algorithm": {"preset": preset},
        "actor_train": train,
        **OTHER_SETTINGS.get(preset, ({}, ""))[0],
    }
    return Job(preset, seed, steps, folder, max(1, steps // 8), changes)


def table(jobs: list[Job]) -> tuple[str, bool]:
    """Return a table in Markdown, with one row per preset, and whether all presets learned."""
    rows = [
        "| preset | start | end, each seed | least lift | other settings |",
        "|---|---|---|---|---|",
    ]
    learned = True
    for preset in dict.fromkeys(job.name for job in jobs):
        curves = [curve(job) for job in jobs if job.name == preset]
        starts, ends = [c[0][1] for c in curves], [c[-1][1] for c in curves]
        lift = min(end - start for start, end in zip(starts, ends, strict=True))
        learned = learned and lift >= LIFT
        rows.append(
            f"| `{preset}` | {statistics.fmean(starts):.2f} | "
            f"{', '.join(f'{end:.2f}' for end in ends)} | {lift:.2f} | "
            f"{OTHER_SETTINGS.get(preset, ({}, ''))[1]} |"
        )
    return "\n".join(rows), learned


def main() -> None:
    known = sorted(path.stem for path in (ROOT / "roll/config/presets").glob("*.yaml"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--presets", default=",".join(known))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/algorithms_learn")
    parser.add_argument("--docs", type=Path, help="folder for the table and the picture")
    args = parser.parse_args()
    folder = args.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    make_tasks(folder, args.seeds)
    presets = args.presets.split(",")
    jobs = [job(name, seed, args.steps, folder) for name in presets for seed in range(args.seeds)]
    run_all(jobs)
    text, learned = table(jobs)
    print(text)
    if args.docs:

        def plot(axes: Any, preset: str) -> None:
            for one in jobs:
                if one.name == preset:
                    axes.plot(*zip(*curve(one), strict=True), linewidth=1, marker="o", markersize=2)

        (args.docs / "algorithms_learn.md").write_text(text + "\n")
        draw(presets, plot, args.docs / "algorithms_learn.png")
    sys.exit(0 if learned else 1)


if __name__ == "__main__":
    main()
