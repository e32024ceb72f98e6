"""`model.compile`: the numbers, names and collectives of layers that run as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contract.compile_job import job_of
from tests.contract.ranks import run_ranks
from tests.contract.train_job import relative_distance
from tests.tiny import save_tiny_model

INDUCTOR, TRACED = "inductor", "aot_eager"
"""PyTorch's compiler, which calls a C++ compiler; and all of it before that."""
RUNS: dict[tuple[int, str], tuple[str, ...]] = {
    (1, INDUCTOR): ("packed",),
    (1, TRACED): ("zero3",),
    (2, TRACED): ("adapter-ulysses",),
}
SCORED = (1, TRACED)
"""The run in which backend `hf` scores, too."""
Results = dict[tuple[int, str], list[dict[str, Any]]]
EACH = [(*run, case) for run, cases in RUNS.items() for case in cases]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("compile")
    save_tiny_model(folder / "untied", tied=False, seed=1)
    return {
        (ranks, backend): run_ranks(
            ranks,
            job_of(cases, backend, scored=(ranks, backend) == SCORED),
            folder / f"{ranks}-{backend}",
            timeout_s=800,
        )
        for (ranks, backend), cases in RUNS.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "backend", "case"), EACH)
def test_losses_gradients_and_names_are_those_of_layers_as_they_are(
    results: Results, ranks: int, backend: str, case: str
) -> None:
    for rank in results[ranks, backend]:
        eager, compiled = rank[case]["eager"], rank[case]["compiled"]
        assert compiled["manifest"] == eager["manifest"]
        assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-5)
        for key in ("logprobs", "entropy"):
            torch.testing.assert_close(compiled[key], eager[key], atol=1e-5, rtol=1e-5)
        assert relative_distance(compiled["gradient"], eager["gradient"]) < 5e-6
        assert eager["graphs"] == [0]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "backend", "case"), EACH)
def test_other_lengths_and_numbers_of_rows_are_not_compiled_again(
    results: Results, ranks: int, backend: str, case: str
) -> None:
    for rank in results[ranks, backend]:
        first, last = rank[case]["compiled"]["graphs"]
        assert 0 < first <= 12
        assert last == first


@pytest.mark.slow
def test_scores_are_the_same_and_nothing_is_left_behind(results: Results) -> None:
    eager, compiled = results[SCORED][0]["scored"]
    torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-5)
    assert [rank["children"] for run in results.values() for rank in run] == [[]] * 4
