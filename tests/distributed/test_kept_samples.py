"""The writer of samples on a real Ray: one that is killed costs no file."""

from __future__ import annotations

import os
import signal
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.core.completion import Completion, FinishReason, VersionRuns, Written
from roll.distributed.cluster import Placement
from roll.distributed.on_ray.cluster import RayCluster
from roll.distributed.on_ray.resources import ResourceManager
from roll.distributed.remote_values import store
from roll.output_dir.sample_files import Origin, sample_file
from roll.rollout.types import Group
from roll.runtime.sample_keeper import SampleKeeper
from roll.workers.sample_writer.worker import SampleWriter
from tests.fakes import group

TOKENS = 200_000


def tokens_of(seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 9, TOKENS, dtype=np.int32)


def far_group(seed: int) -> Group:
    """A group of one sample whose tokens are in the object store."""
    tokens = array("i", tokens_of(seed).tobytes())
    written = Written(tokens, array("f", [-0.5] * TOKENS), "text")
    [content] = store([written], [8 * TOKENS])
    completion = Completion(content, VersionRuns(((0, TOKENS),)), FinishReason.STOP)
    near = group(f"data:{seed}", [1.0])
    [scored] = near.samples
    sample = replace(scored.sample, completion=completion)
    return replace(near, samples=(replace(scored, sample=sample),))


def test_a_writer_that_is_killed_costs_no_file(manager: ResourceManager, tmp_path: Path) -> None:
    place = Placement(Role.SAMPLES, pool=None, workers=1, replaceable=True)
    model, origin = ModelConfig(path="nowhere"), Origin("hash", "qwen3", pictures=False)
    cluster = manager.start(SampleWriter, place, tmp_path, model, origin)
    assert isinstance(cluster, RayCluster)
    keeper = SampleKeeper(cluster, training=True, write_timeout_s=60)
    keeper.keep_step(0, [far_group(0)])
    keeper.settle()
    first = cluster.infos[0].pid
    os.kill(first, signal.SIGKILL)
    keeper.keep_step(1, [far_group(1)])
    keeper.settle()
    assert cluster.infos[0].pid != first
    for step in (0, 1):
        [row] = pq.read_table(sample_file(tmp_path, "train", step)).to_pylist()
        assert np.array_equal(row["response_ids"], tokens_of(step))
    assert keeper.take_metrics().values_by_name() == {}
    keeper.close()
