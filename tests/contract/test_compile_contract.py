"""`model.compile`: the numbers, names and collectives of layers that run as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.contract.compile_job import job_of
from tests.contract.ranks import run_ranks
from tests.contract.train_job import relative_distance
from tests.tiny import save_tiny_model
from tests.turns import in_groups

INDUCTOR, TRACED = "inductor", "aot_eager"
"""PyTorch's compiler, which calls a C++ compiler; and all of it before that."""


@dataclass(frozen=True)
class Run:
    ranks: int
    backend: str
    case: str
    scored: bool = False
    """Backend `hf` scores, too."""
    padded: bool = False
    """Rows are padded, so a micro-batch has one row or several, and each is compiled for itself;
    packed ones are one row."""


RUNS = {
    "inductor": Run(1, INDUCTOR, "packed"),
    "traced": Run(1, TRACED, "zero3", scored=True),
    "products": Run(1, TRACED, "products", padded=True),
    "two ranks": Run(2, TRACED, "adapter-ulysses"),
}
Results = tuple[Run, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=in_groups(RUNS))
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    run = RUNS[request.param]
    folder = tmp_path_factory.mktemp("compile")
    save_tiny_model(folder / "untied", tied=False, seed=1)
    work = job_of([run.case], run.backend, scored=run.scored)
    return run, run_ranks(run.ranks, work, folder / "job", timeout_s=800)


@pytest.mark.slow
def test_losses_gradients_and_names_are_those_of_layers_as_they_are(results: Results) -> None:
    run, ranks = results
    for rank in ranks:
        eager, compiled = rank[run.case]["eager"], rank[run.case]["compiled"]
        assert compiled["manifest"] == eager["manifest"]
        assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-5)
        for key in ("logprobs", "entropy"):
            torch.testing.assert_close(compiled[key], eager[key], atol=1e-5, rtol=1e-5)
        assert relative_distance(compiled["gradient"], eager["gradient"]) < 5e-6
        assert eager["graphs"] == [0]


@pytest.mark.slow
def test_other_lengths_and_numbers_of_rows_are_not_compiled_again(results: Results) -> None:
    run, ranks = results
    for rank in ranks:
        first, last = rank[run.case]["compiled"]["graphs"]
        assert 0 < first <= 14
        assert last <= 2 * first if run.padded else last == first


@pytest.mark.slow
def test_scores_are_the_same_and_nothing_is_left_behind(results: Results) -> None:
    run, ranks = results
    if run.scored:
        eager, compiled = ranks[0]["scored"]
        torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-5)
    assert [rank["children"] for rank in ranks] == [[]] * run.ranks
