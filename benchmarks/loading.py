"""Benchmark of the memory that a rank needs while it loads a model.

A random model is written, tensor by tensor, and loaded by every backend on several ranks, each a
process of its own.

    python benchmarks/loading.py [--parameters 1e9] [--trained-parameters 2.5e8] [--ranks 2,4]
        [--cases fsdp2,fsdp2-tp,zero3,zero2,megatron-tp,megatron-pp] [--models frozen,trained]
        [--device cpu|cuda]

The table shows, in MB: what a rank keeps of the weights by its layout (`shard`), the largest
tensor, `bound` (shard + largest + 10 %), the most anonymous memory that any rank had while it
loaded (`peak`), that in percent of the bound, what it had afterwards (`kept`), and the most with
the pages of mapped files (`resident`, the kernel's high-water mark). All are above what the process
had before. Pages of mapped files are the page cache's: the kernel drops them when it needs memory,
and ranks share them.

With `--device cuda` each rank has a GPU, and the memory is that of the GPU, by the books of
PyTorch's allocator; `resident` is what the allocator held at most.

A frozen model is bfloat16. A trained one is float32; DeepSpeed and Megatron-Core also make
gradients, master weights or moments when they start. These are in `kept`, not in `shard`, so
`bound` is kept + largest + 10 % there. ZeRO-2 keeps whole weights on every rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.peak_memory import meter
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import DeepspeedConfig, Fsdp2Config, MegatronConfig
from roll.config.sections.training import ScoreRole, TrainRole
from roll.core.types import WorkerSpec
from roll.strategy.build import build_score, build_train
from roll.strategy.training.group import GroupMembership
from roll.strategy.training.heads import PolicyHead
from tests.contract.ranks import run_ranks

MB = 1e6
LIMIT_S = 3600
"""Longest time that the ranks of a case may take."""
HEAD = PolicyHead(1.0, 1024)
CASES: dict[str, Any] = {
    "fsdp2": lambda ranks: Fsdp2Config(),
    "fsdp2-tp": lambda ranks: Fsdp2Config(tp=2),
    "zero3": lambda ranks: DeepspeedConfig(stage=3, bucket_elements=1_000_000),
    "zero2": lambda ranks: DeepspeedConfig(stage=2, bucket_elements=1_000_000),
    "megatron": lambda ranks: MegatronConfig(),
    "megatron-tp": lambda ranks: MegatronConfig(tp=2, pp=ranks // 2),
    "megatron-pp": lambda ranks: MegatronConfig(pp=ranks),
}
"""Name of a case -> its strategy on a number of ranks."""
WHOLE = ("zero2",)
"""Cases whose ranks each have the whole model."""
ALONE = "megatron"
"""Case for one rank."""


@dataclass(frozen=True)
class Job:
    """What every rank does: load one model and say what that took."""

    case: str
    ranks: int
    trained: bool
    folder: Path

    def build(self, spec: WorkerSpec, folder: Path) -> Any:
        """Load the model of a folder."""
        strategy = CASES[self.case](self.ranks)
        if self.trained:
            role = TrainRole(pool="p", strategy=strategy)
            model = ModelConfig(path=str(folder))
            return build_train(role, model, spec, HEAD, total_steps=None)
        model = ModelConfig(path=str(folder), dtype="bfloat16")
        return build_score(ScoreRole(pool="p", strategy=strategy), model, spec, HEAD)


def write_model(folder: Path, parameters: float) -> None:
    """Write a random model of about this many parameters with files of a layer each, bfloat16."""
    config = _sizes(parameters)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Qwen3ForCausalLM(config).named_parameters()}
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    weight_map: dict[str, str] = {}
    groups: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        part = name.split(".")[2] if ".layers." in name else name
        groups.setdefault(part, {})[name] = shape
    for part, its in groups.items():
        file = f"model-{part}.safetensors"
        tensors = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in its.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(its, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _sizes(parameters: float) -> Qwen3Config:
    """Return a config of about this many parameters, an eighth of them in the embedding."""
    hidden = 64 * max(1, round((parameters / 250) ** 0.5 / 64))
    vocab = 128 * max(1, round(parameters / 16 / hidden / 128))
    stages = 4  # each gets the same number of layers
    layers = stages * max(1, round((parameters - 2 * vocab * hidden) / (12 * hidden**2) / stages))
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def counted(folder: Path) -> tuple[int, int]:
    """Return the elements of all tensors of a model, and of the largest."""
    config = Qwen3Config.from_pretrained(folder)
    with torch.device("meta"):
        sizes = [p.numel() for p in Qwen3ForCausalLM(config).parameters()]
    return sum(sizes), max(sizes)


def load(spec: WorkerSpec, folder: Path, *, job: Job, tiny: Path) -> dict[str, int]:
    """Be one rank of a job. A tiny model comes first, because the first one of a backend also loads
    code."""
    group = GroupMembership(spec)
    job.build(spec, tiny).close()
    gc.collect()
    with meter(spec.platform) as memory:
        strategy = job.build(spec, job.folder)
    strategy.close()
    group.leave()
    return {"peak": memory.peak_bytes, "kept": memory.kept_bytes, "resident": memory.resident_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--trained-parameters", type=float, default=2.5e8)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--cases", default=",".join(each for each in CASES if each != ALONE))
    parser.add_argument("--models", default="frozen,trained")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    multiprocessing.set_forkserver_preload(["tests.preloaded"])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "tiny", 1e6)
        columns = ("shard", "largest", "bound", "peak", "of bound", "kept", "resident")
        print(f"| case | model | ranks | {' | '.join(columns)} |\n|---|---|" + "---:|" * 8)
        for kind in args.models.split(","):
            trained = kind == "trained"
            model = folder / kind
            write_model(model, args.trained_parameters if trained else args.parameters)
            elements, largest = counted(model)
            width = 4 if trained else 2
            for case in args.cases.split(","):
                for ranks in (int(each) for each in args.ranks.split(",")):
                    job = Job(case, ranks, trained, model)
                    ranked = partial(load, job=job, tiny=folder / "tiny")
                    results = folder / f"{kind}-{case}-{ranks}"
                    found = run_ranks(
                        ranks, ranked, results, timeout_s=LIMIT_S, platform=args.device
                    )
                    shard = elements * width / (1 if case in WHOLE else ranks)
                    print(_row(job, found, shard, largest * width), flush=True)


def _row(job: Job, found: list[dict[str, int]], shard: float, largest: int) -> str:
    """Return the line of a job with the rank of the highest peak; sizes are bytes."""
    worst = max(found, key=lambda rank: rank["peak"])
    held = worst["kept"] if job.trained and not job.case.startswith("fsdp2") else shard
    bound = 1.1 * (held + largest)
    sizes = [f"{number / MB:,.0f}" for number in (shard, largest, bound, worst["peak"])]
    share = f"{worst['peak'] / bound:.0%}"
    after = [f"{worst[name] / MB:,.0f}" for name in ("kept", "resident")]
    kind = "trained" if job.trained else "frozen"
    return f"| {job.case} | {kind} | {job.ranks} | {' | '.join([*sizes, share, *after])} |"


if __name__ == "__main__":
    main()
