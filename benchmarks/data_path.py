"""Cost of the way of a step's tokens: from the engines through the driver to the trainers.

Each row of the tables is a run on a Ray of its own. Pipeline, scheduler, fleet, rewards, batch,
scoring and updates are those of a real run, and so are the workers' calls; only engines and
strategies are scripted (`scripted_run.py`): completions are random tokens that are there at once,
scores are zeros. So the seconds are those of the data path alone. A step is GRPO with a reference,
old log-probs and one update. The lengths are log-normal, cut at `--longest`.

* `tokens`: tokens of the responses of a step. `s`: seconds of the step, medians over all steps but
  the first (if there are several), as all numbers but peaks.
* `driver CPU`: CPU time of the driver's process in the step, all threads, with Ray's; in
  nanoseconds per token. `waiting`: what it would have used in the same seconds with nothing to do,
  for heartbeats and in Ray's threads, as measured before the first step while all cores compute:
  that depends on the time that the workers take, not on the tokens. The second table divides the
  CPU time: `receive` is generation and rewards; `assemble` the metrics, the table of samples and
  their advantages; `score` reference and old log-probs; `advantages` what comes after it, if the
  driver has all tokens; `train` the update; `rest` everything else, such as the push of weights.
  The columns after `rest` are shares of all that: `pickle` and `unpickle` turn arguments into bytes
  and bytes into results (not the copies from and to the store).
* `out`, `in`: bytes that the driver serializes for workers and reads from them, per sample, counted
  in Ray's serialization (`driver_meter.Border`). A value that stays in the object store counts as
  its reference. The third table divides them by part.
* `anonymous`, `resident`: peak memory of the driver, without and with the pages that it shares with
  the store. `store`: peak of the objects in Ray's object store, read every 0.1 s; `spilled`: bytes
  that did not fit and went to disk; `left`: objects in the store after the step, two seconds later
  at most. These five are maxima over all steps.

    python benchmarks/data_path.py [--samples 256,1024,4096,16384] [--longest 32768] [--goals]
    python benchmarks/data_path.py --picture 1024 --siblings 8 --samples 256 --longest 256

`--goals` makes the exit code 1 unless the last row needs at most 5 ns of the driver's CPU time per
token, without `waiting`, less than 1,000 bytes per sample (out and in together) pass through the
driver, and nothing is left in the store. `--profile` prints the functions that take most time in
the driver's two threads, which costs time itself.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # as `roll run` leaves it out

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.driver_meter import PARTS, Border, Observer, PartTimers, Peaks, waiting_rate
from benchmarks.scripted_run import Script, ScriptedLauncher, run_config
from benchmarks.simulation.lengths import LogNormal
from roll.commands.preloads import forking
from roll.config.rlvr import RlvrConfig
from roll.config.rlvr_base import RlvrBase
from roll.config.sections.roles import Role
from roll.core.threads.loop_thread import LoopThread
from roll.distributed.cluster import Cluster, Launcher, Placement
from roll.distributed.on_ray.resources import ResourceManager
from roll.pipeline.rlvr import RlvrPipeline
from roll.platform.allocator import keep_freed_memory
from roll.platform.collector import calm_collector

ROOT = Path(__file__).parents[1]
GOAL_NS, GOAL_BYTES = 5.0, 1000.0
"""Largest CPU time of the driver per token, and bytes through the driver per sample."""
SHOWN = 30
"""Number of functions that `--profile` prints for each thread."""


@dataclass(frozen=True)
class Step:
    """Measurements of one step."""

    samples: int
    tokens: int
    seconds: float
    cpu_s: dict[str, float]
    """Part of the step -> CPU time of the driver, in seconds."""
    waiting_s: float
    """CPU time that the driver would have used while it waited, in seconds."""
    pickle_s: float
    unpickle_s: float
    sent: dict[str, int]
    """Part of the step -> bytes that the driver serialized."""
    received: dict[str, int]
    peaks: Peaks

    @property
    def cpu_ns(self) -> float:
        """CPU time of the driver per token, in nanoseconds."""
        return self.per_token(sum(self.cpu_s.values()))

    @property
    def work_ns(self) -> float:
        """CPU time of the driver per token, without that of waiting, in nanoseconds."""
        return self.cpu_ns - self.per_token(self.waiting_s)

    @property
    def bytes_per_sample(self) -> float:
        """Bytes through the driver per sample, in both directions."""
        return (sum(self.sent.values()) + sum(self.received.values())) / self.samples

    def per_token(self, seconds: float) -> float:
        """Return seconds as nanoseconds per token."""
        return seconds * 1e9 / self.tokens


class Profiles:
    """Profiles of the main thread and of the loop's thread, of all steps together."""

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self._main, self._other = cProfile.Profile(), cProfile.Profile()

    @contextmanager
    def taken(self) -> Iterator[None]:
        async def switch(on: bool) -> None:
            self._other.enable() if on else self._other.disable()

        self._loop.run(switch(True))
        self._main.enable()
        yield
        self._main.disable()
        self._loop.run(switch(False))

    def show(self) -> None:
        for name, profile in (("main thread", self._main), ("loop's thread", self._other)):
            print(f"\n{name}, by own time:")
            pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(SHOWN)


@dataclass
class Meters:
    """Everything that measures a step."""

    timers: PartTimers
    border: Border
    observer: Cluster[Observer]
    profiles: Profiles | None
    waiting_rate: float
    """CPU time of the driver in each second of waiting, in seconds."""

    def step(self, pipeline: RlvrPipeline, number: int) -> Step:
        """Do one step of the pipeline and measure it."""
        self.observer.call(Observer.begin, os.getpid())
        with self.border.watched(), self.profiles.taken() if self.profiles else nullcontext():
            self.border.begin()
            begun_s = time.perf_counter()
            self.timers.begin()
            metrics = pipeline.step(number).values_by_name()
            self.timers.end()
            took_s = time.perf_counter() - begun_s
        return Step(
            pipeline.config.samples_per_step,
            int(metrics["rollout/generated_tokens"]),
            took_s,
            dict(self.timers.cpu_s),
            self.waiting_rate * took_s,
            self.border.pickle_cpu_s,
            self.border.unpickle_cpu_s,
            dict(self.border.sent),
            dict(self.border.received),
            self.observer.call(Observer.end),
        )


def measure(
    config: RlvrBase,
    script: Script,
    launcher: Launcher,
    *,
    profile: bool = False,
    idle_s: float = 5.0,
) -> list[Step]:
    """Run the steps of `config` with scripted models; return the measurements of each step.

    Args:
        idle_s: seconds for which the driver is measured while nothing happens.
    """
    config, data = RlvrPipeline.prepare(config)
    watching = Placement(Role.REWARD, pool="train", workers=1, label="observer")
    observer = launcher.start(Observer, watching)
    timers = PartTimers()
    with LoopThread("roll-rollout") as loop:
        profiles = Profiles(loop) if profile else None
        scripted = ScriptedLauncher(launcher, script)
        pipeline = RlvrPipeline(config, scripted, loop, platform="cpu", data=data)
        pipeline.timers = timers
        pipeline.open()
        try:
            pipeline.restore(None, None)
            border = Border(lambda: timers.part)
            meters = Meters(timers, border, observer, profiles, waiting_rate(idle_s))
            steps = [meters.step(pipeline, number) for number in range(config.max_steps)]
        finally:
            pipeline.close()
        if profiles is not None:
            profiles.show()
    return steps


def on_ray(args: argparse.Namespace, samples: int) -> list[Step]:
    """Measure one row on a Ray of its own."""
    script = Script(LogNormal(args.median, args.sigma), args.longest, args.tp)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        config = RlvrConfig.model_validate(
            run_config(
                Path(folder),
                samples=samples,
                siblings=args.siblings,
                prompt_tokens=args.prompt,
                longest=args.longest,
                replicas=args.replicas,
                ranks=args.ranks * args.tp,
                steps=args.steps,
                picture=args.picture,
            )
        )
        server = stack.enter_context(forking(config))
        launcher = stack.enter_context(
            ResourceManager(
                config.cluster, config.pools, python_path=[str(ROOT)], fork_server=server
            )
        )
        return measure(config, script, launcher, profile=args.profile)


def row(steps: Sequence[Step]) -> Step:
    """Return medians over all steps but the first (if there are several), and the largest peaks."""
    later = steps[1:] or steps

    def middle(value: Callable[[Step], float]) -> float:
        return median(value(step) for step in later)

    def middles(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {name: median(each.get(name, 0) for each in parts) for name in PARTS}

    tops = zip(*(astuple(step.peaks) for step in steps), strict=True)
    return Step(
        steps[0].samples,
        round(middle(lambda step: step.tokens)),
        middle(lambda step: step.seconds),
        middles([step.cpu_s for step in later]),
        middle(lambda step: step.waiting_s),
        middle(lambda step: step.pickle_s),
        middle(lambda step: step.unpickle_s),
        middles([step.sent for step in later]),
        middles([step.received for step in later]),
        Peaks(*map(max, tops)),
    )


def markdown(rows: Sequence[Step]) -> str:
    """Return the three tables: totals, CPU time per token by part, bytes per sample by part."""
    totals = [
        [
            f"{one.samples:,}",
            f"{one.tokens:,}",
            f"{one.seconds:.2f}",
            f"{one.cpu_ns:.1f}",
            f"{one.per_token(one.waiting_s):.1f}",
            f"{sum(one.sent.values()) / one.samples:,.0f}",
            f"{sum(one.received.values()) / one.samples:,.0f}",
            *(f"{size / 1e6:,.0f}" for size in astuple(one.peaks)),
        ]
        for one in rows
    ]
    heads = ["samples", "tokens", "s", "driver CPU, ns/token", "waiting, ns/token"]
    heads += ["out, B/sample", "in, B/sample"]
    heads += ["anonymous, MB", "resident, MB", "store, MB", "spilled, MB", "left, MB"]
    shares = [
        [f"{one.samples:,}"]
        + [f"{one.per_token(one.cpu_s[part]):.1f}" for part in PARTS]
        + [f"{one.per_token(s):.1f}" for s in (one.pickle_s, one.unpickle_s)]
        for one in rows
    ]
    sizes = [
        [f"{one.samples:,}"]
        + [
            f"{one.sent[part] / one.samples:,.0f} / {one.received[part] / one.samples:,.0f}"
            for part in PARTS
        ]
        for one in rows
    ]
    return "\n".join(
        [
            _table(heads, totals),
            "Driver's CPU time, ns per token:\n",
            _table(["samples", *PARTS, "pickle", "unpickle"], shares),
            "Bytes per sample, out / in:\n",
            _table(["samples", *PARTS], sizes),
        ]
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    lines.insert(1, "|" + "---:|" * len(heads))
    return "\n".join(lines) + "\n"


def missed(last: Step) -> list[str]:
    """Return one sentence for each goal that the row misses."""
    found = []
    if not any(last.sent.values()):
        found.append("no bytes were counted: Ray's serialization is not where it was")
    if last.work_ns > GOAL_NS:
        found.append(
            f"{last.work_ns:.1f} ns of the driver per token, without waiting; the goal is "
            f"{GOAL_NS:g}"
        )
    if last.peaks.left:
        found.append(f"{last.peaks.left:,} bytes were left in the object store after the step")
    if last.bytes_per_sample >= GOAL_BYTES:
        found.append(
            f"{last.bytes_per_sample:,.0f} bytes per sample pass through the driver; the goal is "
            f"less than {GOAL_BYTES:,.0f}"
        )
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--samples", default="256,1024,4096,16384", help="of a step; one row for each number")
    add("--siblings", type=int, default=16, help="samples of a prompt")
    add("--prompt", type=int, default=256, help="tokens of each prompt")
    add("--picture", type=int, default=0, help="pixels of a side of a picture in each prompt")
    add("--median", type=float, default=1024, help="tokens of a response")
    add("--sigma", type=float, default=1.0, help="of the log-normal lengths")
    add("--longest", type=int, default=32768, help="tokens; longer responses are cut off")
    add("--replicas", type=int, default=4)
    add("--ranks", type=int, default=2, help="data-parallel ranks of policy and reference")
    add("--tp", type=int, default=1, help="ranks that share the rows of a data-parallel rank")
    add("--steps", type=int, default=3)
    add("--profile", action="store_true")
    add("--goals", action="store_true", help="exit with 1 if the last row misses a goal")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    rows = []
    for samples in map(int, args.samples.split(",")):
        rows.append(row(on_ray(args, samples)))
        print(f"{samples} samples: {rows[-1].seconds:.2f} s", file=sys.stderr, flush=True)
    print(markdown(rows))
    if not args.goals:
        return 0
    for sentence in missed(rows[-1]):
        print(sentence)
    return 1 if missed(rows[-1]) else 0


if __name__ == "__main__":
    calm_collector()  # both as in the driver of a real run
    keep_freed_memory()
    sys.exit(main())
