"""Runs the example with six domains: what each tag learns, and what its rewards cost a step.

First a run in which the judge of two rewards is killed once. It prints the reward of each tag at
the start and at the end, and what was lost. Then short runs in turns: with all rewards, and with
one that compares two texts in place of them. They learn next to nothing (the learning rate is
almost 0), so that both generate the same responses; the steps of each round are compared, without
the first ones. Their policy is the same with `--layers` further layers that change nothing: a model
that answers within a quarter of a second leaves no time in which rewards could be computed.

    python benchmarks/mixed_domains.py [--out outputs/mixed] [--steps 60] [--rounds 3] [--timed 12]
        [--layers 60]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that the script also runs by its path

from benchmarks.process_meter import adopt_orphans  # noqa: E402
from roll.output_dir.trackers import read_records  # noqa: E402
from roll.platform.processes import descendants  # noqa: E402

JUDGE = "ray::judge_reader[0]"
ENDS, SKIP = 5, 3
"""Steps that are averaged at the start and at the end, and that are left out of times."""
LIMIT = 1.1

Record = dict[str, Any]


def settings(out: Path) -> dict[str, Any]:
    """Return the run file of the example with its files in `out`."""
    text = (ROOT / "examples" / "mixed_domains" / "run.yaml").read_text(encoding="utf-8")
    run: dict[str, Any] = yaml.safe_load(text.replace("outputs/mixed", str(out)))
    return run | {"resume": "never"}


def without_rewards(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run with one cheap reward in place of all."""
    tags = [source["tag"] for source in run["data"]["sources"]]
    form = {key: each for key, each in run["domains"]["form"].items() if key != "rewards"}
    changed = {
        "rewards": {"none": {"fn": "exact", "tags": tags}},
        "domains": run["domains"] | {"form": form},
    }
    return {key: each for key, each in run.items() if key != "judges"} | changed


def timed(run: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the run with so many steps that do nothing but generate, score, train and push."""
    train = run["actor_train"]
    return {
        **run,
        "max_steps": steps,
        "actor_train": train | {"optimizer": {"lr": 1.0e-12}},
        "validation": {},
        "checkpoint": {"every": None, "export_hf": False},
        "track": {"tensorboard": False, "rollouts_every": None, "verify_weights": "never"},
    }


def deepened(model: Path, folder: Path, layers: int) -> Path:
    """Write a model into `folder` that equals `model` but for further layers, which add nothing to
    the hidden states; return the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(model)
    first = config.num_hidden_layers
    config.num_hidden_layers += layers
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    deep = AutoModelForCausalLM.from_config(config)
    known = AutoModelForCausalLM.from_pretrained(model).state_dict()
    deep.load_state_dict(known, strict=False)
    for layer in deep.model.layers[first:]:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(last.weight)
    deep.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def records_of(run: Mapping[str, Any], folder: Path, *, kill_at: int | None = None) -> list[Record]:
    """Run in a process of its own, and return the metrics of the steps.

    Args:
        folder: for the run's files.
        kill_at: number of finished steps after which the judge is killed; None: never.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written, metrics = folder / "run.yaml", folder / "out" / "metrics.jsonl"
    written.write_text(yaml.safe_dump({**run, "output_dir": str(folder / "out")}))
    metrics.unlink(missing_ok=True)
    command = [sys.executable, "-m", "roll.cli", "run", str(written)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        while process.poll() is None:
            time.sleep(0.1)
            done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if kill_at is not None and done >= kill_at:
                kill_judge()
                kill_at = None
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}: see {folder / 'log'}")
    return [record for record in read_records(metrics) if "time/step_s" in record]


def kill_judge() -> None:
    """Kill the process of the judge's engine."""
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # another process may have ended meanwhile
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(JUDGE.encode()):
                os.kill(pid, signal.SIGKILL)
                return
    raise SystemExit(f"there is no process {JUDGE} to kill")


def learn(run: Mapping[str, Any], folder: Path, steps: int) -> bool:
    """Print what each tag learns in a run whose judge is killed; return whether all rise and
    nothing is lost."""
    records = records_of({**run, "max_steps": steps}, folder, kill_at=steps // 3)
    rises = True
    print(f"{steps} steps; reward of a tag: mean of the first {ENDS} steps, of the last {ENDS}")
    for source in run["data"]["sources"]:
        key = f"reward/tag/{source['tag']}/mean"
        first, last = mean(records[:ENDS], key), mean(records[-ENDS:], key)
        print(f"  {source['tag']:10}{first:.3f}  {last:.3f}")
        rises &= last > first
    lost = sum(record["judges/reader/lost_replicas"] for record in records)
    rates = [record[f"reward/{name}/error_rate"] for name in run["rewards"] for record in records]
    missing = steps - len(records)
    print(
        f"  judge: killed once, lost {lost:g} times; largest share of failed samples {max(rates)}"
    )
    return rises and lost == 1 and max(rates) == 0 and not missing


def compare(run: Mapping[str, Any], folder: Path, rounds: int, steps: int, layers: int) -> bool:
    """Print the times of steps with rewards and without; return whether they are close enough.

    Args:
        layers: number of further layers of the policy.
    """
    run = {
        **run,
        "model": {"path": str(deepened(Path(run["model"]["path"]), folder / "deep", layers))},
    }
    kinds = {"with": timed(run, steps + SKIP), "without": timed(without_rewards(run), steps + SKIP)}
    found: dict[str, list[Record]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind, each in kinds.items():
            found[kind] += records_of(each, folder / f"{kind}-{number}")[SKIP:]
    print(f"seconds, median of {rounds * steps} steps    with rewards   without   ratio")
    for name in ("step", "rollout", "generate", "reward", "train", "weight_sync"):
        both = [median(found[kind], f"time/{name}_s") for kind in kinds]
        ratio = f"{both[0] / both[1]:8.3f}" if both[1] > 0.01 else ""
        print(f"  {name:32}{both[0]:12.3f}{both[1]:10.3f}{ratio}")
    tokens = [mean(found[kind], "response_tokens/mean") for kind in kinds]
    print(f"  tokens of a response: {tokens[0]:.2f} and {tokens[1]:.2f}")
    for name in run["rewards"]:
        share, spent = (
            mean(found["with"], f"rewards/{name}/{k}") for k in ("share_of_step", "run_s")
        )
        print(f"  {name:10} at work {share:6.1%} of a step, {1000 * spent:7.1f} ms a sample")
    step = [median(found[kind], "time/step_s") for kind in kinds]
    return step[0] <= LIMIT * step[1]


def mean(records: Iterable[Record], key: str) -> float:
    return statistics.fmean(record[key] for record in records)


def median(records: Iterable[Record], key: str) -> float:
    return statistics.median(record[key] for record in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/mixed"))
    parser.add_argument("--steps", type=int, default=60, help="of the run that learns; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timed", type=int, default=12, help="steps of each run that is timed")
    parser.add_argument("--layers", type=int, default=60, help="further layers of timed policies")
    args = parser.parse_args()
    out: Path = args.out.resolve()
    make = [sys.executable, str(ROOT / "examples" / "mixed.py"), "--out", str(out)]
    subprocess.run(make, cwd=ROOT, check=True)
    adopt_orphans()
    run, good = settings(out), True
    if args.steps:
        good &= learn(run, out / "bench" / "learn", args.steps)
    if args.rounds:
        good &= compare(run, out / "bench", args.rounds, args.timed, args.layers)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
