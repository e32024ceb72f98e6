"""Picture of the curves of one or more runs, as in the README.

python benchmarks/plot_run.py docs/quickstart.png outputs/quickstart/run [more runs ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def main(target: Path, runs: list[Path]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for number, run in enumerate(runs):
        records = read(run)
        color = f"C{number}"
        reward = [(r["step"], r["reward/mean"]) for r in records if "reward/mean" in r]
        (name,) = {k for r in records for k in r if k.startswith("val/") and k.endswith("mean@1")}
        held_out = [(r["step"], r[name]) for r in records if name in r]
        left.plot(*zip(*reward, strict=True), color=color, alpha=0.35, linewidth=1)
        left.plot(*zip(*held_out, strict=True), color=color, marker="o", markersize=3)
        kl = [(r["step"], r["kl/ref"]) for r in records if "kl/ref" in r]
        right.plot(*zip(*kl, strict=True), color=color, linewidth=1)
    left.set(xlabel="step", ylim=(0.3, 1.0), title="sampled accuracy")
    left.plot([], [], color="gray", alpha=0.35, label="training prompts")
    left.plot([], [], color="gray", marker="o", markersize=3, label="held-out prompts")
    left.legend(loc="lower right")
    left.grid(alpha=0.3)
    right.set(xlabel="step", title="KL to the reference, nats per token")
    right.grid(alpha=0.3)
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(run) for run in sys.argv[2:]])
