"""Each recipe does two steps with a small model of its family, through the backends it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import CONFIG_MAPPING

from roll.commands.try_run.small_run import small_run
from roll.config import load_config
from roll.config.run import RunConfig
from roll.config.sections.data import FileConfig
from roll.config.sections.model import ModelConfig
from roll.models.shrunken import write_shrunken
from tests.runs import ROOT, run_local
from tests.tiny import char_tokenizer

RECIPES = sorted((ROOT / "examples/recipes").glob("*.yaml"))
FAMILIES = {
    "GLM-4.5-Air": ("glm4_moe", "Glm4MoeForCausalLM"),
    "Qwen3-30B-A3B": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "Qwen3-235B-A22B": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
"""Name on the hub -> type and class of the model; of all others, those of Qwen3."""
TALK = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]
ROW: dict[str, Any] = {
    "prompt": "1 + 2 =",
    "question": "1 + 2 =",
    "problem": "1 + 2 =",
    "answer": "#### 3",
    "solution": "3",
    "messages": TALK,
    "chosen": TALK,
    "rejected": [TALK[0], {"role": "assistant", "content": "no"}],
}
"""Columns of the data sets that the recipes name."""


def published(model: ModelConfig, folder: Path) -> ModelConfig:
    """A folder with the config of a family, as large as transformers makes it, and without weights;
    its tokenizer knows characters."""
    kind, name = FAMILIES.get(model.path.rpartition("/")[2], ("qwen3", "Qwen3ForCausalLM"))
    tokenizer = char_tokenizer()
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    values = CONFIG_MAPPING[kind]().to_dict() | {
        "architectures": [name],
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(values))
    return model.model_copy(update={"path": str(folder), "tokenizer": None})


def small(config: RunConfig, folder: Path) -> Path:
    """The run file of the small run, with a local file in place of each data set."""
    made: dict[str, Path] = {}

    def shrink(model: ModelConfig) -> Path:
        if model.path not in made:
            made[model.path] = folder / f"small{len(made)}"
            made[model.path].mkdir()
            write_shrunken(published(model, folder / f"large{len(made)}"), made[model.path])
        return made[model.path]

    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(ROW | {"id": str(i)}) + "\n" for i in range(24)))
    found = json.loads(small_run(config, folder / "out", shrink, steps=2).config.model_dump_json())
    for source in (*found["data"]["sources"], *found["validation"]["sets"].values()):
        assert set(source) >= set(FileConfig.model_fields)
        source |= {"path": str(rows), "format": "jsonl", "subset": None, "split": "train"}
    found["data"]["chat_template_kwargs"] = {}  # the small template has no variables
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(found))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_does_two_small_steps_with_its_backends(path: Path, tmp_path: Path) -> None:
    config = load_config(path).config
    run = small(config, tmp_path)
    named = {name: role.strategy.kind for name, role in config.computing.items()}
    done = {name: role.strategy.kind for name, role in load_config(run).config.computing.items()}
    assert done == named
    steps = [record for record in run_local(run) if "time/step_s" in record]
    assert len(steps) == 2
    assert all(record["grad_norm"] > 0 for record in steps)
    assert all(record.get("mismatch/logprob_abs_max", 0.0) < 1e-4 for record in steps[:1])


def test_recipes_stay_short() -> None:
    for path in [*RECIPES, *(ROOT / "examples/recipes/shared").glob("*.yaml")]:
        assert len(path.read_text().splitlines()) <= 60, path
    told = (ROOT / "examples/recipes/README.md").read_text()
    assert all(f"({path.name})" in told for path in RECIPES)
