"""Reference log-probabilities of DPO: those of answers under the model that training starts from.

They are computed once, before a checkpoint is restored, and saved beside the data, so that a
resumed run need not compute them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from mcore_adapter.errors import ConfigError
from mcore_adapter.train.data.dataset import Dataset, read_arrays
from mcore_adapter.train.data.micro_batches import Micro
from mcore_adapter.train.policy import Policy


def references(
    policy: Policy, dataset: Dataset, examples: Iterable[int], path: Path, per_step: int
) -> Tensor:
    """Return the reference log-probabilities of the sequences of a dataset.

    Values that are not in the file yet are computed with the present weights of `policy`, without
    its adapter, and rank 0 adds them to the file. Collective: every rank must see `path`.

    Args:
        dataset: dataset of pairs.
        examples: numbers of the examples whose values are needed.
        path: file of the values; ConfigError if of another dataset, DataError if damaged.
        per_step: number of examples that are computed together.

    Returns:
        Sums of natural log-probabilities of the trained tokens of each sequence, fp32
        `[sequences of the dataset]`, on the CPU. NaN for a sequence that was never needed.
    """
    count = len(dataset) * dataset.sequences_per_example
    known_S = read_arrays(path)["logprobs"] if path.is_file() else torch.full((count,), torch.nan)
    if len(known_S) != count:
        raise ConfigError(
            f"{path} has {len(known_S)} values, expected {count}, one per sequence of the dataset; "
            "delete it, and the values are computed anew"
        )
    missing = sorted(
        {e for e in examples if known_S[dataset.sequences_of(e).start].isnan()},
        key=dataset.lengths_of,
    )
    if not missing:
        return known_S
    found_S = _computed(policy, dataset, missing, per_step)
    places = [number for example in missing for number in dataset.sequences_of(example)]
    known_S[places] = found_S[places]
    if dist.get_rank() == 0:
        aside = path.with_suffix(".partial")
        save_file({"logprobs": known_S}, aside)
        aside.rename(path)
    return known_S


def _computed(policy: Policy, dataset: Dataset, examples: Sequence[int], per_step: int) -> Tensor:
    """Compute the sums of the examples without the adapter; 0 for all others. Collective."""
    found_S = torch.zeros(len(dataset) * dataset.sequences_per_example, device=policy.device)
    for start in range(0, len(examples), per_step):
        part = examples[start : start + per_step]
        with policy.without_adapter():
            kept = policy.run(dataset, part, _keep_sums, forward_only=True)
        for sequences, sums_S in kept if policy.answers else ():
            found_S[sequences] = sums_S
    dist.all_reduce(found_S)
    return found_S.cpu()


def sequence_sums(logprobs_N: Tensor, micro: Micro) -> Tensor:
    """Return the sum of log-probabilities of each sequence of a micro-batch, `[S]`.

    Args:
        logprobs_N: log-probabilities `[N]` of the trained tokens of the micro-batch.
    """
    zeros_S = logprobs_N.new_zeros(len(micro.sequences))
    return zeros_S.index_add(0, micro.sequence_N, logprobs_N)


def _keep_sums(logprobs: Sequence[Tensor], micro: Micro) -> tuple[Tensor, tuple[list[int], Tensor]]:
    """Return a loss that nobody uses; and the numbers of the sequences with their sums."""
    sums_S = sequence_sums(logprobs[0], micro)
    return sums_S.sum(), (micro.sequences, sums_S)
