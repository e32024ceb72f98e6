"""Damage to checkpoints and layouts, as users, disks and strangers do it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tests.convert.random_models import read

INDEX = "model.safetensors.index.json"
STRANGE: tuple[Any, ...] = (
    None, True, "", "8", "\ud800", -1, 0, 1, 2, 3, 5, 7, 8, 0.5, 1e400, 10**30, 2**63, [], [1],
    ["a"], {}, {"a": []},
)  # fmt: skip


def damage_source(folder: Path, draw: random.Random) -> str:
    """To a Hugging Face checkpoint; says what was done."""
    return _one_of((_config, _count, _shape, _rename, _drop, _file, _header, _index), folder, draw)


def damage_layout(folder: Path, draw: random.Random) -> str:
    """To a Megatron layout; says what was done."""
    return _one_of((_meta, _shape, _rename, _drop, _file, _header, _count), folder, draw)


Damage = Callable[[Path, random.Random], str | None]


def _one_of(kinds: tuple[Damage, ...], folder: Path, draw: random.Random) -> str:
    while True:
        done = draw.choice(kinds)(folder, draw)
        if done is not None:
            return done


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _config(folder: Path, draw: random.Random) -> str:
    _strange(folder / "config.json", draw)
    return "config"


def _meta(folder: Path, draw: random.Random) -> str | None:
    path = folder / "mcore.json"
    whole = path.read_bytes()
    _strange(path, draw)
    try:
        was, now = json.loads(whole), json.loads(path.read_bytes())
        # As good as before: these choose between names for the same tensors. Without `fused`, a
        # layout counts as one of earlier versions, whose experts never were.
        named = now.get("fused", False)
        same = (type(named) is bool and named != was["fused"]) or (
            was["repeats"] and now["repeats"] == []
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "mcore.json"
    if same and now != was:
        path.write_bytes(whole)
        return None
    return "mcore.json"


def _index(folder: Path, draw: random.Random) -> str | None:
    path = folder / INDEX
    if not path.is_file():
        if draw.random() < 0.5:
            return None
        path.write_text(json.dumps({"weight_map": {"model.norm.weight": "elsewhere.safetensors"}}))
        return "a stale index"
    if draw.random() < 0.4:
        _strange(path, draw)
        return "index"
    found = json.loads(path.read_text())
    entries = found["weight_map"]
    name, files = draw.choice(list(entries)), sorted(set(entries.values()))
    how = draw.choice(["swap", "invent", "forget", "outside", "strange", "nowhere"])
    if how == "swap":
        entries[name] = draw.choice([file for file in files if file != entries[name]])
    elif how == "invent":
        entries["model.layers.0.mlp.new.weight"] = files[0]
    elif how == "forget":
        del entries[name]
    elif how == "outside":
        entries[name] = draw.choice(["../config.json", "/etc/passwd", "..", "", "a\0b"])
    elif how == "strange":
        entries[name] = draw.choice(STRANGE)
    else:
        entries[name] = "model-00009-of-00009.safetensors"
    path.write_text(json.dumps(found))
    return f"index: {how}"


def _count(folder: Path, draw: random.Random) -> str | None:
    """Another number in `config.json`: heads, experts, layers, widths, the vocabulary."""
    path = folder / "config.json"
    found = json.loads(path.read_text())
    names = [name for name, value in found.items() if type(value) is int]
    if not names:
        return None
    name = draw.choice(names)
    found[name] = max(0, found[name] + draw.choice([-2, -1, 1, 2, 10]))
    path.write_text(json.dumps(found))
    return "a count of config.json"


def _change(file: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = read(file)
    change(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, file, metadata={"format": "pt"})


def _shape(folder: Path, draw: random.Random) -> str | None:
    """One row or column more or less, or a dimension more, in a file that is whole."""
    file = draw.choice(_files(folder))

    def change(tensors: dict[str, Tensor]) -> None:
        if not tensors:
            return
        name = draw.choice(sorted(tensors))
        tensor = tensors[name]
        dim = draw.randrange(tensor.ndim)
        how = draw.choice(["less", "more", "unsqueeze", "flatten"])
        if how == "less":
            tensors[name] = tensor.narrow(dim, 0, tensor.shape[dim] - 1).clone()
        elif how == "more":
            index = [*range(tensor.shape[dim]), 0]
            tensors[name] = tensor.transpose(0, dim)[index].transpose(0, dim).clone()
        elif how == "unsqueeze":
            tensors[name] = tensor.unsqueeze(dim).clone()
        else:
            tensors[name] = tensor.flatten().clone()

    _change(file, change)
    return "the shape of a tensor"


def _rename(folder: Path, draw: random.Random) -> str | None:
    names = ("x", "model.layers.99.mlp.up_proj.weight", "\u2603\n\x1b[31m", "", "__metadata__x")

    def change(tensors: dict[str, Tensor]) -> None:
        if tensors:
            tensors[draw.choice(names)] = tensors.pop(draw.choice(sorted(tensors)))

    _change(draw.choice(_files(folder)), change)
    return "the name of a tensor"


def _drop(folder: Path, draw: random.Random) -> str | None:
    def change(tensors: dict[str, Tensor]) -> None:
        if tensors:
            tensors.pop(draw.choice(sorted(tensors)))

    _change(draw.choice(_files(folder)), change)
    return "a tensor dropped"


def _file(folder: Path, draw: random.Random) -> str | None:
    """A file that is cut, longer, empty, gone, a folder, or a link to nothing."""
    file = draw.choice(_files(folder))
    how = draw.choice(["cut", "cut", "longer", "empty", "gone", "folder", "link"])
    size = file.stat().st_size
    if how == "cut":
        os.truncate(file, draw.randrange(size))
    elif how == "longer":
        os.truncate(file, size + draw.randint(1, 100))
    elif how == "empty":
        os.truncate(file, 0)
    else:
        file.unlink()
        if how == "folder":
            file.mkdir()
        elif how == "link":
            file.symlink_to("nowhere")
    return f"a file: {how}"


def _header(folder: Path, draw: random.Random) -> str | None:
    """Any byte of a header, or a field of an entry, another."""
    file = draw.choice(_files(folder))
    whole = bytearray(file.read_bytes())
    length = int.from_bytes(whole[:8], "little")
    if draw.random() < 0.4:
        for _ in range(draw.randint(1, 3)):
            whole[draw.randrange(8 + length)] = draw.randrange(256)
        file.write_bytes(whole)
        return "bytes of a header"
    header = json.loads(whole[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return None
    entry = header[draw.choice(names)]
    field = draw.choice(["dtype", "shape", "data_offsets", "number"])
    if field == "number":
        numbers = entry[draw.choice(["shape", "data_offsets"])]
        if not numbers:
            return None
        numbers[draw.randrange(len(numbers))] = draw.choice(STRANGE)
    else:
        entry[field] = draw.choice([*STRANGE, "F8_E4M3", "F32", "U8", "BOOL"])
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    return f"a header: {field}"


def _strange(path: Path, draw: random.Random) -> None:
    """Any value of a JSON file another, or no JSON at all."""
    if draw.random() < 0.2:
        texts = (b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b'"text"')
        path.write_bytes(draw.choice(texts))
        return
    found = json.loads(path.read_text())
    place, key = found, draw.choice(list(found))
    while isinstance(place[key], dict | list) and place[key] and draw.random() < 0.7:
        place = place[key]
        key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
    if isinstance(place, dict) and draw.random() < 0.2:
        del place[key]
    else:
        place[key] = draw.choice(STRANGE)
    path.write_text(json.dumps(found))
