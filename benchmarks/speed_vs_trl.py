"""Comparison of training speed with TRL: SFT, DPO and reward models, on two cores, in turns.

Both sides train the Qwen2 of `vs_trl.py` (4 layers, hidden size 256, float32, random weights) by
AdamW with a learning rate of 1e-6, on 32 sequences per optimizer step, in the same order. There are
two kinds of data:

- equal: every sequence has 256 tokens;
- log-normal: exp(N(log 96, 1)) tokens, at least 16 and at most 1024.

TRL runs with its defaults: batches of 8 sequences (4 of them accumulated), padded to the longest
one. One setting differs: nothing is recomputed in the backward pass, which is faster. Our side
packs micro-batches of 4096 tokens, and keeps the gathered weights between them.

Speed is in tokens of the data per second; padding does not count. Times are measured from one
record of a step to the next; results are medians over all rounds, without the first two steps of
each. TRL has a separate environment, which the first run makes. The exit code is 0 if the goals are
met: not slower with equal lengths, twice as fast with log-normal ones.

    python benchmarks/speed_vs_trl.py [--steps 20] [--rounds 2] [--only sft] [--lengths equal]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.process_meter import adopt_orphans, run_measured, two_cores
from benchmarks.vs_trl import (
    CASES,
    HERE,
    LETTERS,
    ROOT,
    RUN_TIMEOUT_S,
    make_model,
    make_trl_python,
)

SEQUENCES = 32
SKIP = 2
PROMPT = 8
GOALS = {"equal": 1.0, "log-normal": 2.0}


def lengths(kind: str, count: int, rng: random.Random) -> list[int]:
    """Return the number of tokens of each sequence."""
    if kind == "equal":
        return [256] * count
    drawn = (math.exp(rng.gauss(math.log(96), 1)) for _ in range(count))
    return [min(1024, max(16, round(length))) for length in drawn]


def make_rows(path: Path, pipeline: str, kind: str, steps: int) -> list[int]:
    """Write the rows of all steps to `path`; return the number of tokens of each step."""
    rng = random.Random(0)
    sizes = lengths(kind, SEQUENCES * steps, rng)
    keys = ["completion"] if pipeline == "sft" else ["chosen", "rejected"]
    rows, left = [], iter(sizes)
    for _ in range(len(sizes) // len(keys)):
        row = {"prompt": "".join(rng.choices(LETTERS, k=PROMPT))}
        # The tokenizer adds one token to each sequence, the end token.
        row |= {key: "".join(rng.choices(LETTERS, k=next(left) - PROMPT - 1)) for key in keys}
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [sum(sizes[i : i + SEQUENCES]) for i in range(0, len(sizes), SEQUENCES)]


def ours(
    folder: Path, model: Path, rows: Path, pipeline: str, steps: int
) -> tuple[list[str], Path]:
    """Write our run file; return our command, and the file that gets one line per step."""
    source: dict[str, Any] = {"path": str(rows)}
    if pipeline == "sft":
        source["columns"] = {"messages": None, "prompt": "prompt", "completion": "completion"}
    run: dict[str, Any] = {
        "pipeline": pipeline,
        "output_dir": str(folder / "run"),
        "max_steps": steps,
        "model": {"path": str(model), "dtype": "float32"},
        "pools": {"all": "0"},
        "actor_train": {
            "pool": "all",
            "packing": True,
            "max_tokens_per_microbatch": 4096,
            "strategy": {"kind": "fsdp2", "reshard_after_forward": False},
            "optimizer": {"lr": 1e-6, "betas": [0.9, 0.999]},
        },
        "data": {
            "sources": [source],
            "rows_per_step": SEQUENCES if pipeline == "sft" else SEQUENCES // 2,
            "max_tokens": 1024,
            "chat_template": False,
            "shuffle": False,
        },
        "track": {"tensorboard": False},
        "checkpoint": {"export_hf": False},
    }
    if pipeline == "dpo":
        run["reference"] = {"pool": "all", "packing": True, "max_tokens_per_microbatch": 4096}
    file = folder / "run.json"
    file.write_text(json.dumps(run))
    command = [sys.executable, "-m", "roll.cli", "run", str(file)]
    return command, folder / "run" / "metrics.jsonl"


def theirs(
    folder: Path, model: Path, rows: Path, pipeline: str, steps: int, python: Path
) -> tuple[list[str], Path]:
    """Write TRL's job file; return TRL's command, and the file that gets one line per step."""
    job = {
        "pipeline": pipeline,
        "model": str(model),
        "rows": str(rows),
        "steps_file": str(folder / "steps.jsonl"),
        "settings": {
            "output_dir": str(folder / "trl"),
            "max_steps": steps,
            "per_device_train_batch_size": 8 if pipeline == "sft" else 4,  # a pair is two sequences
            "gradient_accumulation_steps": 4,
            "train_sampling_strategy": "sequential",
            "learning_rate": 1e-6,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": False,
            "max_length": None,
            "use_cpu": True,
            "bf16": False,
            "dataloader_pin_memory": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        },
    }
    (folder / "job.json").write_text(json.dumps(job))
    command = [str(python), str(HERE / "speed_vs_trl_job.py"), str(folder / "job.json")]
    return command, folder / "steps.jsonl"


def measure(command: list[str], steps_file: Path, log: Path, tokens: list[int]) -> list[float]:
    """Run a command; return the tokens per second of each step except the first two."""
    env = os.environ | {
        "OMP_NUM_THREADS": "2",
        "GOMP_SPINCOUNT": "300000",
        "PYTHONPATH": str(ROOT) if "roll.cli" in command else "",
        "HF_HUB_OFFLINE": "1",
    }
    measured = run_measured(
        command, steps_file, env=env, log=log, timeout_s=RUN_TIMEOUT_S, only_times=True
    )
    spans = measured.step_s[SKIP - 1 :]  # `step_s` has no entry for the first step
    return [count / span for count, span in zip(tokens[SKIP:], spans, strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2, help="of both sides, in turn")
    parser.add_argument("--only", choices=["sft", "dpo", "reward_model"])
    parser.add_argument("--lengths", choices=GOALS, help="only these")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "speed_vs_trl")
    args = parser.parse_args()
    two_cores()
    adopt_orphans()
    out: Path = args.out.absolute()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    model, python = (
        make_model(out / "model", CASES["fixed"]),
        make_trl_python(out.parent / "trl-venv"),
    )
    print(
        "| | lengths | TRL 1.16.0, tokens/s | roll, tokens/s | | goal |\n|---|---|---|---|---|---|"
    )
    met = True
    for pipeline in [args.only] if args.only else ["sft", "dpo", "reward_model"]:
        for kind in [args.lengths] if args.lengths else GOALS:
            goal = GOALS[kind]
            rates: dict[str, list[float]] = {"trl": [], "roll": []}
            rows = out / f"{pipeline}-{kind}.jsonl"
            tokens = make_rows(rows, pipeline, kind, args.steps)
            for number in range(args.rounds):
                for side, found in rates.items():
                    folder = out / f"{pipeline}-{kind}-{side}-{number}"
                    folder.mkdir()
                    if side == "trl":
                        started = theirs(folder, model, rows, pipeline, args.steps, python)
                    else:
                        started = ours(folder, model, rows, pipeline, args.steps)
                    found += measure(*started, folder / "log.txt", tokens)
            trl, roll = (statistics.median(found) for found in rates.values())
            met &= roll / trl >= goal
            print(
                f"| {pipeline} | {kind} | {trl:.0f} | {roll:.0f} | {roll / trl:.2f} x | "
                f"{goal:g} x |",
                flush=True,
            )
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
