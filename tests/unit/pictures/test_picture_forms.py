"""Pictures in every form that rows have, and what is said about those that cannot be read."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from roll.config.sections.data import ColumnsConfig, SourceConfig
from roll.core.errors import DataError, PictureError
from roll.data.columns import PromptRow, map_row
from roll.data.pictures.decoding import decoded, upright_size
from roll.data.pictures.forms import picture_of, pictures_of
from roll.data.sources import read_source
from tests.pictures import coloured, file_of, in_every_form

FORMS = list(in_every_form(coloured(1, 1), Path("/tmp")))


def _rows(path: Path, **columns: Any) -> list[PromptRow]:
    settings = ColumnsConfig(**({"answer": None, "images": "images"} | columns))
    return read_source(SourceConfig(path=str(path), columns=settings), map_row)


def _jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_picture(tmp_path: Path, form: str) -> None:
    image = coloured(30, 50)
    [found] = pictures_of(in_every_form(image, tmp_path)[form], "a.jsonl:1", tmp_path)
    assert (found.wrong, found.height, found.width) == ("", 30, 50)
    assert np.array_equal(np.asarray(decoded(found.read())), np.asarray(image))


def test_a_column_holds_one_picture_or_several_or_none(tmp_path: Path) -> None:
    data = [file_of(coloured(4, 5, seed=i)) for i in range(3)]
    assert pictures_of(None, "x", tmp_path) == ()
    assert pictures_of([], "x", tmp_path) == ()
    assert len(pictures_of(data[0], "x", tmp_path)) == 1
    found = pictures_of(data, "a.jsonl:7", tmp_path)
    assert [picture.read() for picture in found] == data
    assert [picture.name for picture in found][1] == "a.jsonl:7, picture 2"
    assert len({picture.identity for picture in found}) == 3


@pytest.mark.parametrize("scheme", ["http", "https", "s3", "HTTPS"])
def test_nothing_is_taken_from_a_network(tmp_path: Path, scheme: str) -> None:
    with pytest.raises(DataError, match=r"row 3 is a \w+ URL .*Download the pictures before"):
        picture_of(f"{scheme}://host/a.png", "row 3", tmp_path)


def test_a_value_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is of type int; a picture is bytes, a path"):
        pictures_of([3], "x", tmp_path)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (b"not a picture at all", "no picture in a known format"),
        (b"", "no picture in a known format"),
        ("no_such_file.png", "No such file"),
        ("ordner/größe/" + "x" * 70, "No such file"),
        ("data:image/png;base64,????", "damaged data: URL"),
        ("data:image/png", "without a comma"),
        ({"bytes": None, "path": None}, "nothing"),
        (None, "nothing"),
    ],
)
def test_what_cannot_be_read_says_why_and_ends_nothing(
    tmp_path: Path, value: Any, says: str
) -> None:
    [found] = pictures_of([value], "a.jsonl:4", tmp_path)
    assert says in found.wrong
    assert found.name.startswith("a.jsonl:4, picture 1")


def test_only_formats_without_programs_of_their_own_are_opened(tmp_path: Path) -> None:
    """Pillow has other programs read EPS."""
    eps = file_of(coloured(8, 8), "EPS")
    assert "known format" in picture_of(eps, "x", tmp_path).wrong
    for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF"):
        found = picture_of(file_of(coloured(16, 24), form), "x", tmp_path)
        assert (found.height, found.width) == (16, 24), form


def test_a_damaged_end_shows_when_the_picture_is_decoded() -> None:
    data = file_of(coloured(200, 200))
    assert upright_size(data[:1000]) == (200, 200)
    with pytest.raises(PictureError):
        decoded(data[:1000])
    with pytest.raises(PictureError):
        decoded(file_of(coloured(200, 200), "JPEG")[:1000])


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_as_the_camera_was_held(form: str, orientation: int) -> None:
    """Pillow's own way, which decodes the picture first, is the oracle."""
    image = coloured(20, 30)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(image, form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))
    from io import BytesIO

    from PIL.ImageOps import exif_transpose

    with Image.open(BytesIO(data)) as plain:
        upright = exif_transpose(plain).convert("RGB")
    found = decoded(data)
    assert upright_size(data) == (found.height, found.width)
    assert np.array_equal(np.asarray(found), np.asarray(upright))


def test_transparent_parts_are_white() -> None:
    pixels = np.zeros((2, 2, 4), dtype=np.uint8)
    pixels[0, 0] = [10, 20, 30, 255]
    found = np.asarray(decoded(file_of(Image.fromarray(pixels))))
    assert found[0, 0].tolist() == [10, 20, 30]
    assert found[1, 1].tolist() == [255, 255, 255]
    palette = coloured(8, 8).convert("P")
    with_hole = decoded(file_of(palette, transparency=palette.getpixel((0, 0))))
    assert with_hole.getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    deep = Image.fromarray(np.full((4, 4), 0x8000, dtype=np.uint16))
    assert np.asarray(decoded(file_of(deep))).max() == 0x80
    floats = Image.fromarray(np.ones((4, 4), dtype=np.float32))
    with pytest.raises(PictureError, match="mode F"):
        decoded(file_of(floats, "TIFF"))


def test_another_process_reads_the_bytes_while_this_one_lives(tmp_path: Path) -> None:
    data = file_of(coloured(5, 6))
    found = picture_of(data, "x", tmp_path)
    packed = pickle.dumps(found)
    assert len(packed) < 400
    code = (
        "import pickle, sys; data = pickle.load(sys.stdin.buffer);"
        "sys.stdout.buffer.write(pickle.loads(pickle.dumps(data)).read())"
    )
    done = subprocess.run([sys.executable, "-c", code], input=packed, capture_output=True)
    assert done.stdout == data, done.stderr


def test_files_of_all_formats_give_the_same_rows(tmp_path: Path) -> None:
    images = [coloured(10, 12, seed=i) for i in range(3)]
    data = [file_of(image) for image in images]
    for i, each in enumerate(data):
        (tmp_path / f"{i}.png").write_bytes(each)
    prompts = ["<image>one", "<image>two<image>", "none"]
    numbers = [[0], [1, 2], []]
    _jsonl(
        tmp_path / "a.jsonl",
        *(
            {"prompt": text, "images": [f"{i}.png" for i in own]}
            for text, own in zip(prompts, numbers, strict=True)
        ),
    )
    rows = [
        {"prompt": text, "images": [{"bytes": data[i], "path": None} for i in own]}
        for text, own in zip(prompts, numbers, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())}
    )
    in_pillow = [
        {"prompt": text, "images": [images[i] for i in own]}
        for text, own in zip(prompts, numbers, strict=True)
    ]
    datasets.Dataset.from_list(in_pillow, features=features).save_to_disk(tmp_path / "disk")
    for name in ("a.jsonl", "a.parquet", "disk"):
        found = _rows(tmp_path / name)
        assert [len(row.pictures) for row in found] == [1, 2, 0], name
        for row, own in zip(found, numbers, strict=True):
            for picture, i in zip(row.pictures, own, strict=True):
                pixels = np.asarray(decoded(picture.read()))
                assert np.array_equal(pixels, np.asarray(images[i])), name
        assert (found[2].prompt, found[2].messages) == ("none", None)
        [message] = found[1].messages or ()
        assert message.content == "two"
        assert [isinstance(part, str) for part in message.parts] == [False, True, False]


def test_pictures_leave_memory(tmp_path: Path) -> None:
    import tracemalloc

    data = file_of(coloured(300, 300))
    rows = [{"prompt": "<image>", "images": [{"bytes": data, "path": None}]}] * 20
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    del rows
    tracemalloc.start()
    try:
        found = _rows(tmp_path / "a.parquet")
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < len(data), held
    assert found[19].pictures[0].read() == data


def _messages(tmp_path: Path, content: Any, **columns: Any) -> PromptRow:
    rows = [{"messages": [{"role": "user", "content": content}], "images": ["a.png", "b.png"]}]
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").write_bytes(file_of(coloured(4, 4, seed=ord(name))))
    settings = {"prompt": None, "messages": "messages", "images": None} | columns
    [row] = _rows(_jsonl(tmp_path / "m.jsonl", *rows), **settings)
    return row


def test_parts_of_a_message_hold_pictures(tmp_path: Path) -> None:
    data_url = in_every_form(coloured(4, 4), tmp_path)["data URL"]
    row = _messages(
        tmp_path,
        [
            {"type": "text", "text": "A ", "image": None},
            {"type": "image", "image": "a.png", "text": None},
            "then ",
            {"type": "image_url", "image_url": {"url": data_url}},
            {"type": "image_url", "image_url": "b.png"},
        ],
    )
    [message] = row.messages or ()
    assert message.content == "A then "
    kinds = [part if isinstance(part, str) else "picture" for part in message.parts]
    assert kinds == ["A ", "picture", "then ", "picture", "picture"]
    assert not any(picture.wrong for picture in row.pictures)


def test_parts_without_a_picture_and_marks_take_those_of_the_column(tmp_path: Path) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "and <image>?"}]
    by_parts = _messages(tmp_path, parts, images="images")
    by_marks = _messages(tmp_path, "<image>and <image>?", images="images")
    assert by_parts.pictures == by_marks.pictures
    [message] = by_marks.messages or ()
    assert message.content == "and ?"


def test_without_marks_the_pictures_come_first(tmp_path: Path) -> None:
    [message] = _messages(tmp_path, "what is this?", images="images").messages or ()
    assert [isinstance(part, str) for part in message.parts] == [False, False, True]


def test_texts_in_parts_are_plain_text(tmp_path: Path) -> None:
    [message] = _messages(tmp_path, [{"type": "text", "text": "a"}, "b"]).messages or ()
    assert (message.content, message.parts) == ("ab", ())


@pytest.mark.parametrize(
    ("content", "columns", "says"),
    [
        ("<image>", {"images": "images"}, "1 places for pictures .* 2 pictures"),
        ([{"type": "image"}], {}, "holds no picture; .* columns.images"),
        ([{"type": "video", "video": "a.mp4"}], {}, "videos are not read; give its frames"),
        ([{"type": "audio", "audio": "a.wav"}], {}, "has the type 'audio'"),
        ([3], {}, "is a int"),
        ([{"type": "text"}], {}, "has the type 'text' and the keys type"),
    ],
)
def test_parts_that_make_no_sense_are_named(
    tmp_path: Path, content: Any, columns: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataError, match=says) as raised:
        _messages(tmp_path, content, **columns)
    assert "m.jsonl:1" in str(raised.value)


def test_marks_without_a_column_are_text(tmp_path: Path) -> None:
    [row] = _rows(_jsonl(tmp_path / "a.jsonl", {"prompt": "<image>"}), images=None)
    assert (row.prompt, row.pictures) == ("<image>", ())


def test_a_mark_without_a_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:1: 1 places for pictures"):
        _rows(_jsonl(tmp_path / "a.jsonl", {"prompt": "<image>", "images": None}))
