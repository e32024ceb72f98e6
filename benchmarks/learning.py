"""Real runs of the quickstart's task with other settings, for the benchmarks of learning.

Each run is one process without Ray, with the `hf` engine. As many runs go on at the same time as
there are cores.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
METRIC = "val/held_out/mean@1"


@dataclass(frozen=True)
class Job:
    """Run of a benchmark, identified by name and seed. A finished run is not repeated."""

    name: str
    seed: int
    steps: int
    folder: Path
    validate_every: int
    changes: Mapping[str, Any]
    """Top-level key of the quickstart's run file -> value that replaces the one there."""

    @property
    def output(self) -> Path:
        return self.folder / f"{self.name}-{self.seed}"


def make_tasks(folder: Path, seeds: int) -> None:
    """Make a warm-started model and its problems for each seed, in `<folder>/task-<seed>`."""
    for seed in range(seeds):
        out = folder / f"task-{seed}"
        if (out / "held_out.jsonl").exists():
            continue
        prepare = [sys.executable, "examples/sorting.py", "quickstart"]
        subprocess.run([*prepare, "--out", out, "--seed", str(seed)], cwd=ROOT, check=True)


def run_all(jobs: Sequence[Job]) -> None:
    """Do all runs, as many at the same time as there are cores, and print the progress."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for done, _ in enumerate(pool.imap_unordered(_run, jobs), start=1):
            print(f"{done} of {len(jobs)} runs", flush=True)


def curve(job: Job) -> list[tuple[int, float]]:
    """Return (step, held-out accuracy) of each validation."""
    return [(record["step"], record[METRIC]) for record in records(job) if METRIC in record]


def records(job: Job) -> list[dict[str, Any]]:
    lines = (job.output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def draw(names: Sequence[str], plot: Callable[[Any, str], None], target: Path) -> None:
    """Write one picture with a small plot of accuracy over steps for each name.

    Args:
        plot: function that draws the curves of a name into the given axes.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(len(names), 5)
    rows = -(-len(names) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(2.2 * columns, 1.9 * rows), layout="constrained",
        sharex=True, sharey=True, squeeze=False,
    )  # fmt: skip
    for axes in grid.flat[len(names) :]:
        axes.axis("off")
    for name, axes in zip(names, grid.flat, strict=False):
        plot(axes, name)
        axes.set(title=name, ylim=(0.3, 1.0))
        axes.grid(alpha=0.3)
    figure.supxlabel("step")
    figure.supylabel("held-out accuracy")
    figure.savefig(target, dpi=110)


def _run_file(job: Job) -> Path:
    """Write the quickstart's run file with the changes of the job; return its path."""
    run = yaml.safe_load((ROOT / "examples/rlvr_quickstart/run.yaml").read_text())
    task = job.folder / f"task-{job.seed}"
    for made in (run["model"], run["data"]["sources"][0], run["validation"]["sets"]["held_out"]):
        made["path"] = str(task / Path(made["path"]).name)
    del run["reference"]
    run["actor_infer"] = {"pool": "all", "strategy": {"kind": "hf"}}
    run["validation"]["every"] = job.validate_every
    run |= {
        "seed": job.seed,
        "max_steps": job.steps,
        "output_dir": str(job.output),
        "checkpoint": {"every": None, "export_hf": False},
        "track": {"tensorboard": False, "rollouts_every": None, "verify_weights": "never"},
    }
    run |= job.changes
    job.output.mkdir(parents=True, exist_ok=True)
    path = job.output / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def _run(job: Job) -> None:
    """Do one run in this process; its output goes to a log file."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TORCHDYNAMO_DISABLE="1")
    with open(job.folder / f"{job.name}-{job.seed}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    import torch

    from roll.config import RlvrConfig, load_config
    from roll.core.threads.loop_thread import LoopThread
    from roll.distributed.local import LocalLauncher
    from roll.pipeline.rlvr import RlvrPipeline
    from roll.runtime.run_data import load_data

    torch.set_num_threads(1)
    config = load_config(_run_file(job)).config
    assert isinstance(config, RlvrConfig)
    with LocalLauncher() as launcher, LoopThread("rollout") as loop:
        data = load_data(config)
        RlvrPipeline(config, launcher, loop, platform="cpu", data=data).run()
