"""Ranks that share experts compute, with any routing, what one rank computes that has them all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GptOssConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from roll.core.errors import ConfigError
from roll.core.types import WorkerSpec
from roll.strategy.fsdp2 import expert_parallel
from roll.strategy.fsdp2.export import whole
from roll.strategy.training.group import GroupMembership
from tests.contract.ranks import run_ranks
from tests.tiny import tiny_qwen3, tiny_qwen3_moe

RANKS, EP, NUMBER, HIDDEN, CHOSEN = 4, 2, 6, 16, 2
NONE = NUMBER
"""Index of no expert, as some routers choose."""
ROUTES: dict[str, list[list[list[int]]]] = {
    # for each rank the experts of each of its tokens
    "mixed": [[[0, 3], [5, 1]], [[2, 4], [4, 0], [3, 5]], [[1, 2]], [[5, 4], [0, 1]]],
    "a rank without tokens": [[[0, 3], [5, 1]], [], [[1, 2]], [[5, 4]]],
    # The second rank of the first two gets tokens for its experts, that of the last two none.
    "an expert rank without tokens": [[[3, 4]], [[5, 3]], [[0, 1]], [[2, 0], [1, 2]]],
    "no tokens at all on two ranks": [[[3, 4]], [[5, 3]], [], []],
    "choices of none": [[[0, NONE], [NONE, NONE]], [[NONE, 4]], [[NONE, 1]], [[5, NONE]]],
}
CASES = [
    ("qwen3_moe", "grouped_mm"),
    ("qwen3_moe", "eager"),
    ("gpt_oss", "grouped_mm"),  # with biases, transposed, and gates between the rest
]


def experts_of(family: str, implementation: str) -> Any:
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_hidden_layers": 1}
    made: Any
    if family == "gpt_oss":
        made = GptOssExperts(GptOssConfig(**sizes, num_local_experts=NUMBER, intermediate_size=8))
    else:
        config = Qwen3MoeConfig(**sizes, num_experts=NUMBER, moe_intermediate_size=8)
        made = Qwen3MoeExperts(config)
    made.config._experts_implementation = implementation
    torch.manual_seed(0)
    with torch.no_grad():
        for p in made.parameters():
            p.normal_(std=0.3)
    return made


def inputs_of(route: str, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rank)
    index_TK = torch.tensor(ROUTES[route][rank], dtype=torch.long).reshape(-1, CHOSEN)
    hidden_TD = torch.randn(len(index_TK), HIDDEN, generator=g).requires_grad_()
    return hidden_TD, index_TK, torch.rand(len(index_TK), CHOSEN, generator=g).requires_grad_()


def computed(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    """Results, and the gradients of a sum of their squares."""
    results = experts(hidden, index, weights)
    results.square().sum().backward()
    assert hidden.grad is not None
    assert weights.grad is not None
    return [results.detach(), hidden.grad, weights.grad]


def job(spec: WorkerSpec, folder: Path) -> dict[Any, Any]:
    group, found = GroupMembership(spec), {}
    mesh = init_device_mesh("cpu", (RANKS // EP, EP), mesh_dim_names=("shard", "ep"))
    for case in CASES:
        for route in ROUTES:
            experts = experts_of(*case)
            expert_parallel.cut(experts, mesh["ep"])
            fully_shard(experts, mesh=mesh["shard"])
            experts.set_gradient_divide_factor(1.0)
            experts.set_force_sum_reduction_for_comms(True)
            tensors = computed(experts, *inputs_of(route, spec.rank))
            gradients = {name: whole(p.grad) for name, p in experts.named_parameters()}
            found[case, route] = tensors, gradients
    group.leave()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(RANKS, job, tmp_path_factory.mktemp("exchange"), timeout_s=120)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_results_and_gradients_are_those_of_all_experts_on_one_rank(
    ranks: list[dict[Any, Any]], case: tuple[str, str], route: str
) -> None:
    alone = experts_of(*case)
    for i, rank in enumerate(ranks):
        tensors, _ = rank[case, route]
        for got, want in zip(tensors, one_by_one(alone, *inputs_of(route, i)), strict=True):
            assert near(got, want)
    for name, p in alone.named_parameters():
        assert p.grad is not None
        for rank in ranks:
            assert near(rank[case, route][1][name], p.grad), name


def near(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and float((got - want).norm()) <= 1e-6 * float(want.norm())


def one_by_one(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    """The oracle of `computed`: each token goes to each of its experts alone. The gradients of the
    parameters are added to those that there are."""
    results = hidden * 0 + weights.sum() * 0
    for t, chosen in enumerate(index.tolist()):
        for k, expert in enumerate(chosen):
            if expert != NONE:
                part = slice(t, t + 1), slice(k, k + 1)
                added = experts(hidden[part[0]], index[part], weights[part])
                results = results.index_add(0, torch.tensor([t]), added)
    results.square().sum().backward()
    assert hidden.grad is not None
    assert weights.grad is not None
    return [results.detach(), hidden.grad, weights.grad]


@pytest.mark.parametrize(
    ("model", "ranks", "said"),
    [
        (tiny_qwen3, 2, "ep: model type 'qwen3' has no experts that transformers keeps in one"),
        (tiny_qwen3_moe, 3, "ep: 4 experts of a layer of model type 'qwen3_moe' do not divide"),
    ],
)
def test_a_model_whose_experts_cannot_be_shared_is_refused(
    model: Callable[[], PreTrainedModel], ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        expert_parallel.check(model(), ranks)
