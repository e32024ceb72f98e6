"""The task of the sick runs: a model that writes five digits and an end, made in seconds."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.sick.rewards import DIGITS
from examples.sorting import make_model

ROWS, HELD_OUT = 64, 16
BATCH, UPDATES = 64, 120


def make_base(folder: Path, seed: int = 0) -> None:
    """Write a small model that answers any prompt by five random digits and the end."""
    if (folder / "config.json").exists():
        return
    torch.manual_seed(seed)
    make_model(folder, hidden=64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    digits = torch.tensor(tokenizer.convert_tokens_to_ids([*"0123456789"]))
    user, assistant, end = tokenizer.convert_tokens_to_ids(["<user>", "<assistant>", "<eos>"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def column(token: int) -> torch.Tensor:
        return torch.full((BATCH, 1), token)

    for _ in range(UPDATES):
        prompt, answer = (digits[torch.randint(10, (BATCH, DIGITS))] for _ in range(2))
        rows = torch.cat([column(user), prompt, column(assistant), answer, column(end)], 1)
        labels = rows.clone()
        labels[:, : DIGITS + 2] = -100
        model(input_ids=rows, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = model.state_dict()
    weights.pop("lm_head.weight", None)  # tied to the embedding
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def digits_of(chance: random.Random) -> str:
    return "".join(chance.choices("0123456789", k=DIGITS))


def write_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def base_settings(folder: Path, model: Path) -> dict[str, Any]:
    """Return the settings of a healthy run of the task, whose rows are in `folder`."""
    reward = "benchmarks.sick.rewards:even"
    return {
        "pipeline": "rlvr",
        "output_dir": str(folder / "out"),
        "max_steps": 20,
        "model": {"path": str(model)},
        "pools": {"all": "0"},
        "actor_train": {"pool": "all", "optimizer": {"lr": 5e-4, "warmup_steps": 3}},
        "actor_infer": {"pool": "all", "strategy": {"kind": "hf"}},
        "data": {
            "sources": [{"path": str(folder / "train.jsonl"), "tag": "task"}],
            "prompts_per_step": 8,
            "samples_per_prompt": 8,
            "max_prompt_tokens": 8,
        },
        "sampling": {"max_new_tokens": 10},
        "rewards": {"even": {"fn": reward, "tags": ["task"]}},
        "algorithm": {"preset": "grpo", "loss": [{"kind": "ppo_clip"}]},
        "validation": {
            "every": 4,
            "sets": {"held_out": {"path": str(folder / "held_out.jsonl"), "tag": "task"}},
        },
        "checkpoint": {"every": None, "export_hf": False},
        "track": {"tensorboard": False, "rollouts_every": None},
    }


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with changes: mappings are merged, but `rewards` and `algorithm` replaced."""
    found = dict(settings)
    for key, value in changes.items():
        old = found.get(key)
        whole = key in ("rewards", "algorithm") or not isinstance(value, Mapping)
        found[key] = value if whole or not isinstance(old, Mapping) else merged(old, value)
    return found


def write_run(
    folder: Path,
    model: Path,
    changes: Mapping[str, Any],
    *,
    answers: Sequence[str] = (),
    seed: int = 0,
) -> Path:
    """Write rows and `run.yaml` of a run into a folder, and return the path of the run file.

    Args:
        changes: settings that differ from those of a healthy run.
        answers: answers of the rows of training, in turn; empty: digits at random, as in those held
            out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    rows = [{"prompt": digits_of(chance), "answer": digits_of(chance)} for _ in range(ROWS)]
    for row, answer in zip(rows, itertools.cycle(answers), strict=False):
        row["answer"] = answer
    write_rows(folder / "train.jsonl", rows)
    held = [{"prompt": digits_of(chance), "answer": digits_of(chance)} for _ in range(HELD_OUT)]
    write_rows(folder / "held_out.jsonl", held)
    path = folder / "run.yaml"
    settings = merged(base_settings(folder, model), {"seed": seed, **changes})
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path
