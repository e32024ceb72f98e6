"""Models that see, on training backends: what leaves the trainer has the names and values of the
checkpoint, which are not those in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from roll.config.sections.model import ModelConfig
from roll.core.errors import WeightSyncError
from roll.core.types import WorkerSpec
from roll.strategy.hf_folder import read_checkpoint
from roll.weight_sync.checks import check_shapes
from roll.weight_sync.manifest import Manifest
from tests.contract.backends import TRAIN_BACKENDS
from tests.contract.family_job import assembled
from tests.contract.ranks import run_ranks
from tests.turns import in_groups
from tests.vision_models import FAMILIES, save_vision_model

BACKENDS = ["fsdp2", "deepspeed-zero3"]
TEXT_ALONE = "qwen3_5"
"""Its language model is trained alone: transformers has a class for it."""
Results = tuple[Path, list[dict[str, Any]]]


def job(spec: WorkerSpec, folder: Path, *, backend: str, names: Sequence[str]) -> dict[str, Any]:
    """For each family the manifest, this rank's parts and whole tensors; saved as a folder."""
    made = next(b for b in TRAIN_BACKENDS if b.name == backend)
    results = {}
    built = []
    for name in names:
        strategy = made.build(spec, ModelConfig(path=str(folder.parent / name)))
        results[name] = {
            "manifest": strategy.weight_manifest(),
            "parts": {key: part.clone() for key, part in strategy.export_parts()},
            "whole": {key: tensor.clone() for key, tensor in strategy.export_weights()},
        }
        strategy.save_hf(folder.parent / "saved" / name)
        built.append(strategy)
    for strategy in reversed(built):  # the first has the process group, which the others share
        strategy.close()
    return results


@pytest.fixture(scope="module", params=in_groups(BACKENDS, pytest.mark.slow))
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("vision")
    for name in FAMILIES:
        save_vision_model(folder / name, name, tied=name == "qwen2_vl")
    work = partial(job, backend=request.param, names=list(FAMILIES))
    return folder, run_ranks(2, work, folder / "job", timeout_s=300)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_pushed_is_what_the_checkpoint_holds(results: Results, name: str) -> None:
    folder, ranks = results
    files = load_file(folder / name / "model.safetensors")
    if name == TEXT_ALONE:
        files = {key: value for key, value in files.items() if "visual" not in key}
    expected = read_checkpoint(ModelConfig(path=str(folder / name)))
    check_shapes(ranks[0][name]["manifest"], expected.shapes, optional=expected.optional)
    sent = assembled(ranks, name)
    assert sent.keys() == files.keys()
    for key, value in files.items():
        for found in (sent[key], ranks[1][name]["whole"][key]):
            torch.testing.assert_close(found, value, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_saved_is_loaded_again(results: Results, name: str) -> None:
    folder, _ = results
    factory = AutoModelForCausalLM if name == TEXT_ALONE else AutoModelForImageTextToText
    first, again = (
        factory.from_pretrained(path / name, output_loading_info=True)
        for path in (folder, folder / "saved")
    )
    assert again[1]["missing_keys"] == again[1]["unexpected_keys"] == set()
    values = first[0].state_dict()
    assert again[0].state_dict().keys() == values.keys()
    for key, value in again[0].state_dict().items():
        assert torch.equal(value, values[key]), key


def test_an_engine_keeps_a_tower_only_if_transformers_loads_the_language_model_alone(
    tmp_path: Path,
) -> None:
    for name in FAMILIES:
        path = save_vision_model(tmp_path / name, name)
        expected = read_checkpoint(ModelConfig(path=str(path)))
        whole = load_file(path / "model.safetensors")
        text = Manifest.of((key, value) for key, value in whole.items() if "visual" not in key)
        if name == TEXT_ALONE:
            check_shapes(text, expected.shapes, optional=expected.optional)
        else:
            with pytest.raises(WeightSyncError, match="tensors are missing"):
                check_shapes(text, expected.shapes, optional=expected.optional)
