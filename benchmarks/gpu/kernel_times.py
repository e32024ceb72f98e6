"""Comparison of the ways to compute a model's passes: time and peak of device memory of each.

    python benchmarks/gpu/kernel_times.py [--device cuda] [--size 0.6B] [--tokens 8192]
        [--repeats 5]

Three tables:

* head: log-probs and entropy of all tokens with their gradients, from whole logits, and in chunks
  (`algorithms/logprobs.py`) of several sizes. The model's own head, hidden states in bfloat16.
* attention: forward and backward pass of the model with each kernel that is installed, on rows of
  512 tokens and on one row.
* layers: an update of the training backend (`fsdp2`, one rank), padded and packed, with and without
  `activation_checkpointing` and `model.compile`. Lengths of rows are geometric, so padding is most
  of a padded batch.

Each figure is the median of the repeats after two passes that do not count. `peak` is what
PyTorch's allocator held at most, without the weights. On a CPU memory is not measured.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that the script also runs by its path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.gpu.models import write_model
from roll.algorithms import logprobs
from roll.algorithms.logprobs import LogitChunks
from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.config.sections.model import ModelConfig
from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.config.sections.strategy import Fsdp2Config
from roll.config.sections.training import TrainRole
from roll.core.batches import TrainBatch
from roll.models.kernels.choice import offer_of
from roll.platform.machine import free_port
from roll.strategy.build import build_train
from roll.strategy.training.compiled_logits import compiled_chunks
from roll.strategy.training.heads import PolicyHead
from tests.contract.ranks import make_spec

WARM_UP = 2
CHUNKS = (256, 1024, 4096)
ROW = 512
MB = 1e6


class NegativeLogprob:
    """Loss -log p of each token."""

    def __call__(self, terms: PolicyTerms, batch: TrainBatch) -> TokenLoss:
        return TokenLoss(loss_BT=-terms.logprobs_BT)


def measured(work: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, float]:
    """Return the median time of `work` in seconds, and the most memory that it took in bytes, above
    what was allocated before; 0 on a CPU."""
    times, peak = [], 0.0
    for number in range(WARM_UP + repeats):
        before = _start(device)
        begun = time.perf_counter()
        work()
        _wait(device)
        if number >= WARM_UP:
            times.append(time.perf_counter() - begun)
            peak = max(peak, _peak(device) - before)
    return statistics.median(times), peak


def _start(device: torch.device) -> int:
    """Let the device finish, forget its peak, and return the bytes that are allocated."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def row(name: str, found: tuple[float, float], tokens: int) -> None:
    """Print a line of a table."""
    seconds, peak = found
    print(f"| {name} | {1e3 * seconds:,.1f} | {tokens / seconds:,.0f} | {peak / MB:,.0f} |")


def header(name: str) -> None:
    print(f"\n| {name} | ms | tokens/s | peak, MB |\n|---|---:|---:|---:|", flush=True)


def head_table(folder: Path, device: torch.device, tokens: int, repeats: int) -> None:
    """Print what log-probs and their gradients take, whole and in chunks."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    weight_VD = model.get_output_embeddings().weight.detach().to(device).requires_grad_()
    hidden_ND = torch.randn(tokens, weight_VD.shape[1], device=device, dtype=torch.bfloat16)
    hidden_ND.requires_grad_()
    targets_N = torch.randint(0, weight_VD.shape[0], (tokens,), device=device)

    def whole() -> None:
        logp = (hidden_ND @ weight_VD.T).float().log_softmax(-1)
        chosen, entropy = logp.gather(-1, targets_N[:, None]), -(logp.exp() * logp).sum(-1)
        (chosen.sum() + entropy.sum()).backward()

    def chunked(chunks: LogitChunks) -> Callable[[], None]:
        def work() -> None:
            found, entropy, _ = logprobs.from_hidden(
                hidden_ND, weight_VD, None, targets_N,
                temperature=1.0, chunks=chunks, entropy=True,
            )  # fmt: skip
            assert entropy is not None
            (found.sum() + entropy.sum()).backward()

        return work

    header(f"head, {tokens} tokens")
    works = {"whole": whole} | {f"chunks of {n}": chunked(LogitChunks(n)) for n in CHUNKS}
    for n in CHUNKS:
        works[f"chunks of {n}, compiled"] = chunked(compiled_chunks(LogitChunks(n)))
    for name, work in works.items():
        _measure_row(name, work, device, tokens, repeats)


def _measure_row(
    name: str, work: Callable[[], object], device: torch.device, tokens: int, repeats: int
) -> None:
    """Measure and print; a way that needs more memory than there is says so."""
    try:
        row(name, measured(work, device, repeats), tokens)
    except torch.OutOfMemoryError:
        print(f"| {name} | does not fit | | |")
        torch.cuda.empty_cache()


def attention_table(folder: Path, device: torch.device, tokens: int, repeats: int) -> None:
    """Print what passes of the model take with each kernel."""
    header("attention")
    for kernel in kernels(device):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation=kernel
        ).to(device)
        for width in (min(ROW, tokens), tokens):
            ids = torch.randint(0, 60, (tokens // width, width), device=device)

            def work(model: Any = model, ids: Tensor = ids) -> None:
                hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
                hidden.float().square().mean().backward()
                model.zero_grad()

            name = f"{kernel}, {tokens // width} rows of {width}"
            _measure_row(name, work, device, ids.numel(), repeats)
        del model, work
        gc.collect()


def kernels(device: torch.device) -> Iterator[str]:
    """Yield the kernels that this machine has."""
    yield "sdpa"
    if device.type == "cuda":
        installed = offer_of("cuda").packages
        if "flash-attn" in installed:
            yield "flash_attention_2"
        if "flash-attn-3" in installed:
            yield "flash_attention_3"


def layers_table(folder: Path, device: torch.device, tokens: int, repeats: int) -> None:
    """Print what an update takes: padded or packed, recomputed or not, compiled or not."""
    batch = geometric_batch(tokens)
    real = int(batch.lengths.sum())
    header(f"update of {real} tokens in {len(batch)} rows")
    for compiled, packing, recomputed in itertools.product((False, True), repeat=3):
        words = ["packed" if packing else "padded"]
        words += [*(["recomputed"] if recomputed else []), *(["compiled"] if compiled else [])]
        config = ModelConfig(path=str(folder), dtype="bfloat16", compile=compiled)
        role = TrainRole(
            pool="p",
            strategy=Fsdp2Config(activation_checkpointing=recomputed),
            optimizer=AdamWConfig(lr=1e-6),
            max_tokens_per_microbatch=tokens,
            packing=packing,
        )
        update_row(", ".join(words), role, config, batch, device, repeats)


def update_row(
    name: str,
    role: TrainRole,
    config: ModelConfig,
    batch: TrainBatch,
    device: torch.device,
    repeats: int,
) -> None:
    """Measure updates on a batch, print their line, and free all that they needed."""
    spec = make_spec(0, 1, free_port(), device.type)
    strategy = build_train(role, config, spec, PolicyHead(1.0, CHUNKS[1]), total_steps=None)
    work = partial(strategy.train, batch, NegativeLogprob())
    _measure_row(name, work, device, int(batch.lengths.sum()), repeats)
    strategy.close()
    del strategy, work
    gc.collect()  # FSDP's objects refer to each other, so nothing else frees them soon


def geometric_batch(tokens: int) -> TrainBatch:
    """Return rows of geometric lengths, at most `ROW`, until there are about `tokens` tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = torch.empty(1).exponential_(8 / ROW, generator=generator)
        lengths.append(min(ROW, 8 + int(drawn)))
    width = max(lengths)
    places_BT = torch.arange(width) < torch.tensor(lengths)[:, None]
    return TrainBatch(
        tokens=torch.randint(4, 60, places_BT.shape, generator=generator),
        lengths=torch.tensor(lengths),
        loss_mask=places_BT,
        token_weights=places_BT / places_BT.sum(),
    )


TABLES = {"head": head_table, "attention": attention_table, "layers": layers_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--size", default="0.6B", help="one of benchmarks/gpu/models.py")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tables", default=",".join(TABLES))
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(Path(temporary) / "model", args.size)
        for name in args.tables.split(","):
            TABLES[name](folder, device, args.tokens, args.repeats)


if __name__ == "__main__":
    main()
