"""Every socket on which a run takes connections is on the loopback interface."""

from __future__ import annotations

import ipaddress
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.runs import Command, write_task

POLL_S = 0.1


def listening(pids: set[int]) -> set[tuple[str, str]]:
    """(process, address) of every TCP socket that takes connections."""
    found = set()
    for pid in pids:
        try:
            process = psutil.Process(pid)
            name = " ".join(process.cmdline()[:1]) or process.name()
            for each in process.net_connections(kind="tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.add((name, each.laddr.ip))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def listeners_of_a_run(path: Path, *overrides: str) -> set[tuple[str, str]]:
    """All that listened at any time of a run, which ends well."""
    command = Command("run", str(path), *overrides)
    seen: set[tuple[str, str]] = set()
    deadline = time.monotonic() + 270
    while command.process.poll() is None and time.monotonic() < deadline:
        seen |= listening({command.process.pid, *command.alive()})
        time.sleep(POLL_S)
    code, output = command.wait(1)
    assert code == 0, output[-3000:]
    return seen


def is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


TWO_RANKS: dict[str, Any] = {
    "pools": {"all": "0", "train": "0-1"},
    "cluster": {"devices_per_node": 2},
    "max_steps": 2,
    "checkpoint": {"every": None},
    "validation": {"sets": {}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "engine"),
    [
        ({"kind": "fsdp2"}, {"kind": "vllm", "endpoint": {"port": 18761}}),
        ({"kind": "megatron", "tp": 2}, {"kind": "vllm"}),
        ({"kind": "deepspeed"}, {"kind": "sglang"}),
    ],
    ids=lambda part: part["kind"],
)
def test_a_run_on_one_machine_listens_on_its_loopback_interface_alone(
    tmp_path: Path, strategy: dict[str, Any], engine: dict[str, Any]
) -> None:
    optimizer = {"lr": 1e-3, "warmup_steps": 2}
    train = {"pool": "train", "optimizer": optimizer, "strategy": strategy}
    infer = {"pool": "all", "strategy": engine}
    path = write_task(tmp_path / "task", **TWO_RANKS, actor_train=train, actor_infer=infer)
    seen = listeners_of_a_run(path)
    kinds = {name for name, _ in seen}
    # The look was a real one: Ray's server, its agents, the trainer's and the engine's processes.
    assert any("gcs_server" in name for name in kinds), kinds
    assert any("actor_train" in name for name in kinds), kinds
    assert any("actor_infer" in name for name in kinds), kinds
    assert not [each for each in sorted(seen) if not is_loopback(each[1])]
