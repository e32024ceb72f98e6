"""Values of config.json that a run replaces, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, Qwen3Config

from mcore_adapter.load import read_config
from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError
from roll.models.load import load_config
from roll.models.overrides import replaced_values
from tests.vision_models import save_vision_model

THETA = 5000.0


def folder(tmp_path: Path, **rope: Any) -> Path:
    rope = {"rope_type": "default", **rope, "rope_theta": THETA}
    Qwen3Config(max_position_embeddings=512, rope_parameters=rope).save_pretrained(tmp_path)
    return tmp_path


def test_the_base_of_the_checkpoint_stays_and_its_length_is_the_original_one(
    tmp_path: Path,
) -> None:
    overrides = {
        "rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 2048
    }  # fmt: skip
    config = load_config(ModelConfig(path=str(folder(tmp_path)), overrides=overrides))
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": THETA,
        "original_max_position_embeddings": 512,
    }
    assert (config.rope_parameters, config.max_position_embeddings) == (yarn, 2048)
    assert config.name_or_path == str(tmp_path)
    replaced = replaced_values(config, overrides)
    assert replaced == {"rope_parameters": yarn, "max_position_embeddings": 2048}
    found = read_config(tmp_path, replaced)
    assert (found["rope_parameters"], found["max_position_embeddings"]) == (yarn, 2048)
    assert "max_position_embeddings" in read_config(tmp_path)


def test_settings_of_another_type_of_positions_go_and_those_of_the_same_stay(
    tmp_path: Path,
) -> None:
    long = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 100}
    model = str(folder(tmp_path, **long))
    more = ModelConfig(path=model, overrides={"rope_parameters": {"factor": 8.0}})
    assert load_config(more).rope_parameters == {**long, "factor": 8.0, "rope_theta": THETA}
    plain = ModelConfig(path=model, overrides={"rope_scaling": {"rope_type": "default"}})
    assert load_config(plain).rope_parameters == {"rope_type": "default", "rope_theta": THETA}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("told", [True, False])
def test_positions_of_other_kinds_of_layers_stay(tmp_path: Path, key: str, told: bool) -> None:
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    own = {"full_attention": linear, "sliding_attention": {"rope_type": "default"}}
    Gemma3TextConfig(rope_parameters=own).save_pretrained(tmp_path)
    before = load_config(ModelConfig(path=str(tmp_path))).rope_parameters
    wanted = {"rope_type": "linear", "factor": 2.0}
    overrides = {key: {"full_attention": wanted} if told else wanted}
    after = load_config(ModelConfig(path=str(tmp_path), overrides=overrides))
    assert after.rope_parameters == {**before, "full_attention": {**linear, "factor": 2.0}}
    replaced = replaced_values(after, overrides)
    assert replaced == {"rope_parameters": after.rope_parameters}
    for strange in ({"chunked": wanted}, {"sliding_attention": wanted, "factor": 3.0}):
        with pytest.raises(ConfigError, match=r"'gemma3_text' has .* of full_attention, sliding"):
            load_config(ModelConfig(path=str(tmp_path), overrides={key: strange}))


def test_sections_of_a_config_are_merged(tmp_path: Path) -> None:
    save_vision_model(tmp_path, "qwen3_vl")
    before = load_config(ModelConfig(path=str(tmp_path)))
    overrides = {"text_config": {"rms_norm_eps": 0.5}}
    after = load_config(ModelConfig(path=str(tmp_path), overrides=overrides))
    assert after.text_config.rms_norm_eps == 0.5
    assert after.text_config.hidden_size == before.text_config.hidden_size
    assert replaced_values(after, overrides) == overrides
    assert read_config(tmp_path, overrides)["rms_norm_eps"] == 0.5


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"rope_scalling": {}}, "no key 'rope_scalling'; did you mean 'rope_scaling'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "cannot have these values: .* required keys"),
        ({"max_position_embeddings": "long"}, "'max_position_embeddings'.* expected int"),
    ],
)
def test_unknown_keys_and_impossible_values_are_refused(
    tmp_path: Path, overrides: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=rf"model\.overrides: .*'qwen3'.*{told}"):
        load_config(ModelConfig(path=str(folder(tmp_path)), overrides=overrides))
