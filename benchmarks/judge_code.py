"""Counts wrong verdicts of the reward `code` on right programs, mutants and attacks.

With `--busy` so many other processes compute meanwhile: the verdicts must be the same.

    python benchmarks/judge_code.py [--problems 300] [--seed 0] [--busy 4]
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.judging.problems import Problem, problems
from roll.rewards.code.reward import code_reward
from roll.rewards.code.running.sandboxes import LimitSettings, SandboxSettings
from roll.rewards.contract import sample_of

LIMITS = LimitSettings(cpu_s=1.0, wall_s=600.0)


async def wrong_verdicts(number: int, seed: int, sandbox: SandboxSettings) -> tuple[int, list[str]]:
    """Return how many programs were judged, and the names of those that were judged wrong."""
    gate = asyncio.Semaphore(8)

    async def judge(problem: Problem, kind: str, program: str) -> str:
        async with gate:
            sample = sample_of(program, answer="", extra=problem.row)
            reward = await code_reward(sample, limits=LIMITS, stop=True, sandbox=sandbox)
        return "" if reward.score == float(kind == "right") else f"{problem.name} {kind}"

    found = await asyncio.gather(
        *(
            judge(problem, kind, program)
            for problem in problems(number, seed)
            for kind, program in {"right": problem.right, **problem.mutants}.items()
        )
    )
    return len(found), [each for each in found if each]


def main() -> None:
    """Judge all programs and print what was judged wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--busy", type=int, default=0)
    chosen = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(chosen.busy)]
    began = time.monotonic()
    try:
        judged, wrong = asyncio.run(wrong_verdicts(chosen.problems, chosen.seed, SandboxSettings()))
    finally:
        for each in busy:
            each.kill()
    kinds = collections.Counter(each.split()[1] for each in wrong)
    print(
        f"{judged} programs in {time.monotonic() - began:.0f} s, {len(wrong)} wrong: {dict(kinds)}"
    )
    print("\n".join(wrong[:50]))


if __name__ == "__main__":
    main()
