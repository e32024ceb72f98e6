"""Dense models compute what Hugging Face computes, forward and backward, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.parity import Case, assert_equal
from tests.convert.tiny_models import LOOSE, rows, save_model, save_reference

NAMES = (
    "llama",
    "llama_biased_tied",
    "mistral",
    "ministral3",
    "phi3",
    "glm4",
    "gemma3",
    "gemma4",
    "qwen2_tied",
    "qwen3",
    "qwen3_tied",
    "qwen3_5",
    "seed_oss",
)
TWO = (
    ParallelSizes(),
    ParallelSizes(tp=2),
    ParallelSizes(pp=2),
    ParallelSizes(pp=2, vpp=2),
    ParallelSizes(pp=2, layers=(3, 1)),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = [save_model(tmp_path_factory.mktemp("dense"), name) for name in NAMES]
    for folder in made:
        save_reference(folder, rows())
    return made


@pytest.mark.slow
def test_two_ranks_compute_what_hugging_face_computes(folders: list[Path]) -> None:
    cases = [Case(folder, sizes) for folder in folders for sizes in TWO]
    assert_equal(2, cases, loose=LOOSE)


@pytest.mark.slow
def test_four_ranks_compute_what_hugging_face_computes(folders: list[Path]) -> None:
    cases = [Case(folder, ParallelSizes(tp=2, pp=2)) for folder in folders]
    assert_equal(4, cases, loose=LOOSE)
