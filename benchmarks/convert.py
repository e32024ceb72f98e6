"""Benchmark of the time and memory of checkpoint conversion.

    python benchmarks/convert.py [--folder DIR] [--rounds N]

A random llama of about 1 B parameters in bf16 is converted to TP 2 x PP 2 and back to Hugging Face
files, by the command line that users run. The times include the start of the interpreter and the
flush to the disk. In each round the same bytes are also copied by `cp`, once without and once with
a flush, because `cp` alone leaves the flush to the kernel.

The source is in the page cache. A copy of the source is made and removed before each measurement,
so that all of them find the kernel's memory in the same state: a virtual machine may have to ask
its host for pages that it has not used lately, and then `cp` itself takes three times as long. For
the same reason the fastest round counts, because only the machine varies between rounds.

The second model has twice as many layers of half the width. Memory must not grow with the number of
layers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mcore_adapter.convert.conversion_plan import tasks
from mcore_adapter.convert.run_conversion import create_files
from mcore_adapter.convert.storage.tensor_file import Spec, Writer
from mcore_adapter.models import table_of
from mcore_adapter.parallel_sizes import ParallelSizes

HEADS, KV_HEADS, VOCAB = 16, 8, 32_000
WIDE = {"layers": 14, "hidden": 2048, "mlp": 8192}
DEEP = {"layers": 28, "hidden": 1024, "mlp": 4096}
SAMPLE_S = 0.02


def make_checkpoint(folder: Path, *, layers: int, hidden: int, mlp: int) -> int:
    """Write a llama with random weights; return the number of its parameters."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "dtype": "bfloat16",
    }
    rows = {"q_proj": hidden, "o_proj": hidden, "gate_proj": mlp, "up_proj": mlp}
    rows |= {"k_proj": hidden * KV_HEADS // HEADS, "v_proj": hidden * KV_HEADS // HEADS}
    specs = {}
    for task in tasks(table_of(config), ParallelSizes()):
        for ref in task.hf:
            kind = ref.name.split(".")[-2]
            if kind in ("embed_tokens", "lm_head"):
                shape: tuple[int, ...] = (VOCAB, hidden)
            elif kind == "down_proj":
                shape = (hidden, mlp)
            else:
                shape = (rows[kind], hidden) if kind in rows else (hidden,)
            specs[ref.name] = Spec("BF16", shape)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    path, writer, random = folder / "model.safetensors", Writer(), np.random.default_rng(0)
    for piece in create_files([(path, specs)])[path].values():
        writer.write(piece, random.integers(0, 1 << 16, piece.spec.shape, np.uint16))
    writer.close()
    return sum(spec.num_bytes for spec in specs.values()) // 2


@dataclass(frozen=True)
class Taken:
    """Time that a command and all its descendant processes took."""

    seconds: float
    """Wall-clock time, in seconds."""
    cpu_s: float
    """User and system time, in seconds."""


def run(command: list[str]) -> tuple[Taken, dict[str, int]]:
    """Run a command; return its time, and the largest RSS and PSS of a single process, in bytes."""
    start, before = time.monotonic(), os.times()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = {"rss": 0, "pss": 0}
    watcher = threading.Thread(target=watch, args=(process.pid, peak), daemon=True)
    watcher.start()
    code = process.wait()
    taken = Taken(time.monotonic() - start, cpu_since(before))
    watcher.join()
    if code:
        raise SystemExit(f"{' '.join(command)} ended with {code}")
    return taken, peak


def cpu_since(before: os.times_result) -> float:
    """Return the CPU seconds of all child processes that have ended since `before`, with their own
    children."""
    now = os.times()
    return sum(now[2:4]) - sum(before[2:4])


def watch(root: int, peak: dict[str, int]) -> None:
    while Path(f"/proc/{root}").exists():
        for pid in tree(root):
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            for line in text.splitlines():
                name = line.split(":")[0].lower()
                if name in peak:
                    peak[name] = max(peak[name], int(line.split()[1]) * 1024)
        time.sleep(SAMPLE_S)


def tree(root: int) -> list[int]:
    try:
        children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    except OSError:
        return []
    return [root, *(pid for child in children for pid in tree(int(child)))]


def copy(src: Path, dst: Path, *, flush: bool) -> Taken:
    start, before = time.monotonic(), os.times()
    subprocess.run(["cp", "-r", str(src), str(dst)], check=True)
    if flush:
        subprocess.run(["sync", *map(str, dst.iterdir())], check=True)
    taken = Taken(time.monotonic() - start, cpu_since(before))
    remove(dst)
    return taken


def remove(folder: Path) -> None:
    """Delete a folder and flush the disk, so that the next measurement does not pay for it."""
    shutil.rmtree(folder)
    os.sync()


def measure(name: str, model: dict[str, int], folder: Path, rounds: int) -> None:
    src, mcore, back = folder / "hf", folder / "mcore", folder / "back"
    count = make_checkpoint(src, **model)
    os.sync()
    num_bytes = sum(file.stat().st_size for file in src.iterdir())
    convert = [sys.executable, "-m", "mcore_adapter"]
    there = [*convert, "to-mcore", str(src), str(mcore), "--tp", "2", "--pp", "2"]
    return_ = [*convert, "to-hf", str(mcore), str(back)]
    took: dict[str, list[Taken]] = {}
    peaks: dict[str, dict[str, int]] = {}
    for _ in range(rounds):
        for label, flush in (("cp", False), ("cp, flushed", True)):
            copy(src, back, flush=False)
            took.setdefault(label, []).append(copy(src, back, flush=flush))
        for label, command in (("to-mcore", there), ("to-hf", return_)):
            copy(src, back, flush=False)
            taken, peak = run(command)
            took.setdefault(label, []).append(taken)
            known = peaks.setdefault(label, peak)
            peaks[label] = {key: max(known[key], peak[key]) for key in peak}
        remove(back)
        remove(mcore)
    print(f"{name}: {count / 1e9:.2f} B parameters, {num_bytes / 1e9:.2f} GB, {model}")
    best = {label: min(all_, key=lambda t: t.seconds) for label, all_ in took.items()}
    wall = {label: taken.seconds for label, taken in best.items()}
    cpu = {label: taken.cpu_s for label, taken in best.items()}
    for label, seconds in wall.items():
        line = f"  {label:<12} {seconds:6.2f} s, {cpu[label]:5.2f} s of CPU "
        line += f"{num_bytes / 1e9 / seconds:6.2f} GB/s"
        if label in peaks:
            ratios = [wall[cp] / seconds for cp in ("cp", "cp, flushed")]
            line += f"   {ratios[0]:.2f} of cp, {ratios[1]:.2f} of cp flushed"
            line += "   peak of a process: " + ", ".join(
                f"{key} {value / 1e9:.2f} GB" for key, value in peaks[label].items()
            )
        print(line, flush=True)
    shutil.rmtree(src)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder if left")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for name, model in (("wide", WIDE), ("deep", DEEP)):
            measure(name, model, Path(folder), arguments.rounds)


if __name__ == "__main__":
    main()
