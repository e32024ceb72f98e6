"""Whether every preset learns: the quickstart's task, a fixed number of steps, three seeds each.

Real runs of the pipeline with the `hf` engine, in one process each and without Ray, as many at once
as there are cores. Writes one table and one picture for the docs, and fails where a preset lifts
the held-out accuracy of a seed by less than 0.3.

    python benchmarks/algorithms_learn.py [--presets grpo,ppo] [--seeds 3] [--steps 12]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
LIFT = 0.3
METRIC = "val/held_out/mean@1"
OTHER_SETTINGS: Mapping[str, tuple[dict[str, Any], str]] = {
    "ppo": (
        {"critic": {"optimizer": {"lr": 1e-3}}},
        "critic lr 1e-3: its head is new and the run is short",
    ),
    "vapo": (
        {"critic": {"optimizer": {"lr": 1e-3}, "warmup_steps": 2}},
        "critic lr 1e-3 and 2 warm-up steps instead of 50: the whole run has fewer",
    ),
}
"""What a preset needs on this task beside its paper's settings, and why."""


@dataclass(frozen=True)
class Job:
    preset: str
    seed: int
    steps: int
    folder: Path

    @property
    def output(self) -> Path:
        return self.folder / f"{self.preset}-{self.seed}"


def make_tasks(folder: Path, seeds: int) -> None:
    """A warm-started model and its problems for each seed."""
    for seed in range(seeds):
        out = folder / f"task-{seed}"
        if (out / "held_out.jsonl").exists():
            continue
        prepare = [sys.executable, "examples/rlvr_quickstart/prepare.py"]
        subprocess.run([*prepare, "--out", out, "--seed", str(seed)], cwd=ROOT, check=True)


def run_file(job: Job) -> Path:
    """The quickstart, with the preset in the place of its algorithm."""
    run = yaml.safe_load((ROOT / "examples/rlvr_quickstart/run.yaml").read_text())
    task = job.folder / f"task-{job.seed}"
    for name in ("algorithm", "reference"):
        del run[name]
    for made in (run["model"], run["data"]["sources"][0], run["validation"]["sets"]["held_out"]):
        made["path"] = str(task / Path(made["path"]).name)
    run["actor_infer"] = {"pool": "all", "strategy": {"kind": "hf"}}
    # Two updates a step, so that ratios and clips take part.
    run["actor_train"]["samples_per_update"] = 256
    run |= {
        "algorithm": {"preset": job.preset},
        "seed": job.seed,
        "max_steps": job.steps,
        "output_dir": str(job.output),
        "checkpoint": {"every": None, "export_hf": False},
        "track": {"tensorboard": False, "rollouts_every": None, "verify_weights": "never"},
        **OTHER_SETTINGS.get(job.preset, ({}, ""))[0],
    }
    run["validation"]["every"] = max(1, job.steps // 8)
    job.output.mkdir(parents=True, exist_ok=True)
    path = job.output / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def run(job: Job) -> None:
    """One run, here; a finished one is not repeated."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TORCHDYNAMO_DISABLE="1")
    with open(job.folder / f"{job.preset}-{job.seed}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    import torch

    from roll.config import load_config
    from roll.distributed.local import LocalLauncher
    from roll.pipeline.data import load_data
    from roll.pipeline.rlvr import RlvrPipeline

    torch.set_num_threads(1)
    config = load_config(run_file(job)).config
    with asyncio.Runner() as runner, LocalLauncher() as launcher:
        data = load_data(config)
        RlvrPipeline(config, launcher, runner, platform="cpu", data=data).run()


def curve(job: Job) -> list[tuple[int, float]]:
    """Step and held-out accuracy."""
    lines = (job.output / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(record["step"], record[METRIC]) for record in records if METRIC in record]


def table(jobs: list[Job]) -> tuple[str, bool]:
    """Markdown, one row per preset; and whether all of them learned."""
    rows = [
        "| preset | start | end, each seed | least lift | other settings |",
        "|---|---|---|---|---|",
    ]
    learned = True
    for preset in dict.fromkeys(job.preset for job in jobs):
        curves = [curve(job) for job in jobs if job.preset == preset]
        starts, ends = [c[0][1] for c in curves], [c[-1][1] for c in curves]
        lift = min(end - start for start, end in zip(starts, ends, strict=True))
        learned = learned and lift >= LIFT
        rows.append(
            f"| `{preset}` | {statistics.fmean(starts):.2f} | "
            f"{', '.join(f'{end:.2f}' for end in ends)} | {lift:.2f} | "
            f"{OTHER_SETTINGS.get(preset, ({}, ''))[1]} |"
        )
    return "\n".join(rows), learned


def draw(jobs: list[Job], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    presets = list(dict.fromkeys(job.preset for job in jobs))
    columns = min(len(presets), 5)
    rows = -(-len(presets) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(2.2 * columns, 1.9 * rows), layout="constrained",
        sharex=True, sharey=True, squeeze=False,
    )  # fmt: skip
    for axes in grid.flat[len(presets) :]:
        axes.axis("off")
    for preset, axes in zip(presets, grid.flat, strict=False):
        for job in jobs:
            if job.preset == preset:
                axes.plot(*zip(*curve(job), strict=True), linewidth=1, marker="o", markersize=2)
        axes.set(title=preset, ylim=(0.3, 1.0))
        axes.grid(alpha=0.3)
    figure.supxlabel("step")
    figure.supylabel("held-out accuracy")
    figure.savefig(target, dpi=110)


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
    jobs = [
        Job(preset, seed, args.steps, folder)
        for preset in args.presets.split(",")
        for seed in range(args.seeds)
    ]
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for done, _ in enumerate(pool.imap_unordered(run, jobs), start=1):
            print(f"{done} of {len(jobs)} runs", flush=True)
    text, learned = table(jobs)
    print(text)
    if args.docs:
        (args.docs / "algorithms_learn.md").write_text(text + "\n")
        draw(jobs, args.docs / "algorithms_learn.png")
    sys.exit(0 if learned else 1)


if __name__ == "__main__":
    main()
