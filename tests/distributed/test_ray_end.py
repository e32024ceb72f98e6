"""A Ray whose raylet is stopped is ended all the same; `ray.shutdown` alone would wait for ever. No
other user can enter its folder. A Ray that does not start is given up.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import os, signal, stat, sys
import ray
from roll.distributed.on_ray import start as ray_start
from roll.distributed.on_ray.environment import prepare_ray
from roll.distributed.on_ray.token import own_token
from roll.platform.processes import process_state

class Actor:
    def answer(self):
        return 1

prepare_ray()
with own_token():
    ray_start.start(num_cpus=1, num_gpus=0)
    actor = ray.remote(num_cpus=0)(Actor).remote()
    ray.get(actor.answer.remote())
    folder = ray._private.worker._global_node.get_session_dir_path()
    mode = stat.S_IMODE(os.stat(folder).st_mode)  # also after a worker has joined
    daemons = ray_start.daemons()
    raylet = next(daemon.pid for daemon in daemons if "raylet" in daemon.name)
    os.kill(raylet, signal.SIGSTOP)
    if sys.argv[1] == "before the end":
        ray_start.end()
    else:
        ray_start.shut_down(daemons, 2.0)
left = [process_state(daemon.pid) for daemon in daemons]
if mode != 0o700:
    sys.exit(f"{folder} is open to others: {mode:o}")
sys.exit(0 if not any(left) else f"{left} are left")
"""

STALLED = """
import sys, threading, time
import psutil
from roll.core.errors import WaitTimeoutError
from roll.distributed.on_ray import start as ray_start
from roll.distributed.on_ray.token import own_token

def stop_raylet():
    while not (found := [p for p in psutil.Process().children(True) if p.name() == "raylet"]):
        time.sleep(0.002)
    found[0].suspend()

threading.Thread(target=stop_raylet, daemon=True).start()
try:
    with own_token():
        ray_start.start(num_cpus=1, num_gpus=0)
except WaitTimeoutError as error:
    print(error)
ray_start.end()
"""


@pytest.mark.parametrize("stopped", ["before the end", "as it ends"])
def test_a_stopped_raylet_does_not_hold_the_end(stopped: str) -> None:
    command = [sys.executable, "-c", CODE, stopped]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_ray_that_does_not_start_is_told_with_what_to_do() -> None:
    command = [sys.executable, "-c", STALLED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("waited 30 s for Ray to start on this machine")
    assert "give the same command again" in done.stdout
