"""What a model reads of pictures, against transformers' own processors and positions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError
from roll.core.pictures import Pictures
from roll.models.load import load_config
from roll.models.vision import folder
from roll.models.vision.folder import VisionPart
from roll.models.vision.inputs import blank_inputs, inputs_of
from roll.models.vision.parts import FAMILIES
from roll.models.vision.pixels import normalise, value_table
from roll.models.vision.positions import positions, row_positions
from tests.vision_models import (
    IMAGE,
    MERGE,
    Held,
    SeenRow,
    make_vision_model,
    save_vision_model,
    seen_row,
)

CPU = torch.device("cpu")
SIZES = [[(2, 3)], [(1, 1)], [(4, 1), (2, 2)], [(1, 5), (3, 2), (1, 1)]]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture(scope="module")
def model_folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision") / family, family)


def part_in(path: Path) -> VisionPart:
    model = ModelConfig(path=str(path))
    return folder.read(model, load_config(model))


def test_normalised_patches_are_those_of_the_image_processor_to_the_bit(
    family: str, model_folder: Path
) -> None:
    part = part_in(model_folder)
    for seed, sizes in enumerate(SIZES):
        row = seen_row(family, sizes, seed=seed)
        found = normalise(torch.from_numpy(row.pictures.patches.get()), value_table(part))
        assert found.dtype == torch.float32
        assert torch.equal(found, row.pixel_values)
        assert found.shape[1] == part.values


def test_positions_are_those_of_the_model(family: str) -> None:
    model = make_vision_model(family)
    rows = [seen_row(family, sizes, seed=seed) for seed, sizes in enumerate(SIZES)]
    for row in rows:
        tokens = [*row.tokens, 9, IMAGE, 9]
        inputs = row.forward_inputs(tokens)
        expected, delta = model.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
        )
        found = row_positions(len(tokens), row.pictures, MERGE)
        assert torch.equal(found, expected[:, 0])
        assert int(found[0, -1]) == len(tokens) - 1 + int(delta)


def test_frames_of_a_picture_count_on_the_axis_of_time() -> None:
    model = make_vision_model("qwen2_vl")
    tokens = torch.tensor([[5, *[IMAGE] * 12, 6, 7]])
    kinds = (tokens == IMAGE).int()
    grid = (2, 4, 6)
    expected, _ = model.model.get_rope_index(tokens, kinds, torch.tensor([grid]))
    pictures = Pictures((1,), (grid,), Held(np.zeros((48, 1), np.uint8)))
    assert torch.equal(row_positions(15, pictures, MERGE), expected[:, 0])


def test_a_row_without_pictures_and_padding_count_on() -> None:
    row = seen_row("qwen2_vl", SIZES[0])
    width = len(row.tokens) + 4
    found = positions(width, [row.pictures, None], MERGE)
    assert torch.equal(found[:, 1], torch.arange(width).expand(3, -1))
    assert torch.equal(found[:, 0, :-4], row_positions(len(row.tokens), row.pictures, MERGE))


def batch_of(rows: list[SeenRow | None]) -> tuple[torch.Tensor, list[Pictures | None]]:
    width = max(len(row.tokens) for row in rows if row is not None)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        if row is not None:
            tokens[i, : len(row.tokens)] = torch.tensor(row.tokens)
    return tokens, [None if row is None else row.pictures for row in rows]


def test_features_belong_to_the_placeholders_in_order(family: str, model_folder: Path) -> None:
    part = part_in(model_folder)
    one, two = (seen_row(family, sizes, seed=seed) for seed, sizes in enumerate(SIZES[1:3]))
    tokens, pictures = batch_of([two, None, one])
    found = inputs_of(tokens, pictures, part, CPU)
    assert (tokens.flatten()[found.places_K] == IMAGE).all()
    assert len(found.places_K) == int((tokens == IMAGE).sum())
    assert torch.equal(found.features_K, torch.arange(9))
    assert torch.equal(found.grids_G3, torch.cat([two.grids, one.grids]))
    own = [torch.from_numpy(row.pictures.patches.get()) for row in (two, one)]
    assert torch.equal(found.patches_PC, torch.cat(own))


def test_siblings_share_the_features_of_their_pictures(family: str, model_folder: Path) -> None:
    part = part_in(model_folder)
    one, two = (seen_row(family, sizes, seed=seed) for seed, sizes in enumerate(SIZES[:2]))
    found = inputs_of(*batch_of([one, two, one]), part, CPU)
    assert len(found.patches_PC) == one.pictures.num_patches() + two.pictures.num_patches()
    assert torch.equal(found.features_K, torch.tensor([*range(6), 6, *range(6)]))


def test_a_blank_picture_belongs_to_no_token(model_folder: Path) -> None:
    found = blank_inputs(part_in(model_folder), CPU)
    assert found.grids_G3.tolist() == [[1, MERGE, MERGE]]
    assert len(found.patches_PC) == MERGE**2
    assert len(found.places_K) == len(found.features_K) == 0
    assert found.positions_3BT is None


def test_pictures_that_do_not_fit_are_refused(family: str, model_folder: Path) -> None:
    part = part_in(model_folder)
    row = seen_row(family, SIZES[0])
    tokens, (pictures, *_) = batch_of([row])
    assert pictures is not None
    floats = replace(pictures, patches=Held(row.pixel_values.numpy()))
    fewer = replace(pictures, patches=Held(pictures.patches.get()[:-1]))
    for wrong, what in (
        (floats, "float32"),
        (fewer, "patches are"),
        (replace(pictures, places=(pictures.places[0] - 1,)), "should be the placeholder"),
        (replace(pictures, places=(len(row.tokens) - 2,)), "should be the placeholder"),
    ):
        with pytest.raises(ValueError, match=what):
            inputs_of(tokens, [wrong], part, CPU)


def test_a_folder_without_an_image_processor_says_what_is_missing(tmp_path: Path) -> None:
    path = save_vision_model(tmp_path / "model", "qwen2_vl")
    (path / "preprocessor_config.json").unlink()
    (path / "video_preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        part_in(path)


def test_a_processor_of_another_model_is_refused(tmp_path: Path) -> None:
    path = save_vision_model(tmp_path / "model", "qwen2_vl")
    file = path / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"patch_size": 14', '"patch_size": 16'))
    with pytest.raises(ConfigError, match=r"patch_size 16, its config\.json 14"):
        part_in(path)
