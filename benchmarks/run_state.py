"""How long it takes to write `state.json`, and how long other threads wait meanwhile.

A state with as many waiting tokens as `--tokens` says, in groups of 8 samples of `--length` tokens
each, as a checkpoint of a run with generation ahead of training has it. It is written in three
ways: as checkpoints write it (`plain`), and by the standard library's encoders with indentation
(`indented`, written in Python) and without (`whole`, written in C, in one call).

    python benchmarks/run_state.py [--tokens 1000000,25000000] [--length 2000] [--ways plain,whole]

Beside the seconds and megabytes of the file: the longest time for which another thread of the
process, which wants to run every millisecond, as the event loop does, could not. 25 M tokens take
several gigabytes of memory.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # to be run by its path, too

from roll.core.types import Completion, FinishReason, Prompt, Sample
from roll.output_dir.plain_json import write_plain
from roll.rollout.serialization import to_json
from roll.rollout.types import Group, ScoredSample

SIBLINGS = 8
TICK_S = 0.001
State = dict[str, Any]


def group(number: int, length: int, rng: random.Random) -> Group:
    """Siblings with random tokens and log-probs, of one version."""
    prompt = Prompt(f"made:{number}", (1, 2, 3), "three", "", "")
    samples = []
    for sibling in range(SIBLINGS):
        completion = Completion(
            tuple(rng.randrange(150_000) for _ in range(length)),
            tuple(-rng.random() for _ in range(length)),
            (number,) * length,
            FinishReason.STOP,
        )
        sample = Sample(f"{number}:{sibling}", str(number), prompt, completion, "a" * 4 * length)
        samples.append(ScoredSample(sample, 1.0, {}, {}))
    return Group(prompt, tuple(samples), number)


def state(tokens: int, length: int) -> State:
    rng = random.Random(0)
    groups = [group(i, length, rng) for i in range(max(1, tokens // (SIBLINGS * length)))]
    waiting = [{"version": i, "group": to_json(each)} for i, each in enumerate(groups)]
    return {"step": 100, "sampler": {"scheduler": {"running": [], "waiting": waiting}}}


def indented(path: Path, value: State) -> None:
    """With the encoder that is written in Python."""
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def whole(path: Path, value: State) -> None:
    """With the encoder that is written in C, in one call."""
    path.write_text(json.dumps(value), encoding="utf-8")


WAYS: dict[str, Callable[[Path, State], None]] = {
    "plain": write_plain,
    "indented": indented,
    "whole": whole,
}


class Ticks:
    """A thread that wants to run every `TICK_S`, and the longest time that it was late."""

    def __init__(self) -> None:
        self.late_s = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Ticks:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _tick(self) -> None:
        last = time.perf_counter()
        while not self._end.wait(TICK_S):
            now = time.perf_counter()
            self.late_s = max(self.late_s, now - last - TICK_S)
            last = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="1000000,25000000")
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--ways", default=",".join(WAYS))
    arguments = parser.parse_args()
    print("| waiting tokens | written | seconds | MB | longest wait of another thread, ms |")
    print("|---|---|---|---|---|")
    for tokens in map(int, arguments.tokens.split(",")):
        value = state(tokens, arguments.length)
        for way in arguments.ways.split(","):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "state.json"
                begun = time.perf_counter()
                with Ticks() as ticks:
                    WAYS[way](path, value)
                took_s = time.perf_counter() - begun
                assert json.loads(path.read_text(encoding="utf-8"))["step"] == value["step"]
                size_mb = path.stat().st_size / 1e6
            print(
                f"| {tokens:,} | {way} | {took_s:.2f} | {size_mb:.0f} | {ticks.late_s * 1e3:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
