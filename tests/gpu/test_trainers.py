"""Trainers on one GPU: gradients, checkpoints, moves to host memory and back.

The oracle of a gradient is plain autograd on the CPU.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.strategy.fsdp2.files import INDEX
from tests.contract.compile_job import job_of
from tests.contract.ranks import run_ranks
from tests.contract.test_train_contract import assert_same_bits, reference_gradient
from tests.contract.train_job import JOBS as TRAIN_JOBS
from tests.contract.train_job import gradient, relative_distance, train_batch
from tests.tiny import save_tiny_model

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(900)]

LIMIT_S = 600
WITHIN = 1e-4
"""Largest difference of float32 numbers; kernels of GPUs add in another order than those of a
CPU."""


@pytest.fixture(
    scope="module", params=["fsdp2", "deepspeed-zero2", "deepspeed-zero3", "megatron-dp2"]
)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """What the contract suite puts a backend through, on one rank."""
    folder = tmp_path_factory.mktemp("train")
    save_tiny_model(folder / "tied", tied=True)
    save_tiny_model(folder / "untied", tied=False, seed=1)
    contract = TRAIN_JOBS[request.param]
    (found,) = run_ranks(1, contract, folder / "1", timeout_s=LIMIT_S, platform="cuda")
    return folder, found


def test_the_gradient_is_that_of_plain_autograd(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, found = trained
    want, _ = reference_gradient(folder / "untied", train_batch())
    assert relative_distance(gradient(found["steps"]["whole"], found["export"]), want) < WITHIN


def test_no_split_of_the_work_changes_the_gradient(trained: tuple[Path, dict[str, Any]]) -> None:
    _, found = trained
    want = gradient(found["steps"]["whole"], found["export"])
    for name, step in found["steps"].items():
        assert relative_distance(gradient(step, found["export"]), want) < WITHIN, name


def test_a_checkpoint_is_taken_up(trained: tuple[Path, dict[str, Any]]) -> None:
    _, found = trained
    checkpoint = found["checkpoint"]
    assert checkpoint["straight_draws"] == checkpoint["resumed_draws"]
    assert relative_distance(checkpoint["resumed"], checkpoint["straight"]) < WITHIN
    assert relative_distance(checkpoint["saved"], checkpoint["straight"]) > 0


def test_a_copied_checkpoint_is_that_of_its_moment(trained: tuple[Path, dict[str, Any]]) -> None:
    _, found = trained
    at_once, beside, _ = found["checkpoint"]["contents"]
    assert_same_bits(tensors_of(beside), tensors_of(at_once))
    assert others(beside) == others(at_once)


def tensors_of(files: dict[str, bytes]) -> dict[str, Tensor]:
    """The tensors of FSDP2's files. PyTorch copies those of a GPU in another order than those of
    host memory, so the files differ."""
    index = json.loads(files.get(INDEX, b'{"tensors": {}}'))
    found = {}
    for name, outline in index["tensors"].items():
        for chunk in outline["chunks"]:
            begin, file = chunk["begin"], files[chunk["file"]]
            content = io.BytesIO(file[begin : begin + chunk["bytes"]])
            found[f"{name} {chunk['offsets']}"] = torch.load(content, map_location="cpu")
    return found


def others(files: dict[str, bytes]) -> dict[str, bytes]:
    """Files that are not FSDP2's own."""
    index = json.loads(files.get(INDEX, b'{"tensors": {}}'))
    own = {chunk["file"] for each in index["tensors"].values() for chunk in each["chunks"]}
    return {name: content for name, content in files.items() if name not in own | {INDEX}}


def test_weights_come_back_from_host_memory_bit_by_bit(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    _, found = trained
    assert_same_bits(found["onloaded"], found["export"])
    assert_same_bits(found["saved_hf"], found["export"])


def test_compiled_layers_compute_what_they_do_as_they_are(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "untied", tied=False, seed=1)
    cases = ("padded", "products", "packed", "recomputed", "adapter", "zero2", "zero3")
    work = job_of(cases, "inductor", scored=False)
    (found,) = run_ranks(1, work, tmp_path / "1", timeout_s=LIMIT_S, platform="cuda")
    for case in cases:
        eager, compiled = found[case]["eager"], found[case]["compiled"]
        assert relative_distance(compiled["gradient"], eager["gradient"]) < WITHIN, case
        assert compiled["graphs"][-1] <= 2 * compiled["graphs"][0], case
    assert found["children"] == []
