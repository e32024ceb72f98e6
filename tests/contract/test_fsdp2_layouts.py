"""FSDP2 in every layout: the loss and the gradients of one rank."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from roll.core.metrics import Metrics
from tests.contract.layout_job import CASES, job, save_models
from tests.contract.ranks import run_ranks
from tests.contract.train_job import gradient, leaders, relative_distance

ALL = tuple(CASES)
CUT = ("packed", "critic", "scores, packed", "biased, packed")
"""Those that tensor parallel ranks can share."""
EXPERTS = ("experts", "experts, packed", "experts, critic")
Layouts = dict[str, tuple[dict[str, Any], tuple[str, ...]]]
ALONE = ""
SHARDED = "sharded by FSDP"
LAYOUTS: dict[int, Layouts] = {
    # ranks: options and cases
    # One rank without offloading needs nothing of FSDP.
    1: {ALONE: ({}, ALL), SHARDED: ({"cpu_offload": True}, ALL)},
    2: {
        "ulysses 2": ({"ulysses": 2}, ALL),
        "tp 2": ({"tp": 2}, CUT),
        "ep 2": ({"ep": 2}, EXPERTS),
    },
    4: {
        "ulysses 4": ({"ulysses": 4}, ("window, packed",)),
        "ulysses 2, replicas 2": ({"ulysses": 2, "replicas": 2}, ("window", "window, packed")),
        "tp 2": ({"tp": 2}, ("biased, packed", "critic")),
        "tp 2, ulysses 2": ({"tp": 2, "ulysses": 2}, ("biased, packed", "critic")),
        "tp 2, replicas 2": ({"tp": 2, "replicas": 2}, ("biased, packed",)),
        "ep 2": ({"ep": 2}, EXPERTS),
        "ep 2, ulysses 2": ({"ep": 2, "ulysses": 2}, ("experts, packed",)),
        "ep 2, replicas 2": ({"ep": 2, "replicas": 2}, ("experts, packed",)),
    },
}
RUNS = [
    (ranks, layout, case)
    for ranks, layouts in LAYOUTS.items()
    for layout, (_, cases) in layouts.items()
    for case in cases
    if layout != ALONE
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[Any, Any]]]:
    folder = tmp_path_factory.mktemp("layouts")
    save_models(folder)
    return {
        ranks: run_ranks(ranks, partial(job, layouts=layouts), folder / str(ranks), timeout_s=250)
        for ranks, layouts in LAYOUTS.items()
    }


def values(ranks: list[dict[str, Any]]) -> dict[str, float]:
    return Metrics.concat([each["metrics"] for each in leaders(ranks)]).values_by_name()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout", "case"), RUNS)
def test_loss_and_gradients_are_those_of_one_rank(
    runs: dict[int, list[dict[Any, Any]]], ranks: int, layout: str, case: str
) -> None:
    alone = runs[1][0][ALONE, case]
    together = [rank[layout, case] for rank in runs[ranks]]
    want = gradient(alone, alone["start"])
    assert max(float(g.abs().max()) for g in want.values()) > 1e-3
    for rank in together:
        assert relative_distance(gradient(rank, alone["start"]), want) < 1e-6
    wanted, found = values([alone]), values(together)
    for key in ("loss/total", "grad_norm", "trained_tokens"):
        assert found[key] == pytest.approx(wanted[key], rel=1e-6), key


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL)
def test_one_rank_without_fsdp_has_the_same_bits(
    runs: dict[int, list[dict[Any, Any]]], case: str
) -> None:
    ((alone, sharded),) = [(rank[ALONE, case], rank[SHARDED, case]) for rank in runs[1]]
    assert not alone["sharded"]
    assert sharded["sharded"]
    assert alone["start"].keys() == sharded["start"].keys()
    for key in ("start", "weights"):
        assert all(torch.equal(alone[key][name], value) for name, value in sharded[key].items())


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout", "case"), RUNS)
def test_scores_are_those_of_one_rank(
    runs: dict[int, list[dict[Any, Any]]], ranks: int, layout: str, case: str
) -> None:
    whole = scores(runs[1][0][ALONE, case])
    for rank in runs[ranks]:
        info = rank[layout, case]["info"]
        rows = len(whole) // info.dp_size
        part = whole[rows * info.dp_rank : rows * (info.dp_rank + 1)]
        torch.testing.assert_close(scores(rank[layout, case]), part, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout", "case"), RUNS)
def test_parts_of_all_ranks_are_the_model_as_the_manifest_cuts_it(
    runs: dict[int, list[dict[Any, Any]]], ranks: int, layout: str, case: str
) -> None:
    together = [rank[layout, case] for rank in runs[ranks]]
    manifest = together[0]["manifest"]
    assert [meta.name for meta in manifest.tensors] == list(together[0]["start"])
    for i, meta in enumerate(manifest.tensors):
        whole, cuts = runs[1][0][ALONE, case]["start"][meta.name].flatten(), manifest.cuts_of(i)
        for rank, (first, end) in zip(together, pairwise(cuts), strict=True):
            assert rank["manifest"] == manifest
            assert torch.equal(rank["parts"][meta.name].flatten(), whole[first:end])


def scores(result: dict[str, Any]) -> torch.Tensor:
    terms = result["before"]
    found: torch.Tensor = getattr(terms, next(iter(terms.__dataclass_fields__)))
    return found
