"""Make the model and the data of the vision quickstart, in four minutes and without a network.

A picture has 3 x 3 squares of 14 x 14 pixels, and the model says how many of them are red. The
model (Qwen3-VL architecture, 0.8 M parameters) learns by SFT from a teacher that is right in 46 of
100 cases. So it knows what an answer is, and is right no more often than that.

    python examples/counting.py [--out outputs/counting] [--seed 0]
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from examples.tiny_model import (
    VISION_TOKENS,
    run_script,
    splitter,
    tokenizer_of,
    warm_start,
    write_vision_model,
)

SQUARES, PIXELS = 3, 14
COLOURS = {
    "red": (200, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 70, 200),
    "yellow": (220, 200, 60),
}
NOISE = 24
"""Largest change of the brightness of a pixel, up or down."""
MOST = 5
"""Largest number of red squares. There are too few boards with more of them (one with nine, 27 with
eight) to teach what the model is asked for."""
SKILL = 0.4
"""Share of the demonstrations whose answer is the right one; the others are random digits, of which
one in ten is right, too."""
DEMONSTRATIONS, TRAIN, HELD_OUT = 24_000, 2_048, 256
ROLES = ["<user>", "<assistant>", *VISION_TOKENS]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{{ m.content }}<eos>"
    "{% else %}<user>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

Row = dict[str, Any]


def make_model(folder: Path) -> None:
    """Write a model with random weights, its tokenizer and its image processor. A merged patch is a
    square of a picture."""
    pieces = ["red", "?", *"0123456789"]
    tokenizer = tokenizer_of(pieces, splitter(["red"]), roles=ROLES, chat_template=CHAT_TEMPLATE)
    write_vision_model(folder, tokenizer, positions=64, patch_size=PIXELS // 2)


def boards(dice: random.Random) -> Iterator[tuple[str, ...]]:
    """Yield boards without end, none twice: the colours of the squares, row by row. Each number of
    red squares up to `MOST` is equally likely."""
    seen = set()
    others = [name for name in COLOURS if name != "red"]
    while True:
        red = dice.randint(0, MOST)
        names = ["red"] * red + dice.choices(others, k=SQUARES**2 - red)
        board = tuple(dice.sample(names, len(names)))
        if board not in seen:
            seen.add(board)
            yield board


def png(board: tuple[str, ...], noise: np.random.Generator) -> bytes:
    """Return a picture of the board as a PNG file."""
    colours = np.array([COLOURS[name] for name in board]).reshape(SQUARES, SQUARES, 3)
    pixels = colours.repeat(PIXELS, 0).repeat(PIXELS, 1)
    pixels = pixels + noise.integers(-NOISE, NOISE + 1, (*pixels.shape[:2], 1))
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, format="PNG")
    return file.getvalue()


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows with pictures as Hugging Face does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def row(board: tuple[str, ...], noise: np.random.Generator, said: str | None = None) -> Row:
    """Return a problem; with what the teacher has said, a demonstration."""
    pictures = [{"bytes": png(board, noise), "path": None}]
    asked = {"prompt": "<image>red?", "images": pictures, "answer": str(board.count("red"))}
    return asked if said is None else asked | {"completion": said}


def teacher(board: tuple[str, ...], dice: random.Random) -> str:
    """Return what the teacher says of a board."""
    red = board.count("red") if dice.random() < SKILL else dice.randint(0, 9)
    return str(red)


def make(out: Path, seed: int) -> None:
    """Write the problems and the demonstrations, and train the model on these."""
    dice, noise = random.Random(seed), np.random.default_rng(seed)
    drawn = boards(dice)
    for name, count in (("held_out", HELD_OUT), ("train", TRAIN)):
        write(out / f"{name}.parquet", (row(next(drawn), noise) for _ in range(count)))
    warm = out / "warm_start"
    lessons = (next(drawn) for _ in range(DEMONSTRATIONS))
    rows = (row(board, noise, teacher(board, dice)) for board in lessons)
    write(warm / "train.parquet", rows)
    torch.manual_seed(seed)
    make_model(warm / "model")
    warm_start("rlvr_vision_quickstart", out, seed, "train.parquet")


if __name__ == "__main__":
    run_script(make, "outputs/counting", (__doc__ or "").splitlines()[0])
