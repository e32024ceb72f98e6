"""Reward for both sides of `vs_trl.py`, and TRL's side.

This file runs in TRL's environment, so it must not import roll.

    python benchmarks/vs_trl_job.py job.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.core.types import Sample


def share_of_digits(text: str) -> float:
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


def roll_reward(sample: Sample) -> float:
    return share_of_digits(sample.response_text)


def trl_reward(completions: list[str], **_: Any) -> list[float]:
    return [share_of_digits(text) for text in completions]


def train(job: dict[str, Any]) -> None:
    """Train with GRPOTrainer as TRL's documentation shows, and write one line to `steps_file` after
    each optimizer step."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(2)
    generate_s = 0.0

    class Timed(GRPOTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            nonlocal generate_s
            begun = time.perf_counter()
            generated = super()._generate(prompts)
            generate_s += time.perf_counter() - begun
            return generated

    class Lines(TrainerCallback):
        """Callback that writes a line when the trainer logs a step, after its optimizer step."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            nonlocal generate_s
            if "completions/mean_length" not in logs:
                return
            numbers = {name: float(value) for name, value in logs.items()}
            with Path(job["steps_file"]).open("a") as file:
                file.write(json.dumps(numbers | {"generate_s": generate_s}) + "\n")
            generate_s = 0.0

    prompts = [json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]
    trainer = Timed(
        model=job["model"],
        reward_funcs=trl_reward,
        args=GRPOConfig(**job["settings"]),
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[Lines()],
    )
    trainer.train()


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text()))
