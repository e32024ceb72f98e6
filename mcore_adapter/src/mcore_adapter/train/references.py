"""DPO's log-probabilities of answers under the model that training starts from.

They are computed once, before a checkpoint is restored, and kept beside the data, so that a run
that goes on need not compute them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from mcore_adapter.train.data.dataset import Dataset, read_arrays
from mcore_adapter.train.data.micro_batches import Micro
from mcore_adapter.train.policy import Policy


def references(
    policy: Policy, dataset: Dataset, examples: Iterable[int], path: Path, per_step: int
) -> Tensor:
    """Of all sequences of the dataset, natural logarithm, NaN but of the given examples; a
    collective. What is not yet in the file is computed, with the weights that `policy` has now and
    without its adapter.

    Args:
        per_step: examples that run together.
    """
    count = len(dataset) * dataset.sequences_each
    known_S = read_arrays(path)["logprobs"] if path.is_file() else torch.full((count,), torch.nan)
    missing = sorted(
        {e for e in examples if known_S[dataset.sequences_of(e).start].isnan()},
        key=dataset.lengths_of,
    )
    if not missing:
        return known_S
    found_S = torch.zeros(count, device=policy.device)
    for start in range(0, len(missing), per_step):
        part = missing[start : start + per_step]
        with policy.without_adapter():
            kept = policy.run(dataset, part, _keep_sums, forward_only=True)
        for sequences, sums_S in kept if policy.answers else ():
            found_S[sequences] = sums_S
    dist.all_reduce(found_S)
    places = [number for example in missing for number in dataset.sequences_of(example)]
    known_S[places] = found_S.cpu()[places]
    if dist.get_rank() == 0:
        aside = path.with_suffix(".partial")
        save_file({"logprobs": known_S}, aside)
        aside.rename(path)
    return known_S


def sequence_sums(logprobs_N: Tensor, micro: Micro) -> Tensor:
    """[S], of each sequence of a micro-batch."""
    zeros_S = logprobs_N.new_zeros(len(micro.sequences))
    return zeros_S.index_add(0, micro.sequence_N, logprobs_N)


def _keep_sums(logprobs: Sequence[Tensor], micro: Micro) -> tuple[Tensor, tuple[list[int], Tensor]]:
    sums_S = sequence_sums(logprobs[0], micro)
    return sums_S.sum(), (micro.sequences, sums_S)
