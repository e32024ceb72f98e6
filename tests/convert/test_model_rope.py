"""Scales of attention by yarn are those of transformers, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_adapter.errors import ConfigError
from mcore_adapter.models import fields_of
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.parity import Case, assert_equal
from tests.convert.tiny_models import COMMON, LOOSE, MODELS, rows, save_model, save_reference

PLAIN = {"rope_type": "default", "rope_theta": 100.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "values",
    [
        {"attention_factor": 0.9},
        {"attention_factor": 1.3},
        {"mscale": 0.7, "mscale_all_dim": 1.0},
        {"mscale": 0.7},
    ],
    ids=str,
)
def test_the_scale_of_attention_may_be_less_than_one(
    values: dict[str, Any], tmp_path: Path
) -> None:
    equal(save_model(tmp_path, "llama", rope_parameters={**YARN, **values}))


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
@pytest.mark.parametrize(
    ("sliding", "full"),
    [(PLAIN, YARN), ({**YARN, "attention_factor": 0.8}, PLAIN), ({**YARN, "factor": 9.0}, YARN)],
    ids=["full", "sliding", "both"],
)
def test_layers_with_a_window_have_a_scale_of_their_own(
    name: str, sliding: dict[str, Any], full: dict[str, Any], tmp_path: Path
) -> None:
    ropes = {"sliding_attention": sliding, "full_attention": full}
    equal(save_model(tmp_path, name, rope_parameters=ropes))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"mscale": 0.7},
        {"mscale_all_dim": 0.6},
        {"attention_factor": 0.9},
        {"attention_factor": 1.2, "mscale": 0.7, "mscale_all_dim": 0.6},
        {"factor": 1.0, "mscale_all_dim": 0.6, "attention_factor": 1.0},
    ],
    ids=str,
)
def test_latent_attention_is_scaled_as_in_transformers(
    values: dict[str, Any], tmp_path: Path
) -> None:
    equal(save_model(tmp_path, "deepseek_v3", rope_parameters={**YARN, **values}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"truncate": False}, "truncate false .* cannot be built, expected true"),
        ({"attention_factor": 0.9, "factor": 1.0}, "attention_factor 0.9 and factor 1.0 in"),
    ],
)
def test_latent_attention_that_would_be_rotated_otherwise_is_refused(
    values: dict[str, Any], message: str
) -> None:
    changed = {"rope_parameters": {**YARN, **values}}
    with pytest.raises(ConfigError, match=message):
        fields_of({**COMMON, **MODELS["deepseek_v3"], **changed})


def equal(folder: Path) -> None:
    save_reference(folder, rows())
    assert_equal(1, [Case(folder, ParallelSizes())], loose=LOOSE)
