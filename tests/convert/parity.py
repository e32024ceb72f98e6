"""What a rank does to compare a Megatron model with Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from mcore_adapter.convert.conversion_plan import HfRef
from mcore_adapter.gather import export, gradient, weight
from mcore_adapter.load import HfTensors, load, read_config, table_in
from mcore_adapter.modeling.config import BuildOptions
from mcore_adapter.modeling.data_parallel import data_parallel
from mcore_adapter.modeling.model import build_model, init_parallel
from mcore_adapter.parallel.context import cut, joined, positions_here
from mcore_adapter.parallel.schedule import run_schedule
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.platform import adapt_to_cpu
from tests.convert.spawned import run_ranks
from tests.convert.tiny_models import VOCAB, Reference, read_reference, rows, targets

Micro = TypeVar("Micro")


@dataclass(frozen=True)
class Case:
    """One model in one layout."""

    folder: Path
    sizes: ParallelSizes
    options: BuildOptions = field(default_factory=BuildOptions)

    def __str__(self) -> str:
        cut = {k: v for k, v in vars(self.sizes).items() if v != vars(ParallelSizes())[k]}
        extra = {k: v for k, v in vars(self.options).items() if v != vars(BuildOptions())[k]}
        return f"{self.folder.name} {cut} {extra}"


@dataclass(frozen=True)
class Difference:
    """Largest absolute differences to Hugging Face, and which gradient has it."""

    logits: float
    loss: float
    gradient: float
    where: str
    missing: tuple[str, ...]
    """Gradients that one side has and the other has not."""
    weights_equal: bool
    """Whether the model gives back the checkpoint, byte for byte."""


def compare(case: Case, length: int = 12) -> Difference:
    return compare_passes(
        case, list(rows(length=length).split(1)), forward, lambda tokens_BT: tokens_BT
    )


def compare_passes(
    case: Case,
    micros: list[Micro],
    forward: Callable[[nn.Module, Micro], Tensor],
    tokens_of: Callable[[Micro], Tensor],
) -> Difference:
    """Compares what the passes of these micro-batches give, one row each."""
    adapt_to_cpu()
    from megatron.core import parallel_state

    config = read_config(case.folder)
    table = table_in(case.folder)
    init_parallel(case.sizes, cp=case.options.context_parallel)
    bare = build_model(config, case.sizes, case.options)
    load(case.folder, bare, table, case.sizes)
    chunks = data_parallel(bare)
    # Each data parallel rank has its own rows, one row a micro-batch.
    rank, count = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    batches = micros[rank::count]
    kept = run_schedule(
        chunks,
        batches,
        forward,
        lambda output, micro: mean_loss(output, tokens_of(micro), len(batches)),
        micro_batch_size=1,
        longest=tokens_of(micros[0]).shape[1],
    )
    reference = read_reference(case.folder)
    logits, loss = _worst_outputs(kept, reference, rank, count)
    worst, where, names = 0.0, "", set()
    for name, tensor in export(chunks, table, case.sizes, value=gradient):
        names.add(name)
        difference = float((tensor - reference.gradients[name]).abs().max())
        if difference > worst:
            worst, where = difference, name
    missing = tuple(sorted(reference.gradients.keys() ^ names))
    return Difference(logits, loss, worst, where, missing, _same_weights(case, chunks))


def forward(chunk: nn.Module, tokens_BT: Tensor) -> Tensor:
    from megatron.core import parallel_state

    positions = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    sharers = parallel_state.get_context_parallel_group()
    own = (cut(each, [tokens_BT.shape[1]], sharers) for each in (tokens_BT, positions))
    output: Tensor = chunk(*own, None)
    return output


def mean_loss(
    logits_BTV: Tensor, tokens_BT: Tensor, count: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Mean over tokens, as a part of `count` micro-batches; logits are gathered over tp and cp."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    whole = gather_from_tensor_model_parallel_region(logits_BTV)
    sharers = parallel_state.get_context_parallel_group()
    if sharers.size() > 1:
        mine_M = positions_here([tokens_BT.shape[1]], sharers, whole.device)
        whole = joined(mine_M, whole[0], tokens_BT.shape[1], sharers)[None]
    used = whole[..., :VOCAB]
    loss = torch.nn.functional.cross_entropy(used.flatten(0, 1), targets(tokens_BT).flatten())
    return loss / count, (used.detach(), loss.detach())


def _worst_outputs(
    kept: list[tuple[Tensor, Tensor]],
    reference: Reference,
    rank: int,
    count: int,
) -> tuple[float, float]:
    """Of the logits, and of the loss averaged over data parallel ranks; 0 but on the last stage."""
    from megatron.core import parallel_state

    if not kept:
        return 0.0, 0.0
    logits = torch.cat([each[0] for each in kept])
    loss = torch.stack([each[1] for each in kept]).mean()
    torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    theirs = reference.logits_BTV[rank::count]
    return (
        float((logits - theirs).abs().max()),
        float((loss / count - reference.loss).abs()),
    )


def _same_weights(case: Case, chunks: list[nn.Module]) -> bool:
    table = table_in(case.folder)
    found = dict(export(chunks, table, case.sizes, value=weight, bucket_bytes=4096))
    with HfTensors(case.folder) as tensors:
        return found.keys() == tensors.names and all(
            torch.equal(found[name], tensors.read(HfRef(name))) for name in found
        )


def assert_equal(
    ranks: int,
    cases: Iterable[Case],
    *,
    work: Callable[[Case], Difference] = compare,
    loose: Mapping[str, float] | None = None,
) -> None:
    """Every rank finds every case equal to Hugging Face.

    Each case has processes of its own: the groups of a layout hold hundreds of threads as long as
    one of its models lives, and models with experts live in cycles through C++.

    Args:
        loose: by model, larger differences of gradients than 1e-6.
    """
    for case in cases:
        for found in run_ranks(work, ranks, case):
            assert not found.missing, (case, found)
            assert found.logits <= 1e-5, (case, found)
            assert found.loss <= 1e-5, (case, found)
            assert found.gradient <= (loose or {}).get(case.folder.name, 1e-6), (case, found)
            assert found.weights_equal, (case, found)
