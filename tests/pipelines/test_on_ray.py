"""Algorithms on Ray, with two training ranks, against the same runs with one rank in this process.

One Ray and one server of forks serve all runs. These are the algorithms whose tokens or rows take a
way of their own; the others take that of GRPO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import pytest
import torch

from roll.commands.launch import pipeline_class
from roll.commands.preloads import forking
from roll.config import load_config
from roll.config.sections.placement import ClusterConfig
from roll.core.threads.loop_thread import LoopThread
from roll.core.types import WorkerSpec
from roll.distributed.cluster import Cluster, Placement
from roll.distributed.on_ray.resources import ResourceManager
from roll.distributed.worker import Worker
from roll.output_dir.trackers import read_records
from tests.pipelines.test_distill import other_tokens
from tests.pipelines.test_rows import PAIRS, split
from tests.runs import run_local, write_rows_task, write_task
from tests.tiny import save_tiny_model

P = ParamSpec("P")
W = TypeVar("W", bound=Worker)
REFERENCE = {"pool": "two"}
PRIME = {"pool": "two", "optimizer": {"lr": 1e-3}, "threshold": 0.1}
UPDATES = {"samples_per_update": 8}
SPLIT = {"kind": "megatron", "tp": 2, "sequence_parallel": True}
PRESETS: dict[str, dict[str, Any]] = {
    "otb": {},
    "spin": {"rewards": {}},
    "online_dpo": {"reference": REFERENCE},
    "prime": {"reference": REFERENCE, "process_reward": PRIME, "rollout": {"filters": []}},
    "ppo": {"reference": REFERENCE, "critic": UPDATES | {"pool": "two", "strategy": SPLIT}},
}
"""Preset -> what a run file says beside it."""


class OneRun:
    """A launcher on a Ray that is there; `close` ends the clusters of one run."""

    def __init__(self, resources: ResourceManager) -> None:
        self.resources = resources
        self.clusters: list[Cluster[Any]] = []

    def start(
        self,
        worker_cls: Callable[Concatenate[WorkerSpec, P], W],
        placement: Placement,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Cluster[W]:
        cluster = self.resources.start(worker_cls, placement, *args, **kwargs)
        self.clusters.append(cluster)
        return cluster

    def close(self) -> None:
        for cluster in reversed(self.clusters):
            cluster.close()


def with_teacher(folder: Path) -> Path:
    """A teacher with other tokens, and samples of the policy."""
    other_tokens(save_tiny_model(folder / "teacher", seed=7))
    return taught(folder, "uld", learns={"kind": "fsdp2"}, teaches={"kind": "hf"})


def with_cut_teacher(folder: Path) -> Path:
    """A teacher and a student on Megatron-Core, each cut in its own way."""
    save_tiny_model(folder / "teacher", seed=7)
    learns, teaches = ({"kind": "megatron", **cut} for cut in ({"pp": 2}, {"tp": 2}))
    return taught(folder, "jensen_shannon", learns=learns, teaches=teaches)


def taught(folder: Path, kind: str, *, learns: dict[str, Any], teaches: dict[str, Any]) -> Path:
    """A run that learns from the model in `teacher`; `learns` and `teaches` are strategies."""
    model = {"path": str(folder / "teacher")}
    return on_two_ranks(
        folder,
        actor_train={"pool": "two", "strategy": learns, "optimizer": {"lr": 1e-3}} | UPDATES,
        teachers={"t": {"pool": "two", "strategy": teaches, "model": model}},
        algorithm={"loss": [{"kind": "distill", "divergence": {"kind": kind}}]},
        rewards={},
    )


def on_two_ranks(folder: Path, **changes: Any) -> Path:
    """A run whose policy trains on two ranks, in two updates of a step."""
    settings = {
        "pools": {"one": "0", "two": "0-1"},
        "actor_train": {"pool": "two", "optimizer": {"lr": 1e-3}} | UPDATES,
        "actor_infer": {"pool": "one", "strategy": {"kind": "hf"}},
        "reference": None,
        "algorithm": {},
        "validation": {},
    }
    return write_task(folder, **settings | changes)


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResourceManager]:
    """The modules of user code are the same in all runs, so those of one serve all."""
    folder = tmp_path_factory.mktemp("code")
    config = load_config(on_two_ranks(folder)).config
    cluster = ClusterConfig(platform="cpu", devices_per_node=2, start_timeout_s=300)
    with (
        forking(config) as server,
        ResourceManager(
            cluster, config.pools, python_path=[str(folder)], fork_server=server
        ) as started,
    ):
        yield started


def on_ray(path: Path, resources: ResourceManager, *overrides: str) -> list[dict[str, Any]]:
    """The records of a run."""
    config = load_config(path, overrides).config
    pipeline = pipeline_class(config.pipeline)
    config, data = pipeline.prepare(config)
    launcher = OneRun(resources)
    try:
        with LoopThread("rollout") as loop:
            pipeline(config, launcher, loop, platform="cpu", data=data).run()
    finally:
        launcher.close()
    return read_records(Path(config.output_dir) / "metrics.jsonl")


def with_pairs(folder: Path) -> Path:
    """A reward model."""
    return write_rows_task(
        folder,
        "reward_model",
        split(PAIRS),
        pools={"two": "0-1"},
        actor_train={"pool": "two", "strategy": SPLIT, "optimizer": {"lr": 1e-3}},
    )


MADE: dict[str, Callable[[Path], Path]] = {
    "uld": with_teacher,
    "megatron": with_cut_teacher,
    "reward model": with_pairs,
    **{
        preset: partial(on_two_ranks, algorithm={"preset": preset}, **changes)
        for preset, changes in PRESETS.items()
    },
}


ALONE = {
    "megatron": ["actor_train.strategy={kind: fsdp2}", "teachers.t.strategy={kind: hf}"],
    "ppo": ["critic.strategy={kind: fsdp2}"],
    "reward model": ["actor_train.strategy={kind: fsdp2}"],
}
"""Case -> what one rank does otherwise."""


@pytest.mark.slow
@pytest.mark.parametrize("case", MADE)
def test_two_ranks_on_ray_train_as_one_rank_here(
    tmp_path: Path, resources: ResourceManager, case: str
) -> None:
    torch.manual_seed(0)
    path = MADE[case](tmp_path)
    brief = ["max_steps=2", "checkpoint={export_hf: false}"]
    here = run_local(path, [*brief, *ALONE.get(case, []), f"output_dir={tmp_path / 'here'}"])
    there = on_ray(path, resources, *brief, f"output_dir={tmp_path / 'there'}")
    assert len(here) == len(there) >= 2
    assert there[0]["grad_norm"] > 0
    for one, two in zip(here, there, strict=True):
        # Rates of machines are those between two looks, which a short run may not have.
        assert {key for key in one.keys() - two.keys() if not key.startswith("machine/")} == set()
        for name in one:
            if "loss/" in name or name.endswith(("grad_norm", "reward/mean", "accuracy")):
                assert two[name] == pytest.approx(one[name], rel=2e-3, abs=1e-4), name
