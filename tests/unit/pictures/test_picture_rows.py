"""Rows with pictures to tokens and patches, with transformers' own processor as the oracle."""

from __future__ import annotations

import json
import logging
import pickle
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from roll.commands.data.duplicates import duplicates_of
from roll.config.sections.data import (
    ColumnsConfig,
    DataConfig,
    PicturesConfig,
    PreferenceColumns,
    PreferenceDataConfig,
    PreferenceSource,
    SourceConfig,
    TextColumns,
    TextDataConfig,
    TextSource,
)
from roll.config.sections.engines import SglangConfig, VllmConfig
from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError, DataError
from roll.core.pictures import PromptTokens
from roll.core.types import Prompt
from roll.data.chat.tokenization import TokenSequence
from roll.data.collate import pair_batch, text_batch
from roll.data.datasets import Dataset, content_of, load_prompts
from roll.data.examples import load_preferences, load_texts
from roll.data.pictures.picture import EncodedPictures, Picture
from roll.data.pictures.placeholders import Placeholders
from roll.data.preparation.overlap import overlaps
from roll.models.image_processor import load_image_processor
from roll.runtime.run_data import check_pictures, placeholders
from roll.workers.pictures.patches import made
from tests.pictures import coloured, file_of
from tests.tiny import save_tiny_model
from tests.vision_models import (
    FAMILIES,
    IMAGE,
    MERGE,
    VISION_END,
    VISION_START,
    processor_settings,
    save_vision_model,
    vision_tokenizer,
)

FAMILY = "qwen2_vl"
SIZES = [(30, 50), (56, 28), (100, 300), (7, 9)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=str(save_vision_model(tmp_path_factory.mktemp("seeing"), FAMILY)))


def _source(folder: Path, rows: list[dict[str, Any]], **columns: Any) -> SourceConfig:
    for i, size in enumerate(SIZES):
        (folder / f"{i}.png").write_bytes(file_of(coloured(*size, seed=i)))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ColumnsConfig(**({"answer": None, "images": "images"} | columns))
    return SourceConfig(path=str(path), columns=settings)


def _load(source: SourceConfig, model: ModelConfig | None, **settings: Any) -> Dataset[Prompt]:
    data = DataConfig(sources=(source,), prompts_per_step=1, **settings)
    seen = None if model is None else placeholders(model, data.pictures)
    return load_prompts(data.sources, data, vision_tokenizer(), seen)


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_and_grids_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = save_vision_model(tmp_path / "model", family)
    processor = load_image_processor(ModelConfig(path=str(folder)), PicturesConfig())
    plain = Qwen2VLImageProcessorPil(**processor_settings(family))
    for i, (height, width) in enumerate(SIZES):
        image = coloured(height, width, seed=i)
        wanted = plain(image, return_tensors="np")
        grid = processor.grid(height, width)
        assert list(grid) == wanted["image_grid_thw"][0].tolist()
        patches = processor.patches(image)
        assert patches.dtype == np.dtype("uint8")
        assert len(patches) == np.prod(grid)
        frames, channels = 2, 3
        shape = (len(patches), channels, frames, *2 * [FAMILIES[family].patch_size])
        mean, std = (np.array(v).reshape(1, 3, 1, 1, 1) for v in FAMILIES[family].mean_and_std)
        normalised = (patches.reshape(shape) / 255 - mean) / std
        difference = normalised.reshape(len(patches), -1) - wanted["pixel_values"]
        assert np.abs(difference).max() < 1e-6


def test_a_prompt_has_one_placeholder_for_each_merged_patch(
    tmp_path: Path, model: ModelConfig
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a<image>b<image>", "images": ["0.png", "2.png"]},
        {"prompt": "none", "images": None},
    ]
    first, second = _load(_source(tmp_path, rows), model).items
    processor = load_image_processor(model, PicturesConfig())
    counts = [processor.num_tokens(processor.grid(*SIZES[i])) for i in (0, 2)]
    user, assistant, a, b = vision_tokenizer().convert_tokens_to_ids(
        ["<user>", "<assistant>", "a", "b"]
    )
    around = [[VISION_START, *[IMAGE] * count, VISION_END] for count in counts]
    assert list(first.tokens) == [user, a, *around[0], b, *around[1], assistant]
    assert first.pictures is not None
    assert first.pictures.places == (3, 3 + counts[0] + 3)
    assert first.pictures.grids == tuple(processor.grid(*SIZES[i]) for i in (0, 2))
    assert first.text.count("<|image_pad|>") == 2
    assert second.pictures is None
    assert type(second.tokens) is tuple


def test_a_worker_makes_the_patches_that_the_driver_has_counted(
    tmp_path: Path, model: ModelConfig
) -> None:
    rows = [{"prompt": "<image>" * 4, "images": [f"{i}.png" for i in range(4)]}]
    [prompt] = _load(_source(tmp_path, rows), model).items
    pictures = prompt.pictures
    assert pictures is not None
    assert isinstance(pictures.patches, EncodedPictures)
    processor = load_image_processor(model, PicturesConfig())
    patches = made(processor, pictures.patches.pictures, pictures.grids).get()
    wanted = [processor.patches(coloured(*size, seed=i)) for i, size in enumerate(SIZES)]
    assert np.array_equal(patches, np.concatenate(wanted))
    assert len(patches) == pictures.num_patches()
    with pytest.raises(RuntimeError, match="not made yet"):
        pictures.patches.get()


def test_limits_of_pixels_change_the_number_of_tokens(tmp_path: Path, model: ModelConfig) -> None:
    rows = [{"prompt": "<image>", "images": ["2.png"]}, {"prompt": "<image>", "images": ["3.png"]}]
    source = _source(tmp_path, rows)
    usual = [len(prompt.tokens) for prompt in _load(source, model).items]
    limits = {"min_pixels": 4 * 28 * 28, "max_pixels": 8 * 28 * 28}
    limited = _load(source, model, pictures=limits).items
    assert len(limited[0].tokens) < usual[0]
    assert len(limited[1].tokens) > usual[1]
    assert limited[0].pictures is not None
    _, height, width = limited[0].pictures.grids[0]
    assert height * width * 14 * 14 <= limits["max_pixels"]
    with pytest.raises(ValueError, match="min_pixels = 5 must not lie above max_pixels = 4"):
        PicturesConfig(min_pixels=5, max_pixels=4)


def test_a_limit_of_the_user_wins_over_the_other_one_of_the_processor(tmp_path: Path) -> None:
    side = FAMILIES[FAMILY].patch_size * MERGE
    model = ModelConfig(path=str(save_vision_model(tmp_path / "model", FAMILY)))
    file = tmp_path / "model" / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings["size"] = {"shortest_edge": 16 * side * side, "longest_edge": 36 * side * side}
    file.write_text(json.dumps(settings))

    def tokens(area: int, **limits: int) -> int:
        processor = load_image_processor(model, PicturesConfig(**limits))
        return processor.num_tokens(processor.grid(area * side, area * side))

    assert [tokens(area) for area in (3, 5, 7)] == [16, 25, 36]
    few = 12 * side * side
    assert [tokens(area, max_pixels=few) for area in (3, 5, 7)] == [9, 9, 9]
    many = 49 * side * side
    assert [tokens(area, min_pixels=many) for area in (3, 5, 7, 8)] == [49, 49, 49, 49]


def test_long_prompts_are_counted_with_their_pictures(tmp_path: Path, model: ModelConfig) -> None:
    rows = [{"prompt": "<image>", "images": [f"{i}.png"]} for i in (0, 1, 2, 3)]
    loaded = _load(_source(tmp_path, rows), model, max_prompt_tokens=8)
    assert [prompt.id for prompt in loaded.items] == ["rows:0", "rows:1", "rows:3"]
    assert (loaded.report[0].too_long, loaded.report[0].longest_tokens) == (1, 48)


def test_broken_pictures_are_counted_and_named(
    tmp_path: Path, model: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "<image>x", "images": [f"{i % 4}.png"]} for i in range(12)]
    rows[3]["images"] = ["none.png"]
    rows[7]["images"] = ["damaged.png"]
    rows[9] = {"prompt": "<image>x", "images": ["thread.png"]}
    source = _source(tmp_path, rows)
    (tmp_path / "damaged.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing more")
    (tmp_path / "thread.png").write_bytes(file_of(coloured(1, 300)))
    with caplog.at_level(logging.INFO):
        loaded = _load(source, model)
    [report] = loaded.report
    assert (report.kept, report.rows) == (9, 12)
    [remark] = report.remarks
    assert remark.startswith("3 of 12 rows left out because of pictures that cannot be read: ")
    for place, reason in [
        ("rows.jsonl:4", "No such file"),
        ("rows.jsonl:8", "known format"),
        ("rows.jsonl:10", "aspect ratio"),
    ]:
        assert place in remark
        assert reason in remark
    assert "rows:4" in {prompt.id for prompt in loaded.items}  # ids count all rows
    assert remark in caplog.text


def test_a_source_of_mostly_broken_pictures_is_refused(tmp_path: Path, model: ModelConfig) -> None:
    rows = [{"prompt": "<image>x", "images": ["none.png"]}] * 3
    with pytest.raises(DataError, match=r"3 of 3 rows left out .*rows\.jsonl:1"):
        _load(_source(tmp_path, rows), model)


def test_another_picture_is_another_dataset(tmp_path: Path, model: ModelConfig) -> None:
    rows = [{"prompt": "<image>", "images": ["0.png"]}]
    source = _source(tmp_path, rows)
    first = _load(source, model).fingerprint
    assert _load(source, model).fingerprint == first
    (tmp_path / "0.png").write_bytes(file_of(coloured(30, 50, seed=9)) + b" ")
    assert _load(source, model).fingerprint != first


def test_rows_with_other_pictures_of_the_same_size_do_not_overlap(
    tmp_path: Path, model: ModelConfig
) -> None:
    rows = [{"prompt": "<image>", "images": [f"{name}.png"]} for name in "abcb"]
    for name, seed in zip("abc", range(3), strict=True):
        (tmp_path / f"{name}.png").write_bytes(file_of(coloured(56, 56, seed=seed)))
    held = _load(_source(tmp_path, rows[:1]), model)
    train = _load(_source(tmp_path, rows[1:]), model)
    assert len({tuple(prompt.tokens) for prompt in (*train.items, *held.items)}) == 1
    assert overlaps(train, held, content_of) == []
    assert duplicates_of(train.sources[0], content_of).first == ("rows:2", "rows:0")
    again = _load(_source(tmp_path, rows), model)
    assert [each.places for each in overlaps(again, held, content_of)] == [(0,)]
    assert overlaps(train, again, content_of)[0].places == (0, 1, 2)


@pytest.mark.parametrize(
    ("template", "text", "says"),
    [
        ("{{ messages[0].role }}", "<image>", "writes 0 placeholders .* for 1 pictures"),
        (None, "<image> and <|image_pad|>", "writes 2 placeholders"),
    ],
)
def test_placeholders_that_stand_for_no_picture_are_refused(
    tmp_path: Path, model: ModelConfig, template: str | None, text: str, says: str
) -> None:
    tokenizer = vision_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    data = DataConfig(
        sources=(_source(tmp_path, [{"prompt": text, "images": ["0.png"]}]),), prompts_per_step=1
    )
    with pytest.raises(DataError, match=says):
        load_prompts(data.sources, data, tokenizer, placeholders(model, data.pictures))


def test_who_cannot_take_pictures_says_so(tmp_path: Path, model: ModelConfig) -> None:
    source = _source(tmp_path, [{"prompt": "<image>", "images": ["0.png"]}])
    blind = ModelConfig(path=str(save_tiny_model(tmp_path / "blind")))
    with pytest.raises(ConfigError, match="takes no pictures"):
        _load(source, blind)
    with pytest.raises(DataError, match="nothing here takes any"):
        _load(source, None)
    with pytest.raises(DataError, match=r"pictures need a chat template"):
        _load(source, model, chat_template=False)


def _dialogues(folder: Path) -> list[dict[str, Any]]:
    _source(folder, [])
    return [{"prompt": "see <image> a", "images": ["2.png"], "good": "yes", "bad": "no"}]


def test_trained_tokens_are_those_of_the_answer(tmp_path: Path, model: ModelConfig) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(_dialogues(tmp_path)[0]))
    columns = TextColumns(messages=None, prompt="prompt", completion="good", images="images")
    source = TextSource(path=str(tmp_path / "t.jsonl"), columns=columns)
    data = TextDataConfig(sources=(source,), rows_per_step=1)
    seen = placeholders(model, data.pictures)
    [example] = load_texts(data.sources, data, vision_tokenizer(), seen).items
    [sequence] = example.sequences
    [(start, stop)] = sequence.trained
    assert vision_tokenizer().decode(sequence.tokens[start:stop]) == "yes<eos>"
    assert sequence.pictures is not None
    [place] = sequence.pictures.places
    assert sequence.tokens[place - 1 : place + 1] == (VISION_START, IMAGE)
    assert sequence.tokens.count(IMAGE) == 44
    batch = text_batch([example])
    assert batch.pictures == [sequence.pictures]
    assert batch.loss_mask.nonzero()[:, 1].tolist() == list(range(start, stop))


def test_both_responses_of_a_pair_see_the_picture(tmp_path: Path, model: ModelConfig) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(_dialogues(tmp_path)[0]))
    columns = PreferenceColumns(chosen="good", rejected="bad", images="images")
    source = PreferenceSource(path=str(tmp_path / "p.jsonl"), columns=columns)
    data = PreferenceDataConfig(sources=(source,), rows_per_step=1)
    seen = placeholders(model, data.pictures)
    [example] = load_preferences(data.sources, data, vision_tokenizer(), seen).items
    batch = pair_batch([example])
    assert batch.pictures is not None
    chosen, rejected = batch.pictures
    assert chosen is not None
    assert chosen == rejected


def test_rows_with_pictures_are_never_cut(tmp_path: Path, model: ModelConfig) -> None:
    rows = [*_dialogues(tmp_path), {"prompt": "short", "images": None, "good": "yes"}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = TextColumns(messages=None, prompt="prompt", completion="good", images="images")
    source = TextSource(path=str(tmp_path / "t.jsonl"), columns=columns)
    for rule in ("drop", "cut_start", "cut_end"):
        data = TextDataConfig(sources=(source,), rows_per_step=1, max_tokens=30, too_long=rule)
        seen = placeholders(model, data.pictures)
        loaded = load_texts(data.sources, data, vision_tokenizer(), seen)
        assert [example.id for example in loaded.items] == ["t:1"], rule
        assert "never cut" in loaded.report[0].remarks[0]


def test_what_is_behind_the_last_trained_turn_is_not_read(
    tmp_path: Path, model: ModelConfig
) -> None:
    _source(tmp_path, [])
    shown = [
        {"role": "user", "content": ["look", {"type": "image", "image": name}]}
        for name in ("0.png", "1.png", "none.png")
    ]
    answer = {"role": "assistant", "content": "yes"}
    row = {"messages": [shown[0], answer, shown[1], answer, shown[2]]}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    data = TextDataConfig(sources=(TextSource(path=str(tmp_path / "t.jsonl")),), rows_per_step=1)
    [found] = load_texts(
        data.sources, data, vision_tokenizer(), placeholders(model, data.pictures)
    ).items
    [sequence] = found.sequences
    assert sequence.pictures is not None
    assert len(sequence.pictures.places) == len(sequence.trained) == 2


def test_equal_tokens_of_a_row_are_one_object(model: ModelConfig) -> None:
    picture = Picture("a", "", "1", height=56, width=84)
    large = 151655  # Python shares the small ones anyway
    processor = replace(load_image_processor(model, PicturesConfig()), token_id=large)
    plain = TokenSequence((VISION_START, large, VISION_END, IMAGE), ((3, 4),))
    found = plain.with_pictures([picture], Placeholders(lambda: processor), "here")
    marks = [token for token in found.tokens if token == large]
    assert len(marks) > 1
    assert len({id(token) for token in marks}) == 1


def test_a_picture_in_an_answer_is_refused(tmp_path: Path, model: ModelConfig) -> None:
    _source(tmp_path, [])
    answer = {"role": "assistant", "content": ["here ", {"type": "image", "image": "0.png"}]}
    row = {"messages": [{"role": "user", "content": "draw"}, answer]}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    data = TextDataConfig(sources=(TextSource(path=str(tmp_path / "t.jsonl")),), rows_per_step=1)
    with pytest.raises(DataError, match="holds a picture, which no model writes"):
        load_texts(data.sources, data, vision_tokenizer(), placeholders(model, data.pictures))


def test_pictures_in_messages_are_refused_for_an_engine_that_takes_none(
    tmp_path: Path, model: ModelConfig
) -> None:
    parts = [{"type": "image", "image": "0.png"}, {"type": "text", "text": "a"}]
    rows = [{"messages": [{"role": "user", "content": each}]} for each in ("b", parts)]
    source = _source(tmp_path, rows, prompt=None, messages="messages", images=None)
    prompts = _load(source, model)
    check_pictures(prompts, VllmConfig())
    with pytest.raises(ConfigError, match=r"row rows:1 has pictures.*use vllm or hf"):
        check_pictures(prompts, SglangConfig())


def test_tokens_of_a_large_picture_take_few_bytes_on_their_way() -> None:
    tokens = PromptTokens.of([5, 6, *[151655] * 16384, 7])
    packed = pickle.dumps(tokens)
    assert len(packed) < 500
    arrived = pickle.loads(packed)
    assert arrived == tokens
    assert isinstance(arrived, PromptTokens)
    assert isinstance(arrived, array)
    assert len(pickle.dumps(arrived)) == len(packed)
