"""Benchmark of the alarms of `roll report`: twelve real runs that are ill on purpose, ten healthy.

Each run takes seconds, in this process. The healthy ones are runs of the same task with other
algorithms and seeds. The script prints a table, and fails if a run raises other alarms than those
that name its illness.

    python benchmarks/sick_runs.py [--only NAME] [--out outputs/sick_runs]
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.sick.cases import SICK, WELL, Case
from benchmarks.sick.running import Outcome, run_case
from benchmarks.sick.task import make_base


def row(case: Case, outcome: Outcome) -> str:
    """Return the line of a run in the table."""
    said = "<br>".join(alarm.text for alarm in outcome.alarms) or "no alarm"
    names = ", ".join(f"`{alarm.rule}`" for alarm in outcome.alarms)
    return f"| {case.name} | {outcome.steps} | {names} | {said} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="part of the names of the runs to do")
    parser.add_argument("--out", type=Path, default=Path("outputs/sick_runs"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder: Path = args.out.absolute()
    make_base(folder / "model")
    wrong = []
    print("| run | steps | alarms | what they say |\n|---|---|---|---|")
    for case in (*SICK, *WELL):
        if args.only not in case.name:
            continue
        own = folder / case.name.replace(" ", "_")
        shutil.rmtree(own, ignore_errors=True)
        outcome = run_case(case, own, folder / "model")
        print(row(case, outcome), flush=True)
        if outcome.error or [alarm.rule for alarm in outcome.alarms] != list(case.alarms):
            wrong.append(f"{case.name}: expected {case.alarms}; {outcome.error or ''}")
    for line in wrong:
        print(line, file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
