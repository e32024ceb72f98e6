"""Setup of a run from its settings: data, model, and the checkpoint to resume from."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from mcore_adapter.convert.conversion_plan import check_layout
from mcore_adapter.convert.shapes import check_widths
from mcore_adapter.convert.storage.folders import open_hf
from mcore_adapter.errors import ConfigError, DataError
from mcore_adapter.models import table_of
from mcore_adapter.train.data import dataset
from mcore_adapter.train.data.dataset import Dataset
from mcore_adapter.train.folder import Folder
from mcore_adapter.train.objective import Likelihood, Objective, Preference
from mcore_adapter.train.policy import Policy, load_policy
from mcore_adapter.train.processes import StopRequest, joined
from mcore_adapter.train.references import references
from mcore_adapter.train.run import Run, order_of
from mcore_adapter.train.settings import Settings


def train(settings: Settings) -> int:
    """Run a whole training.

    This is a collective: all ranks that torchrun started call it. Without torchrun this process is
    the only rank.

    Returns:
        0 if the run made all its steps; the number of the signal by which it was asked to stop
        earlier.

    Raises:
        McoreAdapterError: settings, data, model and checkpoint do not fit each other.
    """
    table = table_of(open_hf(settings.model).config)
    check_layout(table, settings.layout.sizes)
    check_widths(table, settings.layout.sizes)
    with joined(settings.layout.sizes, settings.seed) as device:
        run = prepare(settings, device)
        # Until here there is no progress to save, so Ctrl-C stops at once.
        with StopRequest().heard() as stop:
            return 0 if run.to_the_end(stop) else stop.number


def prepare(settings: Settings, device: torch.device) -> Run:
    """Do everything that precedes the first step: load the data and the model, resume if asked.

    This is a collective: all ranks call it after `joined`.

    Raises:
        McoreAdapterError: settings, data, model and checkpoint do not fit each other.
    """
    folder = Folder(settings.output)
    newest = folder.newest()
    if settings.resume == "never":
        folder.refuse_used()
    # No rank may write to the folder before every rank has looked into it.
    dist.barrier()
    if dist.get_rank() == 0:
        folder.tidy()
        if newest is None:
            folder.forget_references()
    data = _dataset(settings.data.train, folder, settings)
    order = order_of(settings, len(data))
    if problem := settings.optimizer.warmup_problem(order.num_steps):
        raise ConfigError(problem)
    policy = load_policy(settings, device)
    used = {example for step in range(order.num_steps) for example in order[step]}
    objective = _objective(data, used, policy, folder, settings)
    validation = None
    if settings.data.validation is not None:
        other = _dataset(settings.data.validation, folder, settings)
        validation = _objective(other, set(range(len(other))), policy, folder, settings)
    run = Run(settings, folder, policy, objective, validation, order)
    if newest is not None:
        run.resume(newest)
    return run


def _dataset(path: Path, folder: Folder, settings: Settings) -> Dataset:
    """Return the dataset of a file, which rank 0 encodes unless an earlier run did.

    Collective: every rank must see `path` and `folder`.

    Raises:
        DataError: on other ranks than 0, that rank 0 failed; on any, that the result is damaged.
        Exception: on rank 0, its own error, such as DataError, ConfigError or OSError.
    """
    failed: list[bool] = [True]
    try:
        name = dataset.digest(path, settings)
        target = folder.tokens(name)
        if dist.get_rank() == 0:
            dataset.prepare(path, target, settings)
        failed = [False]
    finally:
        dist.broadcast_object_list(failed, src=0)  # also after an error, for which others wait
    if failed[0]:
        raise DataError(f"rank 0 could not encode {path}; its own error says why")
    return dataset.read(target, name, settings.sequences_per_example)


def _objective(
    data: Dataset, used: set[int], policy: Policy, folder: Folder, settings: Settings
) -> Objective:
    """Return the method's loss; for DPO, first read or compute reference log-probs (collective)."""
    if settings.method != "dpo":
        return Likelihood(data)
    path = folder.references(data.name)
    reference_S = references(policy, data, used, path, settings.batch.examples)
    return Preference(data, reference_S, settings.dpo)
