"""TRL's side of `speed_vs_trl.py`, which runs in TRL's environment.

python benchmarks/speed_vs_trl_job.py job.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def train(job: dict[str, Any]) -> None:
    """Train as TRL's documentation shows, and write one line to `steps_file` after each optimizer
    step."""
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl import (
        DPOConfig,
        DPOTrainer,
        RewardConfig,
        RewardTrainer,
        SFTConfig,
        SFTTrainer,
    )

    torch.set_num_threads(2)
    done = 0

    class Lines(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            nonlocal done
            if state.global_step > done:  # the last log, a summary, has no new step
                done = state.global_step
                with Path(job["steps_file"]).open("a") as file:
                    file.write(json.dumps({"step": done}) + "\n")

    rows = [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]
    kinds: dict[str, tuple[Any, Any, Any]] = {
        "sft": (AutoModelForCausalLM, SFTConfig, SFTTrainer),
        "dpo": (AutoModelForCausalLM, DPOConfig, DPOTrainer),
        "reward_model": (AutoModelForSequenceClassification, RewardConfig, RewardTrainer),
    }
    loader, config, trainer = kinds[job["pipeline"]]
    options = {"num_labels": 1} if job["pipeline"] == "reward_model" else {}
    model = loader.from_pretrained(job["model"], dtype=torch.float32, **options)
    trainer(
        model,
        args=config(**job["settings"]),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[Lines()],
    ).train()


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text()))
