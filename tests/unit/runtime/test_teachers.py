"""Each row goes to the teacher of its tag, and comes back to its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config

from roll.config.algorithm.divergences import DistillTargetConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.training import TeacherRole
from roll.core.batches import RolloutBatch
from roll.core.errors import ConfigError, DataError
from roll.data.datasets import Dataset, Source
from roll.data.examples import Example
from roll.models.load import load_tokenizer
from roll.runtime.run_data import check_tags
from roll.runtime.teachers import (
    ask_teachers,
    by_teacher,
    check_distill_target,
    require_same_tokens,
)
from tests.tiny import rollout_batch


def teacher(*tags: str) -> TeacherRole:
    return TeacherRole(pool="p", model=ModelConfig(path="m"), tags=tags)


def test_rows_go_to_the_teacher_of_their_tag_in_numbers_that_divide() -> None:
    batch = rollout_batch(5)
    sizes = {}

    def ask(name: str, rows: RolloutBatch) -> list[torch.Tensor]:
        sizes[name] = len(rows)
        return list(rows.tokens * (1 if name == "first" else -1))

    teachers = {"first": teacher("a", "c"), "second": teacher("b")}
    rows_of = by_teacher(["a", "b", "c", "b", "a"], teachers)
    found = ask_teachers(batch, rows_of, {"first": 2, "second": 3}, ask)
    signs = torch.tensor([1, -1, 1, -1, 1])[:, None]
    assert torch.equal(torch.stack(found), batch.tokens * signs)
    assert sizes == {"first": 4, "second": 3}


def test_a_tag_without_a_teacher_is_named() -> None:
    items = tuple(Example(f"set:{i}", (), tag=tag) for i, tag in enumerate("ax"))
    dataset = Dataset((Source("set", 1.0, items),), (), "")
    with pytest.raises(DataError, match=r"set:1 has the tag 'x', which no teacher takes .* a\)"):
        check_tags(dataset, "teacher", [teacher("a")])


def vocabulary(folder: Path, **ids: int) -> ModelConfig:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(ids, unk_token="a"))
    )
    tokenizer.save_pretrained(folder)
    Qwen3Config(vocab_size=3).save_pretrained(folder)
    return ModelConfig(path=str(folder))


def test_equal_tokens_at_other_ids_are_other_tokens(tmp_path: Path) -> None:
    own = vocabulary(tmp_path / "own", a=0, b=1, c=2)
    require_same_tokens(own, {"t.model": vocabulary(tmp_path / "same", a=0, b=1, c=2)})
    gap = vocabulary(tmp_path / "gap", a=0, b=1, c=3)
    with pytest.raises(ConfigError, match="its token 2 is nothing, the trained model"):
        require_same_tokens(own, {"t.model": gap})


def test_a_model_must_know_all_tokens(tmp_path: Path) -> None:
    small = vocabulary(tmp_path, a=0, b=1, c=2, d=3)
    with pytest.raises(ConfigError, match=r"t\.model: gives 3 logits, .* has 4 tokens"):
        check_distill_target(
            DistillTargetConfig(), "loss", load_tokenizer(small), {"t.model": small}
        )
