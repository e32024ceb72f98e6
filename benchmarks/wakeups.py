"""What a run costs other work on its cores while it waits: wake-ups and CPU time of its processes.

A run whose reward sleeps does nothing but wait. Meanwhile the script counts how often the threads
of each of its processes wake, and times the steps of a plain PyTorch loop (the model of 3.9 M
parameters of vs_trl.py, 8 x 8 rows of 136 tokens, two threads) before, beside and after the run.

    python benchmarks/wakeups.py [--steps 9] [--seconds 5]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.process_meter import last_lines, name_of, spent_s, two_cores
from benchmarks.vs_trl import CASES, Bench, make_model, make_prompts
from roll.platform.processes import descendants

START_S = 300.0
ROWS, WIDTH, PIECES = 8, 136, 8
REWARD = """
import pathlib, time

def sleep(sample):
    pathlib.Path(__file__).with_name("waits").touch()
    time.sleep(3600)
"""


class PlainLoop:
    """Optimizer steps of a causal LM, without anything around them."""

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6)

    def step_s(self, steps: int) -> float:
        """Return the median time of a step, in seconds; the first two are not counted."""
        times = []
        for _ in range(steps + 2):
            begun = time.perf_counter()
            for _ in range(PIECES):
                tokens = torch.randint(2, 64, (ROWS, WIDTH))
                self._model(tokens, labels=tokens, use_cache=False).loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            times.append(time.perf_counter() - begun)
        return statistics.median(times[2:])


def switches(pid: int) -> int:
    """Return how often the threads of a process have been put to sleep or interrupted."""
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(OSError):  # a thread that has just ended
            lines = status.read_text().splitlines()
            count += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return count


def start_waiting_run(folder: Path) -> subprocess.Popen[bytes]:
    """Start a run; return it once its reward sleeps."""
    (folder / "sleeping.py").write_text(REWARD)
    prompts = make_prompts(folder / "prompts.jsonl")
    bench = Bench(folder, {"fixed": folder / "model"}, prompts, Path(), 1, False)
    file = bench.write_run(CASES["fixed"], folder)
    command = [sys.executable, "-m", "roll.cli", "run", str(file)]
    command += ["rewards.digits.fn=sleeping:sleep", "rewards.digits.timeout_s=3600"]
    log = folder / "log.txt"
    with log.open("w") as output:
        run = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=output,
        )
    end = time.monotonic() + START_S
    while not (folder / "waits").exists():
        if run.poll() is not None or time.monotonic() > end:
            run.kill()
            raise RuntimeError(f"the run does not wait in its reward\n{last_lines(log)}")
        time.sleep(0.5)
    time.sleep(5)  # the last answers
    return run


def show_processes(run: int, seconds: float) -> None:
    """Print wake-ups and CPU time of each process of a run, and of all."""
    pids = [run, *descendants(run)]
    before = {pid: (switches(pid), spent_s(pid)) for pid in pids}
    time.sleep(seconds)
    rows = [
        ((switches(pid) - woken) / seconds, 1e3 * (spent_s(pid) - spent) / seconds, name_of(pid))
        for pid, (woken, spent) in before.items()
    ]
    print("| process | wake-ups per second | CPU, ms per second |\n|---|---|---|")
    for woken, spent, name in sorted(rows, reverse=True):
        if woken >= 1:
            print(f"| {name.strip()[-40:]} | {woken:.0f} | {spent:.1f} |")
    print(f"| all | {sum(row[0] for row in rows):.0f} | {sum(row[1] for row in rows):.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=9, help="of the loop, each time")
    parser.add_argument("--seconds", type=float, default=5.0, help="for which wake-ups are counted")
    args = parser.parse_args()
    two_cores()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        loop = PlainLoop(make_model(folder / "model", CASES["fixed"]))
        times = {"before": loop.step_s(args.steps)}
        run = start_waiting_run(folder)
        try:
            show_processes(run.pid, args.seconds)
            times["beside"] = loop.step_s(args.steps)
        finally:
            for _ in range(2):  # the first lets the step end, which it never does
                run.send_signal(signal.SIGTERM)
                time.sleep(1)
            run.wait(120)
        times["after"] = loop.step_s(args.steps)
    told = ", ".join(f"{when} {taken:.3f} s" for when, taken in times.items())
    print(f"a step of the plain loop: {told}")


if __name__ == "__main__":
    main()
