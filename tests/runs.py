"""Small complete runs: a tiny model, a few rows, a run file; here or as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from roll.commands.launch import pipeline_class
from roll.config import load_config
from roll.config.run import RunConfig
from roll.core.threads.loop_thread import LoopThread
from roll.distributed.local import LocalLauncher
from roll.output_dir.trackers import read_records
from roll.pipeline.base import Pipeline
from tests.tiny import save_tiny_model

ROOT = Path(__file__).parents[1]
MARK = "ROLL_TEST_MARK"

REWARDS = '''
"""Rewards of the tests."""
import os, time
from roll.rewards.api import Reward
from roll.workers.reward import RewardWorker

def digits(sample):
    text = sample.response_text
    share = sum(c.isdigit() for c in text) / max(1, len(text))
    return Reward(share, {"length": float(len(text))})

def watched(sample):
    """Says that it is at work, and takes a while, as long as somebody asks it to."""
    hold = os.path.join(os.path.dirname(__file__), "hold")
    if os.path.exists(hold):
        open(hold + ".held", "w").close()
        time.sleep(1)
    return digits(sample)

def steps(sample):
    """Rewards each character that is a digit; the response as a whole gets nothing."""
    text = sample.response_text
    return Reward(0.0, steps=[(i, float(c.isdigit())) for i, c in enumerate(text, 1)])

def raising(sample):
    raise RuntimeError("the grader is broken")

def nan(sample):
    return float("nan")

def hanging(sample):
    time.sleep(3600)

def slow(sample):
    time.sleep(0.2)
    return float(len(sample.response_text) % 2)

def longest(samples):
    """Sees all samples of a prompt: 1 for the longest responses."""
    lengths = [len(sample.response_text) for sample in samples]
    return [Reward(float(n == max(lengths)), {"size": float(len(samples))}) for n in lengths]

class Owner(RewardWorker):
    async def setup(self, ctx, base):
        self.base = base
    async def score(self, sample, ctx):
        return Reward(self.base + sample.num_response_tokens / 100)
'''


def write_task(folder: Path, **changes: Any) -> Path:
    """A folder with model, data, rewards and `run.yaml`; `changes` replace top-level keys."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tiny_model(folder / "model")
    rows = [{"prompt": f"{i} + {i + 1} =", "answer": str(2 * i + 1)} for i in range(24)]
    for name, part in (("train", rows[:16]), ("held_out", rows[16:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
    (folder / "test_run_rewards.py").write_text(REWARDS)
    config: dict[str, Any] = {
        "pipeline": "rlvr",
        "output_dir": str(folder / "out"),
        "max_steps": 4,
        "model": {"path": str(folder / "model")},
        "pools": {"all": "0"},
        "actor_train": {"pool": "all", "optimizer": {"lr": 1e-3, "warmup_steps": 2}},
        "actor_infer": {"pool": "all", "strategy": {"kind": "hf"}},
        "reference": {"pool": "all"},
        "data": {
            "sources": [{"path": str(folder / "train.jsonl")}],
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_prompt_tokens": 32,
        },
        "sampling": {"max_new_tokens": 12},
        "rewards": {"digits": {"fn": "test_run_rewards:digits"}},
        "algorithm": {"loss": [{"kind": "ppo_clip"}, {"kind": "kl", "coef": 0.001}]},
        "validation": {
            "every": 2,
            "sets": {"held_out": {"path": str(folder / "held_out.jsonl")}},
        },
        "checkpoint": {"every": 2},
        "track": {"tensorboard": False, "rollouts_every": 2},
    }
    config |= changes
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def write_rows_task(folder: Path, pipeline: str, rows: Mapping[str, Any], **changes: Any) -> Path:
    """A folder with model, data and `run.yaml` of a pipeline on rows at hand.

    Args:
        rows: `train` and `held_out`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        save_tiny_model(folder / "model")
    for name, part in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    columns = changes.pop("columns", None)
    source = {"columns": columns} if columns else {}
    config: dict[str, Any] = {
        "pipeline": pipeline,
        "output_dir": str(folder / "out"),
        "max_steps": 4,
        "model": {"path": str(folder / "model")},
        "pools": {"all": "0"},
        "actor_train": {"pool": "all", "optimizer": {"lr": 1e-3, "warmup_steps": 2}},
        "data": {
            "sources": [{"path": str(folder / "train.jsonl"), **source}],
            "rows_per_step": 4,
            "max_tokens": 64,
        },
        "validation": {
            "every": 2,
            "sets": {"held_out": {"path": str(folder / "held_out.jsonl"), **source}},
        },
        "checkpoint": {"every": 2},
        "track": {"tensorboard": False},
    }
    config |= changes
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def run_local(
    path: Path, overrides: Sequence[str] = (), *, pipeline: type[Pipeline[Any]] | None = None
) -> list[dict[str, Any]]:
    """Run in this process, without Ray; returns the records of metrics.jsonl.

    Args:
        pipeline: class to run in place of the one that the config names.
    """
    return run_config(load_config(path, overrides).config, path.parent, pipeline=pipeline)


def run_config(
    config: RunConfig, folder: Path, *, pipeline: type[Pipeline[Any]] | None = None
) -> list[dict[str, Any]]:
    """The same with a config.

    Args:
        folder: where the code of the run lies.
    """
    sys.path.insert(0, str(folder))
    try:
        with LocalLauncher() as launcher, LoopThread("rollout") as loop:
            pipeline = pipeline or pipeline_class(config.pipeline)
            config, data = pipeline.prepare(config)
            pipeline(config, launcher, loop, platform="cpu", data=data).run()
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("test_run_rewards", None)
    return read_records(Path(config.output_dir) / "metrics.jsonl")


def without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    """What must be reproducible: all but clocks and memory."""
    moving = ("time/", "perf/", "memory/", "machine/", "gpu/", "rewards/")
    return {name: value for name, value in record.items() if not name.startswith(moving)}


class Command:
    """`roll ...` in a process of its own; every process it starts carries a mark."""

    def __init__(self, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        env = os.environ | {MARK: self.mark, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "roll.cli", *arguments],
            cwd=ROOT,
            env=env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, timeout_s: float = 600) -> tuple[int, str]:
        """Exit code and output; TimeoutError with what it said if it has to be killed."""
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            self.process.kill()
            so_far = (error.stdout or b"").decode(errors="replace")[-3000:]
            raise TimeoutError(f"runs for more than {timeout_s} s, and said:\n{so_far}") from None
        # C++ libraries that report leaks at the end of the interpreter bury the last line.
        assert "nanobind" not in output, output[-2000:]
        return self.process.returncode, output

    def alive(self) -> dict[int, str]:
        """Processes that carry the mark: pid to command line, the command itself left out."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            try:
                environ = (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if self.mark.encode() in environ and command:
                found[int(entry.name)] = command
        return found
