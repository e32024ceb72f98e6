"""Comparison of agents that learn, with TRL's GRPOTrainer: same model, tasks, tokens and cores, in
turns.

A step plays 256 episodes of frozen lake (4 x 4 fields, not slippery, at most 8 turns): 32 maps, 8
episodes each. A turn of the policy is a call of a tool in the form of Hermes (4 tokens):

    <tool_call>
    {"name": "move", "arguments": {"direction": "left"}}
    </tool_call>

and the environment answers with the map (21 tokens). The model is a Qwen3 of the size of the
example of frozen lake (2 layers, hidden size 128, 0.5 M parameters, float32), or a larger one
(`--layers 4 --hidden 256`: 3.9 M). Its weights are random, but for a few that restrict what it
writes to the four calls. It takes all moves about equally often, those to the goal a bit more.

- TRL plays with its `environment_factory`, for which the lake is a class
  (`agents_vs_trl_job.py`). It generates with transformers, its default. The template does not show
  the tool, so that both sides read the same tokens.
- roll plays its own `frozen_lake`, which finds the word for the move in the call, on vLLM.

Settings of both sides are those of `vs_trl.py`: GRPO without KL, one optimizer step per batch, a
learning rate of 1e-6, with which the model stays random, and nothing recomputed in the backward
pass. TRL trains on the batch in one piece and, as another side, in four pieces. The faster of both
counts, and for the memory the smaller one. Our side trains on pieces of 4096 tokens. Each side
waits for its threads as suits it: TRL is one process, whose threads spin for 10 ms (`SPIN`), ours
are several that share the cores, and spin as long as a run lets them by itself.

Time, CPU time and memory are measured as in `vs_trl.py` (see process_meter.py). `rollout` is the
time in which the episodes are played. Tokens are means per episode: those that the policy wrote,
and those that it read, the first map included. Sides whose turns or tokens differ by more than 5 %
are not compared. `driver` is the CPU time of roll's driver while episodes are played, all threads,
per turn (`driver_meter.MeteredAgents`).

The sides take turns; results are medians over all rounds, without the first two steps of each. TRL
has a separate environment, which the first run makes. Results of finished rounds are kept in
`--out` and not measured again, unless `--fresh` is given. The exit code is 0 if the goals are met.

    python benchmarks/agents_vs_trl.py [--layers 2] [--hidden 128] [--steps 7]
        [--rounds 2] [--fresh]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.calling_model import make_model
from benchmarks.process_meter import adopt_orphans, run_measured, two_cores
from benchmarks.vs_trl import RUN_TIMEOUT_S, SKIP, make_trl_python

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent
SIZE, MAX_TURNS = 4, 8
OBSERVED_TOKENS = SIZE * (SIZE + 1) + 1
"""Tokens of a map: a token per character, and one on each side of it."""
MAX_TOKENS = 256
"""Limit of the tokens of an episode, which none reaches."""
SPEEDUP = 2.0
"""Goal: smallest allowed ratio of TRL's time per step to ours."""
DRIVER_US = 200.0
"""Goal: largest CPU time of roll's driver per turn, in microseconds."""
SPIN = "300000"
"""Turns for which threads of TRL spin before they sleep, for GNU's OpenMP: 10 ms."""
ALIKE = 1.05
"""Largest ratio of turns or tokens between sides that are compared."""
TRL_SIDES = {"TRL, 1 piece": 1, "TRL, 4 pieces": 4}
"""Side -> number of pieces in which it trains on a batch."""
ROLL = "roll"


@dataclass(frozen=True)
class Bench:
    """Paths and settings of all rounds."""

    out: Path
    model: Path
    trl_python: Path
    steps: int
    maps: int
    """Number of maps of a step."""
    episodes: int
    """Number of episodes on each of them."""

    def trl(self, pieces: int, folder: Path, seed: int) -> tuple[list[str], Path]:
        """Write TRL's job file; return TRL's command, and the file that gets one line per step."""
        settings: dict[str, Any] = {
            "output_dir": str(folder / "trl"),
            "seed": seed,
            "max_steps": self.steps,
            "per_device_train_batch_size": self.maps * self.episodes // pieces,
            "gradient_accumulation_steps": pieces,
            "num_generations": self.episodes,
            "max_completion_length": MAX_TOKENS - OBSERVED_TOKENS,
            "loss_type": "grpo",
            "beta": 0.0,
            "learning_rate": 1e-6,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": False,
            "use_cpu": True,
            "bf16": False,
            "dataloader_pin_memory": False,
            "model_init_kwargs": {"dtype": "float32"},
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        steps_file = folder / "steps.jsonl"
        job = {
            "model": str(self.model),
            "tasks": self.steps * self.maps,
            "lake": {"size": SIZE, "max_turns": MAX_TURNS, "too_long": MAX_TOKENS},
            "settings": settings,
            "steps_file": str(steps_file),
        }
        (folder / "job.json").write_text(json.dumps(job))
        script = HERE / "agents_vs_trl_job.py"
        return [str(self.trl_python), str(script), str(folder / "job.json")], steps_file

    def roll(self, folder: Path, seed: int) -> tuple[list[str], Path]:
        """Write our run file; return our command, and the file that gets one line per step."""
        run: dict[str, Any] = {
            "pipeline": "benchmarks.driver_meter:MeteredAgents",  # as `agentic`, with a meter
            "output_dir": str(folder / "run"),
            "seed": seed,
            "max_steps": self.steps,
            "model": {"path": str(self.model), "dtype": "float32"},
            "pools": {"all": "0"},
            "actor_train": {
                "pool": "all",
                "strategy": {"kind": "fsdp2"},
                "optimizer": {"lr": 1e-6, "betas": [0.9, 0.999]},
                "max_tokens_per_microbatch": 4096,
                "packing": True,
            },
            "actor_infer": {"pool": "all", "strategy": {"kind": "vllm"}},
            "environments": {
                "lake": {
                    "env": "frozen_lake",
                    "kwargs": {"size": SIZE, "rules": False},
                    "tags": ["lake"],
                    "max_turns": MAX_TURNS,
                }
            },
            "data": {
                "sources": [{"seeds": self.steps * self.maps, "tag": "lake"}],
                "prompts_per_step": self.maps,
                "samples_per_prompt": self.episodes,
                "max_episode_tokens": MAX_TOKENS,
            },
            "sampling": {"max_new_tokens": 8},
            "algorithm": {"advantage": {"kind": "grpo"}, "aggregation": "sequence_mean"},
            "track": {"rollouts_every": None, "tensorboard": False},
            "checkpoint": {"export_hf": False},
        }
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(run))
        command = [sys.executable, "-m", "roll.cli", "run", str(file)]
        return command, folder / "run" / "metrics.jsonl"


def measure(bench: Bench, side: str, number: int) -> dict[str, Any]:
    """Measure one round of one side and keep the result in a file. If that file exists already,
    return its content.

    Args:
        side: one of `TRL_SIDES`, or `ROLL`.
        number: number of the round.
    """
    case = f"{bench.maps}x{bench.episodes}-{bench.steps}"
    name = f"{case}-{side.lower().replace(', ', '-').replace(' ', '-')}-{number}"
    result_file = bench.out / f"{name}.json"
    if result_file.exists():
        found: dict[str, Any] = json.loads(result_file.read_text())
        return found
    folder = bench.out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    env = os.environ | {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    if side == ROLL:
        command, steps_file = bench.roll(folder, number)
        env |= {"PYTHONPATH": str(ROOT)}
    else:
        command, steps_file = bench.trl(TRL_SIDES[side], folder, number)
        env |= {"PYTHONPATH": "", "GOMP_SPINCOUNT": SPIN}
    measured = run_measured(
        command, steps_file, env=env, log=folder / "log.txt", timeout_s=RUN_TIMEOUT_S
    )
    records = [json.loads(line) for line in steps_file.read_text().splitlines()][SKIP:]
    count = bench.maps * bench.episodes
    told = [roll_episodes(one, count) if side == ROLL else trl_episodes(one) for one in records]
    result = asdict(measured) | {"episodes": told}
    result_file.write_text(json.dumps(result, indent=1))
    return result


def trl_episodes(record: Mapping[str, float]) -> dict[str, float]:
    """Return what a step of TRL says about its episodes, see `Row`; it cost no driver."""
    return {name: record[name] for name in ("rollout_s", "turns", "written", "heard", "reward")}


def roll_episodes(record: Mapping[str, float], count: int) -> dict[str, float]:
    """Return what a step of ours says about its `count` episodes, see `Row`."""
    written = record["rollout/generated_tokens"] / count
    turns = record["reward/lake/turns"]
    return {
        "rollout_s": record["time/rollout_s"],
        "turns": turns,
        "written": written,
        "heard": record["prompt_tokens/mean"] + record["response_tokens/mean"] - written,
        "reward": record["reward/lake/success"],
        "driver_us": 1e6 * record["driver/receive_cpu_s"] / (turns * count),
    }


@dataclass(frozen=True)
class Row:
    """Results of one side: medians over steps, except `peak_mb` (largest value), and means over
    episodes."""

    step_s: float
    rollout_s: float
    cpu_s: float
    peak_mb: float
    turns: float
    written: float
    """Tokens that the policy wrote in an episode."""
    heard: float
    """Tokens of the environment in an episode."""
    reward: float
    driver_us: float | None
    """CPU time of the driver per turn, in microseconds; None for TRL, which has no driver."""
    steps: int


def summarise(results: Sequence[Mapping[str, Any]]) -> Row:
    # `step_s` and `step_cpu_s` have no entry for the first step.
    steps = [s for result in results for s in result["step_s"][SKIP - 1 :]]
    cpu = [s for result in results for s in result["step_cpu_s"][SKIP - 1 :]]
    told = [one for result in results for one in result["episodes"]]
    driver = [one["driver_us"] for one in told if "driver_us" in one]
    return Row(
        step_s=statistics.median(steps),
        rollout_s=statistics.median(one["rollout_s"] for one in told),
        cpu_s=statistics.median(cpu),
        peak_mb=max(result["peak_mb"] for result in results),
        turns=statistics.mean(one["turns"] for one in told),
        written=statistics.mean(one["written"] for one in told),
        heard=statistics.mean(one["heard"] for one in told),
        reward=statistics.mean(one["reward"] for one in told),
        driver_us=statistics.median(driver) if driver else None,
        steps=len(steps),
    )


def unlike(rows: Mapping[str, Row]) -> list[str]:
    """Return a sentence for each mean of the episodes that differs too much between the sides."""
    found = []
    for name in ("turns", "written", "heard"):
        values = {side: getattr(row, name) for side, row in rows.items()}
        if max(values.values()) > ALIKE * min(values.values()):
            told = ", ".join(f"{side}: {value:.2f}" for side, value in values.items())
            found.append(f"{name} per episode differ by more than 5 % ({told})")
    return found


def print_table(rows: Mapping[str, Row]) -> None:
    heads = ["step", "of it rollout", "CPU", "peak memory", "turns", "tokens written"]
    heads += ["tokens read", "reward", "driver", "steps"]
    print(f"| | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}")
    for side, row in rows.items():
        driver = "" if row.driver_us is None else f"{row.driver_us:.0f} us/turn"
        print(
            f"| {side} | {row.step_s:.2f} s | {row.rollout_s:.2f} s | {row.cpu_s:.2f} s "
            f"| {row.peak_mb / 1000:.2f} GB | {row.turns:.2f} | {row.written:.1f} "
            f"| {row.heard:.1f} | {row.reward:.2f} | {driver} | {row.steps} |"
        )


def verdict(rows: Mapping[str, Row]) -> bool:
    """Print the comparison with the best of TRL; return whether the goals are met."""
    ours, theirs = rows[ROLL], [row for side, row in rows.items() if side != ROLL]
    if differences := unlike(rows):
        print("not compared: " + "; ".join(differences))
        return False
    assert ours.driver_us is not None, "our side has a driver"
    speedup = min(row.step_s for row in theirs) / ours.step_s
    rollout = min(row.rollout_s for row in theirs) / ours.rollout_s
    memory = ours.peak_mb / min(row.peak_mb for row in theirs)
    good = speedup >= SPEEDUP and ours.driver_us < DRIVER_US
    print(
        f"{speedup:.2f} x as fast (rollout {rollout:.2f} x), {memory:.2f} x the memory, driver "
        f"{ours.driver_us:.0f} us a turn; goal at least {SPEEDUP:g} x as fast, driver below "
        f"{DRIVER_US:g} us a turn: {'pass' if good else 'FAIL'}"
    )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=7, help="of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model; 32, 64, ...")
    parser.add_argument("--maps", type=int, default=32, help="of a step; a multiple of 4")
    parser.add_argument("--episodes", type=int, default=8, help="on each map")
    parser.add_argument("--out", type=Path, help="default: outputs/agents_vs_trl/LAYERSxHIDDEN")
    parser.add_argument("--fresh", action="store_true", help="measure finished rounds again")
    args = parser.parse_args()
    if args.steps <= SKIP:
        parser.error(f"--steps {args.steps} leaves none to time; give {SKIP + 1} or more")
    if args.maps < 4 or args.maps % 4:
        parser.error(f"--maps {args.maps} is no multiple of 4")
    two_cores()
    adopt_orphans()
    size = f"{args.layers}x{args.hidden}"
    out = (args.out or ROOT / "outputs" / "agents_vs_trl" / size).absolute()
    if args.fresh:
        for found in out.glob("*.json"):
            found.unlink()
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        out=out,
        model=make_model(out / "model", args.layers, args.hidden),
        trl_python=make_trl_python(ROOT / "outputs" / "trl-venv"),
        steps=args.steps,
        maps=args.maps,
        episodes=args.episodes,
    )
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in (*TRL_SIDES, ROLL)}
    for number in range(args.rounds):
        for side, measured in results.items():
            print(f"{side}, round {number + 1}", file=sys.stderr)
            measured.append(measure(bench, side, number))
    rows = {side: summarise(measured) for side, measured in results.items()}
    print_table(rows)
    sys.exit(0 if verdict(rows) else 1)


if __name__ == "__main__":
    main()
