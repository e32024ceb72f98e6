"""Updates without a picture of models of which only the vision part is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contract.ranks import run_ranks
from tests.contract.text_only_job import BACKENDS, FAMILY, TRAINED, job
from tests.contract.vision_job import BLIND, MIXED
from tests.vision_models import save_vision_model


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    folder = tmp_path_factory.mktemp("text_only")
    save_vision_model(folder / FAMILY, FAMILY)
    (rank,) = run_ranks(1, job, folder / "out", timeout_s=300)
    return rank


@pytest.mark.slow
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_update_without_pictures_is_skipped_and_the_next_one_learns(
    results: dict[Any, Any], backend: str, trained: str
) -> None:
    found = results[backend, trained]
    skipped = found[f"metrics {BLIND}"].values_by_name()
    assert skipped["grad_norm"] == 0
    assert skipped["skipped_steps"] == 1
    assert found["start"].keys() == found[BLIND].keys() == found[MIXED].keys()
    same = {key for key, value in found[BLIND].items() if torch.equal(value, found["start"][key])}
    assert same == found["start"].keys()
    assert found[f"metrics {MIXED}"].values_by_name()["grad_norm"] > 0
    assert any(not torch.equal(value, found[BLIND][key]) for key, value in found[MIXED].items())
