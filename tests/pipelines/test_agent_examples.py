"""The run files of the examples of agents train, with a model of their scripts that has learned
nothing and a real engine."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from examples import tools
from examples.tiny_model import write_model
from tests.runs import ROOT, run_local

SMALL = [
    *("max_steps=2", "data.prompts_per_step=6", "data.samples_per_prompt=2"),
    "actor_train.optimizer.warmup_steps=0",
    *("actor_infer.strategy.kind=hf", "actor_train.samples_per_update=6", "checkpoint.every=null"),
]


def run(
    example: str,
    outputs: str,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *settings: str,
) -> list[dict[str, Any]]:
    """Run two steps of an example with its files in `folder`; return the records of the steps."""
    write_model(folder / "model", tokenizer, positions=512)
    shutil.copytree(ROOT / "examples" / example, folder, dirs_exist_ok=True)
    path = folder / "run.yaml"
    text = path.read_text(encoding="utf-8").replace(outputs, str(folder))
    text = text.replace("[python, examples", f"[{sys.executable}, {ROOT}/examples")
    path.write_text(text, encoding="utf-8")
    records = run_local(path, [*SMALL, *settings, f"output_dir={folder}/out"])
    assert any(name.startswith("val/") for name in records[0])
    steps = [record for record in records if "loss/total" in record]
    assert len(steps) == 2
    for record in steps:
        assert record["mismatch/logprob_abs_max"] < 1e-5
        assert record["samples/left_out"] == 0
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "tags"),
    [
        ("agentic_tools", ["products", "rooms", "phones"]),
        ("agentic_frameworks", ["openai_agents", "smolagents"]),
    ],
)
def test_the_examples_with_tools_run_two_steps(
    example: str, tags: list[str], tmp_path: Path
) -> None:
    tools.write_questions(tmp_path, tools.questions(random.Random(0), tools.HELD_OUT + 16))
    few = [f"validation.sets.{tag}.limit=4" for tag in tags]
    for record in run(example, "outputs/tools", tools.make_tokenizer(), tmp_path, *few):
        for tag in tags:
            assert 0 <= record[f"reward/{tag}/mean"] <= 1
