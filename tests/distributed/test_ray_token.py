"""A run's own Ray takes commands from the run alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from roll.distributed.on_ray.resources import ResourceManager
from roll.distributed.on_ray.token import found_token, own_token
from tests.distributed.small_workers import ROOT


def own_address() -> str:
    """An address by which other machines know this one."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return str(each.address)
    pytest.fail("this machine has no address but the loopback interface's")


def intrude(address: str, path: Path, **known: str) -> str:
    """What a process without the run's environment meets at `address`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "ROLL_"))}
    env |= {
        "HOME": str(path.parent),  # where Ray looks for a token, too
        # Else it would take 127.0.0.1 for the machine's other address, where nobody listens.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    told = subprocess.run(
        [sys.executable, "-m", "tests.distributed.stranger", address, str(path)],
        cwd=ROOT,
        env=env | known,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return told.stdout.strip() or told.stderr[-2000:]


@pytest.mark.slow
def test_a_stranger_is_refused_on_every_address_of_the_machine(
    manager: ResourceManager, tmp_path: Path
) -> None:
    port = ray.get_runtime_context().gcs_address.rpartition(":")[2]
    intrusion = tmp_path / "intrusion"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((own_address(), int(port)), timeout=5)
    inside = f"127.0.0.1:{port}"
    guess = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    for known in ({}, guess):
        assert intrude(inside, intrusion, **known) == "refused for want of the token"
    assert not intrusion.exists()
    # With the run's own environment the same program gets in, so it is the token that kept it out.
    own = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    assert intrude(inside, intrusion, **own) == "intruded"


def test_every_run_has_a_token_of_its_own_and_gives_the_environment_back() -> None:
    before = dict(os.environ)
    seen = set()
    for _ in range(2):
        with own_token():
            assert os.environ["RAY_AUTH_MODE"] == "token"
            seen.add(os.environ["RAY_AUTH_TOKEN"])
    assert len(seen) == 2
    assert min(map(len, seen)) == 64
    assert dict(os.environ) == before


def test_the_token_of_a_cluster_is_found_where_ray_looks(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert found_token({"RAY_AUTH_TOKEN": "secret"}) == "RAY_AUTH_TOKEN"
    assert found_token({"RAY_AUTH_TOKEN_PATH": str(file)}) is None
    file.write_text("secret")
    assert found_token({"RAY_AUTH_TOKEN_PATH": str(file)}) == str(file)
