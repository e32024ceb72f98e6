"""Runs whose engine or trainer is split over processes, started as a user starts them: every socket
on which one takes connections is on the loopback interface, and the engine agrees with the trainer.
"""

from __future__ import annotations

import ipaddress
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll.output_dir.trackers import read_records
from roll.strategy.available import status
from tests.runs import Command, write_task

POLL_S = 0.5
LIMIT_S = 800.0
"""A run takes less than a minute alone, but its processes wait for each other, so other work on the
same cores costs it many times that. The run itself ends when it makes no progress."""


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
    deadline = time.monotonic() + LIMIT_S
    while command.process.poll() is None and time.monotonic() < deadline:
        seen |= listening({command.process.pid, *command.alive()})
        time.sleep(POLL_S)
    code, output = command.wait(10)
    assert code == 0, output[-3000:]
    return seen


def is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp2-vllm": ({"kind": "fsdp2"}, {"kind": "vllm", "tp": 2, "endpoint": {"port": 18761}}),
    "megatron-vllm": ({"kind": "megatron", "tp": 2}, {"kind": "vllm"}),
    "deepspeed-sglang": ({"kind": "deepspeed"}, {"kind": "sglang", "tp": 2}),
}
"""Strategies of trainer and engine. The trainer has two ranks; the engine has a device, or two."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What was seen of a run of two steps, which ended well."""

    listening: set[tuple[str, str]]
    """(process, address) of every TCP socket that took connections at any time."""
    records: list[dict[str, Any]]


def _parameter(name: str) -> Any:
    engine = status(RUNS[name][1]["kind"])
    missing = pytest.mark.skipif(not engine.ok, reason=engine.advice)
    return pytest.param(name, marks=[pytest.mark.xdist_group(name), pytest.mark.slow, missing])


@pytest.fixture(scope="module", params=[_parameter(name) for name in RUNS])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    strategy, engine = RUNS[request.param]
    optimizer = {"lr": 1e-3, "warmup_steps": 2}
    folder = tmp_path_factory.mktemp("task")
    path = write_task(
        folder,
        pools={"one": "0", "two": "0-1"},
        cluster={"devices_per_node": 2},
        actor_train={"pool": "two", "optimizer": optimizer, "strategy": strategy},
        actor_infer={"pool": "two" if engine.get("tp") else "one", "strategy": engine},
        reference=None,
        algorithm={},
        validation={},
        checkpoint={"every": None},
        max_steps=2,
        track={"tensorboard": False, "verify_weights": "always"},
    )
    seen = listeners_of_a_run(path)
    return Ran(seen, read_records(folder / "out" / "metrics.jsonl"))


def test_a_run_on_one_machine_listens_on_its_loopback_interface_alone(ran: Ran) -> None:
    kinds = {name for name, _ in ran.listening}
    # The look was a real one: Ray's server, its agents, the trainer's and the engine's processes.
    assert any("gcs_server" in name for name in kinds), kinds
    assert any("actor_train" in name for name in kinds), kinds
    assert any("actor_infer" in name for name in kinds), kinds
    assert not [each for each in sorted(ran.listening) if not is_loopback(each[1])]


def test_an_engine_agrees_with_the_trainer_whose_weights_it_got(ran: Ran) -> None:
    steps = [record for record in ran.records if "mismatch/logprob_abs_max" in record]
    assert len(steps) == 2
    assert all(record["mismatch/logprob_abs_max"] < 1e-4 for record in steps)
