"""Files of weights that are written tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from roll.strategy.hf_weights import write_weights
from roll.weight_sync.manifest import TensorMeta

TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "half": torch.randn(5, 3, dtype=torch.bfloat16),
    "turned": torch.randn(4, 7).t(),
    "number": torch.tensor(7),
    "empty": torch.empty(0, 3),
}


def metas(tensors: dict[str, Tensor]) -> list[TensorMeta]:
    return [
        TensorMeta(name, tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for name, t in tensors.items()
    ]


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_a_file_holds_the_tensors_whatever_their_order(tmp_path: Path) -> None:
    write_weights(tmp_path, metas(TENSORS), reversed(TENSORS.items()))
    same(load_file(tmp_path / "model.safetensors"), TENSORS)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tensors_are_divided_over_files_with_an_index(tmp_path: Path) -> None:
    tensors = {name: torch.full((size,), size) for name, size in (("a", 2), ("b", 9), ("c", 1))}
    write_weights(tmp_path, metas(tensors), tensors.items(), max_file_bytes=40)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index["weight_map"] == dict(zip("abc", names, strict=True))
    assert index["metadata"]["total_size"] == 12 * 8
    found: dict[str, Tensor] = {}
    for name in names:
        found |= load_file(tmp_path / name)
    same(found, tensors)


def test_tensors_that_do_not_fit_the_announcement_are_refused(tmp_path: Path) -> None:
    announced = metas(TENSORS)
    with pytest.raises(ValueError, match="empty was announced and did not come"):
        write_weights(tmp_path, announced, [*TENSORS.items()][:-1])
    assert not list(tmp_path.glob("*.safetensors"))  # nobody takes zeros for weights
    with pytest.raises(KeyError, match="flags"):
        write_weights(tmp_path, announced[1:], TENSORS.items())
    with pytest.raises(AssertionError, match="half"):
        write_weights(tmp_path, announced, [("half", torch.zeros(5, 3))])
