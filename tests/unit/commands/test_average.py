"""`roll average`, against means worked in float64; and the check of a model that `roll merge`
wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from roll.commands.average import average
from roll.commands.merge import check_written, merge
from roll.core.errors import CheckpointError, ConfigError
from tests.tiny import save_tiny_model, tiny_qwen3
from tests.vision_models import make_vision_model


def folders(tmp_path: Path, count: int = 3) -> list[Path]:
    return [save_tiny_model(tmp_path / f"m{seed}", seed=seed) for seed in range(count)]


def test_the_mean_is_that_of_float64_and_loads(tmp_path: Path) -> None:
    models = folders(tmp_path)
    (models[-1] / "roll.json").write_text('{"step": 3}')
    average(models, tmp_path / "mean")
    parts = [load_file(model / "model.safetensors") for model in models]
    found = load_file(tmp_path / "mean" / "model.safetensors")
    assert found.keys() == parts[0].keys()
    for name, value in found.items():
        want = torch.stack([part[name].double() for part in parts]).mean(0)
        torch.testing.assert_close(value.double(), want, rtol=3e-7, atol=1e-9)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "mean", output_loading_info=True)
    assert not info["missing_keys"]
    AutoTokenizer.from_pretrained(tmp_path / "mean")
    assert not (tmp_path / "mean" / "roll.json").exists()  # the weights are of no step


def test_weights_of_16_bits_are_summed_in_float32_and_rounded_once(tmp_path: Path) -> None:
    for number in range(3):
        torch.manual_seed(number)
        tiny_qwen3().to(torch.bfloat16).save_pretrained(
            tmp_path / str(number), max_shard_size="100KB"
        )
    models = [tmp_path / str(number) for number in range(3)]
    assert (models[0] / "model.safetensors.index.json").is_file()
    average(models, tmp_path / "mean")
    mean, *others = (
        AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        for folder in (tmp_path / "mean", *models)
    )
    assert mean.dtype == torch.bfloat16
    for name, value in mean.named_parameters():
        total = sum(other.get_parameter(name).float() for other in others)
        assert torch.equal(value, (total / 3).to(torch.bfloat16)), name


def test_models_of_other_shapes_kinds_and_names_are_refused(tmp_path: Path) -> None:
    first, second = folders(tmp_path, 2)
    tiny_qwen3(layers=1).save_pretrained(tmp_path / "short")
    with pytest.raises(ConfigError, match=r"another model than .*: \w+ of config.json is"):
        average([first, tmp_path / "short"], tmp_path / "mean")
    tensors = load_file(second / "model.safetensors")
    name = "model.norm.weight"
    cases = {
        r"norm.weight is \[64\] BF16 in .*, and \[64\] F32": {
            **tensors, name: tensors[name].bfloat16()
        },
        r"norm.weight is \[32\]": {**tensors, name: tensors[name][:32].clone()},
        "lacks model.norm.weight": {k: v for k, v in tensors.items() if k != name},
        "has extra, which": {**tensors, "extra": torch.zeros(1)},
        "mean of model.norm.weight is not finite": {**tensors, name: tensors[name] * torch.nan},
    }  # fmt: skip
    for text, changed in cases.items():
        save_file(changed, second / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=text):
            average([first, second], tmp_path / "mean")
    (second / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="no readable safetensors files"):
        average([first, second], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
    assert not [*tmp_path.glob(".average_*"), *tmp_path.glob(".writing_*")]


def test_what_has_no_mean_is_refused(tmp_path: Path) -> None:
    models = folders(tmp_path, 2)
    with pytest.raises(ConfigError, match="needs two models at least"):
        average(models[:1], tmp_path / "mean")
    with pytest.raises(ConfigError, match="exists; name a folder that does not"):
        average(models, models[0])
    with pytest.raises(ConfigError, match="--last: takes the output_dir of one run, not 2 folders"):
        average(models, tmp_path / "mean", last=2)
    with pytest.raises(ConfigError, match=r"--last 2: .* has 0 complete checkpoints; lower it"):
        average(models[:1], tmp_path / "mean", last=2)
    with pytest.raises(ConfigError, match="neither a complete checkpoint"):
        average([models[0], tmp_path], tmp_path / "mean")
    gone = tmp_path / "checkpoints" / "step_000004"
    for step in (8, 12):
        (gone.parent / f"step_{step:06}").mkdir(parents=True)
        (gone.parent / f"step_{step:06}" / "state.json").touch()
    told = (
        r"step_000004 is no complete checkpoint \(there is no such folder\); .*: 8, 12; .*keep_last"
    )
    with pytest.raises(ConfigError, match=told):
        average([models[0], gone], tmp_path / "mean")
    with pytest.raises(CheckpointError, match=told):
        merge(gone, tmp_path / "merged")
    gone.mkdir()
    with pytest.raises(CheckpointError, match=r"step_000004 .* \(state.json is missing\); .*8, 12"):
        merge(gone, tmp_path / "merged")
    with pytest.raises(CheckpointError, match="nothing is no folder; name a checkpoint or the out"):
        merge(tmp_path / "nothing", tmp_path / "merged")
    (models[1] / "adapter_config.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="is an adapter, whose two factors"):
        average(models, tmp_path / "mean")


def test_a_model_that_reads_pictures_passes_the_check(tmp_path: Path) -> None:
    make_vision_model("qwen2_vl").save_pretrained(tmp_path)
    check_written(tmp_path, trust_remote_code=False)


def test_language_models_and_reward_models_pass_as_what_they_are(tmp_path: Path) -> None:
    writes = save_tiny_model(tmp_path / "writes")
    check_written(writes, trust_remote_code=False)
    scorer = AutoModelForSequenceClassification.from_pretrained(writes, num_labels=1)
    scorer.save_pretrained(tmp_path / "scores")
    check_written(tmp_path / "scores", scores=True, trust_remote_code=False)
    with pytest.raises(CheckpointError, match=r"does not load: score\.weight"):
        check_written(writes, scores=True, trust_remote_code=False)


def test_weights_that_are_missing_or_not_finite_are_named(tmp_path: Path) -> None:
    file = save_tiny_model(tmp_path) / "model.safetensors"
    whole = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({k: v for k, v in whole.items() if k != name}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"does not load: {name}"):
        check_written(tmp_path, trust_remote_code=False)
    save_file(whole | {name: whole[name] * torch.nan}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} is not finite"):
        check_written(tmp_path, trust_remote_code=False)
