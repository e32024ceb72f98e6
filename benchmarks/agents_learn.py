"""Benchmark of learning with the algorithms of agents: the frozen lake example, a fixed number of
steps.

The script writes a table: success on held-out maps before and after. It fails if an algorithm
raises it with any seed by less than 0.3.

    python benchmarks/agents_learn.py [--presets starpo,gigpo,turn_ppo,rloo,reinforce_pp]
        [--seeds 3] [--steps 40]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from roll.output_dir.trackers import read_records

ROOT = Path(__file__).parents[1]
METRIC = "val/held_out/mean@1"
LIFT = 0.3
OTHER_SETTINGS = {
    "turn_ppo": (["critic.optimizer.lr=1e-3"], "critic lr 1e-3: its head is new"),
    "gigpo": (["algorithm.loss.1.coef=0.001"], "KL of 0.001: the run is short"),
    "rloo": (["algorithm.kl_in_reward=null"], "no KL: the run is short"),
}
"""Preset -> settings for this task that differ from those of its paper, and the reason as text."""


def make_model(folder: Path, seed: int) -> Path:
    """Make the model of the example, unless it is there; return its folder."""
    out = folder / f"lake-{seed}"
    command = [sys.executable, "examples/agents.py", "lake", "--out", str(out)]
    subprocess.run([*command, "--seed", str(seed)], cwd=ROOT, check=True)
    return out / "model"


def run(preset: str, seed: int, steps: int, folder: Path) -> tuple[float, float]:
    """Train with a preset; return the success before and after. A finished run is not repeated."""
    model, output = make_model(folder, seed), folder / f"{preset}-{seed}"
    settings = [
        f"algorithm.preset={preset}",
        f"seed={seed}",
        f"max_steps={steps}",
        f"validation.every={steps}",
        f"model.path={model}",
        f"output_dir={output}",
        "checkpoint.every=null",
        "checkpoint.export_hf=false",
        *OTHER_SETTINGS.get(preset, ([], ""))[0],
    ]
    if not (output / "summary.json").exists():
        command = [sys.executable, "-m", "roll.cli", "run", "examples/agentic_frozen_lake/run.yaml"]
        subprocess.run([*command, *settings], cwd=ROOT, check=True)
    found = [each[METRIC] for each in read_records(output / "metrics.jsonl") if METRIC in each]
    return found[0], found[-1]


def table(found: dict[str, Sequence[tuple[float, float]]]) -> tuple[str, bool]:
    """Return a table in Markdown, with one row per preset, and whether all presets learned."""
    rows = ["| preset | before | after, each seed | other settings |", "|---|---|---|---|"]
    for preset, pairs in found.items():
        before = statistics.fmean(pair[0] for pair in pairs)
        after = ", ".join(f"{pair[1]:.2f}" for pair in pairs)
        told = OTHER_SETTINGS.get(preset, ([], ""))[1]
        rows.append(f"| `{preset}` | {before:.2f} | {after} | {told} |")
    lifts = [after - before for pairs in found.values() for before, after in pairs]
    return "\n".join(rows), min(lifts) >= LIFT


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--presets", default="starpo,gigpo,turn_ppo,rloo,reinforce_pp")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/agents_learn")
    args = parser.parse_args()
    folder = args.out.absolute()
    found = {
        preset: [run(preset, seed, args.steps, folder) for seed in range(args.seeds)]
        for preset in args.presets.split(",")
    }
    text, learned = table(found)
    print(text)
    sys.exit(0 if learned else 1)


if __name__ == "__main__":
    main()
