"""Every family of models that is named, on every training backend: what the trainer sends is what
the engine's checkpoint holds, and a pass in training gives the numbers of one that scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from roll.config.sections.model import ModelConfig
from roll.strategy.hf_folder import read_checkpoint
from roll.weight_sync.checks import check_shapes
from tests.contract.family_job import assembled, job_of
from tests.contract.ranks import run_ranks
from tests.contract.train_job import train_batch
from tests.convert.tiny_models import MODELS
from tests.families import FAMILIES, save
from tests.turns import in_groups

BACKENDS = ["fsdp2", "deepspeed-zero3", "megatron-dp2"]
"""One of each way to hold tensors; `megatron` has the families of mcore_adapter."""
Results = tuple[Path, list[str], list[dict[str, Any]]]


@pytest.fixture(scope="module", params=in_groups(BACKENDS))
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("families")
    names = sorted(MODELS if "megatron" in request.param else FAMILIES)
    for name in names:
        save(folder / name, name)
    ranks = run_ranks(2, job_of(request.param, names), folder / "job", timeout_s=600)
    return folder, names, ranks


@pytest.mark.slow
def test_what_the_trainer_sends_is_what_the_engine_takes(results: Results) -> None:
    folder, names, ranks = results
    for name in names:
        manifest = ranks[0][name]["manifest"]
        expected = read_checkpoint(ModelConfig(path=str(folder / name)))
        check_shapes(manifest, expected.shapes, optional=expected.optional)
        files = load_file(folder / name / "model.safetensors")
        sent = assembled(ranks, name)
        assert sent.keys() == files.keys(), name
        for key, value in files.items():
            for found in (sent[key], ranks[1][name]["whole"][key]):
                assert found.dtype == value.dtype, (name, key)
                torch.testing.assert_close(found, value, rtol=0, atol=0, msg=f"{name} {key}")


@pytest.mark.slow
def test_training_computes_what_scoring_does_and_twice_the_same(results: Results) -> None:
    mask_BT = train_batch().loss_mask
    _, names, ranks = results
    for name in names:
        for rank in ranks:
            found = rank[name]
            for i, (sample, scored) in enumerate(found["scored"].items()):
                rows = [heard[sample][: len(scored)] for heard in found["trained"]]
                assert torch.equal(rows[0], rows[1]), name
                wanted = mask_BT[i, : len(rows[0])]
                apart = (rows[0] - scored[: len(rows[0])])[wanted].abs().max()
                assert apart < 1e-6, (name, apart)
