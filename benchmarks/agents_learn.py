"""Runs the examples of agents and of pictures with several seeds, as their pages say, each seed
with a model of its own.

The script writes a table: the scores of validation at the start and at the end of each run, the
share of malformed calls in the first and the last steps, the CPU time of all processes, and the
largest gap between a log-prob of the engine and that of the trainer. It fails if a
run begins above or ends below what its row of `EXAMPLES` demands, or if that gap is above `AGREES`.

    python benchmarks/agents_learn.py [--examples tools,frameworks] [--seeds 3]
        [--out outputs/agents_learn]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that the script also runs by its path

from benchmarks.process_meter import CpuBooks, adopt_orphans  # noqa: E402
from roll.output_dir.trackers import read_records  # noqa: E402

POLL_S = 0.2
APART, AGREES = "mismatch/logprob_abs_max", 1e-4
ENDS = 3
"""Steps that are averaged at the start and at the end for metrics of training."""


@dataclass(frozen=True)
class Example:
    """Example, and what its runs must show."""

    script: str
    """Script that makes model and tasks."""
    outputs: str
    """Folder of its files, as the run files name it."""
    scores: Mapping[str, tuple[float, float]]
    """Validation set -> largest score before the run, and smallest one after it."""
    files: tuple[str, ...] = ("run",)
    """Names of the run files."""
    falls: tuple[str, ...] = ()
    """Metrics of training that must fall."""
    pipeline: str = "agentic"
    """What the name of its folder begins with."""


_TASK = (0.35, 0.9)
_TOOLS = ("products", "rooms", "phones")
EXAMPLES = {
    "frozen_lake": Example(
        "lake", "outputs/lake", {"held_out": (0.2, 0.9)}, files=("run", "gigpo")
    ),
    "sokoban": Example("sokoban", "outputs/sokoban", {"held_out": (0.1, 0.6)}),
    "tools": Example(
        "tools",
        "outputs/tools",
        dict.fromkeys(_TOOLS, _TASK),
        falls=tuple(f"reward/{each}/malformed_rate" for each in _TOOLS),
    ),
    "frameworks": Example(
        "tools",
        "outputs/tools",
        dict.fromkeys(("openai_agents", "smolagents"), _TASK),
        falls=("reward/openai_agents/malformed_rate", "reward/smolagents/failed"),
    ),
    "self_play": Example("tic_tac_toe", "outputs/tic_tac_toe", {"perfect": (-0.6, -0.1)}),
    "vision_quickstart": Example(
        "counting",
        "outputs/counting",
        {"held_out": (0.5, 0.9)},
        files=("run", "run_hf"),
        pipeline="rlvr",
    ),
}
"""Name of the example's folder, without `pipeline` -> the example."""


@dataclass(frozen=True)
class Found:
    """What a run showed."""

    pairs: Mapping[str, tuple[float, float]]
    """Metric -> its value at the start and at the end."""
    apart: float
    """Largest difference of a log-prob between engine and trainer in any step."""
    making_s: float
    """CPU time of the script, in seconds."""
    running_s: float
    """CPU time of the run, in seconds."""


def cpu_s(command: Sequence[str], done: Path) -> float:
    """Run a command, unless it has been done; return the CPU seconds of all its processes.

    Args:
        done: file that keeps them.
    """
    if not done.exists():
        books = CpuBooks()
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT)
        spent_s = 0.0
        while process.poll() is None:
            time.sleep(POLL_S)
            spent_s = books.read_s()
        if process.returncode:
            raise SystemExit(process.returncode)  # the command has already printed its error
        done.write_text(json.dumps(spent_s))
    return float(json.loads(done.read_text()))


def moved(value: Any, old: str, new: str, key: str = "") -> Iterator[str]:
    """Yield settings that move the files of a run: one for each text that begins with `old`."""
    if isinstance(value, str) and value.startswith(f"{old}/"):
        yield f"{key}={new}{value.removeprefix(old)}"
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in items:
            yield from moved(each, old, new, f"{key}.{name}" if key else str(name))


def run(name: str, file: str, seed: int, folder: Path) -> Found:
    """Make the model of a seed, and train it with a run file of the example."""
    example = EXAMPLES[name]
    made, output = folder / f"{example.script}-{seed}", folder / f"{name}-{file}-{seed}"
    make = [f"examples/{example.script}.py", "--out", str(made), "--seed", str(seed)]
    making_s = cpu_s(make, folder / f"{made.name}.cpu")
    path = ROOT / f"examples/{example.pipeline}_{name}/{file}.yaml"
    files = yaml.safe_load((path.parent / "run.yaml").read_text(encoding="utf-8"))
    settings = [*moved(files, example.outputs, str(made)), f"seed={seed}", f"output_dir={output}"]
    running_s = cpu_s(
        ["-m", "roll.cli", "run", str(path), *settings], folder / f"{output.name}.cpu"
    )
    records = read_records(output / "metrics.jsonl")
    pairs = {each: ends(records, f"val/{each}/mean@1", 1) for each in example.scores}
    pairs |= {each: ends(records, each, ENDS) for each in example.falls}
    apart = max(record[APART] for record in records if APART in record)
    return Found(pairs, apart, making_s, running_s)


def ends(records: Sequence[Mapping[str, Any]], metric: str, count: int) -> tuple[float, float]:
    """Return the means of the first and of the last values of a metric."""
    found = [record[metric] for record in records if metric in record]
    return statistics.fmean(found[:count]), statistics.fmean(found[-count:])


def rows(name: str, file: str, found: Sequence[Found]) -> Iterator[str]:
    """Yield the rows of the table for a run file."""
    making_s, running_s = max(e.making_s for e in found), max(e.running_s for e in found)
    cost = f"{making_s:.0f} s, {running_s:.0f} s | {max(e.apart for e in found):.0e}"
    for metric in found[0].pairs:
        pairs = ", ".join("{:.2f} to {:.2f}".format(*each.pairs[metric]) for each in found)
        yield f"| `{EXAMPLES[name].pipeline}_{name}/{file}.yaml` | {metric} | {pairs} | {cost} |"


def learned(example: Example, found: Found) -> bool:
    """Return whether a run shows what the example demands."""
    scores = all(
        found.pairs[each][0] <= start and found.pairs[each][1] >= end
        for each, (start, end) in example.scores.items()
    )
    falls = all(found.pairs[each][1] < found.pairs[each][0] for each in example.falls)
    return scores and falls and found.apart <= AGREES


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", default=",".join(EXAMPLES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/agents_learn")
    args = parser.parse_args()
    adopt_orphans()
    folder = args.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    titles = ("run file", "metric", "start to end, each seed", "CPU of model and run", "gap")
    table = [f"| {' | '.join(titles)} |"]
    table += ["|---|---|---|---|---|"]
    good = True
    for name in args.examples.split(","):
        for file in EXAMPLES[name].files:
            found = [run(name, file, seed, folder) for seed in range(args.seeds)]
            table += rows(name, file, found)
            good &= all(learned(EXAMPLES[name], each) for each in found)
    print("\n".join(table))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
