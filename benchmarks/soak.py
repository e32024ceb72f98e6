"""Soak test: a long run of the quickstart in which replicas are killed, and what grows meanwhile.

The script runs `examples/rlvr_quickstart` with two replicas, a staleness of two steps and a
checkpoint every 200 steps. Every two minutes it sends SIGKILL to the worker of a random replica, or
to a process below the worker (the core of its engine). Meanwhile it measures every process, and
writes the measurements to `looks.jsonl` in the folder of `--out`.

For every process it prints the memory (a Theil-Sen line through the measurements after the first
tenth of the steps), and open files and threads at the beginning and at the end of these; also
shared memory, and the step time in the first and in the last tenth. It checks that every sample of
every step was there exactly once, is complete, and is not older than allowed. Engines that are
killed every few minutes live too short for a line; `--kill-until` lets the last ones live to the
end of the run.

    python benchmarks/soak.py [--steps 4500] [--kill-every 120] [--kill-until 3000]
        [--prompts 8 --siblings 8] [--out outputs/soak] [key=value ...]

The exit code is 1 if the memory of any process grows by a megabyte or more in 1,000 steps, if steps
of the last tenth take more than 5 % longer than those of the first, or if a sample is missing or
wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.process_meter import adopt_orphans, last_lines
from benchmarks.soak_books import Books, Growth
from roll.output_dir.trackers import read_records
from roll.platform.processes import descendants

ROOT = Path(__file__).parents[1]
RUN = "examples/rlvr_quickstart/run.yaml"
NEW_TOKENS = 8
"""Largest length of a response of the quickstart, in tokens."""
STALENESS = 2
MOST_MB_PER_1000_STEPS = 1.0
MOST_SLOWER = 1.05
LOOK_S = 5.0


@dataclass
class Samples:
    """Check of the samples of every step. It reads the sample files that the run writes, and
    deletes them."""

    folder: Path
    prompts: int
    """Number of prompts per step."""
    siblings: int
    """Number of samples per prompt."""
    steps: set[int] = field(default_factory=set)
    ids: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    def take(self, done: int) -> None:
        """Read and check the sample files of all steps below `done`."""
        for path in sorted(self.folder.glob("step_*.jsonl")):
            step = int(path.stem.removeprefix("step_"))
            if step < done:
                self._check(step, [json.loads(line) for line in path.read_text().splitlines()])
                path.unlink()

    def _check(self, step: int, rows: Sequence[dict[str, object]]) -> None:
        ids = {str(row["id"]) for row in rows}
        groups = {name.rpartition("/")[0] for name in ids}
        if step in self.steps:
            self.faults.append(f"step {step} was made twice")
        all_there = len(rows) == len(ids) == self.prompts * self.siblings
        if not all_there or len(groups) != self.prompts:
            self.faults.append(f"step {step}: {len(rows)} samples, {len(ids)} ids, {groups}")
        if again := groups & self.ids:
            self.faults.append(f"step {step} trains again on {sorted(again)[:3]}")
        for row in rows:
            versions, tokens = row["weight_version"], row["response_tokens"]
            assert isinstance(versions, list)
            assert isinstance(tokens, int)
            if not (0 < tokens <= NEW_TOKENS and step - STALENESS <= versions[0] <= versions[1]):
                self.faults.append(f"step {step}: {row}")
        self.steps.add(step)
        self.ids = {name for name in self.ids | groups if step - int(name.split("/")[0]) <= 10}


def command(args: argparse.Namespace) -> list[str]:
    """Return the command of the run, with the settings of the soak test."""
    return [
        sys.executable, "-m", "roll.cli", "run", RUN,
        f"output_dir={args.out / 'run'}",
        f"max_steps={args.steps}",
        "pools.all=0-1",
        f"rollout.max_staleness={STALENESS}",
        "algorithm.correction={weight: {level: token, upper: 2.0}}",
        "rollout.health.max_restarts=1000000",
        f"checkpoint.every={args.checkpoint_every}",
        "validation.every=200",
        "track.rollouts_every=1",
        f"track.rollouts_samples={args.prompts * args.siblings}",
        f"data.prompts_per_step={args.prompts}",
        f"data.samples_per_prompt={args.siblings}",
        *args.overrides,
    ]  # fmt: skip


def kill_one(dice: random.Random) -> str:
    """Send SIGKILL to the worker of a random replica, or to a process below it; return a text that
    names the killed process."""
    titles = {pid: _title(pid) for pid in descendants(os.getpid())}
    workers = [pid for pid, title in titles.items() if "ray::actor_infer[" in title]
    if not workers:
        return "nobody: no replica lives"
    worker = dice.choice(workers)
    victim = dice.choice([worker, *descendants(worker)])
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    return f"{titles[worker]}" + ("" if victim == worker else f", by {titles.get(victim, '?')}")


def _title(pid: int) -> str:
    with suppress(OSError):
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return text.decode(errors="replace").strip()[:60]
    return ""


def soak(args: argparse.Namespace) -> tuple[Books, Samples, list[str]]:
    """Run to the end, with kills and measurements; the output of the run goes to `run.log`.

    Returns:
        The measurements, the checked samples, and one text per kill.
    """
    adopt_orphans()
    dice, books = random.Random(args.seed), Books(args.out / "looks.jsonl")
    records, log = args.out / "run" / "metrics.jsonl", args.out / "run.log"
    samples, kills = Samples(args.out / "run" / "rollouts", args.prompts, args.siblings), []
    until = args.steps if args.kill_until is None else args.kill_until
    with log.open("w") as output:
        run = subprocess.Popen(command(args), cwd=ROOT, stdout=output, stderr=output)
        kill_at = None
        try:
            while run.poll() is None:
                time.sleep(LOOK_S)
                done = records.read_bytes().count(b"\n") if records.exists() else 0
                books.look(done)
                samples.take(done)
                now_s = time.monotonic()
                if done and kill_at is None:
                    kill_at = now_s + args.kill_every
                elif kill_at is not None and now_s >= kill_at and done < until:
                    kills.append(f"step {done}: {kill_one(dice)}")
                    print(f"killed at {kills[-1]}", flush=True)
                    kill_at = now_s + args.kill_every
        finally:
            if run.poll() is None:
                for pid in descendants(os.getpid()):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    if run.returncode:
        raise SystemExit(f"the run ended with exit code {run.returncode}:\n{last_lines(log)}")
    samples.take(args.steps)
    return books, samples, kills


def step_times_s(path: Path, steps: int) -> tuple[float, float]:
    """Return the median step time in seconds of the first tenth, without the first ten steps, and
    of the last tenth.

    Args:
        path: `metrics.jsonl` of the run.
        steps: number of steps of the run.
    """
    records = [record for record in read_records(path) if "time/step_s" in record]
    tenth = max(1, steps // 10)
    first = [record["time/step_s"] for record in records if record["step"] < tenth]
    last = [record["time/step_s"] for record in records if record["step"] >= steps - tenth]
    return median(first[10:] or first), median(last)


def row(growth: Growth) -> str:
    cells = [
        growth.name,
        f"{growth.lives}",
        *(f"{mb:.1f}" for mb in growth.memory_mb),
        f"{growth.mb_per_1000_steps:+.2f}",
        *(f"{count:.0f}" for count in growth.files + growth.threads),
    ]
    return f"| {' | '.join(cells)} |"


def report(args: argparse.Namespace, books: Books, samples: Samples, kills: list[str]) -> list[str]:
    """Print all results; return one text for each thing that is wrong."""
    growths = [*books.growths(args.steps), books.shared(args.steps)]
    print("\n| process | lives | MB | MB at the end | MB per 1,000 steps | files | at the end "
          "| threads | at the end |\n|---|" + "---:|" * 8)  # fmt: skip
    for growth in growths:
        print(row(growth))
    first_s, last_s = step_times_s(args.out / "run" / "metrics.jsonl", args.steps)
    print(f"\nstep time: {first_s:.3f} s in the first tenth, {last_s:.3f} s in the last")
    print(f"replicas killed: {len(kills)}; steps with all {args.prompts * args.siblings} samples: "
          f"{len(samples.steps)} of {args.steps}")  # fmt: skip
    wrong = list(samples.faults)
    if missing := set(range(args.steps)) - samples.steps:
        wrong.append(f"no samples of the steps {sorted(missing)[:10]}")
    wrong += [
        f"{growth.name} grows by {growth.mb_per_1000_steps:.2f} MB in 1,000 steps"
        for growth in growths
        if growth.mb_per_1000_steps >= MOST_MB_PER_1000_STEPS
    ]
    if last_s > MOST_SLOWER * first_s:
        wrong.append(f"steps take {last_s / first_s:.2f} times as long as in the beginning")
    return wrong


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("overrides", nargs="*", help="key=value of the run")
    add("--steps", type=int, default=3000)
    add("--kill-every", type=float, default=120, help="seconds between two kills")
    add("--kill-until", type=int, help="step of the last kill at the latest (default: no end)")
    add("--prompts", type=int, default=32, help="prompts per step")
    add("--siblings", type=int, default=16, help="samples per prompt")
    add("--checkpoint-every", type=int, default=200, help="steps")
    add("--seed", type=int, default=0, help="of the kills")
    add("--out", type=Path, default=Path("outputs/soak"), help="is emptied first")
    args = parser.parse_args(arguments)
    args.out = args.out.absolute()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    if not (ROOT / "outputs/quickstart/model").exists():
        subprocess.run([sys.executable, "examples/sorting.py", "quickstart"], cwd=ROOT, check=True)
    wrong = report(args, *soak(args))
    print(
        "\n".join(["", *(f"NOT AS IT SHOULD BE: {fault}" for fault in wrong)] if wrong else ["ok"])
    )
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
