"""Benchmark of the time to write `state.json`, and of the time that other threads wait meanwhile.

The state is that of a run with generation ahead of training: `--tokens` tokens in waiting groups of
8 samples, each of `--length` tokens. The file is written in three ways: as checkpoints write it
(`plain`), by the standard library's encoder with indentation (`indented`, implemented in Python),
and by the one without (`whole`, implemented in C, in one call).

    python benchmarks/run_state.py [--tokens 1000000,25000000] [--length 2000] [--ways plain,whole]

The table shows the seconds, the size of the file, and the longest wait of another thread of the
process. That thread is due every millisecond, like the event loop of a run. 25 M tokens need
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

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from roll.core.types import Completion, FinishReason, Prompt, Sample
from roll.output_dir.plain_json import write_plain
from roll.rollout.serialization import to_json
from roll.rollout.types import Group, ScoredSample

SIBLINGS = 8
TICK_S = 0.001
State = dict[str, Any]


def group(number: int, length: int, rng: random.Random) -> Group:
    """Return a scored group with random tokens and log-probs, all of weight version `number`."""
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
    """Write the state with indentation; the encoder for this is implemented in Python."""
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def whole(path: Path, value: State) -> None:
    """Write the state in one call of the encoder that is implemented in C."""
    path.write_text(json.dumps(value), encoding="utf-8")


WAYS: dict[str, Callable[[Path, State], None]] = {
    "plain": write_plain,
    "indented": indented,
    "whole": whole,
}


class Ticks:
    """Thread that is due every `TICK_S` seconds, and measures how late it runs."""

    def __init__(self) -> None:
        self.late_s = 0.0
        """Longest delay of the thread, in seconds."""
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
