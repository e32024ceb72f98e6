"""Workers under Nsight Systems. A script stands in for the program, which needs a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from roll.commands.preflight import inspect
from roll.config import load_config
from roll.config.sections.roles import Role
from roll.core.errors import ConfigError
from roll.core.timing import Timers
from roll.distributed.cluster import Placement
from roll.distributed.on_ray.cluster import RayCluster
from roll.distributed.on_ray.environment import environment
from roll.distributed.on_ray.resources import ResourceManager
from roll.distributed.worker import Worker
from roll.pipeline.profiling import StepProfiler
from tests.runs import run_local, write_task

NSYS = """#!/bin/sh
printf '%s\\n' "$@" > "$(dirname "$0")/told"
shift
while [ "${1#--}" != "$1" ]; do
    case "$1" in --output=*) output=${1#--output=};; esac
    shift
done
"$@" &
echo "of process $!" > "$(echo "$output" | sed "s/%p/$!/").1.nsys-rep"
wait
"""
"""Notes its arguments, and starts the command behind its options as a child. Its report is there at
once; that of Nsight Systems would be when the recording ends."""
PROFILE = {"steps": [1], "kind": "nsys", "ranks": [1]}


def test_a_worker_is_started_by_it_and_its_report_lies_beside_the_timeline(
    tmp_path: Path, manager: ResourceManager
) -> None:
    nsys = tmp_path / "bin" / "nsys"
    nsys.parent.mkdir()
    nsys.write_text(NSYS)
    nsys.chmod(0o755)
    config = load_config(write_task(tmp_path, profile=PROFILE)).config
    profiler = StepProfiler(config, manager, tmp_path / "pro file", "cuda")
    with environment({"PATH": f"{nsys.parent}{os.pathsep}{os.environ['PATH']}"}):
        cluster = profiler.start(Worker, Placement(Role.ACTOR_TRAIN, pool="pair"))
    for step in range(3):
        with profiler.step(step, Timers()):
            cluster.call(Worker.ping)
    (folder,) = (tmp_path / "pro file").iterdir()
    assert sorted(file.name for file in folder.iterdir()) == [
        "actor_train[1].nsys-rep",
        "timeline.json.gz",
    ]
    assert isinstance(cluster, RayCluster)
    of = f"of process {cluster.infos[1].pid}\n"
    assert (folder / "actor_train[1].nsys-rep").read_text() == of
    verb, *told = (nsys.parent / "told").read_text().splitlines()
    assert verb == "profile"
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=repeat"} <= {*told}
    assert f"--output={tmp_path}/pro file/actor_train[1]-%p" in told
    assert sys.executable in told


def test_a_machine_without_it_or_without_gpus_is_refused(tmp_path: Path) -> None:
    path = write_task(tmp_path, profile=PROFILE)
    with environment({"PATH": str(tmp_path)}):
        said = [each for each in inspect(load_config(path)) if "nsight-systems-cli" in str(each)]
    assert [each.only_here for each in said] == [True]
    with pytest.raises(ConfigError, match=r"nsys records what GPUs do, and there are no GPUs here"):
        run_local(path)
