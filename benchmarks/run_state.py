"""Benchmark of the time to write a driver's state, and of the time that other threads wait then.

The state is that of a run with generation ahead of training: `--tokens` tokens in waiting groups of
8 samples, each of `--length` tokens. It is written as checkpoints write it, to `state.json` and
`arrays.bin` (`arrays`), and as one JSON with a number per token (`numbers`), as checkpoints did.

    python benchmarks/run_state.py [--tokens 1000000,25000000] [--length 2000]
        [--ways arrays,numbers]

The table shows the seconds to write and to read, the size of the files, and the longest wait of
another thread of the process while the state is written. That thread is due every millisecond, like
the event loop of a run. `numbers` needs several gigabytes of memory for 25 M tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from array import array
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

import torch

from roll.core.completion import Completion, FinishReason, VersionRuns
from roll.core.types import Prompt, Sample
from roll.output_dir.plain_json import read_arrays, write_plain
from roll.rollout.serialization import to_plain
from roll.rollout.types import Group, ScoredSample

SIBLINGS = 8
TICK_S = 0.001
State = dict[str, Any]


def group(number: int, length: int) -> Group:
    """Return a scored group with random tokens and log-probs, all of weight version `number`."""
    prompt = Prompt(f"made:{number}", (1, 2, 3), "three", "", "")
    samples = []
    for sibling in range(SIBLINGS):
        tokens, logprobs = array("i"), array("f")
        tokens.frombytes(torch.randint(150_000, (length,), dtype=torch.int32).numpy().tobytes())
        logprobs.frombytes((-torch.rand(length)).numpy().tobytes())
        versions = VersionRuns(((number, length),))
        completion = Completion.of(tokens, logprobs, versions, FinishReason.STOP)
        sample = Sample(f"{number}:{sibling}", str(number), prompt, completion, "a" * 4 * length)
        samples.append(ScoredSample(sample, 1.0, {}, {}))
    return Group(prompt, tuple(samples), number)


def state(tokens: int, length: int) -> State:
    groups = [group(i, length) for i in range(max(1, tokens // (SIBLINGS * length)))]
    waiting = [{"version": i, "group": to_plain(each)} for i, each in enumerate(groups)]
    return {"step": 100, "sampler": {"scheduler": {"running": [], "waiting": waiting}}}


def with_numbers(value: Any) -> Any:
    """Return the value with lists of numbers in place of arrays and of runs of versions."""
    if isinstance(value, dict):
        return {
            key: list(VersionRuns(item)) if key == "runs" else with_numbers(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [with_numbers(item) for item in value]
    return value.tolist() if isinstance(value, array) else value


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", default="1000000,25000000")
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--ways", default="arrays,numbers")
    arguments = parser.parse_args()
    print("| waiting tokens | written as | seconds | to read | MB | wait of another thread, ms |")
    print("|---|---|---|---|---|---|")
    for tokens in map(int, arguments.tokens.split(",")):
        for way in arguments.ways.split(","):
            value = state(tokens, arguments.length)
            if way == "numbers":
                value = with_numbers(value)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "state.json"
                with Ticks() as ticks:
                    begun = time.perf_counter()
                    write_plain(path, value)
                    took_s = time.perf_counter() - begun
                begun = time.perf_counter()
                found = read_arrays(json.loads(path.read_text(encoding="utf-8")), path.parent)
                read_s = time.perf_counter() - begun
                assert found["step"] == value["step"]
                size_mb = sum(file.stat().st_size for file in Path(folder).iterdir()) / 1e6
            print(
                f"| {tokens:,} | {way} | {took_s:.2f} | {read_s:.2f} | {size_mb:.0f} "
                f"| {ticks.late_s * 1e3:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
