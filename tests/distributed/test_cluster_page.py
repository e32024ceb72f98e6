"""The recipes of docs/cluster.md; the batch script runs for real, with two Ray nodes here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from roll.platform.machine import free_port
from tests.runs import write_rows_task

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
LIMIT_S = 600.0
STAND_INS = {
    "srun": """
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
""",
    "scontrol": 'echo "$@" >> "$TOLD"',
}
"""Program of SLURM -> what stands in for it: another node is this machine, and a wish is noted."""


def block(kind: str) -> str:
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[-1:]
    return str(found)


def environment(folder: Path) -> dict[str, str]:
    programs = folder / "programs"
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}")
        (programs / name).chmod(0o755)
    return os.environ | {
        "PATH": os.pathsep.join(
            [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "PYTHONPATH": str(ROOT),
        "TOLD": str(folder / "told"),
        "RAY_PORT": str(free_port()),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NUM_NODES": "2",
    }


def wait_for_steps(records: Path, job: subprocess.Popen[bytes], count: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not records.exists() or records.read_bytes().count(b"\n") < count:
        assert job.poll() is None, "the job ended before its steps"
        assert time.monotonic() < deadline, f"no {count} steps within {LIMIT_S} s"
        time.sleep(0.1)


@pytest.mark.slow
def test_the_batch_script_runs_on_two_nodes_and_is_queued_again_before_its_time_is_over(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": f"{i} + 1 =", "completion": str(i + 1)} for i in range(8)]
    run = write_rows_task(
        tmp_path,
        "sft",
        {"train": rows, "held_out": rows},
        columns={"messages": None, "prompt": "prompt", "completion": "completion"},
        cluster={"platform": "cpu", "nodes": 2, "devices_per_node": 1},
        pools={"all": "0-1"},
        max_steps=100_000,
        checkpoint={"every": 100_000},
        validation={},
    )
    script, log = tmp_path / "job.sh", tmp_path / "log.txt"
    script.write_text(block("bash"))
    with log.open("wb") as out:
        job = subprocess.Popen(
            ["bash", str(script), str(run)],
            env=environment(tmp_path),
            stdout=out,
            stderr=out,
            cwd=tmp_path,
            start_new_session=True,
        )
        try:
            wait_for_steps(tmp_path / "out" / "metrics.jsonl", job, 2)
            job.send_signal(signal.SIGTERM)
            assert job.wait(LIMIT_S) == os.EX_TEMPFAIL, log.read_text()[-3000:]
        finally:
            os.killpg(job.pid, signal.SIGKILL) if job.poll() is None else None
    assert (tmp_path / "told").read_text() == "requeue 77\n"
    assert list((tmp_path / "out" / "checkpoints").glob("step_*"))


def test_the_manifest_gives_each_kind_of_pod_what_the_page_says() -> None:
    job = yaml.safe_load(block("yaml"))
    cluster = job["spec"]["rayClusterSpec"]
    assert job["spec"]["entrypoint"].startswith("roll run ")
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    for group, gpus in ((cluster["headGroupSpec"], None), (workers, "8")):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
