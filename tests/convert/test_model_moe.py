"""Models with experts compute what Hugging Face computes, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.parity import Case, assert_equal
from tests.convert.tiny_models import LOOSE, rows, save_model, save_reference

NAMES = (
    "mixtral",
    "minimax_m2",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_moe",
)
TWO = (
    ParallelSizes(),
    ParallelSizes(tp=2),
    ParallelSizes(pp=2),
    ParallelSizes(ep=2),
    ParallelSizes(tp=2, etp=1),
    ParallelSizes(tp=2, ep=2, etp=1),
)
FOUR = (
    ParallelSizes(tp=2, pp=2),
    ParallelSizes(tp=2, ep=2),
    ParallelSizes(pp=2, ep=2),
    ParallelSizes(tp=2, pp=2, ep=2, etp=1),
)

UNLIKE = ("deepseek_v3", "gpt_oss", "qwen3_next")
"""Families with latent attention, with biases of experts, with linear attention."""


def cases_of(folders: list[Path], layouts: tuple[ParallelSizes, ...]) -> list[Case]:
    """All but experts with biases (gpt_oss) on several expert tensor parallel ranks."""
    return [
        Case(folder, sizes)
        for folder in folders
        for sizes in layouts
        if folder.name != "gpt_oss" or sizes.expert_tp == 1
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = [save_model(tmp_path_factory.mktemp("moe"), name) for name in NAMES]
    for folder in made:
        save_reference(folder, rows())
    return made


@pytest.mark.slow
def test_two_ranks_compute_what_hugging_face_computes(folders: list[Path]) -> None:
    cases = cases_of(folders, TWO)
    assert_equal(2, cases, loose=LOOSE)


@pytest.mark.slow
def test_four_ranks_compute_what_hugging_face_computes(folders: list[Path]) -> None:
    """Each way to divide is proven for each family on two ranks; here two ways meet, which depends
    on how a family attends and on biases, so similar families share the pairs."""
    cases = [
        case
        for i, case in enumerate(cases_of(folders, FOUR))
        if case.folder.name in UNLIKE or i % 2 == NAMES.index(case.folder.name) % 2
    ]
    assert_equal(4, cases, loose=LOOSE)


def test_latent_attention_without_experts_is_divided_like_that_with_them(tmp_path: Path) -> None:
    """A model of dense layers alone, which gets sequence parallelism by itself."""
    dense: dict[str, Any] = {"first_k_dense_replace": 4}
    folders = [
        save_model(tmp_path / "narrow", "deepseek_v3", **dense),
        save_model(tmp_path / "wide", "deepseek_v3", **dense, q_lora_rank=None),
    ]
    for folder in folders:
        save_reference(folder, rows())
    assert_equal(2, [Case(folder, ParallelSizes(tp=2)) for folder in folders], loose=LOOSE)
