"""Random models through random layouts, exact; random damage, refused with nothing left.

    python -m tests.convert.fuzz --cases 2000 --seed 0

A case that fails is repeated by its number: --only 17.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from mcore_adapter.convert import commands
from mcore_adapter.convert.conversions import Settings
from mcore_adapter.convert.storage.json_file import read_json
from mcore_adapter.errors import ConversionError, LayoutError, McoreAdapterError
from mcore_adapter.models import table_of
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.damage import damage_layout, damage_source
from tests.convert.ended import Case, End, run_cases
from tests.convert.hf_classes import loaded
from tests.convert.random_models import (
    embedding_of,
    random_checkpoint,
    random_sizes,
    same_bits,
    weights_as_hugging_face_reads,
    write_files,
)

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ALONE = Settings(workers=1)
_BUILT = 3
"""Cases of damage for each model that is built for them."""


class Failed(AssertionError):
    """What a case showed."""


def run_case(number: int, seed: int, folder: Path) -> str:
    """One case, by its number: what it was and how it ended."""
    draw = random.Random(f"{seed} {number}")
    if number % 10 == 2:
        return "exact: " + _retyped(folder, draw)
    if number % 10 == 4:
        return "exact: " + _loaded(folder, draw)
    if number % 2 == 0:
        return "exact: " + _exact(folder, draw)
    return _damaged(folder, draw)


def _exact(folder: Path, draw: random.Random) -> str:
    src = random_checkpoint(folder / "src", draw)
    sizes = _to_mcore(src, folder / "one", draw)
    _to_mcore(folder / "one", folder / "two", draw)
    commands.to_hf(folder / "two", folder / "back", ALONE, max_shard_bytes=draw.choice([None, 900]))
    _check_same(weights_as_hugging_face_reads(src), folder / "back")
    for file in src.rglob("*"):
        if file.is_file() and ".safetensors" not in file.name:
            copy = folder / "back" / file.relative_to(src)
            if not copy.is_file() or copy.read_bytes() != file.read_bytes():
                raise Failed(f"{file.relative_to(src)} was not kept")
    return "cut" if sizes != ParallelSizes() else "whole"


def _loaded(folder: Path, draw: random.Random) -> str:
    """What transformers makes of the checkpoint that came back is what it makes of the first."""
    src = random_checkpoint(folder / "src", draw, floats=True)
    _to_mcore(src, folder / "one", draw)
    commands.to_hf(folder / "one", folder / "back", ALONE)
    one, other = (loaded(path, dtype="auto").state_dict() for path in (src, folder / "back"))
    if set(one) != set(other) or not all(same_bits(one[name], other[name]) for name in one):
        raise Failed("transformers loads another model")
    return "loaded by transformers"


def _retyped(folder: Path, draw: random.Random) -> str:
    """With --dtype: as PyTorch rounds, or refused where PyTorch has infinity for a number."""
    src = random_checkpoint(folder / "src", draw, floats=True)
    torch.manual_seed(draw.getrandbits(32))
    scale = 10.0 ** draw.choice([0, 0, 3, 4.7, 38])
    tensors = {
        name: (torch.randn(tensor.shape, dtype=torch.float64) * scale).to(tensor.dtype)
        for name, tensor in weights_as_hugging_face_reads(src).items()
    }
    if "lm_head.weight" in tensors and table_of(read_json(src / "config.json")).shape.tied:
        tensors["lm_head.weight"] = embedding_of(tensors).clone()
    for file in src.glob("*.safetensors*"):
        file.unlink()
    write_files(src, tensors, 1)
    name, dtype = draw.choice(list(TYPES.items()))
    expected = {
        key: tensor if "e_score_correction_bias" in key else tensor.to(dtype)
        for key, tensor in tensors.items()
    }
    lost = any((expected[k].isinf() & tensors[k].isfinite()).any() for k in tensors)
    try:
        commands.to_mcore(src, folder / "one", ParallelSizes(), Settings(name, workers=1))
    except ConversionError as error:
        if not lost or "choose another --dtype" not in str(error):
            raise Failed(f"to {name}: {error}") from error
        _check_nothing_left(folder / "one")
        return "an overflow refused"
    if lost:
        raise Failed(f"to {name}: a number became infinite")
    commands.to_hf(folder / "one", folder / "back", ALONE)
    _check_same(expected, folder / "back")
    return "another type"


def _to_mcore(src: Path, dst: Path, draw: random.Random) -> ParallelSizes:
    """In a random layout; if a width does not divide over it, in the next."""
    while True:
        sizes = random_sizes(src, draw)
        try:
            commands.to_mcore(src, dst, sizes, ALONE)
        except LayoutError:
            _check_nothing_left(dst)
            continue
        return sizes


def _damaged(folder: Path, draw: random.Random) -> str:
    src = random_checkpoint(folder / "src", draw)
    _to_mcore(src, folder / "layout", draw)
    for _ in range(_BUILT):
        of_layout = draw.random() < 0.4
        victim = folder / "victim"
        shutil.copytree(folder / "layout" if of_layout else src, victim)
        kind = (damage_layout if of_layout else damage_source)(victim, draw)
        try:
            if of_layout:
                commands.to_hf(victim, folder / "back", ALONE)
            else:
                commands.to_mcore(victim, folder / "mid", ParallelSizes(), ALONE)
                commands.to_hf(folder / "mid", folder / "back", ALONE)
        except McoreAdapterError as error:
            text = str(error)
            if "\n" in text or len(text) < 20 or len(text) > 3000:
                raise Failed(f"{kind}: not a message: {text!r}") from error
            _check_nothing_left(folder / "back")
            _check_nothing_left(folder / "mid")
            ended = "refused"
        except Exception as error:
            raise Failed(f"{kind}: {error!r}") from error
        else:
            # What was damaged carries no weight: those that are there came through.
            _check_same(
                weights_as_hugging_face_reads(src if of_layout else victim), folder / "back", kind
            )
            ended = "harmless"
        for name in ("victim", "mid", "back"):
            shutil.rmtree(folder / name, ignore_errors=True)
    return f"{ended}: {kind}"


def run_ended(count: int, seed: int, folder: Path) -> Counter[str]:
    """Conversions that are killed, stopped, or run out of disk at any moment."""
    draw = random.Random(f"{seed} ended")
    sources = [random_checkpoint(folder / f"src{n}", draw) for n in range(1 + count // 10)]
    cases: list[Case] = []
    for number in range(count):
        (folder / str(number)).mkdir()
        src = draw.choice(sources)
        full = draw.random() < 0.3
        cases.append(
            Case(
                src=str(src),
                dst=str(folder / str(number) / draw.choice(["dst", "a[b]", "ü *"])),
                layers=(0, _layers(src)),
                sizes={"pp": 2},
                workers=draw.choice([1, 2, 3]),
                signal=0 if full else draw.choice(SIGNALS),
                at=draw.randint(0, 20),
                full_after=draw.randrange(3000) if full else None,
            )
        )
    ends: Counter[str] = Counter()
    for case, end in zip(cases, run_cases(cases, folder), strict=True):
        ends[f"ended early: {_check_end(case, end)}"] += 1
    return ends


def _layers(src: Path) -> int:
    return int(table_of(json.loads((src / "config.json").read_text())).shape.num_layers)


def _check_end(case: Case, end: End) -> str:
    dst = Path(case.dst)
    left = os.listdir(dst.parent)
    if end.alive:
        raise Failed(f"{case}: {end.alive} workers are alive")
    if end.code == 0:
        if left != [dst.name]:
            raise Failed(f"{case}: done, but there are {left}")
    elif dst.exists() or (left and end.code != -signal.SIGKILL):
        raise Failed(f"{case}: {end} left {left}")
    if end.code == 3 and "is full (ENOSPC: No space left on device)" not in end.message:
        raise Failed(f"{case}: {end.message}")
    if end.code not in (0, 3, 130, *(-number for number in SIGNALS)):
        raise Failed(f"{case}: {end}")
    if end.code != 0:
        sizes = ParallelSizes(pp=2, layers=case.layers)
        commands.to_mcore(Path(case.src), dst, sizes, ALONE)
        if os.listdir(dst.parent) != [dst.name]:
            raise Failed(f"{case}: the next conversion left {os.listdir(dst.parent)}")
    commands.to_hf(dst, dst.parent / "back", ALONE)
    _check_same(weights_as_hugging_face_reads(Path(case.src)), dst.parent / "back")
    how = "full disk" if case.full_after is not None else signal.Signals(case.signal).name
    return f"{how}, {'done before' if end.code == 0 else 'stopped'}"


def _check_same(expected: dict[str, Tensor], back: Path, why: str = "") -> None:
    found = weights_as_hugging_face_reads(back)
    dropped = {name for name in expected if "rotary_emb.inv_freq" in name}
    if set(found) != set(expected) - dropped:
        raise Failed(f"{why} names differ: {sorted(set(found) ^ set(expected))[:4]}")
    for name, tensor in found.items():
        if not same_bits(tensor, expected[name]):
            raise Failed(f"{why} {name} differs")


def _check_nothing_left(dst: Path) -> None:
    left = [name for name in os.listdir(dst.parent) if name in (dst.name,) or "partial" in name]
    if left:
        raise Failed(f"left behind: {left}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ended", type=int, default=100, help="of the cases, those ended early")
    parser.add_argument("--only", type=int, default=None)
    given = parser.parse_args()
    numbers = range(given.cases - given.ended) if given.only is None else [given.only]
    ends: Counter[str] = Counter()
    faults, start, out = 0, time.monotonic(), functools.partial(print, flush=True)
    for number in numbers:
        with TemporaryDirectory() as scratch:
            try:
                ends[run_case(number, given.seed, Path(scratch))] += 1
            except Exception as error:  # noqa: BLE001 - every kind of failure is a finding
                faults += 1
                out(f"case {number}: {type(error).__name__}: {error}")
    if given.only is None:
        with TemporaryDirectory() as scratch:
            ends += run_ended(given.ended, given.seed, Path(scratch))
    for what, count in sorted(ends.items()):
        out(f"{count:5d} {what}")
    out(f"{ends.total() + faults} cases, {faults} failed, {time.monotonic() - start:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
