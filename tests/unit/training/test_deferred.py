"""Tensors that stay in their files: every part of them equals that of the tensors themselves."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError
from roll.models.deferred.checkpoint import deferred_tensors
from roll.models.deferred.files import BUFFER_BYTES, stored_tensors
from roll.models.deferred.recipes import read_run, run_boxes
from roll.models.deferred.tensor import Deferred, fill, move, realize
from roll.models.load import load_causal_lm, load_config, load_score_model, load_value_model
from roll.strategy.deepspeed.zero_engine import move_buffers
from tests.families import config_of, save
from tests.tiny import save_tiny_model

ROW = BUFFER_BYTES // 4  # of float32: a row that fills the buffer alone
SAVED = {
    "a": torch.randn(6, 4, 8),
    "b": torch.randn(6, 4, 8),
    "half": torch.randn(5, 3, dtype=torch.bfloat16),
    "number": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "long rows": torch.arange(3 * (ROW + 5), dtype=torch.float32).view(3, ROW + 5),
    "many rows": torch.arange(3 * ROW, dtype=torch.float32).view(-1, 3),
}


@pytest.fixture(scope="module")
def deferred(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Deferred]:
    file = tmp_path_factory.mktemp("tensors") / "model.safetensors"
    save_file(SAVED, file)
    stored = stored_tensors([file])
    assert stored is not None
    return {name: Deferred(each) for name, each in stored.items()}


MADE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "as it is": lambda t: t["a"],
    "without axes": lambda t: t["number"],
    "without elements": lambda t: t["empty"],
    "a row longer than the buffer": lambda t: t["long rows"][1:, 3:],
    "more rows than the buffer": lambda t: t["many rows"][5:-1, 1:],
    "parts": lambda t: t["a"][1:5, :, 2:6].chunk(3, dim=2)[1],
    "uneven parts": lambda t: t["a"].split([1, 3, 2])[1],
    "one of several": lambda t: t["a"][2],
    "converted": lambda t: t["half"].to(torch.float32),
    "converted twice": lambda t: t["a"].to(torch.bfloat16).to(torch.float32),
    "turned": lambda t: t["a"].transpose(0, 2).contiguous(),
    "turned and cut": lambda t: t["a"].permute(2, 0, 1)[3:5],
    "stacked": lambda t: torch.stack([t["a"][0], t["b"][3], t["a"][5]], dim=1),
    "fused experts": lambda t: torch.cat([torch.stack([t["a"][0], t["a"][1]]), t["b"][:2]], dim=1),
    "fused, turned": lambda t: torch.cat([t["a"], t["b"]], dim=-1).transpose(1, 2)[2:4],
    "another form": lambda t: t["a"].reshape(6, 2, 2, 8).transpose(1, 2).reshape(6, 32)[2:5],
    "squeezed": lambda t: t["a"][1:2].squeeze().unsqueeze(1),
    "of another function": lambda t: t["a"].roll(1, 0)[1:3],
    "joined with memory": lambda t: torch.cat([t["a"], torch.ones(6, 4, 8)])[4:8],
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_deferred_tensors_equals_what_is_made_of_tensors(
    deferred: dict[str, Deferred], name: str
) -> None:
    expected, found = MADE[name](SAVED), MADE[name](deferred)
    assert isinstance(found, Deferred)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert torch.equal(realize(found), expected)
    into = torch.zeros(*expected.shape, 2, dtype=expected.dtype)[..., 0]  # no contiguous memory
    assert torch.equal(into.copy_(found), expected)


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_of_a_run_are_its_elements(sizes: list[int], data: st.DataObject) -> None:
    count = math.prod(sizes)
    first = data.draw(st.integers(0, count))
    end = data.draw(st.integers(first, count))
    numbers = torch.arange(count).view(sizes)
    boxes = run_boxes(numbers.shape, first, end)
    found = [numbers[tuple(slice(*each) for each in box)].reshape(-1) for box in boxes]
    assert torch.cat([*found, torch.empty(0, dtype=torch.int64)]).tolist() == [*range(first, end)]


def test_a_run_of_elements_is_read(deferred: dict[str, Deferred]) -> None:
    out = torch.empty(100)
    turned = deferred["a"].transpose(0, 1)
    assert isinstance(turned, Deferred)
    read_run(turned.recipe, 33, out)
    assert torch.equal(out, SAVED["a"].transpose(0, 1).reshape(-1)[33:133])


def test_nothing_is_written_into_a_file(deferred: dict[str, Deferred]) -> None:
    with pytest.raises(TypeError, match="still in its file"):
        deferred["a"].zero_()


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, file)
    stored = stored_tensors([file])
    assert stored is not None
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 100)
    with pytest.raises(OSError, match=r"model\.safetensors ended 100 bytes before its tensors"):
        realize(Deferred(stored["a"]))


def test_a_parameter_is_filled_where_it_is(deferred: dict[str, Deferred]) -> None:
    layer = nn.Linear(8, 4)
    layer.weight = nn.Parameter(deferred["a"][0])
    twin = nn.Linear(8, 4)
    twin.weight = layer.weight
    fill(layer.weight, torch.bfloat16, torch.device("cpu"))
    assert twin.weight is layer.weight
    assert type(layer.weight) is nn.Parameter
    assert torch.equal(layer.weight, SAVED["a"][0].bfloat16())


def test_a_model_moves_without_being_read_and_stays_tied(deferred: dict[str, Deferred]) -> None:
    one, other = nn.Linear(8, 4), nn.Linear(8, 4)
    one.weight = other.weight = nn.Parameter(deferred["a"][0])
    model = nn.ModuleList([one, other])
    move(model, torch.device("meta"))
    assert one.weight.device.type == "meta"
    assert one.weight is other.weight


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "mixtral", "phi3", "qwen3_vl_moe"])
def test_a_model_in_its_files_equals_a_loaded_one(tmp_path: Path, name: str) -> None:
    config = config_of(save(tmp_path, name), name)
    same(load_causal_lm(config), load_causal_lm(config, deferred=True))


@pytest.mark.parametrize("load", [load_value_model, load_score_model])
def test_a_new_head_is_the_only_part_with_memory(tmp_path: Path, load: Callable[..., Any]) -> None:
    config = ModelConfig(path=str(save_tiny_model(tmp_path)))
    model = load(config, deferred=True, dtype=torch.bfloat16)
    same(load(config, dtype=torch.bfloat16), model)
    there = [name for name, p in model.named_parameters() if not isinstance(p, Deferred)]
    assert there
    assert all(name.startswith("score.") for name in there)


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_head_that_the_files_have_too_is_tied_if_it_is_equal(
    tmp_path: Path, equal: bool
) -> None:
    folder = save_tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"] + (0 if equal else 1)
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    config = ModelConfig(path=str(folder))
    model = load_causal_lm(config, deferred=True)
    same(load_causal_lm(config), model)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == equal


def test_a_checkpoint_of_many_files_equals_one_of_one(tmp_path: Path) -> None:
    config = ModelConfig(path=str(save_tiny_model(tmp_path / "one")))
    whole = load_causal_lm(config)
    whole.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    same(whole, load_causal_lm(ModelConfig(path=str(tmp_path / "many")), deferred=True))


@pytest.mark.parametrize("load", [load_causal_lm, load_value_model])
def test_what_is_random_after_loading_does_not_change(
    tmp_path: Path, load: Callable[..., Any]
) -> None:
    config = ModelConfig(path=str(save_tiny_model(tmp_path)))
    drawn = []
    for deferred in (False, True):
        torch.manual_seed(3)
        load(config, deferred=deferred)
        drawn.append(torch.rand(5))
    assert torch.equal(*drawn)


def test_checkpoints_of_other_forms_are_left_to_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    config = ModelConfig(path=str(folder))
    pickled = tmp_path / "pickled"
    shutil.copytree(folder, pickled)
    torch.save(load_file(folder / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    moved = ModelConfig(path=str(pickled))
    assert deferred_tensors(moved, load_config(moved)) is None
    assert f"{pickled}: every rank reads all of it" in caplog.text
    assert "it has no safetensors files" in caplog.text
    model = load_causal_lm(moved, deferred=True)
    assert not any(isinstance(p, Deferred) for p in model.parameters())
    same(load_causal_lm(config), model)
    (folder / "adapter_config.json").write_text("{}")
    assert deferred_tensors(config, load_config(config)) is None
    assert "an adapter lies beside it" in caplog.text


def test_a_damaged_file_is_no_checkpoint(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="not a Hugging Face checkpoint with a model"):
        load_causal_lm(ModelConfig(path=str(folder)), deferred=True)


def same(loaded: Any, deferred: Any) -> None:
    """Compare all that two models hold: tensors, which of them are one, and settings."""
    expected: dict[str, Tensor] = loaded.state_dict()
    found: dict[str, Tensor] = deferred.state_dict()
    assert list(expected) == list(found)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(realize(found[name]), tensor), name
    ours, theirs = dict(deferred.named_buffers()), dict(loaded.named_buffers())
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert [n for n, _ in loaded.named_parameters()] == [n for n, _ in deferred.named_parameters()]
    assert loaded.config.to_dict() | {"_name_or_path": ""} == deferred.config.to_dict() | {
        "_name_or_path": ""
    }
    settings = [str(getattr(each, "generation_config", None)) for each in (loaded, deferred)]
    assert settings[0] == settings[1]


def test_the_buffers_of_a_partitioned_model_move_alone() -> None:
    """ZeRO-3 moves parameters itself; biases of routers would stay on the CPU."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    move_buffers(model, torch.device("meta"))
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
